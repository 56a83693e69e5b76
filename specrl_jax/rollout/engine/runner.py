"""Rows in flight: how they get onto a rung, are computed there, travel, and come back to the board.

The engine decides who, where and for how long; here it is carried out, and what it took is noted.
Rows that decode share one rung, the *pool*; beside it there is for a moment a batch that begins.
Between visits of a rung the host reads six numbers and a tally; no token visits it.
"""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.engine import decode
from specrl_jax.rollout.engine import decode_state as rows
from specrl_jax.rollout.engine.decode import StepCounts, StopCondition
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.kv_budget import KVBudget
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.sharding import put
from specrl_jax.types import Drafts

FOREVER = np.iinfo(np.int32).max


@dataclasses.dataclass
class DecodeBatch:
    """Rows on a rung. own, active, parked, verifying, longest, longest_draft: as `decode_steps`
    reports them. real: rows that are not fillers, but for those whose end is on the board."""

    cache: KVCache
    rows: DecodeState
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

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.slots

    def report(self, numbers: np.ndarray) -> None:
        """Take over what `decode.decode_steps` reported."""
        names = ("own", "active", "parked", "verifying", "longest", "longest_draft")
        for name, number in zip(names, numbers.tolist(), strict=True):
            setattr(self, name, number)

    def leave_drafts(self) -> None:
        """Nothing is left to judge."""
        self.rows, self.verifying, self.longest_draft = rows.without_drafts(self.rows), 0, 0


