"""Output head over a folded vocabulary: what its kernel returns.

Token c·N + n of a vocabulary lies in row c and column n of [C, N]. A sampler needs a few numbers of
each column (`Columns`), which are C times fewer than the logits.
"""

import math
from typing import NamedTuple

from jax import Array

SHORT = 1_024  # vocabularies below it are one column
MOST_ROWS = 384  # C, at most: 3 · 2^7, so that meshes that cut 3, 4, 8 ... heads cut it too
KERNEL = "head"  # its name in `ModelConfig.kernels`


class Columns(NamedTuple):
    """Numbers of each column of the logits [B, T, C, N]; arrays [B, T, X, N], of X shards of C."""

    top: Array  # float32, the highest logit
    mass: Array  # float32, Σ exp(logit - top)
    ids: Array  # int32, the token of the column that weighs most
    logits: Array  # float32, its logit


def folded_rows(vocab_size: int) -> int:
    """Return C, the rows of a folded vocabulary; the same on every mesh."""
    return vocab_size if vocab_size < SHORT else math.gcd(vocab_size, MOST_ROWS)
