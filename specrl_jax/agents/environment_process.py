"""Program of an environment's worker: an episode lives in a process until it is over.

Takes `Request`s from `environment_pool`, and reports a `StepResult` for each response. It is
contained like `worker_process`. The template forks a keeper for an episode, which forks the process
with the environment, passes it one response after another within the limits, and ends it with
everything that it started. The class's own code runs only in that process. Trusted, replayable
classes share one for all episodes of a worker, as a lost one is replayed. No JAX.
"""

import contextlib
import os
import pickle
import random
import re
import resource
import select
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, BinaryIO, NamedTuple, NoReturn

from specrl_jax.agents.environment_protocol import (
    Environment,
    Step,
    StepResult,
    check_step,
    take_step,
)
from specrl_jax.agents.environments import ENVIRONMENTS, load_environment
from specrl_jax.inputs import answer_pattern, one_line, reason
from specrl_jax.rewards.reading import extract as extract_answer
from specrl_jax.rewards.scorers import checked
from specrl_jax.sandbox import containment, linux, worker_process
from specrl_jax.sandbox.time_limit import TimeLimit
from specrl_jax.sandbox.worker_process import CONTAINED, Result, Settings

MAX_STEPS = 16  # steps of a worker at a time: most of them may wait for other programs
MAX_TRIES = 3  # processes that may end while an episode waits for one reply
_SHARED = -1  # key of the process with all episodes


class Request(NamedTuple):
    """Responses of an episode to step through; the last one's reply is reported."""

    number: int  # of the request, repeated in its report
    episode: int
    problem: tuple | None  # answer, task, metadata, to start with; None: the episode continues
    responses: Sequence[str]
    scores: bool = False  # report the episode's score so far, after all responses

    @property
    def answers(self) -> int:
        """Number of calls of the environment; 0: the episode is over, and there is no report."""
        return len(self.responses) + self.scores


class StepReport(NamedTuple):
    """Result of a request."""

    number: int
    result: StepResult | None  # None: none came, not necessarily because of the response
    lives: bool  # whether a process still has the environment
    tries: int = 0  # of `MAX_TRIES`, used up by this if no process has it
    late: bool = False  # whether its time was over


class LoadedEnvironment(NamedTuple):
    """Environment in the form that workers run."""

    make: Callable[[], Environment]
    contained: bool  # False: the class has `contained = False`
    replayable: bool
    shares: bool  # one process runs all episodes of a worker
    after_timeout: Step | None  # reply to a step that took too long; None: the episode is over
    reads_whole: bool = False  # responses with their thoughts
    scores: bool = False  # it can score an episode so far
    pays_at_end: bool = False  # an episode that is cut short has no reward, unless it scores
    call_end: str = ""  # text that ends a tool call
    pattern: re.Pattern | None = None  # of `reward.extract`, for responses without a call
    starts_program: bool = False  # for what a response contains


def load(name: str, extract: str = "") -> LoadedEnvironment:
    """Load the environment; one-line ValueError if that fails. extract: `reward.extract`."""
    make = load_environment(name)
    contained = bool(getattr(make, "contained", True))
    replayable = bool(getattr(make, "replayable", False))
    trusted = not contained or name in ENVIRONMENTS
    after_timeout = Step("this turn had no effect") if replayable else None
    if (own := getattr(make, "after_timeout", None)) is not None:
        with one_line(f"after_timeout of environment.name={name} must be a step that continues"):
            after_timeout = check_step(own)
            if after_timeout.done:
                raise ValueError("it is done")
    reads_whole = bool(getattr(make, "reads_whole", False))
    if reads_whole and extract:
        raise ValueError(
            f'reward.extract must be "" where environment.name is {name}, which reads the whole '
            f"response, got {extract!r}"
        )
    return LoadedEnvironment(
        make,
        contained,
        replayable,
        shares=trusted and replayable,
        after_timeout=after_timeout,
        reads_whole=reads_whole,
        scores=callable(getattr(make, "score", None)),
        pays_at_end=bool(getattr(make, "pays_at_end", False)),
        call_end=str(getattr(make, "call_end", "")),
        pattern=answer_pattern(extract, "reward.extract"),
        starts_program=bool(getattr(make, "starts_program", False)),
    )


