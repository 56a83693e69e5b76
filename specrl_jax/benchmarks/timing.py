"""Timing whole rollouts side by side in one process, and what their figures are held against.

Cases are run once to compile, then in turn, `repeats` times, so that other work on the machine
falls on all of them alike. Figures are medians; ratios are medians of ratios within one pass. A run
in which anything was compiled does not count and is repeated.

The *ideal* of a rollout's decoding is the sum, over the steps that its rows needed, of the measured
seconds of the cheapest rung that could hold them: step t of a row goes with step t of all others,
at the width that the rollout had at its step t, in the window that the longest of them needs. It
has no finished rows beyond those that fill the rung, no move, no call and no waiting.
"""

import dataclasses
import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specrl_jax.models.transformer import Params
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.adaptive.step_costs import StepCosts
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.rollout.generate import DraftInputs, Noise, RolloutSpec, generate, make_corpus
from specrl_jax.runtime import compiled
from specrl_jax.types import Drafts, Prompts, Source

PHASES = ("total", "prefill", "verify", "decode")
_MOST_DISCARDED = 3  # runs of a case that may be thrown away because something was compiled


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What all cases share."""

    weights: Params
    prompts: Prompts
    key: jax.Array
    step: int
    caps: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """A rollout to time.

    table: seconds of the plan's programs. stored: tokens [Q, N, R] and lens [Q, N] that tree drafts
    read. cost: chooses widths, and goes on learning from run to run as it does in training.
    """

    name: str
    plan: RolloutSpec
    table: StepCosts
    drafts: Drafts | None = None
    stored: tuple[jax.Array, jax.Array] | None = None
    log_lenience: float = 0.0
    cost: Speculation | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """One timed rollout; arrays on the host."""

    seconds: dict[str, float]
    stats: Stats
    tokens: np.ndarray
    lens: np.ndarray
    prefix_lens: np.ndarray
    sources: np.ndarray
    sampling_logprobs: np.ndarray


def run_case(inputs: Inputs, case: Case) -> Run:
    """Wall-clock seconds from the host's prompts to finished responses, trees built anew."""
    start = time.perf_counter()
    result = generate(
        case.plan,
        inputs.weights,
        inputs.prompts,
        Noise(inputs.key, inputs.step),
        drafts=DraftInputs(
            case.drafts,
            case.log_lenience,
            case.stored and functools.partial(make_corpus, case.plan, *case.stored),
        ),
        max_lens=inputs.caps,
        speculation=case.cost,
    )
    rollout, stats = result.rollout, result.stats
    jax.block_until_ready(rollout)
    seconds = {"total": time.perf_counter() - start}
    seconds |= {phase: getattr(stats, f"{phase}_seconds") for phase in PHASES[1:]}
    names = [field.name for field in dataclasses.fields(Run)[2:]]
    return Run(seconds, stats, **{name: np.asarray(getattr(rollout, name)) for name in names})


def time_blocks(
    inputs: Inputs,
    blocks: Sequence[Sequence[Case]],
    repeats: int,
    log: Callable[[str], None],
    beside: Callable[[], None] = lambda: None,
    leave: Callable[[int, list[list[Run]]], Sequence[int]] = lambda block, runs: (),
) -> list[list[list[Run]]]:
    """`repeats` runs of every case of every block, [block][case][repeat], cases in turn.

    A case may stand in several blocks, so that each block has a neighbour to compare with. Each
    pass begins every block one case later than the last did, so that no case always comes first.
    beside: called once a pass. leave: the cases of a block that have had runs enough, by its number
    and its runs so far; asked once a pass. Without any cases left there are no more passes. An
    interrupt (Ctrl-C) leaves the passes that are over; during the first it is raised.
    """
    cases = {id(case): case for block in blocks for case in block}
    start = time.perf_counter()
    for case in cases.values():
        run_case(inputs, case)
    log(f"{len(cases)} cases compiled and warmed up in {time.perf_counter() - start:.0f} s")
    found: list[list[list[Run]]] = [[[] for _ in block] for block in blocks]
    stay = [list(range(len(block))) for block in blocks]
    for repeat in range(repeats):
        start = time.perf_counter()
        try:
            beside()
            for block, runs, here in zip(blocks, found, stay):
                first = repeat % max(len(here), 1)
                for i in here[first:] + here[:first]:
                    runs[i].append(_sharing(_timed_run(inputs, block[i]), runs[i][-1:]))
        except KeyboardInterrupt:
            if not repeat:
                raise
            log(f"interrupted in pass {repeat + 1}: figures are of the passes before it")
            return [[of_case[:repeat] for of_case in runs] for runs in found]
        for number, runs in enumerate(found):
            gone = set(leave(number, runs))
            stay[number] = [i for i in stay[number] if i not in gone]
        left = sum(map(len, stay))
        seconds = time.perf_counter() - start
        log(f"pass {repeat + 1} of {repeats}: {seconds:.0f} s, {left} runs in the next")
        if not left:
            break
    return found


