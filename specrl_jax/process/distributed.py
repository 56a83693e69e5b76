"""Several processes as one run: they start together and end together.

JAX's coordination service connects them. It notices when a process ends or stops responding, and
ends the others. If a collective fails first, its error does.
"""

import contextlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator

import jax

from specrl_jax import hosts
from specrl_jax.command_line import cli

SILENCE_S = 60  # seconds without a heartbeat after which JAX considers a process lost
GRACE_S = 5.0  # for the others to report what ended them, before process 0 ends them too
JOIN_S = 300  # until all processes have started
AUTO = "auto"  # a coordinator named by Slurm, a TPU pod, Open MPI or Kubernetes
_LOST = "another process of the run has ended, see its output; start all processes again to resume"


@contextlib.contextmanager
def one_run(coordinator: str = "", num_processes: int = 0, process_id: int = -1) -> Iterator[None]:
    """Join the run's other processes, if there are any, until the `with` block ends.

    coordinator: HOST:PORT of process 0, any free port there; or `AUTO`; "" means `AUTO` in a Slurm
    step with several tasks or if a TPU pod's environment names several workers.
    num_processes, process_id: of the run, and this one's from 0; with HOST:PORT. 1 process always
    runs alone.

    An error that leaves the block ends this process immediately, with its message and exit status:
    a shutdown would wait for the others. Processes other than the primary print only errors.
    Raises a one-line ValueError for invalid arguments, or if the processes cannot connect.
    """
    if not _join(coordinator, num_processes, process_id):
        yield
        return
    if not hosts.is_primary():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until process end
    try:
        yield
        hosts.gather(None)  # the others may have more to write
    except BaseException as error:
        code = _show(error)
        if hosts.is_primary():
            time.sleep(GRACE_S)
        os._exit(code)
    jax.distributed.shutdown()


def _join(coordinator: str, num_processes: int, process_id: int) -> bool:
    """Join the other processes of the run; return False if there are none."""
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
    if by_hand and process_id == 0:
        _check_port(coordinator)
    # Its handler would catch SIGTERM, which would then not end a process outside its loop.
    jax.config.update("jax_enable_preemption_service", False)
    print(f"joining the run's other processes, at most {JOIN_S} s", flush=True)
    try:
        jax.distributed.initialize(
            coordinator if by_hand else None,
            num_processes if by_hand else None,
            process_id if by_hand else None,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=SILENCE_S,
            shutdown_timeout_seconds=30,
        )
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the processes of the run could not be joined: {reason}") from error
    return True


def _check_port(coordinator: str) -> None:
    """Raise ValueError if this machine cannot listen on the port of HOST:PORT."""
    port = coordinator.rpartition(":")[2]
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator must be HOST:PORT, got {coordinator!r}")
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            tried.bind(("", int(port)))
        except OSError as error:
            raise ValueError(
                f"--coordinator={coordinator}: port {port} cannot be used here "
                f"({error.strerror}); give all processes another"
            ) from error


def _in_cluster() -> bool:
    """Return True if Slurm or a TPU pod's environment names several processes."""
    pod = [os.environ.get(name, "") for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")]
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1 or any("," in x for x in pod)


def _is_lost_connection(error: BaseException) -> bool:
    """Return True if another process may be the cause, as in collectives and Orbax's barriers."""
    words = ("Gloo", "coordination", "DEADLINE_EXCEEDED", "UNAVAILABLE", "Barrier", "barrier")
    return isinstance(error, jax.errors.JaxRuntimeError) or any(x in str(error) for x in words)


def _show(error: BaseException) -> int:
    """Print an error as the programs in launch/ do; return their exit status."""
    if _is_lost_connection(error):
        first = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"error: {_LOST} ({first})", file=sys.stderr, flush=True)
        return 1
    try:
        with cli.user_errors():
            raise error
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
