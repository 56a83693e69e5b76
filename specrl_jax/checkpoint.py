"""Checkpoints of a run (Orbax) and the configuration that the run belongs to.

Takes a step, a pytree of arrays and a JSON-able dict of what lives on the host; gives them back bit
for bit, on this mesh or another. A checkpoint is visible only when it is complete: a save that was
killed leaves a temporary folder, which the next `Checkpointer` removes. Checksums of the arrays and
of the host's part are saved beside them, since Orbax has none of an array's values.
"""

import contextlib
import functools
import json
import logging
import math
import os
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath

from specrl_jax import hosts
from specrl_jax.checksums import checksums
from specrl_jax.config import check_version, flatten
from specrl_jax.inputs import is_disk_full, one_line

_METRIC = "metric"


class DamagedCheckpointError(ValueError):
    """The files of a step do not give what was saved; one line that names its folder."""


class Checkpointer(contextlib.AbstractContextManager):
    """Saves and restores the checkpoints of one directory, a folder for each step.

    Keeps the `keep_last` newest steps and the `keep_best` with the highest metric. read_only: for
    reading beside a job that is writing: nothing is created or removed.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep_last: int = 1,
        keep_best: int = 0,
        read_only: bool = False,
    ):
        self.directory = epath.Path(directory).resolve()
        _check_folders(self.directory)
        if not read_only:
            hosts.on_primary(_set_aside_unranked, self.directory)
        for place in (absl_logging.get_absl_logger(), absl_logging.get_absl_handler()):
            place.addFilter(_is_shown)  # once, however often it is called
        _hide_abandoned_work()
        policies = ocp.checkpoint_managers
        latest = policies.LatestN(keep_last)
        best = policies.BestN(
            n=keep_best, get_metric_fn=_metric, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([latest, best]),
            best_fn=_metric,  # has Orbax record the metric; the policy above decides what stays
            cleanup_tmp_directories=not read_only,
            create=not read_only,
            read_only=read_only,
            save_interval_steps=0 if read_only else 1,
        )
        with one_line(f"checkpoints in {self.directory} cannot be opened", OSError):
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=options,
                item_handlers={
                    "arrays": ocp.StandardCheckpointHandler(),
                    "host": ocp.JsonCheckpointHandler(),
                },
            )

    def save(self, step: int, arrays: Any, host: Mapping, *, metric: float | None = None) -> bool:
        """Starts a save, in the background; False, and nothing is done, if the step is there.

        When this returns the host has the values: the arrays may be donated. Waits for the save
        before this one. Raises OSError if the files of either could not be written.

        arrays: a pytree; may hold PRNG keys. host: JSON-able; tuples come back as lists. metric:
        higher is better; None or NaN is below all others.
        """
        if step in self._manager.all_steps():
            return False
        known = metric is not None and not math.isnan(metric)
        named = _by_name(arrays)
        described = {name: _described(x) for name, x in named.items()}
        saved = _sealed({"values": dict(host), "arrays": described, "sums": checksums(named)})
        with _saving(self.directory):
            return self._manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(named), host=ocp.args.JsonSave(saved)
                ),
                metrics={_METRIC: float(metric)} if known else {},
                force=True,
            )

    def steps(self) -> list[int]:
        """All steps, oldest first. This and all below wait for a save that is being written."""
        self.wait()
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The newest step, or None."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the highest metric, the newest of several; None where no step has one."""
        ranked = [(_metric(self._manager.metrics(step) or {}), step) for step in self.steps()]
        metric, step = max(ranked, default=(-math.inf, None))
        return None if metric == -math.inf else step

    def holds(self, step: int, name: str) -> bool:
        """Return True if a step has arrays below the key `name`; raises as `restore` does."""
        return any(path.startswith(f"{name}.") for path in self._read_host(step)["arrays"])

    def restore(self, step: int, like: Any, *, partial: bool = False) -> tuple[Any, dict]:
        """(arrays, host) of a step, each array laid out as its counterpart in `like`.

        like: the pytree of `save`, of arrays or of `jax.ShapeDtypeStruct` with shardings (abstract
        ones are taken on the mesh in use). partial: `like` is a part of it, and no other array is
        read. Raises ValueError if there is no such step or its arrays have other names, shapes or
        types; DamagedCheckpointError if any bit of what is read is not as it was saved.
        """
        where = self.directory / str(step)
        target = {name: _target(leaf) for name, leaf in _by_name(like).items()}
        saved = self._read_host(step)
        described = saved["arrays"]
        sums = saved["sums"]
        if partial:
            described, sums = ({n: x[n] for n in target if n in x} for x in (described, sums))
        _check_same(where, described, {name: _described(x) for name, x in target.items()})
        with one_line(f"{where} is damaged", DamagedCheckpointError):
            if partial:
                arrays = _read_some(where / "arrays", target)
            else:
                arrays = self._read(step, "arrays", ocp.args.StandardRestore(target))
            _check_sums(sums, checksums(arrays))
        leaves = [arrays[name] for name in target]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), saved["values"]

    def restore_newest(self, like: Any) -> tuple[int, Any, dict]:
        """(step, arrays, host) of the newest step whose files are as they were saved.

        Newer ones, damaged, are renamed to `damaged-STEP` and named in one line each. Raises as
        `restore` does, and DamagedCheckpointError if all steps are damaged: they stay.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                arrays, host = self.restore(step, like)
            except DamagedCheckpointError as error:
                damaged[step] = str(error)  # the error itself would hold the arrays
                if jax.process_count() > 1:  # the others may have read it well
                    raise DamagedCheckpointError(
                        f"{error}; rename the folder to go back to the step before"
                    ) from None
                continue
            for newer, message in damaged.items():
                _set_aside(self.directory / str(newer), f"{message}; going back to step {step}")
            self._manager.reload()
            return step, arrays, host
        lines = [*damaged.values(), f"{self.directory} holds no checkpoint"]
        raise DamagedCheckpointError(f"{lines[0]}; no older step is intact, give a new --workdir")

    def _read_host(self, step: int) -> dict[str, Any]:
        """The host's part of a step, and what it says of the arrays."""
        steps = self.steps()
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{self.directory}: no checkpoint of step {step}, there are: {there}")
        with one_line(f"{self.directory / str(step)} is damaged", DamagedCheckpointError):
            saved = self._read(step, "host", ocp.args.JsonRestore())
            _check_seal(saved)
        return saved

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]

    def wait(self) -> None:
        """Returns when the last save is complete on disk; raises OSError if it failed."""
        with _saving(self.directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees what Orbax holds; the object is of no use afterwards.

        Raises OSError if the last save failed; Orbax raises its error from either call.
        """
        with _saving(self.directory):
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def save_run_config(workdir: str | os.PathLike, config: Mapping) -> None:
    """Writes the resolved config to `workdir/config.json`, all of it or nothing."""
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
    advice: str = "give the old values to resume it, or another --workdir",
) -> bool:
    """Return True if `workdir` holds a run of this config; False if it holds none.

    ignore: fields or sub-trees that may differ, as "log" or "train.steps". Raises ValueError if the
    run there has other values: it names every such field, with both values, and ends with `advice`.
    """
    path = epath.Path(workdir) / "config.json"
    if not path.exists():
        return False
    try:
        before = dict(flatten(json.loads(path.read_text("utf-8"))))
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is not a saved config, give another --workdir") from None
    prefixes = tuple(f"{name}." for name in ignore)
    before, now = (
        {name: x for name, x in fields.items() if not f"{name}.".startswith(prefixes)}
        for fields in (before, dict(flatten(config)))
    )
    check_version(before, now, str(path))
    changed = [
        f"{name} was {_show(before, name)}, now {_show(now, name)}"
        for name in sorted(before.keys() | now.keys())
        if _show(before, name) != _show(now, name)
    ]
    if changed:
        raise ValueError(f"{path} is of a run with other values: {'; '.join(changed)}; {advice}")
    return True


def _read_some(folder: epath.Path, target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The arrays of `target` alone; the manager's own handler reads all or nothing."""
    layout = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=layout, partial_restore=True)
    return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _metric(metrics: Mapping) -> float:
    return metrics.get(_METRIC, -math.inf)


