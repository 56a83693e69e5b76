"""Charts of a run's report, as Plotly figures: {"title", "note", "data", "layout"}.

Takes `Series` of runs, one colour each; up to four have the standard deviation over their seeds as
a band. The page has the legend of colours. A single series has a colour per metric. A chart without
data, or with only zeros, is left out. Times exclude steps that compiled. Each trace has the name of
its series as "meta", and the steps of its points as "customdata" if these are not x. Colours are
Okabe and Ito's, then Tol's.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specrl_jax.reports.runs import RecordedRun, Series, deviation
from specrl_jax.telemetry.metrics import METRICS

Chart = dict[str, Any]

BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
YELLOW = "#E69F00"
SKY = "#56B4E9"
GREY = "#999999"
_COLORS = (
    BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY,
    "#882255", "#44AA99", "#999933", "#332288", "#CC6677",
)  # fmt: skip
_DASHES = ("solid", "dot", "dash")
_MAX_EPOCH_NAMES = 4  # per chart, whose width they share; more epochs have lines without names
_MARGIN = 0.05  # on a reward's axis around its values, so that small changes look small
_MAX_BANDS = 4  # series with bands; more would cover each other

# Title → metrics. SPEC-RL (arXiv 2509.23232) shows the same three: reward, seconds, reuse.
_OVERVIEW = {
    "Reward": ("reward/mean", "reward/eval"),
    "Seconds per step": ("time/step", "time/rollout", "time/update"),
    "Tokens of the responses": ("rollout/tokens_reused", "rollout/tokens_generated"),
}
# What the reward is plotted against besides steps: its description, total, and part per step.
_AGAINST = {
    "seconds": ("seconds of all steps so far", "time/total", "time/step"),
    "generated tokens": (
        "tokens generated so far", "data/tokens_generated", "rollout/tokens_generated"
    ),
}  # fmt: skip
_TOTALS = ("time/compile", "time/total")  # names with "time/" that are not seconds of a step


def color(number: int) -> str:
    """Return the color of a series, or of a metric of a single series."""
    return _COLORS[number % len(_COLORS)]


def reward_limits(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of an axis of rewards that contains the values, at least one."""
    values = list(values)
    margin = max(_MARGIN, _MARGIN * (max(values) - min(values)))
    return min(values) - margin, max(values) + margin


def overview_charts(series: Sequence[Series]) -> list[Chart]:
    """Return reward, seconds and reuse, the curves to look at first; then the cost of a reward."""
    charts = [_chart(title, "", metrics, series) for title, metrics in _OVERVIEW.items()]
    charts += [_reward_against(what, series) for what in _AGAINST]
    return [chart for chart in charts if _is_drawn(chart)]


def metric_charts(series: Sequence[Series]) -> list[tuple[str, list[Chart]]]:
    """Return (prefix, a chart per metric) by the prefixes of `METRICS`, in their order."""
    found = {name for case in series for run in case.runs for x in run.records for name in x}
    by_prefix: dict[str, list[Chart]] = {name.partition("/")[0]: [] for name in METRICS}
    for name in [*METRICS, *sorted(found - METRICS.keys())]:
        prefix, _, title = name.partition("/")
        if name not in found or prefix not in by_prefix:
            continue
        note = ""
        if name in METRICS:
            meaning, unit = METRICS[name]
            note = meaning if unit == "1" else f"{meaning} ({unit})"
        by_prefix[prefix].append(_chart(title, note, [name], series))
    drawn = ((prefix, list(filter(_is_drawn, charts))) for prefix, charts in by_prefix.items())
    return [(prefix, charts) for prefix, charts in drawn if charts]


def _is_drawn(chart: Chart) -> bool:
    return any(any(trace["y"]) for trace in chart["data"])


def _chart(title: str, note: str, metrics: Sequence[str], series: Sequence[Series]) -> Chart:
    """Return a chart over steps. With several series, each of several metrics has a dash style."""
    traces: list[dict] = []
    for i, case in enumerate(series):
        for j, metric in enumerate(metrics):
            steady = metric.startswith("time/") and metric not in _TOTALS
            points = case.values(metric, steady) or case.values(metric)
            if not points:
                continue
            traces += _traces(points, metric, metrics, series, (i, j))
    if len(series) > 1 and len(metrics) > 1:
        traces += _key(metrics)
    layout = _layout(series[0].runs[0])
    layout["yaxis"] = {"rangemode": "tozero"}
    if all(metric.startswith("reward/") for metric in metrics):
        layout["yaxis"] = _reward_axis(traces) or layout["yaxis"]
    return {"title": title, "note": note, "data": traces, "layout": layout}


