"""Environments of a user's own, as the workers import them."""

import os
import pathlib
import random
import signal
import time


class Counter:
    """Says how many steps it has made, and what it was told to; `ACTIONS` by their names."""

    made = 0  # objects of this process

    def reset(self, answer, task, metadata):
        Counter.made += 1
        self.steps = 0

    def step(self, response):
        self.steps += 1
        name, _, argument = response.partition(" ")
        reward = 1.0
        said = ACTIONS.get(name, str)(argument)
        if name == "nan":
            reward = float("nan")
        if name == "nothing":
            return None
        if name != "number":
            said = f"{self.steps} of {Counter.made}: {said}"
        role = argument if name == "role" else "user"
        return said, reward, name == "done", role


class Trusted(Counter):
    """A class that is not contained, and cannot be played again."""

    contained = False


class Replayable(Counter):
    """They do the same in a process for each episode, which may be played again."""

    replayable = True


class Shared(Counter):
    """One process runs all episodes of a worker."""

    contained = False
    replayable = True


class Restarted(Counter):
    """An episode whose step took too long continues with a new object."""

    after_timeout = ("you begin again", 0.0, False, "tool")


class Unsure(Counter):
    """Neither continues nor ends."""

    after_timeout = ("you begin again", 0.0, True)


def _raise(argument):
    raise RuntimeError(argument)


def _hang(argument):
    while True:
        pass


def _wait(path):
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
    return "at last"


def _fork(argument):
    for _ in range(int(argument)):
        os.fork()
    return "forked"


def _start(argument):
    """Starts a process that outlives its parent, in its own session."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pause()
        os._exit(0)
    os.wait()
    return "started"


def _file(name):
    files = sorted(os.listdir())
    pathlib.Path(name).write_text("x")
    return files


def _print(text):
    print(text * 100_000, flush=True)
    return "printed"


ACTIONS = {
    "raise": _raise,
    "hang": _hang,
    "wait": _wait,
    "exit": lambda code: os._exit(int(code)),
    "kill": lambda pid: os.kill(int(pid), signal.SIGKILL),
    "fork": _fork,
    "start": _start,
    "file": _file,
    "print": _print,
    "number": int,
    "pid": lambda _: os.getpid(),
    "long": lambda _: "a" * 1_000_000,
    "allocate": lambda _: len(bytes(1 << 30)),
    "random": lambda _: random.random(),
}
