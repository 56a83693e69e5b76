"""Reads and writes of slots from a per-row start, with all their backends in one place.

XLA on TPU turns slices with a per-row start into a loop over the rows. So there the slots are
indexed one by one, with the same result.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import platform


def read_slots(array: Array, starts_B: Array, count: int) -> Array:
    """Read T = `count` slots [B, T, ...] of [B, S, ...] from `starts` on; needs start + T <= S.

    starts: int32 [B].
    """
    read = _read_indices if platform() == "tpu" else jax.lax.dynamic_slice_in_dim
    return jax.vmap(lambda row, start: read(row, start, count))(array, starts_B)


def gather_tokens(array: Array, slots_BT: Array) -> Array:
    """Gather the tokens in slots int32 [B, T] of every row of [B, S, ...]: [B, T, ...]."""
    return jax.vmap(lambda row, slots: row[slots])(array, slots_BT)


def put_tokens(array: Array, values: Array, slots_BT: Array) -> Array:
    """Return [B, S, ...] with values [B, T, ...] in slots int32 [B, T]; slots >= S are dropped."""
    return jax.vmap(lambda row, new, slots: row.at[slots].set(new, mode="drop"))(
        array, values, slots_BT
    )


def write_slots(array: Array, values: Array, starts_B: Array, axis: int = 1) -> Array:
    """Return the array with T slots of every row written from `starts` on; needs start + T <= S.

    array: [B, S, ...]; values: [B, T, ...]; axis: of S and T, if not 1.
    starts: int32 [B]. A start that is too large overwrites earlier slots.
    """
    write = _write_indices if platform() == "tpu" else jax.lax.dynamic_update_slice_in_dim
    return jax.vmap(lambda row, new, start: write(row, new, start, axis - 1))(
        array, values, starts_B
    )


def _read_indices(row: Array, start: Array, count: int) -> Array:
    return row.at[start + jnp.arange(count)].get(mode="promise_in_bounds", indices_are_sorted=True)


def _write_indices(row: Array, values: Array, start: Array, axis: int) -> Array:
    slots = (slice(None),) * axis + (start + jnp.arange(values.shape[axis]),)
    return row.at[slots].set(
        values, mode="promise_in_bounds", indices_are_sorted=True, unique_indices=True
    )


def count_leading(accept_BW: Array, lens_B: Array) -> Array:
    """Count the leading True values within each row's first `lens` entries, int32 [B]."""
    width = accept_BW.shape[1]
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(accept_BW & (offsets < lens_B[:, None]), width, offsets), axis=1)
