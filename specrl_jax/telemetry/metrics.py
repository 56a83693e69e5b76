"""Every metric's name, meaning and unit; the file `WORKDIR/metrics.jsonl`; the run's log.

`MetricsLog.write` takes a dict of scalars per step. It writes one JSON object per line, prints a
console line and sends the values to a tracker. Every step is written once, even after a kill and a
resume.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.inputs import disk_error, json_object, one_line
from specrl_jax.registry import Table
from specrl_jax.telemetry.console import Console
from specrl_jax.telemetry.tracking import SafeTracker

FILE_NAME = "metrics.jsonl"

_log = logging.getLogger(__name__)


# Old name of a metric: new name. Runs recorded by older versions are read with the new names.
_RENAMED = {
    "time/extend": "time/prefill",
    "rollout/tokens_extended": "rollout/tokens_prefilled",
    "rollout/extend_fill": "rollout/prefill_used",
    "rollout/extend_empty": "rollout/prefill_empty",
    "rollout/extend_repeated": "rollout/prefill_repeated",
    "rollout/extend_rejected": "rollout/prefill_rejected",
    "rollout/tokens_forced": "rollout/tokens_environment",
    "rollout/kept_noise": "rollout/reused_noise",
}


# By name: its meaning and its unit, "1" for a plain ratio. A metric that is undefined at a step (no
# evaluation, no draft, no reference) is absent there.
_OWN: dict[str, tuple[str, str]] = {
    # Rewards
    "reward/mean": ("mean reward of the step's responses", "reward"),
    "reward/std": ("standard deviation of the reward over the step's responses", "reward"),
    "reward/fresh_noise": ("mean reward on fresh noise, with groups without a signal", "reward"),
    "reward/FUNCTION": ("mean unweighted reward of a function of a sum", "reward"),
    "reward/eval": ("mean reward of responses to held-out prompts", "reward"),
    "reward/eval/FUNCTION": ("the same for a function, unweighted", "reward"),
    "reward/failed": ("answers, or episodes, that hit a limit or raised (reward 0)", "count"),
    "reward/solved_all": ("share of groups whose responses are all right", "1"),
    "reward/solved_none": ("share of groups without a right response", "1"),
    # With dynamic sampling or a critic: whose rewards are all equal.
    "reward/no_signal": ("share of groups whose advantages are all 0", "1"),
    "reward/overlong": ("mean length penalty, included in the trained rewards", "reward"),
    # Responses of the rollout, and where their tokens come from
    "rollout/response_len_mean": ("response length, end of sequence included", "tokens"),
    "rollout/response_len_min": ("shortest response of the step", "tokens"),
    "rollout/response_len_max": ("longest response of the step", "tokens"),
    "rollout/truncated_fraction": ("share of responses cut by the length limit", "1"),
    "rollout/tokens_generated": (
        "response tokens that the policy sampled in this rollout",
        "tokens",
    ),
    "rollout/tokens_reused": ("response tokens accepted from earlier responses", "tokens"),
    "rollout/tokens_environment": ("response tokens from an environment", "tokens"),
    "rollout/tokens_copied": ("tokens of responses that these forked from", "tokens"),
    "rollout/reuse_fraction": ("reused tokens over all response tokens", "1"),
    "rollout/prefix_len_mean": ("mean accepted-prefix length over rows (0: no draft)", "tokens"),
    "rollout/full_reuse_ratio": ("share of responses whose draft was accepted whole", "1"),
    "rollout/draft_accept_rate": ("accepted over all draft tokens", "1"),
    "rollout/reused_noise": ("share of rows on the noise of an earlier visit", "1"),
    "rollout/unchanged": ("share of rows whose response equals their previous one", "1"),
    "rollout/distinct": ("distinct responses per group, mean", "count"),
    "rollout/overlap_rouge1": ("mean ROUGE-1 F1 with the row's previous response", "1"),
    "rollout/turns_mean": ("turns per episode, mean", "count"),
    "rollout/tool_calls_mean": ("turns per episode that a tool replied to, mean", "count"),
    # Work of the rollout
    "rollout/decode_steps": ("decode steps over all buckets", "steps"),
    "rollout/row_steps": ("rows x decode steps computed", "row steps"),
    "rollout/tokens_drafted": ("sampled tokens that the draft source proposed", "tokens"),
    "rollout/width_mean": ("tokens verified per decode step, mean over row steps", "tokens"),
    "rollout/width_max": ("tokens verified in the widest decode step", "tokens"),
    "rollout/wide_fraction": ("share of row steps wider than one token", "1"),
    "rollout/tokens_prefilled": ("slots computed by prefill and append, including empty", "tokens"),
    "rollout/prefill_used": (
        "share of these that was needed; the next three are the rest",
        "1",
    ),
    "rollout/prefill_empty": ("share of empty slots", "1"),
    "rollout/prefill_repeated": ("share of prompts and own tokens computed again", "1"),
    "rollout/prefill_rejected": ("share of draft tokens at and behind a rejection", "1"),
    "rollout/drafts_skipped": ("share of drafts not verified, since that costs more", "1"),
    "rollout/tokens_verified": ("draft tokens that an acceptance rule decided on", "tokens"),
    "rollout/draft_store_gib": ("earlier responses kept, over all devices", "GiB"),
    # Rows and groups that cross steps
    "rollout/tokens_run_ahead": ("tokens of the next step, started in background rows", "tokens"),
    "rollout/run_ahead_accepted": ("share of the tokens started ahead that were used", "1"),
    "rollout/tokens_resumed": ("tokens of partial rows at the start of the step", "tokens"),
    "rollout/stale_fraction": ("share of the batch's tokens sampled by earlier weights", "1"),
    "rollout/gen_batches": ("rollouts until the batch was full", "count"),
    "rollout/groups_waiting": ("complete groups that wait for the next step", "count"),
    "rollout/groups_filled": ("groups without signal that padded the batch", "count"),
    "curriculum/screened": ("prompts with the first part of a group sampled", "count"),
    "curriculum/kept": ("share of the screened prompts whose group is finished", "1"),
    "curriculum/waiting": ("prompts with an unfinished group", "count"),
    # Old and new policy on the accepted draft tokens
    "reuse/log_ratio_mean": ("log π / π_old of accepted draft tokens, mean", "nats"),
    "reuse/log_ratio_p05": ("log π / π_old of accepted tokens, 5th percentile", "nats"),
    "reuse/log_ratio_p50": ("log π / π_old of accepted tokens, median", "nats"),
    "reuse/log_ratio_p95": ("log π / π_old of accepted tokens, 95th percentile", "nats"),
    "reuse/lenient_fraction": ("expected share of accepted tokens that need ℓ > 1", "1"),
    "reuse/kl": ("mean of r − 1 − log r, r = π / π_old, of accepted tokens", "nats"),
    "reuse/rejected_mass": ("rejections over verified draft positions", "1"),
    # Updates
    # Means over tokens are over the rows that the update computes: all, or those with a signal
    # (updates.skip_no_signal). Absent if there are none.
    "policy/loss": ("loss, mean over the step's updates", "1"),
    "policy/kl": ("KL to the reference per token, k3 estimate", "nats"),
    "policy/entropy": ("entropy per token of the untruncated policy", "nats"),
    "policy/balance_loss": ("balance loss of the routers; k if experts are used evenly", "1"),
    "policy/expert_load_max": ("maximum load of an expert over the mean, mean over layers", "1"),
    "policy/clip_fraction": ("share of tokens whose ratio is clipped", "1"),
    "policy/clip_fraction_low": ("of these, tokens whose ratio is below 1", "1"),
    "policy/clip_fraction_high": ("of these, tokens whose ratio is 1 or more", "1"),
    "policy/approx_kl": ("KL of the rollout's policy to the trained one, k3 estimate", "nats"),
    "policy/ratio_mean": ("π / π_old, mean over tokens", "1"),
    "policy/importance_mean": ("importance weight after its cap, mean over tokens", "1"),
    "policy/importance_capped": ("share of tokens whose importance weight is capped", "1"),
    "policy/masked_token_low": ("share of tokens masked, their ratio is too low", "1"),
    "policy/masked_token_high": ("share of tokens masked, their ratio is too high", "1"),
    "policy/masked_row_low": ("share of tokens masked, their row's mean is too low", "1"),
    "policy/masked_row_high": ("share of tokens masked, their row's mean is too high", "1"),
    "policy/masked_outlier_low": ("share of tokens masked, their row has a low ratio", "1"),
    "policy/masked_outlier_high": ("share of tokens masked, their row has a high ratio", "1"),
    "policy/masked_negative_kl": ("share of tokens masked, A < 0 in a row of a large KL", "1"),
    "policy/masked_binary_kl": ("share of tokens masked, their binary KL is large", "1"),
    "policy/solution_nll": ("-log π of the solutions to learn, mean", "nats"),
    "policy/rollout_train_logprob_gap": ("|rollout − training log-prob| per token", "nats"),
    "critic/loss": ("critic's loss per token, mean over the step's updates", "1"),
    "critic/clip_fraction": ("share of tokens whose value is clipped", "1"),
    "critic/explained_variance": ("1 - var(return - value) / var(return)", "1"),
    "critic/value_mean": ("critic's value before the update, mean over tokens", "reward"),
    "critic/grad_norm": ("critic's gradient norm before clipping, mean over updates", "1"),
    "draft_head/loss": ("draft head's loss per token, mean over the step's updates", "1"),
    "draft_head/overlap": ("Σ min(p, q) of the policy and the head's first guess", "1"),
    "draft_head/grad_norm": ("draft head's gradient norm before clipping, mean", "1"),
    "update/signal_fraction": ("share of rows whose loss has a gradient: those computed", "1"),
    "update/selected_fraction": ("share of the step's rows that its updates use", "1"),
    "update/computed_fraction": ("slots computed / slots of padded rows", "1"),
    "update/tokens": ("tokens computed, shared prefixes once, without padding", "tokens"),
    "update/grad_norm": ("global gradient norm before clipping, mean over updates", "1"),
    "update/skipped": ("updates skipped, as loss or gradients were not finite", "count"),
    "update/lr": ("learning rate of the step's last update", "1"),
    # Progress
    "data/prompts_seen": ("prompts rolled out since the run started, counting repeats", "count"),
    "data/passes": ("passes over the training prompts, fractional", "epochs"),
    "data/tokens_generated": ("rollout/tokens_generated of all steps so far", "tokens"),
    # Time
    "time/step": ("the step without evaluation and checkpoint", "seconds"),
    "time/total": ("the same over all steps so far", "seconds"),
    "time/rollout": ("rollout, including verification", "seconds"),
    "time/prefill": ("part of the rollout: prefill of prompts and drafts", "seconds"),
    "time/decode": ("part of the rollout: decoding after the prefixes", "seconds"),
    "time/reward": ("scoring the responses", "seconds"),
    "time/environment": ("part of these: waiting for the environment's replies", "seconds"),
    "time/update": ("the step's optimizer updates", "seconds"),
    "time/eval": ("rollout and scoring of held-out prompts", "seconds"),
    "time/compile": ("compiling programs or reading them, since the last record", "seconds"),
    # Speed and memory. The FLOPs of a step are 2·N for each token that the rollout generated or
    # verified, and 6·N (with adapters 4·N) for each of `update/tokens`. N: parameters, without
    # embeddings that are not a head. Not counted: attention, prompts in the rollout, and passes of
    # a reference, a critic or a draft head. Absent on chips without a value in `process.chips`.
    "speed/tokens": ("generated and reused tokens over time/step", "tokens/second"),
    "speed/tokens_generated": ("generated tokens over time/rollout", "tokens/second"),
    "speed/mfu": ("model FLOPs a second over the peak of all devices, in bfloat16", "1"),
    "memory/peak": ("peak memory in use on a device since the process started", "GiB"),
    "compile/built": ("programs compiled since the last record", "count"),
    "compile/read": ("programs read from the compilation cache since then", "count"),
}
METRICS: dict[str, tuple[str, str]] = Table("METRICS", _OWN)

# JSONL --------------------------------------------------------------------------------------


def _encode(step: int, epoch: int, values: Mapping[str, float]) -> bytes:
    """Return a line. JSON has no nan or inf: such values are null, and listed in `nonfinite`."""
    nonfinite = {name: str(x) for name, x in values.items() if not math.isfinite(x)}
    record = {"step": step, "epoch": epoch} | dict(values) | dict.fromkeys(nonfinite)
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _scan(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (offset of the line's end, record) of each complete line; skips a torn last one."""
    records: list[tuple[int, dict[str, Any]]] = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    end = 0
    for number, line in enumerate(lines, start=1):
        end += len(line)
        record = _decode(line, f"{path}: line {number} (restore the file or remove the line)")
        if records and record["step"] <= records[-1][1]["step"]:
            raise ValueError(f"{path}: line {number} must be of a later step than the line before")
        records.append((end, record))
    return records


