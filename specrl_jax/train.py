"""Training loop: `train` sets up, `prepare` compiles, `loop` makes steps, evaluates and saves.

A `step` collects a batch and updates on it.
"""

import copy
import dataclasses
from pathlib import Path

import numpy as np

from specrl_jax import hosts
from specrl_jax.compile import fit, memory, programs, shapes
from specrl_jax.config import flatten
from specrl_jax.models.transformer import Params, rollout_weights
from specrl_jax.process.checkpoint import Checkpointer, check_run_config, save_run_config
from specrl_jax.process.runtime import only_process
from specrl_jax.process.stop import StopRequest
from specrl_jax.process.workdir import (
    MAY_CHANGE,
    advise_how_to_resume,
    check_complete,
    check_paths,
    parse_origin,
)
from specrl_jax.reports.report_page import FILE_NAME as REPORT
from specrl_jax.reports.runs import read_run, summarize
from specrl_jax.rollout.generate import time_decoding
from specrl_jax.rollout.sampling import NoiseKey, Purpose
from specrl_jax.sharding import move
from specrl_jax.telemetry.code_state import record_code
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.telemetry.tracking import check_installed
from specrl_jax.training.build import build, init_state, resume, try_reward
from specrl_jax.training.collect import TrainBatch, make_train_batch, next_requests, roll_out
from specrl_jax.training.evaluate import evaluate, group_rewards
from specrl_jax.training.learn import update_policy
from specrl_jax.training.responses import Responses, mean_by_function
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.speed import speed_metrics
from specrl_jax.training.state import RolloutState, Run, RunState


def step(run: Run, state: RunState, log: RunLog) -> None:
    """Take a batch of responses and update on it; changes `state` and adds to `log`.

    Prompts → drafts → rollout → rewards → store until there is a batch, then batch → update → log.
    """
    state.step += 1
    # Begin rollouts with the current weights until `rollout.staleness` batches are ahead.
    ahead = min(run.config.rollout.staleness, max(run.total_steps - state.step, 0))
    missing = 1 + ahead - len(state.queue)
    if missing > 0:
        weights = state.rollout_weights(run)
    for _ in range(missing):
        state.queue.begin(collect, run, state.rollout, weights)
    batch = state.queue.take(log)
    log.begin(batch.step, batch.epoch)
    with log.clock.timed("time/update"):
        metrics = update_policy(run, state, batch)
    log.add(batch.metrics | metrics)  # an advantage knows better which groups have a signal


def collect(run: Run, state: RolloutState, weights: Params) -> tuple[TrainBatch, list[Responses]]:
    """Roll out until there is a batch, all with the same copy of the weights."""
    clock = Stopwatch()
    state.begin_step()
    rollouts: list[Responses] = []
    while state.collector.wants_rollout(rollouts):
        rollouts.append(roll_out(run, state, weights, clock))
    return make_train_batch(run, state, rollouts, clock.take()), rollouts


def loop(
    run: Run, state: RunState, checkpoints: Checkpointer, log: RunLog, stop: StopRequest
) -> None:
    """Make steps until the last one or a stop request; evaluate, record and save on the way."""

    def save(metric: float | None = None) -> None:
        """Save the step, unless its checkpoint is there."""
        state.queue.receive_all(log)
        checkpoints.save(state.step, state.arrays(), state.host(), metric=metric)

    if state.step == 0:
        log.begin(0, epoch=0)
        evaluate_held_out(run, state, log)
        save(log.write().get("reward/eval"))
    else:
        save()
    # Before step 1 is recorded: a resume refuses such a record without a checkpoint.
    checkpoints.wait()
    stopped = False
    while state.step < run.total_steps and not (stopped := stop.agreed()):
        with log.clock.timed("time/step"):
            step(run, state, log)
        log.add(speed_metrics(run, state, log.values))
        last = state.step == run.total_steps
        every = run.config.evaluate.every
        if every and (state.step % every == 0 or last):
            evaluate_held_out(run, state, log)
        # Recorded first: a checkpoint without its record would lose the step on a resume.
        metric = log.write().get("reward/eval")
        due = state.step % run.config.checkpoint.every == 0 or last
        if due or checkpoints.is_best(metric):
            save(metric)
            log.page.refresh()
    if stopped:
        save()


