"""Report of a benchmark: one table, and the same figures for a JSON file."""

import dataclasses
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from specrl_jax import runtime


@dataclasses.dataclass(frozen=True)
class Report:
    """A benchmark's figures."""

    title: str  # one line: what was measured
    rows: list[dict[str, Any]]  # a case each, by heading; a figure that a case has not is absent
    failed: bool = False  # a part of it did not run

    def to_json(self) -> dict[str, Any]:
        return {"title": self.title, "machine": machine(), "cases": self.rows}

    def to_text(self) -> str:
        """The table: a line a case."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [[name.replace("_", " ") for name in names]]
        lines += [[_text(row.get(name)) for name in names] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        return "\n".join([self.title, ", ".join(f"{k} {v}" for k, v in machine().items()), *table])


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most."""
    values = [float(value) for value in values]
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def machine() -> dict[str, Any]:
    """Describe the machine that the figures come from."""
    return runtime.machine() | {"load": round(os.getloadavg()[0], 1)}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "{} ({}-{})".format(*(_text(value[key]) for key in ("median", "min", "max")))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
