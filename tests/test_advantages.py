import statistics

import jax
import numpy as np
import pytest

from specrl_jax.advantages import group_relative


def test_by_hand():
    rewards = np.array([1, 0, 0, 1, 0, 0, 0, 1], np.float32)
    plain = group_relative(rewards, 4, normalize_std=False)
    np.testing.assert_array_equal(plain, [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75])
    scaled = group_relative(rewards, 4, normalize_std=True)
    # Sample standard deviations: √(1/3) and 1/2.
    expected = [0.866025, -0.866025, -0.866025, 0.866025, -0.5, -0.5, -0.5, 1.5]
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)


def test_against_the_standard_library():
    rewards = np.random.default_rng(1).normal(size=(6, 5))
    got = jax.jit(group_relative, static_argnums=1, static_argnames="normalize_std")(
        rewards.astype(np.float32).ravel(), 5, normalize_std=True
    )
    expected = [
        (reward - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        for group in rewards.tolist()
        for reward in group
    ]
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, 1e4 / 3])
def test_equal_rewards_give_exactly_zero(reward, normalize_std):
    rewards = np.full(24, reward, np.float32)
    np.testing.assert_array_equal(group_relative(rewards, 8, normalize_std=normalize_std), 0.0)


def test_epsilon_is_added_to_the_standard_deviation():
    rewards = np.array([0.0, 1.0], np.float32)
    got = group_relative(rewards, 2, normalize_std=True, epsilon=0.5)
    expected = 0.5 / (np.sqrt(0.5) + 0.5)
    np.testing.assert_allclose(got, [-expected, expected], rtol=1e-6)


def test_groups_do_not_touch_each_other():
    rewards = np.array([0, 1, 5, 7], np.float32)
    changed = np.array([0, 1, -3, 100], np.float32)
    first = group_relative(rewards, 2, normalize_std=True)
    second = group_relative(changed, 2, normalize_std=True)
    np.testing.assert_array_equal(first[:2], second[:2])


@pytest.mark.parametrize(
    ("rows", "group_size", "message"),
    [
        (4, 1, "group_size must be >= 2 .* got 1"),
        (7, 2, "whole groups of group_size 2, got 7 rows"),
    ],
)
def test_impossible_groups_are_refused(rows, group_size, message):
    with pytest.raises(ValueError, match=message):
        group_relative(np.zeros(rows, np.float32), group_size, normalize_std=True)


def test_leave_one_out_by_hand():
    """RLOO: each against the mean of the other three."""
    got = group_relative(
        np.float32([1, 0, 0, 1, 3, 1, 1, 1]), 4, normalize_std=False, leave_one_out=True
    )
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 2, -2 / 3, -2 / 3, -2 / 3]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
