"""Scheduler of one rollout: which rows start, in which bucket all decode, and for how long.

    waiting rows ──prefill─→ slots of the running batch: decode, compact ──→ done
        ↑ prompts; rows that have tokens already; background rows

No decision of the scheduler changes a row's tokens. `runner.py` carries the decisions out. Each
shard of the batch has a queue of its own rows. A row never leaves its shard.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.speculation import Speculation, StepPlan
from specrl_jax.rollout.rows import Rows

STEPS_BETWEEN_COUNTS = 32  # most steps between counts of groups, if enough groups end a rollout


class Scheduler:
    """Scheduler of one rollout's rows."""

    def __init__(self, runner: Runner, speculation: Speculation | None = None):
        self.runner = runner
        self.buckets = runner.buckets
        self.speculation = speculation
        self.queues = _queues(runner, background=False)
        self.background_queues = _queues(runner, background=True)

    def run(self) -> Rows:
        """Return all rows, finished unless the rollout may end early."""
        runner = self.runner
        while not self._may_end():
            if self._admit():
                continue  # a row may finish as it starts: another can take its slot right away
            if not runner.unfinished_awaited.any():
                break
            if not any(self.queues) and not any(self.background_queues):
                self._compact(runner.unfinished_all)
            plan, stop = self._plan(self._stop_condition())
            self._record(plan, *runner.decode(stop, plan.width))
        runner.write_back()
        return runner.all_rows

    def _may_end(self) -> bool:
        """Return whether enough groups are done; the others can wait for the next rollout."""
        runner = self.runner
        enough = runner.requests.enough_groups
        if not enough:
            return False
        awaited = (runner.finished & ~runner.background).reshape(-1, runner.spec.group_size)
        return int(awaited.all(axis=1).sum()) >= enough

    # Rows start -----------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Start waiting rows when enough slots are free; return whether any started.

        Enough is a quarter of a shard's slots, or one for each row that waits there. Background
        rows start once no other row waits but some still run.
        """
        runner = self.runner
        queues = self.queues
        if not any(queues) and runner.unfinished_awaited.any():
            queues = self.background_queues
        # A compacted batch admits no rows: it shrinks only when none wait.
        if runner.size < self.buckets.sizes[0] or not any(queues):
            return False
        free = runner.size // self.buckets.shards - self._occupied()
        waiting, enough = self._enough_slots(queues)
        if not np.any((waiting > 0) & (free >= enough)):
            return False
        row_ids = []
        for queue, most in zip(queues, np.minimum(free, waiting).tolist()):
            count = most
            if self.buckets.groups_start_whole:
                count = whole_groups(queue, most, runner.spec.group_size)
            row_ids.append(np.array(queue[:count], int))
            del queue[:count]
        runner.admit(row_ids)
        return True

    def _enough_slots(self, queues: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return how many rows wait on each shard, and how many free slots they need to start."""
        waiting = np.array([len(queue) for queue in queues])
        return waiting, np.minimum(waiting, self.buckets.refill)

    def _occupied(self) -> np.ndarray:
        """Return how many slots of each shard are taken, int [shards].

        A subclass overrides this if rows wait for an environment.
        """
        return self.runner.unfinished_all

    # Rows decode ----------------------------------------------------------------------------------

    def _compact(self, counts: np.ndarray) -> None:
        """Move the rows into the smallest bucket that holds `counts` int [shards] on the shards."""
        # Bucket by bucket, which keeps the programs of `compact` few.
        size = self.buckets.size_for_shards(counts)
        while size < self.runner.size:
            self.runner.compact(self.buckets.size_below(self.runner.size))

    def _plan(self, stop: StopCondition) -> tuple[StepPlan, StopCondition]:
        """Plan decode steps until the stop condition holds or `speculation` plans again."""
        widths = self.buckets.widths
        if self.speculation is None:
            return StepPlan(widths[-1], max_steps=0, probe=False), stop
        plan = self.speculation.plan_steps(self.runner.size, widths)
        if plan.max_steps:
            max_steps = np.int32(min(plan.max_steps, stop.max_steps))
            stop = dataclasses.replace(stop, max_steps=max_steps)
        return plan, stop

    def _record(self, plan: StepPlan, steps: int, histogram: Sequence[int]) -> None:
        """Record the decode steps that were run; histogram: from `Runner.decode`."""
        if self.speculation is not None:
            self.speculation.record_steps(plan, steps, histogram)

    def _stop_condition(self) -> StopCondition:
        """Return the condition under which rows can start or be compacted."""
        runner = self.runner
        bounds: dict[str, Any] = {}
        queues = self.queues if any(self.queues) else self.background_queues
        if any(queues):
            # Stop once enough slots are free; otherwise _admit would have started rows already.
            waiting, enough = self._enough_slots(queues)
            full = runner.size // self.buckets.shards
            bounds["refill_at"] = np.where(waiting > 0, full - enough, -1)
        else:
            below = self.buckets.size_below(runner.size)
            bounds["max_unfinished"] = below // self.buckets.shards
        if runner.requests.enough_groups:
            steps = max(runner.spec.response_slots // 8, 1)
            bounds["max_steps"] = min(steps, STEPS_BETWEEN_COUNTS)
        return StopCondition.of(**bounds)


def whole_groups(queue: Sequence[int], most: int, group_size: int) -> int:
    """Return how many of a queue's first `most` rows to start without splitting a group.

    Rows of a group that start later would compute its prompt again. A group is split if no other
    group ends among these rows.
    """
    for count in range(most, 0, -1):
        last = count == len(queue)
        if last or queue[count - 1] // group_size != queue[count] // group_size:
            return count
    return most


def _queues(runner: Runner, *, background: bool) -> list[list[int]]:
    """Return each shard's unfinished rows, in the order in which they start.

    background: True for background rows, False for the others.
    """
    group_size = runner.spec.group_size
    rows = np.arange(len(runner.lens))
    first = runner.requests.first
    late = np.zeros(len(rows), bool) if first is None else ~np.repeat(first, group_size)
    # Rows with drafts of similar length start together, and so do a group's, which share a prompt.
    longest = np.repeat(runner.verify_ends.reshape(-1, group_size).max(axis=1), group_size)
    order = np.lexsort((rows, -longest, late, runner.lens == 0))
    order = order[~runner.finished[order] & (runner.background[order] == background)]
    shard = order // runner.shard_rows
    return [order[shard == number].tolist() for number in range(runner.buckets.shards)]
