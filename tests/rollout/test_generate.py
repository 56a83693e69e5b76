"""Whole rollouts: against a cacheless loop, on any ladder and mesh, and at responses' ends."""

import math

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, check_equal, check_same, host, make_plan, make_prompts, run

from specrl_jax.rollout.drafts.store import DraftStore
from specrl_jax.rollout.sampling import Purpose, SamplingConfig

LAWS = [SamplingConfig(), SamplingConfig(0.7, top_k=5, top_p=0.9)]
HALF = 0.5  # log of SPEC-RL's lenience for GRPO


def old_drafts(plan, prompts, nudge=0.3):
    """A rollout of an earlier policy, as drafts; every fifth row has none."""
    rollout, _ = run(plan, ref.policy(nudge, plan.program.model)[1], prompts)
    return as_drafts(rollout, np.where(np.arange(32) % 5 == 4, 0, rollout.lens))


# Against the naive loop


@pytest.mark.parametrize("law", LAWS, ids=["plain", "truncated"])
def test_three_rollouts_equal_the_naive_loop(mesh, law):
    """No drafts, then twice the last rollout's: tokens, lengths, log-probs, sources, origins."""
    rungs = 1 if law.truncates else 2
    plan = make_plan(sampling=law, row_buckets=rungs, cache_lengths=1)
    prompts, drafts = ref.random_prompts(), None
    for step, nudge in enumerate((0.3, 0.15, 0.0)):
        params, weights = ref.policy(nudge)
        rollout, _ = run(plan, weights, prompts, step, drafts=drafts, log_lenience=HALF)
        check_same(rollout, ref.Reference(plan, params, prompts, step=step, drafts=drafts,
                                          log_lenience=HALF))  # fmt: skip
        prefix, lens = np.asarray(rollout.prefix_lens), np.asarray(rollout.lens)
        if step == 0:
            assert not prefix.any()
            assert {8} < set(lens)  # ended by the slots, and by an end of sequence
        else:
            # Nothing kept, a part kept, everything kept: all three in one batch.
            assert (prefix == 0).any()
            assert ((prefix > 0) & (prefix < lens)).any()
            assert (prefix == lens).any()
        drafts = as_drafts(rollout)
    ages = np.asarray(rollout.origin_steps)[np.arange(8)[None, :] < lens[:, None]]
    assert set(ages) == {0, 1, 2}


def test_random_reuse_equals_the_naive_loop(mesh):
    prompts, plan = ref.random_prompts(), make_plan(accept="random", row_buckets=1, cache_lengths=1)
    drafts = old_drafts(make_plan(cache_lengths=1), prompts)
    params, weights = ref.policy()
    rollout, _ = run(plan, weights, prompts, 1, drafts=drafts)
    check_same(rollout, ref.Reference(plan, params, prompts, step=1, drafts=drafts))
    prefix, lens = np.asarray(rollout.prefix_lens), np.asarray(drafts.lens)
    assert np.all(prefix <= np.maximum(lens - 1, 0))  # never the whole draft
    assert prefix.max() > 3


def test_evaluation_is_greedy_and_has_noise_of_its_own(mesh):
    prompts, plan = (
        ref.random_prompts(),
        make_plan(sampling=LAWS[1], row_buckets=1, cache_lengths=1),
    )
    params, weights = ref.policy()
    greedy = plan.for_evaluation(4, 0.0)
    rollout, _ = run(greedy, weights, prompts, purpose=Purpose.EVALUATE)
    check_same(rollout, ref.Reference(greedy, params, prompts, step=0))  # whatever the purpose
    tokens = np.asarray(rollout.tokens).reshape(8, 4, 8)
    np.testing.assert_array_equal(tokens, np.broadcast_to(tokens[:, :1], tokens.shape))
    sampled = plan.for_evaluation(4, 1.0)
    evaluated, _ = run(sampled, weights, prompts, purpose=Purpose.EVALUATE)
    trained, _ = run(sampled, weights, prompts)
    check_same(evaluated, ref.Reference(sampled, params, prompts, step=0,
                                        purpose=Purpose.EVALUATE))  # fmt: skip
    assert (np.asarray(evaluated.tokens) != np.asarray(trained.tokens)).any(axis=1).mean() > 0.9


