"""Which log-probs an update compares, what weighs a token, and what leaves it out."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from loss_batches import FULL, PLAIN, as_batch, make_batch, slopes
from small_runs import records, saved, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms.corrections import MASKS, binary_kl
from specrl_jax.algorithms.losses import policy_loss, policy_metrics
from specrl_jax.settings import schema
from specrl_jax.telemetry.metrics import METRICS


def test_binary_kl_is_that_of_two_outcomes():
    """By its definition in float64; certain tokens are compared as if 1e-6 less certain."""
    p = np.array([0.5, 0.25, 0.9, 1e-4, 0.999, 1.0, 1.0, 1e-9])
    q = np.array([0.25, 0.5, 0.1, 0.3, 0.99, 0.9, 1.0, 1e-12])
    assert binary_kl(math.log(0.5), math.log(0.25)) == pytest.approx(0.14384, abs=1e-5)
    assert binary_kl(math.log(0.25), math.log(0.5)) == pytest.approx(0.13081, abs=1e-5)
    got = binary_kl(np.log(p).astype(np.float32), np.log(q).astype(np.float32))
    p = np.clip(p, 1e-6, 1 - 1e-6)
    q = np.clip(q, 1e-6, 1 - 1e-6)
    expected = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-6)
    assert binary_kl(np.float32(0.0), np.float32(-1.2e-7)) == 0  # a rounding error of certainty


def test_every_mask_has_a_field_and_a_metric():
    fields = {name for name in schema().fields if name.startswith("algorithm.mask.")}
    fields.remove("algorithm.mask.truncated")  # of whole rows, by their end and not by a ratio
    metrics = {name for name in METRICS if name.startswith("policy/masked_")}
    assert fields == {f"algorithm.mask.{name}" for name in MASKS}
    assert metrics == {f"policy/masked_{name}" for name in MASKS}


# name, bound: each leaves some of the tokens of `make_batch` out, not all.
SOME = (
    ("token_low", 0.6), ("token_high", 1.7), ("row_low", 0.8), ("row_high", 1.2),
    ("outlier_low", 0.6), ("outlier_high", 1.6), ("negative_kl", 0.05), ("binary_kl", 0.1),
)  # fmt: skip


def _float64_batch():
    logprobs, entropy, batch = make_batch(11, rows=6, slots=5)
    shift = np.random.default_rng(2).normal(scale=0.4, size=logprobs.shape)
    return logprobs, entropy, dataclasses.replace(batch, recomputed_logprobs=logprobs - shift)


def _left_out(name, bound, train, current, batch):
    """Find masked tokens by the definitions, with probabilities in float64, row by row."""
    found = np.zeros(train.shape, bool)
    for row, n in enumerate(batch.response_lens):
        if not n:
            continue
        ratio = np.exp(train[row, :n] - batch.old_logprobs[row, :n])
        mean = np.prod(ratio) ** (1 / n)
        divergence = np.mean(batch.old_logprobs[row, :n] - current[row, :n])
        p = np.clip(np.exp(train[row, :n]), 1e-6, 1 - 1e-6)
        q = np.clip(np.exp(batch.old_logprobs[row, :n]), 1e-6, 1 - 1e-6)
        forward = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        backward = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
        found[row, :n] = {
            "token_low": ratio < bound,
            "token_high": ratio > bound,
            "row_low": mean < bound,
            "row_high": mean > bound,
            "outlier_low": ratio.min() < bound,
            "outlier_high": ratio.max() > bound,
            "negative_kl": (batch.advantages[row, :n] < 0) & (divergence > bound),
            "binary_kl": (forward > bound) | (backward > bound),
        }[name]
    return found


@pytest.mark.parametrize("old", ["rollout", "recompute", "current"])
@pytest.mark.parametrize(("name", "bound"), SOME)
def test_a_masked_token_has_no_gradient_and_counts_in_the_mean(name, bound, old):
    """Gradients of all others are those without masks, as the denominator is the same."""
    logprobs, entropy, batch = _float64_batch()
    train = batch.recomputed_logprobs if old == "recompute" else logprobs
    masked = _left_out(name, bound, train, logprobs, batch)
    tokens = np.asarray(batch.mask).sum()
    assert 0 < masked.sum() < tokens
    plain = dataclasses.replace(FULL, aggregation="sequence", old_logprobs=old)
    config = dataclasses.replace(plain, masks=((name, bound),))
    differentiate = jax.value_and_grad(policy_loss, argnums=(0, 1), has_aux=True)
    with jax.enable_x64(True):
        (_, sums), gradients = differentiate(logprobs, entropy, batch, config)
        _, without_mask = differentiate(logprobs, entropy, batch, plain)
        share = policy_metrics(sums)[f"policy/masked_{name}"]
    for gradient, other in zip(gradients, without_mask, strict=True):
        np.testing.assert_allclose(gradient, np.where(masked, 0, other), rtol=1e-12)
        assert np.any(np.asarray(gradient) != 0)
    np.testing.assert_allclose(share, masked.sum() / tokens, rtol=1e-12)


def test_a_ratio_beyond_float32_is_masked_and_harms_nothing():
    """e^300 is inf in float32; the other token's gradient is −A / 2."""
    logprobs = np.array([[-1.0, -301.0], [-1.0, -1.0]], np.float32)
    rollout = np.array([[-1.0, -1.0], [-1.0, -301.0]], np.float32)
    batch = as_batch(np.ones((2, 2), bool), rollout, np.ones((2, 2), np.float32))
    config = dataclasses.replace(PLAIN, masks=(("outlier_low", 1e-4), ("token_high", 5.0)))
    zeros = np.zeros((2, 2), np.float32)
    gradient = jax.grad(lambda x: policy_loss(x, zeros, batch, config)[0])(logprobs)
    np.testing.assert_array_equal(gradient, [[0, 0], [-0.25, 0]])


