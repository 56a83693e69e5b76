"""Rewards → updates: mini-batches in order, and a policy that waits for its critic."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from small_runs import assert_same_run, line_of, records, saved, small_config
from watched_updates import SOME_SIGNAL

from specrl_jax import train as loop
from specrl_jax.algorithms import scoring
from specrl_jax.sharding import put
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.training import learn
from specrl_jax.training.batch import TrainBatch
from specrl_jax.training.build import build, init_state
from specrl_jax.types import Batch, Prompts, Source


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
        policies[skip] = {n: x for n, x in saved(run, 2).items() if n.startswith("train.params.")}
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
    sources[1:, 2:6] = Source.FORCED
    rollout = types.SimpleNamespace(
        lens=np.array([10, 10, 4]), tokens=types.SimpleNamespace(sources=sources)
    )
    config = small_config({"reward.overlong_tokens": 4, "rollout.response_len": 10})
    run = types.SimpleNamespace(config=config)
    prompts = Prompts(None, None, None, ())
    collected = TrainBatch(prompts, rollout, np.ones(3, np.float32), {}, 1, 1)
    price = learn.price_of_length(run.config, collected.rollout)
    np.testing.assert_array_equal(price, [1, 0, 0])


SELECTED = SOME_SIGNAL | {"train.steps": 2, "updates.skip_no_signal": False}
PAIRS = SELECTED | {"updates.select": "outer_pairs"}
BUDGET = SELECTED | {"updates.token_budget": 20}


def _assert_goes_on(changes, whole, parts):
    """A run of two steps is that of two runs of one."""
    loop.train(small_config(changes | {"train.steps": 1}), parts)
    loop.train(small_config(changes), parts)
    assert_same_run(parts, whole, 2)


def test_updates_take_pairs_of_a_group_by_their_advantages(mesh, tmp_path, watched):
    loop.train(small_config(PAIRS), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    for step in (0, 1):
        updates = watched[2 * step : 2 * step + 2]
        pairs = np.concatenate([update.row_ids for update in updates]).reshape(-1, 2)
        assert len(pairs) == 16
        advantages = updates[0].advantages[:, 0]
        groups = np.sort(advantages.reshape(4, 8), axis=1)
        for best, worst in pairs:
            assert best // 8 == worst // 8
            of_group = groups[best // 8]
            # The two best and the two worst of eight stay.
            assert advantages[best] >= of_group[6]
            assert advantages[worst] <= of_group[1]
            assert of_group[0] < of_group[7]  # a group without signal is never drawn
        share = len(np.unique(pairs)) / 32
        assert steps[step]["update/selected_fraction"] == share <= 1 / 2
        for update in updates:
            assert update.scalars["tokens"] == update.mask[update.row_ids].sum()
    _assert_goes_on(PAIRS, tmp_path / "run", tmp_path / "parts")


def test_updates_take_a_budget_of_tokens(mesh, tmp_path, watched):
    """20 of some 80 tokens of each mini-batch of 16 rows; two updates a step."""
    loop.train(small_config(BUDGET), tmp_path / "run")
    assert [update.scalars["tokens"] for update in watched] == [20] * 4
    steps = records(tmp_path / "run")[1:]
    for step, record in enumerate(steps):
        updates = watched[2 * step : 2 * step + 2]
        taken = updates[0].mask.any(axis=1)
        assert record["update/selected_fraction"] == taken.mean() < 1 / 2
        assert record["update/budget_filled"] == 1
        for update in updates:
            np.testing.assert_array_equal(update.nodes >= 0, update.mask[update.row_ids])
    _assert_goes_on(BUDGET, tmp_path / "run", tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [PAIRS, BUDGET], ids=["pairs", "budget"])
def test_eight_devices_take_the_same_rows(make_mesh, tmp_path, watched, changes):
    for shape in [(1, 1, 1), (2, 2, 2)]:
        with jax.set_mesh(make_mesh(*shape)):
            loop.train(small_config(changes | {"train.steps": 1}), tmp_path / str(shape[0]))
    for one, eight in zip(watched[:2], watched[2:], strict=True):
        np.testing.assert_array_equal(one.row_ids, eight.row_ids)
        np.testing.assert_array_equal(one.mask, eight.mask)
        want = eight.scalars
        assert one.scalars["loss"] == pytest.approx(want["loss"], rel=1e-4, abs=1e-6)
        assert one.scalars["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("stale", [False, True])
def test_a_batch_says_itself_that_earlier_weights_sampled_it(mesh, stale):
    """Its metric says the opposite here, and decides nothing."""
    run, params = build(small_config({"updates.old_logprobs": "recompute"}))
    state = init_state(run, params)
    with run.responder.pool:
        batch, _ = loop.collect(run, state.rollout, state.rollout_weights(run))
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


def test_the_solution_takes_the_last_place_of_an_unsolved_group(mesh):
    """Here the second of three: the first is solved, the third has no solution that fits."""
    run, _ = build(small_config({"algorithm.solution_coef": 1.0, "updates.mini_batch_size": 8}))
    batch = Batch(
        tokens=np.tile(np.arange(9, dtype=np.int32), (24, 1)),
        prompt_lens=np.repeat(np.array([3, 2, 1], np.int32), 8),
        response_lens=np.full(24, 6, np.int32),
        old_logprobs=np.zeros((24, 6), np.float32),
        advantages=np.ones((24, 6), np.float32),
    )
    on_mesh = jax.tree.map(lambda x: put(x, "batch", *(None,) * (x.ndim - 1)), batch)
    examples = run.prompts.examples[:3]
    del run.solutions[examples[2].prompt_id]
    rewards = np.zeros(24, np.float32)
    rewards[5] = 1
    rewards[9] = 0.5  # a part of an answer solves nothing
    collected = TrainBatch(Prompts(None, None, None, examples), None, rewards, {}, 1, 1)
    got, values = learn.with_solutions(run, on_mesh, collected)
    got = jax.tree.map(np.asarray, got)
    assert values == {"update/solutions": pytest.approx(1 / 3)}
    np.testing.assert_array_equal(np.flatnonzero(got.is_solution), [15])
    answer = run.responder.tokenizer.encode(examples[1].answer)
    np.testing.assert_array_equal(got.tokens[15], [0, 1, *answer, 1, *np.zeros(5), 8][:9])
    assert got.response_lens[15] == len(answer) + 1
    assert not np.any(got.advantages[15])
    others = np.arange(24) != 15
    for name in ("tokens", "response_lens", "advantages", "old_logprobs"):
        np.testing.assert_array_equal(
            getattr(got, name)[others], getattr(batch, name)[others], err_msg=name
        )


# Nothing is ever right: a solution is learned for each prompt.
UNSOLVED = {
    "reward.extract": "(x)", "train.steps": 4, "checkpoint.every": 1, "checkpoint.keep_last": 9,
}  # fmt: skip


def test_solutions_are_learned_where_nothing_is_right_and_a_resumed_run_is_the_same(mesh, tmp_path):
    changes = UNSOLVED | {"algorithm.solution_coef": 1.0, "log.rollouts": 1.0}
    loop.train(small_config(changes), tmp_path / "whole")
    steps = records(tmp_path / "whole")[1:]
    assert [r["update/solutions"] for r in steps] == [1] * 4
    assert [r["update/signal_fraction"] for r in steps] == [1 / 8] * 4
    losses = [r["policy/solution_nll"] for r in steps]
    assert losses[3] < losses[0] - 0.2
    loop.train(small_config(changes | {"train.steps": 2}), tmp_path / "parts")
    loop.train(small_config(changes), tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole", 4)
    # What the first step drew, stored and wrote down does not know of solutions.
    plain = UNSOLVED | {"train.steps": 1, "log.rollouts": 1.0}
    loop.train(small_config(plain), tmp_path / "plain")
    stores = [
        {n: x for n, x in saved(tmp_path / name, 1).items() if n.startswith("store.")}
        for name in ("plain", "whole")
    ]
    assert stores[0].keys() == stores[1].keys() != set()
    for name, value in stores[0].items():
        np.testing.assert_array_equal(stores[1][name], value)
    written = [tmp_path / name / "rollouts" / "step_1.jsonl" for name in ("plain", "whole")]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_no_solution_that_fits(mesh):
    changes = {"algorithm.solution_coef": 1.0, "rollout.response_len": 1}
    assert line_of(build, small_config(changes)) == (
        "rollout.response_len must hold a solution, got 1: none of the 8 training prompts has one "
        "that fits"
    )


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
        "critic.kind": kind, "critic.warmup_steps": 2, "checkpoint.every": 1,
        "checkpoint.keep_last": 9, "updates.schedule_warmup": 2,
    }  # fmt: skip
    loop.train(small_config(changes, algorithm="ppo"), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    assert steps[0]["critic/value_mean"] == 0
    assert steps[1]["critic/value_mean"] != 0
    assert all(r["critic/loss"] > 0 and r["critic/grad_norm"] > 0 for r in steps)
    # Two updates a step: the schedule begins with the first step that the policy learns in.
    np.testing.assert_allclose([r["update/lr"] for r in steps], [0, 0, 0.02, 0.02], rtol=1e-6)
    arrays = [saved(tmp_path / "run", step) for step in (0, 2, 4)]

    def parts_of(prefix):
        return [{n: x for n, x in step.items() if n.startswith(prefix)} for step in arrays]

    policies = parts_of("train.params.")
    moments = parts_of("train.opt_state.")
    critics = parts_of("train.critic.")
    for parts in (policies, moments):
        assert all(np.array_equal(x, parts[1][n]) for n, x in parts[0].items())
        assert not all(np.array_equal(x, parts[2][n]) for n, x in parts[0].items())
    assert not any(x.any() for x in moments[1].values())
    assert not any(np.array_equal(x, critics[1][n]) for n, x in critics[0].items())
    assert ("train.critic.decoder.embed" in critics[0]) == (kind == "network")


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
