"""Partial rollouts: what resumes in the next step, under whose policy, and that none is lost."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
import rollout_reference as ref
from collector_steps import Step, make_state, one_step
from rollout_reference import check_equal, host, make_spec
from small_runs import assert_same_bits, records, small_config

from specrl_jax import train as loop
from specrl_jax.recipes.partial import PartialRollout
from specrl_jax.rollout.acceptance import Ratio
from specrl_jax.rollout.rows import rows_of
from specrl_jax.training.build import build, init_state
from specrl_jax.types import Source

Q, X, G, R = 4, 2, 4, 8
EVERY = ref.random_prompts(24)
SLOW = {"marks": pytest.mark.slow}
PLANS = [
    pytest.param((1, 1, 1), {}, id="two buckets", **SLOW),
    pytest.param((1, 1, 1), {"max_rows": 8, "row_buckets": 3}, id="few rows", **SLOW),
    pytest.param((1, 1, 1), {"tree": ref.TREE, "max_width": 4}, id="drafts from a tree"),
    pytest.param((2, 1, 1), {}, id="two shards", **SLOW),
    pytest.param((1, 2, 2), {}, id="four devices", **SLOW),
]


def begin(spec, **options):
    """The state before step 1: Q + X groups run together, new ones from EVERY in order."""
    return make_state(PartialRollout, spec, EVERY, Q, partial=X, **options)


def lenient(log_lenience: float, **changes):
    """A spec of the ratio rule."""
    return dataclasses.replace(make_spec(**changes), accept=Ratio(np.float32(log_lenience)))


def steps(spec, policies, stored=None) -> list[Step]:
    """A run's steps 1, 2, ..., one for each policy."""
    state = begin(spec)
    return [one_step(state, weights, stored) for weights in policies]


@pytest.fixture(scope="module")
def moving(make_mesh):
    """Five steps whose policy moves in between; (steps, parameters by step)."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        policies = [ref.policy(nudge) for nudge in (0.3, 0.2, 0.1, 0.05, 0.0)]
        done = steps(make_spec(), [weights for _, weights in policies])
    return done, [params for params, _ in policies]


@pytest.mark.parametrize(("shape", "changes"), PLANS)
def test_a_row_is_that_of_a_whole_rollout_with_the_noise_of_its_first_step(
    make_mesh, shape, changes
):
    """As long as the policy stays: whatever was resumed or drafted."""
    spec = make_spec(accept="match", **changes)
    but = ("origin_steps", "sources") if spec.draft_source else ("origin_steps",)
    resumed = 0
    with jax.set_mesh(make_mesh(*shape)):
        _, weights = ref.policy()
        for step in steps(spec, [weights] * 4):
            assert len(step.groups) == Q
            assert len(step.after.noise_steps) == X
            noise_steps = step.requests.noise.noise_steps[step.groups]
            for begun in set(noise_steps[:, 0].tolist()):
                rows = rows_of(np.flatnonzero(noise_steps[:, 0] == begun), G)
                plain = host(ref.run(spec, weights, step.prompts, begun)[0])
                part = jax.tree.map(lambda x: x[rows], step.rollout)  # noqa: B023
                check_equal(part, plain, rows, but=but)
            resumed += int(step.after.trained_lens.sum())
    assert resumed > 20


def test_the_first_complete_groups_come_out_and_the_others_go_on(moving):
    """In order: resumed groups, then the batch's. What is over is resumed, complete or not."""
    result, _ = moving
    surplus = 0
    for step in result:
        rollout = step.rollout
        last = np.take_along_axis(rollout.tokens.ids, rollout.lens[:, None] - 1, axis=1)[:, 0]
        assert np.all((rollout.lens == R) | np.isin(last, (1, 2, 3, 4)))
        requests, n = step.requests, len(step.before.noise_steps)
        assert requests.prompts.examples[0].prompt_id == (*step.before.prompt_ids, _id(0))[0]
        assert step.groups.tolist() == sorted(step.groups)
        assert requests.noise.noise_steps[step.groups].tolist() == [
            list(step.before.noise_steps[g]) if g < n else [step.number] * G for g in step.groups
        ]
        others = [g for g in range(Q + X) if g not in step.groups]
        names = [requests.prompts.examples[g].prompt_id for g in others]
        assert list(step.after.prompt_ids) == names
        done = np.asarray(step.after.begun.done).reshape(X, G).all(axis=1)
        for group, complete in zip(others, done, strict=True):
            assert not complete or group > step.groups[-1]
        surplus += done.sum()
    assert surplus > 0


