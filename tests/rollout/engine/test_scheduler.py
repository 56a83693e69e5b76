"""The scheduler: queue, bounds and preemption. None of them changes a token."""

import dataclasses
import gc

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import ONE_BUCKET, as_drafts, check_equal
from scheduler_cases import (
    DRAFT_FIELDS,
    FEW_BYTES,
    MAX_LENS,
    PROMPTS,
    SLOT_BYTES,
    B,
    R,
    bytes_for,
    go,
    spec_of,
)

from specrl_jax.rollout.engine import decode, decode_state
from specrl_jax.rollout.engine.runner import ModelRunner
from specrl_jax.sharding import put
from specrl_jax.types import Source

# The queue


QUEUES = {
    "all at once": ONE_BUCKET,
    "a queue": {"max_rows": 8, "cache_lengths": 2},
    "a group at a time": {"max_rows": 4, **ONE_BUCKET},
    "few bytes": FEW_BYTES,
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
    for changes in (ONE_BUCKET, {"max_rows": 8, "cache_lengths": 2}):
        rollout, _ = go(spec_of(**changes), max_lens=MAX_LENS[:20], prompts=five)
        check_equal(rollout, base[0], slice(0, 20))


def test_a_queue_refills_before_its_last_row_is_done(mesh, base):
    """One long row in every group: parts would take four times eight steps of eight rows."""
    _, endless, _ = base
    max_lens = np.tile([R, 1, 1, 1], 8).astype(np.int32)
    rollout, stats = go(spec_of(max_rows=8, cache_lengths=1), max_lens=max_lens)
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
    # Buckets of 10, 8 and 5 rows; 8 or 4 begin together.
    spec = spec_of(max_rows=10, row_buckets=2, cache_lengths=1, verify_width=2)
    lens = np.where(np.arange(B) % 4 == 3, 1, R)
    rollout, _ = go(spec, max_lens=None, drafts=as_drafts(base[1], lens))
    check_equal(rollout, base[1], but=DRAFT_FIELDS)
    assert (4, 3) in passes
    assert all(smaller < size for size, smaller in splits)


# A bound of the caches' bytes


@pytest.fixture
def live_bytes(monkeypatch):
    """The most bytes that caches really held at once, as [n]: read off the live arrays."""
    most = [0]

    def watched(function):
        def call(*args, **kwargs):
            out = function(*args, **kwargs)
            if live() > most[0]:
                gc.collect()  # a program's compilation leaves cycles that hold its arguments
                most[0] = max(most[0], live())
            return out

        return call

    def live() -> int:
        caches = (x for x in jax.live_arrays() if x.ndim == 4 and x.shape[1] == 2)
        # Keys [B, 2, 4, S], values [B, 2, S, 4]; [D, 2, 4, 4] are weights.
        return sum(x.nbytes for x in caches if 4 in x.shape[2:] and x.shape[2:] != (4, 4))

    for module, names in (
        (decode, ("prefill", "broadcast_prefill", "re_prefill", "decode_steps")),
        (decode_state, ("resize", "insert")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, watched(getattr(module, name)))
    return most


# (rows at the longest cache, 0: any; tokens a step may check; longest draft)
BOUNDS = [(0, 1, 0), (13, 1, 0), (13, 1, 3), (13, 1, R), (8, 1, 0), (13, 4, 3)]


@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_rows_give_up_their_cache_and_come_back(mesh, base, live_bytes, bound):
    """More rows fit in the short cache than in the long one: some are preempted, none is lost."""
    count, width, longest = bound
    plain, _, old = base
    drafts = as_drafts(old, np.minimum(old.lens, longest)) if longest else None
    spec = spec_of(width, **{**FEW_BYTES, "cache_bytes": bytes_for(count, width)})
    rollout, stats = go(spec, drafts=drafts)
    check_equal(rollout, plain, but=DRAFT_FIELDS)
    assert 0 < stats.cache_bytes == live_bytes[0] <= (spec.cache_bytes or np.inf)
    if longest < R:  # long drafts need the longest cache at once
        assert (stats.preempted > 0) == (count > 0)
    assert stats.metrics()["rollout/preempted"] == stats.preempted
    assert stats.metrics()["rollout/cache_gib"] == stats.cache_bytes / 2**30


def long_spec(**changes):
    """16 rows of 32 tokens without an end, prompts of 2."""
    count, slots = changes.pop("fits")
    options = {"slots": 32, "prompt_slots": 2, "group": 2, "accept": "match", "eos": (16,)}
    bound = 2.5 * count * slots * SLOT_BYTES
    return ref.make_spec(ref.ONE_LAYER, cache_bytes=bound, **options | changes)


def test_resumed_rows_get_the_cache_after_the_one_they_filled(mesh, live_bytes):
    """At 18 slots 8 rows fit, at 34 four: those that come back must not be begun as eight."""
    spec = long_spec(fits=(8, 18), row_buckets=4, cache_lengths=2)
    prompts, (_, weights) = ref.random_prompts(8, 2), ref.policy(model=ref.ONE_LAYER)
    rollout, stats = ref.run(spec, weights, prompts)
    assert 0 < stats.cache_bytes == live_bytes[0] <= spec.cache_bytes
    free = dataclasses.replace(spec, cache_bytes=0.0)
    check_equal(rollout, ref.run(free, weights, prompts)[0])
    assert stats.preempted == 12  # 8 of the first cache length, and 4 more that fill it


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, 48])
def test_a_verification_that_splits_stays_within_the_bound(mesh, live_bytes, slots):
    """Drafts of two passes, right in 3 of 8 rows: these go on alone only if there is room. Without
    a bound they do, and the cache of their prompts must be gone by then."""
    prompts, (_, weights) = ref.random_prompts(8, slots), ref.policy(model=ref.ONE_LAYER)
    options = {"row_buckets": 4, "cache_lengths": 1, "max_rows": 8, "verify_width": 16}
    spec = long_spec(fits=(8, slots + 32), prompt_slots=slots, **options)
    free = dataclasses.replace(spec, cache_bytes=0.0)
    right = ref.run(free, weights, prompts)[0]
    tokens = np.asarray(right.tokens).copy()
    tokens[np.arange(16) % 8 >= 3, 4] ^= 1
    drafts = as_drafts(dataclasses.replace(right, tokens=put(tokens, "batch", None)))
    for each_spec in (spec, free):
        live_bytes[0] = 0
        rollout, stats = ref.run(each_spec, weights, prompts, drafts=drafts)
        check_equal(rollout, right, but=DRAFT_FIELDS)
        assert 0 < stats.cache_bytes == live_bytes[0] <= (each_spec.cache_bytes or np.inf)
        assert stats.verify_work > 0
    decode_runs = [program for program in stats.programs if program[0] == "decode_steps"]
    assert len({size for _, size, *_, wide, _ in decode_runs if wide}) > 1  # parted


