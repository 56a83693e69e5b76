"""The charts of a run's report, as figures of Plotly: {"data": [...], "layout": {...}}.

Takes `Series` of runs, one colour each; up to four have the standard deviation over their seeds as
a band. The page says whose colour is which. One series has a colour for each metric. A chart
without data, or of zeros alone, is left out. Colours are Okabe and Ito's, then Tol's.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from specrl_jax.telemetry.runs import (
    Record,
    RecordedRun,
    Series,
    deviation,
    reward_limits,
    without_compiling,
)

Chart = dict[str, Any]  # title, note, data, layout; height in pixels where it is not the page's

BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999"
)  # fmt: skip
_COLORS = (
    BLUE, ORANGE, GREEN, PURPLE, YELLOW, SKY, GREY,
    "#882255", "#44AA99", "#999933", "#332288", "#CC6677",
)  # fmt: skip
_DASHES = ("solid", "dot", "dash")
_MAX_EPOCH_NAMES = 8  # in a chart; more epochs have lines without names
_MAX_LEFT_OUT = 3  # steps that are named in a note
_MAX_BANDS = 4  # series with bands; those of more would cover each other
_BAR = 22  # pixels of a horizontal bar
_AROUND = 110  # pixels of legend and axis
_MAX_HISTOGRAMS = 4
_BINS = 12


class _Curves(NamedTuple):
    """A chart of metrics over steps."""

    title: str
    unit: str
    metrics: dict[str, str]  # metric → its name in the chart
    share: bool = False  # from 0 to 1
    reward: bool = False  # not from 0: what is learned last is small
    seconds: bool = False  # without steps that compiled


# The papers' curves: SPEC-RL (arXiv 2509.23232), figures 1, 4 and 6; SRT (2601.09083), figure 4.
_TRAINING = (
    _Curves("Reward", "mean reward", {"reward/mean": "training", "reward/eval": "held out"},
            reward=True),
    _Curves("Rollout", "seconds a step", {"time/rollout": "rollout"}, seconds=True),
    _Curves("Accepted prefix", "tokens, mean over rows",
            {"rollout/prefix_len_mean": "accepted", "rollout/response_len_mean": "response"}),
    _Curves("Responses reused whole", "share", {"rollout/full_reuse_ratio": "whole"}, share=True),
    _Curves("Tokens and work", "a step",
            {"rollout/tokens_reused": "reused", "rollout/tokens_generated": "generated",
             "rollout/row_steps": "row steps (work)"}),
    _Curves("Overlap with the last epoch's response", "ROUGE-1 F1",
            {"rollout/overlap_rouge1": "overlap"}, share=True),
    _Curves("Groups without signal", "share", {"reward/no_signal": "equal rewards"}, share=True),
    _Curves("Gradient norm", "before clipping", {"update/grad_norm": "gradient norm"}),
    _Curves("Learning rate", "of the step's last update", {"update/lr": "learning rate"}),
    _Curves("Entropy", "nats a token", {"policy/entropy": "entropy"}),
    _Curves("KL to the reference", "nats a token", {"policy/kl": "KL"}),
    _Curves("Clipped tokens", "share", {"policy/clip_fraction": "clipped"}),
)  # fmt: skip
_EXACTNESS = (
    _Curves("Accepted tokens: log π/π_old", "nats",
            {f"reuse/log_ratio_p{n}": f"{int(n)}th percentile" for n in ("95", "50", "05")}),
    _Curves("Accepted tokens: KL of old and new policy", "nats a token", {"reuse/kl": "KL"}),
    _Curves("Accepted and rejected draft tokens", "share",
            {"rollout/draft_accept_rate": "accepted of all", "reuse/rejected_mass":
             "rejected of verified", "reuse/lenient_fraction": "accepted by lenience alone"},
            share=True),
    _Curves("Rollout's and training's log-prob", "mean difference, nats",
            {"policy/rollout_train_logprob_gap": "difference"}),
    _Curves("Importance weights", "mean over tokens",
            {"policy/importance_mean": "weight", "policy/importance_capped": "share capped"}),
    _Curves("Cut or failed", "responses, answers", {"rollout/truncated_fraction": "share cut",
            "reward/failed": "failed answers"}),
)  # fmt: skip

# Parts of a step's seconds, from the bottom: name, its metric, those within it that have their own
# part, colour.
_PARTS = (
    ("extend", "extend", (), YELLOW),
    ("decode", "decode", (), BLUE),
    ("rest of the rollout", "rollout", ("extend", "decode"), GREY),
    ("reward", "reward", (), PURPLE),
    ("update", "update", (), GREEN),
    ("rest of the step", "step", ("rollout", "reward", "update"), "#666666"),
)


def training_charts(series: Sequence[Series]) -> list[Chart]:
    """The papers' curves."""
    return _drawn(_TRAINING, series)


