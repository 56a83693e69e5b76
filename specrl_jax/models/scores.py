"""Attention scores: shared by the reference and all kernels."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Local(NamedTuple):
    """Limits in a local layer of attention: a query sees keys from its first position on."""

    first: Array  # int32 [B or 1, T]
    positions: Array  # int32 [B or 1, S], of the keys


def softcapped(scores: Array, cap: float) -> Array:
    """Return cap * tanh(scores / cap), or the scores if cap is 0."""
    return cap * jnp.tanh(scores / cap) if cap else scores
