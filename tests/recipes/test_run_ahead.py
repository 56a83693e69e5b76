"""Run-ahead: idle slots begin the next step's responses, and nothing else changes."""

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import check_equal, host, make_spec

from specrl_jax.rollout.drafts.edit import RunAhead
from specrl_jax.types import Source

EVERY = ref.random_prompts(16)
NOW, NEXT = EVERY.select(range(8)), EVERY.select(range(8, 16))
PLANS = {
    "two buckets": {},
    "few rows": {"max_rows": 16, "row_buckets": 3},
    "one bucket": {"row_buckets": 1},
    "wide": {"tree": ref.TREE, "max_width": 4},
}


def begin_ahead(spec, weights, step=1, prompts=NOW, next_prompts=NEXT, **options):
    """A rollout that begins the next prompts too."""
    return ref.rollout(spec, weights, prompts, step=step, next_prompts=next_prompts, **options)


def spec_for(changes) -> dict:
    return make_spec(accept="match", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(x, id=name, marks=[pytest.mark.slow] * (name == "few rows"))
        for name, x in PLANS.items()
    ],
)
def test_own_rows_are_the_same_and_the_next_step_keeps_those_ahead(mesh, changes):
    """Against rollouts of either step alone; what is begun ahead is a beginning, never more."""
    spec, (_, weights) = spec_for(changes), ref.policy()
    result = begin_ahead(spec, weights)
    assert result.groups.tolist() == list(range(8))
    but = ("sources",) if spec.draft_source else ()
    check_equal(result.rollout, ref.run(spec, weights, NOW, 1)[0], but=but)
    assert result.run_ahead.prompt_ids == tuple(e.prompt_id for e in NEXT.examples)
    plain, plain_stats = ref.run(spec, weights, NEXT, 2)
    later, drafts = host(plain), host(result.run_ahead.drafts)
    assert result.metrics()["rollout/tokens_run_ahead"] == drafts.lens.sum() > 0
    assert (drafts.lens <= later.lens).all()
    assert (drafts.lens < later.lens).any()
    begun = np.arange(8)[None, :] < drafts.lens[:, None]
    np.testing.assert_array_equal(drafts.tokens[begun], later.tokens[begun])
    # The next step, under the same policy
    after, stats = ref.run(spec, weights, NEXT, 2, drafts=result.run_ahead.drafts_for(NEXT))
    np.testing.assert_array_equal(after.prefix_lens, drafts.lens)
    check_equal(after, plain, but=("prefix_lens", "sources"))
    assert np.all(np.asarray(after.origin_steps) == 2)  # drawn again, now
    assert np.all(np.asarray(after.sources)[begun] == Source.REUSED)
    # In one bucket the batch takes as many steps as its longest row, which may not have begun.
    assert stats.row_steps < plain_stats.row_steps or spec.row_buckets == 1


def test_rows_of_the_next_step_begin_in_order_in_free_slots(mesh):
    """A batch of 24 slots; it does not shrink as long as others wait for one."""
    spec, (_, weights) = spec_for({"row_buckets": 3}), ref.policy()
    prompts = NOW.select(range(6))
    result = begin_ahead(spec, weights, prompts=prompts)
    begun = np.asarray(result.run_ahead.drafts.lens) > 0
    assert 12 <= begun.sum() < 32
    assert begun[: begun.sum()].all()
    assert {rows for rows, _, _ in result.stats.decode_runs} == {24}
    check_equal(result.rollout, ref.run(spec, weights, prompts, 1)[0])


def test_the_next_step_draws_as_its_own_policy_does(mesh):
    """Under a policy that an update moved: the same tokens, with less of them kept."""
    spec, (_, older), (_, weights) = spec_for({}), ref.policy(0.15), ref.policy()
    drafts = begin_ahead(spec, older).run_ahead.drafts_for(NEXT)
    result, plain = (ref.run(spec, weights, NEXT, 2, drafts=d)[0] for d in (drafts, None))
    check_equal(result, plain, but=("prefix_lens", "sources"))
    accepted, begun = np.asarray(result.prefix_lens), np.asarray(drafts.lens)
    assert 0.2 * begun.sum() < accepted.sum() < begun.sum()
    lost = ref.common_prefix(*host((drafts.tokens, drafts.lens, plain.tokens, plain.lens)))
    np.testing.assert_array_equal(accepted, lost)


def test_what_was_begun_goes_before_an_earlier_response(mesh):
    spec, (_, weights) = spec_for({}), ref.policy()
    run_ahead = begin_ahead(spec, weights).run_ahead
    previous = ref.as_drafts(ref.run(spec, weights, NEXT)[0])
    drafts = host(run_ahead.drafts_for(NEXT, previous))
    begun, before = host(run_ahead.drafts), host(previous)
    first = begun.lens > 0
    np.testing.assert_array_equal(drafts.lens, np.where(first, begun.lens, before.lens))
    expected = np.where(first[:, None], begun.tokens, before.tokens)
    np.testing.assert_array_equal(drafts.tokens, expected)
    # Of what was begun for other prompts there is nothing.
    others = host(run_ahead.drafts_for(NOW, previous))
    np.testing.assert_array_equal(others.tokens, before.tokens)
    np.testing.assert_array_equal(others.lens, before.lens)
    assert not np.any(run_ahead.drafts_for(NOW).lens)
    assert not np.any(RunAhead.empty(32, 8).drafts_for(NEXT).lens)


def test_trees_go_on_where_it_stopped_being_right(mesh):
    """What was begun is also a source of tree drafts, of the prompts it was begun for alone."""
    (_, older), (_, weights) = ref.policy(0.15), ref.policy()
    spec = spec_for(PLANS["wide"])
    run_ahead = begin_ahead(spec, older).run_ahead
    tokens, lens = run_ahead.history(NEXT)
    np.testing.assert_array_equal(np.asarray(tokens).reshape(32, 8), run_ahead.drafts.tokens)
    np.testing.assert_array_equal(np.asarray(lens).reshape(32), run_ahead.drafts.lens)
    assert not np.asarray(run_ahead.history(NOW)[1]).any()
    plain = ref.run(spec, weights, NEXT, 2)
    result = ref.run(spec, weights, NEXT, 2, history=(tokens, lens))
    check_equal(result[0], plain[0], but=("sources",))
    assert result[1].drafted_tokens > plain[1].drafted_tokens


def test_on_a_mesh(make_mesh):
    with jax.set_mesh(make_mesh(2, 2, 2)):
        spec, (_, weights) = spec_for({}), ref.policy()
        result = begin_ahead(spec, weights, 8)
        check_equal(result.rollout, ref.run(spec, weights, NOW, 8)[0])
        drafts = result.run_ahead.drafts_for(NEXT)
        after = begin_ahead(spec, weights, 9, NEXT, NOW, drafts=drafts)
        plain, _ = ref.run(spec, weights, NEXT, 9)
        check_equal(after.rollout, plain, but=("prefix_lens", "sources"))
        # Every shard had its share of the next step's groups, and begun some.
        assert np.asarray(drafts.lens).reshape(4, -1).any(axis=1).all()
        np.testing.assert_array_equal(after.rollout.prefix_lens, drafts.lens)
