"""The jitted pieces of a rollout: prefill, re-prefill, and a step of any width."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.transformer import Transformer
from specrl_jax.rollout.drafts import suffix_match
from specrl_jax.rollout.engine import decode, decode_state
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.sampling import SamplingConfig, sample, temper, truncate
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Source

B, P, R, END = 8, 6, 8, 4
FOREVER = np.iinfo(np.int32).max
S, D, U = Source.SAMPLED, Source.DRAFTED, Source.REUSED


def make_spec(model=ref.ONE_LAYER, accept="match", eos=(END, 3), **changes):
    spec = ref.make_spec(model, group=1, eos=eos, accept=accept).program
    return dataclasses.replace(spec, margin=R, **changes)


MATCH, RATIO = make_spec(), make_spec(accept="ratio")


def begin(spec, weights, prompts, drafts=None, max_lens=None, slots=P + R + 3, log_lenience=0.0):
    """A cache that holds the prompts, and rows with nothing else; drafts are (tokens, lens)."""
    size = len(prompts.lens)
    last = prompts.tokens[np.arange(size), prompts.lens - 1]
    seeds = np.random.default_rng(0).integers(0, 2**32, (2, size, 2), dtype=np.uint32)
    max_lens = np.full(size, spec.response_slots) if max_lens is None else max_lens
    rows = decode_state.start_rows(
        *(put(x, "batch", None) for x in seeds),
        *(put(np.asarray(x, np.int32), "batch") for x in (prompts.lens, max_lens, last)),
        columns=spec.columns,
        pad_id=spec.pad_id,
    )
    if drafts is not None:
        tokens, lens = (np.asarray(x, np.int32) for x in drafts)
        zeros = np.zeros(tokens.shape, np.float32)
        placed = ref.put_rows(Drafts(tokens, lens, zeros, zeros, zeros.astype(np.int32)))
        rows = decode_state.with_drafts(rows, placed, spec.accept, log_lenience)
    tokens = put(prompts.tokens, "batch", None)
    return prefill(spec, weights, tokens, slots), rows


def prefill(spec, weights, prompts_QP, slots, group_size=1):
    """The prompts' cache [Q * G, slots], as the engine makes it."""
    cache = decode.prefill(spec, weights, prompts_QP)
    return decode.broadcast_prefill(cache, slots=slots, group_size=group_size)


def run_steps(
    spec, weights, cache, rows, width, *, stop=0, length=R, steps=FOREVER,
    num_train_rows=FOREVER, index=None, **kwargs,
):  # fmt: skip
    """(cache, rows, counts, numbers) after these decode steps; the last two on the host."""
    until = StopCondition(*(jnp.int32(x) for x in (stop, length, steps, num_train_rows)))
    cache, rows, _, counts, numbers = decode.decode_steps(
        spec, weights, cache, rows, index, until, width=width, **kwargs
    )
    return cache, rows, ref.host(counts), np.asarray(numbers).tolist()


@pytest.fixture
def start(mesh):
    """(parameters, rollout weights, prompts) of the tiny policy."""
    return *ref.policy(model=ref.ONE_LAYER), ref.random_prompts(B, P)


def garbage(seed=1):
    return np.random.default_rng(seed).integers(5, 16, (B, R), dtype=np.int32)


def forward_logprobs(params, prompts, tokens):
    """Log-probs [B, R] of responses under the plain forward pass."""
    sequences = np.concatenate([prompts.tokens, np.zeros((B, R), np.int32)], axis=1)
    for row, n in enumerate(prompts.lens):
        sequences[row, n : n + R] = tokens[row]
    logprobs = ref.log_softmax(ref.full_logits(ref.ONE_LAYER, params, sequences))
    at = prompts.lens[:, None] - 1 + np.arange(R)[None, :]
    return logprobs[np.arange(B)[:, None], at, tokens]


def check_forward(start, rows):
    """What the rows hold has the log-probs of the plain forward pass."""
    params, _, prompts = start
    got = ref.host(rows)
    inside = np.arange(R)[None, :] < got.lens[:, None]
    expected = forward_logprobs(params, prompts, got.tokens[:, :R])
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


def test_prefill_computes_a_prompt_once_for_its_group(start):
    _, weights, prompts = start
    tokens = put(prompts.tokens, "batch", None)
    single_cache, group_cache = (
        prefill(MATCH, weights, tokens, P + R, group_size=g) for g in (1, 3)
    )
    for single, group in zip(ref.by_slot(single_cache), ref.by_slot(group_cache), strict=True):
        assert single.shape == (B, P + R, 2, 4)
        np.testing.assert_array_equal(group, np.repeat(single, 3, axis=0))
        assert single[:, :P].any()
        assert not single[:, P:].any()


