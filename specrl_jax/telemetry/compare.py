"""The same training run under several settings and seeds, side by side.

Every run is a process of launch/train.py with its own work directory. The same comparison again
reads finished runs and resumes unfinished ones.
"""

import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specrl_jax.telemetry.metrics import read_metrics
from specrl_jax.telemetry.records import read_rollouts, recorded_steps

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


def figures(workdir: Path, target: float = 0.0) -> dict[str, float | None]:
    """Figures of one run. Seconds are medians over the steps after the first epoch, tokens sums
    over them: the first epoch has no earlier responses to draft from.

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
    lines = [f"{heading:30}" + "".join(f"{case[:22]:>24}" for case in by_case)]
    for name in names:
        columns = [[x[name] for x in seeds.values() if name in x] for seeds in by_case.values()]
        lines.append(f"{name:30}" + "".join(f"{_text(name, values):>24}" for values in columns))
    return "\n".join(lines)


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
