"""Several processes as one run: they start together, and they end together.

JAX's coordination service connects them. A process that fails says so there, and one that gives no
sign of life is noticed: the others end with one line that names it. Without that they would wait
for it in a collective, for ever on some accelerators.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import jax

from specrl_jax import cli, hosts

BEAT_S = 2.0  # seconds between signs of life
SILENCE_S = 30.0  # without one, after which a process counts as lost
BROKEN_SILENCE_S = 8.0  # the same once a collective has failed
GRACE_S = 10.0  # in which a process that hears of a failure may end by itself
JOIN_S = 300  # until all processes have started
AUTO = "auto"  # a coordinator that Slurm, a TPU pod, Open MPI or Kubernetes name
_REQUEST_MS = 3_600_000  # of one request that waits for a failure
_SILENT = "ended without a word, or hangs; start all processes again to go on"
_ALIVE, _FAILED, _GONE = "specrl_jax/alive/", "specrl_jax/failed", "gone"


@contextlib.contextmanager
def one_run(coordinator: str = "", num_processes: int = 0, process_id: int = -1) -> Iterator[None]:
    """Joins this process to the run's others, if there are any, until the `with` block ends.

    coordinator: HOST:PORT of process 0, any free port there; or `AUTO`; "" is `AUTO` in a step of
    Slurm with several tasks or where a TPU pod's environment names several workers.
    num_processes, process_id: of the run, and this one's from 0; with HOST:PORT. 1 process stays
    alone anywhere.

    An error that leaves the block ends this process here, with its message and exit status, and
    then the others. Processes other than the primary print nothing but errors. Raises ValueError in
    one line for arguments that do not fit, or where the processes do not find each other.
    """
    if not _join(coordinator, num_processes, process_id):
        yield
        return
    watch = _Watch(_client(), jax.process_index(), jax.process_count())
    if not hosts.is_primary():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - to the process's end
    try:
        yield
        hosts.gather(None)  # the others may have more to write
    except BaseException as error:
        watch.end(error)
    watch.close()
    jax.distributed.shutdown()


def _join(coordinator: str, num_processes: int, process_id: int) -> bool:
    """Whether this process is one of several; it has joined them then."""
    if num_processes == 1:
        return False
    by_hand = coordinator not in ("", AUTO)
    if by_hand and not 0 <= process_id < num_processes:
        raise ValueError(
            "--coordinator=HOST:PORT must come with --num_processes=N and --process_id from 0 to "
            f"N - 1, got {num_processes} and {process_id}"
        )
    if not by_hand and (num_processes or process_id >= 0):
        raise ValueError("--num_processes and --process_id must come with --coordinator=HOST:PORT")
    if not coordinator and not _in_cluster():
        return False
    # Its handler would take SIGTERM, which would then not end a process outside its loop.
    jax.config.update("jax_enable_preemption_service", False)
    given = {}
    if by_hand:
        given = {"num_processes": num_processes, "process_id": process_id}
        given["coordinator_address"] = coordinator
    print(f"joining the run's other processes, at most {JOIN_S} s", flush=True)
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=round(2 * SILENCE_S),  # where this file notices nothing
            shutdown_timeout_seconds=30,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the processes of the run could not be joined: {reason}") from error
    return True


def _in_cluster() -> bool:
    """Whether Slurm or a TPU pod's environment names several processes."""
    pod = [os.environ.get(name, "") for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")]
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 or any("," in x for x in pod)


def _client():
    # JAX has no public door to the service's messages; Orbax goes the same way.
    from jax._src import distributed

    return distributed.global_state.client


class _Watch:
    """Tells the others of this process, and this process of the others."""

    def __init__(self, client, process: int, count: int):
        """client: of JAX's coordination service. process: this one, of `count`."""
        self._client, self._me, self._count = client, process, count
        # Of each process its last sign of life, and when that was new.
        self._seen = {process: ("", time.monotonic()) for process in range(self._count)}
        self._ending, self._closed = threading.Event(), threading.Event()
        self._beat("0")
        for work in (self._beats, self._listen):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        """All is done: no process is missed any more."""
        self._ending.set()
        self._closed.set()
        self._beat(_GONE)

    def end(self, error: BaseException) -> NoReturn:
        """Ends this process, for its own error or for the failure of another that led to it."""
        failure = self._failure_elsewhere() if _is_lost_connection(error) else None
        self._ending.set()
        if failure:
            self._leave(*failure)
        code = _show(error)
        line = (str(error).splitlines() or [""])[0] or type(error).__name__
        self._announce(f"{self._name(self._me)} failed: {line}", code)
        self._exit(code)

    # Signs of life ------------------------------------------------------------------------------

    def _beats(self) -> None:
        number = 0
        while not self._closed.wait(BEAT_S):
            number += 1
            self._beat(str(number))
            with contextlib.suppress(Exception):  # process 0 is lost: `_listen` notices
                if self._me == 0 and (lost := self._silent(SILENCE_S)):
                    self._announce(f"{lost[0]} {_SILENT}", 1)

    def _beat(self, sign: str) -> None:
        with contextlib.suppress(Exception):
            sign = f"{sign} {socket.gethostname()}"
            self._client.key_value_set(f"{_ALIVE}{self._me}", sign, allow_overwrite=True)

    def _silent(self, seconds: float) -> list[str]:
        """Names of other processes that gave no sign of life for so long and did not leave."""
        now = time.monotonic()
        for key, sign in self._client.key_value_dir_get(_ALIVE):
            process = int(key.rpartition("/")[2])
            if self._seen[process][0] != sign:
                self._seen[process] = sign, now
        return [
            self._name(process)
            for process, (sign, when) in self._seen.items()
            if process != self._me and not sign.startswith(_GONE) and now - when > seconds
        ]

    def _name(self, process: int) -> str:
        own = f"{process} {socket.gethostname()}"
        host = (own if process == self._me else self._seen[process][0]).partition(" ")[2]
        return f"process {process} of {self._count}" + (f" on {host}" if host else "")

    # Failures -----------------------------------------------------------------------------------

    def _announce(self, line: str, code: int) -> None:
        """To all; the first failure counts."""
        with contextlib.suppress(Exception):
            self._client.key_value_set(_FAILED, json.dumps([line, code]))

    def _listen(self) -> None:
        """Waits for a failure, and ends this process unless it is ending by itself."""
        while not self._closed.is_set():
            try:
                failure = json.loads(self._client.blocking_key_value_get(_FAILED, _REQUEST_MS))
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                if not self._ending.is_set():
                    self._leave_without_primary()
            else:
                if not self._ending.wait(GRACE_S):
                    self._leave(*failure)
            return

    def _failure_elsewhere(self) -> tuple[str, int] | None:
        """The failure of another process that broke a collective here; None: there was none."""
        end = time.monotonic() + BROKEN_SILENCE_S + 2 * BEAT_S
        while time.monotonic() < end:
            try:
                return tuple(json.loads(self._client.key_value_try_get(_FAILED)))
            except Exception as error:
                if "NOT_FOUND" not in str(error):
                    self._leave_without_primary()
            with contextlib.suppress(Exception):
                if lost := self._silent(BROKEN_SILENCE_S):
                    return f"{lost[0]} {_SILENT}", 1
            time.sleep(BEAT_S / 4)
        return None

    def _leave_without_primary(self) -> NoReturn:
        """At once: JAX is about to abort this process, with a stack trace."""
        print(f"error: {self._name(0)} {_SILENT}", file=sys.stderr, flush=True)
        os._exit(1)

    def _leave(self, line: str, code: int) -> NoReturn:
        print(f"error: {line}", file=sys.stderr, flush=True)
        self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        """Ends the process without JAX's own farewell, which waits for all processes."""
        self._beat(_GONE)
        if self._me == 0:  # the others hear of the failure through it: they leave first
            end = time.monotonic() + GRACE_S + 2 * BEAT_S
            while time.monotonic() < end and not self._is_alone():
                time.sleep(BEAT_S / 4)
        sys.stdout.flush()
        os._exit(code)

    def _is_alone(self) -> bool:
        with contextlib.suppress(Exception):
            silent = len(self._silent(BROKEN_SILENCE_S))
            left = sum(sign.startswith(_GONE) for sign, _ in self._seen.values())
            return silent + left >= self._count
        return True


def _is_lost_connection(error: BaseException) -> bool:
    """Whether another process may be the cause: so fail collectives, and Orbax's barriers."""
    words = ("Gloo", "coordination", "DEADLINE_EXCEEDED", "UNAVAILABLE", "Barrier")
    return isinstance(error, jax.errors.JaxRuntimeError) or any(x in str(error) for x in words)


def _show(error: BaseException) -> int:
    """Prints an error as the programs in launch/ do; their exit status."""
    try:
        with cli.user_errors():
            raise error
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
