"""Packed tries: rows of tokens → sequences of fixed length that store each distinct prefix once.

The responses of a group share their prompt, and often more: they form a trie, which is stored in a
sequence in depth-first order. One integer per token, the end of its subtree, gives the mask: the
token in slot i sees slot j if j <= i < ends[j], so its ancestors and itself. Rows that share
nothing follow one another. After Prefix Grouper (arXiv 2506.05433), which shares prompts.

NumPy, on the host: tokens in, arrays out, independent of any model.
"""

import bisect
import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Packing:
    """One choice of `config.updates.packing`."""

    share: bool  # rows share their common prefixes
    fill: bool  # a sequence takes as many rows as fit; otherwise one
    rows_per_sequence: int  # rows of maximum length that fit in a sequence


PACKINGS: dict[str, Packing] = {
    "trie": Packing(share=True, fill=True, rows_per_sequence=2),
    "sequences": Packing(share=False, fill=True, rows_per_sequence=2),
    "rows": Packing(share=False, fill=False, rows_per_sequence=1),
}


class Sequences(NamedTuple):
    """S sequences of T slots; int32, NumPy or JAX arrays.

    Slots without a token contain 0 and see only themselves.
    """

    tokens: np.ndarray  # [S, T]
    depths: np.ndarray  # [S, T], the token's position in its rows, also for the model
    ends: np.ndarray  # [S, T], the slot after the token's subtree
    parents: np.ndarray  # [S, T], the slot of the preceding token; a first token: its own

    def padded(self, sequences: int, computed: int | None = None) -> "Sequences":
        """Pad with empty sequences to `sequences` in all; those from `computed` on are all zeros,
        as they are never computed; None: all are computed."""
        slots = np.arange(self.tokens.shape[1], dtype=np.int32)
        padded = Sequences(*(np.zeros((sequences, len(slots)), np.int32) for _ in self))
        for array, values in zip(padded, self):
            array[: len(values)] = values
        padded.ends[len(self.tokens) : computed] = slots + 1
        padded.parents[len(self.tokens) : computed] = slots
        return padded


def pack(
    tokens: np.ndarray, lens: np.ndarray, length: int, packing: Packing
) -> tuple[Sequences, list[np.ndarray]]:
    """Pack rows into sequences of `length` slots by first fit, longest first.

    A trie longer than a sequence is cut between rows; each piece repeats the path it shares.
    The work grows with the tokens that exist: no array is as large as the padded rows.

    tokens: int32 [B, L], right-padded.
    lens: int [B] <= length; rows of length 0 are left out.

    Returns the sequences, and for each row its tokens' nodes, int32 [lens[b]]: sequence · T + slot.
    """
    nodes = [np.empty(0, np.int32)] * len(lens)
    rows = [tokens[row, :size] for row, size in enumerate(lens)]
    keys = [_key(row) for row in rows]
    order = sorted(np.flatnonzero(lens).tolist(), key=keys.__getitem__)
    shared = np.zeros(len(order), int)
    if packing.share:
        pairs = itertools.pairwise(order)
        shared[1:] = [_common(rows[before], rows[row]) for before, row in pairs]
    starts, shared = _assign_nodes(lens[order], shared, length, packing)

    sequences = int((starts + lens[order] - shared).max(initial=0) - 1) // length + 1
    slots = np.arange(sequences * length, dtype=np.int32)
    packed = Sequences(tokens=slots * 0, depths=slots * 0, ends=slots + 1, parents=slots.copy())
    path = slots[:0]
    for row, first, known in zip(order, starts.tolist(), shared.tolist()):
        # The first `known` tokens are those of the previous row, the rest are contiguous.
        size = len(rows[row])
        last = first + size - known
        own = slice(first, last)
        path = np.concatenate([path[:known], slots[own]])
        nodes[row] = path
        if last == first:
            continue
        packed.tokens[own] = rows[row][known:]
        packed.depths[own] = slots[known:size]
        packed.parents[own] = slots[own] - 1
        packed.parents[first] = path[known - 1] if known else first
        packed.ends[path] = last

    whole = Sequences(*(x.reshape(sequences, length) for x in packed))
    begins = (np.arange(sequences, dtype=np.int32) * length)[:, None]
    return whole._replace(ends=whole.ends - begins, parents=whole.parents - begins), nodes


class TextSet:
    """Set of texts, each with a value, in trie order."""

    def __init__(self):
        self._keys: list[bytes] = []  # sorted
        self._values: dict[bytes, Any] = {}

    def add(self, text: np.ndarray, value: Any = None) -> int:
        """Add a text, int32 [n]; return how many of its n prefixes are new."""
        key = _key(text)
        known, _ = self.nearest(text)
        if key not in self._values:
            bisect.insort(self._keys, key)
        self._values[key] = value
        return len(text) - known

    def nearest(self, text: np.ndarray) -> tuple[int, Any]:
        """Return the longest common prefix with any text of the set, and that text's value."""
        key = _key(text)
        if key in self._values:
            return len(text), self._values[key]
        place = bisect.bisect_left(self._keys, key)
        best = (0, None)
        # The longest common prefix is always with a neighbour in sorted order.
        for other in self._keys[max(place - 1, 0) : place + 1]:
            common = _common(text, np.frombuffer(other, ">i4"))
            if common > best[0]:
                best = (common, self._values[other])
        return best


def _key(text: np.ndarray) -> bytes:
    """Return a text as bytes that sort as its tokens do: a text sorts before its continuations."""
    return text.astype(">i4").tobytes()


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _assign_nodes(
    lens: np.ndarray, shared: np.ndarray, length: int, packing: Packing
) -> tuple[np.ndarray, np.ndarray]:
    """Return the node of each row's first own token, int [B], and how many before it are shared.

    lens, shared: int [B], rows in depth-first order; `shared` counts tokens in common with the
    previous row.
    """
    first = _first_rows(lens, shared, length)  # of a piece
    shared = np.where(first, 0, shared)
    # The tokens that a row does not share are contiguous, after those of the previous row.
    before = np.cumsum(lens - shared) - (lens - shared)
    piece = np.cumsum(first) - 1
    sizes = np.diff(np.append(before[first], np.sum(lens - shared)))
    sequence = np.arange(len(sizes))  # one each
    offset = np.zeros(len(sizes), int)
    if packing.fill:
        sequence, offset = _first_fit(sizes, length)
    return (sequence * length + offset - before[first])[piece] + before, shared


def _first_rows(lens: np.ndarray, shared: np.ndarray, length: int) -> np.ndarray:
    """Mark the rows that start a piece, bool [B]: they share nothing, or it would be too long."""
    first = np.zeros(len(lens), bool)
    size = 0
    for row, (whole, known) in enumerate(zip(lens.tolist(), shared.tolist())):
        size += whole - known
        if not known or size > length:
            first[row] = True
            size = whole
    return first


def _first_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each piece's sequence and offset: longest first, each where it first fits."""
    used = np.zeros(len(sizes), int)
    sequence = np.zeros(len(sizes), int)
    offset = np.zeros(len(sizes), int)
    for piece in np.argsort(-sizes, kind="stable"):
        sequence[piece] = np.argmax(used + sizes[piece] <= length)
        offset[piece] = used[sequence[piece]]
        used[sequence[piece]] += sizes[piece]
    return sequence, offset
