"""Keys and values of past tokens, one array pair per layer.

Rows are left-aligned: slot s of a row holds the key and value of its token at position s. The
cache stores no lengths: the caller passes where to write (`start`), and queries see the slots up to
their own position. To reject tokens is to write over them. Slots past a row's last token may hold
any finite value.

Keys are [B, K, H, S] and values [B, K, S, H], as the products of attention read them. XLA on CPU
would transpose other layouts at every step.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.sharding import merge_rows, reshard, spec, take_rows

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
    """Keys and values of T tokens, in the layout of a cache of T slots."""
    return k_BTKH.transpose(0, 2, 3, 1), v_BTKH.transpose(0, 2, 1, 3)


def write(layer: Layer, k_BTKH: Array, v_BTKH: Array, start_B: Array) -> Layer:
    """Writes T tokens in every row from its own `start` on; needs start + T <= S.

    `dynamic_update_slice` clamps a start that is too large, and would write over earlier slots.
    """

    def write_slots(old: Array, new: Array, axis: int) -> Array:
        def write_row(row: Array, slots: Array, start: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(row, slots, start, axis - 1)

        return jax.vmap(write_row)(old, new, start_B)

    return tuple(map(write_slots, layer, as_layer(k_BTKH, v_BTKH), _SLOTS))


def resize(cache: KVCache, slots: int) -> KVCache:
    """The first `slots` slots; zeros after the old ones where there are fewer."""

    def fit(x: Array, axis: int) -> Array:
        x = jax.lax.slice_in_dim(x, 0, min(slots, x.shape[axis]), axis=axis)
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, pads)

    return tuple(tuple(map(fit, layer, _SLOTS)) for layer in cache)


def repeat_rows(cache: KVCache, times: int) -> KVCache:
    """Every row `times` times, side by side: a prompt's cache for each response of its group."""

    def repeat(x: Array) -> Array:
        rows, *rest = x.shape
        shape = (rows, times, *rest)
        groups = jnp.broadcast_to(x[:, None], shape, out_sharding=spec("batch", None, *_AXES[1:]))
        return merge_rows(groups, *_AXES[1:])

    return jax.tree.map(repeat, cache)


def gather_slots(cache: KVCache, slots_BS: Array) -> KVCache:
    """A cache [B, S] of slots of another: of row · its slots + slot, zeros where that is < 0."""

    def gather(x_BTKH: Array) -> Array:
        x_BTKH = reshard(x_BTKH, None, None, "kv_heads", None)
        flat = jnp.reshape(
            x_BTKH, (-1, *x_BTKH.shape[2:]), out_sharding=spec(None, "kv_heads", None)
        )
        x_BSKH = take_rows(flat, jnp.maximum(slots_BS, 0), None, "kv_heads", None)
        return jnp.where((slots_BS >= 0)[:, :, None, None], x_BSKH, 0)

    return tuple(
        as_layer(gather(k.transpose(0, 3, 1, 2)), gather(v.transpose(0, 2, 1, 3))) for k, v in cache
    )


def gather_rows(cache: KVCache, rows: Array, slots: int) -> KVCache:
    """The rows of an index array, in `slots` slots (cut or padded with zeros)."""
    cut = resize(cache, min(slots, cache_slots(cache)))  # before the gather: fewer bytes to move
    gathered = take_rows(cut, rows, *_AXES[1:])
    return resize(gathered, slots)
