"""Output head over a folded vocabulary: which kernel a run takes for it, and what it returns.

Token c·N + n of a vocabulary lies in row c and column n of [C, N]. A sampler needs a few numbers of
each column (`Columns`), which are C times fewer than the logits.
"""

import math
from typing import NamedTuple

from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.sharding import platform, shards

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


def choose_kernel(setting: str, model: ModelConfig) -> tuple[str, ...]:
    """Return `KERNEL` where a run takes the kernel for the head, else nothing; print a line.

    setting: `model.attention`; `reference` takes no kernel. `kernel` speaks of attention alone.
    """
    if platform() not in ("gpu", "cuda") or setting == "reference":
        return ()
    from specrl_jax.models import head_gpu

    rows = folded_rows(model.vocab_size)
    pieces = shards("vocab")
    refusal = head_gpu.refusal(model, rows // pieces)
    if rows % pieces:
        refusal = f"columns of {rows} tokens cannot be cut over {pieces} devices"
    taken = f"reference ({refusal})" if refusal else "kernel"
    print(f"output head: {taken}", flush=True)
    return () if refusal else (KERNEL,)
