"""Two processes, a device each, as one run: what they compute, and how they end."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from small_runs import ONE_DEVICE, ROOT, assert_same_run, records, small_config

from specrl_jax.command_line import files
from specrl_jax.process import distributed
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.train import train

# A step an epoch: drafts start in step 2. Few shapes of the update, so few programs.
FLAGS = {
    "log.rollouts": 1.0, "checkpoint.every": 1, "train.epochs": 4, "rollout.prompts_per_step": 8,
    "updates.mini_batch_size": 64, "data.source": "jsonl",
    "data.path": "tests/digits.jsonl", "data.prompts": 8, "data.eval_prompts": 0,
    "reward.extract": r"(\d)",
}  # fmt: skip
LOST = "error: another process of the run has ended, see its output; start all processes again"


def _arguments(workdir, flags=FLAGS) -> list[str]:
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    return ["--config=tests/small_runs.py", f"--workdir={workdir}", *flags]


def _config(flags=FLAGS, **changes):
    """The configuration from the flags, with fields changed."""
    config = small_config(flags, **changes)
    files.start_own_task(config, small_config(), flags.keys())
    return config


def _ends(folder, programs: list[list[str]]) -> list[int]:
    """Exit statuses of a run's processes, by what follows `python`; their output is in FOLDER/N.out
    and FOLDER/N.err."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    env = os.environ | ONE_DEVICE | {"PYTHONPATH": path}
    processes = []
    with socket.socket() as held:
        # JAX's coordinator may listen at this port too; no other program is given it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        joined = [f"--coordinator=127.0.0.1:{held.getsockname()[1]}"]
        joined += [f"--num_processes={len(programs)}"]
        try:
            for number, program in enumerate(programs):
                command = [sys.executable, *program, *joined, f"--process_id={number}"]
                with (
                    open(folder / f"{number}.out", "w") as out,
                    open(folder / f"{number}.err", "w") as err,
                ):
                    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=err)
                processes.append(process)
            return [process.wait(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()  # a process in a collective does not hear anything else
                process.wait()


def _run(folder, workdir, *fates: str, flags=FLAGS) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of a process for each of `fates`: "" or "WHAT STEP"."""
    programs = [
        ["tests/one_of_two.py", *fate.split()] if fate else ["launch/train.py"] for fate in fates
    ]
    codes = _ends(folder, [program + _arguments(workdir, flags) for program in programs])
    texts = [[(folder / f"{n}.{x}").read_text() for x in ("out", "err")] for n in range(len(fates))]
    return [(code, *text) for code, text in zip(codes, texts)]


def test_two_processes_train_as_one_and_end_together(tmp_path, make_mesh):
    """The first step is that of one process; after the third one is killed."""
    workdir = tmp_path / "run"
    (code, out, errors), (killed, silent, _) = _run(tmp_path, workdir, "", "kill 3")
    assert killed == -signal.SIGKILL
    assert code in (1, -signal.SIGABRT)
    # JAX counts a silent process as lost after a minute, where no collective fails first; Orbax
    # would wait for five.
    assert time.time() - (workdir / "metrics.jsonl").stat().st_mtime < 240
    assert LOST in errors or "coordination service" in errors
    assert "mesh {'data': 2, 'fsdp': 1, 'tensor': 1}" in out
    assert "policy:" not in silent  # one process talks
    steps = records(workdir)
    assert [r["step"] for r in steps] == [0, 1, 2, 3]
    assert steps[2]["rollout/reuse_fraction"] > 0
    # Step 2's save, which may have been cut short, waited for that of step 1.
    assert (workdir / "checkpoints" / "1").is_dir()

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
        # With the padding of each shard.
        padded = name in ("rollout/tokens_prefilled", "update/computed_fraction")
        if padded or "/prefill_" in name:
            continue
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
    assert "SIGTERM, saved at step 2 of 4; run the same command to resume" in out
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
@pytest.mark.parametrize("fates", [("", "oops 1"), ("oops 1", ""), ("kill 1", "")])
def test_the_other_process_ends_too(tmp_path, fates):
    """By the error of a collective, or by JAX's coordination service, which reports why."""
    start = time.time()
    ends = _run(tmp_path, tmp_path / "run", *fates)
    took = time.time() - max(start, (tmp_path / "run" / "metrics.jsonl").stat().st_mtime)
    code, _, errors = ends[fates.index("")]
    assert code in (1, -signal.SIGABRT)
    assert LOST in errors or "coordination service" in errors
    assert took < 120
    if "oops 1" in fates:
        assert "RuntimeError: oops" in ends[fates.index("oops 1")][2]


def test_processes_with_other_flags_are_refused(tmp_path):
    programs = [["launch/train.py", *_arguments(tmp_path / "run")] for _ in range(2)]
    programs[1].append("--config.seed=3")
    assert _ends(tmp_path, programs) == [2, 2]
    error = "error: seed must be the same in all processes, got 0 in process 0 and 3 in process 1; "
    assert error + "start them with the same flags" in (tmp_path / "0.err").read_text()


# Joining --------------------------------------------------------------------------------------


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


def test_a_port_that_is_taken_is_refused():
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        coordinator = f"127.0.0.1:{held.getsockname()[1]}"
        rule = r"cannot be used here \(.*in use\); give all processes another$"
        with pytest.raises(ValueError, match=rule), distributed.one_run(coordinator, 2, 0):
            pass
