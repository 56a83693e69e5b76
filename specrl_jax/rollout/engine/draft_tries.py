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
    """S sequences of T slots, see `packing.PackedTries`; int32."""

    tokens: np.ndarray  # [S, T]
    depths: np.ndarray  # [S, T]
    ends: np.ndarray  # [S, T]
    nodes: np.ndarray  # [b, P + W], sequence · T + slot of each row's tokens; -1 after them

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
    """Whether tries of `shape` hold fewer tokens than a prefill of `prompts` slots for each group
    of `size` rows and a pass of `width` tokens over the rows."""
    return math.prod(shape) < size * width + size // group * prompts


def pack_drafts(
    prompts: np.ndarray, prompt_lens: np.ndarray, drafts: np.ndarray, lens: np.ndarray, size: int
) -> DraftTries:
    """Tries of n rows; few numbers of sequences occur, each a multiple of the batch's shards.

    prompts: int32 [n, P], right-padded. drafts: int32 [n, W], of which `lens` count. size: rows of
    the bucket, at least n; the rows after the n hold nothing.
    """
    count, width = drafts.shape
    tokens = np.pad(prompts, ((0, 0), (0, width)))
    np.put_along_axis(tokens, prompt_lens[:, None] + np.arange(width), drafts, axis=1)
    slots = tokens.shape[1]
    tries = pack(tokens, prompt_lens + lens, sequence_slots(slots), _TRIE)
    used = len(tries.tokens)
    tries = tries.padded(min(n for n in sequence_counts(size) if n >= used))
    nodes = np.pad(tries.nodes, ((0, size - count), (0, 0)), constant_values=-1)
    return DraftTries(tries.tokens, tries.depths, tries.ends, nodes)
