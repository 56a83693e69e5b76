"""Advantages of each turn of an episode."""

import itertools

import jax
import numpy as np
from advantage_cases import config, estimate

from specrl_jax.recipes.turn_advantage import TurnConfig, turn_relative
from specrl_jax.training.collected import Turns


def test_advantages_of_turns_by_hand(make_mesh):
    """Two episodes, of two turns and of one; the environment's tokens lie before the second."""
    settings = config(2, kind=TurnConfig, discount=0.5)
    rewards = np.array([[0, 1], [1, 0]], np.float32)
    ends = np.array([[2, 5], [3, 0]], np.int32)
    turns = Turns(rewards, ends, np.full((2, 2), ""))
    got = turn_relative(rewards, ends, settings)
    np.testing.assert_array_equal(got, [[-0.25, 0], [0.25, 0]])
    mask = np.array([[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
    for shape in ((1, 1, 1), (2, 1, 1)):
        with jax.set_mesh(make_mesh(*shape)):
            estimated = estimate("turn", rewards.sum(axis=1), None, mask, settings, turns=turns)
        expected = [[-0.25, -0.25, 0, 0, 0, 0], [0.25, 0.25, 0.25, 0, 0, 0]]
        np.testing.assert_array_equal(estimated.advantages, expected)


def test_advantages_of_turns_by_loops():
    """Random episodes and every option; turns with equal returns get exactly 0."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 4, 12)
    has = np.arange(3) < counts[:, None]
    rewards = np.where(has, rng.random((12, 3)), 0).astype(np.float32)
    rewards[8:] = np.where(np.arange(3) == counts[8:, None] - 1, 0.1, 0)  # γ = 1: all returns 0.1
    ends = np.where(has, np.arange(3) + 1, 0).astype(np.int32)
    for scale, others, discount in itertools.product((False, True), (False, True), (1.0, 0.7)):
        settings = config(4, scale, others, kind=TurnConfig, discount=discount)
        got = np.asarray(turn_relative(rewards, ends, settings))
        for row, turn in np.argwhere(has):
            group = [x for x in range(row // 4 * 4, row // 4 * 4 + 4) if counts[x] > turn]
            returns = {
                x: sum(discount ** (k - turn) * float(rewards[x, k]) for k in range(turn, 3))
                for x in group
            }
            expected = 0.0
            if len(group) > 1:
                values = np.array([*returns.values()])
                expected = returns[row] - values.mean()
                expected /= values.std(ddof=1) + 1e-6 if scale else 1
                expected *= len(group) / (len(group) - 1) if others else 1
            np.testing.assert_allclose(got[row, turn], expected, rtol=1e-3, atol=1e-6)
        np.testing.assert_array_equal(got[~has], 0)
        if discount == 1:
            np.testing.assert_array_equal(got[8:], 0)


def test_the_last_turn_pays_for_the_length(mesh):
    """Two episodes of two turns and of one; without the penalty their advantages are 0."""
    turns = Turns(np.zeros((2, 2), np.float32), np.array([[1, 3], [3, 0]]), np.full((2, 2), ""))
    settings = config(2, kind=TurnConfig)
    penalty = np.array([0.5, 0.0], np.float32)
    estimated = estimate(
        "turn", -penalty, None, np.ones((2, 3)), settings, turns=turns, length_penalty=penalty
    )
    np.testing.assert_array_equal(estimated.advantages, [[-0.25, 0, 0], [0.25, 0.25, 0.25]])
