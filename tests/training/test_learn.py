"""Rewards → updates: mini-batches in order, and a policy that waits for its critic."""

import dataclasses
import types

import numpy as np
import pytest
from small_runs import records, saved, small_config
from watched_updates import SOME_SIGNAL

from specrl_jax import train as loop
from specrl_jax.algorithms import scoring
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.training import collect, learn
from specrl_jax.training.build import build, init_state
from specrl_jax.training.collected import Collected
from specrl_jax.training.stages import length_penalty
from specrl_jax.types import Prompts, Source


def test_updates_visit_the_mini_batches_in_order(mesh, tmp_path, watched):
    """Two passes over rows 0..31 in mini-batches of 16."""
    changes = {"updates.passes": 2, "train.steps": 1}
    loop.train(small_config(changes), tmp_path / "run")
    rows = np.arange(32).reshape(2, 16)
    visited = [update.row_ids for update in watched]
    np.testing.assert_array_equal(visited, [rows[0], rows[1], rows[0], rows[1]])
    (record,) = records(tmp_path / "run")[1:]
    assert record["update/lr"] == pytest.approx(0.02)


def test_rows_without_signal_change_nothing_but_the_work(mesh, tmp_path, monkeypatch):
    """The same weights after a run of two steps, with these rows and without them."""
    monkeypatch.setattr(scoring, "chunk_tokens", lambda: 4 * 18)  # four sequences of eight
    policies = {}
    computed = {}
    for skip in (False, True):
        changes = SOME_SIGNAL | {"updates.skip_no_signal": skip, "train.steps": 2}
        run = tmp_path / str(skip)
        loop.train(small_config(changes), run)
        steps = records(run)[1:]
        signal = [record["update/signal_fraction"] for record in steps]
        assert all(0 < x < 1 for x in signal) if skip else signal == [1, 1]
        computed[skip] = sum(record["update/computed_fraction"] for record in steps)
        policies[skip] = {
            n: x for n, x in saved(run, 2).items() if n.startswith("train.policy.params.")
        }
    assert 0 < computed[True] < computed[False]
    for name, value in policies[False].items():
        np.testing.assert_allclose(policies[True][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "more", [{}, {"algorithm.kl_coef": 0.1}, {"updates.select": "outer_pairs"}]
)
def test_rows_that_the_length_cut_are_left_out_of_the_loss(mesh, tmp_path, watched, more):
    """Their rewards stay in the baseline: the other rows have the advantages that they had."""
    runs = {}
    for truncated in (False, True):
        changes = {"algorithm.mask.truncated": truncated, "train.steps": 1, "log.rollouts": 1.0}
        changes |= SOME_SIGNAL | {"updates.skip_no_signal": False} | more
        loop.train(small_config(changes), tmp_path / str(truncated))
        runs[truncated] = list(watched)
        watched.clear()
    lines = read_rollouts(tmp_path / "True", 1)
    cut = np.array([not line["ended"] for line in lines])
    assert cut.sum() == records(tmp_path / "True")[1]["rollout/truncated_fraction"] * len(cut)
    before, after = runs[False][0], runs[True][0]
    rows = before.mask.any(axis=1) & ~after.mask.any(axis=1)
    assert 0 < rows.sum() == cut.sum() < len(cut)
    np.testing.assert_array_equal(after.mask, before.mask & ~rows[:, None])
    np.testing.assert_array_equal(after.advantages, np.where(rows[:, None], 0, before.advantages))
    for update in runs[True]:
        # Nothing of these rows is computed, so they have no gradient whatever the loss is.
        np.testing.assert_array_equal(update.nodes >= 0, update.mask[update.row_ids])


def test_no_token_of_an_environment_costs_reward_for_its_length():
    sources = np.full((3, 10), int(Source.SAMPLED), np.int8)
    sources[1:, 2:6] = Source.ENVIRONMENT
    rollout = types.SimpleNamespace(
        lens=np.array([10, 10, 4]), tokens=types.SimpleNamespace(sources=sources)
    )
    config = small_config({"reward.overlong_tokens": 4, "rollout.response_len": 10})
    run = types.SimpleNamespace(config=config)
    prompts = Prompts(None, None, None, ())
    collected = Collected(prompts, rollout, np.ones(3, np.float32), {}, 1, 1)
    price = length_penalty(run.config, collected.rollout)
    np.testing.assert_array_equal(price, [1, 0, 0])


@pytest.mark.parametrize("stale", [False, True])
def test_a_batch_says_itself_that_earlier_weights_sampled_it(mesh, stale):
    """Its metric contradicts it here, and decides nothing."""
    run, params = build(small_config({"updates.old_logprobs": "recompute"}))
    state = init_state(run, params)
    with run.responder.pool:
        batch, _ = collect.collect(run, state.rollout, state.rollout_weights(run))
    state.step = 1
    share = {"rollout/stale_fraction": float(not stale)}
    batch = dataclasses.replace(batch, stale=stale, metrics=batch.metrics | share)
    metrics = learn.update_policy(run, state, batch)
    assert ("policy/rollout_train_logprob_gap" in metrics) == (not stale)


def test_the_price_of_length_is_a_signal(mesh, tmp_path):
    """Where all rewards of a group are equal too."""
    changes = {"reward.name": "small_runs:score_some", "train.steps": 1}
    priced = {"reward.overlong_tokens": 4, "reward.overlong_penalty": 0.3}
    shares = []
    for name, more in (("plain", {}), ("priced", priced)):
        loop.train(small_config(changes | more), tmp_path / name)
        shares.append(records(tmp_path / name)[-1]["reward/no_signal"])
    assert shares == [0.5, 0.0]


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm.kl_coef": 0.1}, {"algorithm.entropy_coef": 0.1}], ids=str
)
def test_a_step_without_any_signal(mesh, tmp_path, changes):
    """All rewards are 0. What else has a gradient, a KL or an entropy bonus, is still learned."""
    changes = {"reward.extract": "(x)", "train.steps": 1} | changes
    loop.train(small_config(changes), tmp_path / "run")
    (record,) = records(tmp_path / "run")[1:]
    assert record["update/signal_fraction"] == (1 if len(changes) > 2 else 0)
    assert ("policy/entropy" in record) == (len(changes) > 2)
    assert record["policy/loss"] == 0 or len(changes) > 2


