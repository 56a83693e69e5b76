"""A run's work directory: its configuration, and checks of which run may resume there."""

import contextlib
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from etils import epath

from specrl_jax.config import flatten
from specrl_jax.config.fields import NEW_RUN, RESUMED
from specrl_jax.config.schema import ORIGIN
from specrl_jax.process.checkpoint import Checkpointer
from specrl_jax.reports.report_page import FILE_NAME as REPORT
from specrl_jax.rewards.failures import FILE_NAME as FAILURES
from specrl_jax.settings import schema
from specrl_jax.telemetry.metrics import FILE_NAME as METRICS
from specrl_jax.telemetry.metrics import read_metrics
from specrl_jax.telemetry.records import FOLDER as ROLLOUTS


def may_change() -> tuple[str, ...]:
    """Return the fields that a resumed run may change: how long and where it runs, and how it is
    recorded and evaluated."""
    return schema().may_change(RESUMED)


def check_paths(workdir: Path) -> None:
    """Raise ValueError if `workdir` cannot be written, or has a file in place of a folder or the
    reverse.

    Creates nothing that was missing.
    """
    folders = [workdir, workdir / ROLLOUTS, workdir / "checkpoints"]
    files = [workdir / name for name in ("config.json", METRICS, FAILURES, REPORT, "lock")]
    for path in folders:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a folder, but is a file; move it")
    for path in files:
        if path.is_dir():
            raise ValueError(f"{path} must be a file, but is a folder; move it")
    _check_writable(workdir)


def _check_writable(workdir: Path) -> None:
    """Raise ValueError if files cannot be created in the folder, or in its nearest parent."""
    folder = workdir.absolute()
    while not folder.exists():
        if folder.is_symlink():
            raise ValueError(f"--workdir: {folder} is a broken link; mend or remove it")
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"--workdir must be a writable folder, {folder} is not ({error.strerror}); give another"
        ) from error


def check_complete(workdir: Path, last: int | None, has_config: bool) -> None:
    """Raise ValueError if a part of the run is missing; last: the newest checkpoint's step."""
    recorded = max((record["step"] for record in read_metrics(workdir)), default=0)
    if last is None and recorded:
        raise ValueError(
            f"{workdir} has metrics up to step {recorded} but no checkpoint; put its checkpoints "
            "back, or give a new --workdir"
        )
    if last is not None and not has_config:
        raise ValueError(f"{workdir} has checkpoints but no config.json; give a new --workdir")


def save_run_config(workdir: str | os.PathLike, config: Mapping) -> None:
    """Write the resolved config to `workdir/config.json`, atomically."""
    folder = epath.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "config.json.partial"
    partial.write_text(json.dumps(config, default=dict, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "config.json")


def check_run_config(
    workdir: str | os.PathLike,
    config: Mapping,
    *,
    ignore: Sequence[str] = (),
    advice: str = "",
) -> bool:
    """Return True if `workdir` has a run of this config; False if it has none.

    ignore: fields or sub-trees that may differ, like "log" or "train.steps". Raises ValueError if
    the run there has other values: the message names each such field with both values, and ends
    with `advice`, by default how to resume the run or start another.
    """
    advice = advice or (
        "give the old values to resume it, or another --workdir; "
        f"--resume_from={shlex.quote(str(workdir))}@STEP starts that from a checkpoint of this run"
    )
    path = epath.Path(workdir) / "config.json"
    if not path.exists():
        return False
    try:
        before = dict(flatten(json.loads(path.read_text("utf-8"))))
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is not a saved config; give another --workdir") from None
    now = dict(flatten(config))
    ignored = tuple(f"{name}." for name in ignore)
    for name in before.keys() | now.keys():
        if f"{name}.".startswith(ignored):
            before.pop(name, None)
            now.pop(name, None)
    schema().check_version(before, str(path), now)
    changed = [
        f"{name} was {_show(before, name)}, now {_show(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if _show(before, name) != _show(now, name)
    ]
    if changed:
        raise ValueError(f"{path} is from a run with other values: {'; '.join(changed)}; {advice}")
    return True


def _show(fields: Mapping, name: str) -> str:
    """Return a value as JSON: 1 and 1.0 differ, as do True and 1; NaN equals itself."""
    return json.dumps(fields[name]) if name in fields else "absent"


def parse_origin(origin: str, config) -> tuple[Path, int]:
    """Return (work directory, step); ValueError unless `config` may start from that checkpoint."""
    workdir, _, step = origin.rpartition("@")
    if not workdir or not step.isdecimal():
        raise ValueError(
            "--resume_from must be RUN@STEP, a work directory and the step of a checkpoint in it, "
            f"got {origin!r}"
        )
    differs = schema().may_change(RESUMED, NEW_RUN)
    advice = f"only these may differ with --resume_from: {', '.join(differs)}"
    ignored = (ORIGIN, *differs)
    if not check_run_config(workdir, config, ignore=ignored, advice=advice):
        raise ValueError(f"--resume_from must name a work directory, {workdir} has no config.json")
    return Path(workdir), int(step)


@contextlib.contextmanager
def advise_how_to_resume(checkpoints: Checkpointer) -> Iterator[None]:
    """Add to a FloatingPointError which checkpoints exist, and how to resume from one."""
    try:
        yield
    except FloatingPointError as error:
        steps = ", ".join(map(str, checkpoints.steps()))
        raise FloatingPointError(
            f"{error}; resume from a checkpoint ({steps}) in a new --workdir with "
            f"--resume_from={checkpoints.directory.parent}@STEP"
        ) from error
