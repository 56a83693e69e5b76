"""Chooses how wide to decode and whether to verify drafts, by seconds and running acceptance.

Takes in the seconds of the programs, each timed once when a run starts, and counts of accepted
draft tokens; gives out the width of the next decode steps, and whether drafts are verified. ReSpec
(arXiv 2510.26475) and NeMo-RL (2604.26779) find such a choice necessary; DAS (2511.13841) gives the
long tail the widest drafts. A choice is a pure function of `Speculation.host()`, so a resumed run
repeats it.

Worked example: steps of width 1, 4, 8 take 10, 15, 23 ms. A row accepts at least 1 ... 7 draft
tokens with probability .8 .64 .51 .41 .33 .26 .21. Width 4 emits 1 + .8 + .64 + .51 = 2.95 tokens
in 15 ms, width 8 4.16 in 23 ms: 197 and 181 tokens a second against 100 of width 1. It is width 4.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.types import StatePart

WIDTH_MARGIN = 1.15  # expected gain of a width over plain steps that is worth it
VERIFY_MARGIN = 0.5  # drafts are verified unless that saves less than so much of its seconds
VERIFY_EVERY = 32  # drafts are verified once in so many times, to see what is accepted
HALF_LIFE = 256  # row steps after which counts of the draft source count half
VERIFIED_HALF_LIFE = 4_096  # verified tokens after which counts of previous responses count half
PRIOR_ROW_STEPS = 8  # of no accepted token of the draft source, before anything is known
PRIOR_RATE = 0.99  # acceptance of previous responses, before anything is known
PRIOR_TOKENS = 32  # verified tokens that this rate counts as
PROBE_STEPS = 8  # steps of a wider width, to see what it accepts
PROBE_EVERY = 50  # probes are one in so many steps
REVIEW_STEPS = 64  # most wide steps before the width is chosen again


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
class Seconds:
    """Measured seconds of the programs; all of them, or none where nothing is known."""

    chunk: float  # of a chunk of `extend`
    # Of a step, by rows and width.
    steps: Mapping[tuple[int, int], float]

    def to_json(self) -> dict:
        steps = [[*key, seconds] for key, seconds in sorted(self.steps.items())]
        return {"chunk": self.chunk, "steps": steps}

    @classmethod
    def from_json(cls, saved: Mapping) -> "Seconds":
        steps = {(rows, width): seconds for rows, width, seconds in saved["steps"]}
        return cls(saved["chunk"], steps)


class StepPlan(NamedTuple):
    """The next decode steps."""

    width: int
    max_steps: int  # 0: no limit
    probe: bool  # whether the width is tried on schedule


@dataclasses.dataclass
class Speculation(StatePart):
    """The choices of a run's rollouts. Methods that choose change nothing.

    Without seconds decoding is plain but for probes, and drafts are verified.
    """

    seconds: Seconds | None = None
    acceptance: AcceptanceCounts = dataclasses.field(default_factory=AcceptanceCounts)
    steps_since_probe: int = PROBE_EVERY * PROBE_STEPS  # the first comes at once
    probes: int = 0
    left_out: int = 0  # times in a row that drafts were not verified
    # All drafts are verified. On kept noise most hold, but for the visits in which noise is fresh:
    # what those tell must not leave out the next ones.
    verifies_all: bool = False

    # Widths ---------------------------------------------------------------------------------------

    def choose_width(self, rows: int, widths: Sequence[int]) -> int:
        """The width that is expected to emit most tokens a second; 1 unless that is WIDTH_MARGIN
        times as many as plain steps emit."""
        if self.seconds is None:
            return 1
        steps = self.seconds.steps
        expected = self.acceptance.expected_tokens
        speeds = {width: expected(width) / steps[rows, width] for width in widths}
        best = max(widths, key=speeds.__getitem__)
        return best if speeds[best] >= WIDTH_MARGIN * speeds[1] else 1

    def plan_steps(self, rows: int, widths: Sequence[int]) -> StepPlan:
        """The next decode steps of so many rows: the best width, or a probe of one of the next two
        wider ones."""
        best = self.choose_width(rows, widths)
        wider = [width for width in widths if width > best][:2]
        wait = PROBE_EVERY * PROBE_STEPS - self.steps_since_probe
        if wider and wait <= 0:
            return StepPlan(wider[self.probes % len(wider)], PROBE_STEPS, True)
        limits = [wait] * bool(wider) + [REVIEW_STEPS] * (best > 1)
        return StepPlan(best, min(limits, default=0), False)

    def record_steps(self, plan: StepPlan, steps: int, histogram: Sequence[float]) -> None:
        """Count steps that were run; histogram: as in `AcceptanceCounts.observe`."""
        self.acceptance.observe(histogram, plan.width)
        self.steps_since_probe = 0 if plan.probe else self.steps_since_probe + steps
        self.probes += plan.probe

    # Verification ---------------------------------------------------------------------------------

    def verifies(self, draft_lens: np.ndarray, extra_chunks: float, buckets: Buckets) -> bool:
        """Return whether to verify these drafts, int [n]: unless it clearly loses time.

        extra_chunks: chunks of `extend` that only the drafts need. The accepted tokens of a draft
        are those of a chance `rate` for each; every row has another quantile.
        """
        if self.verifies_all or self.seconds is None or self.left_out + 1 >= VERIFY_EVERY:
            return True
        lens = np.sort(draft_lens)
        # Multiples of the golden ratio, modulo 1, are spread evenly.
        quantiles = (np.arange(len(lens)) * 0.6180339887 + 0.5) % 1.0
        accepted = np.log(quantiles) / math.log(min(self.acceptance.rate(), 1 - 1e-6))
        left = lens - np.minimum(accepted, lens).astype(int)
        saved = self._decode_seconds(lens, buckets) - self._decode_seconds(left, buckets)
        return saved >= VERIFY_MARGIN * extra_chunks * self.seconds.chunk

    def record_drafts(self, accepted: int, verified: int) -> None:
        """Count draft tokens of rows that began; none is verified where drafts were left out."""
        self.acceptance.observe_previous(accepted, verified)
        self.left_out = 0 if verified else self.left_out + 1

    def _decode_seconds(self, lens: np.ndarray, buckets: Buckets) -> float:
        """Seconds to decode `lens` [n] tokens in the buckets that hold the rows left at each
        step."""
        steps = np.arange(lens.max(initial=0))
        left = len(lens) - np.searchsorted(np.sort(lens), steps, side="right")
        sizes = np.sort(buckets.rows)
        bucket = sizes[np.minimum(np.searchsorted(sizes, left), len(sizes) - 1)]
        sizes, counts = np.unique(bucket, return_counts=True)
        pairs = zip(sizes.tolist(), counts.tolist())
        return sum(count * self._token_seconds(size, buckets) for size, count in pairs)

    def _token_seconds(self, rows: int, buckets: Buckets) -> float:
        """Seconds to decode a token of every row at the best width."""
        width = self.choose_width(rows, buckets.widths)
        return self.seconds.steps[rows, width] / self.acceptance.expected_tokens(width)

    # State ----------------------------------------------------------------------------------------

    def host(self) -> dict:
        """All that choices depend on, in values that JSON keeps exactly."""
        return {
            "seconds": self.seconds and self.seconds.to_json(),
            "acceptance": dataclasses.asdict(self.acceptance),
            "steps_since_probe": self.steps_since_probe,
            "probes": self.probes,
            "left_out": self.left_out,
        }

    def restore(self, host: Mapping, arrays: object = None) -> "Speculation":
        """Return a `Speculation` that goes on where `host` was taken."""
        seconds = host["seconds"] and Seconds.from_json(host["seconds"])
        acceptance = AcceptanceCounts(**host["acceptance"])
        saved = {**host, "seconds": seconds, "acceptance": acceptance}
        return dataclasses.replace(self, **saved)