def exactness_charts(series: Sequence[Series]) -> list[Chart]:
    """Distances of reused tokens from the policy's, and of the rollout from the update."""
    return _drawn(_EXACTNESS, series)


# Over steps ---------------------------------------------------------------------------------


def _drawn(charts: Sequence[_Curves], series: Sequence[Series]) -> list[Chart]:
    drawn = (_chart(curves, series) for curves in charts)
    return [chart for chart in drawn if any(any(trace["y"]) for trace in chart["data"])]


def color(number: int) -> str:
    """Color of a series, or of a metric of the only series."""
    return _COLORS[number % len(_COLORS)]


def _chart(curves: _Curves, series: Sequence[Series]) -> Chart:
    traces: list[dict] = []
    several = len(series) > 1
    for i, case in enumerate(series):
        for j, (metric, name) in enumerate(curves.metrics.items()):
            points = case.values(metric, curves.seconds) or case.values(metric)
            if not points:
                continue
            if several:
                label = f"{case.name}, {name}" if len(curves.metrics) > 1 else case.name
                lines = _line(points, label, color(i), _DASHES[j])
                lines = lines if len(series) <= _MAX_BANDS else lines[-1:]
                traces += [line | {"showlegend": False} for line in lines]
            else:
                traces += _line(points, name, color(j), "solid")
    if several and len(curves.metrics) > 1:
        traces += _key(curves.metrics.values())
    layout = _layout(curves.unit, series[0].runs[0])
    drawn = [y for trace in traces for y in trace["y"] if y is not None]
    if curves.share:
        layout["yaxis"]["range"] = [0, 1]
    elif curves.reward and drawn:
        layout["yaxis"]["range"] = list(reward_limits(drawn))
    else:
        layout["yaxis"]["rangemode"] = "tozero"
    note = _left_out(series) if curves.seconds else ""
    return {"title": curves.title, "note": note, "data": traces, "layout": layout}


def _key(names: Iterable[str]) -> list[dict]:
    """Traces without points, which name the metrics of all series by their dashes."""
    nothing = {"type": "scatter", "mode": "lines", "x": [None], "y": [None], "hoverinfo": "skip"}
    return [
        nothing | {"name": name, "line": {"color": GREY, "width": 2, "dash": dash}}
        for name, dash in zip(names, _DASHES)
    ]


def _line(points: dict[int, list[float]], name: str, color: str, dash: str) -> list[dict]:
    """Means over the seeds, and their standard deviation as a band behind them."""
    steps = list(points)
    means = [statistics.fmean(values) for values in points.values()]
    spread = [deviation(values) for values in points.values()]
    sparse = len(steps) < 2 or min(b - a for a, b in itertools.pairwise(steps)) > 1
    style = {"color": color, "width": 2, "dash": dash}
    line = {"x": steps, "y": _rounded(means), "name": name, "line": style, "type": "scatter"}
    line["mode"] = "lines+markers" if sparse else "lines"
    if not any(spread):
        return [line]
    edges = [m + s for m, s in zip(means, spread)], [m - s for m, s in zip(means, spread)]
    band = {"x": steps + steps[::-1], "y": _rounded(edges[0] + edges[1][::-1]), "fill": "toself"}
    band |= {"fillcolor": color, "opacity": 0.2, "line": {"width": 0}, "hoverinfo": "skip"}
    return [band | {"showlegend": False, "type": "scatter", "mode": "lines"}, line]


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _layout(unit: str, run: RecordedRun) -> dict[str, Any]:
    """Axes, and a dotted line before the first step of each epoch, with the epoch's number."""
    starts = [(epoch, members[0]["step"] - 0.5) for epoch, members in run.epochs.items()]
    every = math.ceil(len(starts) / _MAX_EPOCH_NAMES)
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    line["line"] = {"color": GREY, "width": 1, "dash": "dot"}
    label = {"yref": "paper", "y": 1, "yanchor": "bottom", "xanchor": "left", "showarrow": False}
    label["font"] = {"size": 10, "color": GREY}
    return {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": unit}},
        "shapes": [line | {"x0": x, "x1": x} for _, x in starts],
        "annotations": [
            label | {"x": x, "text": f"epoch {epoch}" if i == 0 else str(epoch)}
            for i, (epoch, x) in enumerate(starts)
            if i % every == 0
        ],
    }