def _check_folders(directory: epath.Path) -> None:
    """Raises ValueError where something other than a checkpoint is in a checkpoint's place."""
    if not directory.is_dir():
        if directory.exists():
            raise ValueError(f"{directory} must be a folder of checkpoints, it is a file; move it")
        return
    steps = sorted((x for x in directory.iterdir() if x.name.isdigit()), key=lambda x: int(x.name))
    for step in steps:
        if not step.is_dir():
            raise ValueError(f"{step} must be a checkpoint's folder, it is a file; move it")
    # Older ones may be: their removal was cut short.
    if steps and not any(steps[-1].iterdir()):
        raise ValueError(
            f"{steps[-1]} must hold a checkpoint, it is empty; put its files back, or delete this "
            "folder to go back to the step before"
        )


def _set_aside_unranked(directory: epath.Path) -> None:
    """Orbax reads every step's metric when it opens, and fails on one that it can't read."""
    for step in directory.iterdir() if directory.is_dir() else []:
        path = step / "metrics" / "metrics"
        if step.name.isdigit() and path.exists():
            try:
                json.loads(path.read_text("utf-8"))
            except ValueError:
                _set_aside(step, f"{step} is damaged: its metric is not readable")


def _set_aside(step: epath.Path, reason: str) -> None:
    names = (f"damaged-{step.name}" + "+" * n for n in range(1000))
    aside = next(step.parent / name for name in names if not (step.parent / name).exists())
    step.rename(aside)
    print(f"{reason}; it is kept as {aside.name}", flush=True)