# One step, by hand, on a policy that counts: after token x comes x + 1


def counting(eos=(15,)):
    table = np.full((16, 16), 1e-12)
    table[np.arange(16), (np.arange(16) + 1) % 16] = 1.0
    model, _, weights = ref.table_policy(table)
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
    assert numbers == [4, 4, 0, 1, 3, 2]

    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 3, steps=1)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [5, 3, 2, 2])
    np.testing.assert_array_equal(got.tokens[0, :5], [4, 5, 6, 7, 8])
    np.testing.assert_array_equal(got.sources[0, :5], [U, U, U, U, S])
    np.testing.assert_array_equal(got.prefix_lens, [4, 1, 0, 0])
    assert (counts.verified, counts.accepted) == (2, 1)
    assert numbers == [4, 4, 0, 0, 5, 0]
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
    stored = np.zeros((4, 1, R), np.int32)
    stored[:, 0, :5] = [[2, 3, 4, 5, 6], [2, 3, 9, 9, 9], [9, 9, 9, 9, 9], [2, 9, 9, 9, 9]]
    index = suffix_match.build(
        put(stored, None, None, None), put(np.full((4, 1), 5, np.int32), None, None),
        put(np.ones(1, np.float32), None), live=1, depth=ref.TREE.config.depth,
    )  # fmt: skip
    index = suffix_match.sync(index, rows.tokens, rows.lens)
    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 3, steps=1, index=index)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [4, 3, 2, 4])
    assert [got.sources[row, :n].tolist() for row, n in enumerate(got.lens)] == [
        [S, D, D, S], [S, D, S], [S, S], [U, U, U, S]]  # fmt: skip
    np.testing.assert_array_equal(counts.matched, [1, 1, 1])
    assert (counts.drafted, counts.verified, counts.accepted) == (2 + 1, 3, 2)
    np.testing.assert_array_equal(got.prefix_lens, [0, 0, 0, 3])
    np.testing.assert_array_equal(got.draft.lens, [0, 0, 0, 3])
    assert numbers == [4, 4, 0, 0, 4, 0]
    assert [got.sources[row, n:].any() for row, n in enumerate(got.lens)] == [False] * 4


def test_rejected_drafts_are_followed_by_trees(mesh):
    """Two steps of width 3: the tree goes on behind the first token that was drawn."""
    spec, weights = counting()
    spec = dataclasses.replace(spec, draft_source=ref.TREE)
    prompts = ref.make_prompts([[1]] * 4, P)
    drafts = np.zeros((4, R), np.int32)
    drafts[:, :6] = [[2, 3, 9, 9, 0, 0], [2, 3, 4, 5, 6, 7], [0] * 6, [9, 0, 0, 0, 0, 0]]
    cache, rows = begin(spec, weights, prompts, (drafts, [4, 6, 0, 1]))
    stored = np.zeros((4, 1, R), np.int32)
    stored[:, 0] = [[2, 3, 4, 5, 6, 7, 8, 9]] * 3 + [[9] * R]
    index = suffix_match.build(
        put(stored, None, None, None), put(np.full((4, 1), R, np.int32), None, None),
        put(np.ones(1, np.float32), None), live=1, depth=ref.TREE.config.depth,
    )  # fmt: skip
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
    assert numbers == [4, 4, 0, 0, 6, 0]


def test_a_step_ends_at_an_end_of_sequence_and_at_the_longest_length(mesh):
    """Candidates behind either are not taken, right or wrong."""
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
    assert numbers == [2, 2, 0, 0, 4, 0]


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
    assert numbers == [3, 1, 2, 2, 3, 3]
    cache, rows, _, numbers = run_steps(spec, weights, cache, rows, 4, length=3)
    assert numbers == [3, 0, 3, 2, 3, 3]  # all wait
    _, rows, _, numbers = run_steps(spec, weights, cache, rows, 4, length=R, steps=1)
    got = ref.host(rows)
    np.testing.assert_array_equal(got.lens, [6, 4, 4])
    np.testing.assert_array_equal(got.prefix_lens, [5, 3, 1])
    assert numbers == [3, 3, 0, 0, 6, 0]


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
    index = suffix_match.build(
        put(truth.tokens[:, None, :R], None, None, None), put(truth.lens[:, None], None, None),
        put(np.ones(1, np.float32), None), live=1, depth=ref.TREE.config.depth,
    )  # fmt: skip
    cache, rows = begin(spec, weights, prompts, slots=P + R)
    cache, rows, *_ = run_steps(spec, weights, cache, rows, 1, steps=plain)
    index = suffix_match.sync(index, rows.tokens, rows.lens)
    _, rows, counts, numbers = run_steps(spec, weights, cache, rows, 4, index=index)
    check_rows(rows, expected)
    check_forward(start, rows)
    assert numbers[0] == 0
    assert counts.drafted > 0
    assert counts.drafted == np.sum(ref.host(rows).sources == D)


