"""A step's metrics as one aligned line on the console, and a progress bar on a terminal."""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

# Heading, metric, width, format. A step without the metric shows "-".
_Column = tuple[str, str, int, str]
_COLUMNS: tuple[_Column, ...] = (
    ("reward", "reward/mean", 6, "{:.3f}"),
    ("eval", "reward/eval", 6, "{:.3f}"),
    ("nosignal", "reward/no_signal", 8, "{:.0%}"),
    ("reuse", "rollout/reuse_fraction", 6, "{:.1%}"),
    ("prefix", "rollout/prefix_len_mean", 6, "{:.1f}"),
    ("rowsteps", "rollout/row_steps", 8, "{:,.0f}"),
    ("rollout", "time/rollout", 7, "{:.2f}s"),
    ("prefill", "time/prefill", 7, "{:.2f}s"),
    ("decode", "time/decode", 7, "{:.2f}s"),
    ("update", "time/update", 7, "{:.2f}s"),
)
# For a run with an environment, instead of the parts of the rollout's seconds.
_EPISODE_COLUMNS: tuple[_Column, ...] = (
    *_COLUMNS[:-3],
    ("environ", "time/environment", 7, "{:.2f}s"),
    _COLUMNS[-1],
    ("step", "time/step", 7, "{:.2f}s"),
)

# Shown after a line if nonzero: metric, words.
_TROUBLE = (
    ("reward/failed", "{:.0f} answers failed"),
    ("rollout/truncated_fraction", "{:.1%} cut"),
    ("update/skipped", "{:.0f} updates skipped"),
)


def format_duration(seconds: float | None) -> str:
    """1:02:03 or 2:03; "-" if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Console:
    """A line per step, a heading every 20 lines, and a progress bar if stdout is a terminal.

    environment: whether there is one: shows its seconds and those of the step.
    """

    def __init__(self, total_steps: int, environment: bool = False):
        import rich.console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._total = total_steps
        self._columns = _EPISODE_COLUMNS if environment else _COLUMNS
        self._lines = 0
        self._warned = False
        self._times: deque[float] = deque(maxlen=20)
        self._progress = None
        console = rich.console.Console()
        if console.is_terminal:
            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task("", total=total_steps)
            self._progress.start()

    def show(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._times.append(time.monotonic())
        time_left = format_duration(self._seconds_left(step, values))
        if self._lines % 20 == 0:
            self._print("step", "epoch", [heading for heading, *_ in self._columns], "left")
        self._lines += 1
        cells = [
            style.format(values[name]) if name in values else "-"
            for _, name, _, style in self._columns
        ]
        trouble = [words.format(values[name]) for name, words in _TROUBLE if values.get(name)]
        self._print(f"{step}/{self._total}", epoch, cells, time_left, ", ".join(trouble))
        if values.get("rollout/truncated_fraction") == 1 and not self._warned:
            self._warned = True
            self.write_line(
                f"warning: step {step}: all responses were cut at rollout.response_len, none has "
                "an end; raise it, or ask for shorter ones in data.instruction"
            )
        if self._progress is not None:
            self._progress.update(self._task, completed=step, description=f"{time_left} left")

    def _seconds_left(self, step: int, values: Mapping[str, float]) -> float | None:
        """Estimate from the last 20 steps of this process; earlier ones compiled."""
        if len(self._times) > 1:
            step_seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        else:
            step_seconds = values.get("time/step", math.nan)
        return max(self._total - step, 0) * step_seconds if step > 0 else None

    def _print(
        self, step: str, epoch: int | str, cells: Sequence[str], time_left: str, trouble: str = ""
    ) -> None:
        """Print an aligned line of at most 100 columns, followed by what went wrong."""
        line = f"{step:>{2 * len(str(self._total)) + 1}} {epoch:>5}"
        for cell, (_, _, width, _) in zip(cells, self._columns, strict=True):
            line += f"{cell:>{width + 1}}"
        self.write_line(f"{line}{time_left:>8}  {trouble}".rstrip())

    def write_line(self, line: str) -> None:
        """Print a separate line above the progress bar."""
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