def _id(q: int) -> str:
    return EVERY.examples[q].prompt_id


def test_no_group_is_lost_and_none_comes_twice(moving):
    result, _ = moving
    came = [e.prompt_id for step in result for e in step.prompts.examples]
    assert len(set(came)) == len(came) == Q * len(result)
    resumed = result[-1].after.prompt_ids
    assert set(came) | set(resumed) == {_id(q) for q in range(Q * len(result) + X)}


def test_every_token_keeps_the_logprob_of_the_policy_that_sampled_it(mesh, moving):
    """Teacher-forced under the parameters of the step that `origin_steps` names."""
    result, params = moving
    stale = 0
    for step in result:
        rollout, prompts = step.rollout, step.prompts
        resumed_lens = step.after.trained_lens
        columns, origins = np.arange(R)[None, :], rollout.tokens.origin_steps
        inside, resumed = (columns < lens[:, None] for lens in (rollout.lens, resumed_lens))
        assert np.all((np.diff(origins, axis=1) >= 0) | ~inside[:, 1:])
        np.testing.assert_array_equal(origins[inside] < step.number, resumed[inside])
        of_policies = [
            ref.teacher_forced(ref.MODEL, p, prompts, rollout.tokens.ids) for p in params
        ]
        expected = np.take_along_axis(np.stack(of_policies), origins[None] - 1, axis=0)[0]
        for name in ("policy_logprobs", "sampling_logprobs", "origin_logprobs"):
            mine = getattr(rollout.tokens, name)[inside]
            np.testing.assert_allclose(mine, expected[inside], atol=1e-5, err_msg=name)
        stale += resumed_lens.sum()
        values = step.batch.metrics
        share = resumed_lens.sum() / rollout.lens.sum()
        assert values["rollout/stale_fraction"] == pytest.approx(share)
        assert values["rollout/tokens_resumed"] == int(np.sum(step.before.begun.rollout.lens))
    assert stale > 40


def test_earlier_responses_are_drafts_of_groups_that_begin(mesh):
    """Under the ratio rule; a group that has tokens resumes without a draft."""
    spec, (_, older), (_, weights) = lenient(0.3), ref.policy(0.2), ref.policy()

    def stored(prompts):
        return ref.as_drafts(ref.run(spec, older, prompts, 0)[0])

    for step in steps(spec, [weights] * 3, stored):
        rollout, result = step.rollout, step.result
        lens = np.asarray(stored(step.prompts).lens)
        np.testing.assert_array_equal(result.draft_lens, lens)
        assert (rollout.prefix_lens <= result.draft_lens).all()
        accepted = np.arange(R)[None, :] < rollout.prefix_lens[:, None]
        np.testing.assert_array_equal(rollout.tokens.sources == Source.REUSED, accepted)
        # Kept tokens are older than the step they were kept in, the others of it or later.
        assert np.all(rollout.tokens.origin_steps[accepted] == 0)
        inside = np.arange(R)[None, :] < rollout.lens[:, None]
        begun = step.requests.noise.noise_steps[step.groups].reshape(-1, 1)
        assert np.all((rollout.tokens.origin_steps >= begun) | accepted | ~inside)
        if step.number == 1:
            prompts = step.requests.prompts
            expected = ref.run(spec, weights, prompts, 1, drafts=stored(prompts), log_lenience=0.3)[
                0
            ]
            check_equal(rollout, expected, rows_of(step.groups, G))


def test_what_was_not_judged_yet_is_not_rejected(mesh):
    """Drafts that are kept whole, of rows that start, wait and resume; some are verified twice."""
    spec, (_, weights) = lenient(np.inf, max_rows=8, row_buckets=3), ref.policy()

    def stored(prompts):
        expected = ref.run(spec, weights, prompts, 0)[0]
        return ref.as_drafts(expected, np.minimum(np.asarray(expected.lens), 3))

    result = steps(spec, [weights] * 4, stored)
    waited = sum(int((np.asarray(s.before.begun.rollout.lens) == 0).sum()) for s in result[1:])
    assert waited > 0
    for step in result:
        np.testing.assert_array_equal(step.result.draft_lens, step.rollout.prefix_lens)
        assert step.rollout.prefix_lens.any()


