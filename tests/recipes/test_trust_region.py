"""Which tokens a trust region in probability drops, by hand; and runs with both."""

import dataclasses

import jax
import numpy as np
import pytest
from loss_batches import PLAIN, as_batch
from small_runs import line_of, records, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms.corrections import Policies
from specrl_jax.algorithms.losses import policy_loss
from specrl_jax.recipes.trust_region import find_moved
from specrl_jax.settings import schema

# π_old = π_rollout, π, A; dropped by |π − π_rollout| > 0.2; dropped where A moves it further
CASES = [
    (0.5, 0.8, 1.0, True, True),
    (0.5, 0.8, -1.0, True, False),
    (0.5, 0.2, -1.0, True, True),
    (0.5, 0.2, 1.0, True, False),
    (0.5, 0.8, 0.0, True, False),
    (0.5, 0.6, 1.0, False, False),
    (0.5, 0.4, -1.0, False, False),
    (1e-4, 5e-4, 1.0, False, False),  # r = 5: a clip would drop it
    (0.9, 0.6, -1.0, True, True),  # r = 0.67
    (0.99, 0.80, -3.0, False, False),
    (1.0, 0.7, -0.1, True, True),
    (1e-9, 0.3, 0.1, True, True),
    (1e-9, 1e-9, 1.0, False, False),
    (1.0, 1.0, -1.0, False, False),
]
ROLLOUT, NOW, ADVANTAGES, MOVED, MOVED_ON = (np.array(x, np.float32)[None] for x in zip(*CASES))
MOVED, MOVED_ON = MOVED.astype(bool), MOVED_ON.astype(bool)
LOG_ROLLOUT, LOG_NOW = np.log(ROLLOUT), np.log(NOW)
TOKENS = len(CASES)


def _batch():
    return as_batch(np.ones((1, TOKENS), bool), LOG_ROLLOUT, ADVANTAGES)


def _slopes(logprobs, **changes):
    """Gradient of the loss by each log-prob, and sums; a token's weight is 1 / tokens."""
    config = dataclasses.replace(PLAIN, **changes)
    differentiate = jax.grad(policy_loss, has_aux=True)
    gradient, sums = differentiate(logprobs, np.zeros_like(logprobs), _batch(), config)
    return TOKENS * gradient, sums


def _ratios():
    return np.exp(np.clip(LOG_NOW - LOG_ROLLOUT, -20, 20))


def test_dppo_drops_the_tokens_that_move_on():
    """All others have the gradient −r·A, whatever the ratio: 5e-4 / 1e-4 = 5 too."""
    slopes, sums = _slopes(LOG_NOW, objective="dppo", clip_low=0.2, clip_high=0.2)
    expected = np.where(MOVED_ON, 0, -_ratios() * ADVANTAGES)
    np.testing.assert_allclose(slopes, expected, rtol=1e-5)
    assert sums["clip_fraction"] == MOVED_ON.sum()


def test_both_directions_have_a_bound_of_their_own():
    """0.5 → 0.8 is within 0.35, 0.5 → 0.2 is not within 0.25."""
    slopes, _ = _slopes(LOG_NOW, objective="dppo", clip_low=0.25, clip_high=0.35)
    assert slopes[0, 0] == pytest.approx(-1.6)
    assert slopes[0, 2] == 0
    slopes, _ = _slopes(LOG_NOW, objective="dppo", clip_low=0.35, clip_high=0.25)
    assert slopes[0, 0] == 0
    assert slopes[0, 2] == pytest.approx(0.4)


def test_the_mask_drops_the_tokens_that_have_moved():
    slopes, sums = _slopes(
        LOG_NOW, objective="cispo", clip_low=1.0, clip_high=1e6, masks=(("moved", 0.2),)
    )
    ratios = np.minimum(_ratios(), 1e6)
    np.testing.assert_allclose(slopes, np.where(MOVED, 0, -ratios * ADVANTAGES), rtol=1e-5)
    assert sums["masked_moved"] == MOVED.sum()


def test_log_probs_of_minus_infinity_are_compared():
    nothing, some = np.float32(-np.inf), np.log(np.float32(0.3))
    for train, expected in ((some, True), (nothing, False)):
        policies = Policies(nothing, nothing, train, train)
        assert bool(find_moved(policies, 1.0, True, 0.2)) is expected


def test_a_probability_is_of_a_token(mesh):
    config = small_config({"algorithm.objective": "dppo", "algorithm.ratio": "sequence"})
    assert line_of(schema().validate, config) == (
        "algorithm.ratio must be token where algorithm.objective is dppo (a probability belongs to "
        "a token), got 'sequence'"
    )


def test_a_run_with_both(mesh, tmp_path):
    changes = {
        "algorithm.objective": "dppo", "algorithm.clip_low": 0.01, "algorithm.clip_high": 0.01,
        "algorithm.mask.moved": 0.02, "updates.learning_rate": 0.1, "updates.passes": 2,
    }  # fmt: skip
    loop.train(small_config(changes), tmp_path)
    lines = [x for x in records(tmp_path) if "policy/clip_fraction" in x]
    assert sum(x["policy/clip_fraction"] for x in lines) > 0
    assert sum(x["policy/masked_moved"] for x in lines) > 0
