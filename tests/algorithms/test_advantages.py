import dataclasses
import itertools

import jax
import numpy as np
import pytest
from rollout_reference import put_rows

from specrl_jax.algorithms.advantages import (
    ADVANTAGES,
    AdvantageConfig,
    gae,
    group_decoupled,
    group_relative,
    overlong_penalty,
    prefix_relative,
    turn_relative,
    whiten,
)
from specrl_jax.types import Batch


def config(group_size=1, normalize_std=False, leave_one_out=False, gamma=1.0, gae_lambda=1.0):
    return AdvantageConfig(group_size, normalize_std, leave_one_out, gamma, gae_lambda)


def test_by_hand():
    rewards = np.array([1, 0, 0, 1, 0, 0, 0, 1], np.float32)
    plain = group_relative(rewards, config(4))
    np.testing.assert_array_equal(plain, [0.5, -0.5, -0.5, 0.5, -0.25, -0.25, -0.25, 0.75])
    scaled = group_relative(rewards, config(4, True))
    # Sample standard deviations: √(1/3) and 1/2.
    expected = [0.866025, -0.866025, -0.866025, 0.866025, -0.5, -0.5, -0.5, 1.5]
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)
    # RLOO: each against the mean of the other three.
    others = group_relative(rewards, config(4, leave_one_out=True))
    expected = [2 / 3, -2 / 3, -2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, 1]
    np.testing.assert_allclose(others, expected, rtol=1e-6)
    # ε is added to the standard deviation, √(1/2).
    got = group_relative(np.array([0.0, 1e-6], np.float32), config(2, True))
    expected = 0.5 / (np.sqrt(0.5) + 1)
    np.testing.assert_allclose(got, [-expected, expected], rtol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, 1e4 / 3])
def test_equal_rewards_give_exactly_zero(reward, normalize_std):
    rewards = np.full(24, reward, np.float32)
    np.testing.assert_array_equal(group_relative(rewards, config(8, normalize_std)), 0.0)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.5, 1.0)])
