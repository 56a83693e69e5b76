"""Sums and means over the positions where a mask holds.

Plain `jnp` reductions, so they work under `jit` and on arrays sharded over the reduced axes.
"""

import jax.numpy as jnp
from jax import Array

Axes = int | tuple[int, ...] | None


def masked_sum(values: Array, mask: Array, axis: Axes = None) -> Array:
    """Σ of `values` where `mask` holds; 0 where it holds nowhere.

    values: Any shape. What lies under a false mask may be anything, nan and inf included: it
        reaches neither the sum nor the gradient with respect to `values`.
    mask: bool, the shape of `values`.
    axis: The axes to reduce; all of them if None.
    """
    return jnp.sum(jnp.where(mask, values, 0), axis=axis)


def masked_mean(values: Array, mask: Array, axis: Axes = None) -> Array:
    """Mean of `values` where `mask` holds; 0 (not 0/0) where it holds nowhere.

    Arguments as in `masked_sum`; `axis=-1` on `[B, R]` gives the mean of each row.
    """
    # Counted in integers: float32 stops counting at 2^24, less than a large batch has tokens.
    count = jnp.sum(mask, axis=axis, dtype=jnp.int32)
    return masked_sum(values, mask, axis) / jnp.maximum(count, 1)
