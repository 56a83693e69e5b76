"""Masked mean.

Plain `jnp` reductions, so it works under `jit` and on arrays sharded over the reduced axes.
"""

import jax.numpy as jnp
from jax import Array


def masked_mean(values: Array, mask: Array, axis: int | None = None) -> Array:
    """Return the mean of `values` over the positions in `mask`; 0 (not 0/0) if it is empty.

    values: Any shape. Masked-out values may be anything, including nan and inf: they affect
        neither the mean nor the gradient with respect to `values`.
    mask: bool, the shape of `values`.
    axis: The axis to reduce, all of them if None; -1 on `[B, R]` gives the mean of each row.
    """
    # Counted in integers: float32 cannot count beyond 2^24, and a large batch has more tokens.
    count = jnp.sum(mask, axis=axis, dtype=jnp.int32)
    return jnp.sum(values, axis=axis, where=mask) / jnp.maximum(count, 1)
