"""Run-ahead: idle slots start the next step's responses, and nothing else changes."""

import copy
import dataclasses
import json

import jax
import numpy as np
import pytest
import rollout_reference as ref
from collector_steps import Step, make_state, one_step
from rollout_reference import check_equal, host, make_spec
from small_runs import assert_same_bits

from specrl_jax.recipes.run_ahead import RunningAhead
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.training.state import RolloutState
from specrl_jax.types import Prompts, Source

EVERY = ref.random_prompts(16)
NOW, NEXT = EVERY.select(range(8)), EVERY.select(range(8, 16))
PLANS = {
    "two buckets": {},
    "few rows": {"max_rows": 16, "row_buckets": 3},
    "one bucket": {"row_buckets": 1},
    "wide": {"tree": ref.TREE, "max_width": 4},
}


class Numbered:
    """In the place of a draft store: responses whose tokens are the number of their prompt."""

    def __init__(self, generations: int = 2):
        self.generations = generations

    def history(self, prompts, *, step):
        numbers = [EVERY.examples.index(example) for example in prompts.examples]
        shape = len(numbers), self.generations, 4, 8
        tokens = np.broadcast_to(np.array(numbers, np.int32)[:, None, None, None], shape)
        lens = np.full(shape[:3], 5, np.int32)
        return put(tokens, *(None,) * 4), put(lens, *(None,) * 3)


NO_STORE = Numbered(0)


def begin(spec, prompts=EVERY, store=NO_STORE) -> RolloutState:
    """The state before step 1, 8 prompts a step."""
    state = make_state(RunningAhead, spec, prompts, 8)
    state.store = store
    return state


def one_run_ahead(spec, weights) -> tuple[RolloutState, Step]:
    """Step 1, on NOW, that starts NEXT; and the state after it."""
    state = begin(spec)
    return state, one_step(state, weights)


def next_requests(state):
    """Requests of the next step, which stays the next."""
    state = dataclasses.replace(state, step=state.step + 1, stream=copy.copy(state.stream))
    return state.collector.choose_prompts(state)


def drafts_of(state, requests, stored=None):
    """Drafts of the rows that are not in the background; the others have none."""
    drafts = host(state.collector.drafts(state, requests, stored))
    assert not drafts.lens[requests.background].any()
    return ref.put_rows(jax.tree.map(lambda x: x[~requests.background], drafts))


def spec_for(changes) -> RolloutSpec:
    return make_spec(accept="match", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(x, id=name, marks=[pytest.mark.slow] * (name == "few rows"))
        for name, x in PLANS.items()
    ],
)
def test_own_rows_are_the_same_and_the_next_step_keeps_those_ahead(mesh, changes):
    """Against rollouts of either step alone; what is started ahead is a prefix, never more."""
    spec, (_, weights) = spec_for(changes), ref.policy()
    state, step = one_run_ahead(spec, weights)
    assert step.groups.tolist() == list(range(8))
    but = ("sources",) if spec.draft_source else ()
    check_equal(step.rollout, ref.run(spec, weights, NOW, 1)[0], but=but)
    assert step.after.prompt_ids == tuple(e.prompt_id for e in NEXT.examples)
    plain, plain_stats = ref.run(spec, weights, NEXT, 2)
    later, drafts = host(plain), host(step.after.begun)
    assert step.batch.metrics["rollout/tokens_run_ahead"] == drafts.lens.sum() > 0
    assert "rollout/run_ahead_accepted" not in step.batch.metrics
    assert (drafts.lens <= later.lens).all()
    assert (drafts.lens < later.lens).any()
    begun = np.arange(8)[None, :] < drafts.lens[:, None]
    np.testing.assert_array_equal(drafts.tokens.ids[begun], later.tokens.ids[begun])
    # The next step, under the same policy
    own = drafts_of(state, next_requests(state))
    after, stats = ref.run(spec, weights, NEXT, 2, drafts=own)
    np.testing.assert_array_equal(after.prefix_lens, drafts.lens)
    check_equal(after, plain, but=("prefix_lens", "sources"))
    assert np.all(np.asarray(after.tokens.origin_steps) == 2)  # drawn again, now
    assert np.all(np.asarray(after.tokens.sources)[begun] == Source.REUSED)
    # In one bucket the batch takes as many steps as its longest row, which may not have started.
    assert stats.row_steps < plain_stats.row_steps or spec.row_buckets == 1


