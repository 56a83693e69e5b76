"""Scorers as a user would write them, some of which misbehave."""

import os
import socket
import sys
import time

import numpy as np

_kept = []


def odd(response, answer, task, metadata):
    """Does what the response tells it, else scores its length."""
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


def sees(response, answer, task, metadata):
    return metadata["x"] + len(task) + (response == answer)


def slow(response, answer, task, metadata):
    time.sleep(0.05)
    return 1.0


def hang(response, answer, task, metadata):
    """Prints the response, and stays in one C call."""
    print(response, flush=True)
    9**9**9


def execute(response, answer, task, metadata):
    """Executes the response, as some tasks of reasoning_gym do; its `value` is the score."""
    names = {"value": 0.0}
    exec(response, names)
    return names["value"]


def trusting(response, answer, task, metadata):
    """What is left to a scorer that declares that it needs it."""
    socket.socket().close()
    return response in os.environ


trusting.contained = False


def leak(response, answer, task, metadata):
    _kept.append(bytearray(40 << 20))
    return len(_kept)


def by_name(answer, response, **others):
    return float(response.strip().endswith(answer))


def of_another_project(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip().endswith(ground_truth))


def positions(a, b, c, d):
    return float(a == b)


def judge(responses, answers, **others):
    """A reward model: it sees the whole batch, in the process that trains."""
    _judged.append((len(responses), os.getpid()))
    longest = max(map(len, responses))
    return np.array([len(text) / longest for text in responses])


judge.batched = True
_judged = []


def careless(responses, answers, tasks, metadatas):
    """Does what the first response tells it."""
    if responses[0] == "raise":
        raise ConnectionError("no answer\nfrom the server")
    if responses[0] == "few":
        return [1.0]
    return [float("nan") if text == "nan" else 1.0 for text in responses]


careless.batched = True


def singles(response, answer, task, metadata):
    return 1.0


singles.batched = True


def ends(response, answer, *, ended, **others):
    """1 for a response that finished."""
    return float(ended)


def others_alone(response, answer, **others):
    """1 if it is unknown whether it ended."""
    return float("ended" not in others)


def judge_of_ends(responses, answers, ended, **others):
    return [float(x) for x in ended]


judge_of_ends.batched = True


def ends_by_position(response, answer, ended, /, **others):
    return 0.0
