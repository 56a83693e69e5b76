"""The law that SPEC-RL's rule emits, its measures and weights, by exact enumeration."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
from small_runs import records, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms import off_policy as reuse
from specrl_jax.rollout import acceptance
from specrl_jax.rollout.carry_over import _empty_rollout
from specrl_jax.sharding import put
from specrl_jax.types import Rollout, Source

VOCAB = 7
LENIENCES = [0.0, 0.3, 1.0, math.inf]


def laws(seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, 1.2, (2, VOCAB))
    return np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)


def one_token_rollout(new, old, kept: bool) -> Rollout:
    """A row for every token of the vocabulary, kept or drawn."""
    empty = _empty_rollout(VOCAB, 2, 0)

    def fill(values):
        return jnp.stack([jnp.asarray(values, jnp.float32), jnp.zeros(VOCAB)], axis=1)

    return dataclasses.replace(
        empty,
        lens=jnp.ones(VOCAB, jnp.int32),
        prefix_lens=jnp.full(VOCAB, int(kept), jnp.int32),
        sources=jnp.full((VOCAB, 2), Source.REUSED if kept else Source.SAMPLED, jnp.int8),
        sampling_logprobs=fill(np.log(new)),
        draft_logprobs=fill(np.log(old) if kept else np.log(new)),
    )


@pytest.mark.parametrize("log_lenience", LENIENCES)
@pytest.mark.parametrize("rule", ["ratio", "random"])
def test_weighted_means_over_what_is_emitted_are_means_under_the_policy(mesh, rule, log_lenience):
    """One position, every outcome: the draft's token kept, or any token drawn after a rejection."""
    new, old = laws()
    accepts = np.minimum(1, np.exp(log_lenience) * new / old) if rule == "ratio" else 0.4
    keeps = old * accepts
    mass = 1 - keeps.sum()
    weight = acceptance.RULES[rule].importance_weight
    inputs = (np.float32(log_lenience), np.float32(mass), weight)
    weights = [
        np.asarray(reuse.importance_weights(one_token_rollout(new, old, kept), *inputs))[:, 0]
        for kept in (True, False)
    ]
    function = np.random.default_rng(1).normal(size=VOCAB)
    emitted = np.sum(keeps * weights[0] * function) + np.sum(mass * new * weights[1] * function)
    plain = np.sum(keeps * function) + np.sum(mass * new * function)
    np.testing.assert_allclose(emitted, np.sum(new * function), rtol=1e-5)
    assert abs(plain - np.sum(new * function)) > 0.01  # without weights it is another law


@pytest.mark.parametrize("rule", ["ratio_residual", "block", "match"])
def test_exact_rules_have_weight_1(mesh, rule):
    weights = reuse.importance_weights(
        one_token_rollout(*laws(), kept=True),
        np.float32(0.5),
        np.float32(0.2),
        acceptance.RULES[rule].importance_weight,
    )
    np.testing.assert_array_equal(weights, 1)


@pytest.mark.parametrize("log_lenience", LENIENCES)
def test_measures_of_tokens_kept_by_chance(mesh, log_lenience):
    """200,000 drafts of one token against sums over the vocabulary."""
    new, old = laws()
    rows, rng = 200_000, np.random.default_rng(2)
    drafts = rng.choice(VOCAB, rows, p=old)
    noise = rng.random(rows).astype(np.float32)
    score = [np.log(x)[drafts].astype(np.float32)[:, None] for x in (new, old)]
    least = acceptance.least_logprobs(noise[:, None], score[1], np.float32(log_lenience))
    accepted = (score[0] >= np.asarray(least))[:, 0]
    empty = _empty_rollout(rows, 1, 0)
    rollout = dataclasses.replace(
        empty,
        lens=jnp.ones(rows, jnp.int32),
        prefix_lens=jnp.asarray(accepted, jnp.int32),
        sources=jnp.where(accepted[:, None], Source.REUSED, Source.SAMPLED).astype(jnp.int8),
        sampling_logprobs=jnp.asarray(score[0]),
        draft_logprobs=jnp.where(accepted[:, None], *reversed(score)),
    )
    mass = reuse.estimate_rejected_mass(accepted.astype(int), np.ones(rows, int))
    found = reuse.measure(rollout, log_lenience, mass)
    ratio = new / old
    keeps = old * np.minimum(1, np.exp(log_lenience) * ratio)
    strict = old * np.minimum(1, ratio)
    np.testing.assert_allclose(mass, 1 - keeps.sum(), atol=5e-3)
    assert found["reuse/rejected_mass"] == mass
    law = keeps / keeps.sum()
    for name, expected in {
        "reuse/log_ratio_mean": law @ np.log(ratio),
        "reuse/kl": law @ (ratio - 1 - np.log(ratio)),
        "reuse/lenient_fraction": 1 - strict.sum() / keeps.sum(),
    }.items():
        np.testing.assert_allclose(found[name], expected, atol=8e-3, err_msg=name)
    kept = np.log(ratio)[drafts][accepted]
    for name, share in (("p05", 0.05), ("p50", 0.5), ("p95", 0.95)):
        expected = np.quantile(kept.astype(np.float32), share)
        np.testing.assert_allclose(found[f"reuse/log_ratio_{name}"], expected, atol=1e-6)
    if log_lenience == 0:
        assert found["reuse/lenient_fraction"] == 0