def test_no_reuse_is_plain_and_full_reuse_is_the_draft(mesh):
    prompts, plan = ref.random_prompts(), make_plan(cache_lengths=1)
    params, weights = ref.policy()
    drafts = as_drafts(run(plan, ref.policy(0.3)[1], prompts)[0])
    plain, _ = run(plan, weights, prompts, 1)
    none, _ = run(plan, weights, prompts, 1, drafts=drafts, log_lenience=-math.inf)
    np.testing.assert_array_equal(np.asarray(none.tokens), np.asarray(plain.tokens))
    assert not np.asarray(none.prefix_lens).any()
    full, cost = run(plan, weights, prompts, 1, drafts=drafts, log_lenience=math.inf)
    np.testing.assert_array_equal(np.asarray(full.tokens), np.asarray(drafts.tokens))
    np.testing.assert_array_equal(np.asarray(full.prefix_lens), np.asarray(drafts.lens))
    assert (cost.decode_steps, cost.row_steps, cost.decode_runs) == (0, 0, [])
    check_same(full, ref.Reference(plan, params, prompts, step=1, drafts=drafts,
                                   log_lenience=math.inf))  # fmt: skip
    assert (np.asarray(plain.tokens) != np.asarray(full.tokens)).any(axis=1).mean() > 0.5


# What may not change anything


def check_stats(plan, rollout, cost, drafts=None):
    """What the lengths alone can tell: all, where rows begin together and never wait."""
    lens, prefix = np.asarray(rollout.lens), np.asarray(rollout.prefix_lens)
    drawn = lens - prefix
    assert cost.row_steps + cost.verify_work >= drawn.sum()
    if not plan.max_rows and (
        drafts is None or (plan.cache_lengths == 1 and not plan.verify_width)
    ):
        ladder = plan.buckets(len(lens))
        if drafts is not None:
            # The pass draws a token behind every draft, unless the draft fills it.
            width = ladder.verify_width_for(int(np.asarray(drafts.lens).max()))
            assert cost.verify_work == len(lens) * width
            drawn = np.maximum(lens - np.minimum(prefix + 1, width), 0)
        # Every step runs the smallest rung that fits.
        active = [np.sum(drawn > t) for t in range(drawn.max(initial=0))]
        rungs = [min(r for r in ladder.rows if r >= n) for n in active]
        assert (cost.decode_steps, cost.row_steps) == (len(active), sum(rungs))
    sizes, _, widths, steps = zip(*cost.decode_runs, strict=True)
    assert cost.decode_steps == sum(steps)
    assert cost.row_steps == np.dot(sizes, steps)
    assert set(widths) == {1}
    assert min(steps) > 0
    assert max(sizes) <= (plan.max_rows or len(lens))
    metrics = cost.metrics()
    assert metrics["rollout/row_steps"] == cost.row_steps
    assert metrics["rollout/width_mean"] == 1.0
    assert metrics["rollout/tokens_drafted"] == cost.drafted_tokens == 0
    assert metrics["time/decode"] > 0
    assert (cost.preempted, "time/decode_predicted" in metrics) == (0, False)


# (row rungs, windows, rows in flight, tokens verified at once)
LADDERS = [
    (1, 1, 0, 0),
    pytest.param((2, 2, 0, 0), marks=pytest.mark.slow),  # its parts are in the others
    (3, 3, 0, 3),
    # Few rows in flight: test_speculation.py and test_engine.py have them too.
    pytest.param((2, 1, 16, 0), marks=pytest.mark.slow),
    pytest.param((2, 2, 8, 2), marks=pytest.mark.slow),
]


def small_plan(**kwargs):
    return make_plan(ref.ONE_LAYER, **kwargs)


def small_weights(nudge=0.0):
    return ref.policy(nudge, ref.ONE_LAYER)[1]


