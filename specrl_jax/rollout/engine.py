"""The scheduler of one rollout: who waits, who is computed at which shape, and for how long.

    waiting groups → prefill (each prompt once) → verify their drafts → join the pool
                 pool of active rows: steps of the width that pays → smaller or deeper rung → …
                 finished rows → the board, in batch order

What a row emits does not depend on any choice made here: not on who is computed beside it, at which
width, how soon, or whether it was evicted and replayed. Between visits of a rung the host reads six
numbers and a tally; no token visits it.
"""

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable

import jax
import numpy as np

from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.transformer import Params
from specrl_jax.rollout import acceptance, decode, drafting, rows
from specrl_jax.rollout.cost import CostModel, Pass
from specrl_jax.rollout.decode import Limits
from specrl_jax.rollout.drafting import Corpus
from specrl_jax.rollout.plan import Setup
from specrl_jax.rollout.room import Room
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.stats import Stats
from specrl_jax.sharding import put
from specrl_jax.types import Drafts

_FOREVER = np.iinfo(np.int32).max
LOOK_IN_AHEAD = 64  # steps after which idle places are looked for
LOOK_IN_PARTIAL = 32  # most steps between two counts of complete groups


@dataclasses.dataclass
class _Pool:
    """Rows on a rung. own, active, parked, verifying, longest, longest_draft: as `decode.visit`
    reports them. real: rows that are not fillers, but for those whose end is on the board."""

    cache: KVCache
    rows: Rows
    size: int
    slots: int
    real: int
    own: int = 0
    active: int = 0
    parked: int = 0
    verifying: int = 0
    longest: int = 0
    longest_draft: int = 0

    @property
    def unfinished(self) -> int:
        return self.active + self.parked

    def report(self, numbers: np.ndarray) -> None:
        """Take over what `decode.visit` reported."""
        names = ("own", "active", "parked", "verifying", "longest", "longest_draft")
        for name, number in zip(names, numbers.tolist(), strict=True):
            setattr(self, name, number)