def _traces(
    points: dict[int, list[float]],
    metric: str,
    metrics: Sequence[str],
    series: Sequence[Series],
    place: tuple[int, int],
) -> list[dict]:
    """Return the traces of a metric of a series; place: the indices of the series and the metric.

    metrics: of the chart.
    """
    i, j = place
    name = series[i].name
    if len(series) == 1:
        return [line | {"meta": name} for line in _lines(points, metric, color(j), "solid")]
    label = f"{name}, {metric}" if len(metrics) > 1 else name
    lines = _lines(points, label, color(i), _DASHES[j])
    lines = lines if len(series) <= _MAX_BANDS else lines[-1:]
    return [line | {"showlegend": False, "meta": name} for line in lines]


def _reward_axis(traces: Sequence[dict]) -> dict[str, Any]:
    drawn = [y for trace in traces for y in trace["y"] if y is not None]
    return {"range": list(reward_limits(drawn))} if drawn else {}


def _reward_against(what: str, series: Sequence[Series]) -> Chart:
    """Return the chart of the rewards over a key of `_AGAINST`, averaged over the seeds."""
    note, total, part = _AGAINST[what]
    metrics = _OVERVIEW["Reward"]
    traces: list[dict] = []
    for i, case in enumerate(series):
        totals = [_so_far(run, total, part) for run in case.runs]
        for j, metric in enumerate(metrics):
            points = case.values(metric)
            if not points:
                continue
            for line in _traces(points, metric, metrics, series, (i, j)):
                steps = line["x"]
                at = [statistics.fmean([x[s] for x in totals if s in x] or [0]) for s in steps]
                if any(at):
                    traces.append(line | {"x": _rounded(at), "customdata": steps})
    if len(series) > 1 and traces:
        traces += _key(metrics)
    layout = {"xaxis": {"rangemode": "tozero"}, "yaxis": _reward_axis(traces)}
    return {"title": f"Reward against {what}", "note": note, "data": traces, "layout": layout}


def _so_far(run: RecordedRun, total: str, part: str) -> dict[int, float]:
    """Return a total by step; for a run that has not recorded it, the sum of its parts."""
    totals = {}
    sum_so_far = 0.0
    for record in run.records:
        sum_so_far = record.get(total, sum_so_far + record.get(part, 0.0))
        totals[record["step"]] = sum_so_far
    return totals


def _key(metrics: Sequence[str]) -> Iterator[dict]:
    """Yield traces without points that name the metrics of all series by their dash styles."""
    for metric, dash in zip(metrics, _DASHES):
        line = {"color": GREY, "width": 2, "dash": dash}
        nothing = {"type": "scatter", "mode": "lines", "x": [None], "y": [None]}
        yield nothing | {"name": metric, "line": line, "hoverinfo": "skip"}


def _lines(points: dict[int, list[float]], name: str, color: str, dash: str) -> list[dict]:
    """Return the means over the seeds, with their standard deviation as a band behind them."""
    steps = list(points)
    means = [statistics.fmean(values) for values in points.values()]
    spread = [deviation(values) for values in points.values()]
    sparse = len(steps) < 2 or min(b - a for a, b in itertools.pairwise(steps)) > 1
    style = {"color": color, "width": 2, "dash": dash}
    line = {"x": steps, "y": _rounded(means), "name": name, "line": style, "type": "scatter"}
    line["mode"] = "lines+markers" if sparse else "lines"
    if not any(spread):
        return [line]
    upper = [m + s for m, s in zip(means, spread)]
    lower = [m - s for m, s in zip(means, spread)]
    band = {"x": steps + steps[::-1], "y": _rounded(upper + lower[::-1]), "fill": "toself"}
    band |= {"fillcolor": color, "opacity": 0.2, "line": {"width": 0}, "hoverinfo": "skip"}
    return [band | {"showlegend": False, "type": "scatter", "mode": "lines"}, line]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _layout(run: RecordedRun) -> dict[str, Any]:
    """Return a dotted line before the first step of each epoch, with the epoch's number."""
    starts = [(epoch, members[0]["step"] - 0.5) for epoch, members in run.epochs.items()]
    every = math.ceil(len(starts) / _MAX_EPOCH_NAMES)
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    line["line"] = {"color": GREY, "width": 1, "dash": "dot"}
    label = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False}
    label["font"] = {"size": 10, "color": GREY}
    return {
        "shapes": [line | {"x0": x, "x1": x} for _, x in starts],
        "annotations": [
            label | {"x": x, "text": f"epoch {epoch}" if i == 0 else str(epoch)}
            for i, (epoch, x) in enumerate(starts)
            if i % every == 0
        ],
    }