@pytest.fixture(scope="module")
def base(make_mesh):
    """Drafts, and the rollouts without and with them on the default ladder."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        plan, prompts = small_plan(), ref.random_prompts()
        drafts = old_drafts(plan, prompts)
        weights = small_weights()
        plain, cost = run(plan, weights, prompts, 1)
        check_stats(plan, plain, cost)
        reused, cost = run(plan, weights, prompts, 1, drafts=drafts, log_lenience=HALF)
        check_stats(plan, reused, cost, drafts)
        yield prompts, host(drafts), host(plain), host(reused)


@pytest.mark.parametrize("ladder", LADDERS, ids=str)
def test_no_ladder_changes_a_token(mesh, base, ladder):
    prompts, drafts, plain, reused = base
    row_buckets, windows, max_rows, chunk = ladder
    plan = small_plan(
        row_buckets=row_buckets, cache_lengths=windows, max_rows=max_rows, verify_width=chunk
    )
    weights = small_weights()
    for expected, offered in ((plain, None), (reused, ref.put_rows(drafts))):
        rollout, cost = run(plan, weights, prompts, 1, drafts=offered, log_lenience=HALF)
        check_equal(rollout, expected)
        check_stats(plan, rollout, cost, offered)
        if row_buckets > 1:
            assert len({rows for rows, *_ in cost.decode_runs}) > 1  # rows were gathered
        if windows > 1 and offered is None and not max_rows:
            assert len({slots for _, slots, *_ in cost.decode_runs}) == windows


def test_finished_rows_are_gathered_away(mesh, base):
    """With four row rungs the work is less than with one, and the rows visit three sizes."""
    prompts, drafts, plain, reused = base
    costs = {}
    for row_buckets in (1, 4):
        plan = small_plan(row_buckets=row_buckets, cache_lengths=1)
        rollout, cost = run(plan, small_weights(), prompts, 1)
        check_equal(rollout, plain)
        check_stats(plan, rollout, cost)
        costs[row_buckets] = cost
    assert costs[1].row_steps == 32 * plain.lens.max()
    assert costs[4].row_steps < 0.8 * costs[1].row_steps
    assert [rows for rows, *_ in costs[4].decode_runs] == [32, 16, 8]
    # With most of every response kept, few rows are left from the start.
    offered = ref.put_rows(drafts)
    rollout, cost = run(plan, small_weights(), prompts, 1, drafts=offered, log_lenience=HALF)
    check_equal(rollout, reused)
    check_stats(plan, rollout, cost, offered)
    assert len(cost.decode_runs) > 1


def test_the_order_of_the_prompts_changes_nothing(mesh, base):
    prompts, drafts, plain, reused = base
    order = np.random.default_rng(0).permutation(8)
    rows = (order[:, None] * 4 + np.arange(4)[None, :]).ravel()
    moved, weights = ref.select(prompts, order), small_weights()
    check_equal(run(small_plan(), weights, moved, 1)[0], plain, rows)
    offered = ref.put_rows(jax.tree.map(lambda x: x[rows], drafts))
    rollout, _ = run(small_plan(), weights, moved, 1, drafts=offered, log_lenience=HALF)
    check_equal(rollout, reused, rows)


def test_the_rest_of_the_batch_and_the_group_change_nothing(mesh, base):
    prompts, _, plain, _ = base
    plan = small_plan(group=2, row_buckets=1, cache_lengths=1)
    rollout, _ = run(plan, small_weights(), ref.select(prompts, np.array([5, 2])), 1)
    check_equal(rollout, plain, np.array([20, 21, 8, 9]))


def test_drafts_serve_more_than_one_rollout(mesh, base):
    """They are the caller's: a rollout uses none of their buffers up."""
    prompts, drafts, _, reused = base
    offered, weights = ref.put_rows(drafts), small_weights()
    for _ in range(2):
        rollout, _ = run(small_plan(), weights, prompts, 1, drafts=offered, log_lenience=HALF)
        check_equal(rollout, reused)
    jax.tree.map(np.testing.assert_array_equal, host(offered), drafts)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((8, 1, 1), marks=pytest.mark.slow),
        pytest.param((1, 4, 2), marks=pytest.mark.slow),
        (2, 2, 2),
    ],
)
def test_no_mesh_changes_a_token(make_mesh, base, shape):
    prompts, drafts, plain, reused = base
    with jax.set_mesh(make_mesh(*shape)):
        plan, weights = small_plan(cache_lengths=1), small_weights()
        first, _ = run(plan, weights, prompts, 1)
        check_equal(first, plain)
        offered = ref.put_rows(drafts)
        rollout, cost = run(plan, weights, prompts, 1, drafts=offered, log_lenience=HALF)
        check_equal(rollout, reused)
        assert len({rows for rows, *_ in cost.decode_runs}) > 1  # rows moved between the devices
        store = DraftStore(8, 4, 8)  # and through a sharded store: the same policy keeps it all
        store.put(prompts, rollout, step=1)
        again, _ = run(plan, weights, prompts, 2, drafts=store.get(prompts, 4, step=2))
        np.testing.assert_array_equal(np.asarray(again.tokens), reused.tokens)
        np.testing.assert_array_equal(np.asarray(again.prefix_lens), reused.lens)
        first_steps = np.asarray(again.origin_steps)[:, 0]
        np.testing.assert_array_equal(first_steps, reused.origin_steps[:, 0])


