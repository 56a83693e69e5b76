"""The jitted pieces of a rollout: prefill, re-prefill, and a step of any width."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.rollout.drafts import suffix_match
from specrl_jax.rollout.engine import decode, decode_state
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.rows import Noise, start_all_rows
from specrl_jax.sharding import put
from specrl_jax.types import Source

B, P, R, END = 8, 6, 8, 4
FOREVER = np.iinfo(np.int32).max
S, D, U = Source.SAMPLED, Source.DRAFTED, Source.REUSED


def make_spec(model=ref.ONE_LAYER, accept="match", eos=(END, 3), **changes):
    spec = ref.make_spec(model, group=1, eos=eos, accept=accept).program
    return dataclasses.replace(spec, margin=R, **changes)


MATCH = make_spec()


def begin(spec, weights, prompts, drafts=None, max_lens=None, slots=P + R + 3, log_lenience=0.0):
    """A cache that holds the prompts, and rows with nothing else; drafts are (tokens, lens)."""
    noise, steps = Noise(jax.random.key(0), 0), np.zeros(len(prompts.lens), int)
    rows = start_all_rows(spec, prompts, noise, steps, max_lens)
    if drafts is not None:
        placed = ref.plain_drafts(*drafts)
        rows = decode_state.with_drafts(rows, placed, spec.accept, log_lenience)
    tokens = put(prompts.tokens, "batch", None)
    return prefill(spec, weights, tokens, slots), rows


def prefill(spec, weights, prompts_QP, slots, group_size=1):
    """The prompts' cache [Q * G, slots], as the engine makes it."""
    cache = decode.prefill(spec, weights, prompts_QP)
    return decode.broadcast_prefill(cache, slots=slots, group_size=group_size)


def index_of(tokens, lens):
    """Of rows that are alone in their groups: one stored response each."""
    tokens, lens = (np.asarray(x, np.int32)[:, None] for x in (tokens, lens))
    stored, lens = put(tokens, None, None, None), put(lens, None, None)
    ones, depth = put(np.ones(1, np.float32), None), ref.TREE.config.depth
    return suffix_match.build(stored, lens, ones, live=1, depth=depth)


def run_steps(
    spec, weights, cache, rows, width, *, stop=0, length=R, steps=FOREVER,
    num_train_rows=FOREVER, index=None, **kwargs,
):  # fmt: skip
    """(cache, rows, counts, numbers) after these decode steps; the last two on the host."""
    until = StopCondition(*(jnp.int32(x) for x in (stop, length, steps, num_train_rows)))
    cache, rows, _, counts, numbers = decode.decode_steps(
        spec, weights, cache, rows, index, until, width=width, **kwargs
    )
    (numbers,) = np.asarray(numbers).tolist()  # of the only shard
    return cache, rows, ref.host(counts), numbers


@pytest.fixture
def start(mesh):
    """(parameters, rollout weights, prompts) of the tiny policy."""
    return *ref.policy(model=ref.ONE_LAYER), ref.random_prompts(B, P)


def check_forward(start, rows):
    """What the rows hold has the log-probs of the plain forward pass."""
    params, _, prompts = start
    got = ref.host(rows)
    inside = np.arange(R)[None, :] < got.lens[:, None]
    expected = ref.teacher_forced(ref.ONE_LAYER, params, prompts, got.tokens[:, :R])
    np.testing.assert_allclose(got.policy_logprobs[:, :R][inside], expected[inside], atol=1e-5)
    np.testing.assert_array_equal(got.sampling_logprobs, got.policy_logprobs)


def check_rows(rows, other, which=slice(None)):
    """The same responses, so far."""
    got, other = ref.host(rows), ref.host(other)
    np.testing.assert_array_equal(got.lens[which], other.lens[which])
    np.testing.assert_array_equal(got.done[which], other.done[which])
    np.testing.assert_array_equal(got.last[which], other.last[which])
    inside = np.arange(got.tokens.shape[1])[None, :] < got.lens[which][:, None]
    for name in ("tokens", "policy_logprobs", "sampling_logprobs"):
        mine, theirs = getattr(got, name)[which][inside], getattr(other, name)[which][inside]
        np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=name)


# One step, by hand, on a policy that counts: after token x comes x + 1


