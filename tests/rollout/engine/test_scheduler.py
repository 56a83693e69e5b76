"""The scheduler: which rows start, and in which bucket all decode. It changes no token."""

import itertools
import types

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import ONE_BUCKET, as_drafts, check_equal
from scheduler_cases import MAX_LENS, PROMPTS, B, R, make_spec, run_rollout

from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.scheduler import Scheduler, whole_groups
from specrl_jax.types import Source

QUEUES = {
    "all at once": ONE_BUCKET,
    "a few at a time": {"max_rows": 3, **ONE_BUCKET},
    "many buckets": {"row_buckets": 4},
    "tree drafts": {"width": 4, **ONE_BUCKET},
}


@pytest.mark.parametrize("changes", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("with_drafts", [False, True], ids=["plain", "drafts"])
def test_every_response_ends_at_its_longest_length(mesh, rollouts, changes, with_drafts):
    """With drafts that are right and longer than max_lens, too."""
    endless = rollouts.endless
    assert set(endless.lens) == {R}
    rollout, _ = run_rollout(
        make_spec(**changes), drafts=as_drafts(endless) if with_drafts else None
    )
    np.testing.assert_array_equal(np.asarray(rollout.lens), MAX_LENS)
    inside = np.arange(R)[None, :] < MAX_LENS[:, None]
    for name in ("ids", "policy_logprobs", "sampling_logprobs", "origin_logprobs"):
        values = np.where(inside, getattr(endless.tokens, name), 0)
        np.testing.assert_allclose(np.asarray(getattr(rollout.tokens, name)), values, atol=1e-5)
    np.testing.assert_array_equal(
        np.asarray(rollout.prefix_lens), MAX_LENS if with_drafts else 0 * MAX_LENS
    )
    reused = np.asarray(rollout.tokens.sources) == Source.REUSED
    np.testing.assert_array_equal(reused, inside & with_drafts)


def test_a_batch_that_fills_no_bucket(mesh, rollouts):
    """Five groups of four rows: slots without a row are not seen."""
    five = PROMPTS.select(range(5))
    for changes in ({"row_buckets": 3}, {"max_rows": 8}):
        rollout, _ = run_rollout(make_spec(**changes), max_lens=MAX_LENS[:20], prompts=five)
        check_equal(rollout, rollouts.plain, slice(0, 20))


def test_rows_begin_before_the_last_of_the_others_is_done(mesh, rollouts):
    """One long row in every group: eight rows at a time would take four times seven steps."""
    endless = rollouts.endless
    max_lens = np.tile([R, 1, 1, 1], 8).astype(np.int32)
    rollout, stats = run_rollout(make_spec(max_rows=8, **ONE_BUCKET), max_lens=max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.lens), max_lens)
    np.testing.assert_array_equal(np.asarray(rollout.tokens.ids)[::4], endless.tokens.ids[::4])
    assert stats.decode_steps <= 2 * (R - 1)


# The order of programs


