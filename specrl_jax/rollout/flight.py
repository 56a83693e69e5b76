"""Rows in flight: how they get onto a rung, are computed there, travel, and come back to the board.

The engine decides who, where and for how long; here it is carried out, and what it took is noted.
Rows that decode share one rung, the *pool*; beside it there is for a moment a batch that begins.
Between visits of a rung the host reads six numbers and a tally; no token visits it.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.transformer import Params
from specrl_jax.rollout import decode, drafting, rows
from specrl_jax.rollout.decode import Limits, Tally
from specrl_jax.rollout.drafting import Corpus
from specrl_jax.rollout.plan import Setup
from specrl_jax.rollout.room import Room
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.stats import Stats
from specrl_jax.types import Drafts

FOREVER = np.iinfo(np.int32).max


@dataclasses.dataclass
class Rung:
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

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.slots

    def report(self, numbers: np.ndarray) -> None:
        """Take over what `decode.visit` reported."""
        names = ("own", "active", "parked", "verifying", "longest", "longest_draft")
        for name, number in zip(names, numbers.tolist(), strict=True):
            setattr(self, name, number)


@dataclasses.dataclass
class Flight:
    """The board, the pool and the corpus of one rollout, and what they cost so far.

    board: all rows, the first `own` of which the rollout is for. corpus: what tree drafts read, or
    a function that makes it before the first step that does. unread: whether rows hold tokens that
    it does not know. finished: bool [B], rows that are done by now, kept up to date where it is
    `told`. aside: shape of a rung held beside batch and pool for a moment.
    """

    setup: Setup
    room: Room
    weights: Params
    board: Rows
    own: int
    corpus: Corpus | Callable[[], Corpus]
    unread: bool
    finished: np.ndarray
    told: bool
    pool: Rung | None = None
    aside: tuple[int, int] | None = None
    stats: Stats = dataclasses.field(default_factory=Stats)

    # Onto a rung and back --------------------------------------------------------------------

    def lay(self, drafts: Drafts, log_lenience: float) -> None:
        """Put drafts of all rows on the board, if they are not there yet."""
        if self.board.pending is None:
            self.board = rows.with_pending(self.board, drafts, self.setup.accept, log_lenience)

    def pick(self, places: np.ndarray, size: int, *, judged: bool) -> Rows:
        """Rows of the board on a rung of `size`; judged: with their drafts."""
        padded = np.full(size, -1, np.int32)
        padded[: len(places)] = places
        return rows.pick(self.board if judged else rows.without_pending(self.board), padded)

    def collect(self, rung: Rung) -> None:
        """Write what the rung's rows hold to the board."""
        self.board = rows.collect(rung.rows, self.board)
        rung.real = rung.unfinished

    def _write_back(self, rung: Rung) -> None:
        """Let the board know of rows that are done, before they leave the rung."""
        if rung.unfinished < rung.real:
            self.collect(rung)

    # From rung to rung -----------------------------------------------------------------------

    def moved(self, rung: Rung, size: int, slots: int) -> Rung:
        """Its unfinished rows on a rung of another shape."""
        if (size, slots) == rung.shape:
            return rung
        self._write_back(rung)
        cache, moved = rows.move(rung.cache, rung.rows, ~rung.rows.done, size=size, slots=slots)
        self.note_bytes(rung.shape, (size, slots))
        return dataclasses.replace(rung, cache=cache, rows=moved, size=size, slots=slots)

    def join(self, batch: Rung) -> None:
        """Put a batch's unfinished rows into the pool."""
        if not batch.unfinished:
            self._write_back(batch)
            return
        pool, ladder = self.pool, self.room.ladder
        total = batch.unfinished + (pool.unfinished if pool else 0)
        longest = max(batch.longest, pool.longest if pool else 0)
        size, slots = ladder.rows_for(total), ladder.slots_for(longest + 1)
        if pool is None:
            self.pool = self.moved(batch, size, slots)
            return
        self.note_bytes(batch.shape, *{pool.shape, (size, slots)})
        self._write_back(batch)
        self._write_back(pool)
        self.pool = pool = self.moved(pool, size, slots)
        pool, batch = _same_form(pool, batch)
        cache, joined = rows.add(pool.cache, pool.rows, batch.cache, batch.rows, ~batch.rows.done)
        names = ("own", "active", "parked", "verifying")
        sums = {name: getattr(pool, name) + getattr(batch, name) for name in names}
        self.pool = Rung(
            cache, joined, size, slots, total, **sums, longest=longest,
            longest_draft=max(pool.longest_draft, batch.longest_draft),
        )  # fmt: skip

    def split(self, batch: Rung) -> Rung:
        """Send rows that are not verifying into the pool; the others, on a smaller rung."""
        judged = rows.verifying(batch.rows)
        size = self.room.ladder.rows_for(batch.verifying)
        self._write_back(batch)
        cache, moved = rows.move(batch.cache, batch.rows, judged, size=size, slots=batch.slots)
        self.aside = (size, batch.slots)
        self.note_bytes(batch.shape, *self.pool_shape())
        # Rows of the next step's prompts have no drafts: all that are here are the board's own.
        rest = dataclasses.replace(batch, verifying=0)
        rest.own = rest.active = rest.real = batch.active - batch.verifying
        rest.rows = rows.without_pending(rows.drop(batch.rows, judged))
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

    def limits(self, stop: int, length: int | None = None, steps: int = FOREVER) -> Limits:
        """For `run`: until at most `stop` own rows are active, up to `length` tokens a row (all),
        `steps` steps at most."""
        length = self.setup.response_slots if length is None else length
        # NumPy's scalars: a device array for each would cost the host half a millisecond a visit.
        return Limits(*(np.int32(x) for x in (min(stop, FOREVER), length, steps, self.own)))

    def run(self, rung: Rung, limits: Limits, width: int, *, wide: bool = False) -> Tally:
        """A visit (`decode.visit`), recorded. wide: a verification pass."""
        tree = self.setup.tree is not None and width > 1 and not wide
        corpus = self._read_rows() if tree else None
        start = time.perf_counter()
        rung.cache, rung.rows, corpus, tally, numbers = decode.visit(
            self.setup,
            self.weights,
            rung.cache,
            rung.rows,
            corpus,
            limits,
            width=width,
            wide=wide and self.setup.accept != "match",
        )
        if tree:
            self.corpus = corpus
        else:
            self.unread = True
        done = (rung.rows.index, rung.rows.done) if self.told else None
        tally, numbers, done = jax.device_get((tally, numbers, done))
        seconds = time.perf_counter() - start
        judges = rung.rows.pending is not None
        self.stats.programs.add(("visit", *rung.shape, width, tree, wide, judges))
        rung.report(numbers)
        if done is not None:
            self.finished[done[0][done[1] & (done[0] < self.own)]] = True
        stats, steps = self.stats, int(tally.steps)
        if wide:
            stats.verify_seconds += seconds
            stats.verified_tokens += rung.size * width
            stats.judged_tokens += int(tally.judged)
            stats.kept_tokens += int(tally.kept)
            return tally
        stats.decode_seconds += seconds
        stats.decode_steps += steps
        stats.row_steps += steps * rung.size
        stats.drafted_tokens += int(tally.drafted)
        stats.visits.append((*rung.shape, width, steps))
        return tally

    def _read_rows(self) -> Corpus:
        """The corpus with all that rows hold. Steps that take no drafts from it do not write to it
        either, nor is it made for them, so that they cost what they cost where there is none."""
        if callable(self.corpus):
            self.corpus = self.corpus()
        if self.unread:
            self.collect(self.pool)
            self.corpus = drafting.read(self.corpus, self.board.tokens, self.board.lens)
            self.unread = False
        return self.corpus


def _same_form(*rungs: Rung) -> list[Rung]:
    """With pending drafts everywhere if anywhere: the two sides of a join need one form."""
    like = next((r.rows.pending for r in rungs if r.rows.pending is not None), None)
    if like is None:
        return list(rungs)
    return [
        r
        if r.rows.pending is not None
        else dataclasses.replace(r, rows=rows.with_empty_pending(r.rows, like))
        for r in rungs
    ]
