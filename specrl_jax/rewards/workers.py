"""Scores batches of responses in worker processes, so that no answer costs more than its reward.

Takes the name of a scorer of `rewards`, or a user's `module:function`, and texts; gives `Scores`.
Steps of `environments` are taken in the same way.

Scorers meet text that a policy made up, and some of them evaluate it: `9**9**9` keeps sympy busy
for ever, inside one C call that no exception or signal handler interrupts. So answers are scored in
worker processes with a limit of wall-clock time and memory per answer; whatever breaks a limit
costs its own reward, 0 and counted as failed. These are limits, not a security boundary.

The workers are started by command line, not by `multiprocessing`: nothing is forked under JAX's
threads, and the parent's `__main__` (a script, pytest, a notebook, stdin) is never imported again.
"""

import collections
import contextlib
import dataclasses
import fcntl
import logging
import math
import os
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import NamedTuple

import numpy as np

from specrl_jax.rewards.environments import Step, load_environment, play
from specrl_jax.rewards.scorers import SCORERS, load_scorer, score_exact

MAX_SEARCH = 32_768  # characters: `extract` looks only at the end of a longer response
MAX_CHUNK = 32  # answers sent to a worker at once
STARTUP_S = 300.0  # seconds for a worker's imports; they do not count against any answer
# score, done, failed, worker wants to be replaced; then an observation, or why it failed
_REPORT = struct.Struct("<d???")
_MAX_REPORT = 2**18  # bytes


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a batch of B responses earned, in the order they were given.

    rewards: float32 [B], 0 where failed. failed: bool [B], the answer ran out of time or memory,
    its scorer raised, died or returned something not finite. reasons: B texts, "" unless failed.
    done: bool [B], the episode is over, as it always is without an environment; observations: B
    texts that answer the responses of the others.
    """

    rewards: np.ndarray
    failed: np.ndarray
    reasons: tuple[str, ...]
    done: np.ndarray
    observations: tuple[str, ...]


class RewardPool:
    """Scores batches in worker processes that are killed and replaced when an answer hangs them.

    name: of `rewards.SCORERS`. timeout: wall-clock seconds per answer. memory_mib: MiB an answer
    may allocate (Linux only). workers: processes, 0 = one per core, at most 16. threshold: if > 0
    the reward is 1 where the score reaches it, else 0. extract: a regular expression whose group
    1, in its last match, is the answer in the response (no match: reward 0); "" = all of it.
    environment: of `environments.ENVIRONMENTS`, whose steps are taken instead; a response is then
    the texts of an episode's turns so far.

    Use it as a context manager. Calls are safe from several threads, one batch at a time.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout: float,
        memory_mib: int,
        workers: int,
        threshold: float = 0.0,
        extract: str = "",
        environment: str = "",
    ):
        _check_limits(timeout, memory_mib, workers, threshold)
        _load(name, extract, environment)
        self._arguments = (name, extract, environment, int(memory_mib))
        self._timeout = float(timeout)
        self._threshold = float(threshold)
        self._count = int(workers) or min(os.cpu_count() or 1, 16)
        # String equality is ours, linear and cannot fail, so it needs no process. With `extract`
        # it does: a user's pattern may backtrack for ever on a response made for it.
        self._inline = name == "exact" and not extract and not environment
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def warm_up(self, *, wait_ready: bool = True) -> None:
        """Starts the workers; with `wait_ready=False` their imports go on in the background."""
        with self._lock:
            self._start()
            while wait_ready and any(not worker.ready for worker in self._workers):
                self._collect([], collections.deque())

    def score(
        self,
        responses: Sequence[str | Sequence[str]],
        answers: Sequence[str],
        tasks: Sequence[str],
        metadatas: Sequence[dict],
    ) -> Scores:
        """Scores B responses, or takes the step of the last turn of each.

        Raises only if the pool is closed or no worker can start.
        """
        items = list(zip(responses, answers, tasks, metadatas, strict=True))
        with self._lock:
            self._start()
            if self._inline:
                results = [_Result(score_exact(*item)) for item in items]
            else:
                results = self._run(items)
        scores = np.array([result.score for result in results], np.float32)
        failed = np.array([result.failed for result in results], np.bool_)
        if self._threshold > 0:
            scores = (scores >= np.float32(self._threshold)).astype(np.float32)
        return Scores(
            rewards=np.where(failed, np.float32(0), scores),
            failed=failed,
            reasons=tuple(result.text if result.failed else "" for result in results),
            done=np.array([result.done for result in results], np.bool_),
            observations=tuple("" if result.failed else result.text for result in results),
        )

    def close(self) -> None:
        """Kills the workers; the pool cannot be used again."""
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if not self._inline and not self._workers:
            self._workers = [_Worker(self._arguments) for _ in range(self._count)]

    def _stop(self) -> None:
        while self._workers:
            self._workers.pop().kill()

    def _run(self, items: list[tuple]) -> list["_Result"]:
        results: list = [None] * len(items)
        queue = collections.deque(range(len(items)))
        # About four rounds per worker: few messages, and no long wait for the slowest chunk.
        size = max(1, min(MAX_CHUNK, math.ceil(len(items) / (4 * self._count))))
        try:
            while queue or any(worker.owed for worker in self._workers):
                for i, worker in enumerate(self._workers):
                    if queue and worker.ready and not worker.owed:
                        chunk = [queue.popleft() for _ in range(min(size, len(queue)))]
                        if not worker.give(chunk, items, self._timeout):
                            queue.extendleft(reversed(chunk))
                            self._replace(i)
                self._collect(results, queue)
        except BaseException:  # Ctrl-C: late reports must not be taken for the next batch's
            self._stop()
            raise
        return results

    def _collect(self, results: list, queue: collections.deque) -> None:
        """Waits for the next report or deadline; a lost worker's other answers are queued again."""
        busy = [w for w in self._workers if w.owed or not w.ready]
        pause = min((w.deadline for w in busy), default=0.0) - time.monotonic()
        # No longer than 1 s, for the case that Ctrl-C reached another thread than this one.
        wait([w.conn for w in busy], min(max(pause, 0.0), 1.0))
        for i, worker in enumerate(self._workers):
            if worker not in busy:
                continue
            for index, result in worker.read(self._timeout):
                results[index] = result
            if not worker.lost:
                continue
            if worker.owed:
                results[worker.owed.popleft()] = _Result(failed=True, text=worker.lost)
                queue.extendleft(reversed(worker.owed))
            self._replace(i)

    def _replace(self, i: int) -> None:
        self._workers[i].kill()
        self._workers[i] = _Worker(self._arguments)


