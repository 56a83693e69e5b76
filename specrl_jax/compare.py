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

from specrl_jax.metrics import read_metrics
from specrl_jax.records import read_rollouts, recorded_steps

_TRAIN = Path(__file__).resolve().parent.parent / "launch" / "train.py"


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run. flags: of launch/train.py, without --workdir."""

    value: str
    seed: int
    flags: tuple[str, ...]
    workdir: Path


def cells(
    config: str, field: str, values: Sequence[str], seeds: Sequence[int], folder: Path, rest
) -> list[Cell]:
    """Every value of `field` with every seed; rest: further --config.FIELD=VALUE flags."""
    found = []
    for seed in seeds:
        for value in values:
            own = (f"--config={config}", f"--config.{field}={value}", f"--config.seed={seed}")
            name = f"{field}={value},seed={seed}".replace("/", "_")
            found.append(Cell(value, seed, (*own, *rest), folder / name))
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
            raise RuntimeError(f"{' '.join(command)} ended with {code}; see {output}")
        log(f"{cell.workdir.name}: done")


# Figures -------------------------------------------------------------------------------------


def figures(workdir: Path) -> dict[str, float]:
    """Of one run. Seconds are medians over the steps after the first epoch, tokens sums over them:
    the first has no earlier responses to draft from."""
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


def compare(done: Sequence[Cell]) -> dict[str, Any]:
    """All figures, by value, then seed; and where a run's tokens part from the first value's."""
    first = {cell.seed: cell for cell in reversed(done)}
    found: dict[str, Any] = {}
    for cell in done:
        step, tokens = first_difference(first[cell.seed].workdir, cell.workdir)
        own = figures(cell.workdir) | {"same tokens until step": step, "tokens compared": tokens}
        found.setdefault(cell.value, {})[str(cell.seed)] = own
    return found


def table(field: str, found: dict[str, Any]) -> str:
    """A line a figure: mean and, of several seeds, standard deviation."""
    names = list(next(iter(next(iter(found.values())).values())))
    lines = [f"{field:30}" + "".join(f"{value:>24}" for value in found)]
    for name in names:
        cells = [[seed[name] for seed in seeds.values()] for seeds in found.values()]
        lines.append(f"{name:30}" + "".join(f"{_text(name, values):>24}" for values in cells))
    return "\n".join(lines)


def _text(name: str, values: list) -> str:
    if name == "same tokens until step":
        return ", ".join("end" if v is None else str(v) for v in values)
    digits = 3 if name.endswith(", s") or "reward" in name else 0
    mean = f"{statistics.fmean(values):,.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):,.{digits}f}"
