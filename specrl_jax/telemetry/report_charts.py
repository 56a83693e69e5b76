"""Charts of a run's report, as figures of Plotly: {"title", "note", "data", "layout"}.

Takes `Series` of runs, one colour each; up to four have the standard deviation over their seeds as
a band. The page says whose colour is which. One series has a colour for each metric. A chart
without data, or of zeros alone, is left out. Times are without steps that compiled. Colours are
Okabe and Ito's, then Tol's.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specrl_jax.telemetry.metrics import METRICS
from specrl_jax.telemetry.runs import RecordedRun, Series, deviation

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
_MAX_EPOCH_NAMES = 4  # in a chart, whose width they share; more epochs have lines without names
_MARGIN = 0.05  # of a reward's axis beside its values, so that what is small looks small
_MAX_BANDS = 4  # series with bands; those of more would cover each other

# Title → metrics. SPEC-RL (arXiv 2509.23232) shows the same three: reward, seconds, reuse.
_OVERVIEW = {
    "Reward": ("reward/mean", "reward/eval"),
    "Seconds of a step": ("time/step", "time/rollout", "time/update"),
    "Tokens of the responses": ("rollout/tokens_reused", "rollout/tokens_generated"),
}


def color(number: int) -> str:
    """Return the color of a series, or of a metric of the only series."""
    return _COLORS[number % len(_COLORS)]


def reward_limits(values: Iterable[float]) -> tuple[float, float]:
    """Return the ends of an axis of rewards; the values, of which one at least, are within both."""
    values = list(values)
    margin = max(_MARGIN, _MARGIN * (max(values) - min(values)))
    return min(values) - margin, max(values) + margin


def overview_charts(series: Sequence[Series]) -> list[Chart]:
    """Return reward, seconds and reuse, the curves to look at first."""
    charts = [_chart(title, "", metrics, series) for title, metrics in _OVERVIEW.items()]
    return [chart for chart in charts if _is_drawn(chart)]


def metric_charts(series: Sequence[Series]) -> list[tuple[str, list[Chart]]]:
    """Return (prefix, a chart for each metric) by the prefixes of `METRICS`, in their order."""
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
    """Return a chart over steps. Several series have a dash for each of several metrics."""
    traces: list[dict] = []
    for i, case in enumerate(series):
        for j, metric in enumerate(metrics):
            steady = metric.startswith("time/") and metric != "time/compile"
            points = case.values(metric, steady) or case.values(metric)
            if not points:
                continue
            if len(series) == 1:
                traces += _lines(points, metric, color(j), "solid")
                continue
            label = f"{case.name}, {metric}" if len(metrics) > 1 else case.name
            lines = _lines(points, label, color(i), _DASHES[j])
            lines = lines if len(series) <= _MAX_BANDS else lines[-1:]
            traces += [line | {"showlegend": False} for line in lines]
    if len(series) > 1 and len(metrics) > 1:
        traces += _key(metrics)
    layout = _layout(series[0].runs[0])
    drawn = [y for trace in traces for y in trace["y"] if y is not None]
    if drawn and all(metric.startswith("reward/") for metric in metrics):
        layout["yaxis"] = {"range": list(reward_limits(drawn))}
    else:
        layout["yaxis"] = {"rangemode": "tozero"}
    return {"title": title, "note": note, "data": traces, "layout": layout}


def _key(metrics: Sequence[str]) -> Iterator[dict]:
    """Yield traces without points, which name the metrics of all series by their dashes."""
    for metric, dash in zip(metrics, _DASHES):
        line = {"color": GREY, "width": 2, "dash": dash}
        nothing = {"type": "scatter", "mode": "lines", "x": [None], "y": [None]}
        yield nothing | {"name": metric, "line": line, "hoverinfo": "skip"}


def _lines(points: dict[int, list[float]], name: str, color: str, dash: str) -> list[dict]:
    """Return the means over the seeds, and behind them their standard deviation as a band."""
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
