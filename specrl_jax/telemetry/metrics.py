"""Every metric's name, meaning and unit, once; and where they are written.

Takes a dict of scalars a step; gives `WORKDIR/metrics.jsonl` (one object a step, each step once,
also after a kill and a resume), a line a step on the console, and a wandb run.
"""

import contextlib
import json
import logging
import math
import netrc
import os
import time
import uuid
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

import numpy as np

FILE_NAME = "metrics.jsonl"
WANDB_MODES = ("off", "offline", "online", "auto")

_log = logging.getLogger(__name__)


class Metric(NamedTuple):
    """What a name in `metrics.jsonl` means, and its unit ("1" for a plain ratio)."""

    meaning: str
    unit: str


# A metric that does not exist at a step (no evaluation, no draft, no reference) is absent then.
METRICS: dict[str, Metric] = {
    "reward/mean": Metric("mean reward of the step's responses", "reward"),
    "reward/std": Metric("standard deviation over all of the step's responses", "reward"),
    "reward/eval": Metric("mean reward of responses to held-out prompts", "reward"),
    "reward/failed": Metric("answers that hit a scoring limit or raised, and got 0", "count"),
    "reward/solved_all": Metric("share of groups all of whose responses are right", "1"),
    "reward/solved_none": Metric("share of groups none of whose responses is right", "1"),
    "rollout/tokens_generated": Metric("response tokens neither kept nor forced", "tokens"),
    "rollout/tokens_reused": Metric("response tokens kept from earlier responses", "tokens"),
    "rollout/reuse_fraction": Metric("reused tokens over all response tokens", "1"),
    "rollout/draft_accept_rate": Metric("accepted over offered draft tokens", "1"),
    "rollout/prefix_len_mean": Metric("kept prefix, mean over all rows (0: no draft)", "tokens"),
    "rollout/full_reuse_ratio": Metric("share of all responses that are a draft kept whole", "1"),
    "rollout/response_len_mean": Metric("response length, end of sequence included", "tokens"),
    "rollout/truncated_fraction": Metric("share of responses without end of sequence", "1"),
    "reward/no_signal": Metric("share of groups whose rewards are all equal", "1"),
    "reward/overlong": Metric("mean penalty for length, in the rewards trained on", "reward"),
    "rollout/overlap_rouge1": Metric("mean ROUGE-1 F1 with the row's last response", "1"),
    "rollout/decode_steps": Metric("decode steps over all rungs", "steps"),
    "rollout/row_steps": Metric("rows x decode steps computed", "row steps"),
    "rollout/tokens_drafted": Metric("tokens that a tree draft had right", "tokens"),
    "rollout/width_mean": Metric("tokens checked in a decode step, mean over row steps", "tokens"),
    "rollout/width_max": Metric("tokens checked in the widest decode step", "tokens"),
    "rollout/wide_fraction": Metric("share of row steps that are wider than one token", "1"),
    "rollout/verified_tokens": Metric("rows x width of the verification passes", "tokens"),
    "rollout/judged_tokens": Metric("draft tokens that a verification pass judged", "tokens"),
    "rollout/evicted": Metric("rows that gave up their KV cache", "count"),
    "rollout/cache_gib": Metric("most that KV caches held at once, over all devices", "GiB"),
    "rollout/draft_store_gib": Metric("earlier responses kept, over all devices", "GiB"),
    "rollout/draft_store_host_gib": Metric("earlier responses kept in the host's memory", "GiB"),
    "rollout/tokens_ahead": Metric("tokens of the next step begun in idle places", "tokens"),
    "rollout/ahead_kept": Metric("share of the tokens begun ahead that this step kept", "1"),
    "rollout/tokens_carried": Metric("tokens that rows in flight held as the step began", "tokens"),
    "rollout/stale_fraction": Metric("share of the batch's tokens sampled in earlier steps", "1"),
    "rollout/tokens_forced": Metric("tokens of the responses that an environment gave", "tokens"),
    "rollout/turns_mean": Metric("turns of an episode", "count"),
    "rollout/rounds": Metric("rollouts until there was a batch of groups to learn from", "count"),
    "rollout/groups_waiting": Metric("complete groups that wait for the next step", "count"),
    "rollout/groups_filled": Metric(
        "flat groups and empty places that filled the batch up", "count"
    ),
    "curriculum/screened": Metric(
        "prompts of which a first part of the group was sampled", "count"
    ),
    "curriculum/kept": Metric("share of them whose group is worth finishing", "1"),
    "curriculum/waiting": Metric("prompts whose group is begun and not finished yet", "count"),
    "rollout/programs": Metric("shapes of the policy's programs in use", "count"),
    "reuse/log_lenience": Metric("log ℓ of the step's acceptance", "nats"),
    "reuse/log_ratio_mean": Metric("log π / π_old of kept draft tokens, mean", "nats"),
    "reuse/log_ratio_p05": Metric("log π / π_old of kept draft tokens, 5th percentile", "nats"),
    "reuse/log_ratio_p50": Metric("log π / π_old of kept draft tokens, median", "nats"),
    "reuse/log_ratio_p95": Metric("log π / π_old of kept draft tokens, 95th percentile", "nats"),
    "reuse/lenient_fraction": Metric("share of kept tokens that only ℓ > 1 kept, expected", "1"),
    "reuse/kl": Metric("mean of r − 1 − log r, r = π / π_old, of kept draft tokens", "nats"),
    "reuse/rejected_mass": Metric("rejections over judged draft positions", "1"),
    "selection/trained": Metric("log π / π_old of responses that were trained on since", "nats"),
    "selection/held_out": Metric("log π / π_old of responses as old, to held-out prompts", "nats"),
    "selection/gap": Metric("the first less the second: what drafts owe to training", "nats"),
    "policy/importance_mean": Metric("importance weight after its cap, mean over tokens", "1"),
    "policy/importance_capped": Metric("share of tokens whose importance weight is cut", "1"),
    "policy/loss": Metric("loss, mean over the step's updates", "1"),
    "policy/kl": Metric("KL to the reference per token, k3 estimate", "nats"),
    "policy/entropy": Metric("entropy per token of the untruncated policy", "nats"),
    "policy/clip_fraction": Metric("share of tokens whose ratio a clip cuts", "1"),
    "policy/ratio_mean": Metric("π / π_old, mean over tokens", "1"),
    "policy/rollout_train_logprob_gap": Metric("|rollout's − training's log-prob| a token", "nats"),
    "critic/loss": Metric("critic's loss per token, mean over the step's updates", "1"),
    "critic/clip_fraction": Metric("share of tokens whose value a clip holds", "1"),
    "critic/explained_variance": Metric("1 - var(return - value) / var(return)", "1"),
    "critic/value_mean": Metric("critic's value before the update, mean over tokens", "reward"),
    "critic/grad_norm": Metric("critic's gradient norm before clipping, mean over updates", "1"),
    "update/grad_norm": Metric("global gradient norm before clipping, mean over updates", "1"),
    "update/lr": Metric("learning rate of the step's last update", "1"),
    "data/prompts_seen": Metric("prompts rolled out since the run began, with repeats", "count"),
    "data/passes": Metric("passes over the training prompts, fractional", "epochs"),
    "time/step": Metric("the whole step but evaluation and checkpoint", "seconds"),
    "time/rollout": Metric("rollout, verification included", "seconds"),
    "time/prefill": Metric("of the rollout: computing the prompts' keys and values", "seconds"),
    "time/verify": Metric("of the rollout: the verification pass over the drafts", "seconds"),
    "time/decode": Metric("of the rollout: decoding after the prefixes", "seconds"),
    "time/verify_predicted": Metric("of the rollout: verification, by the cost model", "seconds"),
    "time/decode_predicted": Metric("of the rollout: decoding, by the cost model", "seconds"),
    "time/compile": Metric("building programs or reading them, since the last record", "seconds"),
    "compile/built": Metric("programs built since the last record", "count"),
    "compile/read": Metric("of the compilation cache, read since the last record", "count"),
    "time/reward": Metric("scoring the responses", "seconds"),
    "time/update": Metric("the step's optimizer updates", "seconds"),
    "time/eval": Metric("rollout and scoring of held-out prompts", "seconds"),
}


