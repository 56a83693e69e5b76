"""Runs in the form of a report: read from their work directories, seeds of a setting together.

Takes WORKDIR/config.json and metrics.jsonl. Returns `Series`, and their headline figures.
"""

import dataclasses
import json
import math
import operator
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specrl_jax.config import flatten
from specrl_jax.inputs import json_object
from specrl_jax.telemetry.metrics import FILE_NAME, read_metrics

Record = dict[str, Any]
# From records to one number; None if undefined.
Figure = Callable[[Sequence[Record]], float | None]

# The work directory of a sweep's run is named CASE,seed=N.
_OF_A_SWEEP = re.compile(r"(.+),seed=-?\d+")
# Configuration fields that may differ between seeds of one setting.
_NOT_A_SETTING = ("seed", "log", "checkpoint", "mesh", "resume_from")
_MAX_NAMED = 3  # settings in a series' name
# A step that compiled for more than this share of its seconds is not representative.
_COMPILED = 0.05
# Seconds: in a shorter step the overhead of starting programs hides the cost of tokens.
_SHORT_STEP = 0.1
_FROM_DRAFTS = ("rollout/tokens_reused", "rollout/tokens_drafted")


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """One work directory."""

    workdir: Path
    config: dict[str, Any]  # field → value, "rollout.draft": "tree"
    records: list[Record]  # of metrics.jsonl, by step

    @property
    def steps(self) -> list[Record]:
        """Return the records of steps that trained."""
        return [record for record in self.records if "reward/mean" in record]

    @property
    def epochs(self) -> dict[int, list[Record]]:
        """Return the same by epoch, in order."""
        by_epoch: dict[int, list[Record]] = {}
        for record in self.steps:
            by_epoch.setdefault(record["epoch"], []).append(record)
        return by_epoch

    @property
    def first_epoch(self) -> list[Record]:
        return next(iter(self.epochs.values()), [])

    @property
    def later_epochs(self) -> list[Record]:
        return self.steps[len(self.first_epoch) :]

    @property
    def last_epoch(self) -> list[Record]:
        return list(self.epochs.values())[-1] if self.epochs else []


class Mean(NamedTuple):
    """Mean of a figure over runs."""

    value: float
    deviation: float  # the sample's standard deviation; 0 for one run
    count: int  # of runs with the figure

    @property
    def error(self) -> float:
        return self.deviation / math.sqrt(self.count)


@dataclasses.dataclass(frozen=True)
class Series:
    """Runs of one setting with different seeds."""

    name: str
    runs: list[RecordedRun]

    def values(self, name: str, steady: bool = False) -> dict[int, list[float]]:
        """Return a metric by step, from every run that has it there; only finite values.

        steady: without the steps in which a run compiled.
        """
        by_step: dict[int, list[float]] = {}
        for run in self.runs:
            records = without_compiling(run.records) if steady else run.records
            for step, value in values(records, name):
                by_step.setdefault(step, []).append(value)
        return dict(sorted(by_step.items()))

    def mean(self, figure: Callable[[RecordedRun], float | None]) -> Mean | None:
        """Return the mean over the runs with this figure; None if no run has it."""
        figures = [x for run in self.runs if (x := figure(run)) is not None]
        if not figures:
            return None
        return Mean(statistics.fmean(figures), deviation(figures), len(figures))


def deviation(values: Sequence[float]) -> float:
    """Return the sample's standard deviation; 0 for one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def read_run(workdir: str | os.PathLike) -> RecordedRun:
    """Read a work directory; a one-line ValueError if it is not a run's."""
    workdir = Path(workdir)
    if not (workdir / FILE_NAME).is_file():
        raise ValueError(f"{workdir} must be a run's work directory, it has no {FILE_NAME}")
    path = workdir / "config.json"
    config = {}
    if path.is_file():
        config = dict(flatten(json_object(path.read_bytes(), f"{path} (restore or remove it)")))
    return RecordedRun(workdir, config, read_metrics(workdir))


