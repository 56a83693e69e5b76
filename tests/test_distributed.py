"""Two processes, a device each, as one run: what they compute, and how they end."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from small_runs import ONE_DEVICE, ROOT, assert_same_run, records, small_config

from specrl_jax import config_file, distributed
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.train import train

# A step an epoch: drafts begin in step 2. Few shapes of the update, so few programs.
FLAGS = {
    "log.rollouts": 1.0, "checkpoint.every": 1, "train.epochs": 4, "rollout.prompts_per_step": 8,
    "updates.mini_batch_size": 64, "updates.micro_batch_size": 16, "data.source": "jsonl",
    "data.path": "tests/digits.jsonl", "data.prompts": 8, "data.eval_prompts": 0,
    "reward.extract": r"(\d)",
}  # fmt: skip
LOST = "ended without a word, or hangs; start all processes again to go on"


def _arguments(workdir, flags=FLAGS) -> list[str]:
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    return ["--config=tests/small_runs.py", f"--workdir={workdir}", *flags]


def _config(flags=FLAGS, **changes):
    """The configuration that the flags give, with fields changed."""
    config = small_config(flags, **changes)
    config_file.begin_own_task(config, small_config(), flags.keys())
    return config


def _start(folder, programs: list[list[str]]) -> list[subprocess.Popen]:
    """The processes of a run, by what follows `python`; their output is in FOLDER/N.out, N.err."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    joined = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={len(programs)}"]
    processes = []
    for number, program in enumerate(programs):
        command = [sys.executable, *program, *joined, f"--process_id={number}"]
        env = os.environ | ONE_DEVICE | {"PYTHONPATH": path}
        with open(folder / f"{number}.out", "w") as out, open(folder / f"{number}.err", "w") as err:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err))
    return processes


def _run(folder, workdir, *fates: str, flags=FLAGS) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of a process for each of `fates`: "" or "WHAT STEP"."""
    programs = [
        ["tests/one_of_two.py", *fate.split()] if fate else ["launch/train.py"] for fate in fates
    ]
    processes = _start(folder, [program + _arguments(workdir, flags) for program in programs])
    try:
        codes = [process.wait(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()  # a process in a collective does not hear anything else
            process.wait()
    texts = [[(folder / f"{n}.{x}").read_text() for x in ("out", "err")] for n in range(len(fates))]
    return [(code, *text) for code, text in zip(codes, texts)]


def test_two_processes_train_as_one_and_end_together(tmp_path, make_mesh):
    """The first step is that of one process; in the second, with drafts, one is killed."""
    workdir = tmp_path / "run"
    (code, out, errors), (killed, silent, _) = _run(tmp_path, workdir, "", "kill 2")
    assert (code, killed) == (1, -signal.SIGKILL)
    assert time.time() - (workdir / "metrics.jsonl").stat().st_mtime < 60
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: process 1 of 2 on {socket.gethostname()} {LOST}"]
    assert "mesh {'data': 2, 'fsdp': 1, 'tensor': 1}" in out
    assert "policy:" not in silent  # one process talks
    steps = records(workdir)
    assert [r["step"] for r in steps] == [0, 1, 2]
    assert steps[2]["rollout/reuse_fraction"] > 0
    assert {"0", "1"} <= {path.name for path in (workdir / "checkpoints").iterdir()}

    with jax.set_mesh(make_mesh(1, 1, 1)):
        train(_config(**{"train.steps": 1}), tmp_path / "alone")
    _assert_close(steps[1], records(tmp_path / "alone")[1])
    for one, two in zip(read_rollouts(workdir, 1), read_rollouts(tmp_path / "alone", 1)):
        logprobs = (x.pop("policy_logprobs") for x in (one, two))  # in 4 decimals
        np.testing.assert_allclose(*logprobs, atol=2e-4)
        assert one == two


def _assert_close(one: dict, two: dict) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value == pytest.approx(two[name], rel=1e-4, abs=1e-5), name


# Longer ones -------------------------------------------------------------------------------------


# Which programs are used is a matter of seconds, and so is the last bit.
PLAIN = FLAGS | {"rollout.adaptive": False}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The work directory of a run of two processes that was not interrupted."""
    folder = tmp_path_factory.mktemp("two")
    assert [code for code, *_ in _run(folder, folder / "run", "", "", flags=PLAIN)] == [0, 0]
    return folder / "run"


