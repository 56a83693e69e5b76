"""The head's kernel in interpret mode, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.models import head_gpu
from specrl_jax.models.head import Columns
from specrl_jax.sharding import put


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(head_gpu, "_INTERPRET", True)


def _double(products, ids):
    """Return twice the products, and -inf at tokens below 5."""
    return jnp.where(ids < 5, -jnp.inf, 2 * products)


def _nearest(inside, ids, wanted):
    return -jnp.abs(ids - wanted).astype(jnp.float32)


def _highest(inside, ids):
    return inside


def _reduce(hidden, head, rows, values, finish, weigh) -> Columns:
    run = functools.partial(head_gpu.reduce_columns, rows=rows, finish=finish, weigh=weigh)
    return jax.jit(run)(hidden, head, values=values)


@pytest.mark.parametrize(
    ("rows", "columns", "size", "batch", "width", "mesh_shape"),
    [
        (128, 2, 16, 3, 1, (1, 1, 1)),
        (384, 1, 48, 40, 2, (1, 1, 1)),  # two blocks of positions, the second one filled up
        (16, 5, 32, 2, 8, (1, 1, 1)),
        (96, 3, 32, 4, 3, (2, 1, 2)),  # columns of 48 tokens on each of two devices
    ],
)
def test_numbers_of_columns(make_mesh, rows, columns, size, batch, width, mesh_shape):
    rng = np.random.default_rng(rows)
    hidden = rng.normal(size=(batch, width, size)).astype(np.float32)
    head = rng.normal(size=(rows * columns, size)).astype(np.float32) / 4
    wanted = rng.integers(0, rows * columns, (batch, width)).astype(np.int32)
    with jax.set_mesh(make_mesh(*mesh_shape)):
        placed = put(hidden, "batch", None, None), put(head, "vocab", None)
        got = _reduce(*placed, rows, (put(wanted, "batch", None),), _double, _nearest)
    shards = mesh_shape[2]
    logits = 2 * hidden.astype(np.float64) @ head.T.astype(np.float64)
    logits[..., :5] = -np.inf
    folded = logits.reshape(batch, width, shards, rows // shards, columns)
    top = folded.max(axis=3)
    np.testing.assert_allclose(got.top, top, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got.mass, np.exp(folded - top[..., None, :]).sum(3), rtol=1e-4)
    ids = np.arange(rows * columns).reshape(shards, rows // shards, columns)
    nearest = np.abs(ids - wanted[..., None, None, None]).argmin(axis=3)
    chosen = np.take_along_axis(np.broadcast_to(ids, folded.shape), nearest[..., None, :], 3)
    np.testing.assert_array_equal(got.ids, chosen[..., 0, :])
    expected = np.take_along_axis(folded, nearest[..., None, :], 3)[..., 0, :]
    np.testing.assert_allclose(got.logits, expected, rtol=1e-5, atol=1e-5)


def test_a_column_of_unused_tokens_has_no_mass_and_no_token(mesh):
    ones = put(np.ones((1, 1, 16), np.float32), "batch", None, None)
    head = put(np.ones((64, 16), np.float32), "vocab", None)
    unused = lambda products, ids: jnp.where(ids % 2 == 0, -jnp.inf, products)  # noqa: E731
    got = _reduce(ones, head, 32, (), unused, _highest)
    np.testing.assert_array_equal(got.top[0, 0, 0], [-np.inf, 16])
    np.testing.assert_array_equal(got.mass[0, 0, 0], [0, 32])
    np.testing.assert_array_equal(got.ids[0, 0, 0], [-1, 1])  # of equal weights the first
    np.testing.assert_array_equal(got.logits[0, 0, 0], [-np.inf, 16])
