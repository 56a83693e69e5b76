"""Measured seconds of single steps: by rows, slots, width, with suffix matching or without.

Kept on disk, so that the next run of the same programs on the same device measures nothing.
"""

import bisect
import hashlib
import json
import logging
import math
import os
import pathlib
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_log = logging.getLogger(__name__)

ROUNDS = (3, 15)  # fewest and most measurements of a step
ROUNDS_SECONDS = 8.0  # of all steps together, after which there are no more than the fewest

Calls = Sequence[tuple[int, float]]  # (steps, seconds) of one call or two
TimeCalls = Callable[[int, int, int, bool], Calls]


class Point(NamedTuple):
    """A program: `rows` x `width` tokens against `slots` cache slots, suffix matching or not."""

    rows: int
    slots: int
    width: int
    matching: bool


class StepCosts:
    """Seconds of one step, exact where measured.

    Elsewhere, along one axis after another (slots, widths, rows): the line through two neighbours,
    beyond the last going on, never falling and, towards 0, never below proportional, so that costs
    stay positive; a single measurement holds all along. Where costs of a full grid rise, so do the
    lines between. Rows measured with fewer than two widths of one kind (matching or not) borrow the
    other's. Of a width those rows tell whose own kind was measured on both sides of it, or, unless
    they are two, all with two widths. Raises ValueError for no measurements, or one not positive.
    """

    def __init__(self, measured: Mapping[Point, float]):
        if not measured:
            raise ValueError("a cost table needs at least one measurement, got none")
        self._measured = {Point(*p): float(seconds) for p, seconds in sorted(measured.items())}
        # And what was asked for since, by what is equal to a Point.
        self._known: dict[tuple[int, int, int, bool], float] = dict(self._measured)
        self._lines: dict[tuple[int, bool], dict[int, list[tuple[int, float]]]] = {}
        for point, seconds in self._measured.items():
            if min(point[:3]) < 1 or not 0 < seconds < math.inf:
                raise ValueError(f"a step's sizes and seconds must be > 0, got {point}: {seconds}")
            lines = self._lines.setdefault((point.rows, point.matching), {})
            lines.setdefault(point.width, []).append((point.slots, seconds))

    def seconds(self, rows: int, slots: int, width: int, matching: bool) -> float:
        """Seconds of one step; `matching`: with suffix matching, as a speculative step has it."""
        point = (rows, slots, width, matching)  # asked so often that a Point would cost
        found = self._known.get(point)
        if found is None:
            found = self._known[point] = self._interpolate(*point)
        return found

    def _interpolate(self, rows: int, slots: int, width: int, matching: bool) -> float:
        every = {r: self._widths(r, matching) for r, _ in sorted(self._lines)}
        own = {r: lines for (r, kind), lines in self._lines.items() if kind == matching}
        telling = [r for r, lines in own.items() if min(lines) <= width <= max(lines)]
        if len(telling) < 2:
            telling = [r for r, lines in every.items() if width in lines or len(lines) > 1]
        by_rows = []
        for r in telling or every:
            by_width = [(w, _line(knots, slots)) for w, knots in sorted(every[r].items())]
            by_rows.append((r, _line(by_width, width)))
        return _line(by_rows, rows)

    def _widths(self, rows: int, matching: bool) -> dict[int, list[tuple[int, float]]]:
        own = self._lines.get((rows, matching), {})
        return own if len(own) > 1 else {**self._lines.get((rows, not matching), {}), **own}

    def to_json(self) -> list[list]:
        """[[rows, slots, width, matching, seconds], ...], sorted."""
        return [[*point, seconds] for point, seconds in self._measured.items()]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence]) -> "CostTable":
        return cls({Point(r, s, w, m): seconds for r, s, w, m, seconds in rows})


