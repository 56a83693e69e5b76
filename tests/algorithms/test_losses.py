"""The parts of the losses: objectives and aggregations; the critic's loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_batches import FULL, PLAIN, as_batch, as_float32, slopes, take

from specrl_jax.algorithms.losses import (
    AGGREGATIONS,
    clipped_surrogate,
    clipped_weight,
    k3,
    value_loss,
)

# Objectives --------------------------------------------------------------------------------


def surrogate(ratio, advantage):
    log_ratio = np.log(np.asarray(ratio, np.float32))
    advantages = np.broadcast_to(np.float32(advantage), log_ratio.shape)
    return clipped_surrogate(log_ratio, log_ratio, advantages, FULL)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 1.0, -1.28, True),
        (0.5, 1.0, -0.5, False),
        (1.5, -1.0, 1.5, False),
        (0.5, -1.0, 0.8, True),
        (9.0, -2.0, 6.0, True),
        (9.0, 2.0, -2.56, True),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_surrogate_by_hand(ratio, advantage, loss, clipped):
    got_loss, got_clipped = surrogate([[ratio]], advantage)
    np.testing.assert_allclose(got_loss, [[loss]], rtol=1e-6)
    assert got_clipped.tolist() == [[clipped]]


def test_clipped_says_where_the_gradient_vanishes():
    ratio = np.array([[0.1, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 50.0]], np.float32)
    for advantage in (-1.5, 1.5):

        def total(log_ratio, advantage=advantage):
            advantages = jnp.full_like(log_ratio, advantage)
            return clipped_surrogate(log_ratio, log_ratio, advantages, FULL)[0].sum()

        gradient = jax.grad(total)(np.log(ratio))
        _, clipped = surrogate(ratio, advantage)
        np.testing.assert_array_equal(np.asarray(gradient) == 0, clipped)
        expected = np.where(clipped, 0, -advantage * ratio)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize("advantage", [-3.0, 3.0])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("log_ratio", [-1e30, 200.0, 1e30])
def test_extreme_ratios_stay_finite(log_ratio, dual_clip, advantage):
    def total(log_ratio):
        config = dataclasses.replace(PLAIN, dual_clip=dual_clip)
        advantages = jnp.full_like(log_ratio, advantage)
        loss, _ = clipped_surrogate(log_ratio, log_ratio, advantages, config)
        return loss.sum() + k3(-log_ratio).sum()

    value, gradient = jax.value_and_grad(total)(jnp.full((1, 2), log_ratio))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [(1.5, 2.0, 1.2, -2.4, True), (0.1, 2.0, 0.1, -0.2, False), (1.5, -2.0, -1.2, 2.4, True)],
)
def test_cispo_by_hand(ratio, advantage, loss, gradient, clipped):
    """The docstring's row: log π(y) = -0.5, weights in [0, 1.2]."""
    old = np.float32(-0.5 - np.log(ratio))
    config = dataclasses.replace(PLAIN, clip_low=1.0, clip_high=0.2)

    def token_loss(logprob):
        logprobs = logprob[None, None]
        return clipped_weight(logprobs - old, logprobs, jnp.full((1, 1), advantage), config)

    value, was_clipped = token_loss(jnp.float32(-0.5))
    np.testing.assert_allclose(value, [[loss]], rtol=1e-5)
    assert was_clipped.item() is clipped
    slope = jax.grad(lambda x: token_loss(x)[0].sum())(jnp.float32(-0.5))
    np.testing.assert_allclose(slope, gradient, rtol=1e-5)


# Aggregation --------------------------------------------------------------------------------


def test_aggregations_by_hand():
    per_token = np.array([[1, 2, 3], [10, np.nan, np.inf], [np.nan] * 3], np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    for name, count, mean in (("token", 4, 4), ("sequence", 2, 6), ("constant", 2, 1)):
        aggregation = AGGREGATIONS[name]
        assert aggregation.count(mask) == count
        assert aggregation.mean(per_token, mask, 8) == mean
        assert aggregation.mean(per_token, np.zeros_like(mask), 8) == 0


# The critic's loss ----------------------------------------------------------------------


def plain_value_loss(values, batch, clip):
    """Token by token, in float64."""
    terms = []
    for row, column in np.argwhere(batch.mask):
        v, v_old, r = (x[row, column] for x in (values, batch.values, batch.returns))
        errors = [(v - r) ** 2]
        if clip:
            errors.append((min(max(v, v_old - clip), v_old + clip) - r) ** 2)
        terms.append(max(errors) / 2)
    return sum(terms) / len(terms)


def test_the_critics_loss_by_hand():
    """The docstring's row: V_old = 0, R = 1, c = 0.2."""
    values = np.array([[0.1, 0.5, -0.5, np.nan]], np.float32)
    mask = np.array([[1, 1, 1, 0]], bool)
    batch = as_batch(mask, values=np.zeros_like(values), returns=np.ones_like(values))
    loss, sums = value_loss(values, batch, 0.2)
    np.testing.assert_allclose(loss, (0.405 + 0.32 + 1.125) / 3, rtol=1e-6)
    assert sums["critic_clipped"] == 1
    gradient = jax.grad(lambda v: value_loss(v, batch, 0.2)[0])(values)
    np.testing.assert_allclose(gradient, [[-0.3, 0, -0.5, 0]], rtol=1e-5)


def test_values_within_the_clip_are_not_counted_as_clipped():
    """V_old + (V − V_old) differs from V by rounding; 1,000 values that move by less than c."""
    rng = np.random.default_rng(11)
    old, moves, returns = rng.normal(0, 1, (3, 10, 100)).astype(np.float32)
    values = old + 0.19 * np.tanh(moves)
    batch = as_batch(np.ones((10, 100), bool), values=old, returns=returns)
    assert value_loss(values, batch, 0.2)[1]["critic_clipped"] == 0


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_critics_loss_against_the_formula(clip):
    rng = np.random.default_rng(7)
    mask = np.arange(6) < np.array([6, 1, 4])[:, None]
    values, old, returns = rng.normal(0, 0.6, (3, 3, 6))
    batch = as_batch(mask, values=old, returns=returns)
    inputs = as_float32((values, batch))
    (loss, _), gradient = jax.value_and_grad(value_loss, has_aux=True)(*inputs, clip)
    formula = functools.partial(plain_value_loss, batch=batch, clip=clip)
    np.testing.assert_allclose(loss, formula(values), rtol=1e-5)
    np.testing.assert_allclose(gradient, slopes(formula, values), rtol=1e-4, atol=1e-7)
    parts = [
        value_loss(*take(inputs, rows), clip, mask.sum())[0] for rows in (slice(0, 1), slice(1, 3))
    ]
    np.testing.assert_allclose(sum(parts), loss, rtol=1e-5)
