"""Runs that are killed, stopped and left without disk space, repeatedly: nothing may be lost.

Every life of a run is a separate process; the moments are drawn from a seed. The long drills are
marked slow; docs/reliability.md lists how often they were run.
"""

import contextlib
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import pytest
import small_runs
from small_runs import ROOT, assert_same_run, on_one_device, records, small_config

from specrl_jax import train as loop
from specrl_jax.command_line import cli
from specrl_jax.process.checkpoint import Checkpointer
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.training import collect, session

# A checkpoint at every step: a kill finds one under way more often than not.
CHANGES = {
    "sft.steps": 3, "evaluate.every": 3, "evaluate.samples": 2, "checkpoint.every": 1,
    "checkpoint.keep_last": 2, "rollout.draft": "previous+tree", "rollout.adaptive": False,
    "log.rollouts": 1.0,
}  # fmt: skip


def _run(workdir, changes) -> None:
    with cli.user_errors():
        loop.train(small_config(CHANGES | changes), workdir, hooks=StandardHooks())


def _begin(target, *inputs) -> multiprocessing.Process:
    """A life. Forked from a server that has imported everything, as imports take seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["specrl_jax.train", "small_runs"])
    life = context.Process(target=on_one_device, args=(target, inputs))
    life.start()
    return life


def _size(workdir) -> int:
    path = pathlib.Path(workdir, "metrics.jsonl")
    return path.stat().st_size if path.exists() else 0


def _wait_for_a_step(life, workdir, size: int) -> None:
    while life.is_alive() and _size(workdir) <= size:
        time.sleep(0.002)


def _kill(workdir, changes, moment: random.Random, seconds: tuple[float, float]) -> bool:
    """A life that is killed at a random moment; False if it ended before.

    One in three dies in its start, the others in or after a step; seconds: of a start, of a step.
    """
    size = _size(workdir)
    life = _begin(_run, workdir, changes)
    in_start = moment.random() < 1 / 3
    if not in_start:
        _wait_for_a_step(life, workdir, size)
    time.sleep(moment.uniform(0, seconds[0] if in_start else 2 * seconds[1]))
    life.kill()
    life.join()
    return life.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 200])
def test_killed_at_random_moments(tmp_path, mesh, kills):
    """Metrics, checkpoint and recorded responses are those of a whole run, bit for bit."""
    steps, (whole, killed) = 3 * kills, (tmp_path / "whole", tmp_path / "killed")
    changes = {"train.steps": steps}
    life = _begin(_run, whole, changes)
    life.join()
    # Programs are compiled now. How long does a start take?
    begun = time.perf_counter()
    life = _begin(_run, tmp_path / "again", changes)
    _wait_for_a_step(life, tmp_path / "again", 0)
    start = time.perf_counter() - begun
    life.kill()
    life.join()
    step = statistics.median(r["time/step"] for r in records(whole, times=True)[1:])
    moment = random.Random(0)
    killed_lives = sum(_kill(killed, changes, moment, (start, step)) for _ in range(kills))
    # On a busy machine a life may end before its moment.
    assert killed_lives >= kills - 1 - kills // 20
    print(f"{kills} kills, a start takes {start:.1f} s, a step {step:.2f} s")
    life = _begin(_run, killed, changes)
    life.join()
    assert life.exitcode == 0
    assert_same_run(killed, whole, steps)
    for one in sorted((whole / "rollouts").rglob("*.jsonl*")):
        assert (killed / one.relative_to(whole)).read_bytes() == one.read_bytes()


# --- signals --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Phase:
    """A function of the loop, and whether a signal in it is waited with until the step is saved."""

    owner: object
    name: str
    saves: bool = True


# In the order in which a run meets them, each in a life of its own.
PHASES = [
    Phase(session, "build", saves=False), Phase(session, "init_state", saves=False),
    Phase(loop, "evaluate_held_out"), Phase(session, "resume", saves=False),
    Phase(collect, "make_train_batch"), Phase(loop, "update_policy"), Phase(MetricsLog, "write"),
    Phase(Checkpointer, "save"), Phase(Checkpointer, "wait", saves=False),
]  # fmt: skip


def _run_with_signal(workdir, changes, phase: int, number: int, count: int = 1) -> None:
    """The run, in which the function sends signals to its own process as it starts."""
    owner, name = PHASES[phase].owner, PHASES[phase].name
    original = getattr(owner, name)

    def call(*args, **kwargs):
        setattr(owner, name, original)
        for _ in range(count):
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    setattr(owner, name, call)
    _run(workdir, changes)


@pytest.mark.parametrize(
    ("every", "first"),
    [(6, 0), *(pytest.param(1, first, marks=pytest.mark.slow) for first in (0, 1))],
)
def test_signals_in_every_phase(tmp_path, mesh, every, first):
    """SIGTERM and Ctrl-C in turn, then one of them twice; every: of so many phases one."""
    visited, workdir = list(enumerate(PHASES))[::every], tmp_path / "stopped"
    steps = len(visited) + 3
    changes, numbers = {"train.steps": steps}, (signal.SIGTERM, signal.SIGINT)
    at_once = {signal.SIGTERM: -signal.SIGTERM, signal.SIGINT: 130}
    for index, phase in visited:
        number = numbers[(index // every + first) % 2]
        life = _begin(_run_with_signal, workdir, changes, index, number)
        life.join()
        assert life.exitcode == (0 if phase.saves else at_once[number]), (phase.name, number)
    update = next(i for i, phase in enumerate(PHASES) if phase.name == "update_policy")
    life = _begin(_run_with_signal, workdir, changes, update, signal.SIGTERM, 2)
    life.join()
    assert life.exitcode == -signal.SIGTERM
    for folder in (workdir, tmp_path / "whole"):
        life = _begin(_run, folder, changes)
        life.join()
    assert_same_run(workdir, tmp_path / "whole", steps)


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path, mesh):
    changes, workdir = {"train.steps": 4}, tmp_path / "run"
    write = next(i for i, phase in enumerate(PHASES) if phase.name == "write")
    first = _begin(_run_with_signal, workdir, changes, write, signal.SIGSTOP)
    stat = pathlib.Path(f"/proc/{first.pid}/stat")
    deadline = time.monotonic() + 600
    while stat.read_text().rpartition(")")[2].split()[0] != "T":  # stopped, while another one tries
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(ValueError, match="is in use by another process; wait for it, or give"):
        loop.train(small_config(CHANGES | changes), workdir, hooks=StandardHooks())
    os.kill(first.pid, signal.SIGCONT)
    first.join()
    assert first.exitcode == 0
    assert [record["step"] for record in records(workdir)] == [0, 1, 2, 3, 4]


# --- a full disk ----------------------------------------------------------------------------------

# The second start finds room. What is in the tmpfs is gone with its namespace, hence the copy.
FULL_DISK = """
mount -t tmpfs -o size={size}k none {disk}
{train}; echo "exit $?" >&2
mount -o remount,size=64m {disk}
{train}; echo "exit $?" >&2
cp -r {disk}/run {copy}
"""


def _in_namespace(script: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["unshare", "--user", "--mount", "--map-root-user", "sh", "-c", script],
        cwd=ROOT, env=os.environ | small_runs.ONE_DEVICE | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests"},
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip


def _may_mount() -> bool:
    return (
        bool(shutil.which("unshare")) and _in_namespace("mount -t tmpfs none /mnt").returncode == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("kib", [200, 800])
def test_a_full_disk_loses_nothing(tmp_path, mesh, kib):
    """A tmpfs that is full in the first checkpoint or a later one, and then has room again."""
    if not _may_mount():
        pytest.skip("needs user namespaces in which a tmpfs may be mounted")
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    flags = [f"--config.{name}={value}" for name, value in CHANGES.items()]
    train = [sys.executable, "launch/train.py", "--config=tests/small_runs.py", *flags]
    train = " ".join([*train, f"--config.train.steps=6 --workdir={disk}/run"])
    done = _in_namespace(FULL_DISK.format(size=kib, disk=disk, copy=copy, train=train))
    # Others are warnings: another process may write to the compilation cache.
    said = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "exit "))]
    assert re.match("error: .*(make room|free space)", said[0]), done.stderr
    assert said[1:] == ["exit 2", "exit 0"]
    life = _begin(_run, tmp_path / "whole", {"train.steps": 6})
    life.join()
    assert_same_run(copy, tmp_path / "whole", 6)


# --- a soak ---------------------------------------------------------------------------------------


def _measures(workdir) -> tuple[float, int, float]:
    """Resident MiB of this process, its open files, and MiB of checkpoints.

    glibc first returns the memory that is free: how much it keeps depends on the order in which
    threads happened to allocate, and does not indicate a leak.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = pathlib.Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    sizes = []
    for folder, _, files in os.walk(workdir / "checkpoints"):  # passes over what is deleted
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(os.path.getsize(os.path.join(folder, name)))
    return int(resident.split()[1]) / 1024, len(os.listdir("/proc/self/fd")), sum(sizes) / 2**20


