"""A run opened in its work directory: all checks, what the steps need, and the state to start or
resume from."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specrl_jax import hosts
from specrl_jax.config import flatten
from specrl_jax.models.transformer import Params
from specrl_jax.process.checkpoint import Checkpointer
from specrl_jax.process.runtime import only_process
from specrl_jax.process.stop import StopRequest
from specrl_jax.telemetry.code_state import record_code
from specrl_jax.telemetry.tracking import check_installed
from specrl_jax.training.build import build, init_state, resume, try_reward
from specrl_jax.training.hooks import Hooks
from specrl_jax.training.run import Run
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.state import RunState
from specrl_jax.training.workdir import (
    advise_how_to_resume,
    check_complete,
    check_paths,
    check_run_config,
    may_change,
    parse_origin,
    save_run_config,
)


@dataclasses.dataclass(frozen=True)
class Session:
    """A run that is ready to make steps, in its work directory."""

    run: Run
    state: RunState
    checkpoints: Checkpointer
    log: RunLog
    stop: StopRequest
    hooks: Hooks


@contextlib.contextmanager
def open_session(
    config: Any,
    workdir: Path,
    resume_from: str = "",
    stop: StopRequest | None = None,
    hooks: Hooks | None = None,
) -> Iterator[Session | None]:
    """Open the run of `config` in `workdir`; if it is finished, print a line and return None.

    Arguments and errors: see `train`.
    """
    hooks = hooks or Hooks()
    described = config.to_dict() | ({"resume_from": resume_from} if resume_from else {})
    with contextlib.ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(StopRequest())
        has_config = _check(config, workdir, described, resume_from)
        run, params = build(config, hooks.check_model)
        hosts.check_same(run.fingerprints, "give them the same files")
        run = hooks.fitted(run)
        checkpoints = _enter_resources(stack, run, workdir, hooks)
        last = checkpoints.latest_step()
        hosts.on_primary(check_complete, workdir, last, has_config)
        state = resume(run, params, checkpoints) if last is not None else None
        if state and state.step >= run.total_steps:
            print(f"{workdir}: finished at step {state.step} of {run.total_steps}, nothing to do")
            yield None
            return
        run.responder.pool.warm_up()
        try_reward(run)
        if state is None and resume_from:
            state = _resume_from(resume_from, run, params)
        elif state is None:
            state = init_state(run, params)
        del params
        if hosts.is_primary():
            save_run_config(workdir, described)  # from here on the directory belongs to this run
            record_code(workdir)
        stack.enter_context(stop.finishing_steps())
        log = stack.enter_context(RunLog(run, workdir))
        stack.enter_context(hooks.recording(run, log))
        stack.enter_context(advise_how_to_resume(checkpoints))
        stack.enter_context(state.batches)
        log.restore(state.step if last else 0, ahead=state.batches.ahead)
        yield Session(run, state, checkpoints, log, stop, hooks)


def _check(config: Any, workdir: Path, described: dict[str, Any], resume_from: str) -> bool:
    """Check everything that needs no data; return whether `workdir` already has a configuration."""
    check_installed(config.log.tracker)
    flags = dict(flatten(described)) | {"--workdir": str(workdir)}
    hosts.check_same(flags, "start them with the same flags")
    hosts.on_primary(check_paths, workdir)
    has_config = hosts.on_primary(check_run_config, workdir, described, ignore=may_change())
    if resume_from and not has_config:
        parse_origin(resume_from, config)  # report a mistake before anything is loaded
    return has_config


def _enter_resources(
    stack: contextlib.ExitStack, run: Run, workdir: Path, hooks: Hooks
) -> Checkpointer:
    """Enter the contexts that last until the run ends; return its checkpoints."""
    settings = run.config.checkpoint
    stack.enter_context(run.responder.pool)
    stack.enter_context(hooks.explaining(run))
    stack.enter_context(only_process(workdir))
    checkpoints = Checkpointer(
        workdir / "checkpoints", keep_last=settings.keep_last, keep_best=settings.keep_best
    )
    return stack.enter_context(checkpoints)


def _resume_from(origin: str, run: Run, params: Params) -> RunState:
    """Return the state from another run's checkpoint, RUN@STEP; that run is left unchanged."""
    workdir, step = parse_origin(origin, run.config)
    if step >= run.total_steps:
        raise ValueError(
            f"train.steps or train.epochs must give more than the {step} steps of --resume_from, "
            f"got {run.total_steps}"
        )
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpoints:
        return resume(run, params, checkpoints, step)