@contextlib.contextmanager
def _saving(directory: epath.Path) -> Iterator[None]:
    """Turn an error of a save into an OSError in one line that says how to go on."""
    try:
        yield
    except Exception as error:
        full = is_disk_full(error)
        causes = " ".join(str(error).split()).split(": ")  # Orbax names the cause last
        why = "the disk is full" if full else ": ".join(causes[-2:])[-200:]
        raise OSError(
            f"checkpoint could not be saved in {directory}: {why}; "
            f"{'make room there' if full else 'mend that'} and run the same command again: it goes "
            "on from the last that is complete"
        ) from error


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for what Orbax logs needlessly.

    That is the traceback of an error that we get as an exception too, and its warning that a
    directory is only read, which is what was asked for.
    """
    if record.msg == "Given directory is read only=%s":
        return False
    of_orbax = "orbax" in record.pathname or record.name == "asyncio"
    return not (of_orbax and record.exc_info) or bool(os.environ.get("SPECRL_TRACEBACK"))


@functools.cache
def _hide_abandoned_work() -> None:
    """Hide what Python says of reads and writes that another one's error cut short.

    That is a traceback of those that end after their loop was closed, and a warning of those that
    never began.
    """
    if not os.environ.get("SPECRL_TRACEBACK"):
        never_begun = r"coroutine '.*serialize.*' was never awaited"
        warnings.filterwarnings("ignore", never_begun, RuntimeWarning)
    show = sys.unraisablehook

    def show_others(error: Any) -> None:
        code = getattr(error.object, "cr_code", None)
        abandoned = code is not None and "orbax" in code.co_filename
        closed = str(error.exc_value) == "Event loop is closed"
        if not (abandoned or closed) or os.environ.get("SPECRL_TRACEBACK"):
            show(error)

    sys.unraisablehook = show_others


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves by their path, "params.layers.q_proj": Orbax then never sees our own classes."""
    paths, _ = jax.tree.flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("two arrays of the checkpoint have the same path, rename one")
    return named


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and the devices' layout that an array is restored to."""
    sharding = leaf.sharding
    if sharding is None:  # a step counter, say: it depends on no parameter
        sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P())
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_same(where: os.PathLike, saved: Mapping, needed: Mapping) -> None:
    """Raises ValueError unless both describe arrays of the same names, shapes and dtypes."""
    for name in sorted(saved.keys() | needed.keys()):
        there, here = saved.get(name, "no array"), needed.get(name, "no array")
        if there != here:
            raise ValueError(
                f"{where}: {name} is {there}, this run needs {here}; "
                "resume with the config of the run that saved it"
            )


def _described(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _check_sums(saved: Mapping[str, int], read: Mapping[str, int]) -> None:
    changed = [name for name in saved if saved[name] != read[name]]
    if changed:
        raise ValueError(f"{changed[0]} is not what was saved ({len(changed)} such arrays)")


def _sealed(values: Mapping) -> dict:
    """JSON-able values with the checksum of their text."""
    return {**values, "crc32": zlib.crc32(json.dumps(values).encode())}


def _check_seal(values: Mapping) -> None:
    inside = {name: value for name, value in values.items() if name != "crc32"}
    if _sealed(inside)["crc32"] != values.get("crc32"):
        raise ValueError("the host's part is not what was saved")


def _show(fields: Mapping, name: str) -> str:
    """A value as JSON writes it: 1 and 1.0 differ, as do True and 1; NaN equals itself."""
    return json.dumps(fields[name]) if name in fields else "absent"
