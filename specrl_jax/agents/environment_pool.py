"""Episodes that live in worker processes: responses in, the environment's replies out.

`EnvironmentPool` takes the name of an environment. `start` returns an `Episode` for each problem,
`submit` passes on the policy's responses or requests an episode's score so far, `collect` waits for
replies, `end` frees the processes. An environment that raises, hangs or dies only costs its own
episode. If a process ends for another reason, replayable environments are replayed from their
responses; other episodes fail.
"""

import contextlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np

from specrl_jax.agents import environment_process
from specrl_jax.agents.environment_process import MAX_TRIES, Request, StepReport
from specrl_jax.agents.environment_protocol import StepResult
from specrl_jax.rewards.pool import apply_threshold
from specrl_jax.sandbox.readable import parse_readable
from specrl_jax.sandbox.time_limit import longest
from specrl_jax.sandbox.worker_process import Settings
from specrl_jax.sandbox.workers import GRACE_S, Worker, WorkerPool, num_workers

END, TELL = ON_TIMEOUT = ("end", "tell")  # values of environment.on_timeout


@dataclass(eq=False)
class Episode:
    """One episode of a problem, as tracked by the pool."""

    key: int
    problem: tuple[str, str, dict]  # answer, task, metadata
    worker: Worker
    home: Connection | None = None  # to the worker with its process
    responses: list[str] = field(default_factory=list)
    scores: bool = False  # there are no more: its score so far is requested
    reward: float = 0.0  # of its turns
    number: int = -1  # of the last request
    tries: int = 0  # processes that ended while it waited for the pending reply
    waits: bool = False  # for a reply
    answer: StepResult | None = None  # that has arrived but is not collected yet

    @property
    def calls(self) -> int:
        """Number of calls to the environment so far."""
        return len(self.responses) + self.scores


