"""Runs as a report shows them: read from their work directories, seeds of a setting together.

Takes WORKDIR/config.json and metrics.jsonl. Gives `Series`, and their headline figures.
"""

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from specrl_jax.telemetry.metrics import FILE_NAME, read_metrics

Record = dict[str, Any]

# A run of a sweep is in a work directory that is named CASE,seed=N.
_OF_A_SWEEP = re.compile(r"(.+),seed=-?\d+")
# Fields of the configuration in which seeds of one setting may differ.
_NOT_A_SETTING = ("seed", "log", "checkpoint", "mesh", "resume_from")
_MAX_NAMED = 3  # settings in a series' name
# A step that compiled for more than this share of its seconds says nothing about later ones.
_COMPILED = 0.05


@dataclasses.dataclass(frozen=True)
class Run:
    """One work directory."""

    workdir: Path
    config: dict[str, Any]  # field → value, "rollout.draft": "tree"
    records: list[Record]  # of metrics.jsonl, by step

    @property
    def steps(self) -> list[Record]:
        """The records of steps that trained."""
        return [record for record in self.records if "reward/mean" in record]

    @property
    def epochs(self) -> dict[int, list[Record]]:
        """The same by epoch, in order."""
        by_epoch: dict[int, list[Record]] = {}
        for record in self.steps:
            by_epoch.setdefault(record["epoch"], []).append(record)
        return by_epoch


@dataclasses.dataclass(frozen=True)
class Series:
    """The runs of one setting, which differ in their seed."""

    name: str
    runs: list[Run]

    def values(self, name: str) -> dict[int, list[float]]:
        """A metric by step, of every run that has it there; what is not finite is left out."""
        by_step: dict[int, list[float]] = {}
        for run in self.runs:
            for record in run.records:
                value = record.get(name)
                if value is not None and math.isfinite(value):
                    by_step.setdefault(record["step"], []).append(value)
        return dict(sorted(by_step.items()))

    def mean(self, figure: Callable[[Run], float | None]) -> tuple[float, float] | None:
        """Mean and standard deviation (0 of one) of a figure over the runs that have it."""
        figures = [x for run in self.runs if (x := figure(run)) is not None]
        return (statistics.fmean(figures), deviation(figures)) if figures else None


def deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation; 0 of one value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def read_run(workdir: str | os.PathLike) -> Run:
    """Raises ValueError in one line where `workdir` is not the work directory of a run."""
    workdir = Path(workdir)
    if not (workdir / FILE_NAME).is_file():
        raise ValueError(f"{workdir} must be a run's work directory, it has no {FILE_NAME}")
    path, config = workdir / "config.json", {}
    if path.is_file():
        try:
            config = dict(_flat(json.loads(path.read_bytes())))
        except (ValueError, AttributeError):
            raise ValueError(f"{path} must be a JSON object; restore it or remove it") from None
    return Run(workdir, config, read_metrics(workdir))


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def series(runs: Sequence[Run]) -> list[Series]:
    """Runs by setting, in their order. A series is named after its case in a sweep, else after the
    fields that tell it apart."""
    settings = [
        {k: v for k, v in run.config.items() if k.split(".")[0] not in _NOT_A_SETTING}
        for run in runs
    ]
    fields = [
        name
        for name in dict.fromkeys(name for setting in settings for name in setting)
        if any(setting.get(name) != settings[0].get(name) for setting in settings)
    ]
    members: dict[str, list[int]] = {}
    for i, setting in enumerate(settings):
        members.setdefault(json.dumps([setting.get(name) for name in fields]), []).append(i)
    named = []
    for indices in members.values():
        values = {name.split(".")[-1]: settings[indices[0]].get(name) for name in fields}
        name = ", ".join(f"{field} = {value}" for field, value in values.items())
        folder = runs[indices[0]].workdir.resolve().name
        if case := _OF_A_SWEEP.fullmatch(folder):
            name = case[1]
        elif not 0 < len(values) <= _MAX_NAMED:
            name = folder
        named.append(Series(name, [runs[i] for i in indices]))
    return named


# Figures ------------------------------------------------------------------------------------


