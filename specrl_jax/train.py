"""The loop: prompts → drafts → rollout → rewards → advantages → update, and back to the store."""

import dataclasses
import functools
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.algorithms.advantages import AdvantageConfig, choose_advantage, overlong_penalty
from specrl_jax.algorithms.losses import policy_metrics
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.algorithms.scoring import critic_values, logprob_gap, logprobs, micro_batches
from specrl_jax.algorithms.update import make_batch, update
from specrl_jax.build import Trainer, TrainerState, begin, build, policy_copy, resume
from specrl_jax.checkpoint import Checkpointer, check_run_config, save_run_config
from specrl_jax.collect import Clock, TrainBatch, gather
from specrl_jax.evaluate import evaluate
from specrl_jax.runtime import Compiled, StopRequest, compiled, only_process
from specrl_jax.selection import Sampled
from specrl_jax.sharding import put
from specrl_jax.telemetry import report
from specrl_jax.telemetry.metrics import MetricsLog, read_metrics
from specrl_jax.telemetry.records import RolloutRecords
from specrl_jax.types import Batch

# What a resumed run may change: where it runs and how it is recorded, not what it computes.
MAY_CHANGE = ("log", "checkpoint", "mesh")


def train(config, workdir: Path) -> None:
    """Run `config` in `workdir`, from where it stands there to its end, on the mesh in use.

    Raises ValueError in one line where the configuration, the data or `workdir` do not allow it.
    """
    begun = check_run_config(workdir, config, ignore=MAY_CHANGE)
    keep = {"keep_last": config.checkpoint.keep_last, "keep_best": config.checkpoint.keep_best}
    run, params = build(config)
    with (
        run.pool,
        only_process(workdir),
        Checkpointer(workdir / "checkpoints", **keep) as checkpoints,
    ):
        last = checkpoints.latest_step()
        if last is not None and not begun:
            raise ValueError(
                f"{workdir} holds checkpoints but no config.json; give a new --workdir"
            )
        if last is not None and last >= run.total_steps:
            print(f"{workdir}: finished at step {last} of {run.total_steps}, nothing to do")
            return
        run.pool.warm_up(wait_ready=False)
        state = begin(run, params) if last is None else resume(run, params, checkpoints, last)
        del params
        save_run_config(workdir, config)  # from here on the directory is this run's
        records = _open_records(run, workdir)
        with _open_log(run, workdir) as log, StopRequest() as stop:
            for written in (log, records):
                written.restore(last or -1)  # step 0 is evaluated and written again
            loop(run, state, checkpoints, log, records, stop)
    _finish(run, state, workdir, stop.name if state.step < run.total_steps else "")


def loop(
    run: Trainer,
    state: TrainerState,
    checkpoints: Checkpointer,
    log: MetricsLog,
    records: RolloutRecords,
    stop: StopRequest,
) -> None:
    """Steps until the last one or a stop request; evaluates, records and saves on the way."""
    recorded = Compiled(0.0, 0, 0)  # the first record tells what starting up took as well
    if state.step == 0:
        values = held_out_metrics(run, state)
        log.write(0, 0, values | _compile_metrics(recorded))
        recorded = compiled()
        checkpoints.save(0, state.arrays(run), state.host(), metric=values.get("reward/eval"))
    while state.step < run.total_steps and not stop:
        epoch, start = state.epoch, time.perf_counter()
        values = step(run, state, records)
        values["time/step"] = time.perf_counter() - start
        _check_finite(values, state.step, checkpoints)
        last = state.step == run.total_steps
        every = run.config.evaluate.every
        if every and (state.step % every == 0 or last):
            values |= held_out_metrics(run, state)
        # Recorded first: a checkpoint without its record would lose the step on a resume.
        log.write(state.step, epoch, values | _compile_metrics(recorded))
        recorded = compiled()
        if state.step % run.config.checkpoint.every == 0 or last:
            metric = values.get("reward/eval")
            checkpoints.save(state.step, state.arrays(run), state.host(), metric=metric)
    if stop:
        checkpoints.save(state.step, state.arrays(run), state.host())  # nothing if it is there


def _compile_metrics(before: Compiled) -> dict[str, float]:
    """What the process has compiled since."""
    new = Compiled(*(now - then for now, then in zip(compiled(), before)))
    return {
        "time/compile": new.seconds,
        "compile/built": new.built,
        "compile/read": new.read,
    }


