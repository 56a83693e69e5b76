import jax
import numpy as np
import pytest
from advantage_cases import config, estimate

from specrl_jax.algorithms.advantages import gae, group_relative, overlong_penalty, whiten


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


def test_all_tokens_of_a_response_have_its_group_advantage(make_mesh):
    """By hand, on a mesh that splits the group of four over two devices."""
    mask = [[1, 1], [1, 0], [0, 0], [1, 1]]
    with jax.set_mesh(make_mesh(2, 1, 1)):
        got = estimate("group", [1, 0, 0, 1], None, mask, config(group_size=4))
    expected = [[0.5, 0.5], [-0.5, 0], [0, 0], [0.5, 0.5]]
    np.testing.assert_array_equal(got.advantages, expected)
    assert got.returns is None


def test_a_critics_advantages_are_whitened(mesh):
    rng = np.random.default_rng(5)
    rewards, values = rng.normal(size=4).astype(np.float32), rng.normal(size=(4, 3))
    mask = np.arange(3) < np.array([3, 1, 2, 3])[:, None]
    got = estimate("gae", rewards, values, mask, config(gae_lambda=0.9))
    advantages, returns = gae(rewards, np.float32(values), mask, config(gae_lambda=0.9))
    np.testing.assert_allclose(got.advantages, whiten(advantages, mask), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.returns, returns, rtol=1e-6)


def test_equal_returns_leave_nothing_to_explain(mesh):
    values, mask = np.random.default_rng(0).normal(size=(4, 3)), np.ones((4, 3))
    for rewards, explained in (([1, 1, 1, 1], False), ([1, 0, 1, 1], True)):
        metrics = estimate("gae", rewards, values, mask, config()).metrics
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
