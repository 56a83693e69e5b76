"""The loop: collect a batch, learn from it, and evaluate, record and save on the way."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from specrl_jax import hosts, memory, programs, shapes
from specrl_jax.build import build
from specrl_jax.checkpoint import Checkpointer, check_run_config, save_run_config
from specrl_jax.collect import collect, measure_rollout, record_failures
from specrl_jax.config import flatten
from specrl_jax.data.prompts import concatenate
from specrl_jax.episodes import Responses, timed
from specrl_jax.evaluate import evaluate
from specrl_jax.learn import learn
from specrl_jax.models.transformer import Params, rollout_weights
from specrl_jax.rewards.failures import FILE_NAME as FAILURES
from specrl_jax.rewards.failures import FailureLog
from specrl_jax.rollout.generate import Noise
from specrl_jax.rollout.sampling import Purpose
from specrl_jax.run import Run
from specrl_jax.runtime import compile_metrics, only_process
from specrl_jax.state import RunState, init_state, resume
from specrl_jax.stop import StopRequest
from specrl_jax.telemetry.code_state import record_code
from specrl_jax.telemetry.metrics import FILE_NAME as METRICS
from specrl_jax.telemetry.metrics import MetricsLog, NoLog, read_metrics
from specrl_jax.telemetry.records import FOLDER as ROLLOUTS
from specrl_jax.telemetry.records import RolloutRecords
from specrl_jax.telemetry.report_page import FILE_NAME as REPORT
from specrl_jax.telemetry.report_page import ReportWriter
from specrl_jax.telemetry.runs import read_run
from specrl_jax.telemetry.summary import summary
from specrl_jax.telemetry.tracking import check_installed
from specrl_jax.types import Prompts

# What a resumed run may change: where and how long it runs, how it is recorded and evaluated.
MAY_CHANGE = (
    "log", "checkpoint", "mesh", "model.attention", "train", "evaluate.every", "evaluate.samples",
    "evaluate.batch_size",
)  # fmt: skip
# What may differ in a run that begins with another's checkpoint: nothing that its arrays depend on.
MAY_CHANGE_FROM_OTHER = (
    *MAY_CHANGE, "resume_from", "updates", "evaluate", "reward", "critic.learning_rate",
    "critic.schedule_warmup", "critic.warmup_steps", "critic.coef", "critic.clip",
    "algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "algorithm.kl_coef",
    "algorithm.entropy_coef",
)  # fmt: skip


def step(
    run: Run,
    state: RunState,
    records: RolloutRecords | None = None,
    failures: FailureLog | None = None,
) -> dict[str, float]:
    """One batch of rollouts and its updates; changes `state`, returns the step's metrics."""
    epoch = state.epoch
    state.step += 1
    batch = collect(run, state)
    if records is not None and records.active:
        rollouts = [(x.prompts, x.responses) for x in batch.rollouts]
        on_host = _on_host(rollouts, run.rollout_spec.group_size)
        if hosts.is_primary():
            records.write(state.step, epoch, *on_host)
    if failures is not None:
        record_failures(failures, run, state.step, batch.rollouts)
    times = {}
    with timed(times, "time/update"):
        values = learn(run, state, batch)
    seen = state.prompts_seen
    values |= {"data/prompts_seen": seen, "data/passes": seen / len(run.prompts.lens)}
    return values | batch.metrics | times