def counting(eos=(15,)):
    model, weights = ref.counting_policy()
    return make_spec(model, eos=eos), weights


def test_a_step_by_hand(mesh):
    """Accepted from the left; the first that is drawn ends the step."""
    spec, weights = counting()
    prompts = ref.make_prompts([[1, 2, 3]] * 4, P)
    drafts = np.zeros((4, R), np.int32)
    drafts[:3, :5] = [[4, 5, 6, 7, 9], [4, 9, 6, 7, 8], [9, 5, 6, 7, 8]]
    cache, rows = begin(spec, weights, prompts, (drafts, [5, 2, 3, 0]))
    cache, rows, counts, numbers = run_steps(spec, weights, cache, rows, 3, steps=1)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [3, 2, 1, 1])
    assert [got.tokens[row, :n].tolist() for row, n in enumerate(got.lens)] == [
        [4, 5, 6], [4, 5], [4], [4]]  # fmt: skip
    assert [got.sources[row, :n].tolist() for row, n in enumerate(got.lens)] == [
        [U, U, U], [U, S], [S], [S]]  # fmt: skip
    np.testing.assert_array_equal(got.last, [6, 5, 4, 4])
    np.testing.assert_array_equal(got.prefix_lens, [3, 1, 0, 0])
    np.testing.assert_array_equal(got.draft.lens, [5, 1, 0, 0])  # the first still verifies
    assert counts.steps == 1
    assert (counts.verified, counts.accepted) == (3 + 2 + 1, 3 + 1)
    assert numbers == [4, 4, 1, 3, 2]

    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 3, steps=1)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [5, 3, 2, 2])
    np.testing.assert_array_equal(got.tokens[0, :5], [4, 5, 6, 7, 8])
    np.testing.assert_array_equal(got.sources[0, :5], [U, U, U, U, S])
    np.testing.assert_array_equal(got.prefix_lens, [4, 1, 0, 0])
    assert (counts.verified, counts.accepted) == (2, 1)
    assert numbers == [4, 4, 0, 5, 0]
    assert not got.done.any()


def test_a_step_of_tree_drafts_by_hand(mesh):
    """Row steps are counted by the tree's candidates that were right, but for rows that verify."""
    spec, weights = counting()
    spec = dataclasses.replace(spec, draft_source=ref.TREE)
    prompts = ref.make_prompts([[1]] * 4, P)
    drafts = np.zeros((4, R), np.int32)
    drafts[3, :4] = [2, 3, 4, 9]
    cache, rows = begin(spec, weights, prompts, (drafts, [0, 0, 0, 4]))
    cache, rows, counts, _ = run_steps(spec, weights, cache, rows, 1, steps=1)
    assert (counts.verified, counts.accepted, counts.drafted) == (1, 1, 0)
    stored = [[2, 3, 4, 5, 6], [2, 3, 9, 9, 9], [9, 9, 9, 9, 9], [2, 9, 9, 9, 9]]
    stored = np.pad(stored, ((0, 0), (0, R - 5)))
    index = suffix_match.sync(index_of(stored, [5] * 4), rows.tokens, rows.lens)
    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 3, steps=1, index=index)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [4, 3, 2, 4])
    assert [got.sources[row, :n].tolist() for row, n in enumerate(got.lens)] == [
        [S, D, D, S], [S, D, S], [S, S], [U, U, U, S]]  # fmt: skip
    np.testing.assert_array_equal(counts.matched, [1, 1, 1])
    assert (counts.drafted, counts.verified, counts.accepted) == (2 + 1, 3, 2)
    np.testing.assert_array_equal(got.prefix_lens, [0, 0, 0, 3])
    np.testing.assert_array_equal(got.draft.lens, [0, 0, 0, 3])
    assert numbers == [4, 4, 0, 4, 0]
    assert [got.sources[row, n:].any() for row, n in enumerate(got.lens)] == [False] * 4


