"""Scheduler of one rollout: which rows begin, in which bucket all decode, and for how long.

    waiting rows ──extend──→ slots of the running batch: decode, compact ──→ done
        ↑ prompts; rows that hold tokens; rows of the next step

Nothing that is decided here changes a token of a row. `runner.py` carries the decisions out. Each
shard of the batch has a queue of its own: its rows, which never leave it.
"""

import numpy as np

from specrl_jax.rollout.engine.runner import Requests, Runner
from specrl_jax.rollout.engine.speculation import Speculation, StepPlan
from specrl_jax.rollout.rows import Rows

STEPS_BETWEEN_COUNTS = 32  # at most, where a rollout ends once enough groups are done


class Scheduler:
    """Runs all rows of a rollout to their end."""

    def __init__(self, runner: Runner, speculation: Speculation | None = None):
        self.runner = runner
        self.requests = runner.requests
        self.buckets = runner.buckets
        self.speculation = speculation
        self.waiting = _queues(self.requests, trained=True)
        self.next_step = _queues(self.requests, trained=False)

    def run(self) -> Rows:
        """Return all rows, at their end unless the rollout may end early."""
        runner = self.runner
        while not self._may_end():
            # Rows may be done as they begin: others may take their slots at once.
            if not self._admit():
                if not runner.train.any():
                    break
                self._compact()
                self._decode()
        runner.write_back()
        return runner.all_rows

    def _may_end(self) -> bool:
        """Return whether so much is done that the rest may wait for the next rollout."""
        requests = self.requests
        if requests.allow_unfinished and not any(self.waiting):
            return self.runner.train.sum() <= requests.allow_unfinished
        if not requests.stop_after_groups:
            return False
        groups = self.runner.finished.reshape(-1, requests.group_size).all(axis=1)
        return int(groups.sum()) >= requests.stop_after_groups

    # Rows begin -----------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Let waiting rows begin where enough slots are free; return whether any began.

        Enough is a quarter of a shard's slots, or all that it needs. Rows of the next step begin
        once no other row waits, beside rows to train on.
        """
        runner = self.runner
        queues = self.waiting
        if not any(queues) and runner.train.any():
            queues = self.next_step
        if runner.size < self.buckets.rows[0] or not any(queues):
            return False
        free = runner.size // self.buckets.multiple - runner.unfinished
        waiting = np.array([len(queue) for queue in queues])
        enough = np.minimum(waiting, self.buckets.refill)
        if not np.any((waiting > 0) & (free >= enough)):
            return False
        row_ids = []
        for queue, count in zip(queues, np.minimum(free, waiting).tolist()):
            row_ids.append(np.array(queue[:count], int))
            del queue[:count]
        runner.extend(row_ids)
        return True

    # Rows decode ----------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Move the rows into the smallest bucket that holds them, once none waits."""
        if any(self.waiting) or any(self.next_step):
            return
        # Bucket by bucket, so that there are few programs of it.
        size = self.buckets.rows_for_shards(self.runner.unfinished)
        while size < self.runner.size:
            self.runner.compact(self.buckets.rows_below(self.runner.size))

    def _decode(self) -> None:
        """Decode until rows can begin or be compacted, or the plan is to be made again."""
        runner = self.runner
        widths = self.buckets.widths
        plan = StepPlan(widths[-1], 0, False)
        if self.speculation is not None:
            plan = self.speculation.plan_steps(runner.size, widths)
        bounds = self._bounds()
        if plan.max_steps:
            bounds["max_steps"] = min(plan.max_steps, bounds.get("max_steps", plan.max_steps))
        steps, histogram = runner.decode(runner.stop_condition(**bounds), plan.width)
        if self.speculation is not None:
            self.speculation.record_steps(plan, steps, histogram)

    def _bounds(self) -> dict:
        """Bounds of a stop condition: what to wait for."""
        runner = self.runner
        requests = self.requests
        bounds = {}
        queues = self.waiting if any(self.waiting) else self.next_step
        if any(queues):
            # As many slots are free then as rows begin together; fewer are now (`_admit`).
            waiting = np.array([len(queue) for queue in queues])
            enough = np.minimum(waiting, self.buckets.refill)
            full = runner.size // self.buckets.multiple
            bounds["refill_at"] = np.where(waiting > 0, full - enough, -1)
        else:
            below = self.buckets.rows_below(runner.size)
            bounds["max_unfinished"] = below // self.buckets.multiple
        if requests.allow_unfinished and not any(self.waiting):
            bounds["max_left"] = requests.allow_unfinished
        if requests.stop_after_groups:
            steps = max(runner.spec.response_slots // 8, 1)
            bounds["max_steps"] = min(steps, STEPS_BETWEEN_COUNTS)
        return bounds


def _queues(requests: Requests, *, trained: bool) -> list[list[int]]:
    """Return the rows of each shard that are not done, in the order in which they begin.

    trained: those to train on; else those of the next step.
    """
    group = requests.group_size
    rows = np.arange(len(requests.done))
    first = requests.begin_first
    late = np.zeros(len(rows), bool) if first is None else ~np.repeat(first, group)
    # Drafts of like length are decided together. A group's rows share their prompt.
    longest = np.repeat(requests.draft_ends.reshape(-1, group).max(axis=1), group)
    order = np.lexsort((rows, -longest, late, requests.begun_lens == 0))
    order = order[~requests.done[order] & (requests.trained(order) == trained)]
    return [
        order[order // requests.shard_rows == shard].tolist()
        for shard in range(len(rows) // requests.shard_rows)
    ]
