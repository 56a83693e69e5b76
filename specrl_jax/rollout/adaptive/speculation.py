"""Chooses how wide to decode and whether to verify drafts, by measured cost and running acceptance.

Takes in seconds of programs and counts of accepted draft tokens; gives out the width of the next
decode steps, and the next verification, if any. ReSpec (arXiv 2510.26475) and NeMo-RL (2604.26779)
find such a choice necessary; DAS (2511.13841) gives the long tail the widest drafts.

A choice is a pure function of `Speculation.host()`, so a resumed run repeats it.

Worked example: steps of width 1, 4, 8 take 10, 15, 23 ms. A row accepts at least 1 ... 7 draft
tokens with probability .8 .64 .51 .41 .33 .26 .21. Width 4 emits 1 + .8 + .64 + .51 = 2.95 tokens
in 15 ms, width 8 4.16 in 23 ms: 197 and 181 tokens a second against 100 of width 1. It is width 4.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.types import StatePart

if TYPE_CHECKING:
    from specrl_jax.rollout.adaptive.measure_steps import StepTimer

WIDTH_MARGIN = 1.15  # expected gain of a width over plain steps that is worth it
VERIFY_MARGIN = 1.05  # seconds that a verification saves, over its own, that are worth it
HALF_LIFE = 256  # row steps after which counts of the draft source count half
VERIFIED_HALF_LIFE = 4_096  # verified tokens after which counts of previous responses count half
PRIOR_ROW_STEPS = 8  # of no accepted token of the draft source, before anything is known
PRIOR_RATE = 0.99  # acceptance of previous responses, before anything is known
PRIOR_TOKENS = 32  # verified tokens that this rate counts as
PROBE_EVERY = 50  # a probe of n steps comes once in n times as many decode steps
PROBE_ROW_STEPS = 128  # row steps of a probe, within PROBE_STEPS
PROBE_STEPS = (4, 32)  # fewest and most steps of a probe
REVIEW_STEPS = 64  # most wide steps before the width is chosen again
MEASURED_PER_ROLLOUT = 2  # programs whose seconds are measured after a rollout
MEASURED_PER_KIND = 4  # of one width; a fit tells the seconds of the others
DRAWS = 3  # simulated sets of accepted lengths; every row has another quantile in each


@dataclasses.dataclass
class AcceptanceCounts:
    """Counts of accepted draft tokens; they fade as new ones come in."""

    # Of draft sources, by token 0, 1, ...: row steps that checked it and accepted all before, and
    # of these, those that accepted the token too; a missing token is not accepted.
    reached: list[float] = dataclasses.field(default_factory=list)
    accepted: list[float] = dataclasses.field(default_factory=list)
    # Tokens of previous responses.
    previous_verified: float = 0.0
    previous_accepted: float = 0.0

    def observe(self, histogram: Sequence[float], width: int) -> None:
        """Count steps of one width.

        histogram: [width], row steps of active rows by the number of accepted draft tokens.
        """
        if width == 1:
            return
        counts = [float(n) for n in histogram] + [0.0] * (width - len(histogram))
        at_least = list(itertools.accumulate(reversed(counts)))[::-1]
        fade = 0.5 ** (at_least[0] / HALF_LIFE)
        for name, new in (("reached", at_least[:-1]), ("accepted", at_least[1:])):
            old = getattr(self, name)
            faded = [n * fade for n in old[: width - 1]] + [0.0] * (width - 1 - len(old))
            setattr(self, name, [a + b for a, b in zip(faded, new)] + old[width - 1 :])

    def survival(self, tokens: int) -> list[float]:
        """s_1 ... s_tokens: the share of row steps that accept at least k draft tokens.

        The product of the chances to accept one more, as in a Kaplan-Meier estimate. A token that
        was never checked has the chance of the token before it.
        """
        chance = 0.0
        shares = [1.0]
        unknown = [0.0] * tokens
        for reached, accepted in zip(self.reached + unknown, self.accepted + unknown):
            chance = (accepted + chance * PRIOR_ROW_STEPS) / (reached + PRIOR_ROW_STEPS)
            shares.append(shares[-1] * chance)
        return shares[1 : tokens + 1]

    def expected_tokens(self, width: int) -> float:
        """Tokens that a row emits in a step: 1 + Σ_{k<width} s_k."""
        return 1.0 + sum(self.survival(width - 1))

    def observe_previous(self, accepted: float, verified: float) -> None:
        """Count tokens of previous responses. A row that rejects one has verified that one too."""
        fade = 0.5 ** (verified / VERIFIED_HALF_LIFE)
        self.previous_verified = self.previous_verified * fade + float(verified)
        self.previous_accepted = self.previous_accepted * fade + float(accepted)

    def rate(self) -> float:
        """The chance to accept a token of a previous response."""
        accepted = self.previous_accepted + PRIOR_RATE * PRIOR_TOKENS
        return accepted / (self.previous_verified + PRIOR_TOKENS)


@dataclasses.dataclass(frozen=True)
class VerifyPlan:
    """One verification as it could be run, and where its rows would decode instead."""

    draft_lens: tuple[int, ...]  # draft tokens left, of every row that would verify
    rows: int  # of the bucket that verifies
    slots: int  # of its cache
    verify_width: int  # draft tokens of a row that are verified at most
    buckets: Buckets  # where rows decode
    held: int = 0  # response tokens of the longest of the rows
    others: int = 0  # other rows that are running or waiting
    others_held: int = 0  # response tokens of the longest of those that are running
    sequences: int = 0  # packed, of prompts and drafts; 0: the pass is over the rows, prefilled

    @property
    def point(self) -> Point:
        return Point(self.rows, self.slots, self.verify_width, False, self.sequences)


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The next decode steps in a bucket. The draft source proposes where width > 1."""

    rows: int
    slots: int
    width: int
    max_steps: int  # 0: no limit
    probe: bool = False  # whether the width is tried on schedule

    @property
    def point(self) -> Point:
        return Point(self.rows, self.slots, self.width, self.width > 1)


