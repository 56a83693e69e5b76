"""Scheduler of one rollout: which rows begin, in which bucket all decode, and for how long.

    waiting rows ──extend──→ slots of the running batch: decode, compact ──→ done
        ↑ prompts; rows that hold tokens; rows of the next step

No decision of the scheduler changes a token of a row. `runner.py` carries the decisions out. Each
shard of the batch has a queue of its own rows. A row never leaves its shard.
"""

import dataclasses
from typing import Any

import numpy as np

from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.runner import Requests, Runner
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.rows import Rows

STEPS_BETWEEN_COUNTS = 32  # most steps until groups are counted, where enough groups end a rollout


class Scheduler:
    """Scheduler of one rollout's rows."""

    def __init__(self, runner: Runner, speculation: Speculation | None = None):
        self.runner = runner
        self.requests = runner.requests
        self.buckets = runner.buckets
        self.speculation = speculation
        self.train_queues = _queues(self.requests, trained=True)
        self.run_ahead_queues = _queues(self.requests, trained=False)
        # int [shards], slots that cannot be given away between turns; None without an environment.
        self.occupied: np.ndarray | None = None

    def run(self) -> Rows:
        """Return all rows, at their end unless the rollout may end early."""
        runner = self.runner
        while not self._may_end():
            # A row may be done as it begins: another row may take its slot at once.
            if not self._admit():
                if not runner.unfinished_train.any():
                    break
                if not any(self.train_queues) and not any(self.run_ahead_queues):
                    self._compact(runner.unfinished_all)
                self._decode(self._stop_condition())
        runner.write_back()
        return runner.all_rows

    def _may_end(self) -> bool:
        """Return whether enough groups are done: the others may wait for the next rollout."""
        requests = self.requests
        if not requests.stop_after_done:
            return False
        groups = self.runner.finished.reshape(-1, requests.group_size).all(axis=1)
        return int(groups.sum()) >= requests.stop_after_done

    # Turns ----------------------------------------------------------------------------------------

    def run_turns(self, share: float) -> Rows:
        """Return all rows once at most a share of the running rows are within their turn.

        share: [0, 1). Rows whose turn has ended keep their slots until `go_on`.
        """
        runner = self.runner
        if self.occupied is None:
            self.occupied = np.zeros_like(runner.unfinished_all)
        while self._admit():
            pass
        most = int(share * runner.unfinished_train.sum())
        while runner.unfinished_train.sum() > most:
            self._decode(runner.stop_condition(max_left=most))
        runner.write_back()
        return runner.all_rows

    def go_on(
        self, requests: Requests, rows: np.ndarray, starts: np.ndarray, over: np.ndarray
    ) -> None:
        """Let answered rows go on; an answered row whose slot was given away begins again.

        Every other row whose turn has ended waits for its answer, or is over.

        requests: what the rows hold and draft now, as in `Runner.all_rows`. rows: int [k], the
        answered ones. starts: int [k], response position of the first token that has no key in the
        row's slot. over: bool [B], rows that have no more turns.
        """
        runner = self.runner
        self.requests = requests
        runner.renew(requests, over)
        slots = runner.slots_of_rows()
        here = slots[rows] >= 0
        self.occupied = runner.unfinished_all + self._by_shard(rows[here])
        if here.any():
            runner.go_on(rows[here], slots[rows[here]], starts[here])
        for row in rows[~here][::-1].tolist():
            self.train_queues[row // requests.shard_rows].insert(0, row)
        lives = np.flatnonzero(~over)
        if not any(self.train_queues) and np.all(slots[lives] >= 0):
            self._compact(self._by_shard(lives))

    def _by_shard(self, rows: np.ndarray) -> np.ndarray:
        """Count rows int [k] on each shard, int [shards]."""
        return np.bincount(rows // self.requests.shard_rows, minlength=self.buckets.shards)

    # Rows begin -----------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Let waiting rows begin where enough slots are free; return whether any began.

        Enough is a quarter of a shard's slots, or as many as rows wait there. Rows of the next step
        begin once no row to train on waits, but some still run.
        """
        runner = self.runner
        queues = self.train_queues
        if not any(queues) and runner.unfinished_train.any():
            queues = self.run_ahead_queues
        # A compacted batch admits none: it shrinks only when none waits.
        if runner.size < self.buckets.sizes[0] or not any(queues):
            return False
        occupied = runner.unfinished_all if self.occupied is None else self.occupied
        free = runner.size // self.buckets.shards - occupied
        waiting = np.array([len(queue) for queue in queues])
        enough = np.minimum(waiting, self.buckets.refill)
        if not np.any((waiting > 0) & (free >= enough)):
            return False
        row_ids = []
        for queue, count in zip(queues, np.minimum(free, waiting).tolist()):
            row_ids.append(np.array(queue[:count], int))
            del queue[:count]
        runner.admit(row_ids)
        if self.occupied is not None:
            self.occupied = occupied + [len(rows) for rows in row_ids]
        return True

    # Rows decode ----------------------------------------------------------------------------------

    def _compact(self, counts: np.ndarray) -> None:
        """Move the rows into the smallest bucket that holds `counts` int [shards] on the shards."""
        # Bucket by bucket: so `compact` has few programs.
        size = self.buckets.size_for_shards(counts)
        while size < self.runner.size:
            self.runner.compact(self.buckets.size_below(self.runner.size))

    def _decode(self, stop: StopCondition) -> None:
        """Decode until the stop condition holds, or `speculation` plans again."""
        runner = self.runner
        widths = self.buckets.widths
        if self.speculation is None:
            runner.decode(stop, widths[-1])
            return
        plan = self.speculation.plan_steps(runner.size, widths)
        if plan.max_steps:
            max_steps = np.int32(min(plan.max_steps, stop.max_steps))
            stop = dataclasses.replace(stop, max_steps=max_steps)
        steps, histogram = runner.decode(stop, plan.width)
        self.speculation.record_steps(plan, steps, histogram)

    def _stop_condition(self) -> StopCondition:
        """Return the condition under which rows can begin or be compacted."""
        runner = self.runner
        requests = self.requests
        bounds: dict[str, Any] = {}
        queues = self.train_queues if any(self.train_queues) else self.run_ahead_queues
        if any(queues):
            # Stop once `enough` slots are free; otherwise _admit would have begun rows already.
            waiting = np.array([len(queue) for queue in queues])
            enough = np.minimum(waiting, self.buckets.refill)
            full = runner.size // self.buckets.shards
            bounds["refill_at"] = np.where(waiting > 0, full - enough, -1)
        else:
            below = self.buckets.size_below(runner.size)
            bounds["max_unfinished"] = below // self.buckets.shards
        if requests.stop_after_done:
            steps = max(runner.spec.response_slots // 8, 1)
            bounds["max_steps"] = min(steps, STEPS_BETWEEN_COUNTS)
        return runner.stop_condition(**bounds)


def _queues(requests: Requests, *, trained: bool) -> list[list[int]]:
    """Return each shard's rows that are not done, in the order in which they begin.

    trained: True for rows to train on, False for rows of the next step.
    """
    group_size = requests.group_size
    rows = np.arange(len(requests.done))
    first = requests.begin_first
    late = np.zeros(len(rows), bool) if first is None else ~np.repeat(first, group_size)
    # Rows with drafts of like length begin together, and so do a group's rows: they share a prompt.
    longest = np.repeat(requests.draft_ends.reshape(-1, group_size).max(axis=1), group_size)
    order = np.lexsort((rows, -longest, late, requests.partial_lens == 0))
    order = order[~requests.done[order] & (requests.trained(order) == trained)]
    return [
        order[order // requests.shard_rows == shard].tolist()
        for shard in range(len(rows) // requests.shard_rows)
    ]
