"""Cache writes and row moves, against NumPy slices."""

import functools

import jax
import numpy as np
import pytest
from small_models import MODEL

from specrl_jax.models import kv_cache, row_slices
from specrl_jax.sharding import on_shards, put

AXES = ("batch", "kv_heads", None, None)


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


def _layer(keys_BSKH: np.ndarray, values_BSKH: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As the cache holds them."""
    return np.moveaxis(keys_BSKH, 1, 3), np.moveaxis(values_BSKH, 1, 2)


def _put(keys_BSKH: np.ndarray, values_BSKH: np.ndarray) -> kv_cache.Layer:
    return tuple(put(x, *AXES) for x in _layer(keys_BSKH, values_BSKH))


def _check(got: kv_cache.Layer, keys_BSKH: np.ndarray, values_BSKH: np.ndarray) -> None:
    for layer, want in zip(got, _layer(keys_BSKH, values_BSKH), strict=True):
        np.testing.assert_array_equal(layer, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_cache(mesh, dtype):
    model = MODEL.replace(dtype=dtype)
    cache = kv_cache.init_cache(model, rows=3, slots=5)
    assert [x.shape for pair in cache for x in pair] == [(3, 2, 4, 5), (3, 2, 5, 4)] * 2
    assert all(x.dtype == dtype and not np.any(x) for pair in cache for x in pair)
    assert kv_cache.cache_slots(cache) == 5


@MESHES
@pytest.mark.parametrize("slots", [3, 5, 8])
def test_gathered_rows_are_cut_or_padded(make_mesh, shape, slots):
    """Rows count on each shard of the batch."""
    keys = _random(8, 5, 2, 4)
    rows, shards = np.array([1, 0, 0, 1], np.int32), shape[0] * shape[1]
    want = np.zeros((4, slots, 2, 4), np.float32)
    places = rows + np.arange(4) // (4 // shards) * (8 // shards)
    want[:, : min(slots, 5)] = keys[places, :slots]

    def gather(cache, rows):
        own = functools.partial(kv_cache.gather_own_rows, slots=slots)
        return on_shards(own, cache, rows, like=cache)

    with jax.set_mesh(make_mesh(*shape)):
        (got,) = jax.jit(gather)((_put(keys, -keys),), put(rows, "batch"))
    _check(got, want, -want)


@MESHES
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("platform", "kernels", "size", "arrays"),
    [
        ("cpu", (), 4, [(8, 2, 4, 6), (8, 2, 6, 4)]),
        ("tpu", (), 128, [(8, 6, 2, 128)] * 2),
        ("tpu", (), 4, None),
        ("tpu", ("decode",), 4, [(8, 6, 4, 4)]),
    ],
    ids=["cpu", "apart", "narrow heads", "both in one"],
)
def test_every_layout_holds_and_gives_the_same(
    make_mesh, as_on, shape, width, platform, kernels, size, arrays
):
    """Written, repeated, moved and cut, against NumPy."""
    as_on(platform)
    model = MODEL.replace(num_layers=1, kernels=kernels, head_dim=size)
    old, new = _random(8, 6, 2, size), _random(8, width, 2, size) + 10
    starts = np.arange(8, dtype=np.int32) % 4
    want = old.copy()
    for row, start in enumerate(starts):
        want[row, start : start + width] = new[row]
    order = np.array([[3, -1, 4, 0]] * 8, np.int32)  # slots of the shard's first row
    with jax.set_mesh(make_mesh(*shape)):
        (layer,) = kv_cache.init_cache(model, rows=8, slots=6)
        # Narrow heads fill a tile on each of the tensor axis's shards.
        assert [x.shape for x in layer] == (arrays or [(8, 6, 128 * shape[2])] * 2)
        for written, places in ((old, starts * 0), (new, starts)):
            keys, values = (put(x, "batch", None, "kv_heads", None) for x in (written, -written))
            layer = jax.jit(kv_cache.write)(layer, keys, values, put(places, "batch"))
        twice = kv_cache.repeat_rows(kv_cache.resize((layer,), 5), 2)
        assert kv_cache.cache_slots(twice) == 5
        _check(kv_cache.keys_and_values(layer, 2, size), want, -want)
        repeated = np.repeat(want[:, :5], 2, axis=0)
        _check(kv_cache.keys_and_values(twice[0], 2, size), repeated, -repeated)
        (picked,) = jax.jit(kv_cache.gather_slots)((layer,), put(order, "batch", None))
        first = np.arange(8) // (8 // (shape[0] * shape[1])) * (8 // (shape[0] * shape[1]))
        slots = np.where((order >= 0)[..., None, None], want[first[:, None], order], 0)
        _check(kv_cache.keys_and_values(picked, 2, size), slots, -slots)
