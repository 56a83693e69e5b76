"""The scheduler of one rollout: which rows run, in which bucket, and for how long.

    waiting groups ── prefill, verify drafts ──→ insert ──→ running rows: decode, compact ──→ done
          ↑                                                      │
          └─ preempted, resumed: prefilled with their tokens ←───┘

Nothing that is decided here changes a token of a row. `runner.py` carries the decisions out.
"""

import collections
import dataclasses
import itertools

import numpy as np

from specrl_jax import hosts
from specrl_jax.rollout.adaptive.speculation import Speculation, VerifyPlan
from specrl_jax.rollout.engine.decode import StepCounts
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.draft_tries import DraftTries, pack_drafts, saves_work
from specrl_jax.rollout.engine.requests import Requests
from specrl_jax.rollout.engine.runner import FOREVER, DecodeBatch, ModelRunner

STEPS_BETWEEN_INSERTS = 64  # of rows of the next step into idle places
STEPS_BETWEEN_COUNTS = 32  # at most, of the groups that are done, where enough of them end it all

# Tokens that a row holds, and its index.
HeldRow = tuple[int, int]


@dataclasses.dataclass
class Starting:
    """Rows that begin, beside those that are running."""

    batch: DecodeBatch
    drafts_left: np.ndarray  # int [n], draft tokens of each row that are not verified
    plan: VerifyPlan | None  # the first verification pass


