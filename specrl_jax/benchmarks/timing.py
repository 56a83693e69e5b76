"""Time rollouts side by side in one process.

Cases run in turn, round by round, so that other work on the machine slows all of them alike. A
ratio of two cases is taken within a round.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax.benchmarks.reports import spread
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.types import Rollout

Log = Callable[[str], None]
RolloutCase = functools.partial  # of `generate`: spec, weights, prompts, noise, and options by name
_WARM_RUNS = 4  # of a case with choices


class TimedRollout(NamedTuple):
    """One timed rollout."""

    seconds: float  # from the host's prompts to finished responses
    stats: Stats
    rollout: Rollout  # NumPy

    @property
    def step_seconds(self) -> float:
        """Seconds of a decode step, in the mean."""
        return self.stats.decode_seconds / self.stats.decode_steps


def run_case(case: RolloutCase) -> TimedRollout:
    """Run and time one rollout."""
    start = time.perf_counter()
    result = case()
    jax.block_until_ready(result.rollout)
    seconds = time.perf_counter() - start
    return TimedRollout(seconds, result.stats, jax.device_get(result.rollout))


def run_in_turn(
    cases: Mapping[str, RolloutCase], repeats: int, log: Log
) -> dict[str, list[TimedRollout]]:
    """Run every case `repeats` times, after runs in which it compiles and its choices settle."""
    for name, case in cases.items():
        for _ in range(_WARM_RUNS if "speculation" in case.keywords else 1):
            run_case(case)
        log(f"{name}: ready")
    rounds = [[run_case(case) for case in cases.values()] for _ in range(repeats)]
    return dict(zip(cases, map(list, zip(*rounds))))


def figures(runs: Sequence[TimedRollout], **baselines: Sequence[TimedRollout]) -> dict[str, Any]:
    """Return a case's figures for a report. Counts are of the last run, shares of all tokens.

    baselines: `over_NAME` is how many times as fast the case is as these runs.
    """
    stats = runs[-1].stats
    rollout = runs[-1].rollout
    tokens = int(rollout.lens.sum())
    seconds = spread(x.seconds for x in runs)
    row: dict[str, Any] = {"seconds": seconds, "tokens/s": tokens / seconds["median"]}
    for name, slow in baselines.items():
        row[f"over_{name}"] = spread(a.seconds / b.seconds for a, b in zip(slow, runs))
    for phase in ("extend", "decode"):
        row[phase] = float(np.median([getattr(x.stats, f"{phase}_seconds") for x in runs]))
    row |= {"row_steps": stats.row_steps, "reused": float(rollout.prefix_lens.sum()) / tokens}
    return row | {"drafted": stats.drafted_tokens / tokens}
