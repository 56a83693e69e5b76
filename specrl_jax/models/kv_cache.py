"""Keys and values of past tokens, one array pair per layer.

Rows are left-aligned: slot s of a row holds the key and value of its token at position s. A row
has no stored length here: the caller passes where to write (`start`), queries see the slots up to
their own position, and rejecting tokens is writing over them. Slots past a row's last token may
hold anything.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.sharding import merge_rows, spec, take_rows

KVCache = tuple[tuple[Array, Array], ...]  # per layer: keys, values [B, S, K, H]

_AXES = ("batch", None, "kv_heads", None)


def init_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """An empty cache of `rows` x `slots`, in the compute type."""
    shape = (rows, slots, config.num_kv_heads, config.head_dim)

    def zeros() -> Array:
        return jnp.zeros(shape, config.dtype, out_sharding=spec(*_AXES))

    return tuple((zeros(), zeros()) for _ in range(config.num_layers))


def cache_slots(cache: KVCache) -> int:
    return cache[0][0].shape[1]


def cache_bytes(config: ModelConfig, rows: int, slots: int) -> int:
    """Bytes of `init_cache(config, rows, slots)` over all devices."""
    per_slot = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return config.num_layers * rows * slots * per_slot


def write_rows(cache_BSKH: Array, new_BTKH: Array, start_B: Array) -> Array:
    """Write T slots of every row from its own `start`; needs start + T <= S.

    `dynamic_update_slice` clamps a start that is too large, which would overwrite earlier slots:
    the window always keeps room for the width that is written.
    """

    def write(row: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, new, start, axis=0)

    return jax.vmap(write)(cache_BSKH, new_BTKH, start_B)


def repeat_rows(cache: KVCache, times: int) -> KVCache:
    """Every row `times` times in a row: one prompt's cache for all responses of its group."""

    def repeat(x: Array) -> Array:
        rows, *rest = x.shape
        shape = (rows, times, *rest)
        wide = jnp.broadcast_to(
            x[:, None], shape, out_sharding=spec("batch", None, None, "kv_heads", None)
        )
        return merge_rows(wide, *_AXES[1:])

    return jax.tree.map(repeat, cache)


def regrid(cache: KVCache, rows: Array, slots: int) -> KVCache:
    """Rows picked by index, in a window of `slots` (cut or padded with zeros)."""

    def move(x: Array) -> Array:
        x = take_rows(x[:, :slots], rows, None, "kv_heads", None)
        return jnp.pad(x, ((0, 0), (0, slots - x.shape[1]), (0, 0), (0, 0)))

    return jax.tree.map(move, cache)
