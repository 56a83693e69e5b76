"""Checks of a run's work directory, before anything is computed: which run may go on there."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specrl_jax.config.fields import NEW_RUN, RESUMED, may_change
from specrl_jax.process.checkpoint import Checkpointer, check_run_config
from specrl_jax.reports.report_page import FILE_NAME as REPORT
from specrl_jax.rewards.failures import FILE_NAME as FAILURES
from specrl_jax.telemetry.metrics import FILE_NAME as METRICS
from specrl_jax.telemetry.metrics import read_metrics
from specrl_jax.telemetry.records import FOLDER as ROLLOUTS

# What a resumed run may change: where and how long it runs, how it is recorded and evaluated.
MAY_CHANGE = may_change(RESUMED)
# What may differ in a new run that begins with another run's checkpoint.
MAY_CHANGE_FROM_OTHER = may_change(RESUMED, NEW_RUN)


def check_paths(workdir: Path) -> None:
    """Raise ValueError where `workdir` cannot be written, or has a file for a folder or a folder
    for a file.

    What was missing is not there afterwards either.
    """
    folders = [workdir, workdir / ROLLOUTS, workdir / "checkpoints"]
    files = [workdir / name for name in ("config.json", METRICS, FAILURES, REPORT, "lock")]
    for path in folders:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a folder, it is a file; move it")
    for path in files:
        if path.is_dir():
            raise ValueError(f"{path} must be a file, it is a folder; move it")
    _check_writable(workdir)


def _check_writable(workdir: Path) -> None:
    """Raise ValueError where no file can be made in the folder, or in the one to make it in."""
    folder = workdir.absolute()
    while not folder.exists():
        if folder.is_symlink():
            raise ValueError(f"--workdir: {folder} is a link to nothing; mend or remove it")
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--workdir must be a folder that can be written, {folder} cannot "
            f"({error.strerror}); give another"
        ) from error


def check_complete(workdir: Path, last: int | None, has_config: bool) -> None:
    """Raise ValueError where a part of the run is missing; last: the newest checkpoint's step."""
    recorded = max((record["step"] for record in read_metrics(workdir)), default=0)
    if last is None and recorded:
        raise ValueError(
            f"{workdir} has metrics up to step {recorded} but no checkpoint; put its checkpoints "
            "back, or give a new --workdir"
        )
    if last is not None and not has_config:
        raise ValueError(f"{workdir} holds checkpoints but no config.json; give a new --workdir")


def parse_origin(origin: str, config) -> tuple[Path, int]:
    """Return (work directory, step); ValueError unless `config` may begin with that checkpoint."""
    workdir, _, step = origin.rpartition("@")
    if not workdir or not step.isdecimal():
        raise ValueError(
            "--resume_from must be RUN@STEP, a work directory and the step of a checkpoint in it, "
            f"got {origin!r}"
        )
    advice = f"only these may differ with --resume_from: {', '.join(MAY_CHANGE_FROM_OTHER)}"
    ignored = ("resume_from", *MAY_CHANGE_FROM_OTHER)
    if not check_run_config(workdir, config, ignore=ignored, advice=advice):
        raise ValueError(f"--resume_from must name a work directory, {workdir} has no config.json")
    return Path(workdir), int(step)


@contextlib.contextmanager
def advise_how_to_resume(checkpoints: Checkpointer) -> Iterator[None]:
    """Have a FloatingPointError say which checkpoints there are, and how to go on from one."""
    try:
        yield
    except FloatingPointError as error:
        steps = ", ".join(map(str, checkpoints.steps()))
        raise FloatingPointError(
            f"{error}; go on from a checkpoint ({steps}) in a new --workdir with "
            f"--resume_from={checkpoints.directory.parent}@STEP"
        ) from error
