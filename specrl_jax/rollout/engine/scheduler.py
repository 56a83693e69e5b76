"""The scheduler of one rollout: who waits, who is computed at which shape, and for how long.

    waiting groups → prefill (each prompt once) → verify their drafts → join the pool
                 pool of active rows: steps of the width that pays → smaller or deeper rung → …
                 finished rows → the board, in batch order

What a row emits does not depend on any choice made here: not on who is computed beside it, at which
width, how soon, or whether it was evicted and replayed. `flight.py` carries the choices out.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specrl_jax.models.transformer import Params
from specrl_jax.rollout.adaptive.speculation import Speculation, VerifyPlan
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.kv_budget import KVBudget
from specrl_jax.rollout.engine.runner import FOREVER, DecodeBatch, ModelRunner
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.types import Drafts

LOOK_IN_AHEAD = 64  # steps after which idle places are looked for
LOOK_IN_PARTIAL = 32  # most steps between two counts of complete groups


class Scheduler:
    """One rollout in progress; `run` brings every row of the board to its end.

    board: all rows, the first `own` of which the rollout is for; those behind them only use idle
    places (run-ahead). prompts: int32 [Q, P] on the host. drafts: those of all rows, or None;
    draft_lens: int32 [B] on the host, 0 where there is none. held: int32 [B], tokens that rows hold
    already; done: bool [B]. first: groups that begin before all others. wanted: groups after which
    `run` ends, 0 for all; the others then hold what they have. behind: rows of its own that `run`
    leaves unfinished, holding what they have; fewer than are unfinished as it begins. corpus: what
    tree drafts read, or a function that makes it before the first step that does.
    """

    def __init__(
        self,
        setup: ProgramSpec,
        room: KVBudget,
        weights: Params,
        board: DecodeState,
        prompts: np.ndarray,
        *,
        own: int,
        drafts: Drafts | None,
        draft_lens: np.ndarray,
        held: np.ndarray,
        done: np.ndarray,
        corpus: Callable[[], Any],
        log_lenience: float = 0.0,
        cost: Speculation | None = None,
        first: int = 0,
        wanted: int = 0,
        behind: int = 0,
    ):
        self.setup, self.room, self.ladder = setup, room, room.ladder
        self.flight = ModelRunner(
            setup, room, weights, board, own, drafts, log_lenience, corpus,
            unread=bool(held.any()), finished=done.copy(), told=bool(wanted or behind),
        )  # fmt: skip
        self.prompts, self.own, self.held = prompts, own, held
        self.draft_lens, self.cost = draft_lens, cost
        self.widths = self.ladder.widths
        # Under match a draft changes no token: there only wide steps have a use for what is left.
        widens = not setup.accept.samples_anew or self._may_widen()
        self.steps_judge = drafts is not None and widens
        room.check()
        group = setup.group_size
        self.wanted, self.behind = wanted, behind
        begun = held.reshape(-1, group).any(axis=1)
        # Drafts of like length are verified together: a pass is as wide as its longest.
        longest = draft_lens.reshape(-1, group).max(axis=1)
        fresh = np.flatnonzero(~begun).tolist()
        fresh.sort(key=lambda g: (g >= first, -longest[g], g))
        self.fresh = collections.deque(g for g in fresh if g * group < own)
        self.ahead = collections.deque(g for g in fresh if g * group >= own)
        self.carried = [(int(held[i]), i) for i in range(own) if begun[i // group] and not done[i]]
        self.back: list[tuple[int, int]] = []  # (tokens, row): evicted

    @property
    def pool(self) -> DecodeBatch | None:
        return self.flight.pool

    @property
    def stats(self) -> Stats:
        return self.flight.stats

    @property
    def finished(self) -> np.ndarray:
        """bool [B], rows that are done by now; kept where `wanted` or `behind` is given."""
        return self.flight.finished

    def run(self) -> DecodeState:
        """The board with every row of its own done."""
        if not self._enough():
            self._admit()
        while self.pool is not None:
            self._visit()
            if self._enough() or not (self.pool.own or self._waits()):
                break
            self._admit()
        if self.pool is not None:
            self.flight.land()
        return self.flight.board

    def _may_widen(self) -> bool:
        """Whether steps wider than 1 are to be expected."""
        if self.setup.draft_source is None or self.cost is None:
            return self.setup.draft_source is not None
        slots = sorted({self.ladder.slots(n) for n in self.ladder.responses})
        return self.cost.widens(itertools.product(self.ladder.rows, slots), self.widths)

    def _enough(self) -> bool:
        """Whether so much is complete that the others may wait for the next rollout."""
        if self.behind and self.pool is not None and not self._waits():
            return self.pool.own <= self.behind
        if not self.wanted:
            return False
        groups = self.finished.reshape(-1, self.setup.group_size).all(axis=1)
        return int(groups.sum()) >= self.wanted

    def _waits(self) -> bool:
        """Whether rows of the board's own are not in flight yet, or not any more."""
        return bool(self.carried or self.fresh or self.back)

    # Admission -------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Begin waiting rows while there is room for them."""
        if self.pool is not None and not self.pool.unfinished:
            self.flight.land()
        if self.pool is not None and self.room.cache_bytes and self._waits():
            size = self.ladder.rows_for(self.pool.unfinished)  # bytes for those that join
            self.flight.move_pool(size, self.pool.slots)
        while self._admit_some():
            pass

    def _admit_some(self) -> bool:
        busy = self.pool.unfinished if self.pool else 0
        again = self.carried or ([] if self.fresh else self.back)
        held = max((n for n, _ in again), default=0)
        if self.fresh and not again:
            held = self._window_needed()
        longest = max(held, self.pool.longest if self.pool else 0)
        # As where they join: rows that filled a window come back to the next one.
        capacity = self.room.capacity(self.ladder.response_for(longest + 1))
        group = self.setup.group_size
        waiting = len(again) or len(self.fresh) * group
        room = capacity - busy
        if not waiting:
            return self._admit_ahead()
        # Fillers are gone once rows have joined the pool: only a bound on bytes counts them.
        whole = waiting <= room and not self.room.cache_bytes
        size = self.ladder.admission(waiting, capacity if whole else room)
        if not size or (busy and size < min(waiting, self.room.refill(capacity))):
            return False
        if busy and self._exceeds(size, min(size, waiting), longest):
            return False
        if self.carried:
            chosen, self.carried = self.carried[:size], self.carried[size:]
            batch = self._begin_again(chosen, size, drafted=True)
        elif self.fresh:
            groups = [self.fresh.popleft() for _ in range(min(size // group, len(self.fresh)))]
            batch = self._begin_groups(groups, size)
        else:
            self.back.sort()
            chosen, self.back = self.back[:size], self.back[size:]
            batch = self._begin_again(chosen, size)
        self.flight.join(batch)
        return True

    def _window_needed(self) -> int:
        """Tokens for which groups that have not begun need a window: a draft that is kept takes it
        at once, and one that is verified whole or not at all takes the pass over it."""
        longest = int(self.draft_lens.reshape(-1, self.setup.group_size)[list(self.fresh)].max())
        whole = self.setup.accept.whole_draft
        return self.ladder.verify_width(longest) if longest and whole else longest

    def _admit_ahead(self) -> bool:
        """Let rows of the next step into places that would stand idle."""
        if not self.ahead or self.pool is None:
            return False
        group, pool = self.setup.group_size, self.pool
        capacity = self.room.capacity(self.ladder.response_for(pool.longest + 1))
        count = min((min(pool.size, capacity) - pool.unfinished) // group, len(self.ahead))
        count = min(count, self.ladder.admissions[0] // group)
        if count * group < max(pool.size // 4, 1):  # not worth a prefill and a move
            return False
        size = self.ladder.admission(count * group, self.ladder.admissions[0])
        if self._exceeds(size, count * group, pool.longest):
            return False
        groups = [self.ahead.popleft() for _ in range(count)]
        self.flight.join(self._begin_groups(groups, size))
        return True

    def _exceeds(self, size: int, real: int, longest: int) -> bool:
        """Whether it would take more than the bound on bytes to join `real` rows, begun on a rung
        of `size`, with the pool, up to `longest` tokens."""
        joined = self.flight.joined_shape(real, longest)
        longest_draft = int(self.draft_lens.max())
        widths = self._verifiable(longest_draft) if longest_draft else []
        begin = max([joined[1], *(self.ladder.verify_slots(w, longest_draft) for w in widths)])
        return not self.room.holds((size, begin), *{*self.flight.pool_shape(), joined})

    def _begin_groups(self, groups: list[int], size: int) -> DecodeBatch:
        """Prefill prompts, verify their drafts."""
        group = self.setup.group_size
        places = (np.asarray(groups)[:, None] * group + np.arange(group)).reshape(-1)
        drafts = self.draft_lens[places]
        self.flight.prefill(self.prompts[np.resize(groups, size // group)])
        first = self._pass(drafts, size)  # while the device is at it
        # Without a pass, the window that rows will share, so that they need not move to join.
        slots = first.slots if first else self.flight.joined_shape(0, 0)[1]
        judged = drafts if first or self.steps_judge else np.zeros_like(drafts)
        return self._verified(self.flight.begin(places, size, slots, judged), drafts, first)

    def _begin_again(
        self, chosen: list[tuple[int, int]], size: int, drafted: bool = False
    ) -> DecodeBatch:
        """Rows that hold tokens but have no cache: one pass over prompt and tokens. drafted: what
        is left of their drafts has not been judged yet."""
        places = np.asarray([i for _, i in chosen])
        width = self.ladder.response_for(max(n for n, _ in chosen))
        slots, first, left = self.ladder.slots(width), None, np.zeros(len(places), np.int32)
        if drafted:
            left = np.maximum(self.draft_lens[places] - self.held[places], 0)
            widest = self.ladder.verify_width(int(left.max()))
            most = self.ladder.prompt_slots + width + widest
            first = self._pass(left, size, most, max(n for n, _ in chosen))
        if first:
            needed = self.ladder.prompt_slots + width + first.verify_width
            if self.room.verifies(needed, slots):
                slots = max(slots, needed)
            else:
                first = None
        prompts = self.prompts[np.resize(places, size) // self.setup.group_size]
        judged = first is not None or self.steps_judge
        batch = self.flight.begin_again(prompts, places, size, slots, width, judged=judged)
        return self._verified(batch, left, first)

    # Verification ----------------------------------------------------------------------------

    def _verifiable(self, longest: int) -> list[int]:
        """Widths of a pass over drafts of at most `longest` tokens, ascending: up to the widest
        that is needed, as far as there is room for their caches. Of a rule that needs the whole
        draft the widest alone: `_window_needed` has seen to its room."""
        widest = self.ladder.verify_width(longest)
        if self.setup.accept.whole_draft:
            return [widest]
        shared, needed = self.ladder.slots_for(longest + 1), self.ladder.verify_slots
        widths = [width for width in self.ladder.verify if width <= widest]
        return [width for width in widths if self.room.verifies(needed(width, longest), shared)]

    def _pass(
        self, drafts: np.ndarray, size: int, slots: int = 0, begun: int = 0
    ) -> VerifyPlan | None:
        """The verification of rows whose drafts have `drafts` [n] tokens left that the cost model
        chooses; without one the widest that is needed. None where there are no drafts, where they
        are better left to decoding, or where there is no room. slots: of the rows' caches, where
        they have any. begun: tokens that the longest of them holds."""
        if not drafts.any():
            return None
        longest = int(drafts.max())
        needed = self.ladder.prompt_slots + begun  # a pass begins behind the longest response
        widths = [w for w in self._verifiable(longest) if not slots or needed + w <= slots]
        if not widths:
            return None
        make = functools.partial(
            VerifyPlan,
            draft_lens=tuple(drafts[drafts > 0].tolist()),
            held=begun,
            rows=size,
            buckets=self.ladder,
            others_held=self.pool.longest if self.pool else 0,
            others=len(self.fresh) * self.setup.group_size
            + (self.pool.unfinished if self.pool else 0),
            capacity=self.room.capacity(self.setup.response_slots),
        )
        passes = [
            make(verify_width=w, slots=slots or self.ladder.verify_slots(w, longest))
            for w in widths
        ]
        if self.cost is None or self.setup.accept.whole_draft:
            return passes[-1]
        return self.cost.choose_verification(passes)

    def _verified(
        self, batch: DecodeBatch, drafts: np.ndarray, first: VerifyPlan | None
    ) -> DecodeBatch:
        """A batch with its drafts judged in wide passes, as long as that pays, and left to steps
        where these judge."""
        if first:
            batch = self._verify(batch, drafts, first)
        if not (self.steps_judge and batch.verifying):
            batch.leave_drafts()
        return batch

    def _verify(self, batch: DecodeBatch, drafts: np.ndarray, first: VerifyPlan) -> DecodeBatch:
        one: VerifyPlan | None = first
        while batch.verifying:
            size = self.ladder.rows_for(batch.verifying)
            if self._may_split(batch, size):
                batch = self.flight.split(batch, size)
            if one is None:
                # Rows that verified all passes so far have as many tokens less to verify.
                left = np.sort(drafts)[-batch.verifying :] - (drafts.max() - batch.longest_draft)
                one = self._pass(np.maximum(left, 1), batch.size, batch.slots, batch.longest)
                if one is None:
                    break
            tally = self.flight.run(
                batch, self.flight.limits(-1, steps=1), one.verify_width, wide=True
            )
            if self.cost:
                run = dataclasses.replace(one, rows=batch.size, slots=batch.slots)
                predicted = self.cost.record_verification(
                    run, int(tally.accepted), int(tally.verified)
                )
                self.stats.predicted_verify_seconds += predicted
            one = None
        return batch

    def _may_split(self, batch: DecodeBatch, size: int) -> bool:
        """Whether those that are verifying fit on a smaller rung, and there is room for both and
        for the one that the others join."""
        if size >= batch.size:
            return False
        joined = self.flight.joined_shape(batch.active - batch.verifying, batch.longest)
        rungs = (batch.shape, (size, batch.slots), *self.flight.pool_shape(), joined)
        return self.room.holds(*rungs)

    # Decoding --------------------------------------------------------------------------------

    def _visit(self) -> None:
        """Bring the pool onto the rung that fits, and decode there for a while."""
        pool, ladder = self.pool, self.ladder
        response = ladder.response_for(min(pool.longest + 1, self.setup.response_slots))
        capacity = self.room.capacity(response)
        if self._must_evict(capacity):
            self._evict(capacity)
            pool = self.pool
            if not pool.unfinished:
                return
            response = ladder.response_for(min(pool.longest + 1, self.setup.response_slots))
        if pool.rows.draft is not None and not pool.verifying:
            pool.leave_drafts()
        pool = self.flight.move_pool(ladder.rows_for(pool.unfinished), ladder.slots(response))
        stop, steps = self._until(capacity)
        if self.cost is None:
            self.flight.run(pool, self.flight.limits(stop, response, steps), self.widths[-1])
            return
        visit = self.cost.plan_steps(pool.size, pool.slots, self.widths)
        limits = self.flight.limits(stop, response, min(steps, visit.max_steps or steps))
        tally = self.flight.run(pool, limits, visit.width)
        steps, judged = int(tally.steps), (int(tally.accepted), int(tally.verified))
        seconds = self.cost.record_steps(visit, steps, tally.matched.tolist(), *judged)
        self.stats.predicted_seconds += seconds

    def _until(self, capacity: int) -> tuple[int, int]:
        """Own rows left active, and steps, at which a visit of the pool ends."""
        pool = self.pool
        if self._waits():
            # As many are free then as begin together; where even so nobody could, one more row.
            stop = max(min(capacity - self.room.refill(capacity), pool.own - 1), 0)
        else:
            stop = max(self.ladder.rows_below(pool.size), self.behind)
        if self.wanted:
            return stop, min(max(self.setup.response_slots // 8, 1), LOOK_IN_PARTIAL)
        if pool.own < pool.unfinished:  # others use the idle places: the rung stays for them
            return 0, LOOK_IN_AHEAD
        return stop, LOOK_IN_AHEAD if self.ahead and not self._waits() else FOREVER

    # Eviction --------------------------------------------------------------------------------

    def _must_evict(self, capacity: int) -> bool:
        if not self.room.cache_bytes:
            return False
        return self.pool.unfinished > capacity or self._makes_way()

    def _makes_way(self) -> bool:
        """Whether rows at their window's end wait for those that have not begun. Not where the
        first groups to be complete end the rollout: long rows would wait for ever."""
        return bool(self.pool.parked and self.fresh and not self.wanted)

    def _evict(self, capacity: int) -> None:
        """Rows give up their cache and wait: those at their window's end while others are still
        to begin at a shallower one, else those run ahead, which are over then, and the shortest,
        which cost least to replay."""
        pool = self.pool
        index, lens, done = jax.device_get((pool.rows.index, pool.rows.lens, pool.rows.done))
        if self._makes_way():
            out = ~done & (lens == lens[~done].max())
        else:
            order = np.lexsort((index, lens, index < self.own, done))
            out = np.zeros(len(done), bool)
            out[order[: pool.unfinished - capacity]] = True
        self.back += [(int(n), int(i)) for n, i in zip(lens[out], index[out]) if i < self.own]
        self.flight.evict(out)
