"""Time limits: CPU seconds of everything that works for an answer, and a longer one for waiting."""

import subprocess
import sys
import time

import pytest
from worker_pools import score

from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.rewards.pool import RewardPool
from specrl_jax.sandbox import linux, time_limit
from specrl_jax.sandbox.time_limit import MAX_LOAD, MAX_WAIT, TimeLimit, longest

LIMITS = {"timeout": 1.0, "memory_mib": 512, "workers": 1}
BURN = "import time\nwhile time.process_time() < {}: pass\n"

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def call(pool, codes):
    """Failures of the first turns of as many episodes of the tool, all together."""
    episodes = pool.start([("1", "", {})] * len(codes))
    pool.submit(episodes, [f"<tool_call>{code}</tool_call>" for code in codes])
    answers = pool.collect(episodes)
    return [answers[i].failure for i in range(len(codes))]


@needs_proc
def test_the_cpu_time_of_processes_is_that_of_all_they_have_started():
    """Alive, or ended and waited for."""
    before = linux.cpu_seconds()
    burn = BURN.format(0.3)
    program = "import os, sys\npid = os.fork()\nif pid: os.wait()\n"
    program += f"{burn}if not pid: os._exit(0)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        end = time.monotonic() + 60
        while linux.cpu_seconds() - before < 0.5:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert linux.cpu_seconds(process.pid) <= linux.cpu_seconds()
        process.stdin.close()
    assert linux.cpu_seconds(process.pid) == 0  # there is no such process
    assert linux.cpu_seconds() - before < 0.5  # what this process has waited for is its own


@pytest.mark.parametrize(
    ("used", "seconds", "reason"),
    [
        (0.0, 3.9, ""),
        (0.0, 4.1, "within 4 s"),
        (0.5, 4 + MAX_LOAD / 2 - 0.1, ""),  # it waits for a core
        (0.5, 4 + MAX_LOAD / 2 + 0.1, "within 4 s"),
        (0.9, 1.0, ""),
        (1.1, 1.0, "within 1 s of CPU time"),
    ],
)
def test_when_the_time_is_over(monkeypatch, used, seconds, reason):
    clock = {"now": 100.0, "used": 7.0}
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(time_limit.linux, "cpu_seconds", lambda pid: clock["used"])
    limit = TimeLimit(1.0)
    assert limit.left() > 0
    clock.update(now=100 + seconds, used=7 + used)
    assert (limit.left() == 0) == bool(reason)
    assert limit.reason == reason
    assert MAX_WAIT == 4
    assert 1.0 < seconds + 1 <= longest(1.0)


def test_time_that_is_lost_from_sight_still_counts(monkeypatch):
    used = iter([0.0, 0.8, 0.1, 1.1])
    clock = iter(range(1000))
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(time_limit.linux, "cpu_seconds", lambda pid: next(used))
    limit = TimeLimit(1.0)
    while limit.left():
        pass
    assert limit.reason == "within 1 s of CPU time"


@needs_proc
def test_steps_beside_each_other_take_no_time_of_each_other():
    """12 in parallel, each using most of its limit, next to as many other programs."""
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    try:
        with EnvironmentPool("python", **LIMITS | {"timeout": 2.0}) as pool:
            assert call(pool, [BURN.format(1.2)] * 12) == [""] * 12
    finally:
        for process in beside:
            process.kill()
            process.wait()


# What uses CPU time ends at its limit, and what does not at that of waiting.
HANGS = {
    "while True: pass": "1 s of CPU time",
    "import time; time.sleep(1e9)": "4 s",
    "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)": "4 s",
    "import os\nif os.fork() == 0:\n while True: pass\nos.wait()": "1 s of CPU time",
    "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  while True: pass\n"
    " os._exit(0)\ntime.sleep(1e9)": "1 s of CPU time",
    "import threading, time\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()\n"
    "time.sleep(1e9)": "1 s of CPU time",
    "import os, time\nfor _ in range(40):\n if os.fork() == 0:\n  while True: pass\n"
    "time.sleep(1e9)": "1 s of CPU time",
    "import os\nwhile True:\n if os.fork() == 0: os._exit(0)\n os.wait()": "1 s of CPU time",
}


@needs_proc
def test_steps_that_hang_end_at_the_limit_of_what_they_do():
    with EnvironmentPool("python", **LIMITS) as pool:
        failures = call(pool, HANGS)
    assert failures == [f"no answer within {limit}" for limit in HANGS.values()]


@needs_proc
def test_answers_that_hang_end_at_the_limit_of_what_they_do():
    program = "import os\n{}\nvalue = 1"
    with RewardPool("user_scorers:execute", **LIMITS) as pool:
        scores = score(pool, [program.format(x) for x in (*HANGS, BURN.format(0.5))])
    want = [f"no result within {limit}" for limit in HANGS.values()]
    assert scores.reasons == (*want, "")


def test_without_cpu_times_only_the_clock_counts(monkeypatch):
    monkeypatch.setattr(time_limit.linux, "cpu_seconds", lambda pid: 0.0)
    limit = TimeLimit(0.05)
    begun = time.monotonic()
    while left := limit.left():
        time.sleep(left)
    assert 0.2 <= time.monotonic() - begun < 10
    assert limit.reason == "within 0.2 s"


def test_code_has_one_limit_for_all_its_tests():
    code = "def f():\n    import time\n    end = time.process_time() + 0.4\n"
    code += "    while time.process_time() < end: pass\n    return 1\n"
    with RewardPool("code", **LIMITS) as pool:
        scores = score(pool, [code] * 2, ["assert f() == 1", "assert f() == f() == f() == 1"])
    assert scores.reasons == ("", "no result within 1 s of CPU time")
