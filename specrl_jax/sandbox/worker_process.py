"""Program of a worker: a function is called in processes that end after the call.

A worker is a guard, which runs nothing but this file, and its child, the template: it has imported
the function by name and never calls it. The template forks a process that drops what it does not
need (`containment`), calls, reports and ends; everything that it started ends with it. If the
function may execute an answer's text, each answer has its own process: it cannot reach another
answer, the template or the pipe to the run. `workers` is the other end of that pipe. Other programs
have their own templates, whose processes may last longer. No JAX.
"""

import contextlib
import gc
import itertools
import json
import mmap
import os
import pkgutil
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, BinaryIO, NamedTuple, NoReturn, Protocol

from specrl_jax.inputs import printable
from specrl_jax.sandbox import containment, linux
from specrl_jax.sandbox.time_limit import TimeLimit

MAX_REPORT = 2**18  # bytes
MAX_FAILURE = 300  # characters of a failure's reason
CONTAINED = (  # after a system error in a user's own function or class
    " (a contained reward has no network, an empty folder and only the files of reward.readable: "
    "see contained = False in docs/extending.md)"
)
MAX_PRINTED = 2_000  # bytes that an answer may add to the log
MAX_LINES_PRINTED = 5  # lines of a worker's answers in the log
_LINES_PRINTED = mmap.mmap(-1, 1)  # their number; shared with forked processes
NO_ROOM = 75  # exit code: the machine has no room for a process (EX_TEMPFAIL)


class Result(NamedTuple):
    """Value that a process reports for an item, or why there is none."""

    value: Any = None  # plain data; None if failed
    failure: str = ""  # why there is no value, in one printable line

    def to_line(self) -> bytes:
        """Return one line of JSON, which can be read without trusting the process that wrote it."""
        return json.dumps(self, ensure_ascii=False).encode(errors="replace") + b"\n"

    @staticmethod
    def from_line(line: bytes, check: Callable[[Any], Any]) -> "Result":
        """Read the line of `to_line`; return a failure if it is anything else.

        check: returns the value of plain data; raises if the data are not a value.
        """
        try:
            value, failure = json.loads(line)
            if isinstance(failure, str):
                failure = printable(failure[:MAX_FAILURE])
                return Result(None if failure else check(value), failure)
        except Exception:  # also RecursionError, of a thousand brackets
            pass
        return Result(failure="the scorer's process sent no valid report")


class Settings(NamedTuple):
    """Arguments that a worker is started with."""

    prepare: str  # module:function that imports and returns what the worker runs
    arguments: tuple[str, ...]  # of that function
    timeout: float  # CPU seconds an answer may take, see `time_limit`
    memory_mib: int  # MiB an answer may allocate
    contained: bool  # False: the code is trusted
    readable: str = ""  # of `parse_readable`


class Loaded(Protocol):
    """Function that a worker calls, as `Settings.prepare` returns it."""

    starts_program: bool  # for each answer, which must not find anything in the worker's memory
    hint: str  # appended to the reason of a system error

    def call(self, *item) -> Any:
        """Return the value of an item, plain data, in a separate process."""

    def check(self, value: Any) -> Any:
        """Return a value reported by such a process; raise if it is invalid."""

    def may_share(self, *item) -> bool:
        """Return whether an item may share its process with others: its text is not executed."""


# The guard ----------------------------------------------------------------------------------------


def serve(conn_fd: int, lifeline_fd: int, *settings) -> NoReturn:
    """Serve until the parent closes its ends of the pipe and of the lifeline, or is gone."""
    guard(Template, conn_fd, lifeline_fd, Settings(*settings))