def series(runs: Sequence[RecordedRun]) -> list[Series]:
    """Return runs by setting, named after their case in a sweep or the fields that differ."""
    settings = [
        {k: v for k, v in run.config.items() if k.split(".")[0] not in _NOT_A_SETTING}
        for run in runs
    ]
    fields = [
        name
        for name in dict.fromkeys(name for setting in settings for name in setting)
        if any(setting.get(name) != settings[0].get(name) for setting in settings)
    ]
    members: dict[str, list[int]] = {}
    for i, setting in enumerate(settings):
        members.setdefault(json.dumps([setting.get(name) for name in fields]), []).append(i)
    named = []
    for indices in members.values():
        values = {name.split(".")[-1]: settings[indices[0]].get(name) for name in fields}
        name = ", ".join(f"{field} = {value}" for field, value in values.items())
        folder = runs[indices[0]].workdir.resolve().name
        if case := _OF_A_SWEEP.fullmatch(folder):
            name = case[1]
        elif not 0 < len(values) <= _MAX_NAMED:
            name = folder
        named.append(Series(name, [runs[i] for i in indices]))
    return named


# Figures ------------------------------------------------------------------------------------


def values(records: Iterable[Record], name: str) -> list[tuple[int, float]]:
    """Return (step, value) where a metric exists and is finite."""
    points = ((record["step"], record.get(name)) for record in records)
    return [(step, x) for step, x in points if x is not None and math.isfinite(x)]


def metric(name: str, reduce: Callable[[list[float]], float]) -> Figure:
    """Return the figure that reduces a metric over records to one number."""

    def figure(records: Sequence[Record]) -> float | None:
        numbers = [value for _, value in values(records, name)]
        return reduce(numbers) if numbers else None

    return figure


def median_seconds(name: str) -> Figure:
    """Return the median of a time ("time/step", "time/rollout") over steps that did not compile."""
    median = metric(name, statistics.median)
    return lambda records: median(without_compiling(records))


def without_compiling(records: Iterable[Record]) -> list[Record]:
    """Return the steps that spent at most a twentieth of their time compiling."""
    return [
        record
        for record in records
        if record.get("time/compile", 0.0) <= _COMPILED * record.get("time/step", math.inf)
    ]


def reused_fraction(records: Sequence[Record]) -> float | None:
    """Return the share of reused tokens in all tokens of the policy, not the mean over steps."""
    reused = metric("rollout/tokens_reused", math.fsum)(records) or 0.0
    generated = metric("rollout/tokens_generated", math.fsum)(records) or 0.0
    return reused / (reused + generated) if reused + generated else None


def epoch_seconds(run: RecordedRun, part: str) -> dict[int, float]:
    """Return a part's ("rollout") median seconds by epoch, if some of its steps did not compile."""
    figure = median_seconds(f"time/{part}")
    medians = {epoch: figure(records) for epoch, records in run.epochs.items()}
    return {epoch: x for epoch, x in medians.items() if x is not None}


def seconds(run: RecordedRun, part: str) -> float | None:
    """Return a part's seconds over all steps; None if all steps of an epoch compiled."""
    medians = epoch_seconds(run, part)
    if not medians or len(medians) < len(run.epochs):
        return None
    return math.fsum(len(run.epochs[epoch]) * x for epoch, x in medians.items())


def same_seed(series: Series, run: RecordedRun) -> RecordedRun | None:
    """Return the run of a series with the same seed as this run."""
    seed = run.config.get("seed")
    return next((other for other in series.runs if other.config.get("seed") == seed), None)


def reward_moved(run: RecordedRun) -> bool:
    """Return False if several steps had equal rewards in each group; with a critic, in all."""
    if len(run.steps) < 2:
        return True
    without_signal = [x for _, x in values(run.steps, "reward/no_signal")]
    if without_signal and run.config.get("critic.kind", "none") == "none":
        return min(without_signal) < 1
    return len({x for _, x in values(run.steps, "reward/mean")}) != 1