def _left_out(series: Sequence[Series]) -> str:
    """Says which steps of a run are not shown, as they compiled; all are if every step did."""
    runs = [run for case in series for run in case.runs]
    steady = [{record["step"] for record in without_compiling(run.steps)} for run in runs]
    compiled = [r for run, kept in zip(runs, steady) for r in run.steps if r["step"] not in kept]
    if not compiled or not any(steady):
        return ""
    if len(runs) > 1:
        return "Without steps that compiled."
    named = [f"{r['step']} ({r['time/step']:.1f} s)" for r in compiled[:_MAX_LEFT_OUT]]
    more = len(compiled) - len(named)
    return f"Without steps that compiled: {', '.join(named)}{f' and {more} more' * bool(more)}."


# Seconds and lengths ------------------------------------------------------------------------


def seconds_chart(series: Sequence[Series]) -> Chart:
    """A step's seconds as stacked bars: of every step of a single run, else means by epoch, which
    lie, as names of series are long."""
    runs = [run for case in series for run in case.runs]
    if len(runs) == 1:
        layout = _layout("seconds", runs[0]) | {"barmode": "stack", "bargap": 0}
        note = _left_out(series)
        steps = without_compiling(runs[0].steps) or runs[0].steps
        bars = [(record["step"], [record]) for record in steps]
    else:
        layout = {
            "barmode": "stack", "bargap": 0.15, "legend": {"y": 1.01},
            "xaxis": {"title": {"text": "seconds a step"}, "showgrid": True},
            "yaxis": {"autorange": "reversed", "showgrid": False},
        }  # fmt: skip
        note = "Means over the steps and seeds of an epoch, without steps that compiled."
        bars = [(x, records) for x, records in _by_epoch(series) if records]
    places: list = [place for place, _ in bars]
    if len(series) > 1:  # two levels
        places = list(map(list, zip(*places)))
    traces = []
    for name, metric, within, hue in _PARTS:
        seconds = [_mean_seconds(records, metric, within) for _, records in bars]
        if any(seconds):
            trace = {"type": "bar", "name": name, "marker": {"color": hue, "line": {"width": 0}}}
            axes = {"x": places, "y": _rounded(seconds)}
            if len(runs) > 1:
                axes = {"y": places, "x": _rounded(seconds), "orientation": "h"}
            traces.append(trace | axes)
    chart = {"title": "Seconds of a step", "note": note, "data": traces, "layout": layout}
    return chart if len(runs) == 1 else chart | {"height": _AROUND + _BAR * len(bars)}


def _by_epoch(series: Sequence[Series]) -> list[tuple[Any, list[Record]]]:
    """(epoch, series), or the epoch of a single series → the records of all seeds."""
    epochs = {epoch for case in series for run in case.runs for epoch in run.epochs}
    bars: list[tuple[Any, list[Record]]] = []
    for epoch in sorted(epochs):
        for case in series:
            records = [r for run in case.runs for r in run.epochs.get(epoch, [])]
            name = f"epoch {epoch}"
            x = (name, case.name) if len(series) > 1 else name
            bars.append((x, without_compiling(records)))
    return bars


def _mean_seconds(records: Sequence[Record], metric: str, within: Sequence[str]) -> float:
    """Mean of a time less the times within it; at least 0, as clocks may overlap."""
    seconds = [
        (r.get(f"time/{metric}") or 0.0) - sum(r.get(f"time/{name}") or 0.0 for name in within)
        for r in records
    ]
    return max(statistics.fmean(seconds), 0.0)


def length_chart(accepted: dict[str, list[int]], colors: dict[str, str]) -> list[Chart]:
    """Histograms of the accepted length of recorded responses, by series or epoch; [] of none.

    colors: of series that have one.
    """
    names = [name for name, lengths in accepted.items() if any(lengths)]
    every = math.ceil(len(names) / _MAX_HISTOGRAMS) or 1
    names = names[::-1][::every][::-1]  # evenly, the last one included
    if not names:
        return []
    longest = max(max(accepted[name]) for name in names)
    width = max(1, math.ceil((longest + 1) / _BINS))
    starts = range(0, longest + 1, width)
    traces = []
    for i, name in enumerate(names):
        counts = [sum(start <= n < start + width for n in accepted[name]) for start in starts]
        labels = [f"{s}–{s + width - 1}" if width > 1 else str(s) for s in starts]
        traces.append({"type": "bar", "name": name, "x": labels,
                       "y": _rounded([n / len(accepted[name]) for n in counts]),
                       "marker": {"color": colors.get(name, color(i))}})  # fmt: skip
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "accepted tokens"}, "type": "category"},
        "yaxis": {"title": {"text": "share of recorded responses"}},
    }
    title = "Recorded responses by what was accepted"
    return [{"title": title, "note": "", "data": traces, "layout": layout}]
