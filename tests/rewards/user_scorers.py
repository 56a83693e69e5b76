"""Scorers as a user would write them, some of which misbehave."""

import os
import sys
import time
from pathlib import Path

_kept = []


def odd(response, answer, task, metadata):
    """Does what the response says, else scores its length."""
    if response == "hang":
        while True:
            pass
    if response == "hang in C":
        9**9**9
    if response == "allocate":
        return float(len(bytearray(10 << 30)))
    if response == "allocate slowly":
        blocks = []
        while True:
            blocks.append(b"x" * (1 << 20))
    if response == "raise":
        raise KeyError("no such thing")
    if response == "fork":
        os.fork()
    if response == "exit":
        os._exit(3)
    if response == "sys.exit":
        sys.exit()
    if response == "text":
        return "five"
    return {"nan": float("nan"), "inf": float("inf")}.get(response, len(response))


def has_jax(response, answer, task, metadata):
    return "jax" in sys.modules


def has_tunables(response, answer, task, metadata):
    return "GLIBC_TUNABLES" in os.environ


def sees(response, answer, task, metadata):
    return metadata["x"] + len(task) + (response == answer)


def pid(response, answer, task, metadata):
    time.sleep(0.05)
    return os.getpid()


def say_pid_and_hang(response, answer, task, metadata):
    """Writes the worker's number to the file `response`, and stays in one C call."""
    Path(response).write_text(str(os.getpid()))
    9**9**9


def leak(response, answer, task, metadata):
    _kept.append(bytearray(40 << 20))
    return len(_kept)


def two(response, answer):
    return 1.0