def test_current_log_probs_give_the_policy_gradient_whatever_the_rollouts_say():
    """Ratio 1 and no clip: the gradient of −mean(A·log π), by finite differences."""
    logprobs, entropy, batch = _float64_batch()
    batch = dataclasses.replace(batch, old_logprobs=batch.old_logprobs - 9.0)
    config = dataclasses.replace(PLAIN, old_logprobs="current")
    mask = np.asarray(batch.mask)

    def formula(x):
        return -np.sum(batch.advantages * x, where=mask) / mask.sum()

    with jax.enable_x64(True):
        gradient, sums = jax.grad(policy_loss, has_aux=True)(logprobs, entropy, batch, config)
        metrics = policy_metrics(sums)
    np.testing.assert_allclose(gradient, slopes(formula, logprobs), rtol=1e-6, atol=1e-9)
    assert float(metrics["policy/ratio_mean"]) == 1
    assert float(metrics["policy/clip_fraction"]) == 0


@pytest.mark.parametrize(
    ("old", "expected"),
    [("rollout", [0.5, 3.0]), ("recompute", [0.75, 2.0]), ("current", [1.0, 1.5])],
)
def test_weights_have_the_ratio_that_the_objective_lacks(old, expected):
    """By hand: w is 0.5 and 3, π_old / π_rollout 1, (1.5, 2/3) or (2, 0.5), and the cap is 3.2."""
    rollout = np.log(np.full((1, 2), 0.25, np.float32))
    factors = np.array([[2.0, 0.5]], np.float32)
    batch = as_batch(
        np.ones((1, 2), bool),
        rollout,
        np.ones((1, 2), np.float32),
        recomputed_logprobs=rollout + np.log(np.array([[1.5, 2 / 3]], np.float32)),
        importance_weights=np.array([[0.5, 3.0]], np.float32),
    )
    for cap in (3.2, 0.9):
        config = dataclasses.replace(PLAIN, old_logprobs=old, importance_cap=cap)
        _, sums = policy_loss(rollout + np.log(factors), np.zeros((1, 2)), batch, config)
        assert sums["importance_mean"] == pytest.approx(np.minimum(expected, cap).sum(), rel=1e-5)
        assert sums["importance_capped"] == np.sum(np.array(expected) > cap)


def test_current_log_probs_make_the_run_of_recomputed_ones(mesh, tmp_path):
    """One update a step: both have ratio 1 up to rounding, so the weights agree."""
    policies = {}
    for old in ("recompute", "current"):
        changes = {
            "reward.name": "small_runs:score_first_letter", "reward.extract": "",
            "rollout.draft": "none", "train.steps": 2, "updates.old_logprobs": old,
            "updates.mini_batch_size": 32, "algorithm.importance_cap": 2.0,
        }  # fmt: skip
        loop.train(small_config(changes), tmp_path / old)
        steps = records(tmp_path / old)[1:]
        assert [r["policy/clip_fraction"] for r in steps] == [0, 0]
        assert steps[0]["policy/importance_mean"] == pytest.approx(1, abs=1e-4)
        assert steps[0]["policy/rollout_train_logprob_gap"] < 1e-4
        policies[old] = {
            name: x for name, x in saved(tmp_path / old, 2).items() if "train.policy.params" in name
        }
    assert [r["policy/ratio_mean"] for r in records(tmp_path / "current")[1:]] == [1, 1]
    for name, value in policies["recompute"].items():
        np.testing.assert_allclose(policies["current"][name], value, rtol=1e-3, atol=1e-5)
