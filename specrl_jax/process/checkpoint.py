"""Checkpoints of a run (Orbax).

A pytree of arrays and a JSON-able dict are restored bit for bit, on this mesh or another. A
checkpoint is visible only when complete: a killed save leaves a temporary folder, which the next
`Checkpointer` removes. Checksums are saved too, since Orbax has none for array values.
"""

import contextlib
import functools
import json
import math
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax import Array

from specrl_jax import hosts
from specrl_jax.inputs import is_disk_full, one_line

_METRIC = "metric"
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes of an element


class DamagedCheckpointError(ValueError):
    """A step's files do not give the saved values; the one-line message names its folder."""


class Checkpointer(contextlib.AbstractContextManager):
    """Checkpoints in one directory, a folder per step.

    Keeps the `keep_last` newest steps and the `keep_best` with the highest metric. read_only: for
    reading while a job writes: nothing is created or removed.
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
        self._keep_best = keep_best
        _hide_late_reads()
        policies = ocp.checkpoint_managers
        latest = policies.LatestN(keep_last)
        best = policies.BestN(
            n=keep_best, get_metric_fn=_metric, keep_checkpoints_without_metrics=False
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy([latest, best]),
            best_fn=_metric,  # makes Orbax record the metric; the policy above decides what to keep
            # Another job may be saving there. Orbax's own `read_only` warns at each opening.
            cleanup_tmp_directories=not read_only,
            create=not read_only,
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
        """Start a save in the background; return False, and do nothing, if the step exists.

        On return the values are on the host: the arrays may be donated. Waits for the previous
        save. Raises OSError if the files of either could not be written.

        arrays: a pytree; may contain PRNG keys. host: JSON-able; tuples come back as lists. metric:
        higher is better; None or NaN ranks below all others.
        """
        if step in self._manager.all_steps():
            return False
        named = _by_name(arrays)
        described = {name: _described(x) for name, x in named.items()}
        saved = _sealed({"values": dict(host), "arrays": described, "sums": checksums(named)})
        with _saving(self.directory):
            return self._manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(named), host=ocp.args.JsonSave(saved)
                ),
                metrics={_METRIC: float(metric)} if _is_known(metric) else {},
                force=True,
            )

    def steps(self) -> list[int]:
        """Return all steps, oldest first. Like the methods below, waits for a pending save."""
        self.wait()
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Return the newest step, or None."""
        return max(self.steps(), default=None)

    def is_best(self, metric: float | None) -> bool:
        """Return whether a step with this metric would be among the `keep_best`."""
        if not self._keep_best or not _is_known(metric):
            return False
        ranked = sorted(metric for metric, _ in self._ranked())
        return len(ranked) < self._keep_best or metric >= ranked[-self._keep_best]

    def _ranked(self) -> list[tuple[float, int]]:
        return [(_metric(self._manager.metrics(step) or {}), step) for step in self.steps()]

    def best_step(self) -> int | None:
        """Return the step with the highest metric, the newest if tied; None if there is none."""
        metric, step = max(self._ranked(), default=(-math.inf, None))
        return None if metric == -math.inf else step

    def holds(self, step: int, name: str) -> bool:
        """Return True if a step has arrays below the key `name`; raises as `restore` does."""
        return any(path.startswith(f"{name}.") for path in self._read_host(step)["arrays"])

    def restore(self, step: int, like: Any, *, partial: bool = False) -> tuple[Any, dict]:
        """Return (arrays, host) of a step, each array laid out like its counterpart in `like`.

        like: the pytree of `save`, of arrays or of `jax.ShapeDtypeStruct` with shardings (abstract
        ones refer to the mesh in use). partial: `like` is a part of it, and no other array is read.
        Raises ValueError if there is no such step or its arrays have other names, shapes or types;
        DamagedCheckpointError if any bit read differs from what was saved.
        """
        where = self.directory / str(step)
        target = {name: _target(leaf) for name, leaf in _by_name(like).items()}
        saved = self._read_host(step)
        described = saved["arrays"]
        sums = saved["sums"]
        if partial:
            described = {name: described[name] for name in target if name in described}
            sums = {name: sums[name] for name in target if name in sums}
        _check_same(where, described, {name: _described(x) for name, x in target.items()})
        with one_line(f"{where} is damaged", DamagedCheckpointError):
            if partial:
                arrays = _read_some(where / "arrays", target)
            else:
                arrays = self._read(step, "arrays", ocp.args.StandardRestore(target))
            read = checksums(arrays)
            if changed := [name for name in sums if sums[name] != read[name]]:
                raise ValueError(f"{changed[0]} is not what was saved ({len(changed)} such arrays)")
        leaves = [arrays[name] for name in target]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), saved["values"]

    def restore_newest(self, like: Any) -> tuple[int, Any, dict]:
        """Return (step, arrays, host) of the newest step.

        Raises as `restore` does; a damaged step's error names the folder to delete.
        """
        steps = self.steps()
        if not steps:
            raise ValueError(f"{self.directory} has no checkpoint")
        try:
            return steps[-1], *self.restore(steps[-1], like)
        except DamagedCheckpointError as error:
            before = f"to go back to step {steps[-2]}" if steps[1:] else "and give a new --workdir"
            raise DamagedCheckpointError(f"{error}; delete that folder {before}") from None

    def _read_host(self, step: int) -> dict[str, Any]:
        """Return the host's part of a step, and its description of the arrays."""
        steps = self.steps()
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"{self.directory}: no checkpoint of step {step}, there are: {there}")
        with one_line(f"{self.directory / str(step)} is damaged", DamagedCheckpointError):
            saved = self._read(step, "host", ocp.args.JsonRestore())
            inside = {name: value for name, value in saved.items() if name != "crc32"}
            if _sealed(inside)["crc32"] != saved.get("crc32"):
                raise ValueError("the host's part is not what was saved")
        return saved

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]

    def wait(self) -> None:
        """Wait until the last save is complete on disk; raise OSError if it failed."""
        with _saving(self.directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for the last save and close; raise OSError if it failed."""
        with _saving(self.directory):
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()  # raises the same error again

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def _hide_late_reads() -> None:
    """Hide Orbax's reads that end after another one's error, which would bury its line."""
    show = sys.unraisablehook

    def show_others(error: Any) -> None:
        if str(error.exc_value) != "Event loop is closed":
            show(error)

    sys.unraisablehook = show_others


def _read_some(folder: epath.Path, target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Read only the arrays in `target`; the manager's own handler reads all or nothing."""
    layout = ocp.checkpoint_utils.construct_restore_args(target)
    args = ocp.args.PyTreeRestore(item=target, restore_args=layout, partial_restore=True)
    return ocp.PyTreeCheckpointHandler().restore(folder, args=args)


def _metric(metrics: Mapping) -> float:
    return metrics.get(_METRIC, -math.inf)


def _is_known(metric: float | None) -> bool:
    return metric is not None and not math.isnan(metric)


@contextlib.contextmanager
def _saving(directory: epath.Path) -> Iterator[None]:
    """Turn an error of a save into a one-line OSError that explains how to resume."""
    try:
        yield
    except Exception as error:
        full = is_disk_full(error)
        causes = " ".join(str(error).split()).split(": ")  # Orbax names the cause last
        why = "the disk is full" if full else ": ".join(causes[-2:])[-200:]
        raise OSError(
            f"checkpoint could not be saved in {directory}: {why}; "
            f"{'make room there' if full else 'fix that'} and run the same command again: it "
            "resumes from the last complete one"
        ) from error


def _by_name(tree: Any) -> dict[str, Any]:
    """Return leaves by path, "params.layers.q_proj": Orbax then never sees our own classes."""
    paths, _ = jax.tree.flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}
    if len(named) != len(paths):
        raise ValueError("two arrays of the checkpoint have the same path, rename one")
    return named


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and layout that an array is restored to."""
    sharding = leaf.sharding
    if sharding is None:  # e.g. a step counter: it depends on no parameter
        sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P())
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), sharding.spec)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_same(where: os.PathLike, saved: Mapping, needed: Mapping) -> None:
    """Raise ValueError unless both describe arrays of the same names, shapes and dtypes."""
    for name in sorted(saved.keys() | needed.keys()):
        there = saved.get(name, "no array")
        here = needed.get(name, "no array")
        if there != here:
            raise ValueError(
                f"{where}: {name} is {there}, this run needs {here}; "
                "resume with the config of the run that saved it"
            )


def _described(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _sealed(values: Mapping) -> dict:
    """Return JSON-able values with the checksum of their text."""
    return {**values, "crc32": zlib.crc32(json.dumps(values).encode())}


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """Return a number below 2³² for each array, the same on every mesh.

    It depends on the array's bits, not on their layout on devices or in files. Any single changed
    element changes it; other damage is missed once in 4e9 times.
    """
    sums = {}
    for name, x in arrays.items():
        layout = getattr(x, "sharding", None)
        is_placed = isinstance(layout, jax.sharding.NamedSharding)
        with jax.set_mesh(layout.mesh) if is_placed else contextlib.nullcontext():
            # One at a time: many concurrent programs on a CPU's virtual devices may deadlock.
            sums[name] = jax.block_until_ready(_checksum(x))
    return {name: int(x) for name, x in hosts.fetch(sums).items()}


def checksum(tree: Any) -> int:
    """Return one number below 2³² for all arrays of a pytree and their paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    sums = checksums({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    return zlib.crc32(json.dumps(sums).encode())


@jax.jit
def _checksum(x: Array) -> Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        x = x.astype(np.uint8)
    words = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(np.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        sizes = [1] * x.ndim
        sizes[axis] = x.shape[axis]
        index = jnp.arange(x.shape[axis], dtype=np.uint32).reshape(sizes)
        # Spaced by the golden ratio, so that shifted data has another sum.
        words = words + index * np.uint32(stride * 0x9E3779B9 % 2**32)
        stride *= x.shape[axis]
    # MurmurHash3's finalizer is one-to-one, so no single change goes unnoticed.
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return jnp.sum(words ^ (words >> np.uint32(16)), dtype=np.uint32)