def guard(
    make_template: Callable[..., "Template"], conn_fd: int, lifeline_fd: int, settings: Settings
) -> NoReturn:
    """Guard a template, and end everything it started once either end or the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks = containment.count_tasks()
    scratch = tempfile.mkdtemp(prefix="specrl-reward-")
    user = linux.own_user()
    alive, held = os.pipe()  # the second is the template's: it closes when the template ends
    try:
        namespaces = linux.enter_namespaces() if settings.contained else None
        template = linux.fork()
    except BlockingIOError:
        os.rmdir(scratch)
        os._exit(NO_ROOM)
    if template == 0:
        linux.die_with_parent()
        os.close(lifeline_fd)
        os.close(alive)
        memory = settings.memory_mib << 20
        limits = (memory, namespaces, tasks, user, settings.readable)
        cell = partial(containment.Cell, scratch, *limits)
        make_template(conn_fd, held, settings).serve(cell)
    os.close(conn_fd)
    os.close(held)
    linux.adopt_orphans()
    select.select([lifeline_fd, alive], [], [])
    code = 1
    with contextlib.suppress(TimeoutError):
        code = containment.end_children(template)
    with contextlib.suppress(OSError, RecursionError):
        containment.remove_folder(scratch)
    os._exit(code if code >= 0 else 128 - code)  # as a shell reports a signal


# The template -------------------------------------------------------------------------------------


class Template:
    """Calls the function with what it receives, in processes forked from this one."""

    def __init__(self, conn_fd: int, held_fd: int, settings: Settings):
        self._conn = Connection(conn_fd)
        self._held_fd = held_fd
        self._settings = settings

    def serve(self, make_cell: Callable[[], containment.Cell]) -> NoReturn:
        """Report how the start went, then the results of every batch, until the parent is gone."""
        code = 0
        try:
            try:
                linux.adopt_orphans()
                apart = self.load()
                gc.collect()
                gc.freeze()  # existing objects are not collected, so not copied, in forks
                self._cell = make_cell()
                started = ["", self._cell.gaps(apart)]
            except BlockingIOError:
                raise
            except BaseException as error:
                started = [failure(error).failure, []]
            self._send(started)
            while not started[0]:
                self.serve_next()
        except BlockingIOError:
            code = NO_ROOM
        except (EOFError, OSError, RecursionError):
            pass
        os._exit(code)

    def load(self) -> bool:
        """Import what forked processes run; return whether it should run in a separate program.

        Such a program cannot be started as the owner of files (`Cell.gaps`).
        """
        prepare = pkgutil.resolve_name(self._settings.prepare)
        self._loaded = prepare(*self._settings.arguments)
        return self._loaded.starts_program

    def serve_next(self) -> None:
        """Call for the parent's next items; report each result with its number."""
        number, items = self._conn.recv()
        while items:
            sharing = itertools.takewhile(lambda item: self._loaded.may_share(*item), items)
            for result in self._call(list(sharing) or items[:1]):
                self._send([number, *result])
                number += 1
                items = items[1:]

    def _send(self, report: Sequence) -> None:
        self._conn.send_bytes(json.dumps(report).encode())

    def _call(self, items: Sequence[tuple]) -> Iterator[Result]:
        """Yield results of the first items, up to a failure of their process, and end it."""
        work = partial(_call_items, self._loaded, self._cell, items)
        pid, reader = fork_confined(self._cell, work, (self._conn.fileno(), self._held_fd))
        reason = ""
        for _ in items:
            # A program started by a trusted function's module also serves others.
            limit = TimeLimit(self._settings.timeout, pid if self._cell.trusts else 0)
            line = reader.read(limit)
            if not line.endswith(b"\n"):
                reason = "" if reader.ended else f"no result {limit.reason}"
                break
            yield Result.from_line(line, self._loaded.check)
        # A trusted function's module may have started a process that serves all answers.
        end = containment.end_group if self._cell.trusts else containment.end_children
        code = end(pid)
        self._cell.clear()
        reader.close()
        if not line.endswith(b"\n"):
            yield Result(failure=reason or f"the scorer's process died (exit code {code})")


