"""What a step costs and what drafts bring: how wide to decode, and whether to verify on.

Takes in measured seconds of a width-W step at a few (rows, slots) and counts of accepted draft
tokens; gives out a width for the next visit to a rung, and which verification to run next, if any.
By measured cost, as ReSpec (arXiv 2510.26475) and NeMo-RL (2604.26779) find necessary; the long
tail gets the widest drafts (DAS, 2511.13841), since in its small rungs wide steps are cheap.

Host only. A choice is a pure function of what `Speculation.host()` gives; clocks enter through the
table alone, so a resumed run, and every process that was given the same table, chooses alike.

Worked row: steps of width 1, 4, 8 take 10, 15, 23 ms; a share .8 .64 .51 .41 .33 .26 .21 of the row
steps would have 1 ... 7 draft tokens accepted. Width 4 emits 1 + .8 + .64 + .51 = 2.95 tokens in
15 ms, width 8 4.16 in 23 ms: 197 and 181 a second against 100 of width 1, so the width is 4.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.rollout.adaptive.step_costs import StepCosts
from specrl_jax.types import StatePart

# Expected gains below are not taken: steps are known to a tenth or so, and a rung saves less than
# its rows do in the mean, as they end in the midst of wide steps and wait for those that got least.
MARGIN = 1.15
TABLE_ERROR = 0.1  # share of plain steps that a probe is charged at least
# Of a verification less: decoding also compacts rows and begins visits, which no table tells.
VERIFY_MARGIN = 1.05
BUDGET = 0.005  # share of the time that may be lost to probing with drafts that never pay
HALF_LIFE = 1_024  # row steps after which what tree drafts brought counts half
KNOWN_ROW_STEPS = 64  # a width whose last token was checked less often is unknown: tried briefly
PROBE_ROW_STEPS = 128  # row steps of a probe, within PROBE_STEPS
PROBE_STEPS = (4, 32)  # fewest and most steps of a probe
REVIEW_STEPS = 64  # longest speculative visit, so that bad drafts cost little; at width 1 shortest
PRIOR, PRIOR_ROW_STEPS = 0.7, 8  # chance that a tree draft goes on being right, and its weight
VERIFIED_HALF_LIFE = 4_096  # judged tokens after which a verification counts half
VERIFIED_PRIOR, VERIFIED_PRIOR_TOKENS = 0.99, 32  # chance to keep a token of a previous response


@dataclasses.dataclass
class Acceptance:
    """What drafts have brought lately; counts that fade as new ones come in.

    Of tree drafts, per leading token k = 1, 2, ... (item k - 1): `offered`, row steps in which it
    could be checked (width > k); `at_risk`, those of them with k - 1 tokens accepted; `accepted`,
    with k accepted. Steps of every width so add to what they can tell, as in a Kaplan-Meier
    estimate. Rows that have no draft, or a shorter one, count as not accepted. Every observation
    fades all k alike: what is no longer checked is forgotten, and so comes to be tried again. Of
    previous responses: tokens `verified`, and of these `kept`.
    """

    offered: list[float] = dataclasses.field(default_factory=list)
    at_risk: list[float] = dataclasses.field(default_factory=list)
    accepted: list[float] = dataclasses.field(default_factory=list)
    verified: float = 0.0
    kept: float = 0.0

    def observe(self, histogram: Sequence[float], width: int) -> None:
        """Steps of one width: histogram[a] active row steps had exactly a draft tokens accepted.

        a = 0 ... width - 1, zeros included, so that it sums to the row steps; rows that are done
        do not count. Width 1 tells nothing.
        """
        if width == 1:
            return
        counts = [float(n) for n in histogram] + [0.0] * (width - len(histogram))
        if len(counts) > width or min(counts) < 0:
            raise ValueError(f"expected <= {width} counts >= 0, got {counts}")
        at_least = list(itertools.accumulate(reversed(counts)))[::-1]
        if not (total := at_least[0]):
            return
        keep = 0.5 ** (total / HALF_LIFE)
        for name in ("offered", "at_risk", "accepted"):
            old = [n * keep for n in getattr(self, name)]
            setattr(self, name, old + [0.0] * (width - 1 - len(old)))
        for k in range(width - 1):
            self.offered[k] += total
            self.at_risk[k] += at_least[k]
            self.accepted[k] += at_least[k + 1]

    def survival(self, tokens: int) -> list[float]:
        """s_1 ... s_tokens: the share of row steps with at least k draft tokens accepted.

        The product of the chances to go on. Where little is known, that is the chance before, but
        at least PRIOR: hope costs one probe, despair would never be corrected.
        """
        chance, shares, unknown = PRIOR, [1.0], [0.0] * tokens
        for at_risk, accepted in zip(self.at_risk + unknown, self.accepted + unknown):
            hope = max(chance, PRIOR) * PRIOR_ROW_STEPS
            chance = (accepted + hope) / (at_risk + PRIOR_ROW_STEPS)
            shares.append(shares[-1] * chance)
        return shares[1 : tokens + 1]

    def expected_tokens(self, width: int) -> float:
        """Tokens that a row emits in a step: E(W) = 1 + Σ_{k<W} s_k."""
        return 1.0 + sum(self.survival(width - 1))

    def knows(self, width: int) -> bool:
        """Whether all of such a step has been seen, often enough and of late."""
        return width == 1 or sum(self.offered[width - 2 : width - 1]) >= KNOWN_ROW_STEPS

    def observe_verified(self, kept: float, judged: float) -> None:
        """A verification: judged tokens are those kept, and one more per row that rejected one."""
        kept, judged = float(kept), float(judged)
        if not 0 <= kept <= judged:
            raise ValueError(f"expected 0 <= kept <= judged, got {kept} of {judged}")
        fade = 0.5 ** (judged / VERIFIED_HALF_LIFE)
        self.verified, self.kept = self.verified * fade + judged, self.kept * fade + kept

    def rate(self) -> float:
        """Chance a to keep a judged token of a previous response."""
        hope = VERIFIED_PRIOR * VERIFIED_PRIOR_TOKENS
        return (self.kept + hope) / (self.verified + VERIFIED_PRIOR_TOKENS)


@dataclasses.dataclass(frozen=True)
class VerifyPlan:
    """One verification of up to `chunk` more draft tokens, as it could be run.

    left: draft tokens left of every row that would verify, in a rung of rung_rows and slots. begun:
    tokens that the longest of these rows holds. Where they would be decoded instead: `rungs`, rows,
    ascending; `windows`, (slots, response tokens that they hold), ascending; `widths` of a step.
    beside: other rows that want to decode, as far as `capacity` rows in flight allow; the longest
    of those in flight holds `others` tokens.
    """

    draft_lens: tuple[int, ...]
    rows: int
    slots: int
    verify_width: int
    row_buckets: tuple[int, ...]
    cache_lengths: tuple[tuple[int, int], ...]
    held: int = 0
    step_widths: tuple[int, ...] = (1,)
    others: int = 0
    others_held: int = 0
    capacity: int = 0

    def active(self, rate: float | None = None) -> np.ndarray:
        """Rows expected to decode the token t = 0, 1, ... of what is left: all whose draft is
        longer, or where the chunk keeps a token with chance `rate`, fewer.

        A row with L tokens left decodes t unless the first L - t are kept, and no more than `chunk`
        can be: Σ over rows of 1 - [L - t <= chunk]·rate^(L - t).
        """
        count = np.bincount(self.draft_lens, minlength=1).astype(float)  # by length
        active = count[::-1].cumsum()[::-1][1:]
        if rate is None or not len(active):
            return active
        powers = rate ** np.arange(1, min(self.verify_width, len(active)) + 1)
        return active - np.convolve(count[:0:-1], powers)[: len(active)][::-1]

    def rung_at(self, kept: int, rate: float) -> int:
        """Rows of the rung for those that are expected to keep the next `kept` tokens and have more
        to verify; before the first, the pass's own."""
        if not kept:
            return self.rows
        rows = math.floor(sum(n > kept for n in self.draft_lens) * rate**kept)
        return min((n for n in self.row_buckets if rows <= n <= self.rows), default=self.rows)

    def ahead(self, rate: float) -> int:
        """Tokens that the row which keeps most is expected to keep, of those that need more than
        the first window.

        The longest of n runs of chance a has at most (1 + 1/2 + ... + 1/n) / -ln a tokens in the
        mean, and that is at most (1 + ln n) / -ln a.
        """
        long = [n for n in self.draft_lens if n > self.cache_lengths[0][1] - self.held]
        if not long:
            return 0
        run = (1 + math.log(len(long))) / max(-math.log(rate), 1e-9)
        return math.ceil(min(run, self.verify_width, max(long)))

    def shares(self, active: np.ndarray, ahead: int = 0) -> dict[tuple[int, int], float]:
        """Steps that these rows have to pay for, by rows and slots of the rung: they share them
        with the rows beside; where less than one row is expected, so is less than one step. ahead:
        tokens that the longest row has got beyond `begun` before the first of these steps."""
        others = np.clip(self.capacity - np.ceil(active), 0, self.others)
        share = active / (np.maximum(active, 1.0) + others)
        places = np.searchsorted(self.row_buckets, np.ceil(active) + others)
        places = np.minimum(places, len(self.row_buckets) - 1)
        slots, lengths = zip(*self.cache_lengths)
        longest = max(self.held + ahead, self.others_held) + np.arange(1, len(active) + 1)
        depths = np.minimum(np.searchsorted(lengths, longest), len(slots) - 1)
        kinds = list(itertools.product(self.row_buckets, slots))
        found = np.bincount(places * len(slots) + depths, share, minlength=len(kinds))
        return dict(zip(kinds, found.tolist()))


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Decode in this rung, at `width`, for at most `max_steps` steps (0: no limit).

    Suffix matching is on where width > 1. base: the width that seems best of those known; another
    one is tried. price: of a probe, seconds that it may lose; of a visit at its base, up to which
    it saves for the next probe; 0 for a width that seems best of all.
    """

    rows: int
    slots: int
    width: int
    base: int
    max_steps: int
    price: float = 0.0


class _Choice(NamedTuple):
    """Of the widths of a step in a rung: all, ascending, 1 among them; the one that seems best; the
    best of those that are known, and the tokens that a row is expected to emit at it."""

    widths: tuple[int, ...]
    best: int
    base: int
    emitted: float


@dataclasses.dataclass
class Speculation(StatePart):
    """Table, acceptance, and what probes may cost. Only `record_*` change anything.

    credit: predicted seconds that probes may lose: BUDGET of the time, never more than the next one
    needs. A width that seems best is charged what its base would have done better, one that does
    not all that it took longer, and no less than the table may be wrong by, unless it paid by
    MARGIN: rows that get ahead of others save their rung less than that. So together they lose
    BUDGET of the time and one probe at most, as far as the table knows: what a first wide step
    reads of rows is not in it.
    Verification needs no probes: drafts that are left to decoding are judged there, or compared
    with what was drawn when the rollout is over.
    """

    table: StepCosts
    acceptance: Acceptance = dataclasses.field(default_factory=Acceptance)
    credit: float = 0.0

    def __post_init__(self):
        # Choices by rung and widths, as long as the table is the same and tree drafts have brought
        # nothing new: the device waits for most of them. No field: they follow from the state.
        self._choices: dict[tuple, _Choice] = {}
        self._chosen_from: tuple = ()

    def predicted(self, rows: int, slots: int, width: int, steps: int = 1) -> float:
        """Seconds of `steps` decode steps; at width 1 there is no draft, hence no matching."""
        return steps * self.table.seconds(rows, slots, width, width > 1)

    def choose_width(self, rows: int, slots: int, widths: Iterable[int]) -> int:
        """The width that is expected to emit most tokens a second; ties: smallest. 1 unless that is
        MARGIN times as many as plain decoding emits."""
        widths = sorted({1, *widths})
        if widths == [1]:
            return 1
        shares = self.acceptance.survival(widths[-1] - 1)
        speeds = {w: (1.0 + sum(shares[: w - 1])) / self.predicted(rows, slots, w) for w in widths}
        best = max(widths, key=speeds.__getitem__)
        return best if speeds[best] >= MARGIN * speeds[1] else 1

    def widens(self, rungs: Iterable[tuple[int, int]], widths: Iterable[int]) -> bool:
        """Whether in any of these (rows, slots) a width that is known beats 1."""
        widths = tuple(widths)
        return any(self._choice(rows, slots, widths).base > 1 for rows, slots in rungs)

    def _choice(self, rows: int, slots: int, widths: tuple[int, ...]) -> _Choice:
        """Remembered until the table, or what tree drafts have brought, is another."""
        counts = self.acceptance
        state = (self.table, (*counts.offered, *counts.at_risk, *counts.accepted))
        if state != self._chosen_from:
            self._chosen_from, self._choices = state, {}
        key = (rows, slots, widths)
        if key not in self._choices:
            known = tuple(filter(self.acceptance.knows, widths))
            base = self.choose_width(rows, slots, known)
            best = base if known == widths else self.choose_width(rows, slots, widths)
            emitted = self.acceptance.expected_tokens(base)
            every = tuple(sorted({1, *widths}))
            self._choices[key] = _Choice(every, best, base, emitted)
        return self._choices[key]

    def plan_steps(self, rows: int, slots: int, widths: Iterable[int]) -> StepPlan:
        """The next visit to this rung, to be recorded once it is over.

        A width that seems best but is not known is tried briefly, unless trials are still to be
        paid for. Where nothing beats 1, the next width is probed once its loss has been earned.
        """
        widths, best, base, _ = self._choice(rows, slots, tuple(widths))
        least, most = PROBE_STEPS
        steps = min(max(math.ceil(PROBE_ROW_STEPS / rows), least), most)
        if best != base and self.credit >= 0:
            return StepPlan(rows, slots, best, base, steps)
        if base > 1 or widths == (1,):
            return StepPlan(rows, slots, base, base, REVIEW_STEPS if base > 1 else 0)
        plain = self.predicted(rows, slots, 1)
        longer = self.predicted(rows, slots, widths[1], steps) - steps * plain
        cost = max(longer, TABLE_ERROR * steps * plain)
        if best == base and self.credit >= cost:
            return StepPlan(rows, slots, widths[1], base, steps, cost)
        due = math.ceil(((cost if best == base else 0.0) - self.credit) / (BUDGET * plain))
        return StepPlan(rows, slots, base, base, max(due, REVIEW_STEPS), cost)

    def record_steps(
        self,
        visit: StepPlan,
        steps: int,
        histogram: Sequence[float] = (),
        kept: float = 0,
        judged: float = 0,
    ) -> float:
        """A visit is over, with the histogram for `Acceptance`; returns its predicted seconds.

        kept, judged: tokens of previous responses that were left to these steps: they tell whether
        to verify the next.
        """
        if judged:
            self.acceptance.observe_verified(kept, judged)
        self.acceptance.observe(histogram, visit.width)
        seconds = self.predicted(visit.rows, visit.slots, visit.width, steps)
        if visit.width == visit.base:
            self.credit = min(self.credit + BUDGET * seconds, visit.price)
            return seconds
        # The same drafts cut to the base's width tell what it would have emitted.
        emitted, instead = (
            sum(n * (1.0 + min(a, width - 1)) for a, n in enumerate(histogram))
            for width in (visit.width, visit.base)
        )
        gain = emitted / instead if instead else 1.0
        base_seconds = self.predicted(visit.rows, visit.slots, visit.base, steps)
        if visit.price and gain * base_seconds < MARGIN * seconds:
            self.credit -= visit.price * (steps / visit.max_steps)
        else:
            self.credit -= max(seconds - gain * base_seconds, 0.0)
        return seconds

    def choose_verification(self, passes: Sequence[VerifyPlan]) -> VerifyPlan | None:
        """The verification to run next: the first of those, alone or in a row of its kind, that are
        expected to save most decoding for their seconds. None where none saves VERIFY_MARGIN times
        these. They differ in `chunk` and `slots` alone."""
        rate, best, most = self.acceptance.rate(), None, VERIFY_MARGIN
        longest = max(passes[0].draft_lens, default=0)
        without = self._decode_seconds(passes[0])
        # Where more rows and slots cost more, none saves more than all in one would if no row got
        # ahead into another window: mostly that is little, and no other needs to be worked out.
        bound = without - self._decode_seconds(
            dataclasses.replace(passes[0], verify_width=longest), rate
        )
        for one in passes:
            seconds = 0.0
            for begun in range(0, longest, one.verify_width):
                rows = one.rung_at(begun, rate)
                seconds += self.table.seconds(rows, one.slots, one.verify_width, False)
                if bound <= most * seconds:
                    break
                row = dataclasses.replace(one, verify_width=begun + one.verify_width)
                saved = without - self._decode_seconds(row, rate, row.ahead(rate))
                if saved > most * seconds:
                    best, most = one, saved / seconds
        return best

    def record_verification(self, done: VerifyPlan, kept: int = 0, judged: int = 0) -> float:
        """A chunk was verified; returns its predicted seconds."""
        self.acceptance.observe_verified(kept, judged)
        return self._pass_seconds(done)

    def record_drafts(self, kept: int, judged: int) -> None:
        """A rollout is over, with tokens of previous responses that no pass and no step judged,
        compared with what was drawn."""
        self.acceptance.observe_verified(kept, judged)

    def _pass_seconds(self, one: VerifyPlan) -> float:
        return self.table.seconds(one.rows, one.slots, one.verify_width, False)

    def _decode_seconds(self, one: VerifyPlan, rate: float | None = None, ahead: int = 0) -> float:
        """To decode what is left of the drafts, every rung at the best width that is known: hope
        for tree drafts must not decide it."""
        total = 0.0
        for (rows, slots), steps in one.shares(one.active(rate), ahead).items():
            if steps:
                _, _, width, emitted = self._choice(rows, slots, one.step_widths)
                total += steps * self.predicted(rows, slots, width) / emitted
        return total

    def host(self) -> dict:
        """All that choices depend on, in values that JSON keeps exactly."""
        return dataclasses.asdict(self) | {"table": self.table.to_json()}

    def restore(self, host: Mapping, arrays: object = None) -> "Speculation":
        """Goes on where `host` was taken, with its table: a resumed run does not measure again."""
        table, acceptance = StepCosts.from_json(host["table"]), Acceptance(**host["acceptance"])
        return Speculation(**{**host, "table": table, "acceptance": acceptance})
