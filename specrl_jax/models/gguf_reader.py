"""A reader of GGUF files that takes a moment for a large vocabulary: gguf's takes a minute."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType  # noqa: TID253  (imported where a file is read)


class FastReader(GGUFReader):
    """gguf's reader, which reads arrays of numbers at once, and arrays of texts in a plain loop."""

    def __init__(self, path: Path):
        super().__init__(str(path))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        raw_kind = self._get(orig_offs, np.uint32)
        raw_count = self._get(orig_offs + 4, np.uint64)
        kind = GGUFValueType(int(raw_kind[0]))
        count = int(raw_count[0])
        begin = orig_offs + 12
        head = [raw_kind, raw_count]
        if kind in self.gguf_scalar_to_np:
            values = self._get(begin, self.gguf_scalar_to_np[kind], count)
            return 12 + values.nbytes, [*head, values], [2], [GGUFValueType.ARRAY, kind]
        if kind != GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        texts, end = self._texts(begin, count)
        lengths = np.array([x.nbytes for x in texts], np.uint64)
        data = list(range(3, 3 + count))
        return end - orig_offs, [*head, lengths, *texts], data, [GGUFValueType.ARRAY, kind]

    def _texts(self, begin: int, count: int) -> tuple[list[memoryview], int]:
        """Return the bytes of so many texts, and the offset after the last of them."""
        whole: Any = memoryview(self.data)
        texts = []
        for _ in range(count):
            (length,) = struct.unpack_from("<Q", whole, begin)
            begin += 8
            texts.append(whole[begin : begin + length])
            begin += length
        return texts, begin
