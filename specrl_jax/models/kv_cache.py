"""Keys and values of past tokens: for each layer a pair of arrays, or one array of both.

Rows are left-aligned: slot s contains the key and value of a row's token at position s. The caller
passes where to write (`start`), and queries see the slots up to their own position: rejecting
tokens means overwriting them. Slots past a row's last token may contain any finite value.

The platform decides the order of the axes, see `AXES`. Kernels need one array, in which each head's
keys are next to its values: [B, S, 2 K, H] on TPU, [B, 2 K, S, H] on GPU. On TPU heads whose size
is not a multiple of 128 are contiguous, [B, S, C], C = K H rounded up to whole tiles on each shard:
tiles of [K, H] would be mostly empty, and XLA would transpose other sizes at every call.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.row_slices import write_slots
from specrl_jax.sharding import axes, on_shards, platform, reshape, shards, take_own_rows

Layer = tuple[Array, ...]  # keys and values, or both in one
KVCache = tuple[Layer, ...]

_ATTENDED = ("BKHS", "BKSH")
# Axes of keys and of values, by platform; others as cpu. XLA on CPU would transpose other layouts
# at every step. On TPU a slot is written in place if its heads are contiguous.
AXES = {"cpu": _ATTENDED, "gpu": ("BKSH", "BKSH"), "tpu": ("BSKH", "BSKH")}
# Of keys and values in one, where K counts both.
_BOTH = {"gpu": ("BKSH",), "tpu": ("BSKH",)}
_FLAT = ("BSC", "BSC")  # contiguous heads
_LANES = 128  # width of a TPU's tile
# Slots of a cache or a packed sequence are a multiple of this, for the platform's kernels.
SLOT_MULTIPLES = {"gpu": 16, "tpu": 128}
_LOGICAL = {"B": "batch", "K": "kv_heads", "C": "kv_heads", "H": None, "S": None}


def _axes(layer: Layer) -> tuple[str, ...]:
    """Return the axes of each array of a layer."""
    if len(layer) == 1:
        return _BOTH.get(platform(), _BOTH["tpu"])
    return _FLAT if is_flat(layer) else AXES.get(platform(), AXES["cpu"])


def is_flat(layer: Layer) -> bool:
    """Return whether the heads of a layer are contiguous: keys and values are [B, S, C]."""
    return layer[0].ndim == 3


def _shapes(config: ModelConfig, rows: int, slots: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return axes and shape of each array of a layer."""
    sizes = {"B": rows, "K": config.num_kv_heads, "H": config.head_dim, "S": slots}
    every = AXES.get(platform(), AXES["cpu"])
    if platform() in _BOTH and "cached" in config.kernels:
        every = _BOTH[platform()]
        sizes["K"] = 2 * config.num_kv_heads
    elif platform() == "tpu" and config.head_dim % _LANES:
        own = config.num_kv_heads // shards("kv_heads") * config.head_dim
        every = _FLAT
        sizes["C"] = shards("kv_heads") * (own + -own % _LANES)
    return [(dims, tuple(sizes[axis] for axis in dims)) for dims in every]


def _transpose(x: Array, old: str, new: str) -> Array:
    return x.transpose([old.index(axis) for axis in new])


def init_cache(config: ModelConfig, rows: int, slots: int, draft_head: bool = False) -> KVCache:
    """Return an empty cache in the compute type. draft_head: with its layer, the last."""

    def zeros(dims: str, shape: tuple[int, ...]) -> Array:
        layout = axes(*(_LOGICAL[axis] for axis in dims))
        return jnp.zeros(shape, config.dtype, out_sharding=layout)

    arrays = _shapes(config, rows, slots)
    layers = config.num_layers + draft_head
    return tuple(tuple(zeros(*array) for array in arrays) for _ in range(layers))