class Engine:
    """One rollout in progress; `run` brings every row of the board to its end.

    board: all rows, the first `own` of which the rollout is for; those behind them only use idle
    places (run-ahead). prompts: int32 [Q, P] on the host. drafts: those of all rows, or None;
    draft_lens: int32 [B] on the host, 0 where there is none. held: int32 [B], tokens that rows hold
    already; done: bool [B]. first: groups that begin before all others. wanted: groups after which
    `run` ends, 0 for all; the others then hold what they have. behind: rows of its own that `run`
    leaves unfinished, holding what they have; fewer than are unfinished as it begins. finished:
    bool [B], rows that are done by now, kept up to date where `wanted` or `behind` is given.
    corpus: what tree drafts read, or a function that makes it before the first step that does.
    """

    def __init__(
        self,
        setup: Setup,
        room: Room,
        weights: Params,
        board: Rows,
        prompts: np.ndarray,
        *,
        own: int,
        drafts: Drafts | None,
        draft_lens: np.ndarray,
        held: np.ndarray,
        done: np.ndarray,
        corpus: Corpus | Callable[[], Corpus],
        log_lenience: float = 0.0,
        cost: CostModel | None = None,
        first: int = 0,
        wanted: int = 0,
        behind: int = 0,
    ):
        self.setup, self.room, self.ladder = setup, room, room.ladder
        self.weights, self.board = weights, board
        # Whether rows hold tokens that the corpus does not know.
        self.corpus, self.unread = corpus, bool(held.any())
        self.prompts, self.own, self.held = prompts, own, held
        self.drafts, self.draft_lens = drafts, draft_lens
        self.log_lenience = log_lenience
        self.cost, self.stats, self.pool = cost, Stats(), None
        self.widths = self.ladder.widths
        # Under match a draft changes no token: there only wide steps have a use for what is left.
        self.steps_judge = drafts is not None and (setup.accept != "match" or self._may_widen())
        room.check()
        group = setup.group_size
        self.wanted, self.behind, self.finished = wanted, behind, done.copy()
        begun = held.reshape(-1, group).any(axis=1)
        # Drafts of like length are verified together: a pass is as wide as its longest.
        longest = draft_lens.reshape(-1, group).max(axis=1)
        fresh = np.flatnonzero(~begun).tolist()
        fresh.sort(key=lambda g: (g >= first, -longest[g], g))
        self.fresh = collections.deque(g for g in fresh if g * group < own)
        self.ahead = collections.deque(g for g in fresh if g * group >= own)
        self.carried = [(int(held[i]), i) for i in range(own) if begun[i // group] and not done[i]]
        self.back: list[tuple[int, int]] = []  # (tokens, row): evicted
        self.aside: list[tuple[int, int]] = []  # a rung held beside the pool for a moment

    def run(self) -> Rows:
        """The board with every row of its own done."""
        if not self._enough():
            self._admit()
        while self.pool is not None:
            self._visit()
            if self._enough() or not (self.pool.own or self._waits()):
                break
            self._admit()
        if self.pool is not None:
            self._collect(self.pool)
        return self.board

    def _may_widen(self) -> bool:
        """Whether steps wider than 1 are to be expected."""
        if self.setup.tree is None or self.cost is None:
            return self.setup.tree is not None
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
            self._collect(self.pool)
            self.pool = None
        if self.pool is not None and self.room.cache_bytes and self._waits():
            size = self.ladder.rows_for(self.pool.unfinished)  # bytes for those that join
            self.pool = self._moved(self.pool, size, self.pool.slots)
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
        self._join(batch)
        return True

    def _window_needed(self) -> int:
        """Tokens for which groups that have not begun need a window: a draft that is kept takes it
        at once, and one that is verified whole or not at all takes the pass over it."""
        longest = int(self.draft_lens.reshape(-1, self.setup.group_size)[list(self.fresh)].max())
        whole = acceptance.RULES[self.setup.accept].whole_draft
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
        self._join(self._begin_groups(groups, size))
        return True

    def _exceeds(self, size: int, real: int, longest: int) -> bool:
        """Whether it would take more than the bound on bytes to join `real` rows, begun on a rung
        of `size`, with the pool, up to `longest` tokens."""
        slots = self.ladder.slots_for(longest + 1)
        total = self.ladder.rows_for(self.pool.unfinished + real)
        longest_draft = int(self.draft_lens.max())
        widths = self._verifiable(longest_draft) if longest_draft else []
        begin = max([slots, *(self.ladder.verify_slots(w, longest_draft) for w in widths)])
        return not self.room.holds((size, begin), *{*self._pool_shape(), (total, slots)})

    def _begin_groups(self, groups: list[int], size: int) -> _Pool:
        """Prefill prompts, verify their drafts."""
        group = self.setup.group_size
        places = (np.asarray(groups)[:, None] * group + np.arange(group)).reshape(-1)
        drafts = self.draft_lens[places]
        start = time.perf_counter()
        prompts = self.prompts[np.resize(groups, size // group)]
        cache = decode.prefill(self.setup, self.weights, prompts)
        # While the device is at it:
        longest, first = int(drafts.max()), self._pass(drafts, size)
        picked = self._picked(places, size, first)
        slots = first.slots if first else self._first_slots()
        prompt_rung = (size // group, self.ladder.prompt_slots)
        cache = decode.spread(cache, slots=slots, group_size=group)
        jax.block_until_ready(cache)
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.programs.add(("prefill", *prompt_rung))
        self._note_bytes(prompt_rung, (size, slots), *self._pool_shape())
        batch = _Pool(cache, picked, size, slots, len(places))
        batch.active = len(places)
        batch.own = int(np.sum(places < self.own))
        if picked.pending is not None:
            # Rows that hold nothing verify exactly where they have a draft.
            batch.verifying, batch.longest_draft = int(np.count_nonzero(drafts)), longest
        if first:
            batch = self._verify(batch, drafts, first)
        return self._settle(batch)

    def _begin_again(
        self, chosen: list[tuple[int, int]], size: int, drafted: bool = False
    ) -> _Pool:
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
            needed = self.ladder.prompt_slots + width + first.chunk
            if self.room.verifies(needed, slots):
                slots = max(slots, needed)
            else:
                first = None
        picked = self._picked(places, size, first)
        start = time.perf_counter()
        prompts = self.prompts[np.resize(places, size) // self.setup.group_size]
        cache = decode.replay(self.setup, self.weights, prompts, picked, slots=slots, width=width)
        batch = _Pool(cache, picked, size, slots, len(places))
        batch.report(np.asarray(decode.progress(picked, self._limits(_FOREVER))))
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.programs.add(("replay", size, slots, width))
        self._note_bytes((size, slots), *self._pool_shape())
        if first:
            batch = self._verify(batch, left, first)
        return self._settle(batch)

    def _settle(self, batch: _Pool) -> _Pool:
        if not self.steps_judge:
            batch.verifying = batch.longest_draft = 0
        if not batch.verifying:
            batch.rows = rows.without_pending(batch.rows)
        return batch

    def _picked(self, places: np.ndarray, size: int, first: Pass | None) -> Rows:
        """Rows of the board on a rung of `size`, with their drafts where something will judge
        them."""
        judged = self.drafts is not None and (first is not None or self.steps_judge)
        if judged and self.board.pending is None:
            accept, lenience = self.setup.accept, self.log_lenience
            self.board = rows.with_pending(self.board, self.drafts, accept, lenience)
        padded = np.full(size, -1, np.int32)
        padded[: len(places)] = places
        return rows.pick(self.board if judged else rows.without_pending(self.board), padded)

    def _first_slots(self) -> int:
        """The window that new rows will share, so that they need not move when they join."""
        longest = self.pool.longest if self.pool else 0
        return self.ladder.slots_for(longest + 1)

    # Verification ----------------------------------------------------------------------------

    def _verifiable(self, longest: int) -> list[int]:
        """Widths of a pass over drafts of at most `longest` tokens, ascending: up to the widest
        that is needed, as far as there is room for their caches. Of a rule that needs the whole
        draft the widest alone: `_window_needed` has seen to its room."""
        widest = self.ladder.verify_width(longest)
        if acceptance.RULES[self.setup.accept].whole_draft:
            return [widest]
        shared, needed = self.ladder.slots_for(longest + 1), self.ladder.verify_slots
        widths = [width for width in self.ladder.verify if width <= widest]
        return [width for width in widths if self.room.verifies(needed(width, longest), shared)]

    def _pass(self, drafts: np.ndarray, size: int, slots: int = 0, begun: int = 0) -> Pass | None:
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
            Pass,
            left=tuple(drafts[drafts > 0].tolist()),
            begun=begun,
            rung_rows=size,
            rungs=tuple(sorted(self.ladder.rows)),
            # Windows of the same slots, as the widest step needs so many, count as the longest.
            windows=tuple({self.ladder.slots(n): n for n in self.ladder.responses}.items()),
            others=self.pool.longest if self.pool else 0,
            widths=self.widths,
            beside=len(self.fresh) * self.setup.group_size
            + (self.pool.unfinished if self.pool else 0),
            capacity=self.room.capacity(self.setup.response_slots),
        )
        passes = [
            make(chunk=w, slots=slots or self.ladder.verify_slots(w, longest)) for w in widths
        ]
        if self.cost is None or acceptance.RULES[self.setup.accept].whole_draft:
            return passes[-1]
        return self.cost.choose_pass(passes)

    def _verify(self, batch: _Pool, drafts: np.ndarray, first: Pass) -> _Pool:
        """Judge pending drafts in wide passes, as long as that pays."""
        one: Pass | None = first
        while batch.verifying:
            if self._may_split(batch):
                batch = self._split(batch)
            if one is None:
                # Rows that verified all passes so far have as many tokens less to verify.
                left = np.sort(drafts)[-batch.verifying :] - (drafts.max() - batch.longest_draft)
                one = self._pass(np.maximum(left, 1), batch.size, batch.slots, batch.longest)
                if one is None:
                    break
            tally = self._run(batch, self._limits(-1, steps=1), one.chunk, wide=True)
            kept, judged = int(tally.kept), int(tally.judged)
            self.stats.verified_tokens += batch.size * one.chunk
            self.stats.judged_tokens += judged
            self.stats.kept_tokens += kept
            if self.cost:
                predicted = self.cost.record_pass(one, kept, judged)
                self.stats.predicted_verify_seconds += predicted
            one = None
        return batch

    def _may_split(self, batch: _Pool) -> bool:
        """Whether fewer rows are verifying than the rung holds, and there is room for both rungs
        and for those that the others join."""
        size, pool = self.ladder.rows_for(batch.verifying), self.pool
        if size == batch.size:
            return False
        others = batch.active - batch.verifying + (pool.unfinished if pool else 0)
        longest = max(batch.longest, pool.longest if pool else 0)
        joined = self.ladder.slots_for(longest + 1)
        rungs = [(batch.size, batch.slots), (size, batch.slots), *self._pool_shape()]
        rungs.append((self.ladder.rows_for(max(others, 1)), joined))
        return self.room.holds(*rungs)

    def _split(self, batch: _Pool) -> _Pool:
        """Send rows that are not verifying into the pool; the others go on, on a smaller rung."""
        judged = rows.verifying(batch.rows)
        size = self.ladder.rows_for(batch.verifying)
        self._write_back(batch)
        cache, moved = rows.move(batch.cache, batch.rows, judged, size=size, slots=batch.slots)
        self.aside = [(size, batch.slots)]
        self._note_bytes((batch.size, batch.slots), *self._pool_shape())
        # Rows of the next step's prompts have no drafts: all that are here are the board's own.
        rest = dataclasses.replace(batch, verifying=0)
        rest.own = rest.active = rest.real = batch.active - batch.verifying
        rest.rows = rows.without_pending(rows.drop(batch.rows, judged))
        kept = dataclasses.replace(batch, cache=cache, rows=moved, size=size)
        kept.own = kept.active = kept.real = batch.verifying
        if rest.active:
            self._join(rest)
        self.aside = []
        return kept

    # The pool --------------------------------------------------------------------------------

    def _join(self, batch: _Pool) -> None:
        """Put a batch's unfinished rows into the pool."""
        if not batch.unfinished:
            self._write_back(batch)
            return
        pool = self.pool
        total = batch.unfinished + (pool.unfinished if pool else 0)
        longest = max(batch.longest, pool.longest if pool else 0)
        size = self.ladder.rows_for(total)
        slots = self.ladder.slots_for(longest + 1)
        if pool is None:
            self.pool = self._moved(batch, size, slots)
            return
        self._note_bytes((batch.size, batch.slots), *{(pool.size, pool.slots), (size, slots)})
        self._write_back(batch)
        self._write_back(pool)
        self.pool = pool = self._moved(pool, size, slots)
        pool, batch = self._same_form(pool, batch)
        cache, joined = rows.add(pool.cache, pool.rows, batch.cache, batch.rows, ~batch.rows.done)
        names = ("own", "active", "parked", "verifying")
        sums = {name: getattr(pool, name) + getattr(batch, name) for name in names}
        self.pool = _Pool(
            cache, joined, size, slots, total, **sums, longest=longest,
            longest_draft=max(pool.longest_draft, batch.longest_draft),
        )  # fmt: skip

    def _same_form(self, *pools: _Pool) -> list[_Pool]:
        """With pending drafts everywhere if anywhere: the two sides of a join need one form."""
        like = next((p.rows.pending for p in pools if p.rows.pending is not None), None)
        if like is None:
            return list(pools)
        return [
            p
            if p.rows.pending is not None
            else dataclasses.replace(p, rows=rows.with_empty_pending(p.rows, like))
            for p in pools
        ]

    def _moved(self, pool: _Pool, size: int, slots: int) -> _Pool:
        if (size, slots) == (pool.size, pool.slots):
            return pool
        self._write_back(pool)
        cache, moved = rows.move(pool.cache, pool.rows, ~pool.rows.done, size=size, slots=slots)
        self._note_bytes((pool.size, pool.slots), (size, slots))
        return dataclasses.replace(pool, cache=cache, rows=moved, size=size, slots=slots)

    def _write_back(self, pool: _Pool) -> None:
        """Let the board know of rows that are done, before they leave the rung."""
        if pool.unfinished < pool.real:
            self._collect(pool)

    def _collect(self, pool: _Pool) -> None:
        self.board = rows.collect(pool.rows, self.board)
        pool.real = pool.unfinished

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
        if pool.rows.pending is not None and not pool.verifying:
            pool.rows = rows.without_pending(pool.rows)
        pool = self._moved(pool, ladder.rows_for(pool.unfinished), ladder.slots(response))
        self.pool = pool
        if self._waits():
            # As many are free then as begin together; where even so nobody could, one more row.
            stop = max(min(capacity - self.room.refill(capacity), pool.own - 1), 0)
        else:
            stop = max(ladder.rows_below(pool.size), self.behind)
        steps = _FOREVER
        if self.wanted:
            steps = min(max(self.setup.response_slots // 8, 1), LOOK_IN_PARTIAL)
        elif pool.own < pool.unfinished:  # others use the idle places: the rung stays for them
            stop, steps = 0, LOOK_IN_AHEAD
        elif self.ahead and not self._waits():
            steps = LOOK_IN_AHEAD
        if self.cost is None:
            self._run(pool, self._limits(stop, response, steps), self.widths[-1])
            return
        visit = self.cost.plan_visit(pool.size, pool.slots, self.widths)
        limits = self._limits(stop, response, min(steps, visit.max_steps or steps))
        tally = self._run(pool, limits, visit.width)
        steps, judged = int(tally.steps), (int(tally.kept), int(tally.judged))
        seconds = self.cost.record_visit(visit, steps, tally.accepted.tolist(), *judged)
        self.stats.predicted_seconds += seconds

    def _run(self, pool: _Pool, limits: Limits, width: int, wide: bool = False):
        """A visit, recorded."""
        tree = self.setup.tree is not None and width > 1 and not wide
        draws = self.setup.accept == "match"
        corpus = self._read_rows() if tree else None
        start = time.perf_counter()
        pool.cache, pool.rows, corpus, tally, numbers = decode.visit(
            self.setup,
            self.weights,
            pool.cache,
            pool.rows,
            corpus,
            limits,
            width=width,
            wide=wide and not draws,
        )
        if tree:
            self.corpus = corpus
        else:
            self.unread = True
        told = self.wanted or self.behind
        done = (pool.rows.index, pool.rows.done) if told else None
        tally, numbers, done = jax.device_get((tally, numbers, done))
        judges = pool.rows.pending is not None
        self.stats.programs.add(("visit", pool.size, pool.slots, width, tree, wide, judges))
        seconds = time.perf_counter() - start
        pool.report(numbers)
        if done is not None:
            self.finished[done[0][done[1] & (done[0] < self.own)]] = True
        stats, steps = self.stats, int(tally.steps)
        if wide:
            stats.verify_seconds += seconds
            return tally
        stats.decode_seconds += seconds
        stats.decode_steps += steps
        stats.row_steps += steps * pool.size
        stats.drafted_tokens += int(tally.drafted)
        stats.visits.append((pool.size, pool.slots, width, steps))
        return tally

    def _read_rows(self) -> Corpus:
        """The corpus with all that rows hold. Steps that take no drafts from it do not write to it
        either, nor is it made for them, so that they cost what they cost where there is none."""
        if callable(self.corpus):
            self.corpus = self.corpus()
        if self.unread:
            self._collect(self.pool)
            self.corpus = drafting.read(self.corpus, self.board.tokens, self.board.lens)
            self.unread = False
        return self.corpus

    def _limits(self, stop: int, length: int | None = None, steps: int = _FOREVER) -> Limits:
        length = self.setup.response_slots if length is None else length
        # NumPy's scalars: a device array for each would cost the host half a millisecond a visit.
        return Limits(*(np.int32(x) for x in (min(stop, _FOREVER), length, steps, self.own)))

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
        self.stats.evicted += int(out.sum())
        self._collect(pool)
        pool.rows = rows.drop(pool.rows, put(out, "batch"))
        pool.report(np.asarray(decode.progress(pool.rows, self._limits(_FOREVER))))
        pool.real = pool.active

    def _pool_shape(self) -> list[tuple[int, int]]:
        return [(self.pool.size, self.pool.slots)] if self.pool else []

    def _note_bytes(self, *rungs: tuple[int, int]) -> None:
        held = self.room.bytes(*rungs, *self.aside)
        self.stats.cache_bytes = max(self.stats.cache_bytes, held)
