"""Calls user-written functions in worker processes.

Takes the name of a function, and items; returns a `Result` for each. A policy's text can keep a
function busy forever (`9**9**9` is one C call in sympy that no signal handler interrupts), and some
functions execute it. So every item has its own process (`worker_process`), within limits. An item
that exceeds a limit fails; the others are not affected.

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
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe

from specrl_jax.sandbox import containment, linux, worker_process
from specrl_jax.sandbox.time_limit import longest
from specrl_jax.sandbox.worker_process import NO_ROOM, Result, Settings

MAX_CHUNK = 32  # answers sent to a worker at a time
STARTUP_S = 300.0  # seconds for a worker's imports; they do not count against any answer
ROOM_S = 300.0  # seconds to wait while the machine has no room for a process
GRACE_S = 60.0  # seconds beyond an answer's limit within which its worker must report
MAX_STARTS = 3  # consecutive processes that may die while starting
MAX_TRIES = 3  # workers that may end while they work on one answer

_log = logging.getLogger(__name__)


class WorkerPool(contextlib.AbstractContextManager):
    """Worker processes, whatever they run. Calls are thread-safe.

    program: module of the workers.
    executes: what may run code in answers, for the warning if nothing contains it.
    field: of the config, for the same warning.
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
        """Start the workers; their imports continue in the background."""
        for worker in self._workers:
            with contextlib.suppress(BlockingIOError):  # it is started when it is needed
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
        """Wait a second, and report it once; ChildProcessError if no process started for long."""
        if time.monotonic() - begun > ROOM_S:
            raise ChildProcessError(
                f"no reward worker could start for {ROOM_S:g} s ({error.strerror}): "
                "end other programs, or lower reward.workers"
            )
        if not self._waited:
            self._waited = True
            line = "no reward worker can start now (%s): waiting up to %g s for the machine"
            _log.warning(line, error.strerror, ROOM_S)
        stop.wait(1.0)

    def _warn(self) -> None:
        """Warn once about what code in an answer can do, if the workers may run it."""
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
    """Return the number of processes for `reward.workers`; 0: one per core, up to 16."""
    return int(workers) or min(os.cpu_count() or 1, 16)


class CallPool(WorkerPool):
    """Calls a function in worker processes; one that hangs on an item is killed and replaced.

    Takes the arguments of `WorkerPool` after its program.
    """

    def __init__(self, settings: Settings, count: int, executes: str, field: str):
        super().__init__(worker_process.__name__, settings, count, executes, field)
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def call(self, items: list[tuple]) -> list[Result]:
        """Return the results of items, one batch at a time.

        Raises RuntimeError if the pool is closed, ChildProcessError if no worker starts.
        """
        with self._lock:
            self._check_open()
            results = self._run(items)
            self._warn()
            return results

    def _run(self, items: list[tuple]) -> list[Result]:
        """Use a thread per worker, which passes it one chunk of items after another."""
        # About four chunks per worker: few messages, and no long wait for the slowest chunk.
        size = max(1, min(MAX_CHUNK, len(items) // (4 * len(self._workers))))
        chunks = [items[first : first + size] for first in range(0, len(items), size)]
        stop = threading.Event()

        def call(chunk: list[tuple]) -> list[Result]:
            worker = self._idle.get()
            results = []
            tries = 0
            begun = time.monotonic()
            try:
                while len(results) < len(chunk) and not stop.is_set():
                    try:
                        new = worker.call(chunk[len(results) :])
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
            return [result for results in threads.map(call, chunks) for result in results]
        except BaseException:  # Ctrl-C: no thread waits for its worker any longer
            stop.set()
            self._kill()
            raise
        finally:
            threads.shutdown(cancel_futures=True)


def _raise_if_short(code: int | None) -> None:
    """Raise BlockingIOError if a worker has ended with the exit code `NO_ROOM`."""
    if code == NO_ROOM:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Worker:
    """Parent's side of one process, which is replaced when it has ended.

    program: its module, with a function `serve`.
    """

    def __init__(self, program: str, settings: Settings):
        self.conn: Connection | None = None  # to the process, once it has been started
        self._program = program
        self._settings = settings
        self._process: subprocess.Popen | None = None
        self._ready = False
        self.gaps: list[str] = []  # what code in an answer can do, as reported by a `Cell`
        self._asked = 0  # answers, since the first process: the number of the next one

    def ensure_started(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()

    def call(self, items: list[tuple]) -> list[Result]:
        """Return the results of the first items, up to a missing or mismatched report.

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
        """End the process and everything it started; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return None
        self._lifeline.close()  # it then ends everything itself
        try:
            return process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def _receive(self, seconds: float) -> list:
        """Return the next report; TimeoutError if none comes, EOFError after the process."""
        if not self.conn.poll(seconds):
            raise TimeoutError(f"no report within {seconds:g} s")
        return json.loads(self.conn.recv_bytes())

    def ensure_ready(self) -> None:
        """Wait for a process's imports; start another one if it dies in them.

        ChildProcessError if none can be started, BlockingIOError if the machine currently has no
        room for it.
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
        # One thread each; no accelerator, in case a user's module imports JAX; one order of sets in
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
                stdout=2,  # what it prints joins the log
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        except OSError as error:
            if linux.is_short(error):
                raise BlockingIOError(*error.args) from error
            raise
        theirs.close()
        read_end.close()
