"""Sweep in the form of SPEC-RL's Table 3 (arXiv 2509.23232): a line per case, and a baseline case.

Takes the runs of every case (`SweptRun`). Returns Markdown and two plots, in which a case is the
mean of its finished runs, and CSV with a row per run.
"""

import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrl_jax.reports.report_charts import reward_limits
from specrl_jax.reports.runs import (
    FIGURES,
    Mean,
    RecordedRun,
    Series,
    deviation,
    epoch_seconds,
    same_seed,
    seconds,
    speed_up_over,
)
from specrl_jax.telemetry.records import read_rollouts, recorded_steps

_PARTS = ("rollout", "update", "step")
_FIGURES = {name: figure for name, figure, _ in FIGURES}
_REWARD = "held-out reward, last"
HOW = (
    "Means over the finished seeds, whose number is in the second column; for the reward ± its "
    "standard error. Seconds are those of all steps: "
    "for each epoch the median of the steps that did not compile, times its steps; a dash if all "
    "compiled. Verification is part of the rollout. Speed-ups are relative to the first line, "
    "seed by seed."
)


DONE = "done"


@dataclasses.dataclass(frozen=True)
class SweptRun:
    """A case with one seed: its settings and its outcome."""

    case: str
    seed: int
    settings: Mapping[str, Any]  # field → value, for the fields that some case sets
    state: str  # `DONE`, or how the run ended early
    record: RecordedRun | None  # None: it did not finish


@dataclasses.dataclass(frozen=True)
class Column:
    """A figure of every run, and the format of a case's mean."""

    name: str
    figure: Callable[[RecordedRun], float | None]
    style: str
    with_error: bool = False


# Figures of a run ----------------------------------------------------------------------------


def until_reward(run: RecordedRun, name: str, target: float) -> float | None:
    """Return the sum of a metric until a held-out reward was reached; None if it was not."""
    reached = [r["step"] for r in run.records if r.get("reward/eval", -math.inf) >= target]
    return math.fsum(r[name] for r in run.steps if r["step"] <= reached[0]) if reached else None


def first_difference(workdir: Path, other: Path) -> tuple[int | None, int]:
    """Return (the first step whose recorded responses differ, or None; tokens compared until then).

    Responses that only one of the runs has, of another prompt or a larger group, do not count.
    """
    compared = 0
    for step in sorted(set(recorded_steps(workdir)) & set(recorded_steps(other))):
        others = _tokens(other, step)
        for response, mine in _tokens(workdir, step).items():
            theirs = others.get(response)
            if theirs is None:
                continue
            if mine != theirs:
                same = [a == b for a, b in zip(mine, theirs)]
                return step, compared + [*same, False].index(False)
            compared += len(mine)
    return None, compared


def _tokens(workdir: Path, step: int) -> dict[tuple[str, int], list[int]]:
    lines = read_rollouts(workdir, step)
    return {(line["prompt_id"], line["sample"]): line["token_ids"] for line in lines}


def columns(baseline: Series, target: float = 0.0) -> list[Column]:
    """Return the columns of the table. target: a held-out reward; adds the cost of reaching it."""
    table = [
        Column("generated tokens", _FIGURES["tokens generated"], "{:,.0f}"),
        Column("row steps", _FIGURES["row steps"], "{:,.0f}"),
        Column("rollout, s", lambda run: seconds(run, "rollout"), "{:,.1f}"),
        Column("rollout speed-up", speed_up_over(baseline, "rollout"), "{:.2f}×"),
        Column("step, s", lambda run: seconds(run, "step"), "{:,.1f}"),
        Column("step speed-up", speed_up_over(baseline, "step"), "{:.2f}×"),
        Column("held-out reward", _FIGURES[_REWARD], "{:.3f}", with_error=True),
    ]
    if target:
        for what, name in (("tokens", "rollout/tokens_generated"), ("rollout, s", "time/rollout")):
            figure = lambda run, name=name: until_reward(run, name, target)  # noqa: E731
            table.append(Column(f"{what} to {target:g}", figure, "{:,.1f}"))
    return table


# The table -----------------------------------------------------------------------------------


