"""Time that one answer, or one step of an environment, may take.

`reward.timeout` counts CPU seconds of all processes that work for it, so other programs on the
machine do not use it up. Sleeping, or waiting for another program, uses no CPU: seconds without CPU
time have their own limit, `MAX_WAIT` times as long. If the system does not report processes' CPU
time, the second limit is the only one. No JAX.
"""

import os
import time

from specrl_jax.sandbox import linux

MAX_WAIT = 4  # seconds without CPU time, for each second of the limit
# Wall-clock seconds that count as one of CPU time: on a machine with this many programs per core,
# processes wait for a core, and for nothing else.
MAX_LOAD = 32
_CHECK_S = 0.05  # seconds between two checks of the processes, at least


class TimeLimit:
    """Limit of an answer, starting when it is made.

    seconds: of CPU time.
    pid: the process that works for the answer; includes its descendants. 0: everything that this
      process has started.
    answers: number that must arrive within that many times the seconds.
    """

    def __init__(self, seconds: float, pid: int = 0, answers: int = 1):
        self._one = seconds
        self._seconds = seconds * answers
        self._pid = pid
        self._begun = time.monotonic()
        self._first = linux.cpu_seconds(pid)
        self._used = 0.0
        self._next = self._begun + self._pause(self._seconds)  # when to check again
        self.reason = ""  # why the time is over

    def left(self) -> float:
        """Return seconds after which to check again; 0 if the time is over."""
        if not self.reason and time.monotonic() >= self._next:
            self._look()
        return 0.0 if self.reason else max(self._next - time.monotonic(), 0.001)

    def _look(self) -> None:
        # The time of a process that vanishes is not lost: the sum so far is kept.
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
        """Return the seconds in which processes on all cores cannot use up what is left."""
        return max(cpu_left / (os.cpu_count() or 1), _CHECK_S)


def longest(seconds: float) -> float:
    """Return the wall-clock seconds after which a limit of CPU seconds is over in any case."""
    return min((MAX_WAIT + MAX_LOAD) * seconds, 1e6)  # the longest wait that the system supports