def _timed_run(inputs: Inputs, case: Case) -> Run:
    for _ in range(_MOST_DISCARDED):
        before = compiled()
        run = run_case(inputs, case)
        if compiled() == before:
            break
    return run


def _sharing(run: Run, last: Sequence[Run]) -> Run:
    """The run with the last one's arrays where they are equal: kept by the thousand, they would
    cut up the heap that rollouts live on, so that those with large buffers page memory in anew."""
    names = [field.name for field in dataclasses.fields(Run)[2:]]
    pairs = [(name, getattr(run, name), getattr(one, name)) for one in last for name in names]
    return dataclasses.replace(run, **{name: b for name, a, b in pairs if np.array_equal(a, b)})


# Figures of a case ---------------------------------------------------------------------------


def median_run(runs: Sequence[Run]) -> Run:
    """The run of median wall-clock time (of an even number, the faster of the two)."""
    return sorted(runs, key=lambda run: run.seconds["total"])[(len(runs) - 1) // 2]


def describe(case: Case, runs: Sequence[Run], ladder: Buckets) -> dict[str, Any]:
    """All figures of a case but its ratios to others; counts are those of the median run."""
    run = median_run(runs)
    stats, table = run.stats, case.table
    first = first_steps(run, case.drafts)
    starts = step_starts(run.sources, run.lens, first, passes=bool(stats.verify_work))
    ideal = ideal_seconds(starts, step_widths(stats), ladder, table)
    decode, predicted = run.seconds["decode"], predicted_seconds(stats, table)
    decoded = int(np.maximum(run.lens - first, 0).sum())
    return {
        "name": case.name,
        "runs": len(runs),
        "seconds": {p: spread([r.seconds[p] for r in runs]) for p in PHASES},
        "tokens": int(run.lens.sum()),
        "tokens_per_second": float(run.lens.sum() / run.seconds["total"]),
        "reused_tokens": int(run.prefix_lens.sum()),
        "drafted_tokens": stats.drafted_tokens,
        "decoded_tokens": decoded,
        "verified_tokens": stats.verify_work,
        "judged_tokens": stats.verified_tokens,
        "decode_steps": stats.decode_steps,
        "row_steps": stats.row_steps,
        "needed_row_steps": int(starts.sum()),
        "tokens_per_row_step": _ratio(decoded, stats.row_steps),
        "steps_by_width": _tally((width, steps) for _, _, width, steps in stats.decode_runs),
        "steps_by_rows": _tally((rows, steps) for rows, _, _, steps in stats.decode_runs),
        "visits": len(stats.decode_runs),
        "predicted_decode_seconds": predicted,
        "predicted_over_actual": _ratio(predicted, decode if stats.decode_runs else 0.0),
        "ideal_decode_seconds": ideal,
        "ideal_share": _ratio(ideal, decode if stats.decode_runs else 0.0),
    }


def _tally(pairs: Iterable[tuple[int, int]]) -> dict[str, int]:
    """Steps by size; keys are text, as JSON has no others."""
    found: dict[int, int] = {}
    for size, steps in pairs:
        found[size] = found.get(size, 0) + steps
    return {str(size): found[size] for size in sorted(found)}


def _ratio(a: float, b: float) -> float | None:
    return float(a / b) if b else None


def predicted_seconds(stats: Stats, table: StepCosts) -> float:
    """What the table says of the decode steps that were run."""
    return sum(
        steps * table.seconds(rows, slots, width, width > 1)
        for rows, slots, width, steps in stats.decode_runs
    )


def step_widths(stats: Stats) -> list[int]:
    """The width of every decode step, in order."""
    return [width for *_, width, steps in stats.decode_runs for _ in range(steps)]


def first_steps(run: Run, drafts: Drafts | None) -> np.ndarray:
    """int [B]: response tokens that rows had before their first decode step.

    A verification pass emits the prefix and, unless the draft was kept whole, the token behind it.
    Where passes ran, all reused tokens count as theirs, though some may have been left to decoding;
    where none did, all tokens were decoded.
    """
    if drafts is None or not run.stats.verify_work:
        return np.zeros_like(run.lens)
    offered = np.asarray(drafts.lens)
    return run.prefix_lens + ((offered > 0) & (run.prefix_lens < offered))


def step_starts(
    sources: np.ndarray, lens: np.ndarray, first: np.ndarray, *, passes: bool
) -> np.ndarray:
    """bool [B, R]: positions at which a decode step of the row began.

    One begins at `first` [B] and behind every token that ended one: a sampled token, and without
    verification passes a reused one too, which cost a step of its own (at width 1).
    """
    ends = sources == Source.SAMPLED
    if not passes:
        ends |= sources == Source.REUSED
    positions = np.arange(sources.shape[1])[None, :]
    behind = np.concatenate([np.zeros((len(lens), 1), bool), ends[:, :-1]], axis=1)
    begins = (positions == first[:, None]) | (behind & (positions > first[:, None]))
    return begins & (positions < lens[:, None])


def ideal_seconds(
    starts: np.ndarray, widths: Sequence[int], ladder: Buckets, table: StepCosts
) -> float:
    """The ideal of the module's docstring, for rows whose steps begin at `starts` [B, R].

    widths: of the rollout's steps, in order; steps beyond the last have its width. More rows than
    the largest rung go in several of it.
    """
    needed = starts.sum(axis=1)
    positions = np.argsort(~starts, axis=1, kind="stable")
    total = 0.0
    for t in range(int(needed.max(initial=0))):
        active = needed > t
        longest = int(positions[active, t].max()) + 1
        width = widths[min(t, len(widths) - 1)] if len(widths) else 1
        slots = ladder.slots(ladder.response_for(longest))
        price = functools.partial(_price, ladder, table, slots, width)
        whole, rest = divmod(int(active.sum()), ladder.rows[0])
        total += whole * price(ladder.rows[0]) + (price(rest) if rest else 0.0)
    return total


def _price(ladder: Buckets, table: StepCosts, slots: int, width: int, active: int) -> float:
    return min(table.seconds(r, slots, width, width > 1) for r in ladder.rows if r >= active)


def ratios(slow: Sequence[Run], fast: Sequence[Run]) -> dict[str, float]:
    """`bounded` total seconds of `slow` over those of `fast`, pass by pass."""
    return bounded((total_seconds(slow) / total_seconds(fast)).tolist())


def total_seconds(runs: Sequence[Run]) -> np.ndarray:
    """float [runs]."""
    return np.asarray([run.seconds["total"] for run in runs])


# Goals ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Goal:
    """A figure held against a bound; `most`: it is an upper bound."""

    name: str
    figure: float
    bound: float
    most: bool = False
    note: str = ""

    @property
    def met(self) -> bool:
        return self.figure <= self.bound if self.most else self.figure >= self.bound

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"met": self.met}

    def line(self) -> str:
        sign = "<=" if self.most else ">="
        text = f"{'met' if self.met else 'MISSED':8}{self.name}: {self.figure:.3f}"
        return f"{text} ({sign} {self.bound:g}{f'; {self.note}' if self.note else ''})"