def prepare(name: str, extract: str) -> LoadedEnvironment:
    """Load the environment in a worker, with what all episodes need."""
    loaded = load(name, extract)
    if hasattr(loaded.make, "prepare"):
        loaded.make.prepare()
    return loaded


def serve(conn_fd: int, lifeline_fd: int, *settings) -> NoReturn:
    """Serve until the parent closes its ends of the pipe and the lifeline, or is gone."""
    worker_process.guard(_Template, conn_fd, lifeline_fd, Settings(*settings))


# The template -------------------------------------------------------------------------------------


@dataclass
class _Held:
    """A keeper's process as known to the template, and its pending work."""

    pid: int = 0  # 0: not started
    conn: Connection | None = None
    numbers: dict[int, int] = field(default_factory=dict)  # episode → its last request
    waiting: list[Request] = field(default_factory=list)
    running: int = 0  # requests whose report is pending


class _Template(worker_process.Template):
    """Passes requests to the keepers, and their reports to the parent."""

    def load(self) -> bool:
        apart = super().load()
        self._held: dict[int, _Held] = {}
        self._ended: list[int] = []  # keepers to be reaped
        self._beside = 0
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file for each episode
        return apart

    def serve_next(self) -> None:
        """Wait for the parent or a keeper, receive what it sends, and start steps."""
        keys = {held.conn: key for key, held in self._held.items() if held.conn}
        for conn in wait([self._conn, *keys]):
            if conn is self._conn:
                self._beside, requests = conn.recv()
                for request in requests:
                    self._take(request)
            else:
                self._take_report(keys[conn])
        self._start_steps()
        self._ended = [pid for pid in self._ended if not os.waitpid(pid, os.WNOHANG)[0]]

    def _take(self, request: Request) -> None:
        key = _SHARED if self._loaded.shares else request.episode
        held = self._held.get(key)
        known = held is not None and request.episode in held.numbers
        if not request.answers:
            if known:
                del held.numbers[request.episode]
                held.waiting.append(request)
            if known and not held.numbers and not self._loaded.shares:
                self._end(key)
            return
        if request.problem is None and not known:
            self._send(StepReport(request.number, None, False))
            return
        held = self._held.setdefault(key, _Held())
        held.numbers[request.episode] = request.number
        held.waiting.append(request)

    def _take_report(self, key: int) -> None:
        """Pass on a keeper's report; if its process is gone, report which episodes are lost."""
        held = self._held[key]
        report = None
        with contextlib.suppress(EOFError, OSError):
            report = held.conn.recv()
            held.running -= 1
            self._send(report)
        if report is None or not report.lives:
            self._end(key)
            for number in held.numbers.values():
                if report is None or number != report.number:
                    self._send(StepReport(number, None, False, tries=report is None))

    def _end(self, key: int) -> None:
        """Tell a keeper to end its process and itself."""
        held = self._held.pop(key)
        if held.conn is not None:
            held.conn.close()
            self._ended.append(held.pid)

    def _start_steps(self) -> None:
        """Start what waits, with no more than `MAX_STEPS` at a time."""
        running = sum(held.running > 0 for held in self._held.values())
        for held in self._held.values():
            if running >= MAX_STEPS:
                return
            if not held.waiting or held.running:
                continue
            if held.conn is None:
                self._start(held)
            held.running = sum(request.answers > 0 for request in held.waiting)
            with contextlib.suppress(OSError):  # its end is noticed later, when waiting for it
                held.conn.send(held.waiting)
            held.waiting = []
            running += held.running > 0

    def _start(self, held: _Held) -> None:
        held.conn, theirs = Pipe()
        held.pid = linux.fork()
        if held.pid == 0:
            try:
                linux.die_with_parent()
                os.close(self._held_fd)
                for conn in (self._conn, *(other.conn for other in self._held.values())):
                    if conn is not None:
                        conn.close()
                keeper = _Keeper(self._loaded, self._settings, self._cell, self._beside, theirs)
                keeper.keep(folder=str(held.waiting[0].number))
            except Exception as error:
                print(f"an environment could not be kept: {reason(error)}", file=sys.stderr)
            finally:
                os._exit(0)
        theirs.close()


# A keeper -----------------------------------------------------------------------------------------