def train(config, workdir: Path, resume_from: str = "", stop: StopRequest | None = None) -> None:
    """Run `config` in `workdir`, from where it stands there to its end, on the mesh in use.

    resume_from: RUN@STEP, the checkpoint of another work directory that a new `workdir` begins
    with. stop: a request in whose `with` block this is called. Raises ValueError in one line where
    the configuration, the data or `workdir` do not allow it, FloatingPointError where training
    diverges.
    """
    if stop is None:
        with StopRequest() as stop:
            train(config, workdir, resume_from, stop)
        return
    check_installed(config.log.tracker)
    described = config.to_dict() | ({"resume_from": resume_from} if resume_from else {})
    flags = dict(flatten(described)) | {"--workdir": str(workdir)}
    hosts.check_same(flags, "start them with the same flags")
    hosts.on_primary(_check_places, workdir)
    has_config = hosts.on_primary(check_run_config, workdir, described, ignore=MAY_CHANGE)
    if resume_from and not has_config:
        _parse_origin(resume_from, config)  # a mistake shows before anything is loaded
    keep = {"keep_last": config.checkpoint.keep_last, "keep_best": config.checkpoint.keep_best}
    run, params = build(config)
    hosts.check_same(run.fingerprints, "give them the same files")
    with (
        run.scorer.pool,
        memory.named(config, run.model, len(run.prompts.lens)),
        only_process(workdir),
        Checkpointer(workdir / "checkpoints", **keep) as checkpoints,
    ):
        last = checkpoints.latest_step()
        hosts.on_primary(_check_complete, workdir, last, has_config)
        state = resume(run, params, checkpoints) if last is not None else None
        if state and state.step >= run.total_steps:
            print(f"{workdir}: finished at step {state.step} of {run.total_steps}, nothing to do")
            return
        run.scorer.pool.warm_up()
        if state is None and resume_from:
            state = _resume_from(resume_from, run, params)
        elif state is None:
            state = init_state(run, params)
        del params
        if hosts.is_primary():
            save_run_config(workdir, described)  # from here on the directory is this run's
            record_code(workdir)
        records = _open_records(run, workdir)
        with _open_log(run, workdir) as log, stop.finishing_steps():
            restored = state.step if last else 0
            for written in (log, records) if hosts.is_primary() else ():
                written.restore(restored or -1)  # step 0 is evaluated and written again
            failures = FailureLog(workdir if hosts.is_primary() else None, log.warn)
            writes = config.log.report and hosts.is_primary()
            with _way_on(checkpoints), ReportWriter(workdir, writes, log.warn) as page:
                prepare(run, state)
                loop(run, state, checkpoints, log, records, failures, stop, page)
    if hosts.is_primary():
        _finish(run, state, workdir, stop.name if state.step < run.total_steps else "")


def prepare(run: Run, state: RunState) -> None:
    """Compile the run's programs side by side, and time those that choices depend on."""
    programs.compile_run(shapes.of_run(run), state.arrays())
    if state.speculation is not None and state.speculation.seconds is None:
        state.speculation.seconds = measure_rollout(run, state)


def loop(
    run: Run,
    state: RunState,
    checkpoints: Checkpointer,
    log: MetricsLog | NoLog,
    records: RolloutRecords,
    failures: FailureLog,
    stop: StopRequest,
    page: ReportWriter,
) -> None:
    """Steps until the last one or a stop request; evaluates, records and saves on the way."""
    if state.step == 0:
        values = held_out_metrics(run, state, 0, records)
        log.write(0, 0, values | compile_metrics())
        checkpoints.save(0, state.arrays(), state.host(), metric=values.get("reward/eval"))
    else:
        checkpoints.save(state.step, state.arrays(), state.host())  # nothing if it is there
    checkpoints.wait()  # where metrics of a step have no checkpoint, files were lost
    stopped = False
    while state.step < run.total_steps and not (stopped := stop.agreed()):
        epoch = state.epoch
        start = time.perf_counter()
        values = step(run, state, records, failures)
        values["time/step"] = time.perf_counter() - start
        last = state.step == run.total_steps
        every = run.config.evaluate.every
        if every and (state.step % every == 0 or last):
            values |= held_out_metrics(run, state, epoch, records)
        # Recorded first: a checkpoint without its record would lose the step on a resume.
        log.write(state.step, epoch, values | compile_metrics())
        if state.step % run.config.checkpoint.every == 0 or last:
            metric = values.get("reward/eval")
            checkpoints.save(state.step, state.arrays(), state.host(), metric=metric)
            page.refresh()
    if stopped:
        checkpoints.save(state.step, state.arrays(), state.host())  # nothing if it is there


def held_out_metrics(
    run: Run, state: RunState, epoch: int, records: RolloutRecords
) -> dict[str, float]:
    """Mean reward on held-out prompts; nothing where the run has none. Records the responses."""
    if not run.held_out:
        return {}
    values = {}
    with timed(values, "time/eval"):
        weights = rollout_weights(run.model, state.train.params)
        noise = Noise(run.key, state.step, Purpose.EVALUATE)
        inputs = (run.eval_spec, weights, run.held_out, noise, run.scorer)
        values["reward/eval"], answered = evaluate(*inputs)
    if records.active:
        on_host = _on_host(answered, run.eval_spec.group_size)
        if hosts.is_primary():
            records.write(state.step, epoch, *on_host, kind="eval")
    return values


