"""The few program shapes of a rollout: rows, cache lengths, verification widths.

Worked example: 64 rows in groups of 4, 32 response slots, 8 prompt slots, 4 row buckets, 2 cache
lengths, steps of up to 4 tokens, a mesh that cuts the batch in 2: rows (64, 32, 16, 8), admissions
(64, 32, 16, 8), responses (16, 32), slots 8 + 16 and 8 + 32, one verification width, 32 (more only
where they are 32 apart).
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

NARROW = 32  # tokens; verification widths further apart than that are worth a program


@dataclasses.dataclass(frozen=True)
class Buckets:
    num_rows: int  # of the largest bucket, whole groups on every shard
    prompt_slots: int
    response_slots: int
    row_buckets: int
    cache_lengths: int
    multiple: int = 1  # shards of the batch
    group_size: int = 1
    max_width: int = 1  # of a decode step
    verify_width: int = 0  # of a verification pass at most, 0: a response

    @functools.cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows of a batch, descending, each half the last: multiples of `multiple`."""
        return tuple(sorted(self._halved, reverse=True))

    @functools.cached_property
    def admissions(self) -> tuple[int, ...]:
        """Rows that begin together, descending: whole groups on each shard."""
        whole = self.multiple * self.group_size
        return tuple(sorted({max(n // whole, 1) * whole for n in self._halved}, reverse=True))

    @property
    def refill(self) -> int:
        """Rows that must be free before others begin: a quarter, so that moves are few."""
        fits = [n for n in self.admissions if n <= self.rows[0] // 4]
        return max(fits, default=self.admissions[-1])

    @functools.cached_property
    def responses(self) -> tuple[int, ...]:
        """Response tokens for which there is a cache, ascending."""
        halved = (-(-self.response_slots // 2**i) for i in range(self.cache_lengths))
        return tuple(sorted({max(n, 1) for n in halved}))

    @functools.cached_property
    def verify(self) -> tuple[int, ...]:
        """Widths of a verification pass, ascending."""
        widest = min(self.verify_width or self.response_slots, self.response_slots)
        parts = min(max(widest // NARROW, 1), 4)
        return tuple(-(-widest * part // parts) for part in range(1, parts + 1))

    @functools.cached_property
    def _halved(self) -> set[int]:
        shards = (-(-self.num_rows // 2**i // self.multiple) for i in range(self.row_buckets))
        return {max(n, 1) * self.multiple for n in shards}

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a decode step: 1, 2, 4, ... and the widest."""
        widest = self.max_width
        return tuple(sorted({min(2**i, widest) for i in range(widest.bit_length() + 1)}))

    def rows_for(self, count: int) -> int:
        """The smallest bucket that holds `count` rows."""
        return min(rows for rows in self.rows if rows >= count)

    def rows_for_shards(self, counts: Sequence[int] | np.ndarray) -> int:
        """The smallest bucket that holds so many rows [shards] on each shard."""
        return self.rows_for(int(np.max(counts)) * self.multiple)

    def rows_below(self, rows: int) -> int:
        """The next smaller bucket, 0 below the smallest."""
        return max((r for r in self.rows if r < rows), default=0)

    def response_for(self, length: int) -> int:
        """The shortest of `responses` that holds `length` tokens, or the longest."""
        return min((r for r in self.responses if r >= length), default=self.responses[-1])

    def slots(self, response: int) -> int:
        """Cache slots for `response` tokens: none after them for candidates, which plain steps
        would have to read too, but enough for the widest step's own tokens."""
        return self.prompt_slots + max(response, self.max_width)

    def slots_for(self, length: int) -> int:
        """Slots of the shortest cache that holds `length` tokens, or of the longest."""
        return self.slots(self.response_for(length))

    def admission(self, waiting: int, free: int) -> int:
        """Rows that begin together: as few as hold all that wait, as many as are free, or 0."""
        fits = [n for n in self.admissions if n <= free]
        enough = [n for n in fits if n >= waiting]
        return min(enough) if enough else max(fits, default=0)

    def verify_width_for(self, longest: int) -> int:
        """The narrowest verification that takes in `longest` draft tokens, or the widest."""
        return min((w for w in self.verify if w >= longest), default=self.verify[-1])

    def verify_slots(self, width: int, longest: int) -> int:
        """Cache slots to verify drafts of at most `longest` tokens, `width` of them at a time: a
        pass begins after what a row has."""
        if longest <= width:
            return self.prompt_slots + width
        return self.prompt_slots + self.response_for(longest) + width
