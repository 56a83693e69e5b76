import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from specrl_jax.algorithms.masked import masked_mean, masked_sum

VALUES = np.array([[1.0, 2.0, np.inf], [np.nan, np.nan, -np.inf], [-4.0, 7.0, 5.0]], np.float32)
MASK = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 1]], bool)


def test_sum_and_mean_by_hand():
    assert masked_sum(VALUES, MASK) == 4.0
    assert masked_mean(VALUES, MASK) == 1.0
    np.testing.assert_array_equal(masked_sum(VALUES, MASK, axis=-1), [3.0, 0.0, 1.0])
    np.testing.assert_array_equal(masked_mean(VALUES, MASK, axis=-1), [1.5, 0.0, 0.5])


def test_an_empty_mask_gives_zero_not_nan():
    assert masked_mean(VALUES, np.zeros_like(MASK)) == 0.0
    assert masked_sum(VALUES, np.zeros_like(MASK)) == 0.0


def test_gradient_is_zero_outside_the_mask():
    gradient = jax.grad(masked_mean)(jnp.asarray(VALUES), jnp.asarray(MASK))
    np.testing.assert_array_equal(gradient, MASK / 4)


@pytest.mark.parametrize("axis", [None, 0, -1])
def test_on_an_explicitly_sharded_batch(axis):
    devices = len(jax.devices())
    mesh = jax.make_mesh((devices, 1), ("data", "tensor"))
    generator = np.random.default_rng(0)
    values = generator.normal(size=(2 * devices, 5))
    mask = generator.random((2 * devices, 5)) < 0.6
    with jax.set_mesh(mesh):
        sharded = (
            jax.device_put(values.astype(np.float32), P("data")),
            jax.device_put(mask, P("data")),
        )
        total = jax.jit(masked_sum, static_argnums=2)(*sharded, axis)
        mean = jax.jit(masked_mean, static_argnums=2)(*sharded, axis)
    expected = np.sum(values * mask, axis=axis)
    np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
    count = np.maximum(np.sum(mask, axis=axis), 1)
    np.testing.assert_allclose(mean, expected / count, rtol=1e-5, atol=1e-6)
