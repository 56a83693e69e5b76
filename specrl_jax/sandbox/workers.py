"""Scores batches of responses in worker processes.

Takes a scorer by name, and texts; gives `Rewards`. A policy's text can keep a
scorer busy for ever (`9**9**9` is one C call in sympy that no signal handler interrupts), and some
scorers execute it. So every answer is scored in a process of its own (`worker_process`), within
limits. An answer that breaks a limit fails with reward 0; the others are not affected.

The workers are started by command line, not by `multiprocessing`: nothing is forked under JAX's
threads, and the parent's `__main__` is not imported again.
"""

import contextlib
import errno
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import Connection, Pipe

import numpy as np

from specrl_jax.rewards.scorers import find_scorer, reads_answer_part
from specrl_jax.sandbox import containment, linux, worker_process
from specrl_jax.sandbox.readable import parse_readable
from specrl_jax.sandbox.time_limit import longest
from specrl_jax.sandbox.worker_process import NO_ROOM, Result, Settings

MAX_CHUNK = 32  # answers sent to a worker at once
STARTUP_S = 300.0  # seconds for a worker's imports; they do not count against any answer
ROOM_S = 300.0  # seconds that a machine without room for a process is waited for
GRACE_S = 60.0  # seconds beyond an answer's limit in which its worker must tell what came of it
MAX_STARTS = 3  # processes that may die while starting, one after another
MAX_TRIES = 3  # workers that may end while they score one answer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rewards:
    """Rewards of B responses, in the order they were given."""

    # float32 [B], 0 where failed; of an episode what its turns before had been paid
    rewards: np.ndarray
    failed: np.ndarray  # bool [B]: out of time or memory; the scorer raised, died, gave no number
    reasons: tuple[str, ...]  # B texts, "" unless failed
    # The rewards of each function of a sum, float32 [B], before weights and threshold.
    by_function: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def make_whole(cls, scores: np.ndarray, reasons: Sequence[str], **more) -> "Rewards":
        """Make the rewards of whole responses from their scores, of which some failed."""
        failed = np.array([bool(reason) for reason in reasons], np.bool_)
        rewards = np.where(failed, 0, scores).astype(np.float32)
        return cls(rewards, failed, tuple(reasons), **more)

    @classmethod
    def joined(cls, parts: Sequence["Rewards"]) -> "Rewards":
        return cls(
            rewards=np.concatenate([x.rewards for x in parts]),
            failed=np.concatenate([x.failed for x in parts]),
            reasons=tuple(chain(*(x.reasons for x in parts))),
            by_function={
                name: np.concatenate([x.by_function[name] for x in parts])
                for name in parts[0].by_function
            },
        )


def apply_threshold(scores: np.ndarray, threshold: float) -> np.ndarray:
    """Rewards of scores, float32 [B]: with a threshold > 0 1 from there on, else 0."""
    return (scores >= np.float32(threshold)).astype(np.float32) if threshold > 0 else scores


class WorkerPool(contextlib.AbstractContextManager):
    """Worker processes, whatever they do. Calls are safe from several threads.

    program: module of the workers.
    executes: what may run code in answers, for the warning where nothing contains it.
    field: of the config, for the same.
    """

    def __init__(self, program: str, settings: Settings, count: int, executes: str, field: str):
        self._workers = [Worker(program, settings) for _ in range(count)]
        self._executes = executes
        self._field = field
        self._warned = False
        self._waited = False
        self._lock = threading.RLock()
        self._closed = False

    def __exit__(self, *_) -> None:
        self.close()

    def warm_up(self) -> None:
        """Start the workers; their imports go on in the background."""
        for worker in self._workers:
            with contextlib.suppress(BlockingIOError):  # it is started once it is needed
                worker.ensure_started()

    def close(self) -> None:
        """Kill the workers; the pool cannot be used again."""
        with self._lock:
            self._closed = True
            self._kill()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the reward pool is closed")

    def _wait_for_room(self, error: OSError, begun: float, stop: threading.Event) -> None:
        """Wait a second, and say so once; ChildProcessError where no process started for long."""
        if time.monotonic() - begun > ROOM_S:
            raise ChildProcessError(
                f"no reward worker could start for {ROOM_S:g} s ({error.strerror}): "
                "end other programs, or set reward.workers lower"
            )
        if not self._waited:
            self._waited = True
            line = "no reward worker can start now (%s): waiting up to %g s for the machine"
            _log.warning(line, error.strerror, ROOM_S)
        stop.wait(1.0)

    def _warn(self) -> None:
        """Say once what code in an answer can do, where the workers may run it."""
        gaps = next((worker.gaps for worker in self._workers if worker.gaps), [])
        if gaps and self._executes and not self._warned:
            self._warned = True
            _log.warning(
                "%s: this system cannot contain code in answers: it can %s; run by %s",
                self._field,
                ", ".join(gaps),
                self._executes,
            )

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()


