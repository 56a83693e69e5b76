"""Setup of a process, made once: compilation cache, mesh, work directory.

It also counts the programs that the process compiles.
"""

import contextlib
import fcntl
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import jax

from specrl_jax import hosts
from specrl_jax.config import check_mesh, validate
from specrl_jax.sharding import make_mesh


def start(config, *, given=(), training: bool = True, devices=None) -> None:
    """Check `config` and set its mesh for this process; ValueError in one line.

    given: fields that the user has set, each of which must have an effect. training: whether the
    batches of training must fit the mesh. devices: of the mesh, by default those at hand.
    """
    validate(config, given)
    use_compilation_cache()
    compile_metrics()  # counts from here on
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    if training:
        check_mesh(config, mesh)
    jax.set_mesh(mesh)


def machine() -> dict:
    """Describe the primary's machine, on which seconds depend, in values that JSON keeps."""
    device = jax.devices()[0]
    processes = jax.process_count()
    own = {
        "device": f"{device.platform} {device.device_kind}",
        "mesh": list(jax.sharding.get_mesh().shape.values()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "jax": jax.__version__,
        "malloc": os.environ.get("GLIBC_TUNABLES", ""),
    }
    return hosts.broadcast(own | ({"processes": processes} if processes > 1 else {}))


def use_compilation_cache() -> None:
    """Keep compiled programs in JAX_COMPILATION_CACHE_DIR, else in the user's cache folder."""
    if not jax.config.jax_compilation_cache_dir:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(root / "specrl_jax" / "jax"))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def compile_metrics() -> dict[str, float]:
    """Return what was compiled since the last call in this process.

    Seconds of building programs and of reading them from the compilation cache, and counts of both.
    """
    seconds, hits = _compilations()
    built = len(seconds) - len(hits)
    read = len(hits)
    values = {"time/compile": sum(seconds), "compile/built": built, "compile/read": read}
    seconds.clear()
    hits.clear()
    return values


@functools.cache
def _compilations() -> tuple[list[float], list[str]]:
    """Seconds of every program, and one item for each that was read from the cache."""
    seconds: list[float] = []
    hits: list[str] = []

    def note_seconds(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):  # also of a program read from the cache
            seconds.append(duration)

    def note_hit(event: str, **_) -> None:
        if event.endswith("compilation_cache/cache_hits"):
            hits.append(event)

    jax.monitoring.register_event_duration_secs_listener(note_seconds)
    jax.monitoring.register_event_listener(note_hit)
    return seconds, hits


@contextlib.contextmanager
def only_process(workdir: Path) -> Iterator[None]:
    """Lock `workdir` for this process, until it ends in whatever way; the primary does so for all
    processes of a run.

    Raises ValueError where another process holds the lock.
    """
    if not hosts.is_primary():
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{workdir} is in use by another process; wait for it, or give another --workdir"
            ) from None
        yield
