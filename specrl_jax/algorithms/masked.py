"""A mean over the positions where a mask holds.

Plain `jnp` reductions, so it works under `jit` and on arrays sharded over the reduced axes.
"""

import jax.numpy as jnp
from jax import Array


def masked_mean(values: Array, mask: Array, axis: int | None = None) -> Array:
    """Return the mean of `values` where `mask` holds; 0 (not 0/0) where it holds nowhere.

    values: Any shape. What lies under a false mask may be anything, nan and inf included: it
        reaches neither the mean nor the gradient with respect to `values`.
    mask: bool, the shape of `values`.
    axis: The axis to reduce, all of them if None; -1 on `[B, R]` gives the mean of each row.
    """
    # Counted in integers: float32 stops counting at 2^24, less than a large batch has tokens.
    count = jnp.sum(mask, axis=axis, dtype=jnp.int32)
    return jnp.sum(values, axis=axis, where=mask) / jnp.maximum(count, 1)
