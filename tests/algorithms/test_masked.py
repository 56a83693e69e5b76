import jax
import jax.numpy as jnp
import numpy as np

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