def test_rejected_drafts_are_followed_by_trees(mesh):
    """Two steps of width 3: the tree goes on after the first token that was drawn."""
    spec, weights = counting()
    spec = dataclasses.replace(spec, draft_source=ref.TREE)
    prompts = ref.make_prompts([[1]] * 4, P)
    drafts = np.zeros((4, R), np.int32)
    drafts[:, :6] = [[2, 3, 9, 9, 0, 0], [2, 3, 4, 5, 6, 7], [0] * 6, [9, 0, 0, 0, 0, 0]]
    cache, rows = begin(spec, weights, prompts, (drafts, [4, 6, 0, 1]))
    index = index_of([[2, 3, 4, 5, 6, 7, 8, 9]] * 3 + [[9] * R], [R] * 4)
    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 3, stop=1, steps=2,
                                     index=index)  # fmt: skip
    got = ref.host(rows)
    assert [got.tokens[row, :n].tolist() for row, n in enumerate(got.lens)] == [
        [2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7], [2, 3]]  # fmt: skip
    assert [got.sources[row, :n].tolist() for row, n in enumerate(got.lens)] == [
        [U, U, S, D, D, S], [U] * 6, [D, D, S] * 2, [S, S]]  # fmt: skip
    assert (counts.steps, counts.verified, counts.accepted) == (2, 3 + 6 + 1, 2 + 6)
    np.testing.assert_array_equal(counts.matched, [1, 0, 3])  # row steps that did not verify
    assert counts.drafted == 6
    np.testing.assert_array_equal(got.prefix_lens, [2, 6, 0, 0])
    np.testing.assert_array_equal(got.draft.lens, [2, 6, 0, 0])
    assert numbers == [4, 4, 0, 6, 0]


def test_a_step_ends_at_an_end_of_sequence_and_at_the_longest_length(mesh):
    """Candidates after either are not taken, right or wrong."""
    spec, weights = counting(eos=(5, 9))
    prompts = ref.make_prompts([[3], [3], [9], [9], [9], [7]], P)
    drafts = np.array([[4, 5, 6, 7]] * 2 + [[10, 11, 12, 13]] * 3 + [[1, 1, 1, 1]])
    max_lens = [R, 1, 2, 4, R, 2]
    cache, rows = begin(
        spec, weights, prompts, (np.pad(drafts, ((0, 0), (0, 4))), [4] * 6), max_lens
    )
    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 4, steps=1)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [2, 1, 2, 4, 4, 1])
    np.testing.assert_array_equal(got.done, [1, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(got.prefix_lens, [2, 1, 2, 4, 4, 0])
    np.testing.assert_array_equal(got.last, [5, 4, 11, 13, 13, 8])
    assert counts.accepted == 13
    assert numbers == [2, 2, 0, 4, 0]


def test_a_row_waits_at_its_cache_limit(mesh):
    """It stops there, and goes on verifying once the cache is longer."""
    spec, weights = counting()
    prompts = ref.make_prompts([[1], [1], [1]], P)
    drafts = np.array(
        [[2, 3, 4, 5, 6, 9, 0, 0], [2, 3, 4, 9, 0, 0, 0, 0], [2, 9, 0, 0, 0, 0, 0, 0]]
    )
    cache, rows = begin(spec, weights, prompts, (drafts, [6, 4, 2]))
    cache, rows, _, numbers = run_steps(spec, weights, cache, rows, 4, length=3, steps=1)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [3, 3, 2])
    np.testing.assert_array_equal(got.prefix_lens, [3, 3, 1])
    np.testing.assert_array_equal(got.draft.lens, [6, 4, 1])  # what was cut off is verified again
    assert numbers == [3, 3, 2, 3, 3]
    cache, rows, _, numbers = run_steps(spec, weights, cache, rows, 4, length=3)
    assert ref.host(rows).lens.tolist() == [3, 3, 3]  # all wait
    assert numbers == [3, 3, 2, 3, 3]
    _, rows, _, numbers = run_steps(spec, weights, cache, rows, 4, length=R, steps=1)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [6, 4, 4])
    np.testing.assert_array_equal(got.prefix_lens, [5, 3, 1])
    assert numbers == [3, 3, 0, 6, 0]


# Against the forward pass


