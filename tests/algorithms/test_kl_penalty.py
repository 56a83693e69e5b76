"""KL penalty in the loss: its expected gradient, by a sum over all tokens that may be sampled.

A policy is its logits; π is the policy that is trained, old the one that the tokens came from.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_batches import PLAIN, as_batch

from specrl_jax.algorithms.losses import KL_ESTIMATORS, kl_penalty, policy_loss

POLICY = np.array([0.2, 0.3, 0.5])
REFERENCE = np.array([0.7, 0.2, 0.1])
EACH = pytest.mark.parametrize("estimator", KL_ESTIMATORS)


def distributions(seed: int, *shape: int) -> np.ndarray:
    """Random probabilities over the last axis."""
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), shape[:-1])


def kl(logits, reference):
    """KL(π ‖ π_ref) in nats over the last axis."""
    logprobs = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logprobs) * (logprobs - jnp.log(reference)), axis=-1)


def mean_loss(logits, estimator, reference, old, sampler=None):
    """Return the mean of the loss over y ~ sampler, a token each, with weights old / sampler; or
    over y ~ old without weights."""
    config = dataclasses.replace(PLAIN, kl_coef=1.0, kl_estimator=estimator)
    logprobs = jax.nn.log_softmax(logits)
    total = 0.0
    for y in range(len(old)):
        batch = as_batch(
            np.ones((1, 1), bool),
            jnp.log(old[y])[None, None],
            ref_logprobs=jnp.log(reference[y])[None, None],
            importance_weights=None if sampler is None else (old[y] / sampler[y])[None, None],
        )
        loss, _ = policy_loss(logprobs[y][None, None], np.zeros((1, 1)), batch, config)
        total += (old if sampler is None else sampler)[y] * loss
    return total


@functools.partial(jax.jit, static_argnums=0)
def _differentiate(function, logits, **inputs):
    return jax.value_and_grad(function)(logits, **inputs)


MEAN_LOSSES = {name: functools.partial(mean_loss, estimator=name) for name in KL_ESTIMATORS}


def slope(estimator, policy, reference, old, sampler=None):
    """Return (mean loss, its gradient by the logits [V]) in float64."""
    with jax.enable_x64(True):
        inputs = {"reference": reference, "old": old, "sampler": sampler}
        value, gradient = _differentiate(MEAN_LOSSES[estimator], np.log(policy), **inputs)
        return float(value), np.asarray(gradient)


def exact(policy, reference):
    """Return KL(π ‖ π_ref) and its gradient by the logits, in float64."""
    with jax.enable_x64(True):
        value, gradient = _differentiate(kl, np.log(policy), reference=reference)
        return float(value), np.asarray(gradient)


@EACH
def test_the_gradient_by_hand(estimator):
    """pi_y (log pi_y / ref_y - KL): KL = 0.6758, .2 (-1.2528 - .6758) = -.3857, and so on."""
    _, gradient = slope(estimator, POLICY, REFERENCE, POLICY)
    np.testing.assert_allclose(gradient, [-0.3857, -0.0811, 0.4668], atol=5e-5)
    np.testing.assert_allclose(gradient, exact(POLICY, REFERENCE)[1], rtol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@EACH
def test_tokens_of_an_older_policy(estimator, weighted):
    """In later updates of a step tokens are not from the policy any more; or they are from a third
    one, with importance weights."""
    for seed in (1, 2, 3):
        policy, reference, old, sampler = distributions(seed, 4, 5)
        want_value, want = exact(policy, reference)
        value, gradient = slope(estimator, policy, reference, old, sampler if weighted else None)
        np.testing.assert_allclose(gradient, want, rtol=1e-9, atol=1e-12)
        if estimator != "k2":  # biased
            assert value == pytest.approx(want_value, rel=1e-9)


@EACH
def test_contexts_count_as_they_were_sampled(estimator):
    """Two tokens, a policy for the first and one for the second after each first: the gradient is
    that of the first's KL and of the second's KLs, these as often as the old policy came there."""
    policy, reference, old = distributions(5, 3, 4, 3)  # context 0, and 1 + the first token
    config = dataclasses.replace(PLAIN, kl_coef=1.0, kl_estimator=estimator)

    def mean_loss(logits):
        logprobs = jax.nn.log_softmax(logits)
        total = 0.0
        for y in itertools.product(range(3), repeat=2):
            at = (np.array([0, 1 + y[0]]), np.array(y))
            old_logprobs = np.log(old[at])[None]
            ref_logprobs = np.log(reference[at])[None]
            batch = as_batch(np.ones((1, 2), bool), old_logprobs, ref_logprobs=ref_logprobs)
            loss, _ = policy_loss(logprobs[at][None], np.zeros((1, 2)), batch, config)
            total += np.prod(old[at]) * loss
        return total

    visits = np.array([1.0, *old[0]])
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(mean_loss))(np.log(policy))
        want = jax.grad(lambda x: jnp.sum(visits * kl(x, reference)) / 2)(np.log(policy))
    np.testing.assert_allclose(gradient, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("estimator", "value"), [("k1+", 0.693), ("k2", 0.240), ("k3+", 0.193)])
def test_the_worked_row(estimator, value):
    """π(y) = 0.5, π_ref(y) = 0.25, first with π_old(y) = 0.5, then with 0.25: a ratio of 2."""
    d = np.float32(np.log(0.25) - np.log(0.5))
    differentiate = jax.value_and_grad(kl_penalty, argnums=1)
    for ratio in (1, 2):
        got, gradient = differentiate(estimator, d, np.log(np.float32(ratio)))
        assert got == pytest.approx(ratio * value, abs=1e-3)
        assert -gradient == pytest.approx(ratio * 0.693, abs=1e-3)  # d falls as log π(y) rises
