"""The policy's loss as a whole, against the papers' formulas."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from loss_batches import FULL, MAX_LEN, PLAIN, as_batch, as_float32, make_batch, slopes, take

from specrl_jax.algorithms.losses import AGGREGATIONS, policy_loss, policy_metrics

EVERY_TERM = {"dual_clip": 3.0, "kl_coef": 0.1, "entropy_coef": 0.01}
CHANGES = {
    "k1+": EVERY_TERM | {"kl_estimator": "k1+"},
    "k2, over rows": EVERY_TERM | {"kl_estimator": "k2", "aggregation": "sequence"},
    "k3+": EVERY_TERM,
    "k3+, over rows": EVERY_TERM | {"aggregation": "sequence"},
    "Dr. GRPO": {"aggregation": "constant"},
    "GSPO": {"ratio": "sequence", "aggregation": "sequence"},
    "GSPO over tokens": {"ratio": "sequence"},
    "CISPO": {"objective": "cispo"},
    "CISPO over rows": {"objective": "cispo", "aggregation": "sequence"},
    "CISPO with GSPO's ratio": {"objective": "cispo", "ratio": "sequence"},
}


def paper_loss(logprobs, entropy, batch, config, at):
    """The papers' formulas in float64; at: the log-probs where no gradient goes through."""
    total = 0.0
    rows = np.sum(batch.response_lens > 0)
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    for row, n in enumerate(batch.response_lens):
        if not n:
            continue
        a = batch.advantages[row, :n]
        old = batch.old_logprobs[row, :n]
        new = logprobs[row, :n]
        fixed = at[row, :n]
        r = np.exp(new - old)
        weight = np.exp(fixed - old)
        if config.ratio == "sequence":  # (π(y) / π_old(y))^(1/|y|) at `at`, times π / sg(π)
            weight = np.full(n, np.prod(weight) ** (1 / n))
            r = weight * np.exp(new - fixed)
        if config.objective == "cispo":
            terms = -np.clip(weight, low, high) * a * new
        else:
            terms = -np.minimum(r * a, np.clip(r, low, high) * a)
        if config.dual_clip:
            terms = np.where(a < 0, np.minimum(terms, config.dual_clip * np.abs(a)), terms)
        # Its value is that of the estimator, its gradient d, both weighed by the token's ratio.
        d = batch.ref_logprobs[row, :n] - fixed
        penalty = {"k1+": -d, "k2": d**2 / 2, "k3+": np.exp(d) - d - 1}[config.kl_estimator]
        penalty = np.exp(fixed - old) * (penalty + d * (fixed - new))
        terms = terms + config.kl_coef * penalty - config.entropy_coef * entropy[row, :n]
        total += terms.sum() / {
            "token": batch.response_lens.sum(), "sequence": n * rows, "constant": MAX_LEN * rows
        }[config.aggregation]  # fmt: skip
    return total


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_policy_loss_against_the_papers(changes):
    """Values by an independent formula, and gradients by its finite differences."""
    logprobs, entropy, batch = make_batch(4, rows=4, slots=5)
    config = dataclasses.replace(PLAIN, **changes)
    formula = functools.partial(paper_loss, batch=batch, config=config, at=logprobs)
    differentiate = jax.value_and_grad(policy_loss, argnums=(0, 1), has_aux=True)
    with jax.enable_x64(True):
        (loss, _), gradients = differentiate(logprobs, entropy, batch, config)
        assert loss.dtype == np.float64
        np.testing.assert_allclose(loss, formula(logprobs, entropy), rtol=1e-12)
    by_formula = (
        slopes(lambda x: formula(x, entropy), logprobs),
        slopes(lambda x: formula(logprobs, x), entropy),
    )
    for gradient, slope in zip(gradients, by_formula, strict=True):
        np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-8)
    inputs = as_float32((logprobs, entropy, batch))
    loss, _ = jax.jit(policy_loss, static_argnums=3)(*inputs, config)
    np.testing.assert_allclose(loss, formula(logprobs, entropy), rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("poison", [np.nan, -np.inf, 3e38])
def test_what_is_masked_cannot_poison(aggregation, poison):
    batch = as_float32(make_batch(6))
    mask = batch[2].mask
    config = dataclasses.replace(FULL, aggregation=aggregation)

    def spoil(x):
        return np.where(mask, x, np.float32(poison)) if x.dtype == np.float32 else x

    differentiate = jax.value_and_grad(policy_loss, (0, 1), has_aux=True)
    (loss, sums), gradients = differentiate(*jax.tree.map(spoil, batch), config)
    (clean_loss, clean_sums), clean_gradients = differentiate(*batch, config)
    assert loss == clean_loss
    jax.tree.map(np.testing.assert_array_equal, sums, clean_sums)
    jax.tree.map(np.testing.assert_array_equal, gradients, clean_gradients)
    assert not np.asarray(gradients[0])[~np.asarray(mask)].any()


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [("token", (-4.0 + 6.0) / 5), ("sequence", (-2.0 + 2.0) / 2), ("constant", 2.0 / (2 * 9))],
)
def test_a_solution_has_its_likelihood_alone(aggregation, loss):
    """Two sampled tokens of advantage 2; three tokens of a solution, of 4 nats each, with weight a
    half. The entropy bonus and the KL, here 0 for the sampled row, leave the solution out."""
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    logprobs = np.array([[-1, -1, 9], [-4, -4, -4]], np.float32)
    batch = as_batch(mask, np.where(mask, -1, 7).astype(np.float32), np.full((2, 3), 2, np.float32))
    batch = dataclasses.replace(
        batch, supervised=np.array([0, 0.5], np.float32), ref_logprobs=batch.old_logprobs
    )
    config = dataclasses.replace(PLAIN, aggregation=aggregation, kl_coef=0.3, entropy_coef=0.7)
    entropy = np.array([[0, 0, 5], [5, 5, 5]], np.float32)
    value, sums = policy_loss(logprobs, entropy, batch, config)
    assert value == pytest.approx(loss, abs=1e-6)
    assert sums["tokens"] == 2
    np.testing.assert_array_equal(sums["policy/solution_nll"], [12, 3])
    assert sums["entropy"] == sums["kl"] == sums["logprob_gap"] == 0


