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
        # int [shards], slots of rows that have turns to come; None: a row has one.
        self.taken: np.ndarray | None = None

    def run(self) -> Rows:
        """Return all rows, at their end unless the rollout may end early."""
        runner = self.runner
        while not self._may_end():
            # Rows may be done as they begin: others may take their slots at once.
            if not self._admit():
                if not runner.train.any():
                    break
                if not any(self.waiting) and not any(self.next_step):
                    self._compact(runner.unfinished)
                self._decode(self._bounds())
        runner.write_back()
        return runner.all_rows

    def _may_end(self) -> bool:
        """Return whether so much is done that the rest may wait for the next rollout."""
        requests = self.requests
        if not requests.stop_after_groups:
            return False
        groups = self.runner.finished.reshape(-1, requests.group_size).all(axis=1)
        return int(groups.sum()) >= requests.stop_after_groups

    # Turns ----------------------------------------------------------------------------------------

    def run_turns(self, share: float) -> Rows:
        """Return all rows once no more than a share of those that run are within their turn.

        share: [0, 1). Rows whose turn has ended keep their slots until `go_on`.
        """
        runner = self.runner
        if self.taken is None:
            self.taken = np.zeros_like(runner.unfinished)
        while self._admit():
            pass
        most = int(share * runner.train.sum())
        while runner.train.sum() > most:
            self._decode({"max_left": most})
        runner.write_back()
        return runner.all_rows

    def go_on(
        self, requests: Requests, rows: np.ndarray, starts: np.ndarray, over: np.ndarray
    ) -> None:
        """Let rows go on that have been answered; a row whose slot was given away begins again.

        All others whose turn has ended wait for their answer, or are over.

        requests: with what the rows hold, as `Runner.all_rows` has it, and their drafts. rows: int
        [k]. starts: int [k], response position of the first token whose key is not in the slot.
        over: bool [B], rows that have no more turns.
        """
        runner = self.runner
        self.requests = requests
        runner.renew(requests, over)
        slots = runner.slots_of_rows()
        here = slots[rows] >= 0
        self.taken = runner.unfinished + self._by_shard(rows[here])
        if here.any():
            runner.feed(rows[here], slots[rows[here]], starts[here])
        for row in rows[~here][::-1].tolist():
            self.waiting[row // requests.shard_rows].insert(0, row)
        lives = np.flatnonzero(~over)
        if not any(self.waiting) and np.all(slots[lives] >= 0):
            self._compact(self._by_shard(lives))

    def _by_shard(self, rows: np.ndarray) -> np.ndarray:
        """Count rows int [k] on each shard, int [shards]."""
        return np.bincount(rows // self.requests.shard_rows, minlength=self.buckets.multiple)

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
        taken = runner.unfinished if self.taken is None else self.taken
        free = runner.size // self.buckets.multiple - taken
        waiting = np.array([len(queue) for queue in queues])
        enough = np.minimum(waiting, self.buckets.refill)
        if not np.any((waiting > 0) & (free >= enough)):
            return False
        row_ids = []
        for queue, count in zip(queues, np.minimum(free, waiting).tolist()):
            row_ids.append(np.array(queue[:count], int))
            del queue[:count]
        runner.extend(row_ids)
        if self.taken is not None:
            self.taken = taken + [len(rows) for rows in row_ids]
        return True

    # Rows decode ----------------------------------------------------------------------------------

    def _compact(self, counts: np.ndarray) -> None:
        """Move the rows into the smallest bucket that holds `counts` int [shards] on the shards."""
        # Bucket by bucket, so that there are few programs of it.
        size = self.buckets.rows_for_shards(counts)
        while size < self.runner.size:
            self.runner.compact(self.buckets.rows_below(self.runner.size))

    def _decode(self, bounds: dict) -> None:
        """Decode until a bound of the stop condition is met, or the plan is to be made again."""
        runner = self.runner
        widths = self.buckets.widths
        plan = StepPlan(widths[-1], 0, False)
        if self.speculation is not None:
            plan = self.speculation.plan_steps(runner.size, widths)
        if plan.max_steps:
            bounds["max_steps"] = min(plan.max_steps, bounds.get("max_steps", plan.max_steps))
        steps, histogram = runner.decode(runner.stop_condition(**bounds), plan.width)
        if self.speculation is not None:
            self.speculation.record_steps(plan, steps, histogram)

    def _bounds(self) -> dict:
        """Bounds of a stop condition: until rows can begin, or be compacted."""
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
