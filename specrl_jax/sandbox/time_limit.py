"""Time that one answer, or one step of an environment, may take.

`reward.timeout` counts CPU seconds of all processes that work for it, so that what runs beside them
takes none of it. What sleeps, or waits for another program, uses no CPU: seconds in which it gets
none have a limit of their own, `MAX_WAIT` times as long. Where the system does not tell what CPU
time processes have used, the second limit is the only one. No JAX.
"""

import os
import time

from specrl_jax.sandbox import linux

MAX_WAIT = 4  # seconds without CPU time, for each second of the limit
# Seconds of the clock that count as one of CPU time: on a machine with as many programs for each
# core, processes wait for a core, and for nothing else.
MAX_LOAD = 32
_CHECK_S = 0.05  # seconds between two looks at the processes, at least


class TimeLimit:
    """Limit of an answer, which starts as this is made.

    seconds: of CPU time.
    pid: the process that works for the answer; its descendants' time counts as well. 0: all that
      this process has started.
    answers: that are to come within as many times the seconds.
    """

    def __init__(self, seconds: float, pid: int = 0, answers: int = 1):
        self._one = seconds
        self._seconds = seconds * answers
        self._pid = pid
        self._begun = time.monotonic()
        self._first = linux.cpu_seconds(pid)
        self._used = 0.0
        self._next = self._begun + self._pause(self._seconds)  # when to look again
        self.reason = ""  # why the time is over

    def left(self) -> float:
        """Return seconds after which to ask again; 0 where the time is over."""
        if not self.reason and time.monotonic() >= self._next:
            self._look()
        return 0.0 if self.reason else max(self._next - time.monotonic(), 0.001)

    def _look(self) -> None:
        # The time of a process that vanishes is not lost: the sum so far stays.
        self._used = max(self._used, linux.cpu_seconds(self._pid) - self._first)
        cpu_left = self._seconds - self._used
        now = time.monotonic()
        wait_left = self._begun + MAX_WAIT * self._seconds + MAX_LOAD * self._used - now
        if cpu_left <= 0:
            self.reason = f"within {self._one:g} s of CPU time"
        elif wait_left <= 0:
            self.reason = f"within {MAX_WAIT * self._one:g} s"
        self._next = now + min(self._pause(cpu_left), max(wait_left, _CHECK_S))

    @staticmethod
    def _pause(cpu_left: float) -> float:
        """Return the seconds in which processes on all cores cannot use what is left."""
        return max(cpu_left / (os.cpu_count() or 1), _CHECK_S)


def longest(seconds: float) -> float:
    """Return the seconds of the clock after which a limit of CPU seconds is over in any case."""
    return min((MAX_WAIT + MAX_LOAD) * seconds, 1e6)  # what the system can wait for at once