def _cell(series: Series, column: Column) -> str:
    mean = series.mean(column.figure)
    if mean is None:
        return "–"
    text = column.style.format(mean.value)
    if column.with_error and mean.count > 1:
        text += f" ± {column.style.format(mean.error)}"
    all_runs = len(series.runs)
    return text if mean.count == all_runs else f"{text} ({mean.count} of {all_runs} runs)"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table, padded to be readable as text too; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(f"{x:<{w}}" if i == 0 else f"{x:>{w}}"
                          for i, (x, w) in enumerate(zip(row, widths))) + " |"
        for row in rows
    ]  # fmt: skip
    rule = "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def table(cases: Sequence[Series], chosen: Sequence[Column], swept: Sequence[SweptRun]) -> str:
    """Return the table in Markdown; its last column lists which runs did not finish."""
    is_whole = all(run.state == DONE for run in swept)
    heading = ["case", "seeds", *(column.name for column in chosen)]
    rows = [heading if is_whole else [*heading, "state"]]
    for case in cases:
        runs = [run for run in swept if run.case == case.name]
        ends = [f"seed {run.seed} {run.state}" for run in runs if run.state != DONE]
        seeds = f"{len(case.runs)} of {len(runs)}" if ends else f"{len(runs)}"
        row = [case.name, seeds, *(_cell(case, x) for x in chosen)]
        if not is_whole:
            row.append("; ".join(ends).replace("|", "\\|") or DONE)
        rows.append(row)
    return markdown(rows)


def epoch_table(cases: Sequence[Series]) -> str:
    """Return seconds of a step's parts by epoch, and their speed-up over the first case.

    The table is in Markdown.
    """
    rows = [["seconds per step", *(case.name for case in cases)]]
    for epoch in sorted({epoch for case in cases for run in case.runs for epoch in run.epochs}):
        for part in _PARTS:
            means = [_epoch_mean(case, part).get(epoch, (0.0,))[0] for case in cases]
            ratios = [f" ({means[0] / x:.2f}×)" if x and means[0] else "" for x in means]
            cells = (f"{x:.3f}{ratio}" if x else "–" for x, ratio in zip(means, ratios))
            rows.append([f"epoch {epoch}, {part}", *cells])
    return markdown(rows)


def _epoch_mean(case: Series, part: str) -> dict[int, tuple[float, float]]:
    """Return mean and standard deviation over the seeds, by epoch."""
    values: dict[int, list[float]] = {}
    for run in case.runs:
        for epoch, x in epoch_seconds(run, part).items():
            values.setdefault(epoch, []).append(x)
    return {epoch: (statistics.fmean(x), deviation(x)) for epoch, x in sorted(values.items())}


def same_tokens(cases: Sequence[Series], baseline: Series) -> str:
    """Report up to which step a case has the baseline's tokens, if runs record all responses."""
    lines = []
    for case in cases:
        ends = []
        tokens = 0
        for run in case.runs:
            other = same_seed(baseline, run)
            if case is not baseline and other and run.config.get("log.rollouts", 0) >= 1:
                step, compared = first_difference(other.workdir, run.workdir)
                ends.append("the end" if step is None else f"step {step}")
                tokens += compared
        if ends:
            until = f"{baseline.name}'s tokens until {', '.join(ends)}"
            lines.append(f"{case.name}: {until} ({tokens:,} compared)")
    return "\n".join(lines)


def write(swept: Sequence[SweptRun], baseline: str, folder: Path, target: float = 0.0) -> str:
    """Write sweep.md, sweep.csv, sweep.png and epochs.png in `folder`; return the Markdown.

    There are no plots if no run finished. baseline: name of the case that speed-ups are relative
    to.
    """
    done: dict[str, list[RecordedRun]] = {run.case: [] for run in swept}
    for run in swept:
        if run.record:
            done[run.case].append(run.record)
    cases = [Series(name, runs) for name, runs in done.items()]
    first = next((case for case in cases if case.name == baseline), Series(baseline, []))
    cases = sorted(cases, key=lambda case: case.name != baseline)
    chosen = columns(first, target)
    parts = [table(cases, chosen, swept), HOW, same_tokens(cases, first)]
    has_figures = any(case.runs for case in cases)
    if has_figures:
        parts.append(epoch_table(cases))
        _write_table_plot(cases, chosen, folder / "sweep.png")
        _write_epochs_plot(cases, folder / "epochs.png")
    text = "\n\n".join(filter(None, parts))
    (folder / "sweep.md").write_text(text + "\n", encoding="utf-8")
    _write_csv(swept, chosen, folder / "sweep.csv")
    return text


def _write_csv(swept: Sequence[SweptRun], chosen: Sequence[Column], file: Path) -> None:
    """Write a row per run: case, settings, seed, state, figures."""
    fields = list(dict.fromkeys(field for run in swept for field in run.settings))
    with file.open("w", encoding="utf-8", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(["case", *fields, "seed", "state", *(column.name for column in chosen)])
        for run in swept:
            values = (run.settings.get(field, "") for field in fields)
            figures = (column.figure(run.record) if run.record else None for column in chosen)
            rows.writerow([run.case, *values, run.seed, run.state, *figures])


# Plots ---------------------------------------------------------------------------------------

_PLOTTED = ("generated tokens", "rollout speed-up", "step speed-up", "held-out reward")


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no window, no state, always Agg

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _colors(cases: Sequence[Series]) -> list[Any]:
    """Grey for the baseline, then viridis, in which neighbours differ for everyone's eyes."""
    from matplotlib import colormaps

    others = max(len(cases) - 1, 1)
    return ["#888888", *(colormaps["viridis"]((i + 0.5) / others * 0.9) for i in range(others))]


def _trim(ax: Any, title: str) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, loc="left", fontweight="bold", fontsize="medium")