@pytest.mark.slow
def test_a_queue_on_a_mesh(make_mesh, base):
    """Half of the rows in flight, on four pieces of the batch; a fourth, on one."""
    prompts, drafts, plain, reused = base
    with jax.set_mesh(make_mesh(2, 2, 2)):
        plan = small_plan(cache_lengths=1, max_rows=16)
        rollout, cost = run(plan, small_weights(), prompts, 1)
        check_equal(rollout, plain)
        assert {rows for rows, *_ in cost.decode_runs} == {16, 8}
        offered = ref.put_rows(drafts)
        rollout, _ = run(plan, small_weights(), prompts, 1, drafts=offered, log_lenience=HALF)
        check_equal(rollout, reused)


# Ends of responses, on a policy that counts: after token x comes x + 1

END, OTHER_END = 15, 9


def counting(slots=6, group=2, eos=(END,), cache_lengths=1):
    table = np.full((16, 16), 1e-12)
    table[np.arange(16), (np.arange(16) + 1) % 16] = 1.0
    model, _, weights = ref.table_policy(table)
    plan = make_plan(
        model, slots=slots, group=group, eos=eos, row_buckets=1, cache_lengths=cache_lengths
    )
    return plan, weights


def check_counts(rollout, lasts, ends, slots=6, group=2):
    """Responses count up from the prompt's last token to an end or through all slots."""
    tokens, lens = np.asarray(rollout.tokens), np.asarray(rollout.lens)
    for row, last in enumerate(np.repeat(lasts, group)):
        expected = []
        while len(expected) < slots and (not expected or expected[-1] not in ends):
            expected.append((int(expected[-1] if expected else last) + 1) % 16)
        assert tokens[row, : lens[row]].tolist() == expected
        assert not tokens[row, lens[row] :].any()


LASTS = [14, 9, 2, 13, 8, 10]  # END first; END in the last slot; slots run out; ...


def counting_prompts():
    rows = [[14], [3, 3, 3, 3, 3, 9], [2], [7, 13], [4, 5, 8], [1, 1, 10]]
    return make_prompts(rows, 6)


@pytest.mark.parametrize("ends", [(END,), (END, OTHER_END)])
def test_ends_of_responses_with_and_without_drafts(mesh, ends):
    plan, weights = counting(eos=ends)
    prompts = counting_prompts()
    first, cost = run(plan, weights, prompts)
    check_counts(first, LASTS, ends)
    one_end = [1, 6, 6, 2, 6, 5]
    lens = one_end if len(ends) == 1 else [1, 6, 6, 2, 1, 5]
    np.testing.assert_array_equal(np.asarray(first.lens), np.repeat(lens, 2))
    assert cost.decode_steps == 6
    # The same policy keeps every draft whole, those that filled all slots as well: no decoding.
    again, cost = run(plan, weights, prompts, 1, drafts=as_drafts(first))
    check_counts(again, LASTS, ends)
    np.testing.assert_array_equal(np.asarray(again.prefix_lens), np.repeat(lens, 2))
    assert cost.decode_steps == cost.row_steps == 0
    assert cost.verify_work == 12 * 6
    np.testing.assert_array_equal(np.asarray(again.origin_steps)[2], np.zeros(6))


