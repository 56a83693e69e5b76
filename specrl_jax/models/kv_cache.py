"""Keys and values of past tokens: for each layer a pair of arrays, or one array of both.

Rows are left-aligned: slot s of a row holds the key and value of its token at position s. The
cache stores no lengths: the caller passes where to write (`start`), and queries see the slots up to
their own position. To reject tokens is to write over them. Slots past a row's last token may hold
any finite value.

The order of the axes is the platform's, see `AXES`: `keys_and_values` gives keys [B, K, H, S] and
values [B, K, S, H], as the products of attention read them. Kernels on TPU want one array
[B, S, 2 K, H], in which each head's keys lie beside its values.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.row_slices import write_slots
from specrl_jax.sharding import merge_rows, on_shards, platform, spec, take_own_rows

Layer = tuple[Array, ...]  # keys and values, or both in one
KVCache = tuple[Layer, ...]

_ATTENDED = ("BKHS", "BKSH")
# Axes of keys and of values, by platform; others are as cpu. XLA on CPU would transpose other
# layouts at every step. On TPU a slot is written in place where its heads lie together.
AXES = {"cpu": _ATTENDED, "gpu": ("BKSH", "BKSH"), "tpu": ("BSKH", "BSKH")}
_BOTH = ("BSKH",)  # of keys and values in one, where K counts both
_LOGICAL = {"B": "batch", "K": "kv_heads", "H": None, "S": None}


def _axes(layer: Layer | None = None) -> tuple[str, ...]:
    """Of the arrays of a layer; None: of keys and values apart."""
    if layer is not None and len(layer) == 1:
        return _BOTH
    return AXES.get(platform(), AXES["cpu"])


def _transpose(x: Array, old: str, new: str) -> Array:
    return x.transpose([old.index(axis) for axis in new])


def init_cache(config: ModelConfig, rows: int, slots: int) -> KVCache:
    """An empty cache of `rows` x `slots`, in the compute type."""
    sizes = {"B": rows, "K": config.num_kv_heads, "H": config.head_dim, "S": slots}
    axes = _axes()
    if platform() == "tpu" and {"decode", "verify"} & {*config.kernels}:
        axes, sizes["K"] = _BOTH, 2 * config.num_kv_heads

    def zeros(axes: str) -> Array:
        layout = spec(*(_LOGICAL[axis] for axis in axes))
        return jnp.zeros([sizes[axis] for axis in axes], config.dtype, out_sharding=layout)

    return tuple(tuple(map(zeros, axes)) for _ in range(config.num_layers))


def cache_slots(cache: KVCache) -> int:
    return cache[0][0].shape[_axes(cache[0])[0].index("S")]


def cache_bytes(config: ModelConfig, rows: int, slots: int) -> int:
    """Bytes of `init_cache(config, rows, slots)` over all devices."""
    per_slot = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    return config.num_layers * rows * slots * per_slot


def as_layer(k_BTKH: Array, v_BTKH: Array, like: Layer) -> Layer:
    """Keys and values of T tokens, in the layout of a cache of T slots. like: a layer of it."""
    if len(like) == 1:
        pairs = jnp.stack([k_BTKH, v_BTKH], axis=3)
        rows, tokens, heads, _, size = pairs.shape
        layout = spec("batch", None, "kv_heads", None)
        return (jnp.reshape(pairs, (rows, tokens, 2 * heads, size), out_sharding=layout),)
    return tuple(_transpose(x, "BSKH", axes) for x, axes in zip((k_BTKH, v_BTKH), _axes()))


def keys_and_values(layer: Layer) -> Layer:
    """Keys [B, K, H, S] and values [B, K, S, H]."""
    if len(layer) == 1:
        rows, slots, both, size = layer[0].shape
        layout = spec("batch", None, "kv_heads", None, None)
        pairs = jnp.reshape(layer[0], (rows, slots, both // 2, 2, size), out_sharding=layout)
        return tuple(
            _transpose(pairs[:, :, :, place], "BSKH", axes) for place, axes in enumerate(_ATTENDED)
        )
    return tuple(map(_transpose, layer, _axes(), _ATTENDED))


def write(layer: Layer, k_BTKH: Array, v_BTKH: Array, start_B: Array) -> Layer:
    """Writes T tokens in every row from its own `start` on; needs start + T <= S.

    A start that is too large writes over earlier slots.
    """

    def write_one(old: Array, new: Array, axes: str) -> Array:
        return write_slots(old, new, start_B, axes.index("S"))

    return tuple(map(write_one, layer, as_layer(k_BTKH, v_BTKH, layer), _axes(layer)))


def resize(cache: KVCache, slots: int) -> KVCache:
    """The first `slots` slots; zeros after the old ones where there are fewer."""

    def fit(x: Array, axes: str) -> Array:
        axis = axes.index("S")
        x = jax.lax.slice_in_dim(x, 0, min(slots, x.shape[axis]), axis=axis)
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, slots - x.shape[axis])
        return jnp.pad(x, pads)

    return _map_layers(fit, cache)


def _map_layers(function: Callable[[Array, str], Array], cache: KVCache) -> KVCache:
    """function(array, axes) of every array of the cache."""
    return tuple(tuple(map(function, layer, _axes(layer))) for layer in cache)


def repeat_rows(cache: KVCache, times: int) -> KVCache:
    """Every row `times` times, side by side: a prompt's cache for each response of its group."""

    def repeat(x: Array, axes: str) -> Array:
        rows, *rest = x.shape
        names = [_LOGICAL[axis] for axis in axes[1:]]
        layout = spec("batch", None, *names)
        groups = jnp.broadcast_to(x[:, None], (rows, times, *rest), out_sharding=layout)
        return merge_rows(groups, *names)

    return _map_layers(repeat, cache)


def gather_slots(cache: KVCache, slots_BS: Array) -> KVCache:
    """A cache [B, S] of slots of another: of row · its slots + slot, zeros where that is < 0. Rows
    are counted, and gathered, on each shard of the batch."""

    def gather(x: Array, axes: str, slots_BS: Array) -> Array:
        x_BTKH = _transpose(x, axes, "BSKH")
        x_BSKH = take_own_rows(jax.lax.collapse(x_BTKH, 0, 2), jnp.maximum(slots_BS, 0))
        x_BSKH = jnp.where((slots_BS >= 0)[:, :, None, None], x_BSKH, 0)
        return _transpose(x_BSKH, "BSKH", axes)

    def local(cache: KVCache, slots_BS: Array) -> KVCache:
        return _map_layers(functools.partial(gather, slots_BS=slots_BS), cache)

    return on_shards(local, cache, slots_BS, like=cache)


def gather_own_rows(cache: KVCache, rows: Array, slots: int) -> KVCache:
    """The rows of an index array, in `slots` slots (cut or padded with zeros), inside `on_shards`:
    rows of the shard."""
    cut = resize(cache, min(slots, cache_slots(cache)))  # before the gather: fewer bytes to move
    return resize(take_own_rows(cut, rows), slots)
