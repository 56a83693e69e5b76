"""A step's metrics as one aligned line on the console, and a progress bar on a terminal."""

import math
import time
from collections import deque
from collections.abc import Mapping

# Heading, metric, width, format. A step without the metric shows "-".
_COLUMNS = (
    ("reward", "reward/mean", 7, "{:.3f}"),
    ("eval", "reward/eval", 6, "{:.3f}"),
    ("reuse", "rollout/reuse_fraction", 6, "{:.1%}"),
    ("prefix", "rollout/prefix_len_mean", 7, "{:.1f}"),
    ("rollout", "time/rollout", 8, "{:.2f}s"),
    ("verify", "time/verify", 7, "{:.2f}s"),
    ("decode", "time/decode", 8, "{:.2f}s"),
    ("update", "time/update", 7, "{:.2f}s"),
)


def format_header(total_steps: int) -> str:
    """The heading over `format_line`'s columns."""
    steps = f"{'step':>{2 * len(str(total_steps)) + 1}} {'epoch':>5}"
    return steps + "".join(f"{name:>{width + 1}}" for name, _, width, _ in _COLUMNS) + "     left"


def format_line(
    step: int, total_steps: int, epoch: int, values: Mapping[str, float], seconds_left: float | None
) -> str:
    """A step as one aligned line of at most 100 columns."""
    digits = len(str(total_steps))
    line = f"{step:>{digits}}/{total_steps} {epoch:>5}"
    for _, name, width, style in _COLUMNS:
        cell = style.format(values[name]) if name in values else "-"
        line += f"{cell:>{width + 1}}"
    return line + f"{format_duration(seconds_left):>9}"


def format_duration(seconds: float | None) -> str:
    """1:02:03 or 2:03; "-" if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class Console:
    """A line a step, a heading every 20 lines, and a progress bar if stdout is a terminal."""

    def __init__(self, total_steps: int):
        import rich.console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._total = total_steps
        self._lines = 0
        self._times: deque[float] = deque(maxlen=20)
        self._progress = None
        console = rich.console.Console()
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("", total=total_steps)
            self._progress.start()

    def show(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._times.append(time.monotonic())
        seconds_left = self._seconds_left(step, values)
        if self._lines % 20 == 0:
            self._print(format_header(self._total))
        self._lines += 1
        self._print(format_line(step, self._total, epoch, values, seconds_left))
        if self._progress is not None:
            text = f"{format_duration(seconds_left)} left"
            self._progress.update(self._task, completed=step, description=text)

    def _seconds_left(self, step: int, values: Mapping[str, float]) -> float | None:
        """From the last 20 steps of this process: earlier ones compiled or ran before a resume."""
        if len(self._times) > 1:
            step_seconds = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        else:
            step_seconds = values.get("time/step", math.nan)
        return max(self._total - step, 0) * step_seconds if step > 0 else None

    def _print(self, line: str) -> None:
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