def _check_limits(timeout: float, memory_mib: int, workers: int, threshold: float) -> None:
    for field, value in (("timeout", timeout), ("memory_mib", memory_mib)):
        if not 0 < value < math.inf:
            raise ValueError(f"reward.{field} must be > 0 and finite, got {value}")
    if workers < 0:
        raise ValueError(f"reward.workers must be >= 0 (0 = one per core), got {workers}")
    if not 0 <= threshold < math.inf:
        raise ValueError(f"reward.threshold must be >= 0 (0 = the raw score), got {threshold}")


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


class _Result(NamedTuple):
    """Of one response. text: the observation, or why it failed."""

    score: float = 0.0
    done: bool = True
    failed: bool = False
    text: str = ""

    def packed(self, retire: bool) -> bytes:
        head = _REPORT.pack(self.score, self.done, self.failed, retire)
        return head + self.text.encode(errors="replace")


def _load(name: str, extract: str, environment: str) -> Callable[..., _Result]:
    """The function from a response and its problem to what came of it; ValueError in one line."""
    if environment:
        make = load_environment(environment)

        def step(responses: Sequence[str], *problem) -> _Result:
            found: Step = play(make, responses, *problem)
            return _Result(float(found.reward), bool(found.done), text=found.observation)

        return step
    scorer, pattern = load_scorer(name), _compile_extract(extract)

    def score(response: str, *problem) -> _Result:
        if pattern:
            response = _extract(pattern, response)
        return _Result(0.0 if response is None else float(scorer(response, *problem)))

    return score


