"""The same training run under several settings and seeds, side by side.

Every run is a process of launch/train.py with its own work directory. The same comparison again
reads finished runs and resumes unfinished ones. Gives tables and a plot.
"""

import dataclasses
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specrl_jax.telemetry.metrics import read_metrics
from specrl_jax.telemetry.records import read_rollouts, recorded_steps

_PARTS = ("rollout", "update", "step")
_COLORS = ("#888888", "#3366aa", "#dd8833", "#339977", "#aa4466", "#775599")
_TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting."""

    name: str
    config: str  # configuration file[:preset]
    changes: tuple[str, ...]  # FIELD=VALUE
    folder: str  # the beginning of its work directories' names


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One case with one seed."""

    case: str
    seed: int
    flags: tuple[str, ...]  # of launch/train.py, without --workdir
    workdir: Path


def varied(config: str, field: str, values: Sequence[str]) -> list[Case]:
    """A case for every value of a field."""
    return [Case(v, config, (f"{field}={v}",), f"{field}={v}") for v in values]


def parse_case(text: str, config: str) -> Case:
    """ "NAME: [CONFIG] FIELD=VALUE FIELD=VALUE ..."; without CONFIG of `config`."""
    name, colon, rest = text.partition(":")
    name, words = name.strip(), rest.split()
    files = [word for word in words if "=" not in word]
    changes = tuple(word for word in words if "=" in word)
    if not colon or not name or len(files) > 1:
        raise ValueError(f"--case must be 'NAME: [CONFIG] FIELD=VALUE ...', got {text!r}")
    if not files and not config:
        raise ValueError(f"--case names no configuration file and there is no --config: {text!r}")
    return Case(name, files[0] if files else config, changes, name.replace(" ", "_"))


def training_runs(
    cases: Sequence[Case], seeds: Sequence[int], folder: Path, rest: Sequence[str]
) -> list[TrainingRun]:
    """Every case with every seed; rest: further --config.FIELD=VALUE flags."""
    runs = []
    for seed in seeds:
        for case in cases:
            changes = [f"--config.{x}" for x in case.changes]
            name = f"{case.folder},seed={seed}".replace("/", "_")
            # The last flag of a field counts: what is compared goes before what is shared.
            flags = (f"--config={case.config}", *rest, *changes, f"--config.seed={seed}")
            runs.append(TrainingRun(case.name, seed, flags, folder / name))
    return runs


def train_all(runs: Iterable[TrainingRun]) -> None:
    """Train every run to its end, one after another. Raises ValueError where one fails."""
    for run in runs:
        run.workdir.mkdir(parents=True, exist_ok=True)
        output = run.workdir / "output.txt"
        command = [sys.executable, str(_TRAIN), *run.flags, f"--workdir={run.workdir}"]
        with output.open("a") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the run hears Ctrl-C too, ends its step and saves
                process.wait()
                raise
        if code:
            raise ValueError(
                f"{run.workdir.name} ended with {code}: {_last_line(output)}; see {output}"
            )
        print(f"{run.workdir.name}: done", file=sys.stderr, flush=True)


def _last_line(path: Path) -> str:
    """The last line of a program's output."""
    lines = path.read_text(errors="replace").strip().split("\n")
    return lines[-1].strip().removeprefix("error: ") or "it said nothing"


# Figures -------------------------------------------------------------------------------------


def figures(workdir: Path, target: float = 0.0) -> dict[str, Any]:
    """Figures of one run. Seconds are medians over the steps after the first epoch, tokens sums
    over them: the first epoch has no earlier responses to draft from. "curves" has held-out rewards
    by step, and by epoch the medians of the seconds of a step and of its parts.

    target: a held-out reward. Adds what was generated until it was reached, None where it was not.
    """
    records = read_metrics(workdir)
    rewards = [r["reward/eval"] for r in records if "reward/eval" in r]
    steps = [r for r in records if "rollout/tokens_generated" in r]
    later = [r for r in steps if r["data/passes"] > 1.0] or steps
    last = [r for r in steps if r["data/passes"] > steps[-1]["data/passes"] - 1.0]
    by_name = {
        "training reward, last epoch": statistics.fmean(r["reward/mean"] for r in last),
        "tokens generated": sum(r["rollout/tokens_generated"] for r in later),
        "tokens reused": sum(r["rollout/tokens_reused"] for r in later),
        "tokens drafted": sum(r["rollout/tokens_drafted"] for r in later),
        "row steps": sum(r["rollout/row_steps"] for r in later),
        "rollout, s": statistics.median(r["time/rollout"] for r in later),
        "  prefill, s": statistics.median(r["time/prefill"] for r in later),
        "  verify, s": statistics.median(r["time/verify"] for r in later),
        "  decode, s": statistics.median(r["time/decode"] for r in later),
        "whole step, s": statistics.median(r["time/step"] for r in later),
        "all steps, s": sum(r["time/step"] for r in steps),
        "  compiling, s": sum(r["time/compile"] for r in steps),
        "curves": _curves(records, steps),
    }
    if rewards:
        ends = {"held-out reward, first": rewards[0], "held-out reward, last": rewards[-1]}
        by_name = ends | by_name
    if target:
        reached = [r["step"] for r in records if r.get("reward/eval", 0.0) >= target]
        until = [r for r in steps if reached and r["step"] <= reached[0]]
        tokens = sum(r["rollout/tokens_generated"] for r in until)
        by_name[f"tokens generated to {target:g}"] = tokens if reached else None
        seconds = sum(r["time/rollout"] for r in until)
        by_name[f"rollouts to {target:g}, s"] = seconds if reached else None
    return by_name