class Seen:
    """Record of the runner: rows that started, in order; sizes that it was compacted to; steps."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._spy(monkeypatch, "admit", self._begun)
        self._spy(monkeypatch, "compact", lambda runner, size: ("compact", size))
        self._spy(monkeypatch, "decode", lambda runner, stop, width: ("decode", runner.size))

    def _begun(self, runner, row_ids):
        free = runner.size - runner.unfinished_all.sum()
        assert sum(map(len, row_ids)) <= free
        return "begin", np.concatenate(row_ids).tolist()

    def _spy(self, monkeypatch, name, describe):
        method = getattr(Runner, name)

        def spy(runner, *args):
            self.calls.append(describe(runner, *args))
            return method(runner, *args)

        monkeypatch.setattr(Runner, name, spy)

    def of(self, kind):
        return [value for name, value in self.calls if name == kind]

    @property
    def begun(self) -> list[int]:
        """Rows in the order in which they started."""
        return list(itertools.chain(*self.of("begin")))


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


def test_a_quarter_of_the_slots_is_refilled_at_a_time(mesh, seen):
    """16 slots; rows start in order, four at least, as others are done."""
    max_lens = np.where(np.arange(B) < 16, 1 + np.arange(B) % 8, R).astype(np.int32)
    run_rollout(make_spec(max_rows=16, **ONE_BUCKET), max_lens=max_lens)
    assert seen.begun == list(range(B))
    # Of the first there are two of each length.
    assert [len(rows) for rows in seen.of("begin")] == [16, 4, 4, 4, 4]
    assert seen.of("compact") == []


def test_the_batch_shrinks_bucket_by_bucket_once_none_waits(mesh, seen, rollouts):
    max_lens = np.where(np.arange(B) == 3, R, 2).astype(np.int32)
    rollout, stats = run_rollout(make_spec(row_buckets=4), max_lens=max_lens)
    assert seen.calls == [
        ("begin", list(range(B))), ("decode", 32), ("compact", 16), ("compact", 8), ("compact", 4),
        ("decode", 4),
    ]  # fmt: skip
    assert stats.decode_runs == [(32, 1, 1), (4, 1, R - 2)]
    np.testing.assert_array_equal(np.asarray(rollout.tokens.ids)[3], rollouts.endless.tokens.ids[3])
    seen.calls.clear()
    run_rollout(make_spec(row_buckets=4, max_rows=16), max_lens=max_lens)
    order = [name for name, _ in seen.calls]
    assert order.index("compact") > len(order) - 1 - order[::-1].index("begin")


def test_groups_of_long_drafts_begin_first(mesh, seen, rollouts):
    """Drafts of like length are decided together."""
    lens = np.repeat([1, 4, 2, 8, 5, 3, 0, 7], 4)
    drafts = as_drafts(rollouts.endless, lens)
    run_rollout(make_spec(max_rows=8, **ONE_BUCKET), drafts=drafts, max_lens=None)
    groups = [row // 4 for row in seen.begun][::4]
    assert groups == [3, 7, 4, 1, 5, 2, 0, 6]


def test_idle_rows_begin_last_and_end_with_the_others(mesh, seen, rollouts):
    """They take idle slots alone, and the batch does not shrink while one of them waits."""
    weights = ref.policy(0.0, ref.ONE_LAYER)[1]
    spec = make_spec(max_rows=12, row_buckets=2)
    result = ref.rollout(spec, weights, PROMPTS, step=1, background=np.arange(32) >= 16)
    assert seen.begun[:16] == list(range(16))
    assert seen.begun[16:] == list(range(16, len(seen.begun)))
    lens = np.asarray(result.rollout.lens)
    assert set(lens[:16]) == {R}
    first = jax.tree.map(lambda x: x[:16], ref.host(result.rollout))
    check_equal(first, rollouts.endless, slice(0, 16))
    assert 0 < lens[16:].sum() < 16 * R


# Shards


def test_who_waits_by_hand():
    """4 groups of 2 rows on 2 shards; the last group of each is background. Rows that have tokens
    come first, finished ones do not wait."""
    begun = np.zeros(8, np.int32)
    begun[[1, 5]] = 3
    done = np.arange(8) == 4
    runner = types.SimpleNamespace(
        spec=types.SimpleNamespace(group_size=2), requests=types.SimpleNamespace(first=None),
        buckets=types.SimpleNamespace(shards=2), shard_rows=4, lens=begun,
        verify_ends=np.zeros(8, np.int32), finished=done, background=np.arange(8) % 4 >= 2,
    )  # fmt: skip
    scheduler = Scheduler(runner)
    assert scheduler.queues == [[1, 0], [5]]
    assert scheduler.background_queues == [[2, 3], [6, 7]]


def test_shards_take_up_rows_on_their_own(make_mesh, rollouts):
    """One shard has the long responses: the others continue with what waits for them."""
    max_lens = np.where(np.arange(B) < B // 4, R, 1).astype(np.int32)
    with jax.set_mesh(make_mesh(2, 2, 1)):
        rollout, stats = run_rollout(make_spec(max_rows=16), max_lens=max_lens)
    np.testing.assert_array_equal(rollout.lens, max_lens)
    np.testing.assert_array_equal(
        np.asarray(rollout.tokens.ids)[:, 0], rollouts.endless.tokens.ids[:, 0]
    )
    assert stats.decode_steps == 2 * (R - 1)  # the shard's rows, four after four


@pytest.mark.parametrize(
    ("queue", "most", "begin"),
    [
        ([4, 5, 6, 7, 8, 9, 10, 11], 6, 4),  # one group, not half of the next
        ([6, 7, 8, 9, 10, 11], 5, 2),  # the rest of a group
        ([4, 5, 6, 7, 8], 3, 3),  # none ends: a group is cut
        ([4, 5, 6, 7], 4, 4),
        ([5, 9, 13], 2, 2),
        ([], 0, 0),
    ],
)
def test_groups_begin_whole(queue, most, begin):
    assert whole_groups(queue, most, group_size=4) == begin
