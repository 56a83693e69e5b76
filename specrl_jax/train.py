"""Training loop: `train` opens a run, `loop` makes steps, evaluates and saves checkpoints.

A `step` collects a batch and updates on it.
"""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.transformer import Params
from specrl_jax.process.stop import StopRequest
from specrl_jax.responses import mean_by_function
from specrl_jax.rollout.engine.speculation import time_steps
from specrl_jax.rollout.sampling import NoiseKey, Purpose
from specrl_jax.rollout.verification import time_verification
from specrl_jax.training.collect import next_requests
from specrl_jax.training.evaluate import evaluate, group_rewards
from specrl_jax.training.hooks import Hooks
from specrl_jax.training.learn import update_policy
from specrl_jax.training.run import Run
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.session import Session, open_session
from specrl_jax.training.speed import speed_metrics
from specrl_jax.training.state import RolloutState, RunState


def step(run: Run, state: RunState, log: RunLog) -> None:
    """Collect a batch of responses and update on it; changes `state` and adds to `log`.

    `BatchSource.next` collects: `collect.collect` repeats prompts → drafts → rollout → rewards →
    store until there is a batch. `learn.update_policy` computes advantages → updates.
    """
    state.step += 1
    collected = state.batches.next(run, state, log.record)
    log.start(collected.step, collected.epoch)
    with log.clock.timed("time/update"):
        metrics = update_policy(run, state, collected)
    log.add(collected.metrics | metrics)  # advantages know better which groups have a signal


def loop(session: Session) -> None:
    """Make steps until the last one or a stop request; evaluate, record and save along the way."""
    run = session.run
    state = session.state
    checkpoints = session.checkpoints
    log = session.log

    def save(metric: float | None = None) -> None:
        """Save a checkpoint of the step, unless there is one."""
        state.batches.settle(log.record)
        checkpoints.save(state.step, state.arrays(), state.host(), metric=metric)

    if state.step == 0:
        log.start(0, epoch=0)
        evaluate_held_out(run, state, log)
        save(log.write().get("reward/eval"))
    else:
        save()
    # Before step 1 is recorded: a resume rejects such a record without a checkpoint.
    checkpoints.wait()
    stopped = False
    while state.step < run.total_steps and not (stopped := session.stop.agreed()):
        with log.clock.timed("time/step"):
            step(run, state, log)
        state.add_to_totals(log.values)
        log.add(speed_metrics(run, state, log.values))
        last = state.step == run.total_steps
        every = run.config.evaluate.every
        if every and (state.step % every == 0 or last):
            evaluate_held_out(run, state, log)
        # Recorded first: a checkpoint without its record would lose the step on resume.
        metric = log.write().get("reward/eval")
        due = state.step % run.config.checkpoint.every == 0 or last
        if due or checkpoints.is_best(metric):
            save(metric)
            session.hooks.after_save()
    if stopped:
        save()


def evaluate_held_out(run: Run, state: RunState, log: RunLog) -> None:
    """Log the mean reward and the responses on held-out prompts; a no-op without such prompts."""
    if not run.held_out:
        return
    with log.clock.timed("time/eval"):
        weights = state.rollout_weights(run, draft_head=False)
        noise = NoiseKey(state.rollout.key, state.step, Purpose.EVALUATE)
        answered = state.batches.on_rollout_mesh(
            evaluate, run.eval_spec, weights, run.held_out, noise, run.responder
        )
    log.add({"reward/eval": float(np.mean(group_rewards(answered)))})
    log.add({f"reward/eval/{name}": mean for name, mean in mean_by_function(answered).items()})
    log.record_evaluation(answered)


def train(
    config,
    workdir: Path,
    resume_from: str = "",
    stop: StopRequest | None = None,
    hooks: Hooks | None = None,
) -> None:
    """Run `config` in `workdir` to its end on the mesh in use; a run that has begun resumes.

    resume_from: RUN@STEP, a checkpoint of another work directory to start a new `workdir` from.
    stop: a stop request whose `with` block encloses this call. hooks: what runs besides the steps,
    see `specrl_jax.standard_hooks`. Raises a one-line ValueError if the configuration, the data or
    `workdir` do not allow the run, FloatingPointError if training diverges.
    """
    with open_session(config, workdir, resume_from, stop, hooks) as session:
        if session is None:
            return
        session.hooks.before_first_step(session.run, session.state)
        time_rollouts(session.run, session.state)
        loop(session)
    if hosts.is_primary():
        _finish(session, workdir)


def time_rollouts(run: Run, state: RunState) -> None:
    """Time decode steps of each width, and verification, if rollouts choose by them."""
    rollout = state.rollout
    for choice, timer in (
        (rollout.speculation, time_steps),
        (rollout.verification, time_verification),
    ):
        if choice is not None and choice.seconds is None:
            weights = state.rollout_weights(run)
            choice.seconds = state.batches.on_rollout_mesh(_time, timer, run, rollout, weights)


def _time(timer: Callable, run: Run, state: RolloutState, weights: Params) -> Any:
    """Time the next rollout."""
    # A copy of the stream: the run's first batch is not used up.
    ahead = dataclasses.replace(state, stream=copy.copy(state.stream))
    requests, _ = next_requests(run, ahead)
    return timer(run.rollout_spec, weights, requests)


def _finish(session: Session, workdir: Path) -> None:
    run = session.run
    state = session.state
    finished = state.step == run.total_steps
    session.hooks.at_end(run, workdir, finished)
    if not finished:
        where = f"step {state.step} of {run.total_steps}"
        stopped = f"{session.stop.name}, saved at {where}"
        print(f"{workdir}: {stopped}; run the same command to resume")
