"""Episodes in the workers: each lives in its process, and costs no other one anything."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import weak_environment_worker
from small_runs import line_of
from worker_pools import alive, descendants, read, wait_for

from specrl_jax.agents import environment_pool
from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.agents.environment_protocol import MAX_OBSERVATION

LIMITS = {"timeout": 10.0, "memory_mib": 256, "workers": 2}
PROBLEM = ("5", "task", {"tuple": (1, 2)})


def make(name, **changes):
    return EnvironmentPool(f"user_environments:{name}", **LIMITS | changes)


def play(pool, episodes, responses):
    pool.submit(episodes, responses)
    answers = pool.collect(episodes)
    return [answers[i] for i in range(len(episodes))]


def said(answers):
    assert [answer.failure for answer in answers] == [""] * len(answers)
    return [answer.observation for answer in answers]


@pytest.mark.parametrize("name", ["Counter", "Shared"])
def test_an_environment_is_made_once_and_steps_once_a_turn(name):
    """It makes 16 steps for 16 turns, regardless of others. A separate process draws its own."""
    with make(name, threshold=17.0) as pool:
        episodes = pool.start([PROBLEM] * 4)
        made = 1 if name == "Counter" else 2  # of each process
        for turn in range(1, 17):
            answers = play(pool, episodes, ["x"] * 4)
            # The first of two in a process answers before the second is made.
            before = 1 if turn == 1 else made
            assert said(answers) == [f"{turn} of {n}: " for n in (before, before, made, made)]
            assert {answer.reward for answer in answers} == {0.0}  # the sum is below the threshold
        answers = play(pool, episodes, ["done"] * 4)
        assert {(answer.reward, answer.done) for answer in answers} == {(1.0, True)}
        pool.end(episodes)
        drawn = said(play(pool, pool.start([PROBLEM] * 2), ["random"] * 2))
    assert (drawn[0] != drawn[1]) or name == "Shared"


# What an episode does, and its failure, a regular expression.
FAULTS = {
    "raise no": "RuntimeError: no",
    "hang": "no answer within 10 s of CPU time",
    "exit 3": r"the environment's process died \(exit code 3\)",
    "kill -1": "|ProcessLookupError: .*",  # there is none, or none that it may kill
    "allocate": "out of memory",
    "nothing": "TypeError: .*",
    "role system": "ValueError: the role of a step must be user or tool, got 'system'",
    "role tool": "",
    "number 5": "TypeError: the observation of a step must be text, got int",
    "nan": r"ValueError: the score must be within ±1e\+15, got nan",
    "fork 3": "",
    "fork 99": "BlockingIOError: .*|no answer within .*",
    "start": "",
    "print word": "",
    "long": "",
}


@pytest.mark.parametrize("weak", [False, True])
def test_a_fault_costs_its_own_episode_in_one_line(monkeypatch, capfd, weak):
    if weak:
        monkeypatch.setattr(environment_pool, "environment_process", weak_environment_worker)
    before = descendants(os.getpid())
    with make("Counter") as pool:
        episodes = pool.start([PROBLEM] * 2 * len(FAULTS))
        first = play(pool, episodes, ["file x"] * len(episodes))
        if "signal other processes" in pool._workers[0].gaps:
            pytest.skip("it could kill more than its episode")
        assert said(first) == ["1 of 1: []"] * len(episodes)
        mixed = [response for fault in FAULTS for response in (fault, "file y")]
        second = play(pool, episodes, mixed)
        assert said(second[1::2]) == ["2 of 1: ['x']"] * len(FAULTS)
        for (fault, reason), answer in zip(FAULTS.items(), second[::2]):
            assert re.fullmatch(reason, answer.failure), (fault, answer)
            assert (answer.reward, answer.done) == ((0, True) if answer.failure else (2, False))
        assert len(second[-2].observation) == MAX_OBSERVATION
        spoke = [fault for fault, answer in zip(FAULTS, second[::2]) if answer.role == "tool"]
        assert spoke == ["role tool"]
        assert said(play(pool, episodes[1::2], ["x"] * len(FAULTS))) == ["3 of 1: "] * len(FAULTS)
        pool.end(episodes)
        wait_for(lambda: len(descendants(os.getpid()) - before) <= 4)  # guards and templates
    assert "printed by an environment: wordword" in capfd.readouterr().err
    wait_for(lambda: not descendants(os.getpid()) - before)


@pytest.mark.parametrize("name", ["Trusted", "Replayable", "Shared"])
@pytest.mark.parametrize("whole_worker", [False, True])
def test_a_process_that_is_killed_costs_its_episodes_unless_they_are_replayable(name, whole_worker):
    """By SIGKILL between two turns: episode 0's process, or the worker of episodes 0 and 2."""
    before = descendants(os.getpid())
    with make(name) as pool:
        episodes = pool.start([PROBLEM] * 4)
        play(pool, episodes[1:], ["x"] * 3)
        others = descendants(os.getpid())
        play(pool, episodes[:1], ["x"])
        victims = descendants(os.getpid()) - others
        if name == "Shared":
            victims = others - before
        if whole_worker:
            guard = pool._workers[0]._process.pid
            victims = {int(pid) for pid in read(f"/proc/{guard}/task/{guard}/children").split()}
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):  # it ends with another one of them
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(map(alive, victims)))
        second = play(pool, episodes, ["y"] * 4)
    lost = {0, 2} if whole_worker else {0}
    for i, answer in enumerate(second):
        if name == "Trusted" and i in lost:
            assert re.search("process (has ended|died)", answer.failure)
            assert (answer.reward, answer.done) == (0.0, True)
        else:
            assert answer.failure == ""
            assert answer.observation.startswith("2 of ")
            assert answer.reward == 2.0