def num_workers(workers: int) -> int:
    """Return the number of processes that `reward.workers` asks for; 0: one per core, up to 16."""
    return int(workers) or min(os.cpu_count() or 1, 16)


class RewardPool(WorkerPool):
    """Scores batches, one at a time; a worker that an answer hangs is killed and replaced.

    name: of `SCORERS`, or module:function.
    timeout: CPU seconds per answer, see `time_limit`.
    memory_mib: MiB each process of an answer may allocate (Linux only).
    workers: number of processes; 0: one per core, at most 16.
    threshold: > 0: the reward is 1 where the score reaches it, else 0.
    extract: a regular expression; group 1 of its last match in the answer part is the answer (no
      match: reward 0).
    format: the regular expression of the scorer `format`; "": `scorers.FORMAT`.
    readable: paths that code in answers may read besides Python and libraries, with : between them.
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
        format: str = "",
        readable: str = "",
    ):
        loaded = worker_process.load(name, extract, format)  # a mistake is raised here
        self._score_here = loaded.score
        self._reads_part = reads_answer_part(name, extract)
        self._threshold = float(threshold)
        # A user's pattern needs a process, as it may backtrack for ever.
        here = not (find_scorer(name).needs_process or extract)
        limits = (float(timeout), int(memory_mib))
        texts = (extract, format, parse_readable(readable))
        settings = Settings(name, *limits, loaded.contained, *texts)
        executes = name if loaded.alone is None else ", ".join(sorted(loaded.alone))
        count = 0 if here else num_workers(workers)
        super().__init__(worker_process.__name__, settings, count, executes, "reward.name")
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def score(
        self,
        responses: Sequence[str],
        answers: Sequence[str],
        tasks: Sequence[str],
        metadatas: Sequence[dict],
        parts: Sequence[str | None] | None = None,
        ended: Sequence[bool] | None = None,
    ) -> Rewards:
        """Score B responses.

        parts: the responses' answer parts, for scorers that read no more; None: a response without
          an answer. Left out, they are the whole responses.
        ended: whether each response came to its end, for functions that ask. Left out, all did.
        Raises RuntimeError where the pool is closed, ChildProcessError where no worker starts.
        """
        texts = parts if self._reads_part and parts is not None else responses
        ended = [True] * len(responses) if ended is None else ended
        items = list(zip(texts, answers, tasks, metadatas, ended, strict=True))
        with self._lock:
            self._check_open()
            if self._workers:
                results = self._run(items)
                self._warn()
            else:
                results = [self._score_here(*item) for item in items]
        scores = np.array([result.reward for result in results], np.float32)
        rewards = apply_threshold(scores, self._threshold)
        return Rewards.make_whole(rewards, [result.failure for result in results])

    def _run(self, items: list[tuple]) -> list[Result]:
        """A thread for each worker hands it one chunk of answers after another."""
        # About four chunks per worker: few messages, and no long wait for the slowest chunk.
        size = max(1, min(MAX_CHUNK, len(items) // (4 * len(self._workers))))
        chunks = [items[first : first + size] for first in range(0, len(items), size)]
        stop = threading.Event()

        def score(chunk: list[tuple]) -> list[Result]:
            worker = self._idle.get()
            results = []
            tries = 0
            begun = time.monotonic()
            try:
                while len(results) < len(chunk) and not stop.is_set():
                    try:
                        new = worker.score(chunk[len(results) :])
                    except BlockingIOError as error:
                        self._wait_for_room(error, begun, stop)
                        continue
                    begun = time.monotonic()
                    tries = 1 if new else tries + 1
                    if tries == MAX_TRIES:
                        new = [Result(failure=f"{tries} reward workers ended while scoring it")]
                    results += new
            finally:
                self._idle.put(worker)
            return results

        threads = ThreadPoolExecutor(len(self._workers))
        try:
            return [result for results in threads.map(score, chunks) for result in results]
        except BaseException:  # Ctrl-C: no thread waits for its worker any longer
            stop.set()
            self._kill()
            raise
        finally:
            threads.shutdown(cancel_futures=True)


def _raise_if_short(code: int | None) -> None:
    """Raise BlockingIOError where a worker has ended with the exit code of `NO_ROOM`."""
    if code == NO_ROOM:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Worker:
    """Parent's side of one process; another one takes its place when it has ended.

    program: its module, with a function `serve`.
    """

    def __init__(self, program: str, settings: Settings):
        self.conn: Connection | None = None  # to the process, once it has been started
        self._program = program
        self._settings = settings
        self._process: subprocess.Popen | None = None
        self._ready = False
        self.gaps: list[str] = []  # what code in an answer can do, as a `Cell` says
        self._asked = 0  # answers, since the first process: the number of the next one

    def ensure_started(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()

    def score(self, items: list[tuple]) -> list[Result]:
        """Return the results of the first answers, up to a missing report or another answer's.

        The process is replaced after such a report. Raises what `ensure_ready` raises.
        """
        self.ensure_ready()
        results = []
        with contextlib.suppress(OSError, EOFError, ValueError, TimeoutError):
            first = self._asked
            self._asked += len(items)
            self.conn.send((first, items))
            for expected in range(first, self._asked):
                number, *result = self._receive(longest(self._settings.timeout) + GRACE_S)
                if number != expected:
                    raise ValueError("the report of another answer")
                results.append(Result(*result))
            return results
        code = self.kill()
        if not results:
            _raise_if_short(code)
        return results

    def kill(self) -> int | None:
        """End the process and what it has started; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._lifeline.close()  # it ends all by itself
        try:
            return process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def _receive(self, seconds: float) -> list:
        """Return the next report; TimeoutError where none comes, EOFError after the process."""
        if not self.conn.poll(seconds):
            raise TimeoutError(f"no report within {seconds:g} s")
        return json.loads(self.conn.recv_bytes())

    def ensure_ready(self) -> None:
        """Wait for the imports of a process; start another one where it dies in them.

        ChildProcessError where none can be started, BlockingIOError where the machine has no room
        for it now.
        """
        for _ in range(MAX_STARTS):
            self.ensure_started()
            if self._ready:
                return
            try:
                failure, gaps = self._receive(STARTUP_S)
            except (OSError, EOFError) as error:
                late = isinstance(error, TimeoutError)
                code = self.kill()
                _raise_if_short(code)
                reason = str(error) if late else f"the process died (exit code {code})"
                continue
            if failure:
                raise ChildProcessError(f"a reward worker could not start: {failure}")
            self._ready = True
            self.gaps = gaps
            return
        raise ChildProcessError(f"a reward worker could not start, {MAX_STARTS} times: {reason}")

    def _start(self) -> None:
        self.kill()
        self._ready = False
        self.conn, theirs = Pipe()
        # The process ends when the write end closes, which it does with this process.
        read_end, self._lifeline = Pipe(duplex=False)
        fds = (theirs.fileno(), read_end.fileno())
        paths = [path for path in sys.path if isinstance(path, str)]
        code = f"import sys; sys.path[:] = {paths!r}; from {self._program} import serve; "
        code += f"serve{(*fds, *self._settings)!r}"
        # One thread each; no accelerator, should a user's module import JAX; one order of sets in
        # every run, as sympy's results can depend on it; and one encoding, as what an answer or a
        # reward prints, reads and writes must not depend on the user's locale.
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        own = dict(os.environ)
        variables = containment.clean_environment(own) if self._settings.contained else own
        variables |= one_thread | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
        variables |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8"}
        variables.pop("GLIBC_TUNABLES", None)  # huge pages would count against the memory limit
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", code],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a scorer prints joins the log
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        except OSError as error:
            if linux.is_short(error):
                raise BlockingIOError(*error.args) from error
            raise
        theirs.close()
        read_end.close()
