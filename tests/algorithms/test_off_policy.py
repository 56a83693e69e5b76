"""What SPEC-RL's rule emits, its measures and weights, by exact enumeration."""

import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import ROOT, records, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms import off_policy
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES, RandomCut, Ratio
from specrl_jax.types import Rollout, Source

VOCAB = 7
EXTENDING = (ROOT / "docs" / "extending.md").read_text()
LENIENCES = [0.0, 0.3, 1.0, math.inf]


def distributions(seed=0):
    """π and π_old [V]."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 1.2, (2, VOCAB))
    return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


def one_token_rollout(new, old, accepted: bool) -> Rollout:
    """A row for every token of the vocabulary, accepted or sampled."""
    empty = Rollout.empty(VOCAB, 2, 0)

    def fill(values):
        return jnp.stack([jnp.asarray(values, jnp.float32), jnp.zeros(VOCAB)], axis=1)

    tokens = dataclasses.replace(
        empty.tokens,
        sources=jnp.full((VOCAB, 2), Source.REUSED if accepted else Source.SAMPLED, jnp.int8),
        sampling_logprobs=fill(np.log(new)),
        draft_logprobs=fill(np.log(old) if accepted else np.log(new)),
    )
    prefix_lens = jnp.full(VOCAB, int(accepted), jnp.int32)
    return Rollout(tokens, jnp.ones(VOCAB, jnp.int32), prefix_lens)


@pytest.mark.parametrize("log_lenience", LENIENCES)
@pytest.mark.parametrize("rule", ["ratio", "random"])
def test_weighted_means_over_what_is_emitted_are_means_under_the_policy(mesh, rule, log_lenience):
    """One position, all outcomes: the draft's token, or any token sampled after its rejection."""
    new, old = distributions()
    chance = np.minimum(1, np.exp(log_lenience) * new / old) if rule == "ratio" else 0.4
    accepted_mass = old * chance
    mass = 1 - accepted_mass.sum()
    acceptance = ACCEPTANCE_RULES[rule].of(math.exp(log_lenience))

    def weights(accepted: bool):
        rollout = one_token_rollout(new, old, accepted)
        return off_policy.importance_weights(rollout, np.float32(mass), acceptance)[:, 0]

    first = weights(True)
    last = weights(False)
    function = np.random.default_rng(1).normal(size=VOCAB)
    emitted = np.sum((accepted_mass * first + mass * new * last) * function)
    plain = np.sum((accepted_mass + mass * new) * function)
    np.testing.assert_allclose(emitted, np.sum(new * function), rtol=1e-5)
    assert abs(plain - np.sum(new * function)) > 0.01  # without weights it is another mean


@pytest.mark.parametrize("rule", ["block", "match"])
def test_exact_rules_have_weight_1(mesh, rule):
    weights = off_policy.importance_weights(
        one_token_rollout(*distributions(), accepted=True),
        np.float32(0.2),
        ACCEPTANCE_RULES[rule].of(2.0),
    )
    np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize("log_lenience", LENIENCES)
