"""The scheduler: queues, buckets and cache lengths. None of them changes a token."""

import dataclasses

import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import ONE_BUCKET, as_drafts, check_equal
from scheduler_cases import (
    DRAFT_FIELDS,
    MAX_LENS,
    PROMPTS,
    B,
    R,
    go,
    spec_of,
)

from specrl_jax.rollout.engine.runner import ModelRunner
from specrl_jax.sharding import put
from specrl_jax.types import Source

# The queue


QUEUES = {
    "all at once": ONE_BUCKET,
    "a queue": {"max_rows": 8},
    "a group at a time": {"max_rows": 4, **ONE_BUCKET},
    "short caches": {"row_buckets": 3},
    "tree drafts": {"width": 4, **ONE_BUCKET},
}


@pytest.mark.parametrize("changes", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("with_drafts", [False, True], ids=["plain", "drafts"])
def test_every_response_ends_at_its_longest_length(mesh, base, changes, with_drafts):
    """With drafts that are right and longer than max_lens, too."""
    _, endless, _ = base
    assert set(endless.lens) == {R}
    rollout, _ = go(spec_of(**changes), drafts=as_drafts(endless) if with_drafts else None)
    np.testing.assert_array_equal(np.asarray(rollout.lens), MAX_LENS)
    inside = np.arange(R)[None, :] < MAX_LENS[:, None]
    for name in ("tokens", "policy_logprobs", "sampling_logprobs", "origin_logprobs"):
        values = np.where(inside, getattr(endless, name), 0)
        np.testing.assert_allclose(np.asarray(getattr(rollout, name)), values, atol=1e-5)
    np.testing.assert_array_equal(
        np.asarray(rollout.prefix_lens), MAX_LENS if with_drafts else 0 * MAX_LENS
    )
    reused = np.asarray(rollout.sources) == Source.REUSED
    np.testing.assert_array_equal(reused, inside & with_drafts)


def test_a_batch_that_fills_no_bucket(mesh, base):
    """Five groups of four rows on a bucket of 32, at once and in parts: padding are not seen."""
    five = ref.select(PROMPTS, range(5))
    for changes in (ONE_BUCKET, {"max_rows": 8}):
        rollout, _ = go(spec_of(**changes), max_lens=MAX_LENS[:20], prompts=five)
        check_equal(rollout, base[0], slice(0, 20))


def test_a_queue_refills_before_its_last_row_is_done(mesh, base):
    """One long row in every group: parts would take four times eight steps of eight rows."""
    _, endless, _ = base
    max_lens = np.tile([R, 1, 1, 1], 8).astype(np.int32)
    rollout, stats = go(spec_of(max_rows=8), max_lens=max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.lens), max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.tokens)[::4], endless.tokens[::4])
    assert stats.row_steps < 0.85 * 4 * (8 * 1 + 4 * 7)  # on the same buckets, without refilling


def test_a_verification_never_splits_to_a_larger_bucket(mesh, base, monkeypatch):
    """A group that begins alone may have fewer rows than the bucket for what is left of it."""
    passes, splits, run_model, split = [], [], ModelRunner.run, ModelRunner.split

    def seen_run(self, batch, stop, width, *, verify=False):
        if verify:
            passes.append((batch.size, batch.verifying))
        return run_model(self, batch, stop, width, verify=verify)

    def seen_split(self, batch, size):
        splits.append((batch.size, size))
        return split(self, batch, size)

    monkeypatch.setattr(ModelRunner, "run", seen_run)
    monkeypatch.setattr(ModelRunner, "split", seen_split)
    # Buckets of 12 and 6 rows; 12 or 4 begin together.
    spec = spec_of(max_rows=12, row_buckets=2)
    lens = np.where(np.arange(B) % 4 == 3, 1, R)
    rollout, _ = go(spec, max_lens=None, drafts=as_drafts(base[1], lens))
    check_equal(rollout, base[1], but=DRAFT_FIELDS)
    assert (4, 3) in passes
    assert all(smaller < size for size, smaller in splits)


# Short caches


def long_spec(**changes):
    """Up to 32 tokens without an end, prompts of 2."""
    options = {"slots": 32, "prompt_slots": 2, "group": 2, "accept": "match", "eos": (16,)}
    return ref.make_spec(ref.ONE_LAYER, **options | changes)


def test_the_batch_moves_to_the_next_longer_cache(mesh):
    """When its longest row has filled the one it is in; groups that begin later join it there."""
    spec = long_spec(row_buckets=2, max_rows=8)
    prompts, (_, weights) = ref.random_prompts(8, 2), ref.policy(model=ref.ONE_LAYER)
    max_lens = np.array([32, 3] * 8, np.int32)
    rollout, stats = ref.run(spec, weights, prompts, max_lens=max_lens)
    at_once = long_spec(**ONE_BUCKET)
    check_equal(rollout, ref.run(at_once, weights, prompts, max_lens=max_lens)[0])
    lengths = [slots for _, slots, *_ in stats.decode_runs]
    assert set(lengths) == {2 + 8, 2 + 16, 2 + 32}
    assert max(rows for rows, *_ in stats.decode_runs) == 8


def test_rows_that_go_on_verifying_part_from_the_others(mesh):
    """Drafts of two passes, right in 3 of 8 rows: these go on alone."""
    prompts, (_, weights) = ref.random_prompts(8, 2), ref.policy(model=ref.ONE_LAYER)
    spec = long_spec(row_buckets=4, max_rows=8)
    right = ref.run(spec, weights, prompts)[0]
    tokens = np.asarray(right.tokens).copy()
    tokens[np.arange(16) % 8 >= 3, 4] ^= 1
    drafts = as_drafts(dataclasses.replace(right, tokens=put(tokens, "batch", None)))
    rollout, stats = ref.run(spec, weights, prompts, drafts=drafts)
    check_equal(rollout, right, but=DRAFT_FIELDS)
    decode_runs = [program for program in stats.programs if program[0] == "decode_steps"]
    assert len({size for _, size, *_, verifies, _ in decode_runs if verifies}) > 1


@pytest.mark.parametrize("rows", [pytest.param(0, marks=pytest.mark.slow), 4], ids=["all", "few"])
def test_block_verifies_whole_drafts(mesh, rows):
    """Short drafts, whose pass is wider than the cache that they need; one of them longer."""
    prompts, (_, weights) = ref.random_prompts(8, 2), ref.policy(model=ref.ONE_LAYER)
    options = {"row_buckets": 3, "accept": "block", "stored_logprobs": 3}
    spec = long_spec(max_rows=rows, **options)
    at_once = long_spec(**options)
    old = ref.run(at_once, ref.policy(0.1, ref.ONE_LAYER)[1], prompts)[0]
    lens = np.full(16, 5)
    drafts = [as_drafts(old, np.where(np.arange(16) == 15, n, lens)) for n in (5, 20)]
    expected = [ref.run(at_once, weights, prompts, 1, drafts=d)[0] for d in drafts]
    results = [ref.run(spec, weights, prompts, 1, drafts=d)[0] for d in drafts]
    for rollout, right in zip(results, expected):
        check_equal(rollout, right)
        accepted = np.asarray(rollout.prefix_lens)
        assert 0 < accepted.sum() < 16 * 5  # some accepted, some not
    first, second = (np.asarray(rollout.tokens)[:15] for rollout in results)
    np.testing.assert_array_equal(first, second)  # nothing of the row whose draft is longer