def _curves(records: list[dict], steps: list[dict]) -> dict[str, dict[str, float]]:
    """By strings, as JSON has no other keys."""
    by_epoch: dict[str, list[dict]] = {}
    for record in steps:
        by_epoch.setdefault(str(record["epoch"]), []).append(record)
    curves = {
        part: {
            epoch: statistics.median(r[f"time/{part}"] for r in members)
            for epoch, members in by_epoch.items()
        }
        for part in _PARTS
    }
    rewards = {str(r["step"]): r["reward/eval"] for r in records if "reward/eval" in r}
    return curves | {"held-out reward": rewards}


def first_difference(one: Path, other: Path) -> tuple[int | None, int]:
    """(the first step whose recorded responses differ, or None; tokens compared until then).

    Responses that only one of the runs has, of another prompt or of a larger group, do not count.
    """
    compared = 0
    for step in sorted(set(recorded_steps(one)) & set(recorded_steps(other))):
        mine_all, theirs_all = (
            {(row["prompt_id"], row["sample"]): row["token_ids"] for row in read_rollouts(x, step)}
            for x in (one, other)
        )
        for key in (key for key in mine_all if key in theirs_all):
            mine, theirs = mine_all[key], theirs_all[key]
            if mine != theirs:
                same = [a == b for a, b in zip(mine, theirs)]
                return step, compared + [*same, False].index(False)
            compared += len(mine)
    return None, compared


def compare(runs: Sequence[TrainingRun], target: float = 0.0) -> dict[str, Any]:
    """All figures by case, then seed, and where a run's tokens differ from the first case's."""
    first = {run.seed: run for run in reversed(runs)}
    by_case: dict[str, Any] = {}
    for run in runs:
        step, tokens = first_difference(first[run.seed].workdir, run.workdir)
        compared = {"same tokens until step": step, "tokens compared": tokens}
        seeds = by_case.setdefault(run.case, {})
        seeds[str(run.seed)] = figures(run.workdir, target) | compared
    return by_case


def table(heading: str, by_case: dict[str, Any]) -> str:
    """A line a figure: mean and, of several seeds, standard deviation; "-" where a case has none
    (held-out reward, without evaluation)."""
    names = dict.fromkeys(n for seeds in by_case.values() for x in seeds.values() for n in x)
    names.pop("curves", None)
    lines = [f"{heading:30}" + "".join(f"{case[:22]:>24}" for case in by_case)]
    for name in names:
        columns = [[x[name] for x in seeds.values() if name in x] for seeds in by_case.values()]
        lines.append(f"{name:30}" + "".join(f"{_text(name, values):>24}" for values in columns))
    return "\n".join(lines)


def epoch_table(by_case: dict[str, Any]) -> str:
    """A line for each epoch and part of a step: its seconds, mean over the seeds, and how many
    times as fast it is as the first case's."""
    curves = {part: _curve(by_case, part) for part in _PARTS}
    lines = [f"{'seconds by epoch':30}" + "".join(f"{case[:22]:>24}" for case in by_case)]
    for epoch in curves["step"][next(iter(by_case))]:
        for part, of_case in curves.items():
            means = [statistics.fmean(points.get(epoch, [math.nan])) for points in of_case.values()]
            cells = "".join(f"{f'{x:.3f} ({means[0] / x:.2f}x)':>24}" for x in means)
            lines.append(f"{f'epoch {epoch}, {part}':30}{cells}")
    return "\n".join(lines)


def _curve(by_case: dict[str, Any], name: str) -> dict[str, dict[int, list[float]]]:
    """By case, then step or epoch: the values of all seeds that have one."""
    curves: dict[str, dict[int, list[float]]] = {}
    for case, seeds in by_case.items():
        points = curves.setdefault(case, {})
        for run in seeds.values():
            for x, value in run["curves"][name].items():
                points.setdefault(int(x), []).append(value)
    return curves


def write_plot(by_case: dict[str, Any], file: Path) -> None:
    """A PNG: seconds of a step and of its parts by epoch, and held-out reward by step. Means over
    the seeds, with their standard deviation."""
    from matplotlib.figure import Figure  # without pyplot: no window, no state, always Agg

    figure = Figure(figsize=(13, 3.4), dpi=110, layout="constrained")
    *parts, last = figure.subplots(1, len(_PARTS) + 1)
    width = 0.8 / len(by_case)
    for ax, part in zip(parts, _PARTS):
        for i, (color, points) in enumerate(zip(_COLORS, _curve(by_case, part).values())):
            x = [epoch + (i + 0.5) * width - 0.4 for epoch in points]
            ax.bar(x, [*map(statistics.fmean, points.values())], width, color=color,
                   yerr=[*map(_deviation, points.values())], error_kw={"lw": 0.8})  # fmt: skip
        ax.set(title=part.capitalize(), xlabel="epoch", ylabel="seconds a step")
    rewards = _curve(by_case, "held-out reward")
    for color, (case, points) in zip(_COLORS, rewards.items()):
        last.errorbar([*points], [*map(statistics.fmean, points.values())], color=color, label=case,
                      yerr=[*map(_deviation, points.values())], lw=1.6, elinewidth=0.6)  # fmt: skip
    last.set(title="Held-out reward", xlabel="step")
    for ax in (*parts, last):
        ax.spines[["top", "right"]].set_visible(False)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_title(ax.get_title(), loc="left", fontweight="bold", fontsize="medium")
        ax.set_title("")
    figure.legend(ncols=len(by_case), loc="outside upper right", frameon=False)
    figure.savefig(file)


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _text(name: str, values: list) -> str:
    if name == "same tokens until step":
        return ", ".join("end" if v is None else str(v) for v in values)
    if not values:
        return "-"
    if None in values:
        return f"{sum(value is not None for value in values)} of {len(values)} runs"
    digits = 3 if name.endswith(", s") or "reward" in name else 0
    mean = f"{statistics.fmean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}"