def round_slots(slots: int) -> int:
    """Return the least number of slots >= `slots` that the platform's kernels support."""
    multiple = SLOT_MULTIPLES.get(platform(), 1)
    return -(-slots // multiple) * multiple


def cache_slots(cache: KVCache) -> int:
    return cache[0][0].shape[_axes(cache[0])[0].index("S")]


def as_layer(k_BTKH: Array, v_BTKH: Array, like: Layer) -> Layer:
    """Lay out keys and values of T tokens as a cache of T slots. like: a layer of it."""
    if len(like) == 1:
        pairs = jnp.stack([k_BTKH, v_BTKH], axis=3)
        rows, tokens, heads, _, size = pairs.shape
        layout = axes("batch", None, "kv_heads", None)
        both = jnp.reshape(pairs, (rows, tokens, 2 * heads, size), out_sharding=layout)
        return (_transpose(both, "BSKH", *_axes(like)),)
    if is_flat(like):
        size = like[0].shape[2]
        return _flatten(k_BTKH, size), _flatten(v_BTKH, size)
    keys, values = _axes(like)
    return _transpose(k_BTKH, "BSKH", keys), _transpose(v_BTKH, "BSKH", values)


def _flatten(x_BTKH: Array, size: int) -> Array:
    """Return [B, T, C = size] with contiguous heads."""
    rows, tokens, heads, head_dim = x_BTKH.shape
    pieces = shards("kv_heads")
    own = heads // pieces * head_dim
    x = reshape(x_BTKH, (rows, tokens, pieces, own), "batch", None, "kv_heads", None)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size // pieces - own)))
    return reshape(x, (rows, tokens, size), "batch", None, "kv_heads")


def keys_and_values(layer: Layer) -> Layer:
    """Return keys [B, K, H, S] and values [B, K, S, H] of a layer of two arrays, not flat."""
    return tuple(map(_transpose, layer, _axes(layer), _ATTENDED))


def write(layer: Layer, k_BTKH: Array, v_BTKH: Array, start_B: Array) -> Layer:
    """Write T tokens in every row from its own `start` on; needs start + T <= S.

    A start that is too large overwrites earlier slots.
    """

    def write_one(old: Array, new: Array, dims: str) -> Array:
        return write_slots(old, new, start_B, dims.index("S"))

    return tuple(map(write_one, layer, as_layer(k_BTKH, v_BTKH, layer), _axes(layer)))


def write_rows(cache: KVCache, fresh: Sequence[Layer], nodes_bS: Array, rows_b: Array) -> KVCache:
    """Return the cache with the rows that start: row `rows[i]` gets the tokens at `nodes[i]`.

    fresh: Keys and values [m, T, K, H] of each layer, from packed sequences.
    nodes_bS: int32 [b, S], sequence · T + slot of each token, < 0 if a row has none.
    rows_b: int32 [b]; a row outside the cache is dropped. Each shard counts its own sequences and
        rows, and its dropped rows come last.
    """
    taken = take_nodes(fresh, nodes_bS)
    new = tuple(as_layer(*arrays, layer) for arrays, layer in zip(taken, cache, strict=True))
    return copy_rows(cache, new, rows_b)


def copy_rows(cache: KVCache, new: KVCache, rows_b: Array) -> KVCache:
    """Return the cache with whole rows from another one; rows: int32 [b], as in `write_rows`."""
    return on_shards(_write_own_rows, cache, new, rows_b, like=cache)


def take_nodes(tree, nodes_bS: Array):
    """Take the entries of arrays [m, T, ...] at `nodes`, see `write_rows`; < 0: anything."""

    def take(tree, nodes_bS: Array):
        return take_own_rows(jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), tree), nodes_bS)

    return on_shards(take, tree, jnp.maximum(nodes_bS, 0), like=tree)


def _write_own_rows(cache: KVCache, new: KVCache, rows_b: Array) -> KVCache:
    """Write row by row, in place: no part of the cache is in memory twice."""

    def write_one(i: Array, cache: KVCache) -> KVCache:
        def copy(old: Array, new: Array) -> Array:
            row = jax.lax.dynamic_index_in_dim(new, i)
            return jax.lax.dynamic_update_slice(old, row, (rows_b[i], *(0,) * (old.ndim - 1)))

        return jax.tree.map(copy, cache, new)

    count = jnp.sum(rows_b < cache[0][0].shape[0])
    return jax.lax.fori_loop(0, count, write_one, cache)