def test_nothing_kept_has_no_measure(mesh):
    assert reuse.measure(one_token_rollout(*laws(), kept=False), 0.5, 0.0) == {}
    assert reuse.estimate_rejected_mass(np.zeros(3, int), np.zeros(3, int)) == 0


def test_the_controller_finds_its_target():
    """The exact share of lenient tokens of these laws as the plant; it rises with lenience."""
    new, old = laws()

    def share(log_lenience):
        strict, keeps = (old * np.minimum(1, np.exp(x) * new / old) for x in (0, log_lenience))
        return 1 - strict.sum() / keeps.sum()

    options = {"gain": 0.1, "low": 1.0, "high": math.e}
    found = 0.5
    for _ in range(200):
        found = reuse.next_log_lenience(found, share(found), target=0.1, **options)
    assert share(found) == pytest.approx(0.1, abs=1e-3)
    assert reuse.next_log_lenience(0.5, 0.0, target=0.1, **options) == pytest.approx(0.6)
    assert reuse.next_log_lenience(0.5, 9.0, target=0.1, **options) == pytest.approx(0.4)
    assert reuse.next_log_lenience(0.95, 0.0, target=0.1, **options) == 1.0
    assert reuse.next_log_lenience(0.05, 9.0, target=0.1, **options) == 0.0


def test_old_tokens_and_chosen_drafts_are_left_out(mesh):
    """By the reference rollout: the same as with drafts that were cut beforehand."""
    (_, old), (_, new) = ref.policy(0.1), ref.policy()
    plan, prompts = ref.make_plan(), ref.random_prompts(4)
    drafts = ref.as_drafts(ref.run(plan, old, prompts, 1)[0])
    steps = np.tile(np.arange(drafts.tokens.shape[1]), (len(drafts.lens), 1)) % 5 + 1
    drafts = dataclasses.replace(drafts, origin_steps=put(steps.astype(np.int32), "batch", None))
    key, options = jax.random.key(ref.KEY), {"step": 6, "log_lenience": math.inf}

    def offered(**changes):
        changed = dataclasses.replace(plan, **changes)
        return ref.rollout(changed, new, prompts, key=key, drafts=drafts, **options).draft_lens

    lens, whole = np.asarray(drafts.lens), offered()
    np.testing.assert_array_equal(whole, lens)
    np.testing.assert_array_equal(offered(token_age=5), lens)
    np.testing.assert_array_equal(offered(token_age=4), 0)  # the first is 5 steps old
    newer = put((7 - steps).astype(np.int32), "batch", None)
    newer = dataclasses.replace(drafts, origin_steps=newer)
    found = ref.rollout(
        dataclasses.replace(plan, token_age=2), new, prompts, key=key, drafts=newer, **options
    )
    np.testing.assert_array_equal(found.draft_lens, np.minimum(lens, 3))  # 6, 5, 4 | 3
    some = offered(refresh=0.5)
    assert 0 < np.sum(some == 0) < len(lens)
    assert set(some[some > 0]) <= set(lens)
    np.testing.assert_array_equal(offered(refresh=1.0), 0)
    np.testing.assert_array_equal(some, offered(refresh=0.5))


def test_a_run_adapts_its_lenience_and_weighs_its_tokens(mesh, tmp_path):
    changes = {
        "rollout.lenience": 2.0, "rollout.lenience_auto": True, "rollout.lenience_target": 1e-6,
        "algorithm.importance_cap": 1.5, "train.epochs": 3,
    }  # fmt: skip
    loop.train(small_config(changes), tmp_path / "run")
    found = records(tmp_path / "run")[1:]
    lenience = [r["reuse/log_lenience"] for r in found]
    assert lenience[:3] == pytest.approx([math.log(2)] * 3)  # nothing kept in the first epoch
    assert lenience[3:] == pytest.approx([math.log(2) - 0.1 * i for i in (1, 2, 3)])
    for record in found[2:]:
        assert record["reuse/lenient_fraction"] > 1e-6
        assert 0 < record["policy/importance_mean"] < 1.5
        assert record["reuse/log_ratio_p05"] <= record["reuse/log_ratio_p50"]
    assert [r["policy/importance_mean"] for r in found[:2]] == [1, 1]
    assert any(r["policy/importance_capped"] > 0 for r in found)


def test_recomputed_log_probs_are_weighed_against_the_rollouts(mesh, tmp_path):
    """The two arithmetics differ by rounding, so weights are 1 up to it, and 0.5 with that cap."""
    changes = {"updates.old_logprobs": "recompute", "rollout.draft": "none", "train.steps": 1}
    for cap, expected in ((2.0, 1.0), (0.5, 0.5)):
        workdir = tmp_path / str(cap)
        loop.train(small_config(changes | {"algorithm.importance_cap": cap}), workdir)
        (record,) = records(workdir)[1:]
        assert record["policy/importance_mean"] == pytest.approx(expected, abs=1e-4)
        assert record["policy/importance_capped"] == float(cap < 1)
