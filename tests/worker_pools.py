"""Helpers for tests of pools of workers, and of what their processes leave."""

import glob
import os
import time


def score(pool, responses, answers=None, tasks=None, metadatas=None):
    n = len(responses)
    return pool.score(responses, answers or [""] * n, tasks or [""] * n, metadatas or [{}] * n)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = read(f"/proc/{pid}/stat")
    return stat is not None and stat.rsplit(")", 1)[1].split()[0] != "Z"


def descendants(pid):
    """Numbers of all processes below `pid` that live."""
    lists = map(read, glob.glob(f"/proc/{pid}/task/*/children"))
    children = [int(n) for n in " ".join(filter(None, lists)).split()]
    return {n for n in children if alive(n)}.union(*map(descendants, children))


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return None


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