# JSONL --------------------------------------------------------------------------------------


def _encode(step: int, epoch: int, values: Mapping[str, float]) -> bytes:
    """One line. JSON has no nan or inf: such a value is null, and named under `nonfinite`."""
    record: dict[str, Any] = {"step": step, "epoch": epoch}
    nonfinite = {}
    for name in METRICS:
        if name in values:
            finite = math.isfinite(values[name])
            record[name] = values[name] if finite else None
            if not finite:
                nonfinite[name] = str(values[name])
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _decode(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("not a record")
    for name, text in record.pop("nonfinite", {}).items():
        record[name] = float(text)
    return record


def _scan(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(offset of the line's end, record) for every whole line; a torn last line is left out."""
    records: list[tuple[int, dict[str, Any]]] = []
    if not path.exists():
        return records
    lines = path.read_bytes().splitlines(keepends=True)
    end = 0
    for number, line in enumerate(lines, start=1):
        end += len(line)
        try:
            if not line.endswith(b"\n"):
                raise ValueError("unfinished line")
            records.append((end, _decode(line)))
        except ValueError:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}: line {number} must be a JSON object; restore the file or remove the line"
            ) from None
    return records


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of `WORKDIR/metrics.jsonl`, by step; nan and inf are floats again.

    An unfinished last line (the run is writing, or was killed) is left out. No file: [].
    """
    return [record for _, record in _scan(Path(workdir) / FILE_NAME)]


# Console ------------------------------------------------------------------------------------


# Heading, metric, width, format; "-" where the step has no such value.
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


class _Console:
    """A line a step, a heading every 20; under them a progress bar if stdout is a terminal."""

    def __init__(self, total_steps: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._total = total_steps
        self._lines = 0
        self._times: deque[float] = deque(maxlen=20)
        self._progress = None
        console = Console()
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=console, transient=True)
            self._task = self._progress.add_task("", total=total_steps)
            self._progress.start()

    def show(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self._times.append(time.monotonic())
        left = self._seconds_left(step, values)
        if self._lines % 20 == 0:
            self._print(format_header(self._total))
        self._lines += 1
        self._print(format_line(step, self._total, epoch, values, left))
        if self._progress is not None:
            text = f"{format_duration(left)} left"
            self._progress.update(self._task, completed=step, description=text)

    def _seconds_left(self, step: int, values: Mapping[str, float]) -> float | None:
        """From the last 20 steps of this process, so that compiling and resuming don't count."""
        if len(self._times) > 1:
            a_step = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        else:
            a_step = values.get("time/step", math.nan)
        return max(self._total - step, 0) * a_step if step > 0 else None

    def _print(self, line: str) -> None:
        if self._progress is None:
            print(line, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


# wandb --------------------------------------------------------------------------------------


def _logged_in() -> bool:
    """Whether wandb would find a key by itself: it asks, or blocks, where there is none."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    try:
        return path.exists() and netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def resolve_wandb_mode(mode: str) -> str:
    """The mode to use; "auto" is $WANDB_MODE if set, else online if logged in, else offline.

    Raises:
        ValueError: Not one of off, offline, online, auto.
    """
    if mode not in WANDB_MODES:
        raise ValueError(f"log.wandb must be one of {', '.join(WANDB_MODES)}, got {mode!r}")
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE", "")
    if wanted:
        return wanted if wanted in ("online", "offline") else "off"
    return "online" if _logged_in() else "offline"


class _Wandb:
    """A wandb run that cannot hurt training: any failure is one warning, then silence."""

    def __init__(self, workdir: Path, mode: str, run_name: str, config: Mapping[str, Any]):
        self._run = None
        # Without a network, an online run is at least kept for `wandb sync`.
        for attempt in {"off": (), "online": ("online", "offline")}.get(mode, (mode,)):
            try:
                self._run = self._start(workdir, attempt, run_name, config)
                return
            except Exception as error:  # not installed, no network, no key, a bug: all the same
                self._fail(error, attempt)

    @staticmethod
    def _start(workdir: Path, mode: str, run_name: str, config: Mapping[str, Any]) -> Any:
        import wandb

        id_file = workdir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        # console="off": wandb would replace stdout, and the progress bar writes there.
        settings = wandb.Settings(console="off", silent=True, init_timeout=30)
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "specrl_jax"),
            name=run_name,
            id=id_file.read_text().strip(),
            resume="allow" if mode == "online" else None,
            dir=str(workdir),
            mode=mode,
            config=dict(config),
            settings=settings,
        )

    def log(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if self._run is not None:
            try:
                self._run.log({"epoch": epoch, **values}, step=step)
            except Exception as error:
                self._fail(error)

    def close(self) -> None:
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._fail(error)
            self._run = None

    def _fail(self, error: Exception, what: str = "logging") -> None:
        self._run = None
        reason = (str(error).splitlines() or [""])[0]
        _log.warning("wandb: %s failed, training goes on: %r", what, reason)


# The log ------------------------------------------------------------------------------------


def _scalar(name: str, value: Any) -> float | int:
    if name not in METRICS:
        raise ValueError(
            f"metric {name!r} is not in specrl_jax.telemetry.metrics.METRICS; define it there"
        )
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(f"metric {name!r} must be a scalar, got shape {array.shape}")
    value = array.item()
    return int(value) if isinstance(value, bool) else value


class MetricsLog:
    """Writes a run's metrics; a context manager.

    Args:
        workdir: Holds `metrics.jsonl`, `wandb_id` and `wandb/`; made if missing.
        total_steps: Steps of the whole run, for progress and time left.
        wandb_mode: "off", "offline", "online" or "auto" (see `resolve_wandb_mode`).
        run_name: The run's name on wandb.
        config_dict: The resolved config, as plain Python, for wandb.
        console: Print a line a step.

    Raises:
        ValueError: Unknown `wandb_mode`, or a damaged `metrics.jsonl`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        total_steps: int,
        wandb_mode: str,
        run_name: str,
        config_dict: Mapping[str, Any],
        console: bool = True,
    ):
        mode = resolve_wandb_mode(wandb_mode)
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / FILE_NAME
        self._file = open(self._path, "ab")  # noqa: SIM115 - open as long as the log
        self._last_step = -1
        self.restore(None)
        self._console = _Console(total_steps) if console else None
        self._wandb = _Wandb(workdir, mode, run_name, config_dict)

    def restore(self, step: int | None) -> int:
        """Forgets what was written after `step` (None: nothing), and an unfinished last line.

        Call it with the restored checkpoint's step before going on. Returns the number of records
        that were dropped; warns if steps up to `step` are missing from the file.
        """
        records = _scan(self._path)
        kept = [(end, r) for end, r in records if step is None or r["step"] <= step]
        # Steps only ever grow, so what is dropped is the file's end: cutting it off cannot tear.
        os.truncate(self._path, kept[-1][0] if kept else 0)
        os.fsync(self._file.fileno())
        self._last_step = kept[-1][1]["step"] if kept else -1
        if step is not None and max(self._last_step, 0) < step:
            _log.warning(
                "%s ends at step %d, the checkpoint is of step %d: the steps between are lost",
                self._path, max(self._last_step, 0), step,
            )  # fmt: skip
        return len(records) - len(kept)

    def write(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Writes one step everywhere; on return the record has reached the disk.

        Args:
            step: Greater than every step written so far.
            epoch: The pass over the prompts that the step belongs to.
            values: Scalars (Python, NumPy or JAX) by name.

        Raises:
            ValueError: A name that is not in `METRICS`, a value that is no scalar, an old step.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step must be > {self._last_step}, the last in {self._path}, got {step}; "
                "call restore(step) to write over it"
            )
        scalars = {name: _scalar(name, value) for name, value in values.items()}
        try:
            self._file.write(_encode(step, epoch, scalars))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(f"{self._path}: {error.strerror}; free space and run again") from error
        self._last_step = step
        if self._console is not None:
            self._console.show(step, epoch, scalars)
        self._wandb.log(step, epoch, scalars)

    def close(self) -> None:
        """Ends the progress bar and the wandb run; nothing can be written after it."""
        if self._console is not None:
            self._console.close()
        self._wandb.close()
        with contextlib.suppress(OSError):  # what a full disk refused was reported by write
            self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