def has_short_steps(run: RecordedRun) -> bool:
    """Return whether a run's steps are too short for their seconds to show what reuse saves."""
    median = median_seconds("time/step")(run.steps)
    return median is not None and median < _SHORT_STEP


def _compares_with_first_epoch(run: RecordedRun) -> bool:
    """Return whether later epochs can be compared with the first.

    They cannot if the first epoch is not plain (it reused tokens), no draft was ever used, or the
    reward never moved: responses that are all wrong are reused whole, which does not represent a
    run that learns.
    """
    first = run.first_epoch
    drafted = any(record.get(name) for record in run.steps for name in _FROM_DRAFTS)
    return bool(first) and not reused_fraction(first) and drafted and reward_moved(run)


def speed_up(run: RecordedRun, part: str, last_epoch: bool = False) -> float | None:
    """Return a part's median seconds in the first epoch over those in later ones, or the last.

    Steps that compiled are left out. None if the epochs cannot be compared, an epoch on either side
    has no steps left, or steps are too short for their seconds to be meaningful.
    """
    if not _compares_with_first_epoch(run) or has_short_steps(run):
        return None
    later = run.last_epoch if last_epoch and run.later_epochs else run.later_epochs
    return _over(median_seconds(f"time/{part}"), run.first_epoch, later)


def work_saved(run: RecordedRun, name: str, last_epoch: bool = False) -> float | None:
    """Return a count's ("row_steps") mean in the first epoch over that in later ones, or the last.

    None if the epochs cannot be compared.
    """
    if not _compares_with_first_epoch(run):
        return None
    later = run.last_epoch if last_epoch and run.later_epochs else run.later_epochs
    return _over(metric(f"rollout/{name}", statistics.fmean), run.first_epoch, later)


def _over(figure: Figure, first: Sequence[Record], later: Sequence[Record]) -> float | None:
    before = figure(first)
    after = figure(later)
    return before / after if before and after else None


def speed_up_over(baseline: Series, part: str) -> Callable[[RecordedRun], float | None]:
    """Return a figure: `seconds` of the baseline's run with the same seed over the run's own.

    Also None if the baseline's steps are too short for their seconds to be meaningful.
    """

    def figure(run: RecordedRun) -> float | None:
        other = same_seed(baseline, run)
        if other and has_short_steps(other):
            return None
        ours = seconds(run, part)
        theirs = seconds(other, part) if other else None
        return theirs / ours if ours and theirs else None

    return figure


_first = operator.itemgetter(0)
_last = operator.itemgetter(-1)
# Its name, how to compute it, its format.
Headline = tuple[str, Callable[[RecordedRun], float | None], str]
FIGURES: tuple[Headline, ...] = (
    ("held-out reward, first", lambda x: metric("reward/eval", _first)(x.records), "{:.3f}"),
    ("held-out reward, last", lambda x: metric("reward/eval", _last)(x.records), "{:.3f}"),
    ("training reward, last epoch",
     lambda x: metric("reward/mean", statistics.fmean)(x.last_epoch), "{:.3f}"),
    ("tokens reused", lambda x: reused_fraction(x.steps), "{:.1%}"),
    ("the same, later epochs", lambda x: reused_fraction(x.later_epochs), "{:.1%}"),
    ("tokens generated",
     lambda x: metric("rollout/tokens_generated", math.fsum)(x.steps), "{:,.0f}"),
    ("row steps", lambda x: metric("rollout/row_steps", math.fsum)(x.steps), "{:,.0f}"),
    ("seconds of all steps, including compilation",
     lambda x: metric("time/step", math.fsum)(x.steps), "{:,.0f}"),
)  # fmt: skip
_WORK: tuple[Headline, ...] = (
    ("row steps, first epoch over later ones", lambda x: work_saved(x, "row_steps"), "{:.2f}×"),
    ("tokens generated, first epoch over later ones",
     lambda x: work_saved(x, "tokens_generated"), "{:.2f}×"),
)  # fmt: skip
_SECONDS: tuple[Headline, ...] = (
    ("rollout speed-up over its first epoch", lambda x: speed_up(x, "rollout"), "{:.2f}×"),
    ("whole-step speed-up over its first epoch", lambda x: speed_up(x, "step"), "{:.2f}×"),
)
ALONE: tuple[Headline, ...] = (*FIGURES, *_WORK, *_SECONDS)  # for a single series
SECONDS_SAY_NOTHING = (
    f"A step takes less than {_SHORT_STEP:g} s, which goes into starting programs, not computing "
    "tokens: its seconds do not show what reuse saves, so no speed-up is shown. Row steps and "
    "tokens do."
)
_COMMON = (
    "Verification is part of the rollout. Steps that spent more than 5 % of their time compiling "
    "are left out. Row steps are the work: rows × decode steps. With several seeds: mean ± "
    "standard deviation."
)
RECKONED = (
    "Speed-up: the median seconds of a step in the run's own first epoch over the median in all "
    "later epochs; for row steps and tokens the mean over steps. In the first epoch nothing was "
    "drafted from earlier responses, and updates are packed as in later ones: this is not a "
    "comparison with plain GRPO. A dash: no step on one side, no drafts, a first epoch that reused "
    f"tokens, or a reward that never moved. {_COMMON}"
)