def test_rows_of_the_next_step_begin_in_order_in_free_slots(mesh):
    """A batch of 24 slots; it does not shrink as long as others wait for one."""
    spec, (_, weights) = spec_for({"row_buckets": 3}), ref.policy()
    prompts = EVERY.select([*range(6), *range(8, 16)])
    background = np.arange(14 * 4) >= 6 * 4
    result = ref.rollout(spec, weights, prompts, step=1, background=background)
    begun = np.asarray(result.rollout.lens)[background] > 0
    assert 12 <= begun.sum() < 32
    assert begun[: begun.sum()].all()
    assert {rows for rows, _, _ in result.stats.decode_runs} == {24}
    own = jax.tree.map(lambda x: x[~background], host(result.rollout))
    check_equal(own, ref.run(spec, weights, prompts.select(range(6)), 1)[0])


def test_the_next_step_draws_as_its_own_policy_does(mesh):
    """Under a policy that an update moved: the same tokens, with less of them kept."""
    spec, (_, older), (_, weights) = spec_for({}), ref.policy(0.15), ref.policy()
    state, _ = one_run_ahead(spec, older)
    drafts = drafts_of(state, next_requests(state))
    result, plain = (ref.run(spec, weights, NEXT, 2, drafts=d)[0] for d in (drafts, None))
    check_equal(result, plain, but=("prefix_lens", "sources"))
    accepted, begun = np.asarray(result.prefix_lens), np.asarray(drafts.lens)
    assert 0.2 * begun.sum() < accepted.sum() < begun.sum()
    lost = ref.common_prefix(*host((drafts.tokens.ids, drafts.lens, plain.tokens.ids, plain.lens)))
    np.testing.assert_array_equal(accepted, lost)
    # So does the step that runs ahead itself, and it says how much of what was started it kept.
    step = one_step(state, weights)
    check_equal(step.rollout, plain, but=("prefix_lens", "sources"))
    np.testing.assert_array_equal(step.rollout.prefix_lens, lost)
    share = step.batch.metrics["rollout/run_ahead_accepted"]
    assert share == pytest.approx(lost.sum() / begun.sum())


def test_what_was_begun_goes_before_an_earlier_response(mesh):
    spec, (_, weights) = spec_for({}), ref.policy()
    state, step = one_run_ahead(spec, weights)
    requests = next_requests(state)
    stored = ref.as_drafts(ref.run(spec, weights, requests.prompts)[0])
    drafts = host(drafts_of(state, requests, stored))
    begun, earlier = host(step.after.begun), host(stored)
    before = jax.tree.map(lambda x: x[~requests.background], earlier)
    first = begun.lens > 0
    assert 0 < first.sum() < len(first)
    np.testing.assert_array_equal(drafts.lens, np.where(first, begun.lens, before.lens))
    expected = np.where(first[:, None], begun.tokens.ids, before.tokens.ids)
    np.testing.assert_array_equal(drafts.tokens.ids, expected)
    # On reused noise a row repeats its last response, which is longer.
    kept = np.full((16, 4), 2)
    kept[::2, 1] = 1
    on_reused_noise = dataclasses.replace(requests.noise, noise_steps=kept, step=2)
    state.step = 2
    drafts = drafts_of(state, dataclasses.replace(requests, noise=on_reused_noise), stored)
    first &= (kept == 2).reshape(-1)[~requests.background]
    lens = np.where(first, begun.lens, before.lens)
    np.testing.assert_array_equal(np.asarray(drafts.lens), lens)


def test_of_what_was_begun_for_other_prompts_there_is_nothing(mesh):
    spec, (_, weights) = spec_for({}), ref.policy()
    state, _ = one_run_ahead(spec, weights)
    state.stream.given = 0
    requests = next_requests(state)
    assert requests.prompts.examples[0] == NOW.examples[0]
    stored = ref.as_drafts(ref.run(spec, weights, requests.prompts)[0])
    drafts, earlier = host(drafts_of(state, requests, stored)), host(stored)
    np.testing.assert_array_equal(drafts.tokens.ids, earlier.tokens.ids[~requests.background])
    np.testing.assert_array_equal(drafts.lens, earlier.lens[~requests.background])
    assert not np.any(drafts_of(state, requests).lens)
    # Nor is there anything before the first step.
    new = begin(spec, NEXT)
    assert not np.any(drafts_of(new, next_requests(new)).lens)


