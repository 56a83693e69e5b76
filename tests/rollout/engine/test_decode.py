"""Decode steps of any width by hand, on a policy that counts; and when steps stop."""

import types

import jax
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import keys_and_values
from specrl_jax.rollout.drafts import suffix_match
from specrl_jax.rollout.engine.all_rows import empty_batch
from specrl_jax.rollout.engine.decode import (
    StopCondition,
    count_unfinished,
    decode_steps,
)
from specrl_jax.rollout.engine.prefill import prefill
from specrl_jax.rollout.engine.texts import Texts, pack_texts
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.sharding import put, shards
from specrl_jax.types import Source

B, P, R = 8, 6, 8
S, D = Source.SAMPLED, Source.DRAFTED


def make_spec(model=ref.ONE_LAYER, eos=(4, 3), tree=ref.TREE):
    return ref.make_spec(
        model, group=1, eos=eos, accept="match", tree=tree, max_width=4, row_buckets=1
    )


def begin(spec, weights, prompts, max_lens=None, background=None):
    """The cache and the rows, each with its prompt and one token."""
    count = len(prompts.lens)
    noise = NoiseKey(jax.random.key(0), 0)
    all_rows = ref.start(spec, prompts, noise, max_lens=max_lens, background=background)
    buckets = spec.buckets(count)
    cache, rows = empty_batch(spec, all_rows, size=count, slots=buckets.cache_slots)
    texts = np.pad(prompts.tokens, ((0, 0), (0, spec.response_slots)))
    own = np.split(np.arange(count) % (count // shards("batch")), shards("batch"))
    no_drafts = np.zeros(count, np.int32)
    packed = pack_texts(buckets, Texts(texts, prompts.lens, prompts.lens, own, no_drafts))
    return prefill(spec, buckets, weights, cache, rows, all_rows, None, packed)[:2]


def index_of(tokens, lens):
    """Index of rows that are alone in their groups: one stored response each."""
    tokens, lens = (np.asarray(x, np.int32)[:, None] for x in (tokens, lens))
    stored, lens = put(tokens, None, None, None), put(lens, None, None)
    ones, depth = put(np.ones(1, np.float32), None), ref.TREE.config.depth
    return suffix_match.build(stored, lens, ones, live=1, depth=depth)


def steps(spec, weights, cache, rows, width, *, stored=None, **bounds):
    """Return cache, rows, counts and unfinished rows after decode steps; the last two on the host.

    stored: tokens and lens of the draft source's responses.
    """
    state = None
    if stored is not None:
        state = suffix_match.sync(index_of(*stored), rows.tokens.ids, rows.lens)
    stop = StopCondition.of(**bounds)
    made, numbers = decode_steps(spec, weights, cache, rows, state, stop, width=width)
    counts = types.SimpleNamespace(
        steps=int(made.steps),
        matched=np.asarray(made.by_accepted),
        drafted=int(made.emitted_drafts),
    )
    return made.cache, made.rows, counts, np.asarray(numbers).tolist()


def texts_of(rows, name="ids") -> list[list[int]]:
    """The rows' tokens, or their sources, up to their ends."""
    rows = ref.host(rows)
    return [values[:n].tolist() for values, n in zip(getattr(rows.tokens, name), rows.lens)]


# By hand, on a policy that counts: after token x comes x + 1


def counting(eos=(15,)):
    model, weights = ref.counting_policy()
    return make_spec(model, eos=eos), weights


def test_a_step_by_hand(mesh):
    """Accepted from the left; the first that is drawn otherwise ends the step."""
    spec, weights = counting()
    cache, rows = begin(spec, weights, ref.make_prompts([[1]] * 4, P))
    assert texts_of(rows) == [[2]] * 4
    stored = [[2, 3, 4, 5, 6], [2, 3, 9, 9, 9], [9, 9, 9, 9, 9], [2, 9, 9, 9, 9]]
    stored = np.pad(stored, ((0, 0), (0, R - 5)))
    cache, rows, counts, numbers = steps(
        spec, weights, cache, rows, 3, stored=(stored, [5] * 4), max_steps=1
    )
    assert texts_of(rows) == [[2, 3, 4, 5], [2, 3, 4], [2, 3], [2, 3]]
    assert texts_of(rows, "sources") == [[S, D, D, S], [S, D, S], [S, S], [S, S]]
    np.testing.assert_array_equal(ref.host(rows).last, [5, 4, 3, 3])
    np.testing.assert_array_equal(counts.matched, [2, 1, 1])
    assert (counts.steps, counts.drafted) == (1, 2 + 1)
    assert numbers == [[4, 4]]
    # A plain step goes on from there, and counts nothing of a draft source.
    _, rows, counts, _ = steps(spec, weights, cache, rows, 1, max_steps=1)
    assert texts_of(rows) == [[2, 3, 4, 5, 6], [2, 3, 4, 5], [2, 3, 4], [2, 3, 4]]
    assert (counts.steps, counts.drafted, counts.matched.tolist()) == (1, 0, [0])
    assert not any(ref.host(rows).prefix_lens)


def test_a_step_ends_at_an_end_of_sequence_and_at_the_longest_length(mesh):
    """Candidates after either are not taken, right or wrong; rows that are done change no more."""
    spec, weights = counting(eos=(5, 9))
    prompts = ref.make_prompts([[2], [2], [9], [9], [9], [7]], P)
    max_lens = np.array([R, 2, 2, 4, R, 3])
    cache, rows = begin(spec, weights, prompts, max_lens)
    stored = np.array([[3, 4, 5, 6]] * 2 + [[10, 11, 12, 13]] * 3 + [[8, 1, 1, 1]])
    stored = np.pad(stored, ((0, 0), (0, R - 4))), [4] * 6
    cache, rows, counts, numbers = steps(spec, weights, cache, rows, 4, stored=stored, max_steps=1)
    expected = [[3, 4, 5], [3, 4], [10, 11], [10, 11, 12, 13], [10, 11, 12, 13, 14], [8, 9]]
    assert texts_of(rows) == expected
    np.testing.assert_array_equal(ref.host(rows).done, [1, 1, 1, 1, 0, 1])
    assert counts.drafted == 2 + 1 + 1 + 3 + 3 + 0
    assert numbers == [[1, 1]]
    _, rows, counts, numbers = steps(spec, weights, cache, rows, 4, stored=stored)
    expected[4] += [15, 0, 1]
    assert texts_of(rows) == expected
    assert numbers == [[0, 0]]
    assert counts.matched.sum() == counts.steps  # of the only row


def test_rows_that_are_done_feed_their_first_slots(mesh):
    """So a kernel over the cache reads no other slot of them."""
    spec = make_spec(eos=(15,))
    weights = ref.policy(model=ref.ONE_LAYER)[1]
    prompts = ref.make_prompts([[1, 2, 3], [1, 2, 3]], P)
    cache, rows = begin(spec, weights, prompts, max_lens=np.array([1, R]))
    np.testing.assert_array_equal(ref.host(rows).done, [1, 0])
    before = np.array(keys_and_values(cache[0])[1][:, 0])  # [b, S, H] of a head
    cache, _, _, _ = steps(spec, weights, cache, rows, 1, max_steps=1)
    after = np.array(keys_and_values(cache[0])[1][:, 0])
    changed = np.any(after != before, axis=2)
    assert [np.flatnonzero(row).tolist() for row in changed] == [[0], [3]]


# When steps stop


@pytest.fixture
def start(mesh):
    """(rollout weights, prompts) of the tiny policy."""
    return ref.policy(model=ref.ONE_LAYER)[1], ref.random_prompts(B, P)


def check_rows(rows, other, which=slice(None)):
    """The same responses, so far."""
    got, other = ref.host(rows), ref.host(other)
    for name in ("lens", "done", "last"):
        np.testing.assert_array_equal(getattr(got, name)[which], getattr(other, name)[which])
    inside = np.arange(got.tokens.ids.shape[1])[None, :] < got.lens[which][:, None]
    for name in ("ids", "policy_logprobs", "sampling_logprobs"):
        mine, theirs = (getattr(x.tokens, name)[which][inside] for x in (got, other))
        np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=name)


def test_steps_stop_at_their_condition_and_go_on_from_there(start):
    weights, prompts = start
    spec = make_spec()
    expected, counts, numbers = steps(spec, weights, *begin(spec, weights, prompts), 1)[1:]
    lens = ref.host(expected).lens
    assert numbers == [[0, 0]]
    assert counts.steps == lens.max() - 1

    cache, rows, counts, numbers = steps(
        spec, weights, *begin(spec, weights, prompts), 1, max_steps=2
    )
    assert counts.steps == 2
    left = int(np.sum(~ref.host(rows).done))
    assert numbers == [[left, left]]
    for bound in ("max_unfinished", "refill_at", "max_left"):
        stop = left - 1
        begun = begin(spec, weights, prompts)
        _, rows, counts, ((_, unfinished),) = steps(spec, weights, *begun, 1, **{bound: stop})
        assert unfinished <= stop
        assert np.sum(lens > int(counts.steps)) > stop  # not so a step earlier
    assert np.asarray(count_unfinished(rows)).tolist() == [[unfinished, unfinished]]
    cache, rows = begin(spec, weights, prompts)
    for bounds in ({"max_steps": 1}, {"max_unfinished": left - 1}, {}):
        cache, rows, *_ = steps(spec, weights, cache, rows, 1, **bounds)
    check_rows(rows, expected)


def test_idle_rows_do_not_keep_the_steps_going(start):
    weights, prompts = start
    spec = make_spec()
    max_lens = np.array([3] * 3 + [R] * 5)
    expected = steps(spec, weights, *begin(spec, weights, prompts, max_lens), 1)[1]
    lens = ref.host(expected).lens
    cache, rows = begin(spec, weights, prompts, max_lens, background=np.arange(B) >= 3)
    _, rows, counts, numbers = steps(spec, weights, cache, rows, 1)
    most = lens[:3].max()
    assert counts.steps == most - 1 < R - 1
    assert numbers == [[0, np.sum(lens > most)]]
    check_rows(rows, expected, slice(0, 3))
    np.testing.assert_array_equal(ref.host(rows).lens, np.minimum(lens, most))


def test_each_shard_counts_its_own_rows(make_mesh):
    """Two shards of four rows; of each the last one is background."""
    with jax.set_mesh(make_mesh(2, 1, 1)):
        weights = ref.policy(model=ref.ONE_LAYER)[1]
        spec = make_spec(eos=(16,))
        max_lens = np.array([2, 2, 3, 5, 3, 4, 6, 2])
        prompts = ref.random_prompts(B, P)
        background = np.arange(B) % 4 == 3
        begun = begin(spec, weights, prompts, max_lens, background)
        _, _, counts, numbers = steps(spec, weights, *begun, 1, max_steps=2)
        assert numbers == [[0, 1], [2, 2]]
        # One shard may be refilled, or all may be smaller.
        for bounds, expected in (
            ({"refill_at": np.array([2, -1])}, (1, [[1, 2], [3, 3]])),
            ({"refill_at": np.array([-1, 1])}, (3, [[0, 1], [1, 1]])),
            ({"max_unfinished": 2}, (2, [[0, 1], [2, 2]])),
            ({"max_left": 2}, (2, [[0, 1], [2, 2]])),
            ({}, (5, [[0, 0], [0, 0]])),
        ):
            begun = begin(spec, weights, prompts, max_lens, background)
            _, _, counts, numbers = steps(spec, weights, *begun, 1, **bounds)
            assert (int(counts.steps), numbers) == expected
