"""A run's summary table and plots, from its records (`metrics.read_metrics`).

Takes a list of dicts, one a step, with `step`, `epoch` and metrics of `metrics.METRICS`; missing
metrics are skipped. Gives text for the console and PNG files.
"""

import math
import operator
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_MAX_EPOCH_NAMES = 8  # in a plot; more epochs have lines without names
_OFF_SCALE = 4.0  # times the median: a longer step compiled, and is not drawn to its full height

_BLUE, _ORANGE, _GREEN, _GREY = "#3366aa", "#dd8833", "#339977", "#888888"


def _series(records: Iterable[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric where it exists and is finite."""
    points = [
        (record["step"], record[name])
        for record in records
        if record.get(name) is not None and math.isfinite(record[name])
    ]
    return [step for step, _ in points], [value for _, value in points]


def _epochs(records: Sequence[Record]) -> dict[int, list[Record]]:
    """Records by epoch, in order, for steps that trained."""
    epochs: dict[int, list[Record]] = {}
    for record in records:
        if "reward/mean" in record:
            epochs.setdefault(record["epoch"], []).append(record)
    return epochs


# Table --------------------------------------------------------------------------------------


# From an epoch's records to one number; None where there is no value.
Summary = Callable[[Sequence[Record]], float | None]


def _metric(name: str, reduce: Callable[[list[float]], float]) -> Summary:
    def summarize(records: Sequence[Record]) -> float | None:
        values = _series(records, name)[1]
        return reduce(values) if values else None

    return summarize


def _reuse(records: Sequence[Record]) -> float | None:
    """The fraction over all tokens, not the mean of the steps' fractions."""
    names = ("rollout/tokens_reused", "rollout/tokens_generated")
    reused, generated = (math.fsum(_series(records, name)[1]) for name in names)
    return reused / (reused + generated) if reused + generated else None


_mean, _total, _last = statistics.fmean, math.fsum, operator.itemgetter(-1)
# Heading, how an epoch's steps become one number, format.
_COLUMNS: tuple[tuple[str, Summary, str], ...] = (
    ("reward", _metric("reward/mean", _mean), "{:.3f}"),
    ("eval", _metric("reward/eval", _last), "{:.3f}"),
    ("reuse", _reuse, "{:.1%}"),
    ("accepted", _metric("rollout/draft_accept_rate", _mean), "{:.1%}"),
    ("prefix", _metric("rollout/prefix_len_mean", _mean), "{:.1f}"),
    ("whole", _metric("rollout/full_reuse_ratio", _mean), "{:.1%}"),
    ("generated", _metric("rollout/tokens_generated", _total), "{:,.0f}"),
    ("reused", _metric("rollout/tokens_reused", _total), "{:,.0f}"),
    ("rollout s", _metric("time/rollout", _total), "{:.1f}"),
    ("verify s", _metric("time/verify", _total), "{:.1f}"),
    ("decode s", _metric("time/decode", _total), "{:.1f}"),
    ("update s", _metric("time/update", _total), "{:.1f}"),
)

_LEGEND = (
    "Means over an epoch's steps: reward, accepted (of the draft tokens), prefix (tokens), whole\n"
    "(responses reused whole). eval: the epoch's last. reuse: reused over all response tokens.\n"
    "Sums: generated and reused tokens, seconds."
)


def summary_table(records: Sequence[Record]) -> str:
    """A run in lines of text: first, best and last rewards, and a row for each epoch.

    records: by step, from `metrics.read_metrics`. One sentence if no step was recorded.
    """
    epochs = _epochs(records)
    if not epochs:
        return "No training step was recorded."
    rows = [["epoch", *(name for name, *_ in _COLUMNS)]]
    for epoch, members in epochs.items():
        rows.append([str(epoch), *_cells(members)])
    rows.append(["all", *_cells([record for members in epochs.values() for record in members])])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    rule = "-" * len(lines[0])
    body = [lines[0], rule, *lines[1:-1], rule, lines[-1]]
    return "\n".join([*_headlines(records), "", *body, _LEGEND])


def _cells(records: Sequence[Record]) -> list[str]:
    values = ((summarize(records), style) for _, summarize, style in _COLUMNS)
    return ["-" if value is None else style.format(value) for value, style in values]


def _headlines(records: Sequence[Record]) -> list[str]:
    lines = []
    for title, name in (("held-out reward", "reward/eval"), ("training reward", "reward/mean")):
        steps, values = _series(records, name)
        if values:
            best = max(range(len(values)), key=values.__getitem__)
            lines.append(
                f"{title}: first {values[0]:.3f} (step {steps[0]}), "
                f"best {values[best]:.3f} (step {steps[best]}), "
                f"last {values[-1]:.3f} (step {steps[-1]})"
            )
    return lines


# Plots --------------------------------------------------------------------------------------


def _line(ax: Any, records: Sequence[Record], name: str, color: str, **style: Any) -> None:
    """Draws a metric over the steps that have it; nothing where none has."""
    steps, values = _series(records, name)
    if steps:
        ax.plot(steps, values, color=color, **({"lw": 1.6} | style))


def _draw_reward(ax: Any, records: Sequence[Record]) -> None:
    _line(ax, records, "reward/mean", _BLUE, label="training prompts")
    _line(ax, records, "reward/eval", _ORANGE, label="held-out prompts", marker="o", ms=4)
    ax.set(title="Reward", ylabel="mean reward")


def _draw_seconds(ax: Any, records: Sequence[Record]) -> None:
    """The rollout's parts as stacked bars, the whole rollout as a line of steps."""
    timed = [record for record in records if record.get("time/rollout") is not None]
    steps = [record["step"] for record in timed]
    bottom = [0.0] * len(timed)
    for name, color in (("prefill", _GREEN), ("verify", _ORANGE), ("decode", _BLUE)):
        seconds = [record.get(f"time/{name}") or 0.0 for record in timed]
        # Without antialiasing: it would draw seams between bars that touch.
        ax.bar(steps, seconds, 1.0, bottom=bottom, color=color, label=name, aa=False)
        bottom = [below + height for below, height in zip(bottom, seconds, strict=True)]
    totals = [record["time/rollout"] for record in timed]
    ax.plot(steps, totals, color=_GREY, lw=1.2, drawstyle="steps-mid", label="whole rollout")
    ax.set(title="Rollout time", ylabel="seconds")
    _cut_outliers(ax, steps, totals)


def _cut_outliers(ax: Any, steps: Sequence[int], values: Sequence[float]) -> None:
    """Limits the height: the first steps compile and would flatten all others."""
    if not values:
        return
    limit = _OFF_SCALE * sorted(values)[len(values) // 2]
    beyond = [(step, value) for step, value in zip(steps, values) if value > limit]
    if not beyond or limit <= 0:
        return
    top = 1.2 * max(value for value in values if value <= limit)
    ax.set_ylim(0, top)
    noted = ", ".join(f"step {step}: {value:.1f} s" for step, value in beyond[:3])
    more = f" and {len(beyond) - 3} more" if len(beyond) > 3 else ""
    ax.set_xlabel(f"step   (off the scale: {noted}{more})")


def _draw_prefix(ax: Any, records: Sequence[Record]) -> None:
    _line(ax, records, "rollout/response_len_mean", _GREY, label="response", lw=1.2)
    _line(ax, records, "rollout/prefix_len_mean", _GREEN, label="accepted prefix")
    prefix = _series(records, "rollout/prefix_len_mean")
    ax.fill_between(*prefix, color=_GREEN, alpha=0.15, lw=0)
    ax.set(title="Length of the accepted prefix", ylabel="tokens, mean over rows")
    ax.set_ylim(bottom=0)


def _draw_full_reuse(ax: Any, records: Sequence[Record]) -> None:
    _line(ax, records, "rollout/full_reuse_ratio", _GREEN)
    ax.set(title="Responses reused whole", ylabel="share of all responses", ylim=(0, 1))


def _draw_tokens(ax: Any, records: Sequence[Record]) -> None:
    _line(ax, records, "rollout/tokens_generated", _BLUE, label="generated")
    _line(ax, records, "rollout/tokens_reused", _GREEN, label="reused")
    ax.set(title="Response tokens", ylabel="tokens a step")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


PLOTS: dict[str, Callable[[Any, Sequence[Record]], None]] = {
    "reward": _draw_reward,
    "rollout_seconds": _draw_seconds,
    "prefix_len": _draw_prefix,
    "full_reuse": _draw_full_reuse,
    "tokens": _draw_tokens,
}
_OVERVIEW = [["reward", "reward"], ["rollout_seconds", "prefix_len"], ["full_reuse", "tokens"]]


def draw(ax: Any, name: str, records: Sequence[Record]) -> None:
    """Draws the plot `name` of `PLOTS` on matplotlib axes, over steps, with marks at epochs."""
    ax.set_xlabel("step")
    PLOTS[name](ax, records)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#dddddd", lw=0.6)
    ax.set_axisbelow(True)
    ax.xaxis.get_major_locator().set_params(integer=True)
    bottom, top = ax.get_ylim()
    ax.set_ylim(bottom, top + 0.1 * (top - bottom))  # room for the epochs' numbers
    _mark_epochs(ax, records)
    labels = ax.get_legend_handles_labels()[1]
    if labels:
        # Above the axes: it covers no data there.
        ax.legend(
            ncols=len(labels),
            frameon=False,
            fontsize="small",
            handlelength=1.2,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.2,
        )
    ax.set_title(ax.get_title(), loc="left", fontweight="bold", fontsize="medium")
    ax.set_title("")


def _mark_epochs(ax: Any, records: Sequence[Record]) -> None:
    """A dotted line before the first step of an epoch, and the epoch's number at the top."""
    starts = [(epoch, members[0]["step"]) for epoch, members in _epochs(records).items()]
    every = math.ceil(len(starts) / _MAX_EPOCH_NAMES)
    for i, (epoch, step) in enumerate(starts):
        ax.axvline(step - 0.5, color=_GREY, lw=0.7, ls=":", zorder=0.5, gid="epoch")
        if i % every == 0:
            ax.annotate(
                f"epoch {epoch}" if i == 0 else str(epoch),
                (step - 0.5, 1.0),
                xycoords=ax.get_xaxis_transform(),
                xytext=(2, -2),
                textcoords="offset points",
                ha="left",
                va="top",
                fontsize="x-small",
                color=_GREY,
                bbox={"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 0.5},
            )


def write_plots(records: Sequence[Record], workdir: str | os.PathLike) -> list[Path]:
    """Writes `WORKDIR/plots/NAME.png` for every plot of `PLOTS`, and `overview.png` with all.

    records: by step, from `metrics.read_metrics`. Returns the files, `overview.png` first; [] if no
    training step was recorded.
    """
    if not _epochs(records):
        return []
    from matplotlib.figure import Figure  # without pyplot: no window, no state, always Agg

    folder = Path(workdir) / "plots"
    folder.mkdir(parents=True, exist_ok=True)
    overview = Figure(figsize=(11, 9.5), dpi=110, layout="constrained")
    all_axes = overview.subplot_mosaic(_OVERVIEW)
    for name, ax in all_axes.items():
        draw(ax, name, records)
    files = [folder / "overview.png"]
    overview.savefig(files[0])
    for name in PLOTS:
        figure = Figure(figsize=(7, 3.6), dpi=130, layout="constrained")
        draw(figure.subplots(), name, records)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1])
    return files
