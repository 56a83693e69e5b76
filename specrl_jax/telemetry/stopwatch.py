"""Seconds of the parts of a step."""

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Adds up wall-clock seconds by name until they are taken."""

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to those of `name`; none where it raises."""
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds by name, and begin again from nothing."""
        seconds = self._seconds
        self._seconds = {}
        return seconds
