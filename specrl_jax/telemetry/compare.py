"""The same training run under several settings and seeds, side by side.

Every run is a process of launch/train.py with a work directory of its own, so that a comparison
that was stopped goes on where it was: finished runs are read, unfinished ones resumed.
"""

import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from specrl_jax.telemetry.metrics import read_metrics
from specrl_jax.telemetry.records import read_rollouts, recorded_steps

_TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting. changes: FIELD=VALUE each. folder: what its work directories are called."""

    name: str
    config: str
    changes: tuple[str, ...]
    folder: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run, of the case `value`. flags: of launch/train.py, without --workdir."""

    value: str
    seed: int
    flags: tuple[str, ...]
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


def cells(cases: Sequence[Case], seeds: Sequence[int], folder: Path, rest) -> list[Cell]:
    """Every case with every seed; rest: further --config.FIELD=VALUE flags."""
    found = []
    for seed in seeds:
        for case in cases:
            changes = [f"--config.{x}" for x in case.changes]
            name = f"{case.folder},seed={seed}".replace("/", "_")
            # The last flag of a field counts: what is compared goes before what is shared.
            flags = (f"--config={case.config}", *rest, *changes, f"--config.seed={seed}")
            found.append(Cell(case.name, seed, flags, folder / name))
    return found


def run(todo: Iterable[Cell], log: Callable[[str], None]) -> None:
    """Train every cell to its end, one after another. Raises RuntimeError where one fails."""
    for cell in todo:
        cell.workdir.mkdir(parents=True, exist_ok=True)
        output = cell.workdir / "output.txt"
        command = [sys.executable, str(_TRAIN), *cell.flags, f"--workdir={cell.workdir}"]
        with output.open("a") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the run hears Ctrl-C too, ends its step and saves
                process.wait()
                raise
        if code:
            raise RuntimeError(
                f"{cell.workdir.name} ended with {code}: {_last_line(output)}; see {output}"
            )
        log(f"{cell.workdir.name}: done")


def _last_line(path: Path) -> str:
    """What a program that failed said at the end."""
    lines = path.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return last.strip().removeprefix("error: ")


# Figures -------------------------------------------------------------------------------------


def figures(workdir: Path, target: float = 0.0) -> dict[str, float | None]:
    """Of one run. Seconds are medians over the steps after the first epoch, tokens sums over them:
    the first has no earlier responses to draft from. target: a held-out reward; what was generated
    from the beginning until it was reached, None where it was not."""
    records = read_metrics(workdir)
    rewards = [r["reward/eval"] for r in records if "reward/eval" in r]
    steps = [r for r in records if "rollout/tokens_generated" in r]
    later = [r for r in steps if r["data/passes"] > 1.0] or steps
    last = [r for r in steps if r["data/passes"] > steps[-1]["data/passes"] - 1.0]
    found = {
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
        found = {"held-out reward, first": rewards[0], "held-out reward, last": rewards[-1]} | found
    if target:
        reached = [r["step"] for r in records if r.get("reward/eval", 0.0) >= target]
        until = [r for r in steps if reached and r["step"] <= reached[0]]
        tokens = sum(r["rollout/tokens_generated"] for r in until)
        found[f"tokens generated to {target:g}"] = tokens if reached else None
        seconds = sum(r["time/rollout"] for r in until)
        found[f"rollouts to {target:g}, s"] = seconds if reached else None
    return found


def first_difference(one: Path, other: Path) -> tuple[int | None, int]:
    """(the first step whose recorded responses are not the same tokens, None if there is none;
    tokens that were compared up to its first difference). Responses that only one run has, of
    another prompt or of a larger group, are left out."""
    compared = 0
    for step in sorted(set(recorded_steps(one)) & set(recorded_steps(other))):
        mine_all, theirs_all = (
            {(row["prompt_id"], row["sample"]): row["token_ids"] for row in read_rollouts(x, step)}
            for x in (one, other)
        )
        for key in (key for key in mine_all if key in theirs_all):
            mine, theirs = mine_all[key], theirs_all[key]
            same = [a == b for a, b in zip(mine, theirs)]
            if mine != theirs:
                return step, compared + [*same, False].index(False)
            compared += len(mine)
    return None, compared


def compare(done: Sequence[Cell], target: float = 0.0) -> dict[str, Any]:
    """All figures, by value, then seed; and where a run's tokens part from the first value's."""
    first = {cell.seed: cell for cell in reversed(done)}
    found: dict[str, Any] = {}
    for cell in done:
        step, tokens = first_difference(first[cell.seed].workdir, cell.workdir)
        own = figures(cell.workdir, target) | {
            "same tokens until step": step,
            "tokens compared": tokens,
        }
        found.setdefault(cell.value, {})[str(cell.seed)] = own
    return found


def table(field: str, found: dict[str, Any]) -> str:
    """A line a figure: mean and, of several seeds, standard deviation. Figures that some runs
    do not have (held-out reward, without evaluation) are "-" there."""
    names = list(dict.fromkeys(n for seeds in found.values() for x in seeds.values() for n in x))
    lines = [f"{field:30}" + "".join(f"{value[:22]:>24}" for value in found)]
    for name in names:
        cells = [
            [seed[name] for seed in seeds.values() if name in seed] for seeds in found.values()
        ]
        lines.append(f"{name:30}" + "".join(f"{_text(name, values):>24}" for values in cells))
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