def _micro(workdir, steps: int, measure_every: int = 0) -> None:
    """The preset micro; what it measures of itself goes to the file `workdir`.json."""
    config = small_runs.preset("micro")
    config.train.steps, config.log.tracker, config.log.rollouts = steps, "none", 0.0
    config.log.report = False
    write, seen = MetricsLog.write, []

    def write_and_measure(log, step: int, *inputs, **options) -> None:
        write(log, step, *inputs, **options)
        if step and step % measure_every == 0:
            seen.append(_measures(workdir))
            workdir.with_suffix(".json").write_text(json.dumps(seen))

    if measure_every:
        MetricsLog.write = write_and_measure
    with cli.user_errors():
        loop.train(config, workdir, hooks=StandardHooks())


@pytest.mark.slow
def test_soak(tmp_path, mesh):
    """1,000 steps of the preset micro in one life, and in lives of 20 to 60 seconds."""
    steps, whole, killed = 1000, tmp_path / "whole", tmp_path / "killed"
    life = _begin(_micro, whole, steps, 10)
    life.join()
    assert life.exitcode == 0
    seen = json.loads(whole.with_suffix(".json").read_text())
    for at in range(9, len(seen), 10):
        print("resident {:.0f} MiB, {} files, checkpoints {:.1f} MiB".format(*seen[at]))
    for index in range(3):
        # Medians: a save under way has a few files open, and a checkpoint more on the disk.
        early = statistics.median(measure[index] for measure in seen[10:30])
        late = statistics.median(measure[index] for measure in seen[-20:])
        assert late <= 1.05 * early
    moment, kills = random.Random(0), 0
    while True:
        life = _begin(_micro, killed, steps)
        life.join(timeout=moment.uniform(20, 60))
        if not life.is_alive():
            break
        life.kill()
        life.join()
        kills += 1
    print(f"{kills} kills")
    assert life.exitcode == 0
    assert_same_run(killed, whole, steps)