def test_a_last_step_that_begins_fewer_groups_completes_them_all(mesh):
    """Q + X groups run together: the resumed ones and as many new ones as the step trains on."""
    spec, (_, weights) = make_spec(), ref.policy()
    state = begin(spec, total_steps=2)
    begun = one_step(state, weights).after.prompt_ids
    step = one_step(state, weights)
    assert step.groups.tolist() == [0, 1, 2, 3]
    names = [example.prompt_id for example in step.requests.prompts.examples]
    assert names[:Q] == [*begun, _id(Q + X), _id(Q + X + 1)]
    assert step.after.prompt_ids == step.after.noise_steps == ()
    assert not np.asarray(step.after.begun.rollout.lens).any()
    new = ref.run(spec, weights, EVERY.select([Q + X, Q + X + 1]), 2)[0]
    rows = slice(X * G, Q * G)
    check_equal(jax.tree.map(lambda x: x[rows], step.rollout), new)
    # The last prompts only fill the rollout's shape.
    lens = np.asarray(step.whole.rollout.lens)
    assert lens[: Q * G].all()
    assert not lens[Q * G :].any()


def test_a_checkpoint_holds_what_has_begun(mesh):
    spec, (_, weights) = make_spec(), ref.policy()
    state, other = begin(spec), begin(spec)
    for _ in range(2):
        one_step(state, weights)
    other.step, other.stream = state.step, copy.copy(state.stream)
    saved = json.loads(json.dumps(state.collector.host()))
    other.collector = other.collector.restore(saved, state.collector.arrays())
    assert other.collector.host() == state.collector.host()
    assert other.collector.prompts_waiting == X
    step, expected = (one_step(x, weights) for x in (other, state))
    assert step.batch.metrics["rollout/tokens_resumed"] > 0
    assert_same_bits(step.result.rollout, expected.result.rollout)
    assert step.after.host() == expected.after.host()


# --- training -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_run_records(mesh, tmp_path):
    """With drafts of both kinds, and few rows at a time.

    Of 8 prompts a step trains on 4. The last step starts two fewer, so that none is left.
    """
    changes = {
        "rollout.partial": 2, "rollout.response_len": 16, "train.epochs": 3,
        "rollout.draft": "previous+tree", "rollout.accept": "match",
        "rollout.max_rows": 32, "rollout.row_buckets": 3, "rollout.adaptive": False,
        "rollout.max_width": 4, "updates.learning_rate": 0.005,
    }  # fmt: skip
    loop.train(small_config(changes), tmp_path / "run")
    result = records(tmp_path / "run")
    assert [r["epoch"] for r in result] == [0, 1, 1, 2, 2, 3, 3]
    assert [r["data/passes"] for r in result[1:]] == [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert result[1]["rollout/tokens_resumed"] == result[1]["rollout/stale_fraction"] == 0
    for record in result[2:]:
        assert record["rollout/tokens_resumed"] > 0
        assert 0 < record["rollout/stale_fraction"] < 1
        # Carried tokens have log-probs of another policy, which are no measure of arithmetic.
        assert "policy/rollout_train_logprob_gap" not in record
    assert result[1]["policy/rollout_train_logprob_gap"] < 1e-5
    assert all(0 <= r.get("rollout/draft_accept_rate", 0) <= 1 for r in result[1:])
    assert result[-1]["rollout/draft_store_gib"] > 0


def test_too_few_prompts_for_so_many_in_flight_are_one_line(mesh, tmp_path):
    with pytest.raises(ValueError, match=r"^data\.prompts must be >= "):
        loop.train(small_config({"rollout.partial": 8}), tmp_path / "run")


def test_a_run_made_shorter_takes_up_all_that_has_begun(mesh):
    """Six groups have started, and the last step trains on two."""
    config = small_config({
        "rollout.prompts_per_step": 2, "rollout.partial": 6, "data.prompts": 14,
        "updates.mini_batch_size": 16,
    })  # fmt: skip
    run, params = build(config)
    state = init_state(run, params).rollout
    collector = state.collector
    begun = [example.prompt_id for example in state.stream.take(6).examples]
    collector.prompt_ids = tuple(begun)
    collector.noise_steps = ((2,) * config.rollout.group_size,) * 6
    collector.run = dataclasses.replace(run, total_steps=3)
    state.step = 3
    requests = collector.choose_prompts(state)
    assert [example.prompt_id for example in requests.prompts.examples[:6]] == begun
    assert len(requests.prompts.lens) == 8
    assert requests.noise.noise_steps[:, 0].tolist() == [2] * 6 + [3] * 2
    assert requests.first.tolist() == [True] * 6 + [False] * 2
    np.testing.assert_array_equal(requests.done, np.repeat([False] * 6 + [True] * 2, 8))
    assert requests.enough_groups == 2 + 2  # two to train on, and two that only fill the shape
