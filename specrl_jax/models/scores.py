"""Scores of attention: what the reference and all kernels share."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Local(NamedTuple):
    """Limits of a local layer of attention: a query sees keys at its first position or after it."""

    first: Array  # int32 [B or 1, T]
    positions: Array  # int32 [B or 1, S], of the keys


def softcapped(scores: Array, cap: float) -> Array:
    """Return cap * tanh(scores / cap), or the scores where cap is 0."""
    return cap * jnp.tanh(scores / cap) if cap else scores