class Scheduler:
    """Runs all rows of a rollout to their end.

    Rows wait in four queues. `resumed` and `preempted` rows hold tokens, `waiting` groups hold
    none; groups of `next_step` only use places that would be idle.
    """

    def __init__(self, runner: ModelRunner, speculation: Speculation | None = None):
        self.runner, self.requests, self.speculation = runner, runner.requests, speculation
        self.program, self.budget = runner.program, runner.budget
        self.buckets = self.budget.buckets
        self.rule = self.program.accept
        # Where every token is sampled anew, only wide decode steps use what is left of a draft.
        self.verify_while_decoding = runner.drafts.previous is not None and (
            not self.rule.samples_anew or self._may_draft()
        )
        # A rule that needs the whole draft has no choice of a pass.
        self.chooses_verification = speculation is not None and not self.rule.whole_draft
        self.budget.check()
        self._enqueue(self.requests)

    def _enqueue(self, requests: Requests) -> None:
        group, num_train = self.program.group_size, requests.num_train_rows
        held = requests.held_lens.reshape(-1, group).any(axis=1)
        # Drafts of like length are verified together: a pass is as wide as its longest.
        longest = requests.draft_lens.reshape(-1, group).max(axis=1)
        groups = np.flatnonzero(~held).tolist()
        groups.sort(key=lambda g: (g >= requests.num_resumed, -longest[g], g))
        self.waiting = collections.deque(g for g in groups if g * group < num_train)
        self.next_step = collections.deque(g for g in groups if g * group >= num_train)
        self.resumed: list[HeldRow] = [
            (int(requests.held_lens[row]), row)
            for row in range(num_train)
            if held[row // group] and not requests.done[row]
        ]
        self.preempted: list[HeldRow] = []

    @property
    def running(self) -> DecodeBatch | None:
        return self.runner.running

    def run(self) -> DecodeState:
        """All rows, at their end unless the rollout may end early."""
        while not self._may_end():
            self._make_room()
            while starting := self._begin():
                self._verify(starting)
                self.runner.insert(starting.batch)
                del starting  # and with it a cache, before others begin
            if self.running is None:
                break
            self._decode()
            if not self.running.train_rows and not self._is_waiting():
                break
        if self.running is not None:
            self.runner.write_back_all()
        return self.runner.all_rows

    def _may_end(self) -> bool:
        """Whether so much is done that the rest may wait for the next rollout."""
        requests = self.requests
        if requests.allow_unfinished and self.running is not None and not self._is_waiting():
            return self.running.train_rows <= requests.allow_unfinished
        if not requests.stop_after_groups:
            return False
        groups = self.runner.finished.reshape(-1, self.program.group_size).all(axis=1)
        return int(groups.sum()) >= requests.stop_after_groups

    def _is_waiting(self) -> bool:
        """Whether train rows that are not done are not running."""
        return bool(self.resumed or self.waiting or self.preempted)

    def _may_draft(self) -> bool:
        """Whether decode steps wider than 1 are to be expected."""
        if self.program.draft_source is None or self.speculation is None:
            return self.program.draft_source is not None
        buckets, choose_width = self.buckets, self.speculation.choose_width
        shapes = itertools.product(buckets.rows, {buckets.slots(n) for n in buckets.responses})
        return any(choose_width(*shape, buckets.widths) > 1 for shape in shapes)

    # Rows begin ------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Compact what is running, for rows that begin."""
        if self.running is None:
            return
        if not self.running.unfinished:
            self.runner.write_back_all()
        elif self.budget.cache_bytes and self._is_waiting():
            size = self.buckets.rows_for(self.running.unfinished)
            self.runner.resize(size, self.running.slots)

    def _begin(self) -> Starting | None:
        """Waiting rows that start now; None where there is no room for any."""
        if not self._is_waiting():
            return self._begin_next_step()
        held_rows = self.resumed or ([] if self.waiting else self.preempted)
        size = self._num_admitted(held_rows)
        if not size:
            return None
        if self.resumed:
            chosen, self.resumed = self.resumed[:size], self.resumed[size:]
            return self._re_prefill(chosen, size, with_drafts=True)
        if self.waiting:
            count = min(size // self.program.group_size, len(self.waiting))
            return self._prefill(self.waiting, count, size)
        self.preempted.sort()
        chosen, self.preempted = self.preempted[:size], self.preempted[size:]
        return self._re_prefill(chosen, size)

    def _num_admitted(self, held_rows: list[HeldRow]) -> int:
        """Rows of the bucket in which rows begin, 0 for none: `held_rows`, else waiting groups."""
        running = self.running.unfinished if self.running else 0
        held = max((n for n, _ in held_rows), default=0) if held_rows else self._tokens_at_once()
        longest = max(held, self.running.longest if self.running else 0)
        # As where rows are inserted: rows that filled a cache come back to the next longer one.
        capacity = self.budget.capacity(self.buckets.response_for(longest + 1))
        count = len(held_rows) or len(self.waiting) * self.program.group_size
        free = capacity - running
        # Padding is gone once rows are inserted: only a bound on bytes counts it.
        ignore_padding = count <= free and not self.budget.cache_bytes
        size = self.buckets.admission(count, capacity if ignore_padding else free)
        if running and size < min(count, self.budget.refill(capacity)):
            return 0
        if size and running and self._exceeds_budget(size, min(size, count), longest):
            return 0
        return size

    def _tokens_at_once(self) -> int:
        """Tokens for which waiting groups need a cache at once: an accepted draft, or the pass over
        a draft that is verified whole."""
        group = self.program.group_size
        longest = int(self.requests.draft_lens.reshape(-1, group)[list(self.waiting)].max())
        whole = self.rule.whole_draft and longest
        return self.buckets.verify_width_for(longest) if whole else longest

    def _begin_next_step(self) -> Starting | None:
        """Let groups of the next step start in places that would be idle."""
        if not self.next_step or self.running is None:
            return None
        group, running = self.program.group_size, self.running
        capacity = self.budget.capacity(self.buckets.response_for(running.longest + 1))
        count = (min(running.size, capacity) - running.unfinished) // group
        count = min(count, len(self.next_step), self.buckets.admissions[0] // group)
        if count * group < max(running.size // 4, 1):  # not worth a prefill and a move
            return None
        size = self.buckets.admission(count * group, self.buckets.admissions[0])
        if self._exceeds_budget(size, count * group, running.longest):
            return None
        return self._prefill(self.next_step, count, size)

    def _exceeds_budget(self, size: int, count: int, longest: int) -> bool:
        """Whether `count` rows of up to `longest` tokens, begun in a bucket of `size`, and the
        running rows would take too many bytes."""
        joined = self.runner.inserted_shape(count, longest)
        longest_draft = int(self.requests.draft_lens.max())
        widths = self._widths_to_verify(longest_draft) if longest_draft else []
        slots = max([joined[1], *(self.buckets.verify_slots(w, longest_draft) for w in widths)])
        return not self.budget.holds((size, slots), *{*self.runner.running_shape(), joined})

    def _prefill(self, queue: collections.deque[int], count: int, size: int) -> Starting:
        """The first `count` groups of a queue; they hold nothing."""
        group = self.program.group_size
        groups = np.asarray([queue.popleft() for _ in range(count)])
        index = (groups[:, None] * group + np.arange(group)).reshape(-1)
        drafts = self.requests.draft_lens[index]
        tries = self._pack_drafts(index, size, drafts)
        plan = self._plan_verification(drafts, size, tries=tries)
        if plan and plan.sequences:
            batch, counts = self.runner.verify_trie(index, size, tries, plan.verify_width)
            self._record(plan, counts)
            return Starting(batch, drafts, None)
        # Without a pass, the slots that rows will share, so that they need not move.
        slots = plan.slots if plan else self.runner.inserted_shape(0, 0)[1]
        verify = drafts if plan or self.verify_while_decoding else np.zeros_like(drafts)
        return Starting(self.runner.prefill(index, size, slots, verify), drafts, plan)

    def _pack_drafts(self, index: np.ndarray, size: int, drafts: np.ndarray) -> DraftTries | None:
        """Prompts and drafts of these rows packed, where they can be verified whole in one pass and
        that computes fewer tokens than a prefill and a pass over the rows."""
        buckets, longest, group = self.buckets, int(drafts.max()), self.program.group_size
        width = buckets.verify_width_for(longest)
        if not 0 < longest <= width:
            return None
        prompts, tokens = self.requests.prompts, self.runner.draft_tokens[index, :width]
        of_row = index // group
        tries = pack_drafts(prompts.tokens[of_row], prompts.lens[of_row], tokens, drafts, size)
        shapes = (tries.shape, (size, tries.nodes.shape[1]), *self.runner.running_shape())
        fits = self.budget.holds(*shapes)
        saves = saves_work(tries.shape, size, width, group, buckets.prompt_slots)
        return tries if fits and saves else None

    def _re_prefill(self, chosen: list[HeldRow], size: int, with_drafts: bool = False) -> Starting:
        """Rows that hold tokens. with_drafts: they may have drafts left to verify."""
        index, longest = np.asarray([row for _, row in chosen]), max(n for n, _ in chosen)
        width = self.buckets.response_for(longest)
        slots, plan, left = self.buckets.slots(width), None, np.zeros(len(index), np.int32)
        begun = self.buckets.prompt_slots + width
        if with_drafts:
            left = np.maximum(self.requests.draft_lens[index] - self.requests.held_lens[index], 0)
            widest = self.buckets.verify_width_for(int(left.max()))
            plan = self._plan_verification(left, size, begun + widest, longest)
        if plan and not self.budget.verifies(begun + plan.verify_width, slots):
            plan = None
        if plan:
            slots = max(slots, begun + plan.verify_width)
        verify = plan is not None or self.verify_while_decoding
        batch = self.runner.re_prefill(index, size, slots, width, with_drafts=verify)
        return Starting(batch, left, plan)

    # Verification ----------------------------------------------------------------------------

    def _widths_to_verify(self, longest: int) -> list[int]:
        """Ascending widths of a pass over drafts of at most `longest` tokens: up to the widest that
        is needed, as far as there is room. Of a rule that needs whole drafts the widest alone:
        `_tokens_at_once` has seen to its room."""
        widest = self.buckets.verify_width_for(longest)
        if self.rule.whole_draft:
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
        others = len(self.waiting) * self.program.group_size
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
        are for decode steps to verify, or dropped."""
        plan = starting.plan
        if plan:
            self._split(starting)
        while plan is not None and starting.batch.verifying:
            stop = self.runner.stop_condition(max_active=-1, max_steps=1)
            counts = self.runner.run(starting.batch, stop, plan.verify_width, verify=True)
            rows, slots = starting.batch.shape
            self._record(dataclasses.replace(plan, rows=rows, slots=slots), counts)
            if verifying := starting.batch.verifying:
                self._split(starting)
                # Rows that rejected nothing so far all have as many tokens less to verify.
                left = starting.drafts_left
                done = left.max() - starting.batch.longest_draft
                left = np.maximum(np.sort(left)[-verifying:] - done, 1)
                shape, held = starting.batch.shape, starting.batch.longest
                plan = self._plan_verification(left, *shape, held)
        if not (self.verify_while_decoding and starting.batch.verifying):
            starting.batch.drop_drafts()

    def _record(self, plan: VerifyPlan, counts: StepCounts) -> None:
        if self.chooses_verification:
            numbers = int(counts.accepted), int(counts.verified)
            predicted = self.speculation.record_verification(plan, *numbers)
            self.runner.stats.predicted_verify_seconds += predicted

    def _split(self, starting: Starting) -> None:
        """Keep only the rows that are verifying, where they fit a smaller bucket and there is room
        for both and for the batch into which the others are inserted."""
        batch = starting.batch
        size = self.buckets.rows_for(batch.verifying)
        if size >= batch.size:
            return
        joined = self.runner.inserted_shape(batch.active - batch.verifying, batch.longest)
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
            self.buckets.rows_for(running.unfinished), self.buckets.slots(response)
        )
        max_active, max_steps = self._when_to_stop(capacity)
        if self.speculation is None:
            stop = self.runner.stop_condition(max_active, response, max_steps)
            self.runner.run(running, stop, self.buckets.widths[-1])
            return
        plan = self.speculation.plan_steps(running.size, running.slots, self.buckets.widths)
        max_steps = min(max_steps, plan.max_steps or max_steps)
        stop = self.runner.stop_condition(max_active, response, max_steps)
        counts = self.runner.run(running, stop, plan.width)
        numbers = int(counts.accepted), int(counts.verified)
        self.runner.stats.predicted_seconds += self.speculation.record_steps(
            plan, int(counts.steps), counts.matched.tolist(), *numbers
        )

    def _when_to_stop(self, capacity: int) -> tuple[int, int]:
        """Active train rows, and steps, at which decoding pauses."""
        running, requests = self.running, self.requests
        if self._is_waiting():
            # As many places are free then as rows begin together; at least one more than now.
            free = self.budget.refill(capacity)
            max_active = max(min(capacity - free, running.train_rows - 1), 0)
        else:
            max_active = max(self.buckets.rows_below(running.size), requests.allow_unfinished)
        if requests.stop_after_groups:
            steps = max(self.program.response_slots // 8, 1)
            return max_active, min(steps, STEPS_BETWEEN_COUNTS)
        if running.train_rows < running.unfinished:  # the next step's rows keep the bucket as it is
            return 0, STEPS_BETWEEN_INSERTS
        insert = self.next_step and not self._is_waiting()
        return max_active, STEPS_BETWEEN_INSERTS if insert else FOREVER

    # Preemption ------------------------------------------------------------------------------

    def _should_preempt(self, capacity: int) -> bool:
        if not self.budget.cache_bytes:
            return False
        return self.running.unfinished > capacity or self._limited_rows_block_waiting()

    def _limited_rows_block_waiting(self) -> bool:
        """Whether rows at the cache limit wait for groups that have yet to begin in a short cache.
        Not where the first groups to be done end the rollout: long rows would wait for ever."""
        return bool(
            self.running.at_cache_limit and self.waiting and not self.requests.stop_after_groups
        )

    def _preempt(self, capacity: int) -> None:
        """Rows give up their cache: those at the cache limit where groups are waiting; else rows of
        the next step, which are over then, and the shortest, which cost least to prefill again."""
        rows = self.running.rows
        index, lens, done = hosts.fetch((rows.index, rows.lens, rows.done))
        num_train = self.requests.num_train_rows
        if self._limited_rows_block_waiting():
            out = ~done & (lens == lens[~done].max())
        else:
            order = np.lexsort((index, lens, index < num_train, done))
            out = np.zeros(len(done), bool)
            out[order[: self.running.unfinished - capacity]] = True
        self.preempted += [(int(n), int(i)) for n, i in zip(lens[out], index[out]) if i < num_train]
        self.runner.preempt(out)