@dataclasses.dataclass
class Speculation(StatePart):
    """The choices of a run's rollouts. Methods that plan or choose change nothing.

    Until the seconds of a kind of program are known, decoding is plain but for probes, and drafts
    are verified.
    """

    costs: StepCosts = dataclasses.field(default_factory=StepCosts)
    acceptance: AcceptanceCounts = dataclasses.field(default_factory=AcceptanceCounts)
    steps_since_probe: int = PROBE_EVERY * PROBE_STEPS[1]  # the first comes at once
    probes: int = 0
    timer: "StepTimer | None" = dataclasses.field(default=None, compare=False)

    def __post_init__(self):
        self._used: dict[Point, None] = {}  # programs of this rollout that are not measured

    # Widths ------------------------------------------------------------------------------------

    def choose_width(self, rows: int, slots: int, widths: Iterable[int]) -> int:
        """The width that is expected to emit most tokens a second; 1 unless that is WIDTH_MARGIN
        times as many as plain steps emit."""
        widths = sorted({1, *widths})
        if len(widths) == 1 or not (self.costs.knows(1, False) and self.costs.knows(2, True)):
            return 1
        expected = self.acceptance.expected_tokens
        speeds = {w: expected(w) / self._seconds(rows, slots, w) for w in widths}
        best = max(widths, key=speeds.__getitem__)
        return best if speeds[best] >= WIDTH_MARGIN * speeds[1] else 1

    def plan_steps(self, rows: int, slots: int, widths: Iterable[int]) -> StepPlan:
        """The next decode steps in this bucket: the best width, or a probe of one of the next two
        wider ones."""
        widths = sorted({1, *widths})
        if widths == [1]:
            return StepPlan(rows, slots, 1, 0)
        best = self.choose_width(rows, slots, widths)
        wider = [width for width in widths if width > best][:2]
        fewest, most = PROBE_STEPS
        probe_steps = min(max(math.ceil(PROBE_ROW_STEPS / rows), fewest), most)
        wait = PROBE_EVERY * probe_steps - self.steps_since_probe
        if wider and wait <= 0:
            return StepPlan(rows, slots, wider[self.probes % len(wider)], probe_steps, probe=True)
        limits = [wait] * bool(wider) + [REVIEW_STEPS] * (best > 1)
        return StepPlan(rows, slots, best, min(limits))

    def record_steps(
        self,
        plan: StepPlan,
        steps: int,
        histogram: Sequence[float] = (),
        accepted: float = 0,
        verified: float = 0,
    ) -> float:
        """Count steps that were run; returns their expected seconds, 0 where unknown.

        histogram: as in `AcceptanceCounts.observe`. accepted, verified: tokens of previous
        responses that these steps verified.
        """
        self.acceptance.observe(histogram, plan.width)
        self.acceptance.observe_previous(accepted, verified)
        self.steps_since_probe = 0 if plan.probe else self.steps_since_probe + steps
        self.probes += plan.probe
        return steps * self._expected(plan.point, beside=bool(verified))

    # Verification ------------------------------------------------------------------------------

    def choose_verification(self, plans: Sequence[VerifyPlan]) -> VerifyPlan | None:
        """The plan that saves most decoding for its seconds, alone or repeated to the drafts' end.

        plans: for the same rows, widest last. None where no plan saves VERIFY_MARGIN times its
        seconds. The last plan where seconds are not known yet.
        """
        if not (self.costs.knows(1, False) and self.costs.knows(2, False)):
            return plans[-1]
        lens = np.asarray(plans[0].draft_lens, int)
        draws = [_accepted_lens(lens, self.acceptance.rate(), draw) for draw in range(DRAWS)]
        best = None
        most = VERIFY_MARGIN
        plain = self._decode_seconds(plans[0], lens, 0)
        for plan in plans:
            width = plan.verify_width
            for end in sorted({width, -(-int(lens.max(initial=0)) // width) * width}):
                seconds = saved = 0.0
                for accepted in draws:
                    seconds += self._verify_seconds(plan, accepted, end)
                    done = np.minimum(accepted, end)
                    saved += plain - self._decode_seconds(plan, lens - done, int(done.max()))
                if saved > most * seconds:
                    best = plan
                    most = saved / seconds
        return best

    def _verify_seconds(self, plan: VerifyPlan, accepted: np.ndarray, end: int) -> float:
        """Seconds to verify up to `end` tokens, by as many verifications as that takes. One over
        packed sequences saves the prefill."""
        if plan.sequences:
            slots = plan.buckets.prompt_slots
            prefill = self.costs.seconds(plan.rows // plan.buckets.group_size, slots, slots, False)
            return max(self.costs.seconds(*plan.point) - prefill, 1e-9)
        seconds = 0.0
        lens = np.asarray(plan.draft_lens)
        for begin in range(0, end, plan.verify_width):
            num_verifying = int(np.sum((accepted >= begin) & (lens > begin)))
            rows = min(plan.buckets.rows_for(num_verifying), plan.rows) if begin else plan.rows
            step = self.costs.seconds(rows, plan.slots, plan.verify_width, False)
            seconds += step * (num_verifying > 0)
        return seconds

    def _decode_seconds(self, plan: VerifyPlan, lens: np.ndarray, accepted: int) -> float:
        """Seconds to decode `lens` [rows] tokens in the buckets that hold the rows left at each
        step, as far as other rows do not share these steps. accepted: tokens of the longest row."""
        steps = np.arange(lens.max(initial=0))
        decoding = len(lens) - np.searchsorted(np.sort(lens), steps, side="right")
        most = plan.buckets.rows[0]
        others = np.clip(most - decoding, 0, plan.others)
        rows = np.minimum(decoding + others, most)
        longest = max(plan.held + accepted, plan.others_held) + 1 + steps
        sizes = np.sort(plan.buckets.rows)
        ends = np.asarray(plan.buckets.responses)
        shapes = np.searchsorted(sizes, rows), np.searchsorted(ends[:-1], longest)
        shares = np.zeros((len(sizes), len(ends)))
        np.add.at(shares, shapes, decoding / (decoding + others))
        return sum(
            shares[i, j]
            * self._token_seconds(int(sizes[i]), plan.buckets.slots(int(ends[j])), plan)
            for i, j in np.argwhere(shares)
        )

    def _token_seconds(self, rows: int, slots: int, plan: VerifyPlan) -> float:
        """Seconds to decode a token of every row at the best width."""
        width = self.choose_width(rows, slots, plan.buckets.widths)
        return self._seconds(rows, slots, width) / self.acceptance.expected_tokens(width)

    def record_verification(self, plan: VerifyPlan, accepted: int = 0, verified: int = 0) -> float:
        """Count a verification; returns its expected seconds, 0 where unknown."""
        self.acceptance.observe_previous(accepted, verified)
        return self._expected(plan.point)

    # Seconds -----------------------------------------------------------------------------------

    def _seconds(self, rows: int, slots: int, width: int) -> float:
        return self.costs.seconds(rows, slots, width, width > 1)

    def _expected(self, point: Point, beside: bool = False) -> float:
        """Seconds of a program that was run, 0 where unknown; notes it where it is not measured.

        beside: whether it verified previous responses as well, which makes it another program: one
        more to compile, worth it only where no program of the kind was measured.
        """
        known = self.costs.knows(point.width, point.drafting)
        enough = self.costs.count_like(point) >= MEASURED_PER_KIND
        if point not in self.costs and not enough and not (beside and known):
            self._used[point] = None
        return self.costs.seconds(*point) if known else 0.0

    def measure_used(self, weights: object) -> None:
        """Measure programs that the last rollout used for the first time: the first few of them, so
        that a resumed run knows as many. For between rollouts, when no KV cache takes memory."""
        points = list(self._used)[:MEASURED_PER_ROLLOUT]
        if points and all(p.verifies for p in points) and not self.costs.knows(1, False):
            # Every draft was accepted to its end; decoding must be known to be compared with.
            points.append(points[0]._replace(width=1, sequences=0))
        if self.timer is not None:
            for point in points:
                self.costs.add(point, self.timer(weights, point))
        self._used = {}

    # State -------------------------------------------------------------------------------------

    def host(self) -> dict:
        """All that choices depend on, in values that JSON keeps exactly."""
        return {
            "costs": self.costs.to_json(),
            "acceptance": dataclasses.asdict(self.acceptance),
            "steps_since_probe": self.steps_since_probe,
            "probes": self.probes,
        }

    def restore(self, host: Mapping, arrays: object = None) -> "Speculation":
        """Return a `Speculation` that goes on where `host` was taken, with the same timer."""
        costs = StepCosts.from_json(host["costs"])
        acceptance = AcceptanceCounts(**host["acceptance"])
        parts = {**host, "costs": costs, "acceptance": acceptance}
        return Speculation(**parts, timer=self.timer)


def _accepted_lens(lens: np.ndarray, rate: float, draw: int) -> np.ndarray:
    """int [rows], accepted tokens of drafts: P(at least k) = rate^k, at most `lens`.

    Every row has another quantile: multiples of the golden ratio, modulo 1, are spread evenly.
    """
    quantiles = (np.arange(len(lens)) * 0.6180339887 + (draw + 0.5) / DRAWS) % 1.0
    return np.minimum(np.log(quantiles) / math.log(rate), lens).astype(int)
