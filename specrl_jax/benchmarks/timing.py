"""Time rollouts side by side in one process.

A case is a function that generates; it runs once to compile. Then the cases run in turn, round by
round, so that other work on the machine slows all alike. A ratio of two is taken within a round.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax.benchmarks.reports import spread
from specrl_jax.rollout.adaptive import measure_steps
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.rollout.generate import RolloutResult, RolloutSpec
from specrl_jax.runtime import cache_folder, compiled
from specrl_jax.types import Rollout

Log = Callable[[str], None]
Case = Callable[[], RolloutResult]
_MAX_TRIES = 3  # a run in which a program was compiled is repeated


class Run(NamedTuple):
    """One timed rollout."""

    seconds: float  # from the host's prompts to finished responses
    stats: Stats
    rollout: Rollout  # NumPy


def run(case: Case) -> Run:
    """One rollout that compiled nothing, if that can be had."""
    for _ in range(_MAX_TRIES):
        before, start = compiled(), time.perf_counter()
        result = case()
        jax.block_until_ready(result.rollout)
        seconds = time.perf_counter() - start
        if compiled() == before:
            break
    return Run(seconds, result.stats, jax.device_get(result.rollout))


def run_in_turn(cases: Mapping[str, Case], repeats: int, log: Log) -> dict[str, list[Run]]:
    """`repeats` runs of every case."""
    found: dict[str, list[Run]] = {name: [] for name in cases}
    for number in range(repeats + 1):
        for name, case in cases.items():
            found[name].append(run(case))
        log(f"round {number} of {repeats}")
    return {name: runs[1:] for name, runs in found.items()}  # the first round compiles


def figures(runs: Sequence[Run], **baselines: Sequence[Run]) -> dict[str, Any]:
    """A case's figures for a report. Counts are of the last run, shares of all tokens.

    baselines: `over_NAME` is how many times as fast the case is as these runs.
    """
    stats, rollout = runs[-1].stats, runs[-1].rollout
    tokens, seconds = int(rollout.lens.sum()), spread(run.seconds for run in runs)
    found: dict[str, Any] = {"seconds": seconds, "tokens/s": tokens / seconds["median"]}
    for name, slow in baselines.items():
        found[f"over_{name}"] = spread(a.seconds / b.seconds for a, b in zip(slow, runs))
    for phase in ("prefill", "verify", "decode"):
        found[phase] = float(np.median([getattr(run.stats, f"{phase}_seconds") for run in runs]))
    found |= {"row_steps": stats.row_steps, "reused": float(rollout.prefix_lens.sum()) / tokens}
    return found | {"drafted": stats.drafted_tokens / tokens}


def make_speculation(spec: RolloutSpec, rows: int) -> Speculation:
    """Chooses widths and learns as in training; a prompt has as many stored responses as rows."""
    program, folder = spec.program_for(spec.buckets(rows)), cache_folder() / "step_costs"
    return Speculation(timer=measure_steps.StepTimer(program, spec.group_size, folder))
