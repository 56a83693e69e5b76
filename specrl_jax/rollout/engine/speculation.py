"""Choice of the decode width from measured step times and observed acceptance.

Input: the seconds of decode steps, timed once when a run starts, and counts of accepted draft
tokens. Output: the width of the next decode steps. ReSpec (arXiv 2510.26475) and NeMo-RL
(2604.26779) find such a choice necessary; DAS (2511.13841) gives the long tail the widest drafts. A
choice is a pure function of `Speculation.host()`, so a resumed run repeats it.

Worked example: steps of width 1, 4, 8 take 10, 15, 23 ms. A row accepts at least 1 ... 7 draft
tokens with probability .8 .64 .51 .41 .33 .26 .21. Width 4 emits 1 + .8 + .64 + .51 = 2.95 tokens
in 15 ms, width 8 emits 4.16 in 23 ms: 197 and 181 tokens a second, against 100 at width 1. Width 4
is chosen.
"""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.types import StatePart

WIDTH_MARGIN = 1.15  # minimum expected gain of a width over plain steps
HALF_LIFE = 256  # row steps after which counts of the draft source count half
PRIOR_ROW_STEPS = 8  # row steps without an accepted token, as a prior for the draft source
PROBE_STEPS = 8  # steps per probe of a greater width, to count the tokens that it accepts
PROBE_EVERY = 50  # one step in 50 belongs to a probe
REVIEW_STEPS = 64  # most wide steps before the width is chosen again
TIMED_STEPS = 8  # per timed call
TIMED_CALLS = 3  # the fastest counts: interference only slows a machine down


class StepPlan(NamedTuple):
    """Plan for the next decode steps."""

    width: int
    max_steps: int  # 0: no limit
    probe: bool  # whether this is a scheduled try of the width


@dataclasses.dataclass
class Speculation(StatePart):
    """Width choices for a run's rollouts, and the counts of draft tokens behind them.

    Methods that choose do not change the state. Without timings decoding is plain except for
    probes.
    """

    # Seconds of a decode step by rows and width; None: not timed.
    seconds: Mapping[tuple[int, int], float] | None = None
    # By draft token 0, 1, ...: row steps that checked the token after accepting all before it
    # (`reached`), and row steps that accepted it too. A missing token counts as not accepted. Old
    # counts fade as new ones come in.
    reached: list[float] = dataclasses.field(default_factory=list)
    accepted: list[float] = dataclasses.field(default_factory=list)
    steps_since_probe: int = PROBE_EVERY * PROBE_STEPS  # the first probe is due right away
    probes: int = 0

    def choose_width(self, rows: int, widths: Sequence[int]) -> int:
        """Return the width expected to emit the most tokens a second; 1 unless the gain over plain
        steps is at least WIDTH_MARGIN."""
        if self.seconds is None:
            return 1
        speeds = {
            width: self.expected_tokens(width) / self.seconds[rows, width] for width in widths
        }
        best = max(widths, key=speeds.__getitem__)
        return best if speeds[best] >= WIDTH_MARGIN * speeds[1] else 1

    def plan_steps(self, rows: int, widths: Sequence[int]) -> StepPlan:
        """Plan the next decode steps of `rows` rows: the best width, or a probe of one of the two
        next wider ones."""
        best = self.choose_width(rows, widths)
        wider = [width for width in widths if width > best][:2]
        wait = PROBE_EVERY * PROBE_STEPS - self.steps_since_probe
        if wider and wait <= 0:
            return StepPlan(wider[self.probes % len(wider)], PROBE_STEPS, True)
        limits = []
        if wider:
            limits.append(wait)
        if best > 1:
            limits.append(REVIEW_STEPS)
        return StepPlan(best, min(limits, default=0), False)

    def record_steps(self, plan: StepPlan, steps: int, histogram: Sequence[float]) -> None:
        """Count steps that were run; histogram: as in `observe`."""
        self.observe(histogram, plan.width)
        self.steps_since_probe = 0 if plan.probe else self.steps_since_probe + steps
        self.probes += plan.probe

    def observe(self, histogram: Sequence[float], width: int) -> None:
        """Count steps of one width.

        histogram: [width], row steps of active rows by the number of accepted draft tokens.
        """
        if width == 1:
            return
        counts = [float(n) for n in histogram] + [0.0] * (width - len(histogram))
        at_least = list(itertools.accumulate(reversed(counts)))[::-1]
        fade = 0.5 ** (at_least[0] / HALF_LIFE)
        self.reached = _faded_sum(self.reached, at_least[:-1], fade)
        self.accepted = _faded_sum(self.accepted, at_least[1:], fade)

    def survival(self, tokens: int) -> list[float]:
        """s_1 ... s_tokens: the share of row steps that accept at least k draft tokens.

        The product of the chances to accept one more, as in a Kaplan-Meier estimate. A token that
        was never checked gets the chance of the token before it.
        """
        chance = 0.0
        shares = [1.0]
        unknown = [0.0] * tokens
        for reached, accepted in zip(self.reached + unknown, self.accepted + unknown):
            chance = (accepted + chance * PRIOR_ROW_STEPS) / (reached + PRIOR_ROW_STEPS)
            shares.append(shares[-1] * chance)
        return shares[1 : tokens + 1]

    def expected_tokens(self, width: int) -> float:
        """Return the tokens that a row emits in a step: 1 + Σ_{k<width} s_k."""
        return 1.0 + sum(self.survival(width - 1))

    def host(self) -> dict:
        """Return everything that choices depend on, as values that JSON preserves exactly."""
        seconds = self.seconds
        if seconds is not None:
            seconds = [[*key, value] for key, value in sorted(seconds.items())]
        return vars(self) | {"seconds": seconds}

    def restore(self, host: Mapping, arrays: object = None) -> "Speculation":
        """Return a `Speculation` that continues from `host`."""
        seconds = host["seconds"]
        if seconds is not None:
            seconds = {(rows, width): value for rows, width, value in seconds}
        return Speculation(**{**host, "seconds": seconds})


def _faded_sum(old: list[float], new: list[float], fade: float) -> list[float]:
    """Fade the old counts and add `new` to the first of them."""
    faded = [n * fade for n in old[: len(new)]] + [0.0] * (len(new) - len(old))
    return [a + b for a, b in zip(faded, new)] + old[len(new) :]


def time_steps(
    spec: RolloutSpec,
    weights: Params,
    requests: Requests,
    sizes: Sequence[int] = (),
    widths: Sequence[int] = (),
) -> dict[tuple[int, int], float]:
    """Time decode steps of such a rollout with synthetic rows; return seconds by (rows, width).

    sizes, widths: which ones to time; empty: all. The rows are halfway through their responses, as
    kernels read what rows have filled. Rows that end within the timed steps are still computed, as
    finished rows are.
    """
    runner = Runner(spec, weights, requests)
    size = runner.size
    half = np.full(size, runner.spec.response_slots // 2, np.int32)
    unfinished = np.zeros(size, bool)
    runner.rows = dataclasses.replace(
        runner.rows, lens=put(half, "batch"), done=put(unfinished, "batch")
    )
    stop = StopCondition.of(max_steps=TIMED_STEPS, max_unfinished=-1, max_left=-1)
    seconds = {}
    for size in sizes or runner.buckets.sizes:
        if size < runner.size:
            runner.compact(size)
        for width in widths or runner.buckets.widths:
            times = []
            for _ in range(TIMED_CALLS):
                start = time.perf_counter()
                runner.decode(stop, width)
                times.append(time.perf_counter() - start)
            seconds[size, width] = hosts.broadcast(min(times)) / TIMED_STEPS
    return seconds