class EnvironmentPool(WorkerPool):
    """Runs episodes of an environment. Calls are thread-safe.

    name: of `ENVIRONMENTS`, or module:Class.
    timeout: CPU seconds that a step may take, see `time_limit`.
    memory_mib: MiB that the process of an episode may allocate (Linux only).
    workers: number of processes that start those of the episodes; 0: one per core, at most 16.
    threshold: > 0: an episode's reward is 1 if the sum over its turns reaches it, else 0.
    readable: paths that an episode may read besides Python and libraries, separated by ":".
    on_timeout: of `ON_TIMEOUT`: a step that takes too long ends its episode, or gets a reply.
    extract: a regular expression; group 1 of its last match in a response is what a step gets, ""
      if there is none. A response with a tool call is not searched.
    """

    def __init__(
        self,
        name: str,
        *,
        timeout: float,
        memory_mib: int,
        workers: int,
        threshold: float = 0.0,
        readable: str = "",
        on_timeout: str = "end",
        extract: str = "",
    ):
        loaded = environment_process.load(name, extract)  # a mistake is raised here
        if on_timeout == TELL and loaded.after_timeout is None:
            raise ValueError(
                f"environment.on_timeout must be {END} where environment.name is {name}, got "
                f"{TELL!r}: its class must set replayable or after_timeout, see docs/agents.md"
            )
        limits = (float(timeout), int(memory_mib))
        paths = parse_readable(readable)
        program = environment_process.__name__
        prepare = f"{program}:prepare"
        settings = Settings(prepare, (name, extract), *limits, loaded.contained, paths)
        executes = "" if loaded.shares else name
        super().__init__(program, settings, num_workers(workers), executes, "environment.name")
        self.replayable = loaded.replayable  # replies depend only on responses, and come soon
        self._after_timeout = loaded.after_timeout if on_timeout == TELL else None
        self.reads_whole = loaded.reads_whole  # responses with their thoughts
        self.scores = loaded.scores  # it can score an episode that a limit cuts short
        self.pays_at_end = loaded.pays_at_end  # such an episode has no reward, unless it scores
        self.call_end = loaded.call_end  # text that ends a tool call
        self._timeout = float(timeout)
        self._threshold = float(threshold)
        self._numbers = itertools.count()
        self._episodes: dict[int, Episode] = {}  # by their last request
        self._live: set[Episode] = set()
        # Reports from workers, and None when one has ended.
        self._reports: queue.SimpleQueue[tuple[Connection, list | None]] = queue.SimpleQueue()
        self._read: set[Connection] = set()  # those that a thread reads
        self._stop = threading.Event()

    def close(self) -> None:
        self._stop.set()
        super().close()

    def start(self, problems: Sequence[tuple[str, str, dict]]) -> list[Episode]:
        """Start an episode for each problem: its answer, task and metadata."""
        with self._lock:
            self._check_open()
            workers = itertools.cycle(self._workers)
            episodes = [Episode(next(self._numbers), x, next(workers)) for x in problems]
            self._live.update(episodes)
            return episodes

    def submit(self, episodes: Sequence[Episode], responses: Sequence[str | None]) -> None:
        """Pass on the next response of each episode; it must not be waiting for a reply.

        None in place of a response: there are no more, and the environment scores the episode so
        far; only if `scores`.
        Raises ChildProcessError if no worker starts, RuntimeError if the pool is closed.
        """
        with self._lock:
            self._check_open()
            for episode, response in zip(episodes, responses, strict=True):
                if response is None:
                    episode.scores = True
                else:
                    episode.responses.append(response)
                episode.tries = 0
                episode.waits = True
            self._request(episodes)
            self._warn()

    def collect(self, episodes: Sequence[Episode], most_waiting: int = 0) -> dict[int, StepResult]:
        """Wait until at most `most_waiting` episodes wait; return replies by episode index.

        A reply's reward is that of all turns so far. Raises what `submit` raises.
        """
        with self._lock:
            while sum(x.waits for x in episodes) > most_waiting:
                self._check_open()
                self._take_reports(wait=True)
            self._take_reports(wait=False)
            answers = {i: x.answer for i, x in enumerate(episodes) if x.answer is not None}
            for i in answers:
                episodes[i].answer = None
            return answers

    def end(self, episodes: Sequence[Episode]) -> None:
        """End episodes, whether or not they are over."""
        with self._lock:
            self._live.difference_update(episodes)
            requests: dict[Connection, list[Request]] = {}
            for episode in episodes:
                self._episodes.pop(episode.number, None)
                if episode.home is not None:
                    over = Request(next(self._numbers), episode.key, None, ())
                    requests.setdefault(episode.home, []).append(over)
                    episode.home = None
            self._send(requests)

    def _request(self, episodes: Sequence[Episode]) -> None:
        """Request replies to the last responses."""
        requests: dict[Connection, list[Request]] = {}
        for episode in episodes:
            self._episodes.pop(episode.number, None)
            episode.number = next(self._numbers)
            self._episodes[episode.number] = episode
            goes_on = episode.home is not None
            if not (goes_on or self.replayable or episode.calls == 1):
                self._answer(episode, StepResult(failure="its environment's process has ended"))
                continue
            if not goes_on:
                episode.home = self._start(episode.worker)
            problem = None if goes_on else episode.problem
            first = len(episode.responses) - (not episode.scores) if goes_on else 0
            responses = tuple(episode.responses[first:])
            request = Request(episode.number, episode.key, problem, responses, episode.scores)
            requests.setdefault(episode.home, []).append(request)
        self._send(requests)

    def _send(self, requests: dict[Connection, list[Request]]) -> None:
        beside = 2 * len(self._live)
        for conn, items in requests.items():
            with contextlib.suppress(OSError):  # its thread notices a worker that has ended
                conn.send((beside, items))

    def _start(self, worker: Worker) -> Connection:
        """Return the connection to a ready worker that a thread reads."""
        begun = time.monotonic()
        while True:
            try:
                worker.ensure_ready()
                break
            except BlockingIOError as error:
                self._wait_for_room(error, begun, self._stop)
        conn = worker.conn
        if conn not in self._read:
            self._read.add(conn)
            threading.Thread(target=self._read_reports, args=(conn,), daemon=True).start()
        return conn

    def _read_reports(self, conn: Connection) -> None:
        """Read continuously, in a thread: so worker and process never both block on writing."""
        with contextlib.suppress(OSError, EOFError, ValueError):
            while True:
                self._reports.put((conn, json.loads(conn.recv_bytes())))
        self._reports.put((conn, None))

    def _take_reports(self, wait: bool) -> None:
        """Process the reports that have arrived; wait: for at least one, or the end of a worker."""
        reports = []
        if wait:
            turns = max((x.calls for x in self._live if x.waits), default=1)
            patience = longest(self._timeout * turns) + GRACE_S  # seconds
            try:
                reports.append(self._reports.get(timeout=patience))
            except queue.Empty:
                self._kill()  # their threads report their end
        while not self._reports.empty():
            reports.append(self._reports.get())
        self._request([episode for report in reports for episode in self._take(*report)])

    def _take(self, conn: Connection, report: list | None) -> list[Episode]:
        """Record a worker's report; return the episodes to replay."""
        if report is None:
            self._read.discard(conn)
            for worker in self._workers:
                if worker.conn is conn:
                    worker.kill()  # the rest of it: another one is started instead
            lost = [x for x in self._episodes.values() if x.home is conn]
            return [x for x in lost if self._is_lost(x, StepReport(x.number, None, False, 1))]
        number, result, *rest = report
        episode = self._episodes.get(number)
        if episode is None:  # it has continued, or has ended
            return []
        result = None if result is None else StepResult(*result)
        news = StepReport(number, result, *rest)
        if news.lives:
            self._answer(episode, result)
            return []
        return [episode] if self._is_lost(episode, news) else []

    def _is_lost(self, episode: Episode, report: StepReport) -> bool:
        """Record that no process has an episode; return whether to replay it."""
        episode.home = None
        if not episode.waits:
            return False
        if report.late and self._after_timeout is not None and not episode.scores:
            self._tell(episode, report.result.failure)
            return False
        episode.tries += report.tries
        may_start = report.result is None and episode.calls == 1
        if episode.tries < MAX_TRIES and (self.replayable or may_start):
            return True
        ended = f"{episode.tries} processes of its environment ended"
        failure = "its environment's process has ended" if episode.tries < MAX_TRIES else ended
        self._answer(episode, report.result or StepResult(failure=failure))
        return False

    def _tell(self, episode: Episode, failure: str) -> None:
        """Tell the policy that its turn took too long; the next one starts a process.

        That process replays the turns before this one, if they get the same replies.
        """
        step = self._after_timeout
        if self.replayable:
            episode.responses.pop()
        else:
            episode.responses.clear()
        text = f"TimeoutError: {failure}; {step.observation}"
        self._answer(episode, StepResult(step.reward, False, text, role=step.role))

    def _answer(self, episode: Episode, result: StepResult) -> None:
        episode.waits = False
        episode.reward += result.reward
        reward = 0.0
        if not result.failure:
            total = np.array([episode.reward], np.float32)
            reward = float(apply_threshold(total, self._threshold)[0])
        episode.answer = result._replace(reward=reward)