# The machine ---------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {
        "median": float(np.median(values)),
        "min": float(np.min(values)),
        "max": float(np.max(values)),
    }


def bounded(values: Sequence[float]) -> dict[str, float]:
    """`spread` of values of passes; low, high: where their median would lie after many passes of
    this process, 95 % sure (see `median_interval`)."""
    low, high = median_interval(values)
    return spread(values) | {"low": low, "high": high}


def median_interval(values: Sequence[float], sure: float = 0.95) -> tuple[float, float]:
    """Two of n values with the median of their law between them, with probability `sure` or more.

    They are the k-th from either end, k the largest such that at most k - 1 of n values lie on one
    side with probability <= (1 - sure) / 2, whatever the law: of 21 values the 6th and the 16th,
    95 % sure. Fewer than 6 values cannot be that sure; theirs are the least and the most.
    """
    ordered, rank, ways = sorted(values), 0, 1
    while ways / 2 ** len(ordered) <= (1 - sure) / 2:  # integers: floats end at 2 ** 1024
        rank += 1
        ways += math.comb(len(ordered), rank)
    return ordered[max(rank - 1, 0)], ordered[-max(rank, 1)]


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "backend": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "mesh": dict(jax.sharding.get_mesh().shape),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
    }


def machine_line(record: dict[str, Any]) -> str:
    """One line of `machine()` and the loads beside it."""
    return (
        f"{record['device']} x {record['devices']}, {record['cores']} cores, load "
        f"{record['load_before']:.1f} before and {record['load_after']:.1f} after; "
        f"jax {record['jax']}"
    )


def jsonable(value: Any) -> Any:
    """JSON has no inf and no nan."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