def test_drafts_of_length_zero_beside_whole_ones(mesh):
    plan, weights = counting()
    prompts = counting_prompts()
    drafts = as_drafts(run(plan, weights, prompts)[0])
    given = np.arange(12) % 3 != 0
    drafts = as_drafts(drafts, np.where(given, drafts.lens, 0))
    rollout, cost = run(plan, weights, prompts, 4, drafts=drafts)
    check_counts(rollout, LASTS, (END,))
    prefix, lens = np.asarray(rollout.prefix_lens), np.asarray(rollout.lens)
    np.testing.assert_array_equal(prefix, np.where(given, lens, 0))
    steps = np.asarray(rollout.origin_steps)
    for row in range(12):
        assert set(steps[row, : lens[row]]) == ({0} if given[row] else {4})
    assert (lens - prefix).max() == 6
    assert cost.decode_steps == 5  # the verification gives every row a token


def test_a_shorter_draft_is_continued(mesh):
    """A draft without an end, kept whole: decoding goes on behind it."""
    plan, weights = counting(cache_lengths=2)
    prompts = counting_prompts()
    drafts = as_drafts(run(plan, weights, prompts)[0])
    drafts = as_drafts(drafts, np.minimum(drafts.lens, 3))
    rollout, cost = run(plan, weights, prompts, 1, drafts=drafts)
    check_counts(rollout, LASTS, (END,))
    np.testing.assert_array_equal(np.asarray(rollout.prefix_lens), np.asarray(drafts.lens))
    assert cost.verify_work == 12 * 6
    assert cost.verified_tokens == np.asarray(drafts.lens).sum()
    assert cost.decode_steps == 2  # the pass has drawn the token behind the draft


def test_all_drafts_empty_is_a_first_epoch(mesh):
    plan, weights = counting()
    prompts = counting_prompts()
    drafts = DraftStore(6, 2, 6).get(prompts, 2, step=0)
    rollout, cost = run(plan, weights, prompts, drafts=drafts, log_lenience=math.inf)
    check_counts(rollout, LASTS, (END,))
    assert cost.verify_work == 0
    assert not np.asarray(rollout.prefix_lens).any()


def test_a_prompt_seen_again_with_another_group_size(mesh, base):
    prompts, _, _, _ = base
    weights, store = small_weights(), DraftStore(8, 3, 8)
    small, large = small_plan(group=2), small_plan(group=4)
    first, _ = run(small, weights, prompts)
    store.put(prompts, first, step=0)
    second, _ = run(large, weights, prompts, 1, drafts=store.get(prompts, 4, step=1))
    kept = np.asarray(second.prefix_lens).reshape(8, 4)
    lens = np.asarray(first.lens).reshape(8, 2)
    np.testing.assert_array_equal(kept[:, :2], lens)  # the policy did not change: all is kept
    assert not kept[:, 2:].any()
    tokens = np.asarray(second.tokens).reshape(8, 4, 8)
    np.testing.assert_array_equal(tokens[:, :2], np.asarray(first.tokens).reshape(8, 2, 8))
    plain, _ = run(large, weights, prompts, 1)
    np.testing.assert_array_equal(tokens[:, 2:], np.asarray(plain.tokens).reshape(8, 4, 8)[:, 2:])
    store.put(prompts, second, step=1)  # the store holds three samples
    third, _ = run(small, weights, prompts, 2, drafts=store.get(prompts, 2, step=2))
    np.testing.assert_array_equal(np.asarray(third.tokens).reshape(8, 2, 8), tokens[:, :2])
    fourth, _ = run(large, weights, prompts, 2, drafts=store.get(prompts, 4, step=2))
    kept = np.asarray(fourth.prefix_lens).reshape(8, 4)
    assert kept[:, :3].all()
    assert not kept[:, 3].any()