@pytest.mark.parametrize("width", [4, R])
def test_full_reuse_keeps_the_draft_with_the_forward_log_probs(start, width):
    _, weights, prompts = start
    lens, tokens = np.array([0, 1, 2, 3, width, width, 1, 2]), garbage()
    cache, rows = begin(RATIO, weights, prompts, (tokens, lens), log_lenience=math.inf)
    cache, rows, counts, numbers = run_steps(
        RATIO, weights, cache, rows, width, steps=1, verify=True
    )
    got = ref.host(rows)
    np.testing.assert_array_equal(got.prefix_lens, lens)
    np.testing.assert_array_equal(got.lens, np.minimum(lens + 1, width))  # and the token behind it
    accepted = np.arange(R)[None, :] < lens[:, None]
    np.testing.assert_array_equal(got.tokens[:, :R][accepted], tokens[accepted])
    np.testing.assert_array_equal(got.sources[:, :R] == U, accepted)
    check_forward(start, rows)
    ended = np.isin(got.tokens[np.arange(B), got.lens - 1], (END, 3))
    np.testing.assert_array_equal(got.done, ended | (got.lens == R))
    assert (counts.verified, counts.accepted) == (lens.sum(), lens.sum())
    assert numbers[1] == np.sum(~got.done)
    # The token behind the draft is drawn where plain decoding would draw it.
    check_draws(start, rows, lens)


def check_draws(start, rows, positions):
    """Tokens at `positions` [B] are the draws from the forward pass, where there are any."""
    params, _, prompts = start
    got = ref.host(rows)
    sequences = np.concatenate([prompts.tokens, np.zeros((B, R), np.int32)], axis=1)
    for row, n in enumerate(prompts.lens):
        sequences[row, n : n + R] = got.tokens[row, :R]
    scores = ref.full_logits(ref.ONE_LAYER, params, sequences)
    scores = scores[np.arange(B), prompts.lens + positions - 1]
    sampled = ref._draw(put(scores, "batch", "vocab"), put(got.seeds, "batch", None),
                      put(positions.astype(np.int32), "batch"), SamplingConfig())  # fmt: skip
    here = positions < got.lens
    assert here.sum() > B / 2
    np.testing.assert_array_equal(
        np.asarray(sampled)[here], got.tokens[np.arange(B), positions][here]
    )


def test_decoding_behind_a_rejected_draft_sees_none_of_it(start):
    """Every width gives the plain responses, whatever was rejected on the way."""
    _, weights, prompts = start
    plain = run_steps(MATCH, weights, *begin(MATCH, weights, prompts), 1)[1]
    check_forward(start, plain)
    lens = ref.host(plain).lens
    assert len(set(lens)) > 2
    assert lens.max() == R
    right = np.arange(R)[None, :] < (np.arange(B) % 4)[:, None]
    drafts = np.where(right, ref.host(plain).tokens[:, :R], garbage())
    for width in (1, 2, 4):
        cache, rows = begin(MATCH, weights, prompts, (drafts, np.full(B, R)))
        cache, rows, counts, numbers = run_steps(MATCH, weights, cache, rows, width)
        assert not np.asarray(decode_state.verifying(rows)).any()  # when the steps end
        assert numbers[1] > numbers[3] == 0
        assert counts.steps < R
        rows = run_steps(MATCH, weights, cache, decode_state.without_drafts(rows), width)[1]
        check_rows(rows, plain)
        prefix = ref.common_prefix(drafts, np.full(B, R), ref.host(plain).tokens, lens)
        got, columns = ref.host(rows), np.arange(R)[None, :]
        np.testing.assert_array_equal(got.prefix_lens, prefix)
        assert counts.accepted == prefix.sum() > B / 2
        assert counts.verified == np.minimum(prefix + 1, lens).sum()
        expected = np.where(columns < prefix[:, None], U, S)  # SAMPLED behind the end as well
        np.testing.assert_array_equal(got.sources[:, :R], expected)
    # Verified by the ratio rule in one wide pass with no reuse, and decoded from there.
    drafts = (garbage(), np.full(B, R))
    cache, rows = begin(RATIO, weights, prompts, drafts, log_lenience=-math.inf)
    cache, rows, *_ = run_steps(RATIO, weights, cache, rows, R, steps=1, verify=True)
    assert set(ref.host(rows).lens) == {1}
    rows = run_steps(RATIO, weights, cache, decode_state.without_drafts(rows), 1)[1]
    check_rows(rows, plain)
    assert not ref.host(rows).prefix_lens.any()


