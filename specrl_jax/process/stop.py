"""Requests to stop a run: the first Ctrl-C is never lost, even before the slow imports."""

import contextlib
import signal
from collections.abc import Iterator


class StopRequest:
    """First SIGINT (Ctrl-C) within a `with` block, and first SIGTERM while steps run.

    In `finishing_steps` a loop finishes its step, saves and exits. Outside it SIGINT raises
    KeyboardInterrupt, as always; if Python drops that exception, in a finalizer or a library's
    callback, `finishing_steps` raises it again. A second signal ends the process immediately.
    """

    def __init__(self):
        self.name = ""  # of the signal; "": none yet
        self._finishes_step = False

    def __bool__(self) -> bool:
        return bool(self.name)

    def agreed(self) -> bool:
        """Return whether any process got a signal. All processes must call it at the same point."""
        from specrl_jax import hosts  # imports JAX

        self.name = next(filter(None, hosts.gather(self.name)), "")
        return bool(self.name)

    def __enter__(self) -> "StopRequest":
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def finishing_steps(self) -> Iterator[None]:
        """Defer a signal to the end of a step; raise KeyboardInterrupt if one came earlier."""
        if self.name:
            raise KeyboardInterrupt
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            self._finishes_step = True
            yield
        finally:
            self._finishes_step = False
            signal.signal(signal.SIGTERM, before)
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, _) -> None:
        self.name = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)
        if not self._finishes_step:
            raise KeyboardInterrupt
        print(f"{self.name}: finishing this step, then saving; once more to stop now", flush=True)