def _on_host(rollouts: Sequence[tuple[Prompts, Responses]], group_size: int) -> tuple:
    """prompts, rollout, rewards and failed of all rollouts, as `RolloutRecords.write` takes them.

    Rows beyond those of the prompts are left out.
    """
    left_out = (
        "sampling_logprobs",
        "origin_logprobs",
        "draft_logprobs",
        "top_ids",
        "top_logprobs",
    )
    parts = []
    for prompts, responses in rollouts:
        rollout = dataclasses.replace(responses.result.rollout, **dict.fromkeys(left_out))
        scores = responses.scores
        on_host = hosts.fetch((rollout, scores.rewards, scores.failed))
        rows = len(prompts.lens) * group_size
        parts.append(jax.tree.map(lambda x, rows=rows: x[:rows], on_host))
    prompts = concatenate(*(prompts for prompts, _ in rollouts))
    return prompts, *jax.tree.map(lambda *x: np.concatenate(x), *parts)


def _check_places(workdir: Path) -> None:
    """Raises ValueError where a file is in a folder's place in `workdir`, or a folder in a file's.

    So that no step is computed before that is noticed.
    """
    folders = [workdir, workdir / ROLLOUTS, workdir / "checkpoints"]
    files = [workdir / name for name in ("config.json", METRICS, FAILURES, REPORT, "lock")]
    for path in folders:
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} must be a folder, it is a file; move it")
    for path in files:
        if path.is_dir():
            raise ValueError(f"{path} must be a file, it is a folder; move it")


def _check_complete(workdir: Path, last: int | None, has_config: bool) -> None:
    """Raises ValueError where a part of the run is missing; last: the newest checkpoint's step."""
    recorded = max((record["step"] for record in read_metrics(workdir)), default=0)
    if last is None and recorded:
        raise ValueError(
            f"{workdir} has metrics up to step {recorded} but no checkpoint; put its checkpoints "
            "back, or give a new --workdir"
        )
    if last is not None and not has_config:
        raise ValueError(f"{workdir} holds checkpoints but no config.json; give a new --workdir")


def _parse_origin(origin: str, config) -> tuple[Path, int]:
    """Return (work directory, step); ValueError unless `config` may begin with that checkpoint."""
    workdir, _, step = origin.rpartition("@")
    if not workdir or not step.isdecimal():
        raise ValueError(
            "--resume_from must be RUN@STEP, a work directory and the step of a checkpoint in it, "
            f"got {origin!r}"
        )
    advice = f"only these may differ with --resume_from: {', '.join(MAY_CHANGE_FROM_OTHER)}"
    if not check_run_config(workdir, config, ignore=MAY_CHANGE_FROM_OTHER, advice=advice):
        raise ValueError(f"--resume_from must name a work directory, {workdir} has no config.json")
    return Path(workdir), int(step)


def _resume_from(origin: str, run: Run, params: Params) -> RunState:
    """The state of another run's checkpoint, RUN@STEP; that run is left as it is."""
    workdir, step = _parse_origin(origin, run.config)
    if step >= run.total_steps:
        raise ValueError(
            f"train.steps or train.epochs must give more than the {step} steps of --resume_from, "
            f"got {run.total_steps}"
        )
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpoints:
        return resume(run, params, checkpoints, step)


@contextlib.contextmanager
def _way_on(checkpoints: Checkpointer) -> Iterator[None]:
    """Has a FloatingPointError say which checkpoints there are, and how to go on from one."""
    try:
        yield
    except FloatingPointError as error:
        steps = ", ".join(map(str, checkpoints.steps()))
        raise FloatingPointError(
            f"{error}; go on from a checkpoint ({steps}) in a new --workdir with "
            f"--resume_from={checkpoints.directory.parent}@STEP"
        ) from error


def _finish(run: Run, state: RunState, workdir: Path, stopped_by: str) -> None:
    if run.config.log.report:
        print(f"report: {workdir / REPORT}")
    if stopped_by:
        where = f"step {state.step} of {run.total_steps}"
        print(f"{workdir}: {stopped_by}, saved at {where}; run the same command to go on")
    else:
        print(summary(read_run(workdir)))


def _open_log(run: Run, workdir: Path) -> MetricsLog | NoLog:
    if not hosts.is_primary():
        return NoLog()
    return MetricsLog(
        workdir,
        total_steps=run.total_steps,
        tracker=run.config.log.tracker,
        config=run.config.to_dict(),
    )


def _open_records(run: Run, workdir: Path) -> RolloutRecords:
    return RolloutRecords(
        workdir,
        run.config.log.rollouts,
        decode=run.scorer.tokenizer.decode,
        eos_ids=run.rollout_spec.program.eos_ids,
    )
