"""A run's metrics on wandb or TensorBoard, with its configuration, sample rollouts and report.

Responses of a step are sent during the run, when the console shows some, and a selection over all
steps at its end. A failure of either library is one warning; training continues. Both work without
a network: `close` explains how to send or view what was written.
"""

import contextlib
import importlib.util
import json
import logging
import os
import shlex
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from specrl_jax import __version__
from specrl_jax.registry import Table
from specrl_jax.telemetry.code_state import git_state
from specrl_jax.telemetry.records import read_rollouts, read_some_rollouts

_SAMPLES_BYTES = 1 << 18  # of the recorded responses to send
_STEP_SAMPLES = 64  # responses of a step that are sent during the run
_COLUMNS = ("step", "epoch", "prompt", "answer", "sample", "text", "reward", "reused")
_MAX_NAME = 64  # characters of a wandb name or tag

_log = logging.getLogger(__name__)


class Tracker:
    """Receiver of metrics besides `metrics.jsonl`. This one drops them; others may raise.

    workdir: of the run, which exists. config: nested, with what describes the run.
    """

    module: ClassVar[str] = ""  # what must be installed
    install: ClassVar[str] = ""  # how to install it

    def __init__(self, workdir: Path, config: Mapping[str, Any]):
        pass

    def log(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Receive a step's metrics; steps increase, but start further back after a resume."""

    def log_rollouts(self, step: int) -> None:
        """Send some of the step's recorded responses."""

    def close(self) -> str:
        """Send sample rollouts and the report; return a message for the user, or ""."""
        return ""


class Wandb(Tracker):
    """A wandb run: online if logged in, else offline. $WANDB_MODE and related variables apply."""

    module = "wandb"
    install = "pip install wandb"

    def __init__(self, workdir: Path, config: Mapping[str, Any]):
        self._workdir = workdir
        self._run = None
        mode = _wandb_mode()
        try:
            self._run = _start_wandb(workdir, mode, config)
        except Exception as error:
            if mode != "online":
                raise
            _warn("wandb online", error)  # no network, or a wrong key: send it later
            self._run = _start_wandb(workdir, "offline", config)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("reward/eval", step_metric="step", summary="max,last")

    def log(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        # Not as wandb's own step, which cannot go back after a resume.
        self._run.log({"step": step, "epoch": epoch, **values})

    def log_rollouts(self, step: int) -> None:
        if samples := step_rollouts(self._workdir, step):
            self._run.log({"step": step, "rollouts": self._table(samples)})

    def close(self) -> str:
        try:
            self._send_files()
        finally:
            self._run.finish()
        if self._run.settings.mode == "offline":
            folders = shlex.join(map(str, self._unsent()))
            return f"wandb: to send this run: wandb sync {folders}"
        return f"wandb: {self._run.url}" if self._run.url else ""

    def _unsent(self) -> list[Path]:
        """Return this run's folders, oldest first; each start of an offline run makes one."""
        newest = Path(self._run.dir).parent
        folders = sorted(newest.parent.glob(f"offline-run-*-{self._run.id}"))
        # `wandb sync` leaves a file with this name in a folder that it has sent.
        unsent = [folder for folder in folders if not any(folder.glob("*.synced"))]
        return [*(folder for folder in unsent if folder != newest), newest]

    def _table(self, samples: list[dict[str, Any]]) -> Any:
        import wandb

        rows = [[sample[name] for name in _COLUMNS] for sample in samples]
        return wandb.Table(columns=list(_COLUMNS), data=rows)

    def _send_files(self) -> None:
        import wandb

        if samples := sample_rollouts(self._workdir):
            self._run.log({"rollouts": self._table(samples)})
        report = self._workdir / "report.html"
        if report.exists():
            artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
            artifact.add_file(str(report))
            self._run.log_artifact(artifact)


class TensorBoard(Tracker):
    """Event files in WORKDIR/tensorboard."""

    module = "tensorboardX"
    install = "pip install -e '.[tensorboard]' in the clone's directory"

    def __init__(self, workdir: Path, config: Mapping[str, Any]):
        self._workdir = workdir
        self._config = config
        self._folder = workdir / "tensorboard"
        self._writer = None
        self._last_step = 0
        self._sent: set[int] = set()  # steps whose responses were sent during the run

    def log(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # After a resume TensorBoard forgets the steps that are computed again.
            options = {"purge_step": step or None, "filename_suffix": f".from_{step}"}
            self._writer = SummaryWriter(str(self._folder), **options)
            text = json.dumps(self._config, indent=2, default=dict)
            self._writer.add_text("config", _as_code(text), step)
        for name, value in {"data/epoch": epoch, **values}.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
        self._last_step = step

    def log_rollouts(self, step: int) -> None:
        if self._writer is not None:
            self._add_texts(step_rollouts(self._workdir, step))
            self._sent.add(step)

    def _add_texts(self, samples: list[dict[str, Any]]) -> None:
        for sample in samples:
            title = f"rollouts/{sample['prompt'][:40]} #{sample['sample']}"
            facts = f"reward {sample['reward']}, {sample['reused']:.0%} of the tokens reused"
            text = _as_code(f"{sample['prompt']}\n{sample['text']}")
            self._writer.add_text(title, f"{facts}\n\n{text}", sample["step"])

    def close(self) -> str:
        if self._writer is None:
            return ""
        samples = sample_rollouts(self._workdir)
        self._add_texts([sample for sample in samples if sample["step"] not in self._sent])
        self._writer.close()
        return f"tensorboard: to see this run: tensorboard --logdir={self._folder}"


# `log.tracker`. The only place where a tracker's name is written.
TRACKERS: dict[str, type[Tracker]] = Table(
    "TRACKERS", {"none": Tracker, "wandb": Wandb, "tensorboard": TensorBoard}
)


def check_installed(name: str) -> None:
    """Raise a one-line ValueError if the tracker's library is missing."""
    tracker = TRACKERS[name]
    if tracker.module and importlib.util.find_spec(tracker.module) is None:
        raise ValueError(f"log.tracker = {name} needs {tracker.module}: {tracker.install}")


class SafeTracker:
    """A tracker whose first failure is a warning; after that it does nothing."""

    def __init__(self, name: str, workdir: Path, config: Mapping[str, Any]):
        self._name = name
        self._tracker = None
        with self._failure_is_a_warning("starting"):
            described = {"version": __version__, "git": git_state()}
            self._tracker = TRACKERS[name](workdir, dict(config) | described)

    def log(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if self._tracker is not None:
            with self._failure_is_a_warning("logging"):
                self._tracker.log(step, epoch, values)

    def log_rollouts(self, step: int) -> None:
        if self._tracker is not None:
            with self._failure_is_a_warning("logging responses"):
                self._tracker.log_rollouts(step)

    def close(self) -> str:
        tracker = self._tracker
        self._tracker = None
        if tracker is not None:
            with self._failure_is_a_warning("closing"):
                return tracker.close()
        return ""

    @contextlib.contextmanager
    def _failure_is_a_warning(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._tracker = None
            _warn(f"{self._name}: {what}", error)


def _warn(what: str, error: Exception) -> None:
    reason = (str(error).splitlines() or [""])[0]
    _log.warning("%s failed, training continues: %r", what, reason)


# What is sent -------------------------------------------------------------------------------


def sample_rollouts(workdir: Path) -> list[dict[str, Any]]:
    """Return recorded training responses to a few prompts over all their steps; [] if none.

    reused: the share of the response's tokens.
    """
    return list(map(_sample, read_some_rollouts(workdir, _SAMPLES_BYTES)[0]["step"]))


def step_rollouts(workdir: Path, step: int) -> list[dict[str, Any]]:
    """Return the first recorded responses of a training step, as `sample_rollouts` does."""
    return list(map(_sample, read_rollouts(workdir, step)[:_STEP_SAMPLES]))


def _sample(line: Mapping[str, Any]) -> dict[str, Any]:
    columns = {name: line[name] for name in _COLUMNS if name != "reused"}
    return columns | {"reused": line["prefix_len"] / max(len(line["token_ids"]), 1)}


def _as_code(text: str) -> str:
    """Return a block of Markdown that shows any text verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())


# wandb --------------------------------------------------------------------------------------


def _wandb_mode() -> str:
    """Return $WANDB_MODE, else online if logged in: without a key wandb would ask, or block."""
    from requests.utils import get_netrc_auth

    if mode := os.environ.get("WANDB_MODE"):
        return mode
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    logged_in = os.environ.get("WANDB_API_KEY") or get_netrc_auth(url)
    return "online" if logged_in else "offline"


def _start_wandb(workdir: Path, mode: str, config: Mapping[str, Any]) -> Any:
    import wandb

    id_file = workdir / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    run_id = id_file.read_text("utf-8").strip()
    folder = workdir.resolve()
    # Work directories with the same name get different names; those in one folder are a group.
    names = {"name": f"{folder.name[: _MAX_NAME - 5]}-{run_id[:4]}", "group": folder.parent.name}
    variables = {"name": "WANDB_NAME", "group": "WANDB_RUN_GROUP", "tags": "WANDB_TAGS"}
    fields = (("data", "name"), ("rollout", "draft"), ("rollout", "accept"))
    tags = [str(config.get(section, {}).get(field, "")) for section, field in fields]
    names["tags"] = [tag[:_MAX_NAME] for tag in tags if tag]
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "specrl_jax"),
        id=run_id,
        resume="allow" if mode == "online" else None,
        dir=str(workdir),
        mode=mode,
        config=dict(config),
        # console="off": wandb would replace stdout, and the progress bar writes there.
        settings=wandb.Settings(console="off", silent=True, init_timeout=30),
        **{key: x for key, x in names.items() if x and not os.environ.get(variables[key])},
    )
