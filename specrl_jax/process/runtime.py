"""Process setup: compilation cache, devices, mesh, lock; also counts compiled programs."""

import contextlib
import fcntl
import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from specrl_jax import hosts, registry
from specrl_jax.process import hardware
from specrl_jax.settings import schema
from specrl_jax.sharding import make_mesh, rollout_mesh


def start(config, *, given=(), training: bool = True, devices=None) -> None:
    """Check `config` and set its mesh for this process; raise a one-line ValueError.

    given: fields set by the user, each of which must have an effect. training: whether training
    batches must fit the mesh. devices: of the mesh, by default those of this machine.
    """
    registry.load(config.recipes)
    schema().validate(config, given)
    use_compilation_cache()
    compile_metrics()  # counting starts here
    devices = all_devices() if devices is None else devices
    of_rollouts = config.mesh.rollout_devices if training else 0
    most = len(devices) - 1 if jax.process_count() == 1 else 0
    if of_rollouts > most:
        rule = f"{most}, with {len(devices)} devices of {jax.process_count()} processes"
        raise ValueError(f"mesh.rollout_devices must be <= {rule}, got {of_rollouts}")
    devices = devices[: len(devices) - of_rollouts]
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, devices)
    with jax.set_mesh(mesh):
        second = rollout_mesh(of_rollouts, config.mesh.tensor)
    if training:
        schema().check_mesh(config, mesh, second)
    jax.set_mesh(mesh)


def all_devices(root: Path = hardware.ROOT) -> list[jax.Device]:
    """Return JAX's devices; if it ignores an accelerator, report so in a line on stderr.

    root: of the file system that describes the machine. Raises a one-line ValueError if JAX cannot
    start its devices.
    """
    extra = hardware.accelerator(root)
    with _caught_log() as records:
        try:
            devices = jax.devices()
        except (RuntimeError, AssertionError) as error:
            why = (extra and hardware.misfit(extra)) or str(error).partition("\n")[0]
            why = why or "a requested platform is not installed"
            mend = f"; {hardware.command(extra)} may fix it" if extra else ""
            asked = os.environ.get("JAX_PLATFORMS", "")
            if asked and "cpu" not in asked:
                mend += f"; JAX_PLATFORMS={asked} requests it, without it JAX takes what it finds"
            raise ValueError(f"JAX cannot start its devices: {why}{mend}") from error
    if extra and devices[0].platform == "cpu":
        if not _wants_cpu(extra):
            errors = [str(record.exc_info[1]) for record in records if record.exc_info]
            said = errors[0].split("\n")[0] if errors else ""
            _say_once(hardware.unused(extra, said, root))
        return devices
    if extra and (why := hardware.misfit(extra)):
        _say_once(f"warning: {why}, which must be equal; {hardware.command(extra)} fixes it")
    for record in records:
        logging.getLogger(record.name).handle(record)
    return devices


def _wants_cpu(extra: str) -> bool:
    """Return whether the user has asked to compute without the accelerator."""
    platforms = jax.config.jax_platforms or os.environ.get("JAX_PLATFORM_NAME", "")
    hidden = extra == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    return platforms.startswith("cpu") or hidden


@contextlib.contextmanager
def _caught_log() -> Iterator[list[logging.LogRecord]]:
    """Collect what JAX would log about its devices, which can be a traceback of 30 lines."""
    records: list[logging.LogRecord] = []

    def keep(record: logging.LogRecord) -> bool:
        records.append(record)
        return False

    log = logging.getLogger("jax._src.xla_bridge")
    log.addFilter(keep)
    try:
        yield records
    finally:
        log.removeFilter(keep)


@functools.cache
def _say_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def machine() -> dict:
    """Describe the primary's machine, which timings depend on, as values that JSON preserves."""
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
    """Return seconds and counts of the programs built and read since the last call."""
    seconds, hits = _compilations()
    values = {
        "time/compile": sum(seconds),
        "compile/built": len(seconds) - len(hits),
        "compile/read": len(hits),
    }
    seconds.clear()
    hits.clear()
    return values


@functools.cache
def _compilations() -> tuple[list[float], list[str]]:
    """Return the seconds of every program, and an item for each read from the cache."""
    seconds: list[float] = []
    hits: list[str] = []

    def note_seconds(event: str, duration: float, **_) -> None:
        if event.endswith("backend_compile_duration"):  # also for a program read from the cache
            seconds.append(duration)

    def note_hit(event: str, **_) -> None:
        if event.endswith("compilation_cache/cache_hits"):
            hits.append(event)

    jax.monitoring.register_event_duration_secs_listener(note_seconds)
    jax.monitoring.register_event_listener(note_hit)
    return seconds, hits


@contextlib.contextmanager
def only_process(workdir: Path) -> Iterator[None]:
    """Lock `workdir` until this process ends in any way; the primary does so for all.

    Raises ValueError if another process has the lock.
    """
    if not hosts.is_primary():
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{workdir} is in use by another process; wait for it, or give another --workdir"
            ) from None
        except OSError as error:
            raise ValueError(
                f"--workdir must be on a file system with locks, {workdir} is not "
                f"({error.strerror}); give one on another"
            ) from error
        yield
