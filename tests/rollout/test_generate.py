"""Whole rollouts: against a cacheless loop, on any buckets and mesh, and at responses' ends."""

import math

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, check_equal, check_same, host, make_prompts, make_spec, run

from specrl_jax.rollout.drafts.store import DraftStore, StoreShape
from specrl_jax.rollout.sampling import Purpose, SamplingConfig

SAMPLINGS = [SamplingConfig(), SamplingConfig(0.7, top_k=5, top_p=0.9)]
HALF = 0.5  # log of SPEC-RL's lenience for GRPO


# Against the naive loop


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "truncated"])
def test_three_rollouts_equal_the_naive_loop(mesh, sampling):
    """No drafts, then twice the last rollout's: tokens, lengths, log-probs, sources, origins."""
    row_buckets = 1 if sampling.truncates else 2
    spec = make_spec(sampling=sampling, row_buckets=row_buckets)
    prompts, drafts = ref.random_prompts(), None
    for step, nudge in enumerate((0.3, 0.15, 0.0)):
        params, weights = ref.policy(nudge)
        rollout, _ = run(spec, weights, prompts, step, drafts=drafts, log_lenience=HALF)
        check_same(rollout, ref.Reference(spec, params, prompts, step=step, drafts=drafts,
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
    ages = np.asarray(rollout.tokens.origin_steps)[np.arange(8)[None, :] < lens[:, None]]
    assert set(ages) == {0, 1, 2}


def test_random_reuse_equals_the_naive_loop(mesh):
    prompts, spec = ref.random_prompts(), make_spec(accept="random", row_buckets=1)
    drafts = ref.old_drafts(make_spec(), prompts, 0.3)
    params, weights = ref.policy()
    rollout, _ = run(spec, weights, prompts, 1, drafts=drafts)
    check_same(rollout, ref.Reference(spec, params, prompts, step=1, drafts=drafts))
    prefix, lens = np.asarray(rollout.prefix_lens), np.asarray(drafts.lens)
    assert np.all(prefix <= np.maximum(lens - 1, 0))  # never the whole draft
    assert prefix.max() > 3


def test_evaluation_is_greedy_and_has_noise_of_its_own(mesh):
    prompts = ref.random_prompts()
    spec = make_spec(sampling=SAMPLINGS[1], row_buckets=1)
    params, weights = ref.policy()
    greedy = spec.for_evaluation(4, 0.0)
    rollout, _ = run(greedy, weights, prompts, purpose=Purpose.EVALUATE)
    check_same(rollout, ref.Reference(greedy, params, prompts, step=0))  # whatever the purpose
    tokens = np.asarray(rollout.tokens.ids).reshape(8, 4, 8)
    np.testing.assert_array_equal(tokens, np.broadcast_to(tokens[:, :1], tokens.shape))
    sampled = spec.for_evaluation(4, 1.0)
    evaluated, _ = run(sampled, weights, prompts, purpose=Purpose.EVALUATE)
    trained, _ = run(sampled, weights, prompts)
    check_same(evaluated, ref.Reference(sampled, params, prompts, step=0,
                                        purpose=Purpose.EVALUATE))  # fmt: skip
    assert (np.asarray(evaluated.tokens.ids) != np.asarray(trained.tokens.ids)).any(
        axis=1
    ).mean() > 0.9


def test_no_reuse_is_plain_and_full_reuse_is_the_draft(mesh):
    prompts, spec = ref.random_prompts(), make_spec()
    params, weights = ref.policy()
    drafts = as_drafts(run(spec, ref.policy(0.3)[1], prompts)[0])
    plain, _ = run(spec, weights, prompts, 1)
    none, _ = run(spec, weights, prompts, 1, drafts=drafts, log_lenience=-math.inf)
    np.testing.assert_array_equal(np.asarray(none.tokens.ids), np.asarray(plain.tokens.ids))
    assert not np.asarray(none.prefix_lens).any()
    full, stats = run(spec, weights, prompts, 1, drafts=drafts, log_lenience=math.inf)
    np.testing.assert_array_equal(np.asarray(full.tokens.ids), np.asarray(drafts.tokens.ids))
    np.testing.assert_array_equal(np.asarray(full.prefix_lens), np.asarray(drafts.lens))
    assert (stats.decode_steps, stats.row_steps, stats.decode_runs) == (0, 0, [])
    check_same(full, ref.Reference(spec, params, prompts, step=1, drafts=drafts,
                                   log_lenience=math.inf))  # fmt: skip
    assert (np.asarray(plain.tokens.ids) != np.asarray(full.tokens.ids)).any(axis=1).mean() > 0.5


# What may not change anything


def check_stats(spec, rollout, stats):
    """What follows from the lengths alone: everything, if rows start together and never wait."""
    lens, prefix = np.asarray(rollout.lens), np.asarray(rollout.prefix_lens)
    # As a row starts, a token is drawn after its draft, unless the draft fills it.
    sampled = np.maximum(lens - prefix - 1, 0)
    assert stats.row_steps >= sampled.sum()
    assert stats.accepted_tokens == prefix.sum()
    if not spec.max_rows:
        # Every step runs the smallest bucket that fits.
        active = [np.sum(sampled > t) for t in range(sampled.max(initial=0))]
        row_buckets = [min(r for r in spec.buckets(len(lens)).sizes if r >= n) for n in active]
        assert (stats.decode_steps, stats.row_steps) == (len(active), sum(row_buckets))
    sizes, widths, steps = zip(*stats.decode_runs, strict=True)
    assert stats.decode_steps == sum(steps)
    assert stats.row_steps == np.dot(sizes, steps)
    assert set(widths) == {1}
    assert min(steps) > 0
    assert max(sizes) <= (spec.max_rows or len(lens))
    metrics = stats.metrics()
    assert metrics["rollout/row_steps"] == stats.row_steps
    assert metrics["rollout/width_mean"] == 1.0
    assert metrics["rollout/tokens_drafted"] == stats.drafted_tokens == 0
    assert metrics["time/decode"] > 0


def small_spec(**kwargs):
    return make_spec(ref.ONE_LAYER, **kwargs)


def small_weights(nudge=0.0):
    return ref.policy(nudge, ref.ONE_LAYER)[1]


@pytest.fixture(scope="module")
def base(make_mesh):
    """Drafts, and the rollouts without and with them on the default buckets."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        spec, prompts = small_spec(), ref.random_prompts()
        drafts = ref.old_drafts(spec, prompts, 0.3)
        weights = small_weights()
        plain, stats = run(spec, weights, prompts, 1)
        check_stats(spec, plain, stats)
        reused, stats = run(spec, weights, prompts, 1, drafts=drafts, log_lenience=HALF)
        check_stats(spec, reused, stats)
        yield prompts, host(drafts), host(plain), host(reused)


@pytest.mark.parametrize("sizes", ref.BUCKETS)
def test_no_buckets_change_a_token(mesh, base, sizes):
    prompts, drafts, plain, reused = base
    spec, weights = small_spec(**sizes), small_weights()
    for expected, placed in ((plain, None), (reused, ref.put_rows(drafts))):
        rollout, stats = run(spec, weights, prompts, 1, drafts=placed, log_lenience=HALF)
        check_equal(rollout, expected)
        check_stats(spec, rollout, stats)
        if spec.row_buckets > 1:
            assert len({rows for rows, *_ in stats.decode_runs}) > 1  # rows were gathered
        if placed is not None:  # the caller's: a rollout uses none of their buffers up
            jax.tree.map(np.testing.assert_array_equal, host(placed), drafts)


@pytest.mark.parametrize("changes", [{}, {"max_rows": 8}], ids=["at once", "a queue"])
def test_the_order_of_the_prompts_changes_nothing(mesh, base, changes):
    prompts, drafts, plain, reused = base
    order = np.random.default_rng(0).permutation(8)
    rows = (order[:, None] * 4 + np.arange(4)[None, :]).ravel()
    moved, weights, spec = prompts.select(order), small_weights(), small_spec(**changes)
    check_equal(run(spec, weights, moved, 1)[0], plain, rows)
    placed = ref.put_rows(jax.tree.map(lambda x: x[rows], drafts))
    rollout, _ = run(spec, weights, moved, 1, drafts=placed, log_lenience=HALF)
    check_equal(rollout, reused, rows)


def test_the_rest_of_the_batch_and_the_group_change_nothing(mesh, base):
    prompts, _, plain, _ = base
    spec = small_spec(group=2, row_buckets=1)
    rollout, _ = run(spec, small_weights(), prompts.select(np.array([5, 2])), 1)
    check_equal(rollout, plain, np.array([20, 21, 8, 9]))


def test_no_mesh_changes_a_token(make_mesh, base):
    prompts, drafts, plain, reused = base
    with jax.set_mesh(make_mesh(2, 2, 2)):
        spec, weights = small_spec(), small_weights()
        first, _ = run(spec, weights, prompts, 1)
        check_equal(first, plain)
        placed = ref.put_rows(drafts)
        rollout, stats = run(spec, weights, prompts, 1, drafts=placed, log_lenience=HALF)
        check_equal(rollout, reused)
        assert len({rows for rows, *_ in stats.decode_runs}) > 1  # rows moved between the devices
        # And through a sharded store: the same policy accepts every draft.
        store = DraftStore(StoreShape(8, 4, 8))
        store.put(prompts, rollout, step=1)
        again, _ = run(spec, weights, prompts, 2, drafts=store.get(prompts, step=2))
        np.testing.assert_array_equal(np.asarray(again.tokens.ids), reused.tokens.ids)
        np.testing.assert_array_equal(np.asarray(again.prefix_lens), reused.lens)
        first_steps = np.asarray(again.tokens.origin_steps)[:, 0]
        np.testing.assert_array_equal(first_steps, reused.tokens.origin_steps[:, 0])


# Ends of responses, on a policy that counts: after token x comes x + 1

END, OTHER_END = 15, 9


def counting(slots=6, group=2, eos=(END,)):
    model, weights = ref.counting_policy()
    return make_spec(model, slots=slots, group=group, eos=eos, row_buckets=1), weights


def check_counts(rollout, lasts, ends, slots=6, group=2):
    """Responses count up from the prompt's last token to an end or through all slots."""
    tokens, lens = np.asarray(rollout.tokens.ids), np.asarray(rollout.lens)
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
    spec, weights = counting(eos=ends)
    prompts = counting_prompts()
    first, stats = run(spec, weights, prompts)
    check_counts(first, LASTS, ends)
    lens_by_end = [1, 6, 6, 2, 6, 5]
    lens = lens_by_end if len(ends) == 1 else [1, 6, 6, 2, 1, 5]
    np.testing.assert_array_equal(np.asarray(first.lens), np.repeat(lens, 2))
    assert stats.decode_steps == 5  # the first token was drawn as the rows started
    # The same policy keeps every draft whole, those that filled all slots as well: no decoding.
    again, stats = run(spec, weights, prompts, 1, drafts=as_drafts(first))
    check_counts(again, LASTS, ends)
    np.testing.assert_array_equal(np.asarray(again.prefix_lens), np.repeat(lens, 2))
    assert stats.decode_steps == stats.row_steps == 0
    # Two rows of each prompt are one in the tries: three sequences of two prompts, in a chunk.
    computed = spec.buckets(12).chunk_sequences * 24
    distinct = sum(lens_by_end if len(ends) == 1 else lens) + prompts.lens.sum()
    assert (stats.prefilled_tokens, stats.filled_tokens) == (computed, distinct)
    assert (stats.read_tokens, stats.repeated_tokens) == (distinct, 0)
    metrics = stats.metrics()
    assert metrics["rollout/prefill_used"] == distinct / computed
    assert metrics["rollout/prefill_empty"] == 1 - distinct / computed
    assert metrics["rollout/prefill_repeated"] == metrics["rollout/prefill_rejected"] == 0
    np.testing.assert_array_equal(np.asarray(again.tokens.origin_steps)[2], np.zeros(6))


def test_a_shorter_draft_is_continued(mesh):
    """A draft without an end, kept whole: decoding continues after it."""
    spec, weights = counting()
    prompts = counting_prompts()
    drafts = as_drafts(run(spec, weights, prompts)[0])
    drafts = as_drafts(drafts, np.minimum(drafts.lens, 3))
    rollout, stats = run(spec, weights, prompts, 1, drafts=drafts)
    check_counts(rollout, LASTS, (END,))
    np.testing.assert_array_equal(np.asarray(rollout.prefix_lens), np.asarray(drafts.lens))
    assert stats.verified_tokens == np.asarray(drafts.lens).sum()
    assert stats.decode_steps == 2  # the pass has drawn the token after the draft


def test_all_drafts_empty_is_a_first_epoch(mesh):
    spec, weights = counting()
    prompts = counting_prompts()
    drafts = DraftStore(StoreShape(6, 2, 6)).get(prompts, step=0)
    rollout, stats = run(spec, weights, prompts, drafts=drafts, log_lenience=math.inf)
    check_counts(rollout, LASTS, (END,))
    assert stats.verified_tokens == 0
    assert not np.asarray(rollout.prefix_lens).any()
