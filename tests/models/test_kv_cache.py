"""Writes to the cache, against NumPy slices."""

import jax
import numpy as np
import pytest
from small_models import MODEL

from specrl_jax.models import kv_cache, row_slices
from specrl_jax.sharding import put


@pytest.fixture
def as_on(monkeypatch):
    """as_on(platform): its cache, and its way to write slots."""

    def choose(platform: str) -> None:
        monkeypatch.setattr(kv_cache, "platform", lambda: platform)
        monkeypatch.setattr(row_slices, "platform", lambda: platform)
        jax.clear_caches()

    yield choose
    jax.clear_caches()


MESHES = pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_cache(mesh, dtype):
    model = MODEL.replace(dtype=dtype)
    cache = kv_cache.init_cache(model, rows=3, slots=5)
    assert [x.shape for pair in cache for x in pair] == [(3, 2, 4, 5), (3, 2, 5, 4)] * 2
    assert all(x.dtype == dtype and not np.any(x) for pair in cache for x in pair)
    assert kv_cache.cache_slots(cache) == 5


LAYOUTS = pytest.mark.parametrize(
    ("platform", "kernels", "size", "arrays"),
    [
        ("cpu", (), 4, [(8, 2, 4, 6), (8, 2, 6, 4)]),
        ("tpu", (), 128, [(8, 6, 2, 128)] * 2),
        ("tpu", (), 4, None),
        ("tpu", ("cached",), 4, [(8, 6, 4, 4)]),
        ("gpu", ("cached",), 4, [(8, 4, 6, 4)]),
    ],
    ids=["cpu", "apart", "narrow heads", "both in one", "both in one on gpu"],
)


def _put_heads(x: np.ndarray) -> jax.Array:
    return put(x, "batch", None, "kv_heads", None)


def _filled(model, old: np.ndarray) -> kv_cache.Layer:
    """The layer of a cache that holds these keys [B, S, K, H], and their negatives as values."""
    (layer,) = kv_cache.init_cache(model, rows=len(old), slots=old.shape[1])
    start = put(np.zeros(len(old), np.int32), "batch")
    return jax.jit(kv_cache.write)(layer, _put_heads(old), _put_heads(-old), start)


def _read(layer: kv_cache.Layer, platform: str, heads: int, size: int) -> list[np.ndarray]:
    """Keys and values [B, S, K, H] of a layer."""
    arrays = [np.asarray(x) for x in layer]
    if len(arrays) == 1:
        both = arrays[0].swapaxes(1, 2) if platform == "gpu" else arrays[0]
        return [both[:, :, ::2], both[:, :, 1::2]]
    if platform == "cpu":
        keys, values = arrays
        return [keys.transpose(0, 3, 1, 2), values.transpose(0, 2, 1, 3)]
    if arrays[0].ndim == 4:
        return arrays
    tiles = [x.reshape(*x.shape[:2], -1, 128) for x in arrays]  # one on each shard
    filled = heads * size // tiles[0].shape[2]
    return [x[..., :filled].reshape(*x.shape[:2], heads, size) for x in tiles]


def _check(layer: kv_cache.Layer, platform: str, want: np.ndarray, known: np.ndarray) -> None:
    """Keys [B, S, K, H], and their negatives as values, in the slots that are `known` [B, S]."""
    keys, values = _read(layer, platform, *want.shape[2:])
    np.testing.assert_array_equal(keys[known], want[known])
    np.testing.assert_array_equal(values[known], -want[known])


@MESHES
@LAYOUTS
@pytest.mark.parametrize("width", [1, 3])
def test_every_layout_holds_what_is_written(
    make_mesh, as_on, shape, width, platform, kernels, size, arrays
):
    """Each row from a slot of its own on."""
    as_on(platform)
    model = MODEL.replace(num_layers=1, kernels=kernels, head_dim=size)
    old = _random(8, 6, 2, size)
    new = _random(8, width, 2, size) + 10
    starts = np.arange(8, dtype=np.int32) % 4
    want = old.copy()
    for row, start in enumerate(starts):
        want[row, start : start + width] = new[row]
    with jax.set_mesh(make_mesh(*shape)):
        layer = _filled(model, old)
        # Narrow heads fill a tile on each of the tensor axis's shards.
        assert [x.shape for x in layer] == (arrays or [(8, 6, 128 * shape[2])] * 2)
        begins = put(starts, "batch")
        layer = jax.jit(kv_cache.write)(layer, _put_heads(new), _put_heads(-new), begins)
        assert kv_cache.cache_slots((layer,)) == 6
        _check(layer, platform, want, np.ones((8, 6), bool))


@MESHES
@LAYOUTS
def test_every_layout_holds_rows_that_begin(
    make_mesh, as_on, shape, platform, kernels, size, arrays
):
    """Two rows on each shard, of which the last shard leaves one out; from a sequence each."""
    as_on(platform)
    model = MODEL.replace(num_layers=1, kernels=kernels, head_dim=size)
    shards = shape[0] * shape[1]
    own = 8 // shards  # rows of a shard
    old = _random(8, 6, 2, size)
    fresh = _random(2 * shards, 7, 2, size) + 10
    rows = np.tile(np.array([own - 1, 0], np.int32), shards)
    rows[-1] = 99
    # Nodes of two sequences of 7 slots; the second row reads from both.
    nodes = np.tile(np.array([[3, 4, 4, -1], [13, 0, 7, 6]], np.int32), (shards, 1))
    want = old.copy()
    known = np.ones((8, 6), bool)  # slots after a row's tokens hold anything
    for i, (row, read) in enumerate(zip(rows, nodes)):
        if row < own:
            shard = i // 2
            tokens = fresh[2 * shard : 2 * shard + 2].reshape(14, 2, size)
            count = np.sum(read >= 0)
            want[shard * own + row, :count] = tokens[read[:count]]
            known[shard * own + row, count : len(read)] = False
    with jax.set_mesh(make_mesh(*shape)):
        cache = (_filled(model, old),)
        axes = ("batch", None, "kv_heads", None)
        layers = [(put(fresh, *axes), put(-fresh, *axes))]
        placed = put(nodes, "batch", None), put(rows, "batch")
        (layer,) = jax.jit(kv_cache.write_rows)(cache, layers, *placed)
        assert [x.shape for x in layer] == (arrays or [(8, 6, 128 * shape[2])] * 2)
        _check(layer, platform, want, known)