@dataclasses.dataclass
class ModelRunner:
    """The board, the pool and the corpus of one rollout, and what they cost so far.

    board: all rows, the first `own` of which the rollout is for. drafts: of all rows, or None.
    corpus: makes the draft source's state before the first step that drafts, then that state.
    unread: whether rows hold tokens that it does not know. finished: bool [B], rows that are done;
    told: whether every visit keeps it up to date. prefilled: since when, and the cache, of prompts
    whose rows begin next. aside: shape of a rung held beside batch and pool for a moment.
    """

    setup: ProgramSpec
    room: KVBudget
    weights: Params
    board: DecodeState
    own: int
    drafts: Drafts | None
    log_lenience: float
    corpus: Any
    unread: bool
    finished: np.ndarray
    told: bool
    pool: DecodeBatch | None = None
    prefilled: tuple[float, KVCache] | None = None
    aside: tuple[int, int] | None = None
    stats: Stats = dataclasses.field(default_factory=Stats)

    # Onto a rung and back --------------------------------------------------------------------

    def prefill(self, prompts: np.ndarray) -> None:
        """Let the device compute prompts int32 [Q', P]; `begin` waits for it."""
        start = time.perf_counter()
        self.prefilled = start, decode.prefill(self.setup, self.weights, prompts)
        self.stats.programs.add(("prefill", *prompts.shape))

    def begin(
        self, places: np.ndarray, size: int, slots: int, draft_lens: np.ndarray
    ) -> DecodeBatch:
        """Rows at `places` int [n] of the board, which hold nothing yet and whose prompts were
        prefilled, on a rung of this shape. draft_lens: int [n], tokens of their drafts that are to
        be judged, 0 for all if none are."""
        picked = self._pick(places, size, judged=draft_lens.any())
        (start, cache), self.prefilled = self.prefilled, None  # not kept beside its copies
        cache = decode.broadcast_prefill(cache, slots=slots, group_size=self.setup.group_size)
        jax.block_until_ready(cache)
        self.stats.prefill_seconds += time.perf_counter() - start
        prompts = (size // self.setup.group_size, self.room.ladder.prompt_slots)
        self.note_bytes(prompts, (size, slots), *self.pool_shape())
        return DecodeBatch(
            cache, picked, size, slots, len(places), active=len(places),
            own=int(np.count_nonzero(places < self.own)),
            # Rows that hold nothing verify exactly where they have a draft.
            verifying=int(np.count_nonzero(draft_lens)), longest_draft=int(draft_lens.max()),
        )  # fmt: skip

    def begin_again(
        self, prompts: np.ndarray, places: np.ndarray, size: int, slots: int, width: int,
        *, judged: bool,
    ) -> DecodeBatch:  # fmt: skip
        """Rows of the board that hold up to `width` tokens but have no cache: one pass over these
        and prompts int32 [size, P]. judged: with what is left of their drafts."""
        picked = self._pick(places, size, judged=judged)
        start = time.perf_counter()
        cache = decode.re_prefill(
            self.setup, self.weights, prompts, picked, slots=slots, width=width
        )
        rung = DecodeBatch(cache, picked, size, slots, len(places))
        self._look(rung)
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.programs.add(("replay", *rung.shape, width))
        self.note_bytes(rung.shape, *self.pool_shape())
        return rung

    def _pick(self, places: np.ndarray, size: int, *, judged: bool) -> DecodeState:
        """Rows of the board on a rung of `size`; judged: with their drafts."""
        if judged and self.board.draft is None:
            accept, lenience = self.setup.accept, self.log_lenience
            self.board = rows.with_drafts(self.board, self.drafts, accept, lenience)
        padded = np.full(size, -1, np.int32)
        padded[: len(places)] = places
        return rows.gather(self.board if judged else rows.without_drafts(self.board), padded)

    def _look(self, rung: DecodeBatch) -> None:
        """Let a rung know what its rows are like."""
        rung.report(np.asarray(decode.progress(rung.rows, self.limits(FOREVER))))

    def evict(self, out: np.ndarray) -> None:
        """The pool's rows marked in `out` bool [b] give up their cache."""
        pool = self.pool
        self.stats.preempted += int(out.sum())
        self.collect(pool)
        pool.rows = rows.mark_padding(pool.rows, put(out, "batch"))
        self._look(pool)
        pool.real = pool.active

    def land(self) -> None:
        """The pool's rows, back on the board with what they hold; there is no pool then."""
        self.collect(self.pool)
        self.pool = None

    def collect(self, rung: DecodeBatch) -> None:
        """Write what the rung's rows hold to the board."""
        self.board = rows.scatter(rung.rows, self.board)
        rung.real = rung.unfinished

    def _write_back(self, rung: DecodeBatch) -> None:
        """Let the board know of rows that are done, before they leave the rung."""
        if rung.unfinished < rung.real:
            self.collect(rung)

    # From rung to rung -----------------------------------------------------------------------

    def _moved(self, rung: DecodeBatch, size: int, slots: int) -> DecodeBatch:
        """Its unfinished rows on a rung of another shape."""
        if (size, slots) == rung.shape:
            return rung
        self._write_back(rung)
        cache, moved = rows.resize(rung.cache, rung.rows, ~rung.rows.done, size=size, slots=slots)
        self.note_bytes(rung.shape, (size, slots))
        return dataclasses.replace(rung, cache=cache, rows=moved, size=size, slots=slots)

    def move_pool(self, size: int, slots: int) -> DecodeBatch:
        """The pool, brought to another shape."""
        self.pool = self._moved(self.pool, size, slots)
        return self.pool

    def join(self, batch: DecodeBatch) -> None:
        """Put a batch's unfinished rows into the pool."""
        if not batch.unfinished:
            self._write_back(batch)
            return
        pool, (size, slots) = self.pool, self.joined_shape(batch.unfinished, batch.longest)
        if pool is None:
            self.pool = self._moved(batch, size, slots)
            return
        self.note_bytes(batch.shape, *{pool.shape, (size, slots)})
        self._write_back(batch)
        self._write_back(pool)
        pool = self.move_pool(size, slots)
        pool, batch = _same_form(pool, batch)
        cache, joined = rows.insert(
            pool.cache, pool.rows, batch.cache, batch.rows, ~batch.rows.done
        )
        counts = ("own", "active", "parked", "verifying")
        sums = {n: getattr(pool, n) + getattr(batch, n) for n in counts}
        most = {n: max(getattr(pool, n), getattr(batch, n)) for n in ("longest", "longest_draft")}
        total = pool.unfinished + batch.unfinished
        self.pool = DecodeBatch(cache, joined, size, slots, total, **sums, **most)

    def joined_shape(self, unfinished: int, longest: int) -> tuple[int, int]:
        """(rows, slots) of the rung for the pool and `unfinished` rows more, the longest of which
        holds `longest` tokens."""
        if self.pool is not None:
            unfinished += self.pool.unfinished
            longest = max(longest, self.pool.longest)
        return self.room.ladder.rows_for(unfinished), self.room.ladder.slots_for(longest + 1)

    def split(self, batch: DecodeBatch, size: int) -> DecodeBatch:
        """Send rows that are not verifying into the pool, and return the others, on a rung of
        `size`."""
        judged = rows.verifying(batch.rows)
        self._write_back(batch)
        cache, moved = rows.resize(batch.cache, batch.rows, judged, size=size, slots=batch.slots)
        self.aside = (size, batch.slots)
        self.note_bytes(batch.shape, *self.pool_shape())
        # Rows of the next step's prompts have no drafts: all that are here are the board's own.
        rest = dataclasses.replace(batch, verifying=0)
        rest.own = rest.active = rest.real = batch.active - batch.verifying
        rest.rows = rows.without_drafts(rows.mark_padding(batch.rows, judged))
        kept = dataclasses.replace(batch, cache=cache, rows=moved, size=size)
        kept.own = kept.active = kept.real = batch.verifying
        if rest.active:
            self.join(rest)
        self.aside = None
        return kept

    def pool_shape(self) -> list[tuple[int, int]]:
        """Shapes of the rungs in flight beside a batch: one or none."""
        return [self.pool.shape] if self.pool else []

    def note_bytes(self, *rungs: tuple[int, int]) -> None:
        """KV caches of these shapes exist at once, beside what is aside."""
        held = self.room.bytes(*rungs, *([self.aside] if self.aside else []))
        self.stats.cache_bytes = max(self.stats.cache_bytes, held)

    # On a rung -------------------------------------------------------------------------------

    def limits(self, stop: int, length: int | None = None, steps: int = FOREVER) -> StopCondition:
        """Until at most `stop` own rows are active, up to `length` tokens a row (all), `steps`
        steps at most."""
        length = self.setup.response_slots if length is None else length
        # NumPy's scalars: a device array for each would cost the host half a millisecond a visit.
        return StopCondition(*(np.int32(x) for x in (min(stop, FOREVER), length, steps, self.own)))

    def run(
        self, rung: DecodeBatch, limits: StopCondition, width: int, *, wide: bool = False
    ) -> StepCounts:
        """A visit (`decode.decode_steps`), recorded. wide: a verification pass."""
        tree = self.setup.draft_source is not None and width > 1 and not wide
        corpus = self._read_rows(rung) if tree else None
        start = time.perf_counter()
        rung.cache, rung.rows, corpus, tally, numbers = decode.decode_steps(
            self.setup,
            self.weights,
            rung.cache,
            rung.rows,
            corpus,
            limits,
            width=width,
            verify=wide,
        )
        if tree:
            self.corpus = corpus
        else:
            self.unread = True
        done = (rung.rows.index, rung.rows.done) if self.told else None
        tally, numbers, done = jax.device_get((tally, numbers, done))
        seconds = time.perf_counter() - start
        judges = rung.rows.draft is not None
        self.stats.programs.add(("visit", *rung.shape, width, tree, wide, judges))
        rung.report(numbers)
        if done is not None:
            self.finished[done[0][done[1] & (done[0] < self.own)]] = True
        stats, steps = self.stats, int(tally.steps)
        if wide:
            stats.verify_seconds += seconds
            stats.verify_work += rung.size * width
            stats.verified_tokens += int(tally.verified)
            stats.accepted_tokens += int(tally.accepted)
            return tally
        stats.decode_seconds += seconds
        stats.decode_steps += steps
        stats.row_steps += steps * rung.size
        stats.drafted_tokens += int(tally.drafted)
        stats.decode_runs.append((*rung.shape, width, steps))
        return tally

    def _read_rows(self, rung: DecodeBatch) -> Any:
        """The corpus with all that rows hold, those on the rung too. Steps that take no drafts from
        it do not write to it either, nor is it made for them, so that they cost what they cost
        where there is none."""
        if callable(self.corpus):
            self.corpus = self.corpus()
        if self.unread:
            self.collect(rung)
            source = self.setup.draft_source
            self.corpus = source.sync(self.corpus, self.board.tokens, self.board.lens)
            self.unread = False
        return self.corpus


def _same_form(*rungs: DecodeBatch) -> list[DecodeBatch]:
    """With pending drafts everywhere if anywhere: the two sides of a join need one form."""
    like = next((r.rows.draft for r in rungs if r.rows.draft is not None), None)
    if like is None:
        return list(rungs)
    return [
        r
        if r.rows.draft is not None
        else dataclasses.replace(r, rows=rows.with_empty_drafts(r.rows, like))
        for r in rungs
    ]