def test_measures_of_tokens_accepted_by_chance(mesh, log_lenience):
    """200,000 drafts of one token against sums over the vocabulary."""
    new, old = distributions()
    rows, rng = 200_000, np.random.default_rng(2)
    drafts = rng.choice(VOCAB, rows, p=old)
    noise = rng.random(rows).astype(np.float32)
    score = [np.log(x)[drafts].astype(np.float32)[:, None] for x in (new, old)]
    rule = Ratio(np.float32(log_lenience))
    least = rule.accept_threshold(noise[:, None], score[1])
    accepted = (score[0] >= np.asarray(least))[:, 0]
    empty = Rollout.empty(rows, 1, 0)
    tokens = dataclasses.replace(
        empty.tokens,
        sources=jnp.where(accepted[:, None], Source.REUSED, Source.SAMPLED).astype(jnp.int8),
        sampling_logprobs=jnp.asarray(score[0]),
        draft_logprobs=jnp.where(accepted[:, None], *reversed(score)),
    )
    rollout = Rollout(tokens, jnp.ones(rows, jnp.int32), jnp.asarray(accepted, jnp.int32))
    mass = off_policy.estimate_rejected_mass(accepted.astype(int), np.ones(rows, int))
    measured = off_policy.measure(rollout, mass, rule)
    ratio = new / old
    accepted_mass = old * np.minimum(1, np.exp(log_lenience) * ratio)
    strict = old * np.minimum(1, ratio)
    np.testing.assert_allclose(mass, 1 - accepted_mass.sum(), atol=5e-3)
    assert measured["reuse/rejected_mass"] == mass
    emitted = accepted_mass / accepted_mass.sum()
    for name, expected in {
        "reuse/log_ratio_mean": emitted @ np.log(ratio),
        "reuse/kl": emitted @ (ratio - 1 - np.log(ratio)),
        "reuse/lenient_fraction": 1 - strict.sum() / accepted_mass.sum(),
    }.items():
        np.testing.assert_allclose(measured[name], expected, atol=8e-3, err_msg=name)
    log_ratios = np.log(ratio)[drafts][accepted]
    for name, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
        expected = np.quantile(log_ratios.astype(np.float32), share)
        np.testing.assert_allclose(measured[f"reuse/log_ratio_{name}"], expected, atol=1e-6)
    if log_lenience == 0:
        assert measured["reuse/lenient_fraction"] == 0


def squared():
    """The rule of docs/extending.md."""
    code = re.search(r"^# squared\.py\n.*?(?=^```)", EXTENDING, re.MULTILINE | re.DOTALL)[0]
    names = {"__name__": "squared"}
    exec(code, names)
    return names["Squared"](np.float32(math.log(1.5)))


def test_a_rule_brings_its_own_share_of_lenient_tokens(mesh):
    """r = 1/2, ℓ = 3/2: SPEC-RL's rule accepts 3/4 of the tokens, 1/2 without lenience; the squared
    one 9/16 and 1/4."""
    _, old = distributions()
    rollout = one_token_rollout(old / 2, old, accepted=True)

    def share(rule):
        measured = off_policy.measure(rollout, 0.0, rule)
        return measured.get("reuse/lenient_fraction")

    assert share(Ratio(np.float32(math.log(1.5)))) == pytest.approx(1 / 3)
    assert share(squared()) == pytest.approx(5 / 9)
    assert share(RandomCut()) is None


def test_nothing_accepted_has_no_measure(mesh):
    sampled = one_token_rollout(*distributions(), accepted=False)
    assert off_policy.measure(sampled, 0.0, ACCEPTANCE_RULES["match"].of(1.0)) == {}
    assert off_policy.estimate_rejected_mass(np.zeros(3, int), np.zeros(3, int)) == 0


def test_recomputed_log_probs_are_weighed_against_the_rollouts(mesh, tmp_path):
    """The two arithmetics differ by rounding, so weights are 1 up to it, and 0.5 with that cap."""
    changes = {
        "updates.old_logprobs": "recompute", "rollout.draft": "none", "train.steps": 1,
        "algorithm.importance_cap": 0.5,
    }  # fmt: skip
    loop.train(small_config(changes), tmp_path)
    (record,) = records(tmp_path)[1:]
    assert record["policy/importance_mean"] == pytest.approx(0.5, abs=1e-4)
    assert record["policy/importance_capped"] == 1


@pytest.mark.parametrize("accept", ["ratio", "random"])
def test_reuse_of_tokens_that_truncation_cuts_off_keeps_metrics_finite(mesh, tmp_path, accept):
    """Full and random reuse accept what top-k would never sample: log-prob -inf, later 0 / 0."""
    changes = {
        "rollout.accept": accept, "rollout.lenience": math.inf, "rollout.top_k": 2,
        "algorithm.importance_cap": 2.0, "updates.learning_rate": 0.3, "train.epochs": 3,
    }  # fmt: skip
    loop.train(small_config(changes), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    assert [r["policy/importance_mean"] for r in steps[:2]] == [1, 1]
    assert any(r["policy/importance_capped"] > 0 for r in steps)
    assert steps[-1]["reuse/log_ratio_p05"] < -10  # some were cut off
    for record in steps:
        assert all(math.isfinite(x) for x in record.values() if isinstance(x, float))
