"""The scheduler of one rollout: which rows run, in which bucket, and for how long.

    waiting groups ── prefill, verify drafts ──→ insert ──→ running rows: decode, compact ──→ done
          ↑                                                      │
          └─ preempted, resumed: prefilled with their tokens ←───┘

Nothing that is decided here changes a token of a row. `runner.py` carries the decisions out.
Each shard of the batch has queues of its own: its rows, which never leave it.
"""

import collections
import dataclasses
import itertools
from typing import Any

import numpy as np

from specrl_jax import hosts
from specrl_jax.rollout.adaptive.speculation import Speculation, VerifyPlan
from specrl_jax.rollout.engine.decode import StepCounts
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.draft_tries import DraftTries, pack_drafts, saves_work
from specrl_jax.rollout.engine.queues import HeldRow, Queues
from specrl_jax.rollout.engine.runner import FOREVER, DecodeBatch, ModelRunner

STEPS_BETWEEN_INSERTS = 64  # of rows of the next step into idle places
STEPS_BETWEEN_COUNTS = 32  # at most, of the groups that are done, where enough of them end it all


@dataclasses.dataclass(frozen=True)
class Admitted:
    """Waiting rows that begin together."""

    index: np.ndarray  # int [size], -1 for padding
    longest: int | None = None  # tokens of the longest; None: the rows hold none
    resumed: bool = False  # whether rows that hold tokens may have drafts left to verify


@dataclasses.dataclass
class Starting:
    """Rows that begin, beside those that are running."""

    batch: DecodeBatch
    drafts_left: np.ndarray  # int [n], draft tokens of each real row that are not verified
    plan: VerifyPlan | None  # the first verification pass