@pytest.mark.parametrize("kind", [pytest.param("head", marks=pytest.mark.slow), "network"])
def test_the_critic_learns_first_and_leaves_nothing_in_the_policys_optimizer(mesh, tmp_path, kind):
    """In the two warm-up steps the policy and its moments stay as they are, to the bit."""
    changes = {
        "critic.kind": kind, "critic.critic_only_steps": 2, "checkpoint.every": 1,
        "checkpoint.keep_last": 9, "updates.lr_warmup_steps": 2,
    }  # fmt: skip
    loop.train(small_config(changes, algorithm="ppo"), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    assert steps[0]["critic/value_mean"] == 0
    assert steps[1]["critic/value_mean"] != 0
    assert all(r["critic/loss"] > 0 and r["critic/grad_norm"] > 0 for r in steps)
    # Two updates a step: the schedule starts with the first step that the policy learns in.
    np.testing.assert_allclose([r["update/lr"] for r in steps], [0, 0, 0.02, 0.02], rtol=1e-6)
    arrays = [saved(tmp_path / "run", step) for step in (0, 2, 4)]

    def parts_of(prefix):
        return [{n: x for n, x in step.items() if n.startswith(prefix)} for step in arrays]

    policies = parts_of("train.policy.params.")
    moments = parts_of("train.policy.opt_state.")
    critics = parts_of("train.critic.params.")
    for parts in (policies, moments):
        assert all(np.array_equal(x, parts[1][n]) for n, x in parts[0].items())
        assert not all(np.array_equal(x, parts[2][n]) for n, x in parts[0].items())
    assert not any(x.any() for x in moments[1].values())
    assert not any(np.array_equal(x, critics[1][n]) for n, x in critics[0].items())
    assert ("train.critic.params.decoder.embed" in critics[0]) == (kind == "network")


@pytest.mark.slow
def test_a_critic_needs_no_group(mesh, tmp_path):
    changes = {"rollout.group_size": 1, "rollout.prompts_per_step": 8}
    changes |= {"updates.mini_batch_size": 8, "train.steps": 2}
    changes |= {"reward.name": "small_runs:score_first_letter", "reward.extract": ""}
    changes["seed"] = 3  # some of these responses are right, some are not
    loop.train(small_config(changes, algorithm="ppo"), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    assert [r["data/prompts_seen"] for r in steps] == [8, 16]
    assert all(r["critic/loss"] > 0 and r["update/grad_norm"] > 0 for r in steps)
