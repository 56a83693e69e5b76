"""Keys and values of past tokens, one array pair per layer.

Rows are left-aligned: slot s of a row holds the key and value of its token at position s. A row
has no stored length here: the caller passes where to write (`start`), queries see the slots up to
their own position, and rejecting tokens is writing over them. Slots past a row's last token may
hold anything finite.

Keys lie as [B, K, H, S] and values as [B, K, S, H], as the products of attention read them: XLA's
CPU programs turn keys, or keys and values, that lie otherwise at every step.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.sharding import merge_rows, spec, take_rows

Layer = tuple[Array, Array]  # keys [B, K, H, S], values [B, K, S, H]
KVCache = tuple[Layer, ...]

_AXES = ("batch", "kv_heads", None, None)
_SLOTS = (3, 2)  # the axis of slots in keys and in values


def init_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """An empty cache of `rows` x `slots`, in the compute type."""

    def zeros(*sizes: int) -> Array:
        shape = (rows, config.num_kv_heads, *sizes)
        return jnp.zeros(shape, config.dtype, out_sharding=spec(*_AXES))

    size = config.head_dim
    return tuple((zeros(size, slots), zeros(slots, size)) for _ in range(config.num_layers))


def cache_slots(cache: KVCache) -> int:
    return cache[0][0].shape[_SLOTS[0]]


def cache_bytes(config: ModelConfig, rows: int, slots: int) -> int:
    """Bytes of `init_cache(config, rows, slots)` over all devices."""
    per_slot = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return config.num_layers * rows * slots * per_slot


def as_layer(k_BTKH: Array, v_BTKH: Array) -> Layer:
    """Keys and values of T tokens as a cache of T slots."""
    return k_BTKH.transpose(0, 2, 3, 1), v_BTKH.transpose(0, 2, 1, 3)


def write_rows(layer: Layer, new: Layer, start_B: Array) -> Layer:
    """Write the T slots of `new` in every row from its own `start`; needs start + T <= S.

    `dynamic_update_slice` clamps a start that is too large, which would overwrite earlier slots:
    the window always keeps room for the width that is written.
    """

    def write(old: Array, slots: Array, axis: int) -> Array:
        def one(row: Array, part: Array, start: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(row, part, start, axis - 1)

        return jax.vmap(one)(old, slots, start_B)

    keys, values = layer
    return write(keys, new[0], _SLOTS[0]), write(values, new[1], _SLOTS[1])


def resize(cache: KVCache, slots: int) -> KVCache:
    """The first `slots` slots, behind the last ones zeros."""

    def fit(x: Array, axis: int) -> Array:
        x = jax.lax.slice_in_dim(x, 0, min(slots, x.shape[axis]), axis=axis)
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, pads)

    return tuple(tuple(map(fit, layer, _SLOTS)) for layer in cache)


def repeat_rows(cache: KVCache, times: int) -> KVCache:
    """Every row `times` times in a row: one prompt's cache for all responses of its group."""

    def repeat(x: Array) -> Array:
        rows, *rest = x.shape
        shape = (rows, times, *rest)
        wide = jnp.broadcast_to(x[:, None], shape, out_sharding=spec("batch", None, *_AXES[1:]))
        return merge_rows(wide, *_AXES[1:])

    return jax.tree.map(repeat, cache)


def regrid(cache: KVCache, rows: Array, slots: int) -> KVCache:
    """Rows picked by index, in a window of `slots` (cut or padded with zeros)."""
    cut = resize(cache, min(slots, cache_slots(cache)))  # before picking: fewer bytes to move
    picked = jax.tree.map(lambda x: take_rows(x, rows, *_AXES[1:]), cut)
    return resize(picked, slots)
