"""Seconds of a rollout's programs: exact where measured, fitted elsewhere.

    seconds ≈ a + b·rows + c·rows·slots + d·rows·width + e·rows·width·slots,   a ... e ≥ 0

The terms are: reading the weights, what a row costs, reading its cache, what a token costs, and its
attention. One fit is made of all measured decode steps, another of all measured verifications, each
by least squares of relative errors. A pass over packed tries counts the tokens that it computes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from specrl_jax.rollout.engine.draft_tries import sequence_slots


class Point(NamedTuple):
    """A program that computes `rows` x `width` tokens against `slots` cache slots."""

    rows: int
    slots: int
    width: int
    drafting: bool  # whether a draft source proposes; a wide program without is a verification
    sequences: int = 0  # packed, that a verification computes instead of the rows' own tokens

    @property
    def verifies(self) -> bool:
        return self.width > 1 and not self.drafting


class StepCosts:
    """Seconds of one step of a program. Raises ValueError for sizes or seconds that are not > 0."""

    def __init__(self, measured: Mapping[Point, float] | None = None):
        self._measured: dict[Point, float] = {}
        self._fits: dict[bool, np.ndarray] = {}  # by Point.verifies
        for point, seconds in (measured or {}).items():
            self.add(Point(*point), seconds)

    def add(self, point: Point, seconds: float) -> None:
        """Take in the measured seconds of a step."""
        if min(point[:3]) < 1 or not 0 < seconds < math.inf:
            raise ValueError(f"a step's sizes and seconds must be > 0, got {point}: {seconds}")
        self._measured[point] = float(seconds)
        self._fits.pop(point.verifies, None)

    def __contains__(self, point: Point) -> bool:
        return point in self._measured

    def knows(self, width: int, drafting: bool) -> bool:
        """Return whether a program of this kind was measured: a plain step, one with a draft
        source, or a verification."""
        kinds = ((p.width > 1, p.drafting) for p in self._measured)
        return (width > 1, drafting) in kinds

    def count_like(self, point: Point) -> int:
        """Number of measured programs of its kind and width, over packed sequences or not."""
        kinds = [(p.width, p.drafting, p.sequences > 0) for p in (point, *self._measured)]
        return kinds[1:].count(kinds[0])

    def seconds(self, *numbers: int) -> float:
        """Seconds of one step of a `Point` of a kind that `knows` says was measured."""
        point = Point(*numbers)
        if point in self._measured:
            return self._measured[point]
        if point.verifies not in self._fits:
            like = {p: s for p, s in self._measured.items() if p.verifies == point.verifies}
            self._fits[point.verifies] = _fit(like)
        return float(_terms(point) @ self._fits[point.verifies])

    def to_json(self) -> list[list]:
        """Return [[rows, slots, width, drafting, sequences, seconds], ...], sorted."""
        return [[*point, seconds] for point, seconds in sorted(self._measured.items())]

    @classmethod
    def from_json(cls, rows: Iterable[Iterable]) -> "StepCosts":
        return cls({Point(*key): seconds for *key, seconds in rows})


def _terms(point: Point) -> np.ndarray:
    rows, slots, width, _, sequences = point
    tokens = rows * width
    seen = slots
    if sequences:
        seen = sequence_slots(slots)
        tokens = sequences * seen
    terms = [1, rows, rows * slots, tokens, tokens * seen]
    # A single measurement is explained by the first term: a narrower verification must not seem to
    # cost what a wide one does.
    return np.asarray([terms.pop(3), *terms] if point.verifies else terms, float)


def _fit(measured: Mapping[Point, float]) -> np.ndarray:
    """The weights of the terms."""
    from scipy.optimize import nnls

    points = sorted(measured)  # the result must not depend on the order of measuring
    terms = np.stack([_terms(point) / measured[point] for point in points])
    scale = terms.max(axis=0)
    return nnls(terms / scale, np.ones(len(points)))[0] / scale
