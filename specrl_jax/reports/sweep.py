"""Training runs with several settings and seeds, each a process of launch/train.py.

Takes settings from flags or from a configuration's `get_hyper`. Creates work directories that the
same sweep reads again: finished runs are not started, unfinished ones resume.
"""

import contextlib
import dataclasses
import fcntl
import functools
import inspect
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specrl_jax.command_line import cli
from specrl_jax.config import flatten, hyper
from specrl_jax.reports import report_page, sweep_table
from specrl_jax.reports.runs import read_run
from specrl_jax.settings import schema

_TRAIN = Path(__file__).resolve().parents[2] / "launch" / "train.py"
_TIME_LIMIT = 24 * 60  # minutes of a job on a cluster, unless an option says otherwise
_SHOWS_EVERY = 10.0  # seconds; the newest line of a run's output
_HEADING = re.compile(r"^ *step epoch .*", re.MULTILINE)  # of the table of telemetry.console
_WARNING = re.compile(r"^warning: .*", re.MULTILINE)
_STEP = re.compile(r"^ *\d+/\d+ .*", re.MULTILINE)  # a line of it
# Last line of a run that a signal ended; it exits with 0, as it saved everything.
_STOPPED_AT = re.compile(r"SIG\w+, saved at step \d+ of \d+")
_STOPPED = re.compile(rf"({_STOPPED_AT.pattern}); run the same command to resume")
_ENDED = re.compile(r"^ended with -?\d+: ")
# Message of a run that ended because a number was not finite.
_DIVERGED = re.compile(r"(step \d+|warm-up): [^;]* is (-?inf|nan)\b[^;]*")


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting."""

    name: str
    config: str  # configuration file[:preset]
    changes: tuple[str, ...] = ()  # FIELD=VALUE


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One case with one seed."""

    case: str
    command: tuple[str, ...]  # of launch/train.py
    workdir: Path
    config: str  # the resolved configuration, as JSON
    seed: int
    settings: dict[str, Any]  # file and value of every field that some case sets

    @property
    def done(self) -> Path:
        """File with `config`, written once the run has finished."""
        return self.workdir / "done.json"

    @property
    def finished(self) -> bool:
        """True if the run has finished with this configuration."""
        return self.done.exists() and self.done.read_text("utf-8") == self.config


# Cases ---------------------------------------------------------------------------------------


