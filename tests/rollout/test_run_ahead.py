"""Run-ahead: idle places begin the next step's responses, and nothing else changes."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import KEY, check_equal, host, make_plan, select
from small_runs import interrupt, records, saved, small_config

from specrl_jax import train as loop
from specrl_jax.rollout.carry_over import RunAhead
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.types import Source

EVERY = ref.random_prompts(16)
NOW, NEXT = select(EVERY, range(8)), select(EVERY, range(8, 16))
PLANS = {
    "two rungs": {},
    "few rows": {"max_rows": 16, "row_buckets": 3},
    "one rung, deeper windows": {"row_buckets": 1, "cache_lengths": 3},
    "wide": {"tree": ref.TREE, "max_width": 4},
}


def begin_ahead(plan, weights, step=1, prompts=NOW, ahead=NEXT, **options):
    """A rollout that runs the next prompts ahead."""
    key = jax.random.key(KEY)
    return ref.rollout(plan, weights, prompts, key=key, step=step, next_prompts=ahead, **options)


def plan_for(changes) -> dict:
    return make_plan(accept="match", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=pytest.mark.slow if name == "two rungs" else ())
        for name, changes in PLANS.items()
    ],
)
def test_own_rows_are_the_same_and_those_ahead_are_the_next_steps(mesh, changes):
    """Against rollouts of either step alone; what is begun ahead is a beginning, never more."""
    plan, (_, weights) = plan_for(changes), ref.policy()
    found = begin_ahead(plan, weights)
    assert found.groups.tolist() == list(range(8))
    but = ("sources",) if plan.program.draft_source else ()
    check_equal(found.rollout, ref.run(plan, weights, NOW, 1)[0], but=but)
    later, drafts = host(ref.run(plan, weights, NEXT, 2)[0]), host(found.run_ahead.drafts)
    assert found.run_ahead.prompt_ids == tuple(e.prompt_id for e in NEXT.examples)
    assert found.metrics()["rollout/tokens_run_ahead"] == drafts.lens.sum()
    assert (drafts.lens > 0).any()
    assert (drafts.lens <= later.lens).all()
    begun = np.arange(8)[None, :] < drafts.lens[:, None]
    np.testing.assert_array_equal(drafts.tokens[begun], later.tokens[begun])
    assert (drafts.lens < later.lens).any()


def test_a_whole_group_is_begun_in_one_rungs_idle_places(mesh):
    """6 groups of 4 rows on a rung of 32: two groups fit beside them from the first step on."""
    plan, (_, weights) = plan_for({"row_buckets": 1, "cache_lengths": 1}), ref.policy()
    few = dataclasses.replace(plan, row_buckets=3)  # rungs 24, 12, 6; at most 12 own rows, 12 ahead
    prompts = select(NOW, range(6))
    found = begin_ahead(few, weights, prompts=prompts)
    lens = np.asarray(found.run_ahead.drafts.lens).reshape(8, 4)
    assert (lens[:3] > 0).all()  # in batch order, by whole groups
    sizes = [rows for rows, _, _, _ in found.stats.decode_runs]
    assert sizes[0] == sizes[1] == 24  # the rung stays for them
    check_equal(found.rollout, ref.run(few, weights, prompts, 1)[0])


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_the_next_step_keeps_all_of_it_under_the_same_policy(mesh, changes):
    plan, (_, weights) = plan_for(changes), ref.policy()
    ahead = begin_ahead(plan, weights).run_ahead
    drafts, (plain, plain_cost) = ahead.drafts_for(NEXT), ref.run(plan, weights, NEXT, 2)
    found, cost = ref.run(plan, weights, NEXT, 2, drafts=drafts)
    np.testing.assert_array_equal(np.asarray(found.prefix_lens), np.asarray(drafts.lens))
    check_equal(found, plain, but=("prefix_lens", "sources"))
    assert np.all(np.asarray(found.origin_steps) == 2)  # drawn again, now
    begun = np.arange(8)[None, :] < np.asarray(drafts.lens)[:, None]
    assert np.all(np.asarray(found.sources)[begun] == Source.REUSED)
    assert cost.row_steps < plain_cost.row_steps


def test_the_next_step_draws_as_its_own_policy_does(mesh):
    """Under a policy that an update moved: the same tokens, with less of them kept."""
    plan, (_, older), (_, weights) = plan_for({}), ref.policy(0.15), ref.policy()
    drafts = begin_ahead(plan, older).run_ahead.drafts_for(NEXT)
    found, plain = (ref.run(plan, weights, NEXT, 2, drafts=d)[0] for d in (drafts, None))
    check_equal(found, plain, but=("prefix_lens", "sources"))
    kept, begun = np.asarray(found.prefix_lens), np.asarray(drafts.lens)
    assert 0.2 * begun.sum() < kept.sum() < begun.sum()
    lost = ref.common_prefix(*host((drafts.tokens, drafts.lens, plain.tokens, plain.lens)))
    np.testing.assert_array_equal(kept, lost)


def test_what_was_begun_goes_before_an_earlier_response(mesh):
    plan, (_, weights) = plan_for({}), ref.policy()
    ahead = begin_ahead(plan, weights).run_ahead
    previous = ref.as_drafts(ref.run(plan, weights, NEXT)[0])
    drafts = host(ahead.drafts_for(NEXT, previous))
    begun, before = host(ahead.drafts), host(previous)
    first = begun.lens > 0
    np.testing.assert_array_equal(drafts.lens, np.where(first, begun.lens, before.lens))
    expected = np.where(first[:, None], begun.tokens, before.tokens)
    np.testing.assert_array_equal(drafts.tokens, expected)
    assert ahead.drafts_for(NOW, previous) is previous  # begun for other prompts
    assert ahead.drafts_for(NOW) is None
    assert RunAhead.empty(32, 8).drafts_for(NEXT) is None


def test_trees_go_on_where_it_stopped_being_right(mesh):
    """What was begun is also a source of tree drafts, of the prompts it was begun for alone."""
    (_, older), (_, weights) = ref.policy(0.15), ref.policy()
    plan = plan_for(PLANS["wide"])
    ahead = begin_ahead(plan, older).run_ahead
    tokens, lens = ahead.sources(NEXT)
    np.testing.assert_array_equal(np.asarray(tokens).reshape(32, 8), ahead.drafts.tokens)
    np.testing.assert_array_equal(np.asarray(lens).reshape(32), ahead.drafts.lens)
    assert not np.asarray(ahead.sources(NOW)[1]).any()
    plain = ref.run(plan, weights, NEXT, 2)
    found = ref.run(plan, weights, NEXT, 2, history=DraftHistory.from_store(tokens, lens, 4))
    check_equal(found[0], plain[0], but=("sources",))
    assert found[1].drafted_tokens > plain[1].drafted_tokens


def test_a_prompt_that_comes_again_at_once_has_noise_of_its_own(mesh):
    """The last step of an epoch and the first of the next may share a prompt."""
    plan, (_, weights) = plan_for({}), ref.policy()
    found = begin_ahead(plan, weights, ahead=NOW)
    check_equal(found.rollout, ref.run(plan, weights, NOW, 1)[0])
    later, drafts = host(ref.run(plan, weights, NOW, 2)[0]), host(found.run_ahead.drafts)
    begun = np.arange(8)[None, :] < drafts.lens[:, None]
    np.testing.assert_array_equal(drafts.tokens[begun], later.tokens[begun])


def test_rows_run_ahead_give_way_to_the_bound_of_the_cache(mesh):
    """As windows get deeper fewer rows fit; those ahead are over then and nobody waits for them."""
    plan, (_, weights) = plan_for({"row_buckets": 3, "cache_lengths": 3}), ref.policy()
    per_slot = 2 * 2 * 2 * 4 * 4  # layers, keys and values, heads, head dim, float32
    # Of 14 slots 8 rows, of 10 slots 16; moving needs both old and new.
    bounded = dataclasses.replace(plan, cache_bytes=2 * 16 * 10 * per_slot)
    found = begin_ahead(bounded, weights)
    check_equal(found.rollout, ref.run(plan, weights, NOW, 1)[0])
    assert found.stats.preempted > 0
    assert found.stats.cache_bytes <= bounded.cache_bytes


@pytest.mark.parametrize("shape", [pytest.param((4, 1, 1), marks=pytest.mark.slow), (2, 2, 2)])
def test_on_a_mesh(make_mesh, shape):
    with jax.set_mesh(make_mesh(*shape)):
        plan, (_, weights) = plan_for({"cache_lengths": 1}), ref.policy()
        found = begin_ahead(plan, weights)
        check_equal(found.rollout, ref.run(plan, weights, NOW, 1)[0])
        drafts = found.run_ahead.drafts_for(NEXT)
        after = begin_ahead(plan, weights, 2, NEXT, NOW, drafts=drafts)
        check_equal(
            after.rollout, ref.run(plan, weights, NEXT, 2)[0], but=("prefix_lens", "sources")
        )
        assert np.asarray(drafts.lens).any()
        np.testing.assert_array_equal(
            np.asarray(after.rollout.prefix_lens), np.asarray(drafts.lens)
        )


# --- training -------------------------------------------------------------------------------------

RUN = {
    "rollout.draft": "none", "rollout.response_len": 16, "rollout.row_buckets": 3,
    "rollout.adaptive": False, "rollout.verify_width": 4, "updates.learning_rate": 0.005,
    "log.rollouts": 1.0,
}  # fmt: skip
AHEAD = RUN | {"rollout.run_ahead": True}
# Costs, or told of the drafts: everything else is of the responses and of the update.
SAME = ("reward/", "policy/", "update/", "data/", "rollout/response_len_mean",
        "rollout/truncated_fraction", "rollout/overlap_rouge1")  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory, make_mesh):
    """The work directory of AHEAD, four steps."""
    workdir = tmp_path_factory.mktemp("ahead") / "run"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(AHEAD), workdir)
    return workdir


def _responses(workdir, step: int) -> list[tuple]:
    names = ("prompt_id", "sample", "token_ids", "origin_steps", "reward")
    return [tuple(map(str, map(r.get, names))) for r in read_rollouts(workdir, step)]


def test_training_is_the_same_with_and_without(trained, tmp_path, mesh):
    loop.train(small_config(RUN), tmp_path / "plain")
    before = 0
    for found, plain in zip(records(trained)[1:], records(tmp_path / "plain")[1:], strict=True):
        step = found["step"]
        assert _responses(trained, step) == _responses(tmp_path / "plain", step)
        for name, value in plain.items():
            if name.startswith(SAME):
                np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        # All but the last step begin the next one's responses; all but the first have some.
        assert ("rollout/tokens_run_ahead" in found) == (step < 4)
        assert ("rollout/run_ahead_accepted" in found) == (step > 1)
        assert found.get("rollout/tokens_run_ahead", 1) > 0
        assert 0 < found.get("rollout/run_ahead_accepted", 0.5) < 1
        kept = found.get("rollout/run_ahead_accepted", 0.0) * before
        assert found["rollout/tokens_reused"] == pytest.approx(kept)
        before = found.get("rollout/tokens_run_ahead", 0)


def test_a_policy_that_stays_keeps_all_of_it(tmp_path, mesh):
    changes = AHEAD | {"updates.learning_rate": 0.0, "train.steps": 3}
    changes |= {"rollout.draft": "previous+tree", "rollout.accept": "match"}
    changes |= {"rollout.max_width": 4, "rollout.store": "host"}
    loop.train(small_config(changes), tmp_path / "run")
    found = records(tmp_path / "run")
    assert [r.get("rollout/run_ahead_accepted") for r in found] == [None, None, 1.0, 1.0]
    assert found[3]["rollout/draft_store_host_gib"] > 0
    # In the third step the second epoch begins: what was not begun has its first response.
    assert found[3]["rollout/draft_accept_rate"] < 1


def test_resumed_is_the_same_run(trained, tmp_path, mesh, monkeypatch):
    """Stopped behind step 2 and gone on with: the drafts are in the checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", MetricsLog.write)  # put back after interrupt
        interrupt(MetricsLog, "write", 2, number=15)
        loop.train(small_config(AHEAD), tmp_path / "run")
    assert len(records(tmp_path / "run")) == 3
    loop.train(small_config(AHEAD), tmp_path / "run")
    assert records(tmp_path / "run") == records(trained)
    one, two = saved(tmp_path / "run", 4), saved(trained, 4)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name
    middle = saved(tmp_path / "run", 2)
    assert middle["run_ahead.lens"].any()
    assert middle["run_ahead.tokens"].shape == (32, 16)