class Reader:
    """Reads what a process reports, which may be anything, and the start of what it prints."""

    def __init__(self, report_fd: int, printed_fd: int):
        self._report_fd = report_fd
        self._printed_fd = printed_fd
        self._fds = [report_fd, printed_fd]
        self._report = b""
        self._printed = b""

    @property
    def ended(self) -> bool:
        """Return True once the process has closed its end, or reported too much."""
        return self._report_fd not in self._fds or len(self._report) > MAX_REPORT

    def read(self, limit: TimeLimit) -> bytes:
        """Return the next line including its end; without one, what arrived in time."""
        while b"\n" not in self._report and not self.ended:
            left = limit.left()
            self._take(left)
            if not left:
                break
        line, end, self._report = self._report.partition(b"\n")
        return line + end

    def _take(self, seconds: float) -> None:
        for fd in select.select(self._fds, [], [], seconds)[0]:
            data = os.read(fd, 2**16)
            if not data:
                self._fds.remove(fd)
            elif fd == self._report_fd:
                self._report += data
            else:
                self._printed = (self._printed + data)[:MAX_PRINTED]

    def close(self, source: str = "a reward") -> None:
        """Print what was printed in one line that names its source, for the first few answers."""
        self._take(0)
        text = printable(self._printed.decode(errors="replace"))
        count = _LINES_PRINTED[0]
        if text and count <= MAX_LINES_PRINTED:
            _LINES_PRINTED[0] = count + 1
            if count == MAX_LINES_PRINTED:
                text = "further output is left out from here on; call it by hand to read all"
            print(f"printed by {source}: {text}", file=sys.stderr, flush=True)
        os.close(self._report_fd)
        os.close(self._printed_fd)


# An answer ----------------------------------------------------------------------------------------


def _call_items(
    loaded: Loaded, cell: containment.Cell, items: Sequence[tuple], reports: BinaryIO
) -> None:
    """Call for items in this process, and report each."""
    pid = os.getpid()
    for item in items:
        only = len(items) == 1
        call = partial(loaded.call, *item)
        result = within_memory(cell, call, for_good=only, hint=loaded.hint)
        if os.getpid() != pid:  # a copy forked by the answer
            return
        reports.write(result.to_line())


def fork_confined(
    cell: containment.Cell,
    work: Callable[[BinaryIO], None],
    own_fds: Sequence[int],
    beside: int = 0,
) -> tuple[int, Reader]:
    """Fork a process that confines itself, does the work and ends; return its pid and a reader.

    work: gets the file for its reports. own_fds: files that the process must not have. beside: as
    for `Cell.confine`.
    """
    report_read, report_write = os.pipe()
    printed_read, printed_write = os.pipe()
    pid = linux.fork()
    if pid == 0:
        try:
            for fd in (*own_fds, report_read, printed_read):
                os.close(fd)
            os.setsid()
            linux.die_with_parent()
            os.dup2(printed_write, 1)
            os.dup2(printed_write, 2)
            os.close(printed_write)
            with open(report_write, "wb", buffering=0) as file:
                try:
                    cell.confine(beside)
                except OSError as error:  # an answer is not run without the available containment
                    file.write(failure(error).to_line())
                    os._exit(0)
                work(file)
        finally:
            os._exit(0)
    os.close(report_write)
    os.close(printed_write)
    return pid, Reader(report_read, printed_read)


def within_memory(
    cell: containment.Cell, call: Callable[[], Any], *, for_good: bool, hint: str
) -> Result:
    """Return the value of a call under the memory limit; an exception is a failure.

    for_good: the limit stays. hint: appended to the reason of a system error.
    """
    try:
        cell.limit_memory(for_good)
        return Result(call())
    except BaseException as error:  # SystemExit too: an answer may contain exit()
        return failure(error, hint)
    finally:
        containment.lift_memory_limit()


def failure(error: BaseException, hint: str = "") -> Result:
    """Return the failure of an error. hint: appended to the reason of a system error."""
    if isinstance(error, MemoryError):
        return Result(failure="out of memory")
    line = printable(f"{type(error).__name__}: {error}"[:MAX_FAILURE])
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None and hint and not linux.is_short(cause):
        line = line[: MAX_FAILURE - len(hint)] + hint
    return Result(failure=line)