@pytest.mark.parametrize(
    "fits", [pytest.param((16, 34), marks=pytest.mark.slow), (4, 34)], ids=["all", "few"]
)
def test_block_verifies_whole_drafts_within_the_bound(mesh, live_bytes, fits):
    """Short drafts, whose pass is wider than the cache that they need; one of them longer."""
    prompts, (_, weights) = ref.random_prompts(8, 2), ref.policy(model=ref.ONE_LAYER)
    spec = long_spec(fits=fits, row_buckets=3, cache_lengths=4, accept="block", stored_logprobs=3)
    free = dataclasses.replace(spec, cache_bytes=0.0, cache_lengths=1)
    old = ref.run(free, ref.policy(0.1, ref.ONE_LAYER)[1], prompts)[0]
    lens = np.full(16, 5)
    drafts = [as_drafts(old, np.where(np.arange(16) == 15, n, lens)) for n in (5, 20)]
    expected = [ref.run(free, weights, prompts, 1, drafts=d)[0] for d in drafts]
    live_bytes[0] = 0
    results = [ref.run(spec, weights, prompts, 1, drafts=d) for d in drafts]
    assert max(stats.cache_bytes for _, stats in results) == live_bytes[0] <= spec.cache_bytes
    for (rollout, _), right in zip(results, expected):
        check_equal(rollout, right)
        accepted = np.asarray(rollout.prefix_lens)
        assert 0 < accepted.sum() < 16 * 5  # some accepted, some not
    first, second = (np.asarray(rollout.tokens)[:15] for rollout, _ in results)
    np.testing.assert_array_equal(first, second)  # nothing of the row whose draft is longer
