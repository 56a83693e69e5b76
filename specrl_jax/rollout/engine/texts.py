"""Texts of rows that start, packed on the host: prompts, own tokens and drafts.

A chunk stores every distinct prefix once. If chunks are computed in windows, a chunk also copies
what it shares with the previous one (`TextPaths`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.packing import PACKINGS, Sequences, TextSet, pack
from specrl_jax.rollout.engine.buckets import Buckets, TextShape
from specrl_jax.rollout.engine.text_states import TextStates
from specrl_jax.sharding import reshard


class PackedTexts(NamedTuple):
    """Tokens of rows that start, packed; int32 NumPy arrays except for `before`.

    Each of X shards counts its own sequences and rows. A shard's rows are in the order of their
    chunks; the first takes the first free slot of the running batch, and so on.
    """

    sequences: Sequences  # [M, m, T]: M chunks of m sequences
    count: np.ndarray  # [], number of chunks with tokens, the first ones
    blocks: np.ndarray  # [M], blocks of rows in each chunk, on the shard with the most
    first_row: np.ndarray  # [X, M + 1], where each chunk's rows start in `shard_row_ids`
    shard_row_ids: np.ndarray  # [X, n], among the shard's rows of the rollout
    draft_ends: np.ndarray  # [X, n], response length up to which a row's draft is verified
    nodes: np.ndarray  # [X, n, S], slot of each token among its chunk's m / X · T, then -1
    # [M, m, T], slot of the previous chunk, on the same shard, with the same text up to here; -1:
    # none. None if whole chunks are computed, and then so is:
    copied: np.ndarray | None
    before: TextStates | None  # of the previous call's last chunk

    def on_mesh(self) -> "PackedTexts":
        """Return them laid out over the mesh: each batch shard has its own."""
        return PackedTexts(
            sequences=Sequences(*(reshard(x, None, "batch", None) for x in self.sequences)),
            count=reshard(self.count),
            blocks=reshard(self.blocks, None),
            first_row=reshard(self.first_row, "batch", None),
            shard_row_ids=reshard(self.shard_row_ids, "batch", None),
            draft_ends=reshard(self.draft_ends, "batch", None),
            nodes=reshard(self.nodes, "batch", None, None),
            copied=None if self.copied is None else reshard(self.copied, None, "batch", None),
            before=self.before,
        )


class TextPaths:
    """Slots of texts that a shard's previous chunk has computed."""

    def __init__(self):
        self.texts = TextSet()

    def copy_into(self, copied: np.ndarray, texts: list[np.ndarray], paths: list[np.ndarray]):
        """Write to `copied` [T] which slots the next chunk copies; then switch to that chunk.

        texts: int32 [n] each, tokens that are always computed. paths: int32 [>= n] each, slots.
        """
        following = TextSet()
        for text, path in zip(texts, paths, strict=True):
            known, slots = self.texts.nearest(text)
            if known:
                copied[path[:known]] = slots[:known]
            following.add(text, path)
        self.texts = following


class Texts(NamedTuple):
    """Texts of k rows that start, on the host."""

    tokens: np.ndarray  # int32 [k, P + R], right-padded: prompt, own tokens, draft
    lens: np.ndarray  # int [k], of `tokens`
    known_lens: np.ndarray  # int [k], of prompt and own tokens
    shard_row_ids: list[np.ndarray]  # int, an array per shard, as in `PackedTexts`; k in all
    draft_ends: np.ndarray  # int32 [k]

    def of_shards(self) -> Iterator["Texts"]:
        """Yield each shard's own."""
        start = 0
        for shard_row_ids in self.shard_row_ids:
            own = slice(start, start + len(shard_row_ids))
            start = own.stop
            arrays = (self.tokens[own], self.lens[own], self.known_lens[own])
            yield Texts(*arrays, [shard_row_ids], self.draft_ends[own])


def pack_texts(buckets: Buckets, texts: Texts, before: Sequence[TextPaths] = ()) -> PackedTexts:
    """Pack the rows that start, in the shape with the fewest slots; its `before` is None.

    before: the paths in each shard's previous chunk, updated by this call; empty: chunks copy
    nothing.
    """
    longest = max(texts.lens, default=0)
    shapes = [shape for shape in buckets.text_shapes if longest <= shape.slots]
    packed = [pack_shape(buckets, shape, texts, before) for shape in shapes]
    return min(packed, key=lambda x: int(x.count) * x.sequences.tokens[0].size)


def pack_shape(
    buckets: Buckets, shape: TextShape, texts: Texts, before: Sequence[TextPaths]
) -> PackedTexts:
    """Pack the rows that start in one shape; arguments and result: as for `pack_texts`."""
    length, sequences, chunks = shape
    shards = len(texts.shard_row_ids)
    most = buckets.sizes[0] // shards + buckets.block_rows  # so that a block with a row is inside
    first_row = np.zeros((shards, chunks + 1), np.int32)
    shard_row_ids = np.zeros((shards, most), np.int32)
    draft_ends = np.zeros_like(shard_row_ids)
    nodes = np.full((shards, most, texts.tokens.shape[1]), -1, np.int32)
    copied = np.full((chunks, shards, length), -1, np.int32) if before else None
    parts = []
    for shard, own in enumerate(texts.of_shards()):
        packed, paths = pack(own.tokens, own.lens, length, PACKINGS["trie"])
        parts.append(packed)
        chunk = np.array([path[0] for path in paths], int) // (sequences * length)
        paths = [path - at * sequences * length for path, at in zip(paths, chunk)]
        order = np.lexsort((-own.draft_ends, chunk))
        first_row[shard] = np.searchsorted(chunk[order], np.arange(chunks + 1))
        filled = slice(0, len(order))
        shard_row_ids[shard, filled] = own.shard_row_ids[0][order]
        draft_ends[shard, filled] = own.draft_ends[order]
        for position, row in enumerate(order.tolist()):
            nodes[shard, position, : len(paths[row])] = paths[row]
        if copied is not None:
            _plan_copies(copied[:, shard], before[shard], own, paths, chunk)
    in_chunks = np.diff(first_row, axis=1)
    count = int(np.flatnonzero(in_chunks.any(axis=0)).max(initial=-1) + 1)
    # Chunks without tokens stay zeros: memory that is never written costs next to nothing.
    whole = Sequences(
        *(np.zeros((chunks, shards * sequences, length), np.int32) for _ in Sequences._fields)
    )
    for shard, part in enumerate(parts):
        own = slice(shard * sequences, (shard + 1) * sequences)
        for array, values in zip(whole, part.padded(count * sequences)):
            array[:count, own] = values.reshape(count, sequences, length)
    return PackedTexts(
        sequences=whole,
        count=np.int32(count),
        blocks=(-(-in_chunks // buckets.block_rows)).max(axis=0).astype(np.int32),
        first_row=first_row,
        shard_row_ids=shard_row_ids,
        draft_ends=draft_ends,
        nodes=nodes,
        copied=copied,
        before=None,
    )


def _plan_copies(
    copied: np.ndarray,
    before: TextPaths,
    own: Texts,
    paths: list[np.ndarray],
    chunk: np.ndarray,
) -> None:
    """Write to `copied` [M, T] what a shard's chunks copy; paths, chunk: of its k rows."""
    if not len(chunk):
        copied[:] = np.arange(copied.shape[1])  # they stay for a later call
    for number in np.unique(chunk):
        inside = np.flatnonzero(chunk == number).tolist()
        known = [own.tokens[row, : own.known_lens[row]] for row in inside]
        before.copy_into(copied[number], known, [paths[row] for row in inside])
