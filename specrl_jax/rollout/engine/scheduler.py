"""The scheduler of one rollout: which rows run, in which bucket, and for how long.

    waiting groups ── prefill, verify drafts ──→ insert ──→ running rows: decode, compact ──→ done
    resumed rows ──── prefill with their tokens ───↑

Nothing that is decided here changes a token of a row. `runner.py` carries the decisions out.
Each shard of the batch has queues of its own: its rows, which never leave it.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from specrl_jax.rollout.adaptive.speculation import Speculation, VerifyPlan
from specrl_jax.rollout.engine.decode import StepCounts
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.draft_tries import DraftTries, pack_drafts, saves_work
from specrl_jax.rollout.engine.queues import Queues, ShardQueues
from specrl_jax.rollout.engine.runner import FOREVER, DecodeBatch, ModelRunner

STEPS_BETWEEN_INSERTS = 64  # of rows of the next step into idle places
STEPS_BETWEEN_COUNTS = 32  # at most, of the groups that are done, where enough of them end it all


class Admitted(NamedTuple):
    """Waiting rows that begin together."""

    index: np.ndarray  # int [size], -1 for padding
    resumed: bool  # whether they hold tokens


@dataclasses.dataclass
class Starting:
    """Rows that begin, beside those that are running."""

    batch: DecodeBatch
    drafts_left: np.ndarray  # int [n], draft tokens of each real row that are not verified
    plan: VerifyPlan | None  # the first verification pass


class Scheduler:
    """Runs all rows of a rollout to their end."""

    def __init__(self, runner: ModelRunner, speculation: Speculation | None = None):
        self.runner = runner
        self.requests = runner.requests
        self.speculation = speculation
        self.program = runner.program
        self.buckets = runner.buckets
        self.shards = self.buckets.multiple
        self.rule = self.program.accept
        # A rule that needs the whole draft has no choice of a pass.
        self.chooses_verification = speculation is not None and not self.rule.needs_distribution
        self.queues = Queues(self.requests)

    @property
    def running(self) -> DecodeBatch | None:
        return self.runner.running

    def run(self) -> DecodeState:
        """All rows, at their end unless the rollout may end early."""
        while not self._may_end():
            if self.running is not None and not self.running.unfinished:
                self.runner.write_back_all()
            while (admitted := self._admit()) is not None:
                if admitted.resumed:
                    starting = self._re_prefill(admitted.index)
                else:
                    starting = self._prefill(admitted.index)
                self._verify(starting)
                self.runner.insert(starting.batch)
                del starting  # and with it a cache, before others begin
            if self.running is None:
                break
            self._decode()
            if not self.running.train_rows and not self.queues.is_waiting():
                break
        if self.running is not None:
            self.runner.write_back_all()
        return self.runner.all_rows

    def _may_end(self) -> bool:
        """Return whether so much is done that the rest may wait for the next rollout."""
        requests = self.requests
        if requests.allow_unfinished and self.running is not None and not self.queues.is_waiting():
            return self.running.train_rows <= requests.allow_unfinished
        if not requests.stop_after_groups:
            return False
        groups = self.runner.finished.reshape(-1, self.program.group_size).all(axis=1)
        return int(groups.sum()) >= requests.stop_after_groups

    # Rows begin ------------------------------------------------------------------------------

    def _admit(self) -> Admitted | None:
        """Waiting rows that begin now; None where there is no room for any."""
        if not self.queues.is_waiting():
            return self._admit_next_step()
        resumed = any(self.queues.resumed)
        queues = self.queues.resumed if resumed else self.queues.waiting
        size, counts = self._num_admitted(queues, 1 if resumed else self.program.group_size)
        if not size:
            return None
        return Admitted(self.queues.pop(queues, counts, size), resumed)

    def _num_admitted(self, queues: ShardQueues, unit: int) -> tuple[int, np.ndarray]:
        """Rows of the bucket in which rows of `queues` begin, 0 for none, and how many begin on
        each shard, in multiples of `unit`."""
        most = self.buckets.rows[0]
        counts = unit * np.array([len(queue) for queue in queues])
        free = np.full(self.shards, most // self.shards)
        if self.running is not None:
            free -= self.running.counts.unfinished
        # Padding is gone once rows are inserted.
        all_fit = np.all(counts <= free)
        # A shard that could begin its rows alone; each asks for a bucket, the fullest gets its own.
        asked = np.array([
            n and self.buckets.admission(n * self.shards, most if all_fit else m)
            for n, m in zip(counts.tolist(), (free * self.shards).tolist())
        ])  # fmt: skip
        enough = np.minimum(counts * self.shards, self.buckets.refill)
        if self.running is not None and not np.any((counts > 0) & (asked >= enough)):
            return 0, counts
        size = int(asked.max())
        return size, np.minimum(np.minimum(counts, size // self.shards), free) // unit * unit

    def _admit_next_step(self) -> Admitted | None:
        """Groups of the next step that begin in places that would be idle."""
        if not any(self.queues.next_step) or self.running is None:
            return None
        group = self.program.group_size
        running = self.running
        idle = running.size // self.shards - running.counts.unfinished
        waiting = [len(queue) for queue in self.queues.next_step]
        most = self.buckets.admissions[0] // self.shards // group
        counts = np.minimum(np.minimum(idle // group, waiting), most) * group
        rows = int(counts.max()) * self.shards
        if rows < max(running.size // 4, 1):  # not worth a prefill and a move
            return None
        size = self.buckets.admission(rows, self.buckets.admissions[0])
        return Admitted(self.queues.pop(self.queues.next_step, counts, size), resumed=False)

    def _prefill(self, index: np.ndarray) -> Starting:
        """Rows that hold no tokens: their prompts, or their prompts and drafts in one pass. index:
        int [size], -1 for padding."""
        real = index >= 0
        drafts = np.where(real, self.requests.draft_lens[index], 0)
        tries = self._pack_drafts(index, drafts)
        plan = self._plan_verification(drafts[real], len(index), tries=tries)
        if plan and plan.sequences:
            batch, counted = self.runner.verify_trie(index, tries, plan.verify_width)
            self._record(plan, counted)
            return Starting(batch, drafts[real], None)
        # Without a pass, the slots that rows will share, so that they need not move.
        longest = self.running.longest if self.running else 0
        slots = plan.slots if plan else self.buckets.slots_for(longest + 1)
        batch = self.runner.prefill(index, slots, with_drafts=bool(drafts.any()))
        return Starting(batch, drafts[real], plan)

    def _pack_drafts(self, index: np.ndarray, drafts: np.ndarray) -> DraftTries | None:
        """Prompts and drafts of these rows packed, where they can be verified whole in one pass and
        that computes fewer tokens than a prefill and a pass over the rows."""
        buckets = self.buckets
        longest = int(drafts.max())
        group = self.program.group_size
        size = len(index)
        width = buckets.verify_width_for(longest)
        places = np.flatnonzero(index >= 0)
        if not 0 < longest <= width:
            return None
        index = index[places]
        lens = drafts[places]
        prompts = self.requests.prompts
        tokens = self.runner.draft_tokens[index, :width]
        of_row = prompts.tokens[index // group], prompts.lens[index // group]
        tries = pack_drafts(*of_row, tokens, lens, size, places)
        saves = saves_work(tries.shape, size, width, group, buckets.prompt_slots)
        return tries if saves else None

    def _re_prefill(self, index: np.ndarray) -> Starting:
        """Rows that hold tokens. index: int [size], -1 for padding."""
        rows = index[index >= 0]
        requests = self.requests
        held = requests.held_lens[rows]
        draft_lens = requests.draft_lens[rows]
        drafts_left = np.maximum(draft_lens - held, 0)
        longest = int(held.max())
        width = self.buckets.response_for(longest)
        slots = self.buckets.slots(width)
        begun = self.buckets.prompt_slots + width
        widest = self.buckets.verify_width_for(int(drafts_left.max()))
        plan = self._plan_verification(drafts_left, len(index), begun + widest, longest)
        if plan:
            slots = max(slots, begun + plan.verify_width)
        with_drafts = bool(drafts_left.any())
        batch = self.runner.re_prefill(index, slots, width, with_drafts=with_drafts)
        return Starting(batch, drafts_left, plan)

    # Verification ----------------------------------------------------------------------------

    def _widths_to_verify(self, longest: int) -> list[int]:
        """Ascending widths of a pass over drafts of at most `longest` tokens: up to the widest that
        is needed. Of a rule that needs whole drafts the widest alone."""
        widest = self.buckets.verify_width_for(longest)
        if self.rule.needs_distribution:
            return [widest]
        return [width for width in self.buckets.verify if width <= widest]

    def _plan_verification(
        self,
        drafts_left: np.ndarray,
        size: int,
        slots: int = 0,
        held: int = 0,
        tries: DraftTries | None = None,
    ) -> VerifyPlan | None:
        """The next pass over rows with `drafts_left` [n] draft tokens; None where there is no draft
        or no room, or where drafts are better left to decode steps. slots: of the rows' cache,
        where there is one. held: tokens of the longest row. tries: of rows that hold nothing."""
        if not drafts_left.any():
            return None
        longest = int(drafts_left.max())
        needed = self.buckets.prompt_slots + held
        widths = [w for w in self._widths_to_verify(longest) if not slots or needed + w <= slots]
        if not widths:
            return None
        running = self.running
        buckets = self.buckets
        others = int(self.queues.waiting_rows().sum())
        plans = [
            VerifyPlan(
                draft_lens=tuple(drafts_left[drafts_left > 0].tolist()),
                rows=size,
                slots=slots or buckets.verify_slots(width, longest),
                verify_width=width,
                buckets=buckets,
                held=held,
                others=others + (running.unfinished if running else 0),
                others_held=running.longest if running else 0,
            )
            for width in widths
        ]
        if tries and plans[-1].verify_width >= longest:
            plans.append(dataclasses.replace(plans[-1], sequences=len(tries.tokens)))
        if self.chooses_verification:
            return self.speculation.choose_verification(plans)
        return plans[-1]

    def _verify(self, starting: Starting) -> None:
        """Verification passes over the rows that start, as many as pay. Drafts that are left then
        are for decode steps to verify."""
        plan = starting.plan
        if plan:
            self._split(starting)
        while plan is not None and starting.batch.verifying:
            stop = self.runner.stop_condition(max_steps=1)
            counts = self.runner.run(starting.batch, stop, plan.verify_width, verify=True)
            rows, slots = starting.batch.shape
            self._record(dataclasses.replace(plan, rows=rows, slots=slots), counts)
            if verifying := starting.batch.verifying:
                self._split(starting)
                # Rows that rejected nothing so far all have as many tokens less to verify.
                drafts_left = starting.drafts_left
                done = drafts_left.max() - starting.batch.longest_draft
                drafts_left = np.maximum(np.sort(drafts_left)[-verifying:] - done, 1)
                shape = starting.batch.shape
                held = starting.batch.longest
                plan = self._plan_verification(drafts_left, *shape, held)
        if not starting.batch.verifying:
            starting.batch.drop_drafts()

    def _record(self, plan: VerifyPlan, counts: StepCounts) -> None:
        if self.chooses_verification:
            numbers = int(counts.accepted), int(counts.verified)
            predicted = self.speculation.record_verification(plan, *numbers)
            self.runner.stats.predicted_verify_seconds += predicted

    def _split(self, starting: Starting) -> None:
        """Keep only the rows that are verifying, where they fit a smaller bucket."""
        size = self.buckets.rows_for_shards(starting.batch.counts.verifying)
        if size < starting.batch.size:
            starting.batch = self.runner.split(starting.batch, size)

    # Decoding --------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Compact the running rows into the bucket that fits, and decode for a while."""
        running = self.running
        if running.rows.draft is not None and not running.verifying:
            running.drop_drafts()
        response = self.buckets.response_for(running.longest + 1)
        running = self.runner.resize(
            self.buckets.rows_for_shards(running.counts.unfinished), self.buckets.slots(response)
        )
        pause = {"max_len": response, **self._when_to_pause()}
        if self.speculation is None:
            stop = self.runner.stop_condition(**pause)
            self.runner.run(running, stop, self.buckets.widths[-1])
            return
        plan = self.speculation.plan_steps(running.size, running.slots, self.buckets.widths)
        pause["max_steps"] = min(pause["max_steps"], plan.max_steps or FOREVER)
        stop = self.runner.stop_condition(**pause)
        counts = self.runner.run(running, stop, plan.width)
        numbers = int(counts.accepted), int(counts.verified)
        self.runner.stats.predicted_seconds += self.speculation.record_steps(
            plan, int(counts.steps), counts.matched.tolist(), *numbers
        )

    def _when_to_pause(self) -> dict[str, Any]:
        """Arguments of a stop condition: active train rows, and steps, at which decoding pauses."""
        running = self.running
        requests = self.requests
        if self.queues.is_waiting():
            # As many places are free then as rows begin together; at least one more than now. So on
            # any shard where rows wait.
            full = self.buckets.rows[0] - self.buckets.refill
            train_rows = running.counts.train
            refill = np.clip(train_rows - 1, 0, full // self.shards)
            refill = np.where((self.queues.waiting_rows() > 0) & (train_rows > 0), refill, -1)
            pause = {"max_active": 0, "refill_at": refill}
        else:
            pause = {"max_active": self.buckets.rows_below(running.size) // self.shards}
            pause["max_left"] = requests.allow_unfinished
        if requests.stop_after_groups:
            steps = max(self.program.response_slots // 8, 1)
            return pause | {"max_steps": min(steps, STEPS_BETWEEN_COUNTS)}
        if running.train_rows < running.unfinished:  # the next step's rows keep the bucket as it is
            return {"max_active": 0, "max_steps": STEPS_BETWEEN_INSERTS}
        insert = any(self.queues.next_step) and not self.queues.is_waiting()
        return pause | {"max_steps": STEPS_BETWEEN_INSERTS if insert else FOREVER}