def evaluate_held_out(run: Run, state: RunState, log: RunLog) -> None:
    """Log the mean reward on held-out prompts and the responses; nothing where there are none."""
    if not run.held_out:
        return
    with log.clock.timed("time/eval"):
        weights = move(rollout_weights(run.model, state.policy(run.model)), run.rollout_mesh)
        noise = NoiseKey(state.rollout.key, state.step, Purpose.EVALUATE)
        answered = state.queue.call(
            evaluate, run.eval_spec, weights, run.held_out, noise, run.responder
        )
    log.add({"reward/eval": float(np.mean(group_rewards(answered)))})
    log.add({f"reward/eval/{name}": mean for name, mean in mean_by_function(answered).items()})
    log.record_responses(answered, kind="eval")


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
    hosts.on_primary(check_paths, workdir)
    has_config = hosts.on_primary(check_run_config, workdir, described, ignore=MAY_CHANGE)
    if resume_from and not has_config:
        parse_origin(resume_from, config)  # a mistake shows before anything is loaded
    run, params = build(config)
    hosts.check_same(run.fingerprints, "give them the same files")
    run = fit.fit_rows_to_memory(run)
    with (
        run.responder.pool,
        memory.explain_shortage(config, run.model, len(run.prompts.lens)),
        only_process(workdir),
        Checkpointer(
            workdir / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
        ) as checkpoints,
    ):
        last = checkpoints.latest_step()
        hosts.on_primary(check_complete, workdir, last, has_config)
        state = resume(run, params, checkpoints) if last is not None else None
        if state and state.step >= run.total_steps:
            print(f"{workdir}: finished at step {state.step} of {run.total_steps}, nothing to do")
            return
        run.responder.pool.warm_up()
        try_reward(run)
        if state is None and resume_from:
            state = _resume_from(resume_from, run, params)
        elif state is None:
            state = init_state(run, params)
        del params
        if hosts.is_primary():
            save_run_config(workdir, described)  # from here on the directory is this run's
            record_code(workdir)
        with (
            stop.finishing_steps(),
            RunLog(run, workdir) as log,
            advise_how_to_resume(checkpoints),
            state.queue,
        ):
            log.restore(state.step if last else 0, waiting=len(state.queue))
            prepare(run, state)
            loop(run, state, checkpoints, log, stop)
    if hosts.is_primary():
        _finish(run, state, workdir, stop.name if state.step < run.total_steps else "")


def prepare(run: Run, state: RunState) -> None:
    """Compile the run's programs side by side, and time those that choices depend on."""
    kept = state.arrays()
    # A reference that is re-read from its source is not in the checkpoint, but it needs memory.
    if state.reference:
        kept["reference"] = (state.reference.params, state.reference.adapters)
    programs.compile_run(shapes.of_run(run), kept)
    speculation = state.rollout.speculation
    if speculation is not None and speculation.seconds is None:
        weights = state.rollout_weights(run)
        speculation.seconds = state.queue.call(_time_decoding, run, state.rollout, weights)


def _time_decoding(run: Run, state: RolloutState, weights: Params) -> dict[tuple[int, int], float]:
    """Time decode steps of the next rollout."""
    # A copy of the stream: the run's first batch is not used up.
    ahead = dataclasses.replace(state, stream=copy.copy(state.stream))
    requests, _ = next_requests(run, ahead)
    return time_decoding(run.rollout_spec, weights, requests)


def _resume_from(origin: str, run: Run, params: Params) -> RunState:
    """Return the state of another run's checkpoint, RUN@STEP; that run is left as it is."""
    workdir, step = parse_origin(origin, run.config)
    if step >= run.total_steps:
        raise ValueError(
            f"train.steps or train.epochs must give more than the {step} steps of --resume_from, "
            f"got {run.total_steps}"
        )
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpoints:
        return resume(run, params, checkpoints, step)


def _finish(run: Run, state: RunState, workdir: Path, stopped_by: str) -> None:
    if run.config.log.report:
        print(f"report: {workdir / REPORT}")
    if stopped_by:
        where = f"step {state.step} of {run.total_steps}"
        print(f"{workdir}: {stopped_by}, saved at {where}; run the same command to go on")
    else:
        print(summarize(read_run(workdir)))