def shown_figures(series: Sequence[Series]) -> tuple[tuple[Headline, ...], str]:
    """Return the headline figures to show, and how they are computed.

    Several series are compared with the first; a single one with its own first epoch. If steps are
    short there is no speed-up, and the text starts with the reason.
    """
    short = any(has_short_steps(run) for run in series[0].runs)
    if len(series) > 1:
        figures, reckoned = figures_over(series[0])
    else:
        figures, reckoned = ALONE, RECKONED
    if not short:
        return figures, reckoned
    work = _WORK if len(series) == 1 else ()
    return (*FIGURES, *work), f"{SECONDS_SAY_NOTHING} {reckoned}"


def figures_over(baseline: Series) -> tuple[tuple[Headline, ...], str]:
    """Return the headline figures of series next to a baseline, and how they are computed."""
    name = baseline.name
    figures = (
        *FIGURES,
        (f"rollout speed-up over {name}", speed_up_over(baseline, "rollout"), "{:.2f}×"),
        (f"whole-step speed-up over {name}", speed_up_over(baseline, "step"), "{:.2f}×"),
    )
    return figures, (
        f"Speed-up: the seconds of {name} over those of the other, seed by seed. Seconds are those "
        "of all steps: for each epoch the median of the steps that did not compile, times its "
        f"steps; a dash if all of an epoch compiled. {_COMMON}"
    )


def headline(series: Series, figures: Sequence[Headline] = ALONE) -> list[tuple[str, str, str]]:
    """Return (name, mean, "± deviation" or "") of every figure of a series, as text."""
    rows = []
    for name, figure, style in figures:
        mean = series.mean(figure)
        if mean is None:
            rows.append((name, "–", ""))
            continue
        spread = f"± {style.format(mean.deviation)}" if len(series.runs) > 1 else ""
        rows.append((name, style.format(mean.value), spread))
    return rows


# Text ---------------------------------------------------------------------------------------

# Heading, how an epoch's steps become one number, format.
_EPOCH_COLUMNS: tuple[tuple[str, Figure, str], ...] = (
    ("reward", metric("reward/mean", statistics.fmean), "{:.3f}"),
    ("eval", metric("reward/eval", _last), "{:.3f}"),
    ("reuse", reused_fraction, "{:.1%}"),
    ("prefix", metric("rollout/prefix_len_mean", statistics.fmean), "{:.1f}"),
    ("whole", metric("rollout/full_reuse_ratio", statistics.fmean), "{:.1%}"),
    ("generated", metric("rollout/tokens_generated", math.fsum), "{:,.0f}"),
    ("reused", metric("rollout/tokens_reused", math.fsum), "{:,.0f}"),
    ("row_steps", metric("rollout/row_steps", math.fsum), "{:,.0f}"),
    ("rollout_s", median_seconds("time/rollout"), "{:.2f}"),
    ("prefill_s", median_seconds("time/prefill"), "{:.2f}"),
    ("decode_s", median_seconds("time/decode"), "{:.2f}"),
    ("update_s", median_seconds("time/update"), "{:.2f}"),
    ("step_s", median_seconds("time/step"), "{:.2f}"),
)