class Scheduler:
    """Runs all rows of a rollout to their end."""

    def __init__(self, runner: ModelRunner, speculation: Speculation | None = None):
        self.runner, self.requests, self.speculation = runner, runner.requests, speculation
        self.program, self.budget = runner.program, runner.budget
        self.buckets = self.budget.buckets
        self.shards = self.buckets.multiple
        self.rule = self.program.accept
        # A rule that needs the whole draft has no choice of a pass.
        self.chooses_verification = speculation is not None and not self.rule.needs_distribution
        self.budget.check()
        self.queues = Queues(self.requests)

    @property
    def running(self) -> DecodeBatch | None:
        return self.runner.running

    def run(self) -> DecodeState:
        """All rows, at their end unless the rollout may end early."""
        while not self._may_end():
            self._make_room()
            while admitted := self._admit():
                holds_none = admitted.longest is None
                starting = (self._prefill if holds_none else self._re_prefill)(admitted)
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
        """Whether so much is done that the rest may wait for the next rollout."""
        requests = self.requests
        if requests.allow_unfinished and self.running is not None and not self.queues.is_waiting():
            return self.running.train_rows <= requests.allow_unfinished
        if not requests.stop_after_groups:
            return False
        groups = self.runner.finished.reshape(-1, self.program.group_size).all(axis=1)
        return int(groups.sum()) >= requests.stop_after_groups

    # Rows begin ------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Compact what is running, for rows that begin."""
        if self.running is None:
            return
        if not self.running.unfinished:
            self.runner.write_back_all()
        elif self.budget.cache_bytes and self.queues.is_waiting():
            size = self.buckets.rows_for_shards(self.running.counts.unfinished)
            self.runner.resize(size, self.running.slots)

    def _admit(self) -> Admitted | None:
        """Waiting rows that begin now; None where there is no room for any."""
        if not self.queues.is_waiting():
            return self._admit_next_step()
        resumed, waiting = any(self.queues.resumed), any(self.queues.waiting)
        held_rows = self.queues.resumed if resumed or waiting else self.queues.preempted
        size, counts = self._num_admitted(held_rows)
        if not size:
            return None
        if not resumed and waiting:
            groups = counts // self.program.group_size
            return self._admit_groups(self.queues.waiting, groups, size)
        chosen = []
        for queue, count in zip(held_rows, counts.tolist()):
            if not resumed:
                queue.sort()
            chosen.append(queue[:count])
            del queue[:count]
        places = self.queues.places([[row for _, row in rows] for rows in chosen], size)
        return Admitted(places, max(n for n, _ in itertools.chain(*chosen)), resumed)

    def _admit_groups(
        self, queues: list[collections.deque[int]], counts: np.ndarray, size: int
    ) -> Admitted:
        """The first `counts` [shards] groups of queues, in a bucket of `size` rows."""
        return Admitted(self.queues.places(self.queues.pop_groups(queues, counts), size))

    def _num_admitted(self, held_rows: list[list[HeldRow]]) -> tuple[int, np.ndarray]:
        """Rows of the bucket in which rows begin, 0 for none, and how many begin on each shard:
        `held_rows`, else waiting groups."""
        running, group = self._unfinished(), self.program.group_size
        held = [n for n, _ in itertools.chain(*held_rows)] or [self._tokens_at_once()]
        longest = max(*held, self.running.longest if self.running else 0)
        # As where rows are inserted: rows that filled a cache come back to the next longer one.
        capacity = self.budget.capacity(self.buckets.response_for(longest + 1))
        counts = np.array([len(rows) for rows in held_rows])
        unit = 1 if counts.any() else group
        counts = counts if counts.any() else group * np.array([len(x) for x in self.queues.waiting])
        free = np.maximum(capacity // self.shards - running, 0)
        # Padding is gone once rows are inserted: only a bound on bytes counts it.
        ignore_padding = np.all(counts <= free) and not self.budget.cache_bytes
        # A shard that could begin its rows alone; each asks for a bucket, the fullest gets its own.
        asked = np.array([
            n and self.buckets.admission(n * self.shards, capacity if ignore_padding else m)
            for n, m in zip(counts.tolist(), (free * self.shards).tolist())
        ])  # fmt: skip
        size, nothing = int(asked.max()), (0, counts)
        enough = np.minimum(counts * self.shards, self.budget.refill(capacity))
        if running.any() and not np.any((counts > 0) & (asked >= enough)):
            return nothing
        begin = np.minimum(np.minimum(counts, size // self.shards), free) // unit * unit
        if size and running.any() and self._exceeds_budget(size, begin, longest):
            return nothing
        return size, begin

    def _unfinished(self) -> np.ndarray:
        """int [shards], running rows that are not done."""
        return self.running.counts.unfinished if self.running else np.zeros(self.shards, int)

    def _tokens_at_once(self) -> int:
        """Tokens for which waiting groups need a cache at once: an accepted draft, or the pass over
        a draft that is verified whole."""
        group = self.program.group_size
        groups = list(itertools.chain(*self.queues.waiting))
        longest = int(self.requests.draft_lens.reshape(-1, group)[groups].max())
        whole = self.rule.needs_distribution and longest
        return self.buckets.verify_width_for(longest) if whole else longest

    def _admit_next_step(self) -> Admitted | None:
        """Groups of the next step that begin in places that would be idle."""
        if not any(self.queues.next_step) or self.running is None:
            return None
        group, running = self.program.group_size, self.running
        capacity = self.budget.capacity(self.buckets.response_for(running.longest + 1))
        idle = min(running.size, capacity) // self.shards - running.counts.unfinished
        waiting = [len(queue) for queue in self.queues.next_step]
        most = self.buckets.admissions[0] // self.shards // group
        counts = np.minimum(np.minimum(idle // group, waiting), most)
        rows = int(counts.max()) * group * self.shards
        if rows < max(running.size // 4, 1):  # not worth a prefill and a move
            return None
        counts = np.maximum(counts, 0)
        size = self.buckets.admission(rows, self.buckets.admissions[0])
        if self._exceeds_budget(size, counts * group, running.longest):
            return None
        return self._admit_groups(self.queues.next_step, counts, size)

    def _exceeds_budget(self, size: int, counts: np.ndarray, longest: int) -> bool:
        """Whether `counts` [shards] rows of up to `longest` tokens, begun in a bucket of `size`,
        and the running rows would take too many bytes."""
        joined = self.runner.inserted_shape(counts, longest)
        longest_draft = int(self.requests.draft_lens.max())
        widths = self._widths_to_verify(longest_draft) if longest_draft else []
        slots = max([joined[1], *(self.buckets.verify_slots(w, longest_draft) for w in widths)])
        return not self.budget.holds((size, slots), *{*self.runner.running_shape(), joined})

    def _prefill(self, admitted: Admitted) -> Starting:
        """Rows that hold no tokens: their prompts, or their prompts and drafts in one pass."""
        index, real = admitted.index, admitted.index >= 0
        drafts = np.where(real, self.requests.draft_lens[index], 0)
        tries = self._pack_drafts(index, drafts)
        plan = self._plan_verification(drafts[real], len(index), tries=tries)
        if plan and plan.sequences:
            batch, counted = self.runner.verify_trie(index, tries, plan.verify_width)
            self._record(plan, counted)
            return Starting(batch, drafts[real], None)
        # Without a pass, the slots that rows will share, so that they need not move.
        slots = plan.slots if plan else self.runner.inserted_shape(np.zeros(1, int), 0)[1]
        batch = self.runner.prefill(index, slots, with_drafts=bool(drafts.any()))
        return Starting(batch, drafts[real], plan)

    def _pack_drafts(self, index: np.ndarray, drafts: np.ndarray) -> DraftTries | None:
        """Prompts and drafts of these rows packed, where they can be verified whole in one pass and
        that computes fewer tokens than a prefill and a pass over the rows."""
        buckets, longest, group = self.buckets, int(drafts.max()), self.program.group_size
        size, width = len(index), buckets.verify_width_for(longest)
        places = np.flatnonzero(index >= 0)
        if not 0 < longest <= width:
            return None
        index, lens = index[places], drafts[places]
        prompts, tokens = self.requests.prompts, self.runner.draft_tokens[index, :width]
        of_row = prompts.tokens[index // group], prompts.lens[index // group]
        tries = pack_drafts(*of_row, tokens, lens, size, places)
        shapes = (tries.shape, (size, tries.nodes.shape[1]), *self.runner.running_shape())
        fits = self.budget.holds(*shapes)
        saves = saves_work(tries.shape, size, width, group, buckets.prompt_slots)
        return tries if fits and saves else None

    def _re_prefill(self, admitted: Admitted) -> Starting:
        """Rows that hold tokens."""
        longest = admitted.longest
        index = admitted.index[admitted.index >= 0]
        width = self.buckets.response_for(longest)
        slots, plan, drafts_left = self.buckets.slots(width), None, np.zeros(len(index), np.int32)
        begun, size = self.buckets.prompt_slots + width, len(admitted.index)
        if admitted.resumed:
            draft_lens, held_lens = self.requests.draft_lens, self.requests.held_lens
            drafts_left = np.maximum(draft_lens[index] - held_lens[index], 0)
            widest = self.buckets.verify_width_for(int(drafts_left.max()))
            plan = self._plan_verification(drafts_left, size, begun + widest, longest)
        if plan and not self.budget.verifies(begun + plan.verify_width, slots):
            plan = None
        if plan:
            slots = max(slots, begun + plan.verify_width)
        with_drafts = self.runner.drafts.previous is not None
        batch = self.runner.re_prefill(admitted.index, slots, width, with_drafts=with_drafts)
        return Starting(batch, drafts_left, plan)

    # Verification ----------------------------------------------------------------------------

    def _widths_to_verify(self, longest: int) -> list[int]:
        """Ascending widths of a pass over drafts of at most `longest` tokens: up to the widest that
        is needed, as far as there is room. Of a rule that needs whole drafts the widest alone:
        `_tokens_at_once` has seen to its room."""
        widest = self.buckets.verify_width_for(longest)
        if self.rule.needs_distribution:
            return [widest]
        shared, slots = self.buckets.slots_for(longest + 1), self.buckets.verify_slots
        widths = [width for width in self.buckets.verify if width <= widest]
        return [width for width in widths if self.budget.verifies(slots(width, longest), shared)]

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
        running, buckets = self.running, self.buckets
        others = sum(map(len, self.queues.waiting)) * self.program.group_size
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
                capacity=self.budget.capacity(self.program.response_slots),
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
                shape, held = starting.batch.shape, starting.batch.longest
                plan = self._plan_verification(drafts_left, *shape, held)
        if not starting.batch.verifying:
            starting.batch.drop_drafts()

    def _record(self, plan: VerifyPlan, counts: StepCounts) -> None:
        if self.chooses_verification:
            numbers = int(counts.accepted), int(counts.verified)
            predicted = self.speculation.record_verification(plan, *numbers)
            self.runner.stats.predicted_verify_seconds += predicted

    def _split(self, starting: Starting) -> None:
        """Keep only the rows that are verifying, where they fit a smaller bucket and there is room
        for both and for the batch into which the others are inserted."""
        batch, counts = starting.batch, starting.batch.counts
        size = self.buckets.rows_for_shards(counts.verifying)
        if size >= batch.size:
            return
        joined = self.runner.inserted_shape(counts.active - counts.verifying, batch.longest)
        shapes = (batch.shape, (size, batch.slots), *self.runner.running_shape(), joined)
        if self.budget.holds(*shapes):
            starting.batch = self.runner.split(batch, size)

    # Decoding --------------------------------------------------------------------------------

    def _decode(self) -> None:
        """Compact the running rows into the bucket that fits, and decode for a while."""
        capacity = self.budget.capacity(self.buckets.response_for(self.running.longest + 1))
        if self._should_preempt(capacity):
            self._preempt(capacity)
            if not self.running.unfinished:
                return
        running = self.running
        if running.rows.draft is not None and not running.verifying:
            running.drop_drafts()
        response = self.buckets.response_for(running.longest + 1)
        running = self.runner.resize(
            self.buckets.rows_for_shards(running.counts.unfinished), self.buckets.slots(response)
        )
        pause = {"max_len": response, **self._when_to_pause(capacity)}
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

    def _when_to_pause(self, capacity: int) -> dict[str, Any]:
        """Arguments of a stop condition: active train rows, and steps, at which decoding pauses."""
        running, requests = self.running, self.requests
        if self.queues.is_waiting():
            # As many places are free then as rows begin together; at least one more than now. So on
            # any shard where rows wait.
            full, train_rows = capacity - self.budget.refill(capacity), running.counts.train
            refill = np.clip(train_rows - 1, 0, max(full // self.shards, 0))
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

    # Preemption ------------------------------------------------------------------------------

    def _should_preempt(self, capacity: int) -> bool:
        if not self.budget.cache_bytes:
            return False
        most = int(self.running.counts.unfinished.max()) * self.shards
        return most > capacity or self._limited_rows_block_waiting()

    def _limited_rows_block_waiting(self) -> bool:
        """Whether rows at the cache limit wait for groups that have yet to begin in a short cache.
        Not where the first groups to be done end the rollout: long rows would wait for ever."""
        limited = self.running.counts.at_cache_limit.any() and any(self.queues.waiting)
        return bool(limited and not self.requests.stop_after_groups)

    def _preempt(self, capacity: int) -> None:
        """Rows give up their cache: those at the cache limit where groups are waiting; else rows of
        the next step, which are over then, and the shortest, which cost least to prefill again."""
        rows = self.running.rows
        index, lens, done = hosts.fetch((rows.index, rows.lens, rows.done))
        trained = self.requests.trained(index)
        if self._limited_rows_block_waiting():
            out = ~done & (lens == lens[~done].max())
        else:
            shard = np.arange(len(done)) // (len(done) // self.shards)
            order = np.lexsort((index, lens, trained, done, shard)).reshape(self.shards, -1)
            out = np.zeros(len(done), bool)
            for own, count in zip(order, self.running.counts.unfinished):
                out[own[: max(count - capacity // self.shards, 0)]] = True
        back = out & trained
        self.queues.add_preempted(index[back], lens[back])
        self.runner.preempt(out)
