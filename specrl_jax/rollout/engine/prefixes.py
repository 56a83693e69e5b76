"""Packs the rows that begin for `extend`: their prompts, held tokens and drafts, each prefix once.

On the host: takes tokens in, gives arrays of shapes that the configuration settles.
"""

from typing import NamedTuple

import numpy as np

from specrl_jax.packing import PACKINGS, pack
from specrl_jax.rollout.engine.buckets import Buckets

_TRIE = PACKINGS["trie"]


class Prefixes(NamedTuple):
    """Tokens of rows that begin, packed; int32 arrays of NumPy.

    Of X shards each counts its own sequences and rows. A shard's rows lie in the order of the
    chunks that hold them; the first takes the first free place of the running batch, and so on.
    """

    tokens: np.ndarray  # [M, m, T], chunks of sequences, as `packing.Sequences`
    depths: np.ndarray  # [M, m, T]
    ends: np.ndarray  # [M, m, T]
    parents: np.ndarray  # [M, m, T]
    count: np.ndarray  # [], chunks that hold tokens: the first ones
    blocks: np.ndarray  # [M], blocks of rows in each chunk, of the shard that has most
    first_row: np.ndarray  # [X, M + 1], of each chunk
    rows: np.ndarray  # [X, n], place among the shard's rows of the rollout
    draft_ends: np.ndarray  # [X, n], response length up to which a row's draft is verified
    nodes: np.ndarray  # [X, n, S], slot of each token in its chunk's [m / X · T], -1 after them


def pack_prefixes(
    buckets: Buckets,
    tokens: np.ndarray,
    lens: np.ndarray,
    rows: list[np.ndarray],
    draft_ends: np.ndarray,
) -> Prefixes:
    """Pack the rows that begin.

    tokens: int32 [k, P + R], right-padded, of which `lens` count: prompt, held tokens, draft. rows:
    int, of each shard, as in `Prefixes`; together k, in the order of `tokens`. draft_ends: int32
    [k].
    """
    chunks = buckets.chunks
    sequences = buckets.chunk_sequences  # of a shard
    length = buckets.sequence_slots
    block = buckets.block_rows
    most = buckets.rows[0] // len(rows) + block  # so that a block with a row lies inside
    first_row = np.zeros((len(rows), chunks + 1), np.int32)
    index = np.zeros((len(rows), most), np.int32)
    end_lens = np.zeros_like(index)
    nodes = np.full((len(rows), most, tokens.shape[1]), -1, np.int32)
    parts = []
    start = 0
    for shard, own_rows in enumerate(rows):
        own = slice(start, start + len(own_rows))
        start = own.stop
        packed, own_nodes = pack(tokens[own], lens[own], length, _TRIE)
        parts.append(packed.padded(chunks * sequences))
        chunk = own_nodes[:, 0] // (sequences * length)
        order = np.lexsort((-draft_ends[own], chunk))
        first_row[shard] = np.searchsorted(chunk[order], np.arange(chunks + 1))
        filled = slice(0, len(order))
        index[shard, filled] = own_rows[order]
        end_lens[shard, filled] = draft_ends[own][order]
        of_chunk = own_nodes - (chunk * sequences * length)[:, None]
        nodes[shard, filled] = np.where(own_nodes < 0, -1, of_chunk)[order]
    # [X · M · m / X, T] → [M, m, T], each shard's part of a chunk in its place.
    arrays = []
    for name in ("tokens", "depths", "ends", "parents"):
        by_shard = [getattr(x, name).reshape(chunks, sequences, length) for x in parts]
        arrays.append(np.concatenate(by_shard, axis=1))
    in_chunks = np.diff(first_row, axis=1)
    return Prefixes(
        *arrays,
        count=np.int32(np.flatnonzero(in_chunks.any(axis=0)).max(initial=-1) + 1),
        blocks=(-(-in_chunks // block)).max(axis=0).astype(np.int32),
        first_row=first_row,
        rows=index,
        draft_ends=end_lens,
        nodes=nodes,
    )