_LEGEND = (
    "Means: reward, prefix (tokens), whole (responses reused whole). eval: the epoch's last.\n"
    "reuse: reused over all response tokens. Sums: generated, reused, row_steps (rows × decode\n"
    "steps: the work). Seconds per step: medians over steps that did not compile."
)
_LOOK_AT = (
    "Read responses in report.html: are they cut, does the reward function fail\n"
    "(reward_failures.jsonl), are problems too hard or too easy? See docs/hyperparameters.md."
)


def summarize(run: RecordedRun) -> str:
    """Return first, best and last rewards, a row per epoch, and the speed-ups; or one sentence."""
    epochs = run.epochs
    if not epochs:
        return "No training step was recorded."
    rows = [["epoch", *(name for name, *_ in _EPOCH_COLUMNS)]]
    rows += [[str(epoch), *_cells(members)] for epoch, members in epochs.items()]
    rows.append(["all", *_cells(run.steps)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    rule = "-" * len(lines[0])
    table = [lines[0], rule, *lines[1:-1], rule, lines[-1]]
    return "\n".join([*_headlines(run.records), "", *table, _LEGEND, *_closing(run)])


def _cells(records: Sequence[Record]) -> list[str]:
    figures = ((figure(records), style) for _, figure, style in _EPOCH_COLUMNS)
    return ["-" if x is None else style.format(x) for x, style in figures]


def _headlines(records: Sequence[Record]) -> list[str]:
    lines = []
    for title, name in (("held-out reward", "reward/eval"), ("training reward", "reward/mean")):
        if points := values(records, name):
            best = max(points, key=lambda point: (point[1], point[0]))  # as --step=best
            named = zip(("first", "best", "last"), (points[0], best, points[-1]))
            texts = (f"{which} {value:.3f} (step {step})" for which, (step, value) in named)
            lines.append(f"{title}: {', '.join(texts)}")
    return lines


def _closing(run: RecordedRun) -> list[str]:
    """Return how much faster later epochs were than the first, or that the run never learned."""
    if not reward_moved(run):
        rewards = [reward for _, reward in values(run.steps, "reward/mean")]
        still = f"The reward never moved, it is {rewards[0]:.3f} at every step"
        if min(rewards) < max(rewards):
            still = "The responses to a prompt never had different advantages"
        return [f"\n{still}: nothing was learned, and no speed-up is claimed.\n{_LOOK_AT}"]
    later = len(run.epochs) > 2
    work = [work_saved(run, name) for name in ("row_steps", "tokens_generated")]
    seconds_saved = [speed_up(run, part) for part in ("rollout", "step")]
    lines = [
        "\nAgainst this run's own first epoch (nothing to draft from, updates packed as later):"
    ]
    if None not in work:
        lines.append("row steps {:.1f}× fewer, generated tokens {:.1f}× fewer".format(*work))
        last = [
            work_saved(run, name, last_epoch=True) for name in ("row_steps", "tokens_generated")
        ]
        if later and None not in last:
            lines[-1] += " (last epoch: {:.1f}×, {:.1f}×)".format(*last)
    if None not in seconds_saved:
        rollout, step = seconds_saved
        lines.append(
            f"rollouts {rollout:.1f}× as fast, verification included; whole steps {step:.1f}×"
        )
        last = [speed_up(run, part, last_epoch=True) for part in ("rollout", "step")]
        if later and None not in last:
            lines[-1] += " (last epoch: {:.1f}×, {:.1f}×)".format(*last)
    if lines[1:] and has_short_steps(run):
        lines.append(SECONDS_SAY_NOTHING)
    return lines if lines[1:] else []