def parse_case(text: str, config: str) -> Case:
    """Parse "NAME: [CONFIG] FIELD=VALUE FIELD=VALUE ..."; CONFIG is `config` by default."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    words = rest.split()
    files = [word for word in words if "=" not in word]
    if not colon or not name or len(files) > 1:
        raise ValueError(f"--case must be 'NAME: [CONFIG] FIELD=VALUE ...', got {text!r}")
    if not files and not config:
        raise ValueError(f"--case names no configuration file and there is no --config: {text!r}")
    changes = [word.partition("=") for word in words if "=" in word]
    return Case(
        name, files[0] if files else config, tuple(f"{f}={_flag_text(v)}" for f, _, v in changes)
    )


def parse_sweep(text: str) -> hyper.Sweep:
    field, _, values = text.partition("=")
    values = values.split(",")
    if not re.fullmatch(r"\w+(\.\w+)*", field) or not all(values):
        raise ValueError(f"--sweep must be FIELD=VALUE,VALUE,..., got {text!r}")
    return hyper.sweep(field, values)


def config_sweep(config: str) -> hyper.Sweep:
    """Call `get_hyper` of a configuration file, with or without the argument `hyper`."""
    cli.read_config([f"--config={config}"])  # a mistake in the file is one line
    file = config.partition(":")[0]
    get_hyper = None if file.endswith(".json") else runpy.run_path(file).get("get_hyper")
    if get_hyper is None:
        raise ValueError(f"give --sweep or --case, or define get_hyper(hyper) in {config}")
    overrides = get_hyper(hyper) if inspect.signature(get_hyper).parameters else get_hyper()
    if not isinstance(overrides, list) or not all(isinstance(x, Mapping) for x in overrides):
        raise ValueError(f"get_hyper of {config} must return a list of dicts, got {overrides!r}")
    return [{k.removeprefix("config."): v for k, v in x.items()} for x in overrides]


def grid(cases: Sequence[Case], overrides: hyper.Sweep) -> list[Case]:
    """Return every case with every override, named after both."""
    return [
        Case(
            ",".join(filter(None, [case.name, *(f"{k}={_name(v)}" for k, v in change.items())])),
            case.config,
            (*case.changes, *(f"{k}={_flag_text(v)}" for k, v in change.items())),
        )
        for case in cases
        for change in overrides
    ]


def _name(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flag_text(value: Any) -> str:
    """Return a value in the form of --config.FIELD; e^0.5 is 1.6487."""
    power = re.fullmatch(r"e\^(-?\d+(\.\d+)?)", str(value))
    return repr(math.exp(float(power[1]))) if power else str(value)


def training_runs(
    cases: Sequence[Case], seeds: Sequence[int], folder: Path, rest: Sequence[str]
) -> list[TrainingRun]:
    """Return every case with every seed; rest: further --config.FIELD=VALUE flags, for all cases.

    Raises a one-line ValueError if a configuration is invalid, a flag has no effect, or two runs
    would share a work directory.
    """
    runs: dict[Path, TrainingRun] = {}
    flags_by_case = _flags(cases, rest)
    fields = dict.fromkeys(change.partition("=")[0] for case in cases for change in case.changes)
    has_files = len({case.config for case in cases}) > 1
    for seed in seeds:
        for case, case_flags in zip(cases, flags_by_case, strict=True):
            flags = (*case_flags, f"--config.seed={seed}")
            config = cli.read_config(flags)
            workdir = folder / re.sub(r"[ /]", "_", f"{case.name or 'base'},seed={seed}")
            if workdir in runs:
                raise ValueError(f"two runs would be in {workdir}; name every case and seed once")
            resolved = json.dumps(config.to_dict(), sort_keys=True)
            command = (sys.executable, str(_TRAIN), *flags, f"--workdir={workdir}")
            values = dict(flatten(config))
            settings = {"config": case.config} if has_files else {}
            settings |= {field: values.get(field, "") for field in fields}
            name = case.name or "base"
            runs[workdir] = TrainingRun(name, command, workdir, resolved, seed, settings)
    return list(runs.values())


def _flags(cases: Sequence[Case], shared: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the flags of each case, without the shared ones that do nothing there.

    For example, the case without drafts has no acceptance rule.
    """
    flags_by_case = []
    idle: list[dict[str, str]] = []  # for each case: shared flag → why it has no effect there
    for case in cases:
        own = [f"--config.{change}" for change in case.changes]
        # The last flag of a field counts: swept flags go after shared ones.
        config = cli.read_config((f"--config={case.config}", *shared, *own))
        schema().validate(config)
        for flag in own:
            if line := schema().without_effect(config, _field(flag)):
                raise ValueError(f"{line}; case {case.name}")
        lines = {flag: schema().without_effect(config, _field(flag)) for flag in shared}
        idle.append({flag: line for flag, line in lines.items() if line})
        useful = [flag for flag in shared if not lines[flag]]
        flags_by_case.append((f"--config={case.config}", *useful, *own))
    for flag in shared:
        if all(flag in lines for lines in idle):
            raise ValueError(idle[0][flag])
    return flags_by_case


def _field(flag: str) -> str:
    """--config.FIELD=VALUE → FIELD."""
    return flag.removeprefix("--config.").partition("=")[0]


# Runs ----------------------------------------------------------------------------------------


class Training:
    """Function that trains a run to its end and returns "", or one line with the reason it failed.

    submitit can send it to a cluster. When this process is interrupted, the run gets SIGTERM, so
    that it saves.
    """

    def __init__(self, run: TrainingRun):
        self._run = run
        self._process = None

    def __call__(self) -> str:
        run = self._run
        output = self._run.workdir / "output.txt"
        run.workdir.mkdir(parents=True, exist_ok=True)
        with (run.workdir / "lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a run of a killed sweep must end first
        with output.open("a+", encoding="utf-8", errors="replace") as file:
            start = file.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                run.command,
                stdout=file,
                stderr=file,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C reaches only this process, which passes it on once
            )
            try:
                code = self._wait(output, start)
            except BaseException:
                self.stop()
                raise
            file.seek(start)
            said = file.read().strip()
        if code:
            last = said.split("\n")[-1].strip().removeprefix("error: ") or "it printed nothing"
            return f"ended with {code}: {last}; see {output}"
        if stopped := _STOPPED.search(said):
            return stopped[1]
        run.done.write_text(run.config, encoding="utf-8")
        return ""

    def _wait(self, output: Path, start: int) -> int:
        """Return the exit code; until then show the newest line of the output from `start` on."""
        _say(f"{self._run.workdir.name}: running, with its output in {output}")
        shown = set()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(_SHOWS_EVERY)
            said = output.read_bytes()[start:].decode(errors="replace").rpartition("\n")[0]
            newest = (_STEP.findall(said) or said.splitlines())[-1:]
            first = (*_WARNING.findall(said)[:1], *_HEADING.findall(said)[:1])
            for line in (*first, *newest):
                if line not in shown:
                    shown.add(line)
                    _say(line)

    def stop(self) -> None:
        """Make the run finish its step and save."""
        self._process.terminate()
        with contextlib.suppress(ChildProcessError):  # it has ended
            # Not `wait`: a signal's handler calls this while `wait` holds its lock.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)

    def checkpoint(self):
        """Return what submitit runs later, after a job's time limit or preemption."""
        from submitit.helpers import DelayedSubmission

        self.stop()
        return DelayedSubmission(Training(self._run))

    def _environment(self) -> dict[str, str]:
        """Add wandb's group (the sweep) and tags (case, seed); the user's own take precedence."""
        workdir = self._run.workdir
        # wandb allows at most 64 characters per tag, and does not truncate.
        tags = ",".join(tag[:64] for tag in workdir.name.split(","))
        names = {"WANDB_RUN_GROUP": workdir.absolute().parent.name, "WANDB_TAGS": tags}
        return names | os.environ | {"PYTHONIOENCODING": "utf-8"}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Starts a run; the result waits for its end, and returns "" or why the run failed.