def without_compiling(records: Iterable[Record]) -> list[Record]:
    """The steps that spent at most a twentieth of their time on compiling."""
    return [
        record
        for record in records
        if record.get("time/compile", 0.0) <= _COMPILED * record.get("time/step", math.inf)
    ]


def speed_up(run: Run, part: str, last_epoch: bool = False) -> float | None:
    """Median seconds of a step's `part` in the first epoch over those in all later epochs, or over
    those in the last.

    Steps that compiled are left out. None where the first epoch is not plain (it reused tokens),
    or an epoch on either side has no step left.
    """
    epochs = list(run.epochs.values())
    if not epochs or sum(r.get("rollout/tokens_reused", 0) for r in epochs[0]):
        return None
    others = epochs[-1:] if last_epoch and len(epochs) > 1 else epochs[1:]
    first, later = (
        [r[part] for r in without_compiling(records) if r.get(part) is not None]
        for records in (epochs[0], [r for members in others for r in members])
    )
    if not first or not later or not statistics.median(later):
        return None
    return statistics.median(first) / statistics.median(later)


def reused_fraction(run: Run, after_first: bool = False) -> float | None:
    """Reused over all tokens of the policy; `after_first` leaves the first epoch out."""
    epochs = list(run.epochs.values())[after_first:]
    reused, generated = (
        sum(r.get(f"rollout/tokens_{name}", 0) for members in epochs for r in members)
        for name in ("reused", "generated")
    )
    return reused / (reused + generated) if reused + generated else None


def _at(name: str, place: int) -> Callable[[Run], float | None]:
    """A metric's first (0) or last (-1) value."""

    def figure(run: Run) -> float | None:
        values = [r[name] for r in run.records if r.get(name) is not None]
        return values[place] if values else None

    return figure


def _last_epoch(name: str) -> Callable[[Run], float | None]:
    def figure(run: Run) -> float | None:
        members = list(run.epochs.values())[-1:]
        values = [r[name] for m in members for r in m if r.get(name) is not None]
        return statistics.fmean(values) if values else None

    return figure


def _total(name: str) -> Callable[[Run], float | None]:
    return lambda run: math.fsum(r.get(name) or 0 for r in run.steps) if run.steps else None


# What a headline figure is called, how it is reckoned, its format.
FIGURES: tuple[tuple[str, Callable[[Run], float | None], str], ...] = (
    ("held-out reward, first", _at("reward/eval", 0), "{:.3f}"),
    ("held-out reward, last", _at("reward/eval", -1), "{:.3f}"),
    ("training reward, last epoch", _last_epoch("reward/mean"), "{:.3f}"),
    ("tokens reused", reused_fraction, "{:.1%}"),
    ("the same, later epochs", lambda run: reused_fraction(run, after_first=True), "{:.1%}"),
    ("rollout speed-up", lambda run: speed_up(run, "time/rollout"), "{:.2f}×"),
    ("whole-step speed-up", lambda run: speed_up(run, "time/step"), "{:.2f}×"),
    ("tokens generated", _total("rollout/tokens_generated"), "{:,.0f}"),
    ("row steps", _total("rollout/row_steps"), "{:,.0f}"),
    ("seconds of all steps", _total("time/step"), "{:,.0f}"),
)
RECKONED = (
    "Speed-up: the median seconds of a step in the run's own first epoch, which has no earlier "
    "responses to draft from (tree drafts come from the group alone there), over the median in all "
    "later epochs. Verification is part of the rollout. Steps that spent more than 5 % of their "
    "time on compiling are left out. A dash: no such step on one side, or the first epoch reused "
    "tokens. Row steps are the work: rows × decode steps. Of several seeds: mean ± standard "
    "deviation."
)


def headline(one: Series) -> list[tuple[str, str, str]]:
    """(name, mean, "± deviation" or "") of every figure of a series, as text."""
    rows = []
    for name, figure, style in FIGURES:
        value = one.mean(figure)
        mean, spread = ("–", "") if value is None else map(style.format, value)
        rows.append((name, mean, f"± {spread}" if value and len(one.runs) > 1 else ""))
    return rows