@dataclass
class _Keeper:
    """Passes responses to the process with an environment, and ends it."""

    loaded: LoadedEnvironment
    settings: Settings
    cell: containment.Cell
    beside: int  # number of processes of other episodes
    conn: Connection  # to the template

    def keep(self, folder: str) -> None:
        """Serve requests until there are no more or the process has ended."""
        self.cell.enter_folder(folder)
        self._start()
        code = None
        with contextlib.suppress(EOFError):
            while code is None:
                code = self._step(self.conn.recv())
        if code is None:
            self._stop()
        self.cell.leave_folder()
        self.reader.close("an environment")

    def _start(self) -> None:
        self._alone = self.loaded.contained and linux.own_pids()
        if not self._alone:
            linux.adopt_orphans()
        requests, self.request_fd = os.pipe()
        live = partial(_live, self.loaded, self.cell, requests)
        own_fds = (self.conn.fileno(), self.request_fd)
        self.pid, self.reader = worker_process.fork_confined(self.cell, live, own_fds, self.beside)
        os.close(requests)
        os.set_blocking(self.request_fd, False)

    def _step(self, requests: Sequence[Request]) -> int | None:
        """Report the results of requests; return the exit code of a process that has ended."""
        timeout = self.settings.timeout
        _write(self.request_fd, pickle.dumps(requests), TimeLimit(timeout))
        for request in requests:
            if not request.answers:
                continue
            limit = TimeLimit(timeout, answers=request.answers)
            line = self.reader.read(limit)
            if not line.endswith(b"\n"):
                late = not self.reader.ended
                code = self._stop()
                failure = f"the environment's process died (exit code {code})"
                if late:
                    failure = f"no answer {limit.reason}"
                tries = MAX_TRIES if late else 1
                result = StepResult(failure=failure)
                self.conn.send(StepReport(request.number, result, False, tries, late))
                return code
            self.conn.send(StepReport(request.number, _read(line), True))
        return None

    def _stop(self) -> int:
        """End the process with everything that it started; return its exit code."""
        all_end_with_it = self._alone or self.cell.trusts
        end = containment.end_group if all_end_with_it else containment.end_children
        return end(self.pid)


def _read(line: bytes) -> StepResult:
    """Read what a process reports about a step."""
    step, failure = Result.from_line(line, _check)
    return StepResult(failure=failure) if failure else StepResult(**step._asdict())


def _check(values: Iterable) -> Step:
    """Return the `Step` with these values; raise if they do not form one."""
    step = check_step(values)
    return step._replace(reward=checked(step.reward))


def _write(fd: int, data: bytes, limit: TimeLimit) -> None:
    """Write as much of the data as a process reads in time."""
    with contextlib.suppress(BrokenPipeError):
        while data and (left := limit.left()):
            if select.select([], [fd], [], left)[1]:
                data = data[os.write(fd, data) :]


# An environment's process -------------------------------------------------------------------------


def _live(
    loaded: LoadedEnvironment, cell: containment.Cell, request_fd: int, reports: BinaryIO
) -> None:
    """Run environments, and step through requests until there are no more."""
    pid = os.getpid()
    if not loaded.shares:  # otherwise all episodes would draw the same
        random.seed()
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
    environments: dict[int, Environment] = {}
    hint = CONTAINED if loaded.contained and not loaded.shares else ""
    with open(request_fd, "rb") as file, contextlib.suppress(EOFError):
        while True:
            for request in pickle.load(file):
                if not request.answers:
                    environments.pop(request.episode, None)
                    continue
                step = partial(_step, loaded, environments, request)
                alone = not loaded.shares
                result = worker_process.within_memory(cell, step, for_good=alone, hint=hint)
                if os.getpid() != pid:  # a copy forked by the environment
                    return
                reports.write(result.to_line())


def _step(loaded: LoadedEnvironment, environments: dict[int, Any], request: Request) -> Step:
    if request.problem is not None:
        answer, task, metadata = request.problem
        environment = loaded.make()
        environment.reset(answer=answer, task=task, metadata=metadata)
        environments[request.episode] = environment
    step = Step()
    for response in request.responses:
        if not (loaded.call_end and loaded.call_end in response):
            response = extract_answer(loaded.pattern, response) or ""
        step = take_step(environments[request.episode], response)
    if request.scores:
        return Step(reward=checked(float(environments[request.episode].score())), done=True)
    return _check(step)