def test_metrics_by_hand():
    """Whichever is trained on, k3 without weights is reported."""
    ratio = np.array([[1.5, 1.0, 9.9], [0.5, 1.0, 1.0]], np.float32)
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    entropy = np.array([[1, 2, 99], [3, 4, 5]], np.float32)
    logprobs = np.log(ratio)
    reference = logprobs - np.float32(math.log(2))
    batch = as_batch(mask, advantages=np.ones_like(ratio), ref_logprobs=reference)
    config = dataclasses.replace(PLAIN, kl_coef=0.1, kl_estimator="k2")
    _, sums = policy_loss(logprobs, entropy, batch, config)
    metrics = policy_metrics(sums)
    assert sums["tokens"] == 5
    assert metrics["policy/clip_fraction"] == pytest.approx(1 / 5)
    assert metrics["policy/clip_fraction_high"] == metrics["policy/clip_fraction"]
    assert metrics["policy/clip_fraction_low"] == 0
    assert metrics["policy/ratio_mean"] == pytest.approx(5 / 5)
    # Σ r − 1 − log r over 1.5, 0.5 and three times 1, whose log-probs were all 0.
    assert metrics["policy/approx_kl"] == pytest.approx(-math.log(1.5 * 0.5) / 5)
    assert metrics["policy/entropy"] == pytest.approx(3.0)
    assert metrics["policy/kl"] == pytest.approx(0.5 + math.log(2) - 1)
    assert sums["logprob_gap"] == pytest.approx(math.log(1.5) + math.log(2))