def test_a_replayable_episode_that_ends_its_process_again_and_again_fails():
    """It takes others of a shared process down with it, which are played again."""
    with make("Shared", workers=1, timeout=5.0) as pool:
        episodes = pool.start([PROBLEM] * 4)
        play(pool, episodes, ["x"] * 4)
        answers = play(pool, episodes, ["y", "exit 3", "hang", "y"])
    failures = [answer.failure for answer in answers]
    died = "the environment's process died (exit code 3)"
    assert failures == ["", died, "no answer within 5 s of CPU time", ""]
    assert [answer.reward for answer in answers] == [2, 0, 0, 2]


def test_slow_environments_are_not_waited_for(tmp_path):
    path = tmp_path / "go"
    with make("Trusted", timeout=60.0) as pool:
        episodes = pool.start([PROBLEM] * 4)
        pool.submit(episodes, [f"wait {path}", "x", "x", "x"])
        assert set(pool.collect(episodes, 1)) == {1, 2, 3}
        pool.submit(episodes[1:], ["y"] * 3)
        assert set(pool.collect(episodes, 1)) == {1, 2, 3}
        path.touch()
        assert pool.collect(episodes)[0].observation == "1 of 1: at last"
        assert pool.collect(episodes) == {}


def test_episodes_end_with_the_pool_and_where_they_are_ended(tmp_path):
    with make("Trusted", timeout=60.0) as pool:
        episodes = pool.start([PROBLEM] * 2)
        pids = [int(x.split()[-1]) for x in said(play(pool, episodes, ["pid"] * 2))]
        assert all(map(alive, pids))
        pool.end(episodes[:1])
        wait_for(lambda: not alive(pids[0]))
        assert alive(pids[1])
        # Also while a step of it runs.
        pool.submit(episodes[1:], [f"wait {tmp_path / 'never'}"])
        pool.end(episodes[1:])
    wait_for(lambda: not alive(pids[1]))
    with pytest.raises(RuntimeError, match="closed"):
        pool.start([PROBLEM])


def test_episodes_vanish_with_a_killed_parent(tmp_path):
    main = f"""
        from specrl_jax.agents.environment_pool import EnvironmentPool
        with EnvironmentPool("user_environments:Trusted", **{LIMITS | {"timeout": 600.0}}) as pool:
            episodes = pool.start([("", "", {{}})] * 4)
            pool.submit(episodes, ["wait {tmp_path / "never"}"] * 4)
            pool.collect(episodes)
    """
    command = [sys.executable, "-c", textwrap.dedent(main)]
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}) as parent:
        # Two guards, two templates, four keepers and four processes of episodes.
        wait_for(lambda: len(descendants(parent.pid)) == 12)
        pids = descendants(parent.pid)
        parent.kill()
    wait_for(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize("name", ["Replayable", "Shared", "Restarted"])
def test_a_policy_may_be_told_that_its_turn_took_too_long(name):
    """A replayable episode resumes before the turn, any other from the start."""
    with make(name, workers=1, timeout=1.0, on_timeout="tell", threshold=3.0) as pool:
        episodes = pool.start([PROBLEM] * 3)
        late = "TimeoutError: no answer within 1 s of CPU time; "
        late += "you begin again" if name == "Restarted" else "this turn had no effect"
        role = "tool" if name == "Restarted" else "user"
        for answer in play(pool, episodes[:1], ["hang"]):  # in the first turn
            assert answer == (0.0, False, late, "", role)
        play(pool, episodes, ["file x"] * 3)
        answers = play(pool, episodes, ["hang", "y", "exit 3"])
        assert answers[0].observation == late
        assert re.match("2 of [123]: $", answers[1].observation)
        assert answers[2].failure == "the environment's process died (exit code 3)"
        again = play(pool, episodes[:2], ["file y"] * 2)
        if name == "Replayable":  # the file of a turn that was played again
            assert said(again) == ["2 of 1: ['x']", "3 of 1: ['x']"]
        if name == "Restarted":
            assert said(again) == ["1 of 1: []", "3 of 1: ['x']"]
        last = play(pool, episodes[:2], ["done"] * 2)
    # Rewards that were paid before stay; a turn without effect has none.
    assert [(x.reward, x.done, x.failure) for x in last] == [(1.0, True, "")] * 2


def test_an_episode_that_was_told_is_played_again_without_that_turn():
    with make("Replayable", workers=1, timeout=1.0, on_timeout="tell") as pool:
        episodes = pool.start([PROBLEM])
        for response in ("x", "hang", "y", "hang"):
            play(pool, episodes, [response])
        guard = pool._workers[0]._process.pid
        for pid in read(f"/proc/{guard}/task/{guard}/children").split():
            os.kill(int(pid), signal.SIGKILL)
        assert said(play(pool, episodes, ["z"])) == ["3 of 1: "]


def test_mistakes_are_found_at_construction_in_one_line():
    assert "environment.name must be one of guess, calc" in line_of(make, name="Nothing")
    line = line_of(make, name="Counter", on_timeout="tell")
    assert line.startswith(
        "environment.on_timeout must be end where environment.name is user_environments:Counter, "
    )
    line = line_of(make, name="Unsure")
    assert line.startswith("after_timeout of environment.name=user_environments:Unsure must be a ")
