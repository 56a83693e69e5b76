"""Program of a reward worker: answers are scored in processes that end after them.

A worker is a guard, which runs nothing but this file, and its child, the template: it has imported
the scorer and never runs it. The template forks a process that gives up what it need not have
(`containment`), scores, reports and ends; all that it has started ends with it. Where a scorer may
execute an answer's text, each answer has its own: it cannot reach another answer, the template or
the pipe to the run. `workers` is the other end of that pipe. `environment_process` has a template
whose processes last for an episode. No JAX.
"""

import contextlib
import gc
import itertools
import json
import logging
import mmap
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import BinaryIO, NamedTuple, NoReturn

from specrl_jax.agents.environment_protocol import MAX_OBSERVATION, ROLES
from specrl_jax.inputs import answer_pattern, printable
from specrl_jax.rewards.reading import extract as extract_answer
from specrl_jax.rewards.scorers import find_scorer, load_scorer, takes_ended
from specrl_jax.sandbox import containment, linux
from specrl_jax.sandbox.time_limit import TimeLimit

MAX_REPORT = 2**18  # bytes
MAX_FAILURE = 300  # characters of a failure's reason
CONTAINED = (  # after an error of the system, in a user's own function or class
    " (a contained reward has no network, an empty folder and the files of reward.readable alone: "
    "see contained = False in docs/extending.md)"
)
MAX_PRINTED = 2_000  # bytes that an answer may add to the log
MAX_LINES_PRINTED = 5  # lines of a worker's answers in the log
_LINES_PRINTED = mmap.mmap(-1, 1)  # their number; shared with the processes that it forks
NO_ROOM = 75  # exit code: the machine has no room for a process (EX_TEMPFAIL)
MAX_SCORE = 1e15  # of either sign: float32 holds the sum of a million squares


class Result(NamedTuple):
    """Reward of one response or of a turn, or why there is none."""

    reward: float = 0.0  # 0 where failed
    done: bool = True  # of an episode; always so without an environment
    observation: str = ""  # of an environment, for the policy to read unless done
    failure: str = ""  # why there is no reward, in one printable line
    role: str = "user"  # of `ROLES`, of an observation

    def to_line(self) -> bytes:
        """One line of JSON: whoever reads it need not trust the process that has written it."""
        return json.dumps(self, ensure_ascii=False).encode(errors="replace") + b"\n"

    @staticmethod
    def from_line(line: bytes) -> "Result":
        """Read the line of `to_line`; return a failure where it is anything else."""
        try:
            reward, done, observation, failure, role = json.loads(line)
            texts = isinstance(observation, str) and isinstance(failure, str)
            if isinstance(done, bool) and texts and role in ROLES:
                failure = printable(failure[:MAX_FAILURE])
                observation = observation[:MAX_OBSERVATION]
                return Result(checked(float(reward)), done, observation, failure, role)
        except Exception:  # also RecursionError, of a thousand brackets
            pass
        return Result(failure="the scorer's process sent no valid report")


class Loaded(NamedTuple):
    """Scorer as the workers run it."""

    score: Callable[..., Result]  # of a response, its problem and whether it ended
    contained: bool  # False: the user's function says `contained = False`
    # Tasks whose answers need a process of their own, as their text may be executed; None: all.
    alone: frozenset[str] | None


def load(name: str, extract: str, format: str) -> Loaded:
    """Load the scorer; ValueError in one line."""
    known = find_scorer(name)
    scorer = load_scorer(name, format)
    pattern = answer_pattern("" if known.reads_whole else extract, "reward.extract")

    wants_ended = takes_ended(scorer)

    def score(
        response: str | None, answer: str, task: str, metadata: dict, ended: bool = True
    ) -> Result:
        response = extract_answer(pattern, response)
        if response is None:
            return Result()
        problem = {"answer": answer, "task": task, "metadata": metadata}
        if wants_ended:
            problem["ended"] = ended
        reward = scorer(response=response, **problem)
        return Result(checked(float(reward)))

    contained = bool(getattr(scorer, "contained", True))
    return Loaded(score, contained, known.executes if contained else frozenset())


def checked(score: float) -> float:
    """Return a score; ValueError where it is no number of a reward."""
    if abs(score) <= MAX_SCORE:
        return score
    raise ValueError(f"the score must be within ±{MAX_SCORE:g}, got {score:g}")


class Settings(NamedTuple):
    """Arguments that a worker is started with."""

    name: str  # of the scorer or the environment
    timeout: float  # CPU seconds an answer may take, see `time_limit`
    memory_mib: int  # MiB an answer may allocate
    contained: bool
    extract: str = ""
    format: str = ""
    readable: str = ""  # of `parse_readable`


# The guard ----------------------------------------------------------------------------------------


def serve(conn_fd: int, lifeline_fd: int, *settings) -> NoReturn:
    """Serve until the parent closes its ends of the pipe and of the lifeline, or is gone."""
    guard(Template, conn_fd, lifeline_fd, Settings(*settings))


