"""Packed tries: rows of tokens → sequences of a fixed length that hold every distinct prefix once.

The responses of a group share their prompt, and often more: they form a trie. A trie lies in a
sequence depth first. One integer per token, where its subtree ends, says who sees whom: the token
in slot i sees slot j where j <= i < ends[j]. These are its ancestors and itself. Rows that share
nothing lie one after the other. After Prefix Grouper (arXiv 2506.05433), which shares prompts.

NumPy, on the host: takes tokens in, gives arrays out, knows no model.
"""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Packing:
    """One choice of `config.updates.packing`."""

    share: bool  # rows share their common beginnings
    fill: bool  # a sequence holds as many rows as it has slots for; else one
    rows: int  # slots of a sequence, in rows of the longest length


PACKINGS: dict[str, Packing] = {
    "trie": Packing(share=True, fill=True, rows=2),
    "sequences": Packing(share=False, fill=True, rows=2),
    "rows": Packing(share=False, fill=False, rows=1),
}


class Sequences(NamedTuple):
    """S sequences of T slots; int32, of NumPy, or of JAX on the devices.

    Slots without a token hold 0 and see only themselves.
    """

    tokens: np.ndarray  # [S, T]
    depths: np.ndarray  # [S, T], the token's position in its rows, and for the model
    ends: np.ndarray  # [S, T], the slot after the token's subtree
    parents: np.ndarray  # [S, T], the slot of the token before; of a first token: its own

    def padded(self, sequences: int) -> "Sequences":
        """Append empty sequences up to `sequences` in all."""
        own = np.tile(np.arange(self.tokens.shape[1], dtype=np.int32), (sequences, 1))
        padded = Sequences(tokens=own * 0, depths=own * 0, ends=own + 1, parents=own)
        for array, values in zip(padded, self):
            array[: len(values)] = values
        return padded


def pack(
    tokens: np.ndarray, lens: np.ndarray, length: int, packing: Packing
) -> tuple[Sequences, np.ndarray]:
    """Pack rows into sequences of `length` slots by first fit, longest first.

    A trie longer than a sequence is cut between rows; each piece repeats the path that it shares.

    tokens: int32 [B, L], right-padded.
    lens: int [B] <= length; rows of length 0 are left out.

    Returns the sequences and the nodes int32 [B, L]: sequence · T + slot of each row's tokens, -1
    after a row's end.
    """
    order = np.flatnonzero(lens)
    order = order[_depth_first(tokens[order], lens[order])]
    nodes = np.full(tokens.shape, -1, np.int32)
    if len(order):
        nodes[order] = _nodes(tokens[order], lens[order], length, packing)
    sequences = int(nodes.max(initial=-1)) // length + 1
    slots = np.arange(sequences * length, dtype=np.int32)
    packed = np.zeros_like(slots)
    depths = np.zeros_like(slots)
    ends = slots + 1
    parents = slots + 0

    rows, depth = np.nonzero(nodes >= 0)
    node = nodes[rows, depth]  # of every token of every row: shared ones are written again
    packed[node] = tokens[rows, depth]
    depths[node] = depth
    last = nodes[rows, lens[rows] - 1]
    np.maximum.at(ends, node, last + 1)
    parents[node] = np.where(depth > 0, nodes[rows, depth - 1], node)
    starts = slots // length * length
    tries = Sequences(
        tokens=packed.reshape(sequences, length),
        depths=depths.reshape(sequences, length),
        ends=(ends - starts).reshape(sequences, length),
        parents=(parents - starts).reshape(sequences, length),
    )
    return tries, nodes


def _nodes(tokens: np.ndarray, lens: np.ndarray, length: int, packing: Packing) -> np.ndarray:
    """Return the nodes of rows in depth-first order, see `pack`."""
    shared = _shared(tokens, lens) if packing.share else np.zeros_like(lens)
    first = _first_rows(lens, shared, length)  # of a piece
    shared[first] = 0
    # The tokens that a row does not share lie together, after those of the row before it.
    before = np.cumsum(lens - shared) - (lens - shared)
    piece = np.cumsum(first) - 1
    sizes = np.diff(np.append(before[first], np.sum(lens - shared)))
    sequence = np.arange(len(sizes))  # one each
    offset = np.zeros(len(sizes), int)
    if packing.fill:
        sequence, offset = _first_fit(sizes, length)
    start = (sequence * length + offset - before[first])[piece] + before
    # A row shares its token at depth d with the last row so far that brought a token there.
    depth = np.arange(tokens.shape[1])
    brings = np.where(shared[:, None] <= depth, np.arange(len(lens))[:, None], 0)
    brings = np.maximum.accumulate(brings, axis=0)
    return np.where(depth < lens[:, None], start[brings] + depth - shared[brings], -1)


def _depth_first(tokens: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Return the rows' order by their tokens, a row before those that go on from it."""
    inside = np.arange(tokens.shape[1]) < lens[:, None]
    keys = np.where(inside, tokens + 1, 0).astype(">i4")  # as bytes they compare like the numbers
    return np.array(sorted(range(len(lens)), key=lambda row: keys[row].tobytes()), int)


def _shared(tokens: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """Count tokens [B] that each row shares with the one before it, in depth-first order."""
    differs = tokens[1:] != tokens[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), tokens.shape[1])
    return np.concatenate([[0], np.minimum(common, np.minimum(lens[1:], lens[:-1]))])


def _first_rows(lens: np.ndarray, shared: np.ndarray, length: int) -> np.ndarray:
    """Return bool [B], rows that begin a piece: they share nothing, or it would be too long."""
    first = np.zeros(len(lens), bool)
    size = 0
    for row, (whole, known) in enumerate(zip(lens.tolist(), shared.tolist())):
        size += whole - known
        if not known or size > length:
            first[row] = True
            size = whole
    return first


def _first_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequence and offset of each piece: the longest first, each where it fits first."""
    used = np.zeros(len(sizes), int)
    sequence = np.zeros(len(sizes), int)
    offset = np.zeros(len(sizes), int)
    for piece in np.argsort(-sizes, kind="stable"):
        sequence[piece] = np.argmax(used + sizes[piece] <= length)
        offset[piece] = used[sequence[piece]]
        used[sequence[piece]] += sizes[piece]
    return sequence, offset
