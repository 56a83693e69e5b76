"""A finished run in lines of text: rewards, a row for each epoch, and how much faster it became."""

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence

from specrl_jax.telemetry.runs import Record, Run, speed_up, without_compiling

# From an epoch's records to one number; None where there is no value.
Summary = Callable[[Sequence[Record]], float | None]


def _values(records: Iterable[Record], name: str) -> list[tuple[int, float]]:
    """(step, value) where a metric exists and is finite."""
    points = ((record["step"], record.get(name)) for record in records)
    return [(step, x) for step, x in points if x is not None and math.isfinite(x)]


def _metric(name: str, reduce: Callable[[list[float]], float]) -> Summary:
    def summarize(records: Sequence[Record]) -> float | None:
        values = [value for _, value in _values(records, name)]
        return reduce(values) if values else None

    return summarize


def _seconds(part: str) -> Summary:
    median = _metric(f"time/{part}", statistics.median)
    return lambda records: median(without_compiling(records))


def _reuse(records: Sequence[Record]) -> float | None:
    """The fraction over all tokens, not the mean of the steps' fractions."""
    names = ("rollout/tokens_reused", "rollout/tokens_generated")
    reused, generated = (_metric(name, math.fsum)(records) or 0.0 for name in names)
    return reused / (reused + generated) if reused + generated else None


_mean, _total, _last = statistics.fmean, math.fsum, operator.itemgetter(-1)
# Heading, how an epoch's steps become one number, format.
_COLUMNS: tuple[tuple[str, Summary, str], ...] = (
    ("reward", _metric("reward/mean", _mean), "{:.3f}"),
    ("eval", _metric("reward/eval", _last), "{:.3f}"),
    ("reuse", _reuse, "{:.1%}"),
    ("prefix", _metric("rollout/prefix_len_mean", _mean), "{:.1f}"),
    ("whole", _metric("rollout/full_reuse_ratio", _mean), "{:.1%}"),
    ("generated", _metric("rollout/tokens_generated", _total), "{:,.0f}"),
    ("reused", _metric("rollout/tokens_reused", _total), "{:,.0f}"),
    ("row_steps", _metric("rollout/row_steps", _total), "{:,.0f}"),
    ("rollout_s", _seconds("rollout"), "{:.2f}"),
    ("verify_s", _seconds("verify"), "{:.2f}"),
    ("decode_s", _seconds("decode"), "{:.2f}"),
    ("update_s", _seconds("update"), "{:.2f}"),
    ("step_s", _seconds("step"), "{:.2f}"),
)

_LEGEND = (
    "Means: reward, prefix (tokens), whole (responses reused whole). eval: the epoch's last.\n"
    "reuse: reused over all response tokens. Sums: generated, reused, row_steps (rows × decode\n"
    "steps: the work). Seconds of a step: medians over steps that did not compile."
)


def summary(run: Run) -> str:
    """First, best and last rewards, a row for each epoch, and the speed-ups; or one sentence."""
    epochs = run.epochs
    if not epochs:
        return "No training step was recorded."
    rows = [["epoch", *(name for name, *_ in _COLUMNS)]]
    rows += [[str(epoch), *_cells(members)] for epoch, members in epochs.items()]
    rows.append(["all", *_cells(run.steps)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    rule = "-" * len(lines[0])
    table = [lines[0], rule, *lines[1:-1], rule, lines[-1]]
    return "\n".join([*_headlines(run.records), "", *table, _LEGEND, *_speed(run)])


def _cells(records: Sequence[Record]) -> list[str]:
    values = ((summarize(records), style) for _, summarize, style in _COLUMNS)
    return ["-" if value is None else style.format(value) for value, style in values]


def _headlines(records: Sequence[Record]) -> list[str]:
    lines = []
    for title, name in (("held-out reward", "reward/eval"), ("training reward", "reward/mean")):
        if points := _values(records, name):
            best = max(points, key=lambda point: point[1])
            named = zip(("first", "best", "last"), (points[0], best, points[-1]))
            places = (f"{which} {value:.3f} (step {step})" for which, (step, value) in named)
            lines.append(f"{title}: {', '.join(places)}")
    return lines


def _speed(run: Run) -> list[str]:
    """No line where the run has no plain first epoch or no later one."""
    parts = "time/rollout", "time/step"
    rollout, step = (speed_up(run, part) for part in parts)
    if rollout is None or step is None:
        return []
    line = (
        f"\nrollouts {rollout:.1f}× against the plain first epoch, verification included; "
        f"whole step {step:.1f}×"
    )
    last = [speed_up(run, part, last_epoch=True) for part in parts]
    if len(run.epochs) > 2 and None not in last:
        line += " (last epoch: {:.1f}×, {:.1f}×)".format(*last)
    return [line]
