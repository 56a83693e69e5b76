"""What runs in a reward worker: it scores what it is sent, within limits of memory.

Takes a scorer or an environment by name; reads chunks of (response, answer, task, metadata) from a
pipe and writes a `Result` for each. `workers` is the other end. No JAX.
"""

import collections
import contextlib
import fcntl
import json
import logging
import os
import re
import resource
import select
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

from specrl_jax.rewards.environments import load_environment, play
from specrl_jax.rewards.scorers import SCORERS, load_scorer

MAX_SEARCH = 32_768  # characters: `extract` reads only the end of a longer response
MAX_REPORT = 2**18  # bytes
_MAX_FLOAT32 = 3.4028234663852886e38


class Result(NamedTuple):
    """What came of one response."""

    score: float = 0.0
    done: bool = True
    observation: str = ""
    failure: str = ""  # why there is no score
    retire: bool = False  # the worker must be replaced

    def send(self, conn: Connection) -> None:
        """Write it to a pipe, as JSON: a worker may run what a policy has written."""
        conn.send_bytes(json.dumps(self, ensure_ascii=False).encode(errors="replace"))

    @staticmethod
    def receive(conn: Connection) -> "Result":
        """Read from a pipe what `send` has written."""
        return Result(*json.loads(conn.recv_bytes(MAX_REPORT)))


def load(name: str, extract: str, environment: str) -> Callable[..., Result]:
    """The function from a response and its problem to a `Result`; ValueError in one line."""
    if environment:
        make = load_environment(environment)

        def step(responses: Sequence[str], *problem) -> Result:
            last = play(make, responses, *problem)
            return Result(float(last.reward), bool(last.done), last.observation)

        return step
    scorer, pattern = load_scorer(name), _compile_extract(extract)

    def score(response: str, *problem) -> Result:
        if pattern:
            response = _extract(pattern, response)
        return Result(0.0 if response is None else float(scorer(response, *problem)))

    return score


def _extract(pattern: re.Pattern, response: str) -> str | None:
    last = collections.deque(pattern.finditer(response[-MAX_SEARCH:]), maxlen=1)
    answer = last[0].group(1) if last else None
    return None if answer is None else answer.strip()


def _compile_extract(extract: str) -> re.Pattern | None:
    try:
        pattern = re.compile(extract)
    except re.error as error:
        raise ValueError(
            f"reward.extract must be a regular expression, got {extract!r}: {error}"
        ) from None
    if extract and not pattern.groups:
        raise ValueError(f"reward.extract must have a group, (..), for the answer, got {extract!r}")
    return pattern if extract else None


def serve(
    conn_fd: int, lifeline_fd: int, name: str, extract: str, environment: str, memory_mib: int
) -> None:
    """Serve until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(lifeline_fd)
    conn = Connection(conn_fd)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a line per odd answer otherwise
    try:
        score = load(name, extract, environment)
        if name in SCORERS:  # imports and compiled patterns; the user's function is left alone
            with contextlib.suppress(Exception):
                SCORERS[name](r"so \boxed{\frac{1}{2}}", "2", "chain_sum", {})
    except BaseException as error:
        return _failure(error).send(conn)
    Result().send(conn)
    limit, pid = memory_mib << 20, os.getpid()
    full = _virtual_bytes() + limit
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            for item in conn.recv():
                result = _within(limit, score, item)
                if os.getpid() != pid:  # the answer has forked: only this process reports
                    os._exit(0)
                # The limit counts from what is in use: caches that only grow, as sympy's, do not
                # starve later answers. A process that has grown by the limit is replaced.
                result._replace(retire=_virtual_bytes() > full).send(conn)
    return None


def _within(limit: int, score: Callable[..., Result], item: tuple) -> Result:
    """The result of one response, within `limit` more bytes of memory."""
    try:
        _limit_memory(_virtual_bytes() + limit)
        result = score(*item)
        if not abs(result.score) <= _MAX_FLOAT32:
            raise ValueError(f"the score is {result.score}, not a finite number")
        return result
    except BaseException as error:  # SystemExit too: an answer may contain exit()
        return _failure(error)
    finally:
        _limit_memory(resource.RLIM_INFINITY)


def _failure(error: BaseException) -> Result:
    line = " ".join(f"{type(error).__name__}: {error}"[:300].split())
    return Result(failure="out of memory" if isinstance(error, MemoryError) else line)


def _virtual_bytes() -> int:
    """Address space in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def _limit_memory(limit: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        limit = hard if limit == resource.RLIM_INFINITY else min(limit, hard)
    with contextlib.suppress(ValueError, OSError):  # not every system enforces it
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _die_with(lifeline_fd: int) -> None:
    """Let the kernel end this process by SIGIO when the parent's end of the pipe closes.

    A thread cannot do it while a C call holds the interpreter lock. PR_SET_PDEATHSIG follows the
    parent's thread, which may end earlier.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # it had closed before
        os._exit(1)