@pytest.mark.parametrize(
    ("changes", "low", "high"),
    [
        ({}, 1, 1),  # 0.5 of a worse response, 1.5 of a better one
        ({"dual_clip": 3.0}, 1, 2),  # and 9 of a worse one
        ({"objective": "cispo"}, 2, 3),  # whatever the advantage
        ({"objective": "dpo"}, 0, 0),
    ],
)
def test_clips_are_told_apart_by_their_side(changes, low, high):
    ratio = np.array([[1.5, 0.5, 1.5], [0.5, 1.0, 9.0]], np.float32)
    advantages = np.array([[1, 1, -1], [-1, -1, -1]], np.float32)
    batch = as_batch(np.ones((2, 3), bool), advantages=advantages)
    config = dataclasses.replace(PLAIN, clip_low=0.2, clip_high=0.2, **changes)
    _, sums = policy_loss(np.log(ratio), np.zeros_like(ratio), batch, config)
    assert (sums["clip_fraction_low"], sums["clip_fraction_high"]) == (low, high)
    assert sums["clip_fraction"] == low + high


def test_without_a_reference_there_is_no_kl():
    logprobs, entropy, batch = as_float32(make_batch(7))
    batch = dataclasses.replace(batch, ref_logprobs=None)
    _, sums = policy_loss(logprobs, entropy, batch, PLAIN)
    assert "policy/kl" not in policy_metrics(sums)


MASKS = (("token_low", 0.6), ("row_high", 1.2), ("negative_kl", 0.05), ("binary_kl", 0.1))
CUT = CHANGES | {"masks": {"masks": MASKS}}


@pytest.mark.parametrize("changes", CUT.values(), ids=CUT)
def test_micro_batches_sum_to_the_mini_batch(changes):
    batch = as_float32(make_batch(3))
    config = dataclasses.replace(PLAIN, **changes)
    differentiate = jax.value_and_grad(policy_loss, argnums=(0, 1), has_aux=True)
    (whole, whole_sums), whole_gradient = differentiate(*batch, config)

    normalizer = AGGREGATIONS[config.aggregation].count(batch[2].mask)
    parts = [
        differentiate(*take(batch, rows), config, normalizer) for rows in ([0, 1, 2], [3], [4], [5])
    ]
    gradients = jax.tree.map(lambda *x: np.concatenate(x), *(gradient for _, gradient in parts))
    total, sums = jax.tree.map(lambda *x: sum(x), *(values for values, _ in parts))
    np.testing.assert_allclose(total, whole, rtol=1e-5)
    for got, want in zip(gradients, whole_gradient, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    metrics = policy_metrics(sums)
    expected = policy_metrics(whole_sums)
    assert metrics.keys() == expected.keys()
    for name in metrics:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


def test_weights_multiply_what_is_estimated_from_a_token():
    """By hand: ratios 1, so a token's loss is -w A, its penalty -0.1 w; entropy keeps weight 1."""
    logprobs = np.full((1, 3), -1.0, np.float32)
    advantages = np.array([[1.0, -2.0, 5.0]], np.float32)
    weights = np.array([[0.5, 3.0, np.nan]], np.float32)
    mask = np.array([[1, 1, 0]], bool)
    entropy = np.full((1, 3), 0.7, np.float32)
    more = {"ref_logprobs": logprobs + 0.1, "importance_weights": weights}
    batch = as_batch(mask, logprobs, advantages, **more)

    def loss(logprobs, config=PLAIN):
        return policy_loss(logprobs, entropy, batch, config)[0]

    np.testing.assert_allclose(loss(logprobs), (-0.5 + 6.0) / 2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(logprobs), [[-0.25, 3.0, 0]], rtol=1e-6)
    config = dataclasses.replace(PLAIN, entropy_coef=0.1, kl_coef=2.0, kl_estimator="k1+")
    penalty = 2.0 * -0.1 * (0.5 + 3.0) / 2
    expected = (-0.5 + 6.0) / 2 + penalty - 0.07
    np.testing.assert_allclose(loss(logprobs, config), expected, rtol=1e-5)
