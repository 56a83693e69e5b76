"""A finished run in lines of text: rewards, a row for each epoch, and how much faster it became."""

import math
import operator
import statistics
from collections.abc import Sequence

from specrl_jax.telemetry.runs import (
    Figure,
    Record,
    RecordedRun,
    median_seconds,
    metric,
    reused_fraction,
    reward_moved,
    speed_up,
    values,
)

_mean = statistics.fmean
_total = math.fsum
_last = operator.itemgetter(-1)
# Heading, how an epoch's steps become one number, format.
_COLUMNS: tuple[tuple[str, Figure, str], ...] = (
    ("reward", metric("reward/mean", _mean), "{:.3f}"),
    ("eval", metric("reward/eval", _last), "{:.3f}"),
    ("reuse", reused_fraction, "{:.1%}"),
    ("prefix", metric("rollout/prefix_len_mean", _mean), "{:.1f}"),
    ("whole", metric("rollout/full_reuse_ratio", _mean), "{:.1%}"),
    ("generated", metric("rollout/tokens_generated", _total), "{:,.0f}"),
    ("reused", metric("rollout/tokens_reused", _total), "{:,.0f}"),
    ("row_steps", metric("rollout/row_steps", _total), "{:,.0f}"),
    ("rollout_s", median_seconds("time/rollout"), "{:.2f}"),
    ("extend_s", median_seconds("time/extend"), "{:.2f}"),
    ("decode_s", median_seconds("time/decode"), "{:.2f}"),
    ("update_s", median_seconds("time/update"), "{:.2f}"),
    ("step_s", median_seconds("time/step"), "{:.2f}"),
)

_LEGEND = (
    "Means: reward, prefix (tokens), whole (responses reused whole). eval: the epoch's last.\n"
    "reuse: reused over all response tokens. Sums: generated, reused, row_steps (rows × decode\n"
    "steps: the work). Seconds of a step: medians over steps that did not compile."
)
_LOOK_AT = (
    "Read responses in report.html: are they cut, does the reward function fail\n"
    "(reward_failures.jsonl), or are the problems too hard or too easy? See docs/faq.md."
)


def summary(run: RecordedRun) -> str:
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
    return "\n".join([*_headlines(run.records), "", *table, _LEGEND, *_closing(run)])


def _cells(records: Sequence[Record]) -> list[str]:
    figures = ((figure(records), style) for _, figure, style in _COLUMNS)
    return ["-" if x is None else style.format(x) for x, style in figures]


def _headlines(records: Sequence[Record]) -> list[str]:
    lines = []
    for title, name in (("held-out reward", "reward/eval"), ("training reward", "reward/mean")):
        if points := values(records, name):
            best = max(points, key=lambda point: point[1])
            named = zip(("first", "best", "last"), (points[0], best, points[-1]))
            places = (f"{which} {value:.3f} (step {step})" for which, (step, value) in named)
            lines.append(f"{title}: {', '.join(places)}")
    return lines


def _closing(run: RecordedRun) -> list[str]:
    """Say how much faster later epochs were than the first, or that nothing was learned.

    Returns no line where the run has no plain first epoch or no later one.
    """
    if not reward_moved(run):
        rewards = [reward for _, reward in values(run.steps, "reward/mean")]
        still = f"The reward never moved, it is {rewards[0]:.3f} at every step"
        if min(rewards) < max(rewards):
            still = "The responses to a prompt never had different rewards"
        return [f"\n{still}: nothing was learned, and no speed-up is claimed.\n{_LOOK_AT}"]
    parts = "rollout", "step"
    rollout, step = (speed_up(run, part) for part in parts)
    if rollout is None or step is None:
        return []
    lines = [
        "\nAgainst this run's own first epoch (nothing to draft from, updates packed as later):",
        f"rollouts {rollout:.1f}× as fast, verification included; whole steps {step:.1f}×",
    ]
    last = [speed_up(run, part, last_epoch=True) for part in parts]
    if len(run.epochs) > 2 and None not in last:
        lines[-1] += " (last epoch: {:.1f}×, {:.1f}×)".format(*last)
    return lines