def test_gae_against_its_definition(gamma, gae_lambda):
    """arXiv 1506.02438, eq. 11 to 16: the weighted sum of k-step advantages, term by term."""
    rng = np.random.default_rng(3)
    lens, slots = [5, 1, 3, 7], 7
    rewards, values = rng.normal(size=4), rng.normal(size=(4, slots))
    mask = np.arange(slots) < np.array(lens)[:, None]
    values[~mask] = np.resize([np.nan, np.inf, 9.0], np.sum(~mask))  # noise behind the ends
    inputs = (x.astype(np.float32) for x in (rewards, values))
    got, returns = gae(*inputs, mask, config(gamma=gamma, gae_lambda=gae_lambda))
    for row, n in enumerate(lens):
        v = [*values[row, :n], 0.0]
        for t in range(n):
            # Âₜ⁽ᵏ⁾ = Σ γˡ r + γᵏ V(sₜ₊ₖ) − V(sₜ), weights (1 − λ) λᵏ⁻¹, the rest on the last.
            last = n - t
            steps = [
                (gamma ** (last - 1) * rewards[row] if k == last else gamma**k * v[t + k]) - v[t]
                for k in range(1, last + 1)
            ]
            weights = [(1 - gae_lambda) * gae_lambda ** (k - 1) for k in range(1, last)]
            expected = np.dot([*weights, gae_lambda ** (last - 1)], steps)
            np.testing.assert_allclose(got[row, t], expected, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(returns[row, t], expected + v[t], rtol=2e-5, atol=2e-6)
    for array in (got, returns):
        assert not np.any(np.asarray(array)[~mask])


def _estimate(name, rewards, values, mask, settings, tokens=None, lens=None, turn_ends=None):
    """Rows of `tokens` [B, R], or of zeros, after a prompt of one token."""
    mask = np.asarray(mask, bool)
    slots = mask.shape[1]
    tokens = np.zeros(mask.shape) if tokens is None else tokens
    batch = Batch(
        tokens=np.pad(tokens, ((0, 0), (1, 0))).astype(np.int32),
        prompt_lens=np.ones(len(mask), np.int32),
        response_lens=np.full(len(mask), slots, np.int32) if lens is None else np.int32(lens),
        old_logprobs=np.zeros(mask.shape, np.float32),
        advantages=np.zeros(mask.shape, np.float32),
        values=None if values is None else np.float32(values),
        forced=~mask,
        turn_ends=turn_ends,
    )
    rewards, batch = put_rows((np.float32(rewards), batch))
    return ADVANTAGES[name].estimate(rewards, batch, settings)


def test_all_tokens_of_a_response_have_its_group_advantage(make_mesh):
    """By hand, on a mesh that splits the group of four over two devices."""
    mask = [[1, 1], [1, 0], [0, 0], [1, 1]]
    with jax.set_mesh(make_mesh(2, 1, 1)):
        estimate = _estimate("group", [1, 0, 0, 1], None, mask, config(group_size=4))
    expected = [[0.5, 0.5], [-0.5, 0], [0, 0], [0.5, 0.5]]
    np.testing.assert_array_equal(estimate.advantages, expected)
    assert estimate.returns is None


def test_a_critics_advantages_are_whitened(mesh):
    rng = np.random.default_rng(5)
    rewards, values = rng.normal(size=4).astype(np.float32), rng.normal(size=(4, 3))
    mask = np.arange(3) < np.array([3, 1, 2, 3])[:, None]
    estimate = _estimate("gae", rewards, values, mask, config(gae_lambda=0.9))
    advantages, returns = gae(rewards, np.float32(values), mask, config(gae_lambda=0.9))
    np.testing.assert_allclose(estimate.advantages, whiten(advantages, mask), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(estimate.returns, returns, rtol=1e-6)


def test_equal_returns_leave_nothing_to_explain(mesh):
    values, mask = np.random.default_rng(0).normal(size=(4, 3)), np.ones((4, 3))
    for rewards, explained in (([1, 1, 1, 1], False), ([1, 0, 1, 1], True)):
        metrics = _estimate("gae", rewards, values, mask, config()).metrics
        assert np.isfinite(metrics["critic/explained_variance"]) == explained


def test_whitened_advantages_have_mean_0_and_variance_1():
    rng = np.random.default_rng(4)
    mask = rng.random((5, 6)) < 0.6
    advantages = np.where(mask, rng.normal(2, 3, (5, 6)), np.nan).astype(np.float32)
    white = np.asarray(whiten(advantages, mask), np.float64)
    np.testing.assert_allclose([white[mask].mean(), white[mask].var()], [0, 1], atol=1e-6)
    assert not white[~mask].any()
    order = np.argsort(advantages[mask])
    assert np.all(np.diff(white[mask][order]) >= 0)


def test_length_costs_as_in_dapo():
    """arXiv 2503.14476, eq. 13, by its three cases."""

    def paper(length, longest, buffer):
        if length <= longest - buffer:
            return 0.0
        return ((longest - buffer) - length) / buffer if length <= longest else -1.0

    lens = np.arange(1, 21)
    expected = [-paper(n, 20, 6) for n in lens]
    np.testing.assert_allclose(overlong_penalty(lens, 20, 6), expected, rtol=1e-6)
    np.testing.assert_array_equal(
        overlong_penalty(np.array([6, 7, 8, 10]), 10, 4), [0, 0.25, 0.5, 1]
    )


def test_each_reward_is_normalised_before_the_sum(make_mesh):
    """By hand, as in GDPO's figure 2: GRPO cannot tell the sums 0, 1 from 0, 2, GDPO can. On a mesh
    that splits groups."""
    first = np.array([0, 1, 0, 1], np.float32)
    second = np.array([0, 0, 0, 1], np.float32)
    by_sum = group_relative(first + second, config(2, True))
    np.testing.assert_allclose(by_sum[:2], by_sum[2:], atol=1e-5)
    settings = dataclasses.replace(config(2, True), reward_weights=(1.0, 1.0))
    # Sums ∓0.7071 and ∓1.4142; their standard deviation is √((2 · 0.5 + 2 · 2) / 3) = 1.29099.
    expected = [-0.54772, 0.54772, -1.09545, 1.09545]
    # The weight comes after the normalisation: 3 times a reward is not 3 times its weight.
    rewards = np.stack([first, 3 * second], axis=1)
    with jax.set_mesh(make_mesh(4, 1, 1)):
        estimate = _estimate("gdpo", rewards, None, np.ones((4, 2)), settings)
    np.testing.assert_allclose(estimate.advantages, np.stack([expected] * 2, axis=1), rtol=1e-4)


def test_decoupled_advantages_by_another_formula():
    """Three rewards of other weights, group by group in float64; equal rewards give exactly 0."""
    rewards = np.random.default_rng(8).integers(0, 3, (12, 3)).astype(np.float32)
    rewards[:4] = rewards[0]
    weights = np.array([1.0, 0.5, -2.0])
    settings = dataclasses.replace(config(4, True), reward_weights=tuple(weights))
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
    settings = dataclasses.replace(config(4, True), reward_weights=(1.0, 1.0))
    both = np.concatenate([first, scale * (1 - first)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(group_decoupled(both, settings), 0)
    # Of another weight they do not cancel, whatever their sum.
    settings = dataclasses.replace(settings, reward_weights=(2.0, 1.0))
    assert np.all(group_decoupled(both, settings) != 0)


# Six responses: the first four begin with 5 5, of which three go on with 6 6; the second ends
# there, the first and third go on. The last two have a beginning of their own.
LEAVES = [[5, 5, 6, 6, 7], [5, 5, 6, 6, 0], [5, 5, 6, 6, 8], [5, 5, 7, 1, 0], [6, 5, 6, 6, 7],
          [5, 1, 0, 0, 0]]  # fmt: skip
LEAF_LENS = [5, 4, 5, 4, 5, 2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # d = 0: mean 1/2, d = 1: of four 3/4, d = 2: of the first and the third 1/2.
        ("tree", [(0.5 + 0.25 + 0.5) / 3, (0.5 + 0.25) / 2, (-0.5 - 0.75 - 0.5) / 3,
                  (0.5 + 0.25) / 2, -0.5, -0.5]),
        ("tree_by_size", [(3 + 1 + 1) / 12, (3 + 1) / 10, (-3 - 3 - 1) / 12, (3 + 1) / 10,
                          -0.5, -0.5]),
    ],
)  # fmt: skip
def test_advantages_over_shared_prefixes_by_hand(make_mesh, name, expected):
    """Also on a mesh that splits a group."""
    mask = np.arange(5) < np.array(LEAF_LENS)[:, None]
    settings = dataclasses.replace(config(group_size=6), segment=2)
    for shape in ((1, 1, 1), (2, 1, 1)):
        with jax.set_mesh(make_mesh(*shape)):
            estimate = _estimate(
                name, [1, 1, 0, 1, 0, 0], None, mask, settings, np.array(LEAVES), LEAF_LENS
            )
        expected_rows = np.where(mask, np.array(expected)[:, None], 0)
        np.testing.assert_allclose(estimate.advantages, expected_rows, atol=1e-6)


def test_advantages_over_shared_prefixes_by_loops():
    """Random trees, and every option, in plain Python; a group of equal rewards gets exactly 0."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2, (16, 7)).astype(np.int32)
    lens = rng.integers(1, 8, 16).astype(np.int32)
    rewards = rng.random(16).astype(np.float32)
    rewards[8:] = 0.1
    relative = jax.jit(prefix_relative, static_argnames=("config", "by_size"))
    for scale, leave_one_out, by_size in itertools.product((False, True), repeat=3):
        settings = dataclasses.replace(config(8, scale, leave_one_out), segment=2)
        got = relative(rewards, tokens, lens, config=settings, by_size=by_size)
        expected = np.zeros(16)
        for row in range(16):
            sums = 0.0
            for depth in (0, 2, 4, 6):
                same = [
                    other
                    for other in range(row // 8 * 8, row // 8 * 8 + 8)
                    if (depth == 0 or min(lens[other], lens[row]) > depth)
                    and tokens[other, :depth].tolist() == tokens[row, :depth].tolist()
                ]
                if len(same) > 1:
                    mean = np.mean([rewards[x] for x in same if x != row or not leave_one_out])
                    weight = len(same) if by_size else 1
                    expected[row] += weight * (rewards[row] - mean)
                    sums += weight
            expected[row] /= sums
        if scale:
            expected /= expected.std(ddof=1) + 1e-6
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(got[8:], 0)


def test_advantages_of_turns_by_hand(make_mesh):
    """Two episodes, of two turns and of one; the environment's tokens lie before the second."""
    settings = dataclasses.replace(config(2), turn_discount=0.5)
    rewards = np.array([[0, 1], [1, 0]], np.float32)
    ends = np.array([[2, 5], [3, 0]], np.int32)
    got = turn_relative(rewards, ends, settings)
    np.testing.assert_array_equal(got, [[-0.25, 0], [0.25, 0]])
    mask = np.array([[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]], bool)
    for shape in ((1, 1, 1), (2, 1, 1)):
        with jax.set_mesh(make_mesh(*shape)):
            estimate = _estimate("turn", rewards, None, mask, settings, turn_ends=ends)
        expected = [[-0.25, -0.25, 0, 0, 0, 0], [0.25, 0.25, 0.25, 0, 0, 0]]
        np.testing.assert_array_equal(estimate.advantages, expected)


def test_advantages_of_turns_by_loops():
    """Random episodes and every option; turns with equal returns get exactly 0."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 4, 12)
    has = np.arange(3) < counts[:, None]
    rewards = np.where(has, rng.random((12, 3)), 0).astype(np.float32)
    rewards[8:] = np.where(np.arange(3) == counts[8:, None] - 1, 0.1, 0)  # γ = 1: all returns 0.1
    ends = np.where(has, np.arange(3) + 1, 0).astype(np.int32)
    for scale, others, discount in itertools.product((False, True), (False, True), (1.0, 0.7)):
        settings = dataclasses.replace(config(4, scale, others), turn_discount=discount)
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