def _decode(line: bytes, where: str) -> dict[str, Any]:
    """Return the record in a line; errors start with `where`."""
    record = json_object(line, where, ("step", "epoch"))
    nonfinite = record.pop("nonfinite", {})
    with one_line(f"{where} must name metrics and their values in 'nonfinite'"):
        record |= {name: float(text) for name, text in nonfinite.items()}
    for name, value in record.items():
        is_count = name in ("step", "epoch")
        # A float, or an integer that a float can represent.
        is_number = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if not is_number or (is_count and not (type(value) is int and value >= 0)):
            rule = "a whole number >= 0" if is_count else "a number"
            raise ValueError(f"{where} must have {rule} as {name!r}, got {value!r:.40}")
    return record


def read_metrics(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the records of `WORKDIR/metrics.jsonl`, by step; [] without a file.

    nan and inf are floats again. An unfinished last line (the run is writing, or was killed) is
    skipped. Metrics of an older version get their new names.
    """
    records = [record for _, record in _scan(Path(workdir) / FILE_NAME)]
    return [{_RENAMED.get(name, name): x for name, x in record.items()} for record in records]


# The log ------------------------------------------------------------------------------------


def _scalar(name: str, value: Any) -> float | int:
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(f"metric {name!r} must be a scalar, got shape {array.shape}")
    value = array.item()
    return int(value) if isinstance(value, bool) else value


class MetricsLog(contextlib.AbstractContextManager):
    """Writes a run's metrics; a context manager.

    workdir: contains `metrics.jsonl` and what the tracker writes; created if missing.
    tracker: a name of `tracking.TRACKERS`. config: of the run, for the tracker.
    functions: of a reward that is a sum, which have their own metrics.

    Raises ValueError for a damaged `metrics.jsonl`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        total_steps: int,
        tracker: str,
        config: Mapping[str, Any],
        functions: Sequence[str] = (),
    ):
        workdir = Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / FILE_NAME
        read_metrics(workdir)  # a damaged file is rejected before it is opened
        self._file = open(self._path, "ab")  # noqa: SIM115 - open for the log's lifetime
        self.restore(math.inf)
        by_function = [f"reward/{part}{name}" for part in ("", "eval/") for name in functions]
        self._names = [*METRICS, *by_function]  # in record order
        environment = config.get("environment", {}).get("name", "")
        self._console = Console(total_steps, environment=bool(environment))
        self._tracker = SafeTracker(tracker, workdir, config)

    def restore(self, step: float) -> None:
        """Remove the records after `step` and an unfinished last line.

        Call it with the restored checkpoint's step before the next `write`. Warns if the file lacks
        steps up to `step`.
        """
        kept = [(end, record) for end, record in _scan(self._path) if record["step"] <= step]
        # Steps only increase, so the removed records are the file's end: a cut there is safe.
        size, self._last_step = (kept[-1][0], kept[-1][1]["step"]) if kept else (0, -1)
        os.truncate(self._path, size)
        os.fsync(self._file.fileno())
        if max(self._last_step, 0) < step < math.inf:
            end = f"ends at step {self._last_step}" if kept else "is empty"
            _log.warning(
                "%s %s, the checkpoint is from step %d: the steps between are lost",
                self._path, end, step,
            )  # fmt: skip

    def write(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        """Write one step; on return the record is on disk.

        step: greater than every step in the file.
        values: scalars (Python, NumPy or JAX) by name.

        Raises ValueError for a name that is not in `METRICS`, a value that is not a scalar, or an
        old step.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step must be > {self._last_step}, the last in {self._path}, got {step}; "
                "call restore(step) to write over it"
            )
        if unknown := sorted(values.keys() - set(self._names)):
            raise ValueError(
                f"metric must be a name in METRICS, got {unknown[0]!r}: add it to "
                "METRICS of telemetry/metrics.py, or of the recipe that measures it"
            )
        scalars = {name: _scalar(name, values[name]) for name in self._names if name in values}
        try:
            self._file.write(_encode(step, epoch, scalars))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise disk_error(self._path, error) from error
        self._last_step = step
        self._console.show(step, epoch, scalars)
        self._tracker.log(step, epoch, scalars)

    def show(self, line: str) -> None:
        self._console.write_line(line)

    def send_rollouts(self, step: int) -> None:
        """Send some of the step's recorded responses to the tracker."""
        self._tracker.log_rollouts(step)

    def __exit__(self, *_: object) -> None:
        self._console.close()
        if line := self._tracker.close():
            print(line, flush=True)
        with contextlib.suppress(OSError):  # `write` reported a full disk
            self._file.close()


class NoLog(contextlib.AbstractContextManager):
    """Substitute for a `MetricsLog` in a process that does not write because another one does."""

    def write(self, step: int, epoch: int, values: Mapping[str, Any]) -> None:
        pass

    def show(self, line: str) -> None:
        pass

    def send_rollouts(self, step: int) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


# Seconds ------------------------------------------------------------------------------------


class Stopwatch:
    """Adds up wall-clock seconds by name until they are taken."""

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the `with` block to those of `name`; nothing if it raises."""
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def so_far(self) -> dict[str, float]:
        """Return the seconds by name."""
        return dict(self._seconds)

    def take(self) -> dict[str, float]:
        """Return the seconds by name, and reset them."""
        seconds = self._seconds
        self._seconds = {}
        return seconds
