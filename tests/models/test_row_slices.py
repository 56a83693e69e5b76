"""Slots of every row from its own start, in every platform's way, against NumPy slices."""

import jax
import numpy as np
import pytest

from specrl_jax.models import row_slices
from specrl_jax.sharding import put

STARTS = np.array([0, 5, 2, 3], np.int32)


@pytest.fixture(params=["cpu", "tpu"])
def access(request, monkeypatch, mesh):
    monkeypatch.setattr(row_slices, "platform", lambda: request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("rest", [(), (3,)])
@pytest.mark.parametrize("width", [1, 2])
def test_reads_and_writes(access, rest, width):
    old, new = _random(4, 7, *rest), _random(4, width, *rest) + 10
    want = old.copy()
    for row, start in enumerate(STARTS):
        want[row, start : start + width] = new[row]
    axes = ("batch", *(None,) * (old.ndim - 1))
    array, starts = put(old, *axes), put(STARTS, "batch")
    got = jax.jit(row_slices.write_slots)(array, put(new, *axes), starts)
    np.testing.assert_array_equal(got, want)
    read = jax.jit(row_slices.read_slots, static_argnums=2)(got, starts, width)
    np.testing.assert_array_equal(read, new)