def test_steps_stop_at_their_condition_and_go_on_from_there(start):
    _, weights, prompts = start
    expected = run_steps(MATCH, weights, *begin(MATCH, weights, prompts), 1)
    lens = ref.host(expected[1]).lens
    assert expected[3] == [0, 0, 0, 0, 0, 0]
    assert expected[2].steps == R

    cache, rows = begin(MATCH, weights, prompts)
    cache, rows, counts, numbers = run_steps(MATCH, weights, cache, rows, 1, length=3)
    assert counts.steps == 3
    waiting = np.sum((lens > 3) | ((lens == 3) & ~ref.host(rows).done))
    assert numbers == [waiting, 0, waiting, 0, 3, 0]
    cache, rows, counts, numbers = run_steps(MATCH, weights, cache, rows, 1, stop=waiting - 1)
    assert numbers[0] <= waiting - 1
    # One step earlier more rows than that were active.
    assert np.sum(lens > 3 + int(counts.steps) - 1) > waiting - 1
    until = StopCondition(*(jnp.int32(x) for x in (0, R, 0, B)))
    assert np.asarray(decode.progress(rows, until)).tolist() == numbers
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
    assert numbers[:3] == [0, np.sum(lens > counts.steps), 0]
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


# How often a draw flips between programs of different width


@functools.partial(jax.jit, static_argnames=("model", "width"))
def _draws_at(model, weights, prompts_BP, prompt_lens, tokens_BR, seeds, *, width):
    """Tokens [B, R] that would be drawn where steps of one width are fed `tokens_BR`."""
    policy, config, slots = Transformer(model, weights), SamplingConfig(), tokens_BR.shape[1]
    spec = make_spec(model)
    cache = prefill(spec, weights, prompts_BP, prompts_BP.shape[1] + slots)
    last = jnp.sum(
        jnp.where(
            jnp.arange(prompts_BP.shape[1])[None, :] == prompt_lens[:, None] - 1, prompts_BP, 0
        ),
        axis=1,
    )
    fed = jnp.concatenate([last[:, None], tokens_BR[:, :-1]], axis=1)
    pieces = jnp.moveaxis(fed.reshape(len(fed), slots // width, width), 1, 0)

    def step(carry, piece):
        cache, at = carry
        hidden, cache = policy(piece, prompt_lens - 1 + at, cache)
        positions = at + jnp.zeros_like(prompt_lens)[:, None] + jnp.arange(width)[None, :]
        logits = truncate(temper(policy.logits(hidden), config), config)
        return (cache, at + width), sample(logits, seeds, positions, config)

    _, sampled = jax.lax.scan(step, (cache, jnp.int32(0)), pieces)
    return jnp.moveaxis(sampled, 0, 1).reshape(fed.shape)


def flips(model, weights, prompts, tokens, seeds) -> dict[int, float]:
    """Share of draws, by width, that differ from the tokens of a rollout."""
    arguments = put(prompts.tokens, "batch", None), put(prompts.lens, "batch")
    rest = put(np.asarray(tokens), "batch", None), put(np.asarray(seeds), "batch", None)
    return {
        width: np.mean(
            np.asarray(_draws_at(model, weights, *arguments, *rest, width=width)) != tokens
        )
        for width in (1, 4, 16)
    }


def test_widths_hardly_flip_a_draw(mesh):
    """Thousands of tokens of a speculative rollout, fed again at three widths."""
    model = ref.MODEL.replace(vocab_size=512, embed_dim=32)
    weights = ref.policy(model=model)[1]
    rng = np.random.default_rng(5)
    prompts = ref.make_prompts([rng.integers(0, 512, 1 + i % P) for i in range(128)], P)
    spec = ref.make_spec(model, slots=64, group=1, accept="match", eos=(512,), row_buckets=1,
                         cache_lengths=1, tree=ref.TREE, max_width=4)  # fmt: skip
    rollout, stats = ref.run(spec, weights, prompts)
    tokens = np.asarray(rollout.tokens)
    assert np.asarray(rollout.lens).min() == 64
    assert stats.drafted_tokens > 0
    seeds = ref._seeds(jax.random.key(ref.KEY), 1, jnp.uint32(0), put(prompts.ids, "batch", None),
                       put(np.zeros(128, np.int32), "batch"))  # fmt: skip
    shares = flips(model, weights, prompts, tokens, seeds)
    assert all(share < 1e-4 for share in shares.values()), shares  # none of 8,192
    # Another policy's draws differ: the comparison can tell.
    other = flips(model, ref.policy(0.1, model)[1], prompts, tokens, seeds)
    assert all(share > 0.05 for share in other.values())