@pytest.mark.slow
def test_a_stop_signal_to_one_process_stops_both_and_the_run_goes_on(finished, tmp_path, make_mesh):
    """On two processes it is the same run to the bit; on one process with two devices as well."""
    workdir = tmp_path / "run"
    (code, out, _), (other, *_) = _run(tmp_path, workdir, "", "term 2", flags=PLAIN)
    assert (code, other) == (0, 0)
    assert "SIGTERM, saved at step 2 of 4; run the same command to go on" in out
    again = shutil.copytree(workdir, tmp_path / "again")
    (code, out, _), _ = _run(tmp_path, workdir, "", "", flags=PLAIN)
    assert code == 0
    assert "resumed at step 2 of 4" in out
    assert_same_run(workdir, finished, 4)
    with jax.set_mesh(make_mesh(2, 1, 1)):
        train(_config(PLAIN), again)
    assert_same_run(again, finished, 4)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two(finished, tmp_path, make_mesh):
    with jax.set_mesh(make_mesh(2, 1, 1)):
        train(_config(PLAIN), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    (code, out, _), _ = _run(tmp_path, tmp_path / "run", "", "", flags=PLAIN)
    assert code == 0
    assert "resumed at step 3 of 4" in out
    assert_same_run(tmp_path / "run", finished, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fates", "statuses", "line"),
    [
        (("", "oops 1"), {1}, "process 1 of 2 on {host} failed: oops"),
        (("oops 1", ""), {1}, "process 0 of 2 on {host} failed: oops"),
        (("kill 1", ""), {1, -signal.SIGABRT}, "process 0 of 2 " + LOST),
    ],
)
def test_the_other_process_ends_too(tmp_path, fates, statuses, line):
    start = time.time()
    ends = _run(tmp_path, tmp_path / "run", *fates)
    took = time.time() - max(start, (tmp_path / "run" / "metrics.jsonl").stat().st_mtime)
    code, _, errors = ends[fates.index("")]
    assert code in statuses
    if code != -signal.SIGABRT:  # JAX was the first to end it, and says so
        assert f"error: {line.format(host=socket.gethostname())}" in errors.splitlines()
    else:
        assert "Polled an error from coordination service" in errors
    assert took < 60


@pytest.mark.slow
def test_processes_with_other_flags_are_refused(tmp_path):
    programs = [["launch/train.py", *_arguments(tmp_path / "run")] for _ in range(2)]
    programs[1].append("--config.seed=3")
    assert [process.wait(timeout=100) for process in _start(tmp_path, programs)] == [2, 2]
    error = "error: seed must be the same in all processes, got 0 in process 0 and 3 in process 1; "
    assert error + "start them with the same flags" in (tmp_path / "0.err").read_text()


# Joining and watching ----------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [("host:1",), ("host:1", 2, 2), ("", 2), ("auto", 2, 0)])
def test_arguments_that_do_not_fit_are_refused(inputs):
    with pytest.raises(ValueError, match="must come with"), distributed.one_run(*inputs):
        pass


@pytest.mark.parametrize(("tasks", "inputs"), [("1", ()), ("2", ("", 1))])
def test_alone_nothing_is_joined(monkeypatch, tasks, inputs):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    with distributed.one_run(*inputs):
        assert jax.process_count() == 1


class _Service:
    """JAX's coordination service, as far as it is used, in memory."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError("ALREADY_EXISTS")
            self.values[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, folder):
        with self.changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_try_get(self, key):
        with self.changed:
            if key not in self.values:
                raise RuntimeError("NOT_FOUND")
            return self.values[key]

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1_000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


@pytest.fixture
def service(monkeypatch):
    times = {"BEAT_S": 0.02, "SILENCE_S": 0.3, "BROKEN_SILENCE_S": 0.2, "GRACE_S": 0.1}
    for name, seconds in times.items():
        monkeypatch.setattr(distributed, name, seconds)
    return _Service()


@pytest.fixture
def exits(monkeypatch):
    """Exit statuses, in order; the processes live on."""
    codes = []

    def leave(code):
        codes.append(code)
        if threading.current_thread() is threading.main_thread():
            sys.exit(code)

    monkeypatch.setattr(distributed.os, "_exit", leave)
    return codes


def _wait(condition) -> None:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_a_process_hears_of_anothers_failure(service, exits, capsys):
    watch, other = (distributed._Watch(service, n, 2) for n in (0, 1))
    with pytest.raises(SystemExit):
        other.end(ValueError("no prompts"))
    _wait(lambda: len(exits) == 2)
    assert exits == [2, 2]
    errors = capsys.readouterr().err.splitlines()
    host = socket.gethostname()
    assert errors == ["error: no prompts", f"error: process 1 of 2 on {host} failed: no prompts"]
    watch.close()


def test_a_process_that_is_silent_is_lost(service, exits, capsys):
    watch, other = (distributed._Watch(service, n, 2) for n in (0, 1))
    other._closed.set()
    _wait(lambda: exits == [1, 1])  # both hear of it
    line = f"error: process 1 of 2 on {socket.gethostname()} {LOST}\n"
    assert capsys.readouterr().err == 2 * line
    watch.close()


def test_a_broken_collective_is_the_failure_of_another_where_there_is_one(service, exits, capsys):
    watch = distributed._Watch(service, 0, 2)
    with pytest.raises(SystemExit):
        watch.end(ValueError("Gloo AllGather failed"))
    assert exits == [1]
    assert capsys.readouterr().err == f"error: process 1 of 2 {LOST}\n"
    watch.close()


def test_processes_that_leave_in_peace_are_not_missed(service, exits):
    watches = [distributed._Watch(service, n, 2) for n in (0, 1)]
    watches[1].close()
    time.sleep(2 * distributed.SILENCE_S)
    watches[0].close()
    assert exits == []