Submit = Callable[[TrainingRun], Callable[[], str]]


def submitter(cluster: str, options: Mapping[str, Any], folder: Path) -> Submit:
    """Return the function that starts runs.

    cluster: "" to run them one by one here, else submitit's "slurm" or "local" (parallel processes
        here). options: of its `update_parameters`.
    """
    if not cluster:
        return Training
    try:
        import submitit
    except ImportError:
        raise ValueError(
            "--cluster needs submitit: pip install -e '.[slurm]' in the clone's directory"
        ) from None
    try:
        executor = submitit.AutoExecutor(folder=folder / "jobs", cluster=cluster)
        executor.update_parameters(**{"name": folder.name, "timeout_min": _TIME_LIMIT} | options)
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"--cluster: {str(error).splitlines()[0]}") from error

    def submit(run: TrainingRun) -> Callable[[], str]:
        noted = run.workdir / "job"
        if cluster == "slurm" and noted.exists():  # from an earlier sweep, which was stopped
            job = submitit.SlurmJob(folder / "jobs", noted.read_text("utf-8"))
            if not job.done():
                return functools.partial(_result, job, noted)
        job = executor.submit(Training(run))
        run.workdir.mkdir(parents=True, exist_ok=True)
        noted.write_text(job.job_id, encoding="utf-8")
        return functools.partial(_result, job, noted)

    return submit


def _result(job: Any, noted: Path) -> str:
    from submitit.core.utils import UncompletedJobError

    try:
        reason = job.result()
    except UncompletedJobError as error:
        reason = f"job {job.job_id}: {str(error).splitlines()[0]}; see {job.paths.stderr}"
    noted.unlink(missing_ok=True)
    return reason


def train_all(runs: Sequence[TrainingRun], submit: Submit) -> dict[Path, str]:
    """Train every run that is not finished; report on stderr how each proceeds and ends.

    Returns why runs failed, by work directory.
    """
    waits = ((run, (lambda: "") if run.finished else submit(run)) for run in runs)
    if submit is not Training:
        waits = list(waits)  # start all of them, to run in parallel
    failed = {}
    for number, (run, wait) in enumerate(waits, start=1):
        if reason := wait():
            failed[run.workdir] = reason
        status = f"failed, {reason}" if reason else "done"
        _say(f"{number}/{len(runs)} {run.workdir.name}: {status}")
    return failed


def _state(reason: str) -> str:
    """Return a run's outcome in short; reason: why it failed, "" if it did not."""
    if not reason:
        return sweep_table.DONE
    if diverged := _DIVERGED.search(reason):
        return f"diverged at {diverged[0]}"
    if _STOPPED_AT.match(reason):
        return f"stopped by {reason}"
    return f"failed: {_ENDED.sub('', reason).partition('; ')[0]}"


def write_results(
    runs: Sequence[TrainingRun],
    failed: Mapping[Path, str],
    baseline: str,
    folder: Path,
    target: float = 0.0,
) -> str:
    """Write the table of all runs, and plots and a report of the finished ones.

    Returns the Markdown.
    """
    swept = []
    for run in runs:
        reason = failed.get(run.workdir, "")
        record = None if reason else read_run(run.workdir)
        swept.append(sweep_table.SweptRun(run.case, run.seed, run.settings, _state(reason), record))
    text = sweep_table.write(swept, baseline, folder, target)
    done = [run for run in runs if run.workdir not in failed]
    if not done:
        return f"{text}\n\nNo run finished. {folder / 'sweep.md'}, sweep.csv"
    report = report_page.FILE_NAME
    report_page.write_report([run.workdir for run in done], folder / report, baseline)
    return f"{text}\n\n{folder / 'sweep.md'}, sweep.csv, sweep.png, epochs.png, {report}"
