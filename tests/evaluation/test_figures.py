"""Figures of evaluation, against numbers worked out by hand."""

import itertools

import numpy as np
import pytest

from specrl_jax.evaluation.figures import figures, mean_and_interval, pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(k):
    right = np.array([[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1]], bool)
    subsets = list(itertools.combinations(range(5), k))
    expected = [np.mean([row[list(chosen)].any() for chosen in subsets]) for row in right]
    np.testing.assert_allclose(pass_at_k(right, k), expected)


def test_the_interval_is_over_prompts():
    mean, half = mean_and_interval(np.array([0.0, 0.0, 1.0, 1.0]))
    assert mean == 0.5
    assert half == pytest.approx(1.96 * np.sqrt(1 / 3) / 2)  # the sample's std over sqrt(4)
    assert np.isnan(mean_and_interval(np.array([1.0]))[1])


def test_figures_count_a_response_as_right_from_reward_1():
    rewards = np.array([[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]])
    means = {name: mean for name, (mean, _) in figures(rewards).items()}
    expected = {"avg@3": 0.25, "pass@1": 1 / 6, "pass@2": 1 / 3, "pass@3": 0.5}
    assert means == pytest.approx(expected)