def step(
    run: Trainer, state: TrainerState, records: RolloutRecords | None = None
) -> dict[str, float]:
    """One batch of rollouts and its updates; changes `state`, returns the step's metrics."""
    epoch = state.epoch
    state.step += 1
    found = gather(run, state)
    if records is not None and records.active:
        records.write(state.step, epoch, *found.told())
    with Clock("update") as clock:
        rewards, shaped = _shaped(run, found)
        lengths = _lengths(run.response_slots)
        batch = make_batch(found.prompts, found.rollout, lengths=lengths)
        batch, values = _with_advantages(run, state, batch, rewards)
        if run.config.algorithm.importance_cap:
            weights = found.importance_weights(run.plan.program.accept)
            weights = weights[:, : batch.old_logprobs.shape[1]]
            batch = dataclasses.replace(batch, weights=weights)
        values |= shaped | learn(run, state, batch)
    _note_trained(run, state, found)
    if found.metrics.get("rollout/stale_fraction"):
        # Against log-probs of earlier policies it would be no gap between two ways to reckon.
        values.pop("policy/rollout_train_logprob_gap")
    seen = state.prompts_seen
    values |= {"data/prompts_seen": seen, "data/passes": seen / len(run.prompts.lens)}
    return values | found.metrics | clock.lap


def _shaped(run: Trainer, found: TrainBatch) -> tuple[np.ndarray, dict[str, float]]:
    """The rewards trained on: those of the task, less what a response's length costs."""
    settings = run.config.reward
    if not settings.overlong_tokens:
        return found.rewards, {}
    lens = np.asarray(jax.device_get(found.rollout.lens))
    longest = run.config.rollout.response_len
    penalty = settings.overlong_penalty * overlong_penalty(lens, longest, settings.overlong_tokens)
    rewards = found.rewards - penalty
    return rewards.astype(np.float32), {"reward/overlong": float(np.mean(penalty))}


def _with_advantages(
    run: Trainer, state: TrainerState, batch: Batch, rewards: np.ndarray
) -> tuple[Batch, dict[str, float]]:
    """The batch with advantages; with a critic also with its values and returns."""
    advantage, learner, values = choose_advantage(run.config), run.learner, None
    if learner.critic:
        size = learner.micro_batch_size or run.config.updates.mini_batch_size
        index = micro_batches(len(rewards), size)
        values = critic_values(learner, state.train, batch, index)
    config = AdvantageConfig.from_config(run.config, run.trained_group)
    estimate = advantage.estimate(put(rewards, "batch"), values, batch.mask, config)
    batch = dataclasses.replace(
        batch, values=values, advantages=estimate.advantages, returns=estimate.returns
    )
    metrics = {name: float(x) for name, x in jax.device_get(estimate.metrics).items()}
    return batch, {name: x for name, x in metrics.items() if not math.isnan(x)}


def learn(run: Trainer, state: TrainerState, batch: Batch) -> dict[str, float]:
    """The optimizer updates of a step; changes `state.train`, returns their metrics."""
    settings, learner = run.config.updates, run.learner
    rows, size = batch.response_lens.shape[0], settings.mini_batch_size
    index = micro_batches(rows, learner.micro_batch_size or size)
    gap = None  # where the old log-probs are the rollout's, the first update measures it
    if settings.old_logprobs == "recompute":
        old = logprobs(learner, state.train.params, batch, index)
        gap = float(logprob_gap(batch, old))
        if batch.weights is not None:  # they were sampled by the rollout's arithmetic
            weights = batch.weights * jnp.exp(old - batch.old_logprobs)
            batch = dataclasses.replace(batch, weights=weights)
        batch = dataclasses.replace(batch, old_logprobs=old)
    if state.reference is not None:
        reference = logprobs(learner, state.reference, batch, index)
        batch = dataclasses.replace(batch, ref_logprobs=reference)
    told = {}
    if batch.weights is not None:
        batch, told = _capped(batch, run.config.algorithm.importance_cap)
    history = []
    unfrozen_steps = state.step
    if learner.critic:
        unfrozen_steps -= run.config.critic.warmup_steps
    frozen = unfrozen_steps <= 0
    for first in [*range(0, rows, size)] * settings.passes:
        index = first + micro_batches(size, learner.micro_batch_size)
        state.train, sums = update(learner, state.train, batch, index, policy_frozen=frozen)
        history.append(sums)
    history = jax.device_get(history)
    values = policy_metrics(jax.tree.map(lambda *x: np.sum(x, axis=0), *history))
    if learner.critic:
        tokens = max(sum(sums["tokens"] for sums in history), 1)  # a batch may hold none
        values |= {
            "critic/loss": np.mean([sums["critic_loss"] for sums in history]),
            "critic/clip_fraction": sum(sums["critic_clipped"] for sums in history) / tokens,
            "critic/grad_norm": np.mean([sums["critic_grad_norm"] for sums in history]),
        }
    if gap is None:
        gap = float(history[0]["logprob_gap"] / max(history[0]["tokens"], 1))
    return {name: float(value) for name, value in (values | told).items()} | {
        "policy/loss": float(np.mean([sums["loss"] for sums in history])),
        "policy/rollout_train_logprob_gap": gap,
        "update/grad_norm": float(np.mean([sums["grad_norm"] for sums in history])),
        "update/lr": 0.0 if frozen else float(run.schedule(unfrozen_steps * len(history) - 1)),
    }


