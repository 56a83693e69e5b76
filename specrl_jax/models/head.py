"""Output head over a folded vocabulary: what its kernel returns.

Token c·N + n of a vocabulary is in row c and column n of [C, N]. A sampler needs a few values per
column (`Columns`), which are C times fewer than the logits.
"""

import math
from typing import NamedTuple

from jax import Array

SHORT = 1_024  # smaller vocabularies are one column
MOST_ROWS = 384  # C, at most: 3 · 2^7, so that meshes that split 3, 4, 8 ... heads split it too
KERNEL = "head"  # its name in `ModelConfig.kernels`


class Columns(NamedTuple):
    """Values per column of the logits [B, T, C, N]; arrays [B, T, X, N], with X shards of C."""

    top: Array  # float32, the highest logit
    mass: Array  # float32, Σ exp(logit - top)
    ids: Array  # int32, the column's token with the largest weight
    logits: Array  # float32, its logit


def folded_rows(vocab_size: int) -> int:
    """Return C, the rows of a folded vocabulary; the same on every mesh."""
    return vocab_size if vocab_size < SHORT else math.gcd(vocab_size, MOST_ROWS)