def _seeds(cases: Sequence[Series], error: str) -> str:
    """Describe the error bars, or state that one seed has none."""
    fewest = min(len(case.runs) for case in cases if case.runs)
    most = max(len(case.runs) for case in cases)
    if most == 1:
        return "one seed, no error bars"
    number = f"{fewest} seeds" if fewest == most else f"{fewest} to {most} seeds"
    return f"{number}, ± {error}{' if there are several' * (fewest == 1)}"


def _write_table_plot(cases: Sequence[Series], chosen: Sequence[Column], file: Path) -> None:
    """Draw a line per case: tokens and speed-ups as bars, reward as a point; standard errors."""
    missing = Mean(math.nan, 0.0, 1)
    panels = {x: [case.mean(x.figure) for case in cases] for x in chosen if x.name in _PLOTTED}
    panels = {x: points for x, points in panels.items() if any(points)}
    figure = _figure(2 + 3 * len(panels), 1.4 + 0.32 * len(cases))
    lines = range(len(cases))
    colors = _colors(cases)
    (axes,) = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for ax, (column, points) in zip(axes, panels.items()):
        means = [point or missing for point in points]
        if column.with_error:  # not from 0: the reward's differences are small
            for line, mean, color in zip(lines, means, colors):
                bar = mean.error if mean.count > 1 else None
                ax.errorbar(mean.value, line, xerr=bar, fmt="o", color=color, capsize=3)
            known = [x for x in points if x]
            ax.set_xlim(reward_limits(x.value + s * x.error for x in known for s in (-1, 1)))
        else:
            lengths = [x.value for x in means]
            errors = [x.error for x in means]
            bars = ax.barh(lines, lengths, 0.7, xerr=errors, color=colors, error_kw={"lw": 0.8})
            texts = [column.style.format(x) if math.isfinite(x) else "–" for x in lengths]
            ax.bar_label(bars, texts, padding=4, fontsize="small")
            ax.margins(x=0.3)
        ax.set_yticks(lines, [case.name for case in cases])
        _trim(ax, column.name.capitalize())
    ax.invert_yaxis()
    figure.supxlabel(_seeds(cases, "standard error"), fontsize="small", color="#666666")
    figure.savefig(file)


def _write_epochs_plot(cases: Sequence[Series], file: Path) -> None:
    """Draw seconds of a step's parts by epoch and held-out reward by step, means over the seeds."""
    figure = _figure(13, 3.6 + 0.1 * len(cases))
    *parts, last = figure.subplots(1, len(_PARTS) + 1)
    width = 0.8 / len(cases)
    for i, (case, color) in enumerate(zip(cases, _colors(cases))):
        for ax, part in zip(parts, _PARTS):
            points = _epoch_mean(case, part)
            x = [epoch + (i + 0.5) * width - 0.4 for epoch in points]
            means = [mean for mean, _ in points.values()]
            errors = [error for _, error in points.values()]
            ax.bar(x, means, width, color=color, yerr=errors, error_kw={"lw": 0.8})
        rewards = case.values("reward/eval")
        last.errorbar([*rewards], [*map(statistics.fmean, rewards.values())], color=color,
                      label=case.name, yerr=[*map(deviation, rewards.values())], lw=1.6,
                      elinewidth=0.6)  # fmt: skip
    for ax, part in zip(parts, _PARTS):
        ax.set(xlabel="epoch", ylabel="seconds per step")
        _trim(ax, part.capitalize())
    last.set(xlabel="step")
    shown = last.dataLim.intervaly
    if math.isfinite(shown[0]):  # not if nothing was held out
        last.set_ylim(reward_limits(shown))
    _trim(last, "Held-out reward")
    for ax in (*parts, last):
        ax.xaxis.get_major_locator().set_params(integer=True)
    ncols = max(1, 180 // (8 + max(len(case.name) for case in cases)))  # as many as fit
    figure.legend(
        ncols=ncols, loc="outside lower left", frameon=False, fontsize="small", alignment="left",
        title=_seeds(cases, "standard deviation"), title_fontsize="small",
    )  # fmt: skip
    figure.savefig(file)