class _Worker:
    """The parent's side of one process: what it owes, and until when the next report is due."""

    def __init__(self, arguments: tuple):
        self.conn, theirs = Pipe()
        # The worker dies when the write end closes, that is, with this process (see _die_with).
        read_end, self._lifeline = os.pipe()
        fds = (theirs.fileno(), read_end)
        paths = [path for path in sys.path if isinstance(path, str)]
        code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import _serve as serve; "
        code += f"serve{(*fds, *arguments)!r}"
        # One thread each, no accelerator should a user's module import JAX, and the same order of
        # sets in every run, as sympy's results can depend on it.
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        variables = os.environ | one_thread | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
        variables.pop("GLIBC_TUNABLES", None)  # a limit of memory counts on freed memory leaving
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", code],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what a scorer prints joins the log
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C does not reach it, and what it starts dies with it
        )
        theirs.close()
        os.close(read_end)
        self.owed: collections.deque[int] = collections.deque()
        self.ready = False
        self.lost = ""
        self.deadline = time.monotonic() + STARTUP_S

    def give(self, chunk: list[int], items: list[tuple], timeout: float) -> bool:
        """Sends answers to score; False if the worker has died since it was last heard of."""
        if self.process.poll() is not None:
            return False
        try:
            self.conn.send([items[i] for i in chunk])
        except OSError:
            return False
        self.owed.extend(chunk)
        self.deadline = time.monotonic() + timeout
        return True

    def read(self, timeout: float) -> list[tuple[int, _Result]]:
        """The reports that came in, with their index; sets `lost` and the deadline."""
        now = time.monotonic()  # before polling: a report that waited for us is not late
        reports = []
        try:
            while self.conn.poll():
                message = self.conn.recv_bytes(_MAX_REPORT)
                *numbers, retire = _REPORT.unpack(message[: _REPORT.size])
                result = _Result(*numbers, message[_REPORT.size :].decode(errors="replace"))
                self.deadline = time.monotonic() + timeout
                if self.ready:
                    reports.append((self.owed.popleft(), result))
                elif result.failed:
                    raise RuntimeError(f"a reward worker could not start: {result.text}")
                self.ready = True
                self.lost = "retired" if retire else ""
        except (OSError, EOFError):
            self._kill_group()  # it may have closed its pipe and live on
            self.lost = f"the scorer's process died (exit code {self.process.wait()})"
        if not self.lost and now >= self.deadline:
            self.lost = f"no result within {timeout:g} s"
        if self.lost and not self.ready:
            raise RuntimeError(f"a reward worker could not start: {self.lost}")
        return reports

    def kill(self) -> None:
        self._kill_group()
        self.process.wait()
        self.conn.close()
        os.close(self._lifeline)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


# What follows runs in the workers.


def _serve(
    conn_fd: int, lifeline_fd: int, name: str, extract: str, environment: str, memory_mib: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(lifeline_fd)
    conn = Connection(conn_fd)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a line per odd answer otherwise
    try:
        judge = _load(name, extract, environment)
        if name in SCORERS:  # imports and compiled patterns; the user's function is left alone
            with contextlib.suppress(Exception):
                SCORERS[name](r"so \boxed{\frac{1}{2}}", "2", "chain_sum", {})
    except BaseException as error:
        return conn.send_bytes(_failure(error).packed(False))
    conn.send_bytes(_Result().packed(False))
    room = memory_mib << 20
    full = _virtual_bytes() + room
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            chunk = conn.recv()
            for left, item in zip(range(len(chunk) - 1, -1, -1), chunk, strict=True):
                result = _within(room, judge, item)
                # The limit is relative to what is in use, so caches that only grow (sympy's) do not
                # starve later answers; a process that has grown this much is replaced instead.
                conn.send_bytes(result.packed(not left and _virtual_bytes() > full))
    return None


def _within(room: int, judge: Callable[..., _Result], item: tuple) -> _Result:
    """What came of a response, within `room` more bytes of memory."""
    try:
        _limit_memory(_virtual_bytes() + room)
        result = judge(*item)
        if not abs(result.score) <= np.finfo(np.float32).max:
            raise ValueError(f"the score is {result.score}, not a finite number")
        return result
    except BaseException as error:  # SystemExit too: an answer may contain exit()
        return _failure(error)
    finally:
        _limit_memory(resource.RLIM_INFINITY)


def _extract(pattern: re.Pattern, response: str) -> str | None:
    last = collections.deque(pattern.finditer(response[-MAX_SEARCH:]), maxlen=1)
    found = last[0].group(1) if last else None
    return None if found is None else found.strip()


def _failure(error: BaseException) -> _Result:
    line = " ".join(f"{type(error).__name__}: {error}"[:300].split())
    return _Result(failed=True, text="out of memory" if isinstance(error, MemoryError) else line)


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
    """Has the kernel end this process when the parent's end of the pipe closes.

    By SIGIO, whose default action is to terminate: a thread could not, while a C call holds the
    interpreter lock, and PR_SET_PDEATHSIG follows the parent's *thread*, which may end earlier.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:  # it had closed before
        os._exit(1)