@functools.partial(jax.jit, static_argnames="cap")
def _capped(batch: Batch, cap: float) -> tuple[Batch, dict[str, Array]]:
    """The batch with importance weights of at most `cap` (Ionides, "Truncated importance
    sampling", JCGS 17, 2008)."""
    mask = batch.mask
    weights = jnp.minimum(batch.weights, cap)
    return dataclasses.replace(batch, weights=weights), {
        "policy/importance_mean": masked_mean(weights, mask),
        "policy/importance_capped": masked_mean((batch.weights > cap).astype(jnp.float32), mask),
    }


def held_out_metrics(run: Trainer, state: TrainerState) -> dict[str, float]:
    """Mean reward on held-out prompts; nothing where the run has none."""
    if not run.held_out:
        return {}
    with Clock("eval") as clock:
        weights = policy_copy(run.model, state.train.params)
        inputs = (run.eval_plan, weights, run.held_out, run.tokenizer, run.pool)
        options = {"key": run.key, "step": state.step, "max_turns": run.max_turns}
        reward, found = evaluate(*inputs, **options)
    values = {"reward/eval": reward} | clock.lap
    if state.selection is None:
        return values
    size = run.config.updates.micro_batch_size
    values |= state.selection.gap(run.learner, state.train.params, size)
    prompts, real = run.held_out[0]
    batch = make_batch(prompts, found.outcome.rollout, lengths=(run.response_slots,))
    rows = len(found.lens) // len(prompts.lens) * real
    drawn = put((np.arange(len(found.lens)) < rows)[:, None], "batch", None)
    state.selection = dataclasses.replace(
        state.selection, held_out=Sampled.of(batch, drawn), step=state.step, complete=False
    )
    return values


def _note_trained(run: Trainer, state: TrainerState, found: TrainBatch) -> None:
    """Keeps the first batch behind an evaluation, whose policy sampled both."""
    selection = state.selection
    if selection is None or selection.step != state.step - 1:
        return
    batch = make_batch(found.prompts, found.rollout, lengths=(run.response_slots,))
    trained = Sampled.of(batch, found.rollout.origin_steps == state.step)
    state.selection = dataclasses.replace(selection, trained=trained, complete=True)


def _finish(run: Trainer, state: TrainerState, workdir: Path, stopped_by: str) -> None:
    records = read_metrics(workdir)
    if stopped_by:
        where = f"step {state.step} of {run.total_steps}"
        print(f"{workdir}: {stopped_by}, saved at {where}; run the same command to go on")
    else:
        print(report.summary_table(records))
    if run.config.log.plots and (paths := report.write_plots(records, workdir)):
        print(f"plots: {paths[0].parent}")


def _check_finite(values: dict[str, float], step: int, checkpoints: Checkpointer) -> None:
    for name in ("policy/loss", "update/grad_norm"):
        if not math.isfinite(values[name]):
            raise FloatingPointError(
                f"step {step}: {name} is {values[name]}, last checkpoint: step "
                f"{checkpoints.latest_step()}; try a smaller updates.learning_rate, new --workdir"
            )


def _lengths(response_len: int) -> tuple[int, ...]:
    """Response lengths that the update is compiled for: quarters of the longest."""
    return tuple(sorted({-(-response_len * quarter // 4) for quarter in (1, 2, 3, 4)}))


def _open_log(run: Trainer, workdir: Path) -> MetricsLog:
    return MetricsLog(
        workdir,
        total_steps=run.total_steps,
        wandb_mode=run.config.log.wandb,
        run_name=workdir.name,
        config_dict=run.config.to_dict(),
    )


def _open_records(run: Trainer, workdir: Path) -> RolloutRecords:
    return RolloutRecords(
        workdir,
        run.config.log.rollouts,
        decode=run.tokenizer.decode,
        eos_ids=run.plan.program.eos_ids,
        enabled=jax.process_index() == 0,
    )
