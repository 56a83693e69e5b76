"""Scores batches of responses in worker processes.

Takes a scorer or an environment by name, and texts; gives `Scores`. A policy's text can keep a
scorer busy for ever: `9**9**9` is one C call in sympy that no signal handler interrupts. So every
answer has limits of wall-clock time and memory. An answer that breaks a limit fails with reward 0;
the others are not affected. This is no security boundary.

The workers are started by command line, not by `multiprocessing`: nothing is forked under JAX's
threads, and the parent's `__main__` is not imported again.
"""

import collections
import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Pipe, wait

import numpy as np

from specrl_jax.rewards import worker_process
from specrl_jax.rewards.scorers import score_exact
from specrl_jax.rewards.worker_process import MAX_REPORT, Result

MAX_CHUNK = 32  # answers sent to a worker at once
STARTUP_S = 300.0  # seconds for a worker's imports; they do not count against any answer


@dataclasses.dataclass(frozen=True)
class Scores:
    """The rewards of B responses, in the order they were given."""

    rewards: np.ndarray  # float32 [B], 0 where failed
    failed: np.ndarray  # bool [B]: out of time or memory; the scorer raised, died, gave no number
    reasons: tuple[str, ...]  # B texts, "" unless failed
    done: np.ndarray  # bool [B]: the episode is over; always so without an environment
    observations: tuple[str, ...]  # B texts: the environment's answers where not done


class RewardPool(contextlib.AbstractContextManager):
    """Scores batches; a worker that an answer hangs is killed and replaced.

    Calls are safe from several threads; batches are scored one at a time.

    name: of `SCORERS`, or module:function.
    timeout: wall-clock seconds per answer.
    memory_mib: MiB an answer may allocate (Linux only).
    workers: number of processes; 0: one per core, at most 16.
    threshold: > 0: the reward is 1 where the score reaches it, else 0.
    extract: a regular expression; group 1 of its last match is the answer (no match: reward 0).
    environment: of `ENVIRONMENTS`, or module:Class; it takes the place of the scorer, and a
      response is then the texts of an episode's turns so far.
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
        worker_process.load(name, extract, environment)  # a mistake is raised here
        self._arguments = (name, extract, environment, int(memory_mib))
        self._timeout = float(timeout)
        self._threshold = float(threshold)
        self._count = int(workers) or min(os.cpu_count() or 1, 16)
        # String equality is linear and cannot fail: it needs no process. A user's pattern does, as
        # it may backtrack for ever.
        self._inline = name == "exact" and not extract and not environment
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def __exit__(self, *_) -> None:
        self.close()

    def warm_up(self, *, wait_ready: bool = True) -> None:
        """Start the workers; with `wait_ready=False` their imports go on in the background."""
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
        """Score B responses, or take the step of each episode's last turn.

        Raises RuntimeError where the pool is closed or a worker cannot start.
        """
        items = list(zip(responses, answers, tasks, metadatas, strict=True))
        with self._lock:
            self._start()
            if self._inline:
                results = [Result(score_exact(*item)) for item in items]
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
        """Kill the workers; the pool cannot be used again."""
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

    def _run(self, items: list[tuple]) -> list["Result"]:
        results: list = [None] * len(items)
        queue = collections.deque(range(len(items)))
        # About four chunks per worker: few messages, and no long wait for the slowest chunk.
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
        """Wait for the next report or deadline; queue a lost worker's other answers again."""
        busy = [w for w in self._workers if w.owed or not w.ready]
        pause = min((w.deadline for w in busy), default=0.0) - time.monotonic()
        # At most 1 s: Ctrl-C may have reached another thread than this one.
        wait([w.conn for w in busy], min(max(pause, 0.0), 1.0))
        for i, worker in enumerate(self._workers):
            if worker not in busy:
                continue
            for index, result in worker.read(self._timeout):
                results[index] = result
            if not worker.lost:
                continue
            if worker.owed:
                results[worker.owed.popleft()] = Result(failed=True, text=worker.lost)
                queue.extendleft(reversed(worker.owed))
            self._replace(i)

    def _replace(self, i: int) -> None:
        self._workers[i].kill()
        self._workers[i] = _Worker(self._arguments)


class _Worker:
    """The parent's side of one process."""

    def __init__(self, arguments: tuple):
        self.conn, theirs = Pipe()
        # The worker dies when the write end closes, which it does with this process.
        read_end, self._lifeline = os.pipe()
        fds = (theirs.fileno(), read_end)
        paths = [path for path in sys.path if isinstance(path, str)]
        code = f"import sys; sys.path[:] = {paths!r}; from {worker_process.__name__} import serve; "
        code += f"serve{(*fds, *arguments)!r}"
        # One thread each; no accelerator, should a user's module import JAX; and one order of sets
        # in every run, as sympy's results can depend on it.
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        variables = os.environ | one_thread | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
        variables.pop("GLIBC_TUNABLES", None)  # freed memory must leave the process, for the limit
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
        self.owed: collections.deque[int] = collections.deque()  # indices of answers it was given
        self.ready = False
        self.lost = ""  # why it must be replaced
        self.deadline = time.monotonic() + STARTUP_S  # of the next report

    def give(self, chunk: list[int], items: list[tuple], timeout: float) -> bool:
        """Send answers to score; False if the worker has died."""
        if self.process.poll() is not None:
            return False
        try:
            self.conn.send([items[i] for i in chunk])
        except OSError:
            return False
        self.owed.extend(chunk)
        self.deadline = time.monotonic() + timeout
        return True

    def read(self, timeout: float) -> list[tuple[int, Result]]:
        """(index, result) of the reports that came in; sets `lost` and the deadline."""
        now = time.monotonic()  # before polling: a report that has waited is not late
        reports = []
        try:
            while self.conn.poll():
                result, retire = Result.unpack(self.conn.recv_bytes(MAX_REPORT))
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