def guard(
    make_template: Callable[..., "Template"], conn_fd: int, lifeline_fd: int, settings: Settings
) -> NoReturn:
    """Guard a template, and end all that it has started once one of both ends or the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tasks = containment.count_tasks()
    scratch = tempfile.mkdtemp(prefix="specrl-reward-")
    user = linux.own_user()
    alive, held = os.pipe()  # the second is the template's: it closes as the template ends
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
    os._exit(code if code >= 0 else 128 - code)  # as a shell tells of a signal


# The template -------------------------------------------------------------------------------------


class Template:
    """Scores what it is sent, each answer in a process forked from this one."""

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
                gc.freeze()  # what is here is not collected, so not copied, in forked processes
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
        """Import what forked processes run; return whether it should run in a program of its own.

        Such a program cannot be started as the owner of files (`Cell.gaps`).
        """
        logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # else a line per odd answer
        settings = self._settings
        self._loaded = load(settings.name, settings.extract, settings.format)
        # Imports and compiled patterns. What executes answers and the user's function wait.
        known = find_scorer(settings.name)
        if known.score and self._loaded.alone is not None:
            with contextlib.suppress(Exception):
                known.score(r"so \boxed{\frac{1}{2}}", "2", "chain_sum", {})
        return known.starts_program

    def serve_next(self) -> None:
        """Score the next batch that the parent sends; report each result with its number."""
        number, items = self._conn.recv()
        while items:
            together = list(itertools.takewhile(self._shares_process, items)) or items[:1]
            for result in self._score(together):
                self._send([number, *result])
                number += 1
                items = items[1:]

    def _send(self, report: Sequence) -> None:
        self._conn.send_bytes(json.dumps(report).encode())

    def _shares_process(self, item: tuple) -> bool:
        return self._loaded.alone is not None and item[2] not in self._loaded.alone

    def _score(self, items: Sequence[tuple]) -> Iterator[Result]:
        """Yield results of the first items, up to a failure of their process, and end it."""
        score = partial(_score_items, self._loaded, self._cell, items)
        pid, reader = fork_confined(self._cell, score, (self._conn.fileno(), self._held_fd))
        reason = ""
        for _ in items:
            # A program that a trusted scorer's module has started works for others, too.
            limit = TimeLimit(self._settings.timeout, pid if self._cell.trusts else 0)
            line = reader.read(limit)
            if not line.endswith(b"\n"):
                reason = "" if reader.ended else f"no result {limit.reason}"
                break
            yield Result.from_line(line)
        # A trusted scorer's module may have started a process that serves all answers.
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
        """Return the next line, with its end; what has come of it in time, without one."""
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
        """Print what was printed, in one line that says where it is from; but few such lines."""
        self._take(0)
        text = printable(self._printed.decode(errors="replace"))
        count = _LINES_PRINTED[0]
        if text and count <= MAX_LINES_PRINTED:
            _LINES_PRINTED[0] = count + 1
            if count == MAX_LINES_PRINTED:
                text = "more, which is left out from here on; call it by hand to read all"
            print(f"printed by {source}: {text}", file=sys.stderr, flush=True)
        os.close(self._report_fd)
        os.close(self._printed_fd)


# An answer ----------------------------------------------------------------------------------------


def _score_items(
    loaded: Loaded, cell: containment.Cell, items: Sequence[tuple], reports: BinaryIO
) -> None:
    """Score items in this process, and report each."""
    hint = CONTAINED if loaded.alone is None else ""
    pid = os.getpid()
    for item in items:
        only = len(items) == 1
        result = within_memory(cell, partial(loaded.score, *item), for_good=only, hint=hint)
        if os.getpid() != pid:  # a copy that the answer has forked
            return
        reports.write(result.to_line())


def fork_confined(
    cell: containment.Cell,
    work: Callable[[BinaryIO], None],
    own_fds: Sequence[int],
    beside: int = 0,
) -> tuple[int, Reader]:
    """Fork a process that confines itself, does the work and ends; return its number and a reader.

    work: gets the file for its reports. own_fds: files that the process must not have. beside: as
    of `Cell.confine`.
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
                except OSError as error:  # an answer is not run without what the system can give
                    file.write(failure(error).to_line())
                    os._exit(0)
                work(file)
        finally:
            os._exit(0)
    os.close(report_write)
    os.close(printed_write)
    return pid, Reader(report_read, printed_read)


def within_memory(
    cell: containment.Cell, score: Callable[[], Result], *, for_good: bool, hint: str
) -> Result:
    """Call a function under the memory limit; what it raises is a failure.

    for_good: the limit stays. hint: follows the reason of an error of the system.
    """
    try:
        cell.limit_memory(for_good)
        return score()
    except BaseException as error:  # SystemExit too: an answer may contain exit()
        return failure(error, hint)
    finally:
        containment.lift_memory_limit()


def failure(error: BaseException, hint: str = "") -> Result:
    """Return the failure of an error. hint: follows the reason of an error of the system."""
    if isinstance(error, MemoryError):
        return Result(failure="out of memory")
    line = printable(f"{type(error).__name__}: {error}"[:MAX_FAILURE])
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is not None and hint and not linux.is_short(cause):
        line = line[: MAX_FAILURE - len(hint)] + hint
    return Result(failure=line)