@pytest.mark.parametrize("plain", [R - 1, R - 2, R - 3, 1])
def test_a_wide_step_at_the_cache_limit_feeds_tokens_again(start, plain):
    """The cache has no slots after it; rows of all prompt lengths, `plain` tokens before."""
    _, weights, prompts = start
    spec = make_spec(eos=(16,), draft_source=ref.TREE)
    assert len(set(prompts.lens.tolist())) > 1
    cache, rows = begin(spec, weights, prompts, slots=P + R)
    _, expected, *_ = run_steps(spec, weights, cache, rows, 1)
    truth = ref.host(expected)
    index = index_of(truth.tokens[:, :R], truth.lens)
    cache, rows = begin(spec, weights, prompts, slots=P + R)
    cache, rows, *_ = run_steps(spec, weights, cache, rows, 1, steps=plain)
    index = suffix_match.sync(index, rows.tokens, rows.lens)
    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 4, index=index)
    check_rows(rows, expected)
    check_forward(start, rows)
    assert numbers[0] == 0
    assert counts.drafted > 0
    assert counts.drafted == np.sum(ref.host(rows).sources == D)


def test_steps_stop_at_their_condition_and_go_on_from_there(start):
    _, weights, prompts = start
    expected = run_steps(MATCH, weights, *begin(MATCH, weights, prompts), 1)
    lens = ref.host(expected[1]).lens
    assert expected[3] == [0, 0, 0, 0, 0]
    assert expected[2].steps == R

    cache, rows = begin(MATCH, weights, prompts)
    cache, rows, counts, numbers = run_steps(MATCH, weights, cache, rows, 1, length=3)
    assert counts.steps == 3
    waiting = np.sum((lens > 3) | ((lens == 3) & ~ref.host(rows).done))
    assert numbers == [waiting, waiting, 0, 3, 0]
    cache, rows, counts, numbers = run_steps(MATCH, weights, cache, rows, 1, stop=waiting - 1)
    assert numbers[0] <= waiting - 1
    # One step earlier more rows than that were active.
    assert np.sum(lens > 3 + int(counts.steps) - 1) > waiting - 1
    until = StopCondition(*(jnp.int32(x) for x in (0, R, 0, B)))
    assert np.asarray(decode.progress(rows, until)).tolist() == [numbers]
    cache, rows, counts, numbers = run_steps(MATCH, weights, cache, rows, 1, steps=1)
    assert counts.steps == 1
    rows = run_steps(MATCH, weights, cache, rows, 1)[1]
    check_rows(rows, expected[1])


def test_only_rows_to_train_on_keep_the_steps_going(start):
    _, weights, prompts = start
    num_train_rows, max_lens = 3, np.array([3] * 3 + [R] * 5)
    expected = run_steps(MATCH, weights, *begin(MATCH, weights, prompts, max_lens=max_lens), 1)[1]
    lens = ref.host(expected).lens
    start_again = begin(MATCH, weights, prompts, max_lens=max_lens)
    rows, counts, numbers = run_steps(
        MATCH, weights, *start_again, 1, num_train_rows=num_train_rows
    )[1:]
    assert counts.steps == lens[:num_train_rows].max() < R
    assert numbers[:2] == [0, np.sum(lens > counts.steps)]
    check_rows(rows, expected, slice(0, num_train_rows))
    np.testing.assert_array_equal(ref.host(rows).lens, np.minimum(lens, counts.steps))


def test_re_prefill_gives_the_cache_that_decoding_left(start):
    _, weights, prompts = start
    cache, rows = begin(MATCH, weights, prompts, slots=P + 4)
    cache, rows, *_ = run_steps(MATCH, weights, cache, rows, 1, length=4)
    tokens = put(prompts.tokens, "batch", None)
    again = decode.re_prefill(MATCH, weights, tokens, rows, slots=P + 4, width=4)
    got = ref.host(rows)
    written = np.arange(P + 4)[None, :] < (prompts.lens + got.lens - 1)[:, None]  # last: not yet
    for mine, theirs in zip(ref.by_slot(again), ref.by_slot(cache), strict=True):
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine[written], theirs[written], atol=1e-5)
    deep = decode.re_prefill(MATCH, weights, tokens, rows, slots=P + R + 3, width=4)
    rest = run_steps(MATCH, weights, deep, rows, 1)[1]
    plain = run_steps(MATCH, weights, *begin(MATCH, weights, prompts), 1)[1]
    check_rows(rest, plain)