def test_trees_go_on_where_it_stopped_being_right(mesh):
    """What was started is also a source of tree drafts, of the prompts it was started for alone."""
    (_, older), (_, weights) = ref.policy(0.15), ref.policy()
    spec = spec_for(PLANS["wide"])
    state, step = one_run_ahead(spec, older)
    requests = next_requests(state)
    tokens, lens = state.collector.history(state, requests.prompts)
    assert tokens.shape == (16, 1, 4, 8)
    own = ~requests.background.reshape(16, 4).any(axis=1)
    own_lens = np.asarray(lens)[own].reshape(32)
    np.testing.assert_array_equal(
        np.asarray(tokens)[own].reshape(32, 8), step.after.begun.tokens.ids
    )
    np.testing.assert_array_equal(own_lens, step.after.begun.lens)
    assert own_lens.any()
    assert not np.asarray(lens)[~own].any()
    others = Prompts.concatenate(NOW, NEXT)
    assert not np.asarray(state.collector.history(state, others)[1]).any()
    plain = ref.run(spec, weights, NEXT, 2)
    result = ref.run(spec, weights, NEXT, 2, history=(tokens[:8], lens[:8]))
    check_equal(result[0], plain[0], but=("sources",))
    assert result[1].drafted_tokens > plain[1].drafted_tokens


def test_it_is_newer_than_what_is_stored(make_mesh):
    """Of the generations that the draft source reads; on two shards with background rows each."""
    with jax.set_mesh(make_mesh(2, 1, 1)):
        spec, (_, weights) = spec_for({}), ref.policy()
        state, step = one_run_ahead(spec, weights)
        requests = next_requests(state)
        state.store = Numbered()
        tokens, lens = host(state.collector.history(state, requests.prompts))
        expected = host(Numbered().history(requests.prompts, step=2))
        begun = host(step.after.begun)
    assert RunningAhead.generations(2) == tokens.shape[1] == 3
    np.testing.assert_array_equal(tokens[:, 1:], expected[0])
    np.testing.assert_array_equal(lens[:, 1:], expected[1])
    own = ~requests.background.reshape(16, 4).any(axis=1)
    assert own.tolist() == ([True] * 4 + [False] * 4) * 2
    np.testing.assert_array_equal(lens[own, 0].reshape(32), begun.lens)
    np.testing.assert_array_equal(tokens[own, 0].reshape(32, 8), begun.tokens.ids)
    assert not lens[~own, 0].any()


def test_a_checkpoint_holds_what_was_begun(mesh):
    spec, (_, weights) = spec_for({}), ref.policy()
    state, _ = one_run_ahead(spec, weights)
    other = begin(spec)
    other.step, other.stream = state.step, copy.copy(state.stream)
    names = json.loads(json.dumps(state.collector.host()))
    other.collector = other.collector.restore(names, state.collector.arrays())
    assert other.collector.host() == state.collector.host()
    step, expected = (one_step(x, weights) for x in (other, state))
    assert_same_bits(step.result.rollout, expected.result.rollout)
    assert step.batch.metrics["rollout/run_ahead_accepted"] == 1


def test_on_a_mesh(make_mesh):
    with jax.set_mesh(make_mesh(2, 2, 2)):
        spec, (_, weights) = spec_for({}), ref.policy()
        state = begin(spec)
        state.step = 7
        step = one_step(state, weights)
        # Every shard has two groups of this step, and two of the next.
        assert step.groups.tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
        check_equal(step.rollout, ref.run(spec, weights, NOW, 8)[0])
        after = one_step(state, weights)
        assert after.prompts.examples == NEXT.examples
        plain, _ = ref.run(spec, weights, NEXT, 9)
        check_equal(after.rollout, plain, but=("prefix_lens", "sources"))
        # Every shard had its share of the next step's groups, and started some.
        begun = np.asarray(step.after.begun.lens)
        assert begun.reshape(4, -1).any(axis=1).all()
        np.testing.assert_array_equal(after.rollout.prefix_lens, begun)
