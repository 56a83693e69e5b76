"""Packs prompts and drafts of rows that hold nothing, for one pass over their distinct prefixes.

On the host: takes prompts and draft tokens in, gives the arrays of `decode.verify_trie` out.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from specrl_jax.packing import PACKINGS, pack
from specrl_jax.sharding import shards

_TRIE = PACKINGS["trie"]


class DraftTries(NamedTuple):
    """S sequences of T slots, see `packing.Sequences`; int32."""

    tokens: np.ndarray  # [S, T]
    depths: np.ndarray  # [S, T]
    ends: np.ndarray  # [S, T]
    # [b, P + W], sequence · T + slot of each row's tokens, -1 after them; a row's shard counts its
    # own sequences.
    nodes: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and slots."""
        return self.tokens.shape


def sequence_slots(slots: int) -> int:
    """Slots of a packed sequence for rows of at most `slots` tokens."""
    return _TRIE.rows * slots


def sequence_counts(size: int) -> list[int]:
    """Numbers of sequences that occur for `size` rows: halves, and three quarters of these, in
    multiples of the batch's shards."""
    pieces = shards("batch")
    parts = itertools.product(range(2, size.bit_length() + 2), (3, 4))
    return [-(-size * part // 2**i // pieces) * pieces for i, part in parts]


def saves_work(shape: tuple[int, int], size: int, width: int, group: int, prompts: int) -> bool:
    """Return whether tries of `shape` hold fewer tokens than a prefill of `prompts` slots for each
    group of `size` rows and a pass of `width` tokens over the rows."""
    return math.prod(shape) < size * width + size // group * prompts


def pack_drafts(
    prompts: np.ndarray,
    prompt_lens: np.ndarray,
    drafts: np.ndarray,
    lens: np.ndarray,
    size: int,
    places: np.ndarray | None = None,
) -> DraftTries:
    """Tries of n rows; few numbers of sequences occur, each a multiple of the batch's shards. Each
    shard has the sequences of its own rows.

    prompts: int32 [n, P], right-padded. drafts: int32 [n, W], of which `lens` count. size: rows of
    the bucket, at least n. places: int [n], of the rows in the bucket (None: the first n); the
    others hold nothing.
    """
    count, width = drafts.shape
    places = np.arange(count) if places is None else places
    tokens = np.pad(prompts, ((0, 0), (0, width)))
    np.put_along_axis(tokens, prompt_lens[:, None] + np.arange(width), drafts, axis=1)
    slots = tokens.shape[1]
    pieces = shards("batch")
    of_shard = [places // (size // pieces) == shard for shard in range(pieces)]
    length = sequence_slots(slots)
    lens = prompt_lens + lens
    tries = [pack(tokens[own], lens[own], length, _TRIE) for own in of_shard]
    used = max(len(x.tokens) for x, _ in tries) * pieces  # the fullest shard's
    sequences = min(n for n in sequence_counts(size) if n >= used)
    nodes = np.full((size, slots), -1, np.int32)
    for own, (_, own_nodes) in zip(of_shard, tries):
        nodes[places[own]] = own_nodes
    padded = [x.padded(sequences // pieces) for x, _ in tries]
    packed = (np.concatenate([getattr(x, n) for x in padded]) for n in ("tokens", "depths", "ends"))
    return DraftTries(*packed, nodes)