def _line(knots: Sequence[tuple[int, float]], x: int) -> float:
    """The value at x of the lines through `knots`, ascending in x > 0, values > 0."""
    if len(knots) == 1 or x in dict(knots):
        return dict(knots).get(x, knots[0][1])
    right = min(max(bisect.bisect(knots, (x,)), 1), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    slope = (y1 - y0) / (x1 - x0)
    if x < x0:
        return y0 - min(max(slope, 0.0), y0 / x0) * (x0 - x)
    return y1 + max(slope, 0.0) * (x - x1) if x > x1 else y0 + slope * (x - x0)


def measure(
    points: Iterable[Point], time_calls: TimeCalls, repeats: tuple[int, int] = ROUNDS
) -> StepCosts:
    """Seconds a step of every point: one round that is not counted (it compiles), then `repeats`.

    repeats: fewest and most rounds; more than the fewest while the calls that count have taken less
    than ROUNDS_SECONDS.
    A round goes over all points, so that a slow spell of the machine spoils few of any one's calls.
    time_calls(rows, slots, width, matching) runs the real program and returns (steps, seconds) of a
    call, or of two of which the second takes more steps. Lower quartiles are taken, since a machine
    is now and then slower than itself but never faster.
    """
    points = sorted({Point(*p) for p in points})
    least, most = repeats
    rounds, spent = [[time_calls(*point) for point in points]], 0.0
    while len(rounds) <= least or (len(rounds) <= most and spent < ROUNDS_SECONDS):
        rounds.append([time_calls(*point) for point in points])
        spent += sum(seconds for calls in rounds[-1] for _, seconds in calls)
    return tabulate(points, rounds[1:], quantile=0.25)


def tabulate(
    points: Sequence[Point], rounds: Sequence[Sequence[Calls]], *, quantile: float
) -> StepCosts:
    """The table of rounds over all points. Quantiles are taken of the calls, not of differences:
    the lowest of these are of a slow first call and a fast second."""
    by_point = zip(points, zip(*rounds))
    return StepCosts({point: _a_step(calls, quantile) for point, calls in by_point})


def _a_step(rounds: Sequence[Calls], quantile: float) -> float:
    """Seconds a step, from one or two calls a round."""
    times = [(one[0][0], [seconds for _, seconds in one]) for one in zip(*rounds)]
    calls = [(steps, float(np.quantile(seconds, quantile))) for steps, seconds in times]
    (few, short), (steps, seconds) = calls[0], calls[-1]
    # On a noisy machine the longer call may come out shorter: then its mean is the estimate.
    return (seconds - short) / (steps - few) if seconds > short else seconds / steps


def load_or_measure(
    directory: str | os.PathLike, key: Mapping, points: Iterable[Point], time_calls: TimeCalls
) -> StepCosts:
    """The table that was measured under `key` for these points, or a new one, which is kept.

    key: whatever a step's cost depends on (device kind, model, jax version, sampling law, ...), in
    values that JSON knows. A damaged file is measured again, one that cannot be written only warned
    of. Processes that write at the same time replace each other's whole files.
    """
    points = sorted({Point(*p) for p in points})
    label = json.loads(json.dumps({"key": key, "points": points}, sort_keys=True))
    digest = hashlib.sha256(json.dumps(label).encode()).hexdigest()[:16]
    path = pathlib.Path(directory, f"step_cost_{digest}.json")
    try:
        stored = json.loads(path.read_text())
        table = StepCosts.from_json(stored["seconds"])
        if stored["label"] == label and [p[:-1] for p in table.to_json()] == label["points"]:
            return table
        _log.warning("%s holds something else; measuring again", path)
    except FileNotFoundError:
        pass  # the first time
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("cannot read %s (%s); measuring again", path, error)
    table = measure(points, time_calls)
    _write_whole(path, json.dumps({"label": label, "seconds": table.to_json()}))
    return table


def _write_whole(path: pathlib.Path, text: str) -> None:
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        _log.warning("cannot keep step costs in %s: %s", path, error)
