"""Rewards of a sum, each normalised in its group."""

import jax
import numpy as np
import pytest
from advantage_cases import config, estimate
from small_runs import records, small_config
from watched_updates import SOME_SIGNAL

from specrl_jax import train as loop
from specrl_jax.algorithms.advantages import group_relative
from specrl_jax.algorithms.evidence import Evidence
from specrl_jax.recipes.gdpo import DecoupledConfig, group_decoupled
from specrl_jax.training import collect, stages


def decoupled(group_size, weights):
    names = ("first", "second", "third")[: len(weights)]
    return config(group_size, True, kind=DecoupledConfig, names=names, weights=weights)


def test_each_reward_is_normalised_before_the_sum(make_mesh):
    """By hand, as in GDPO's figure 2: GRPO cannot tell the sums 0, 1 from 0, 2, GDPO can. On a mesh
    that splits groups."""
    first = np.array([0, 1, 0, 1], np.float32)
    second = np.array([0, 0, 0, 1], np.float32)
    by_sum = group_relative(first + second, config(2, True))
    np.testing.assert_allclose(by_sum[:2], by_sum[2:], atol=1e-5)
    settings = decoupled(2, (1.0, 1.0))
    # Sums ∓0.7071 and ∓1.4142; their standard deviation is √((2 · 0.5 + 2 · 2) / 3) = 1.29099.
    expected = [-0.54772, 0.54772, -1.09545, 1.09545]
    # The weight comes after the normalisation: 3 times a reward is not 3 times its weight.
    by_function = {"first": first, "second": 3 * second}
    with jax.set_mesh(make_mesh(4, 1, 1)):
        got = estimate(
            "gdpo", first + 3 * second, None, np.ones((4, 2)), settings, by_function=by_function
        )
    np.testing.assert_allclose(got.advantages, np.stack([expected] * 2, axis=1), rtol=1e-4)


def test_decoupled_advantages_by_another_formula():
    """Three rewards with other weights, group by group in float64; equal rewards give exactly 0."""
    rewards = np.random.default_rng(8).integers(0, 3, (12, 3)).astype(np.float32)
    rewards[:4] = rewards[0]
    weights = np.array([1.0, 0.5, -2.0])
    settings = decoupled(4, tuple(weights))
    total = np.zeros(12)
    for start in range(0, 12, 4):
        for k in range(3):
            group = rewards[start : start + 4, k].astype(np.float64)
            total[start : start + 4] += (
                weights[k] * (group - group.mean()) / (group.std(ddof=1) + 1e-6)
            )
    got = group_decoupled(rewards, settings)
    np.testing.assert_allclose(got, total / (total.std(ddof=1) + 1e-6), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[:4], 0)
    np.testing.assert_array_equal(group_decoupled(np.ones_like(rewards), settings), 0)


@pytest.mark.parametrize("scale", [1.0, 0.1, 7.0])
def test_rewards_that_cancel_leave_no_advantage(scale):
    """Nor one from rounding or ε, which the batch's standard deviation would scale to 1."""
    first = np.random.default_rng(3).random((16, 1), np.float32)
    settings = decoupled(4, (1.0, 1.0))
    both = np.concatenate([first, scale * (1 - first)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(group_decoupled(both, settings), 0)
    # Of another weight they do not cancel, whatever their sum.
    settings = decoupled(4, (2.0, 1.0))
    assert np.all(group_decoupled(both, settings) != 0)


def test_rewards_of_a_sum_reach_the_advantage_apart(mesh, tmp_path, watched, monkeypatch):
    """Two functions and the price of length, each normalised in its group: by NumPy."""
    collected = []
    collect_metrics = collect.collect_metrics

    def watch_batch(run, state, batch, rollouts):
        collected.append(rollouts[0].rewards.by_function)
        return collect_metrics(run, state, batch, rollouts)

    monkeypatch.setattr(collect, "collect_metrics", watch_batch)
    changes = SOME_SIGNAL | {
        "algorithm.advantage": "gdpo", "reward.name": "small_runs:score_first_letter*2+format",
        "reward.format": "[0-4].*", "reward.overlong_tokens": 4, "reward.overlong_penalty": 0.3,
        "updates.mini_batch_size": 32, "train.steps": 1,
    }  # fmt: skip
    loop.train(small_config(changes), tmp_path / "run")
    (update,) = watched
    mask = update.mask
    columns = [*collected[0].values(), -np.clip((mask.sum(axis=1) - 2) / 4, 0, 1)]
    total = np.zeros(32)
    for weight, column in zip([2.0, 1.0, 1.0], columns, strict=True):
        groups = column.astype(np.float64).reshape(4, 8)
        centred = groups - groups.mean(axis=1, keepdims=True)
        normal = centred / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-6)
        total += weight * normal.reshape(-1)
    assert all(np.ptp(column) > 0 for column in columns)
    expected = np.where(mask, (total / total.std(ddof=1))[:, None], 0)
    np.testing.assert_allclose(update.advantages, expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("weight", "factor", "expected"),
    [(1, 0.5, 1.0), (2, 2.0, 0.75)],  # parts that cancel, and parts of equal sums that do not
)
def test_groups_without_signal_are_those_without_advantages(
    mesh, tmp_path, monkeypatch, weight, factor, expected
):
    """Of the four groups the first has different rewards."""
    first = np.zeros(32, np.float32)
    first[:3] = 1
    name = "small_runs:score_first_letter"
    parts = {name: first, "format": factor * (1 - first)}
    monkeypatch.setattr(
        stages, "gather_evidence", lambda run, batch, collected: Evidence(None, batch, None, parts)
    )
    changes = {
        "algorithm.advantage": "gdpo", "train.steps": 1,
        "reward.name": f"{name}*{weight}+format", "reward.format": "[0-4].*",
    }  # fmt: skip
    loop.train(small_config(SOME_SIGNAL | changes), tmp_path / "run")
    assert records(tmp_path / "run")[-1]["reward/no_signal"] == expected
