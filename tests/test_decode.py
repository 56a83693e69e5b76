"""The jitted pieces of a rollout, one by one: prefill, verify, decode, move, collect."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import init_cache
from specrl_jax.rollout import decode as steps
from specrl_jax.rollout.decode import Rows
from specrl_jax.sharding import put
from specrl_jax.types import Drafts

B, P, R, END = 8, 6, 8, 4
PLAN = ref.make_plan(ref.ONE_LAYER, group=1, eos=(END, 3))
SETUP = PLAN.setup
FIELDS = [f.name for f in dataclasses.fields(Rows)]
MATRICES = ("tokens", "policy_logprobs", "sampling_logprobs")


@pytest.fixture
def start(mesh):
    """(parameters, weights, prompts, a new cache of P + R slots, rows that hold only prompts)."""
    params, weights = ref.policy(model=ref.ONE_LAYER)
    prompts = ref.random_prompts(B, P)
    return params, weights, prompts, *new_rows(weights, prompts)


def new_rows(weights, prompts):
    last = prompts.tokens[np.arange(B), prompts.lens - 1]
    seeds = np.random.default_rng(0).integers(0, 2**32, (B, 2), dtype=np.uint32)
    rows = steps.start_rows(
        SETUP, put(seeds, "batch", None), put(prompts.lens, "batch"), put(last, "batch")
    )
    tokens = put(prompts.tokens, "batch", None)
    cache = steps.prefill(SETUP, weights, tokens, slots=P + R, group_size=1)
    return cache, rows


def make_drafts(lens, tokens=None) -> Drafts:
    rng = np.random.default_rng(1)
    tokens = rng.integers(5, 16, (B, R), dtype=np.int32) if tokens is None else tokens
    zeros = np.zeros((B, R), np.float32)
    return ref.put_rows(Drafts(tokens, np.asarray(lens, np.int32), zeros, zeros, zeros.astype(int)))


def verify(weights, cache, rows, drafts, log_lenience, width=R):
    seeds = put(np.arange(2 * B, dtype=np.uint32).reshape(B, 2), "batch", None)
    return steps.verify(
        SETUP, weights, cache, rows, drafts, seeds, jnp.float32(log_lenience), width=width
    )


def forward_logprobs(params, prompts, tokens):
    """Log-probs [B, R] of responses under the plain forward pass."""
    whole = np.concatenate([prompts.tokens, np.zeros((B, R), np.int32)], axis=1)
    for row, n in enumerate(prompts.lens):
        whole[row, n : n + R] = tokens[row]
    laws = ref.log_softmax(ref.full_logits(ref.ONE_LAYER, params, whole))
    at = prompts.lens[:, None] - 1 + np.arange(R)[None, :]
    return laws[np.arange(B)[:, None], at, tokens]


def test_rows_start_with_their_prompts_only(start):
    _, _, prompts, _, rows = start
    rows = ref.host(rows)
    np.testing.assert_array_equal(rows.index, np.arange(B))
    np.testing.assert_array_equal(rows.prompt_lens, prompts.lens)
    assert not rows.lens.any()
    assert not rows.done.any()
    assert rows.tokens.shape == (B, R + 1)


def test_prefill_computes_a_prompt_once_for_its_group(start):
    _, weights, prompts, _, _ = start
    tokens = put(prompts.tokens, "batch", None)
    one, three = (
        ref.host(steps.prefill(SETUP, weights, tokens, slots=P + R, group_size=g)) for g in (1, 3)
    )
    for single, group in zip(jax.tree.leaves(one), jax.tree.leaves(three), strict=True):
        assert single.shape == (B, P + R, 2, 4)
        np.testing.assert_array_equal(group, np.repeat(single, 3, axis=0))
        assert single[:, :P].any()
        assert not single[:, P:].any()


@pytest.mark.parametrize("width", [4, R])
def test_full_reuse_keeps_the_draft_with_the_forward_log_probs(start, width):
    params, weights, prompts, cache, rows = start
    lens = np.array([0, 1, 2, 3, width, width, 1, 2])
    drafts = make_drafts(lens)
    tokens, last = np.asarray(drafts.tokens), np.asarray(rows.last)
    _, rows = verify(weights, cache, rows, drafts, math.inf, width)
    rows = ref.host(rows)
    inside = np.arange(R)[None, :] < lens[:, None]
    np.testing.assert_array_equal(rows.lens, lens)
    np.testing.assert_array_equal(rows.tokens[:, :R], np.where(inside, tokens, 0))
    expected = np.where(inside, forward_logprobs(params, prompts, tokens), 0)
    np.testing.assert_allclose(rows.policy_logprobs[:, :R], expected, atol=1e-5)
    np.testing.assert_array_equal(rows.sampling_logprobs, rows.policy_logprobs)
    ends = np.where(lens > 0, tokens[np.arange(B), lens - 1], last)
    np.testing.assert_array_equal(rows.last, ends)
    np.testing.assert_array_equal(rows.done, lens == R)  # no draft ends by itself


def test_no_reuse_rewinds_to_the_prompt(start):
    _, weights, _, cache, rows = start
    before = ref.host(rows)
    _, rows = verify(weights, cache, rows, make_drafts(np.full(B, R)), -math.inf)
    rows = ref.host(rows)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(rows, name), getattr(before, name), name)


def test_a_draft_that_ends_is_done_and_one_cut_before_its_end_is_not(start):
    _, weights, _, cache, rows = start
    tokens = np.random.default_rng(2).integers(5, 16, (B, R), dtype=np.int32)
    lens = np.array([1, 3, 3, R, R, 5, 0, 2])
    tokens[0, 0], tokens[1, 2], tokens[2, 2], tokens[3, R - 1] = END, END, 3, END
    tokens[6, 0] = tokens[7, 3] = END  # behind the draft's length: not part of it
    _, rows = verify(weights, cache, rows, make_drafts(lens, tokens), math.inf)
    np.testing.assert_array_equal(np.asarray(rows.done), [1, 1, 1, 1, 1, 0, 0, 0])


def test_decoding_behind_a_rejected_draft_sees_none_of_it(start):
    """The cache after verification and rewind serves as well as a fresh one."""
    _, weights, prompts, cache, rows = start
    plain = steps.decode(SETUP, weights, cache, rows, jnp.int32(0), jnp.int32(R))[1]
    cache, rows = new_rows(weights, prompts)
    cache, rows = verify(weights, cache, rows, make_drafts(np.full(B, R)), -math.inf)
    again = steps.decode(SETUP, weights, cache, rows, jnp.int32(0), jnp.int32(R))[1]
    for name in FIELDS:
        mine, theirs = np.asarray(getattr(again, name)), np.asarray(getattr(plain, name))
        np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=name)


def test_decode_stops_at_its_limits_and_goes_on_from_there(start):
    params, weights, prompts, cache, rows = start
    whole = steps.decode(SETUP, weights, cache, rows, jnp.int32(0), jnp.int32(R))
    lens = np.asarray(whole[1].lens)
    assert len(set(lens)) > 2
    assert lens.max() == R
    assert [int(x) for x in whole[2:]] == [0, 0, R]
    tokens = np.asarray(whole[1].tokens)[:, :R]
    inside = np.arange(R)[None, :] < lens[:, None]
    expected = np.where(inside, forward_logprobs(params, prompts, tokens), 0)
    policy = np.asarray(whole[1].policy_logprobs)[:, :R]
    np.testing.assert_allclose(np.where(inside, policy, 0), expected, atol=1e-5)

    cache, rows = new_rows(weights, prompts)
    cache, rows, active, longest, taken = steps.decode(
        SETUP, weights, cache, rows, jnp.int32(0), jnp.int32(3)
    )
    assert (int(longest), int(taken)) == (3, 3)
    assert int(active) == np.sum((lens > 3) | ((lens == 3) & ~np.asarray(rows.done))) > 0
    target = int(active) - 1
    cache, rows, active, longest, more = steps.decode(
        SETUP, weights, cache, rows, jnp.int32(target), jnp.int32(R)
    )
    assert int(active) <= target
    assert [int(x) for x in steps.progress(rows)] == [int(active), int(longest)]
    # One step earlier more rows than that were active.
    assert np.sum(lens > 3 + int(more) - 1) > target
    rows = steps.decode(SETUP, weights, cache, rows, jnp.int32(0), jnp.int32(R))[1]
    for name in FIELDS:
        one, other = np.asarray(getattr(rows, name)), np.asarray(getattr(whole[1], name))
        if name in MATRICES:
            one, other = one[:, :R], other[:, :R]  # column R is where rows that are done write
        np.testing.assert_array_equal(one, other, name)


def synthetic_rows(done) -> Rows:
    rng = np.random.default_rng(3)
    matrices = {name: rng.normal(size=(B, R + 1)).astype(np.float32) for name in MATRICES}
    vectors = {n: rng.integers(0, 99, B, dtype=np.int32) for n in ("prompt_lens", "lens", "last")}
    seeds = rng.integers(0, 99, (B, 2)).astype(np.uint32)
    index = np.arange(B, dtype=np.int32)
    return ref.put_rows(Rows(index=index, seeds=seeds, done=np.array(done), **vectors, **matrices))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
def test_move_and_collect_follow_the_rows(make_mesh, shape):
    with jax.set_mesh(make_mesh(*shape)):
        rows = synthetic_rows([1, 0, 1, 1, 0, 1, 0, 1])
        before = ref.host(rows)
        cache = jax.tree.map(
            lambda x: x + jnp.arange(B, dtype=jnp.float32)[:, None, None, None],
            init_cache(ref.ONE_LAYER, B, 10),
        )
        cache, rows, finished = steps.move(cache, rows, None, size=4, slots=12)
        picked = ref.host(rows)
        np.testing.assert_array_equal(picked.index, [1, 4, 6, 0])  # active first, one done fills up
        for name in FIELDS:
            expected = getattr(before, name)[[1, 4, 6, 0]]
            np.testing.assert_array_equal(getattr(picked, name), expected, name)
        for x in jax.tree.leaves(ref.host(cache)):
            assert x.shape == (4, 12, 2, 4)
            np.testing.assert_array_equal(x[:, :10, 0, 0], np.outer([1, 4, 6, 0], np.ones(10)))
            assert not x[:, 10:].any()

        # Rows 4 and 1 end; what they wrote is taken over when the rung is left and at the end.
        rows = dataclasses.replace(rows, lens=rows.lens + 100, done=put_done([1, 1, 0, 1]))
        cache, rows, finished = steps.move(cache, rows, finished, size=2, slots=5)
        np.testing.assert_array_equal(np.asarray(rows.index), [6, 1])
        assert cache[0][0].shape == (2, 5, 2, 4)
        rows = dataclasses.replace(rows, lens=rows.lens + 1000)
        final = ref.host(steps.collect(rows, finished))
        grown = np.array([100, 1100, 0, 0, 100, 0, 1100, 0])
        np.testing.assert_array_equal(final.lens, before.lens + grown)
        for name in ("tokens", "policy_logprobs", "seeds", "prompt_lens"):
            np.testing.assert_array_equal(getattr(final, name), getattr(before, name), name)


def put_done(values):
    return put(np.array(values, bool), "batch")
