"""Distillation against exact sums over a small vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from specrl_jax.recipes.distillation import full_kl, score_kl

V = 5


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def _logits(seed: int):
    return np.random.default_rng(seed).normal(size=V)


def _exact_gradient(student, teacher):
    """π_v·(d_v − KL), by the logits."""
    p = special.softmax(student)
    gap = np.log(p) - np.log(special.softmax(teacher))
    return p @ gap, p * (gap - p @ gap)


@pytest.mark.parametrize("seed", range(3))
def test_the_full_sum_has_the_exact_gradient(seed):
    student, teacher = _logits(seed), _logits(seed + 10)
    value, slope = jax.value_and_grad(full_kl)(student, teacher)
    expected, gradient = _exact_gradient(student, teacher)
    assert float(value) == pytest.approx(expected)
    np.testing.assert_allclose(slope, gradient, rtol=1e-9)
    assert not np.any(jax.grad(full_kl, argnums=1)(student, teacher))


@pytest.mark.parametrize("moved", [0.0, 0.5])
def test_the_score_estimator_has_it_in_the_mean(moved):
    """Over y ~ π_old, also where the weights have moved since the rollout."""
    student, teacher = _logits(1), _logits(2)
    old = special.log_softmax(student - moved * _logits(3))
    log_t = special.log_softmax(teacher)

    def term(logits, token):
        logprob = jax.nn.log_softmax(logits)[token]
        return score_kl(logprob, log_t[token], logprob - old[token])

    pairs = [jax.value_and_grad(term)(student, token) for token in range(V)]
    values, slopes = (np.stack(x) for x in zip(*pairs))
    expected, gradient = _exact_gradient(student, teacher)
    probs = np.exp(old)
    assert probs @ values == pytest.approx(expected)
    np.testing.assert_allclose(probs @ slopes, gradient, rtol=1e-9)


def test_the_worked_example():
    student, teacher = jnp.zeros(2), jnp.log(jnp.array([0.8, 0.2]))
    value, slope = jax.value_and_grad(full_kl)(student, teacher)
    assert float(value) == pytest.approx(0.22314, abs=1e-5)
    np.testing.assert_allclose(slope, [-0.34657, 0.34657], atol=1e-5)


def test_the_teacher_itself_has_nothing_to_learn():
    student = _logits(4)
    np.testing.assert_allclose(jax.grad(full_kl)(student, student + 3.0), 0, atol=1e-12)


def test_tokens_that_are_cut_off_count_with_nothing():
    """Padded vocabularies have logits of -inf; the other tokens are as without them."""
    student, teacher = _logits(5), _logits(6)
    value, slope = jax.value_and_grad(full_kl)(student, teacher)
    padded = np.append(student, -np.inf)
    for other in (-np.inf, 0.0):
        wide = np.append(teacher, other)
        cut_value, cut_slope = jax.value_and_grad(full_kl)(padded, wide)
        assert np.all(np.isfinite(cut_slope))
        assert cut_slope[-1] == 0
        if other == -np.inf:
            assert float(cut_value) == pytest.approx(float(value))
            np.testing.assert_allclose(cut_slope[:-1], slope, rtol=1e-9)
