"""The loop: prompts → drafts → rollout → rewards → advantages → update, and back to the store."""

import dataclasses
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import report
from specrl_jax.advantages import group_relative
from specrl_jax.checkpoint import Checkpointer, check_run_config, save_run_config
from specrl_jax.data import select
from specrl_jax.evaluate import evaluate, score
from specrl_jax.losses import policy_metrics
from specrl_jax.measure import reward_metrics, rollout_metrics
from specrl_jax.metrics import MetricsLog, read_metrics
from specrl_jax.models.transformer import rollout_weights
from specrl_jax.records import RolloutRecords
from specrl_jax.rollout.drafting import Corpus
from specrl_jax.rollout.generate import Outcome, make_corpus, roll
from specrl_jax.run import Run, State, begin, build, resume
from specrl_jax.runtime import StopRequest, only_process
from specrl_jax.sharding import put, reshard
from specrl_jax.types import Batch, Drafts, Prompts, Rollout
from specrl_jax.update import logprob_gap, logprobs, make_batch, micro_batches, update

# What a resumed run may change: where it runs and how it is recorded, not what it computes.
MAY_CHANGE = ("log", "checkpoint", "mesh")

_weights = jax.jit(rollout_weights, static_argnums=0)


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
    run: Run,
    state: State,
    checkpoints: Checkpointer,
    log: MetricsLog,
    records: RolloutRecords,
    stop: StopRequest,
) -> None:
    """Steps until the last one or a stop request; evaluates, records and saves on the way."""
    if state.step == 0:
        values = held_out_metrics(run, state)
        log.write(0, 0, values)
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
        log.write(state.step, epoch, values)
        if state.step % run.config.checkpoint.every == 0 or last:
            metric = values.get("reward/eval")
            checkpoints.save(state.step, state.arrays(run), state.host(), metric=metric)
    if stop:
        checkpoints.save(state.step, state.arrays(run), state.host())  # nothing if it is there


def step(run: Run, state: State, records: RolloutRecords | None = None) -> dict[str, float]:
    """One rollout and its updates; changes `state`, returns the step's metrics."""
    settings, epoch = run.config.rollout, state.epoch
    state.step += 1
    with _Clock("rollout") as rollout_clock:
        prompts, ahead = state.next_prompts(run)
        previous = state.store.get(prompts, settings.group_size, step=state.step)
        outcome = roll(
            run.plan,
            _weights(run.model, state.train.params),
            prompts,
            key=run.key,
            step=state.step,
            drafts=_drafts(run, state, prompts),
            corpus=_corpus(run, state, prompts, ahead),
            log_lenience=math.log(settings.lenience) if settings.lenience else -math.inf,
            cost=state.cost,
            ahead=ahead,
            carried=state.carried,
            wanted=settings.prompts_per_step if settings.partial else 0,
        )
        rollout, prompts = outcome.rollout, select(prompts, outcome.groups)
        tokens, lens, prefix_lens = jax.device_get(
            (rollout.tokens, rollout.lens, rollout.prefix_lens)
        )
    with _Clock("reward") as reward_clock:
        scores = score(run.pool, run.tokenizer, prompts, tokens, lens)
    if records is not None and records.active:
        told = (prompts, _told(rollout), scores.rewards, scores.failed)
        records.write(state.step, epoch, *told)
    with _Clock("update") as update_clock:
        rewards = put(scores.rewards, None)  # whole on every device: a group never straddles two
        advantages = group_relative(
            rewards,
            settings.group_size,
            normalize_std=run.config.grpo.normalize_std,
            leave_one_out=run.config.grpo.leave_one_out,
        )
        advantages = reshard(advantages, "batch")
        batch = make_batch(prompts, rollout, advantages, lengths=_lengths(settings.response_len))
        values = learn(run, state, batch)
    state.store.put(prompts, rollout, step=state.step)
    before = [x[outcome.rows] for x in jax.device_get((previous.tokens, previous.lens))]
    values |= rollout_metrics(
        tokens, lens, prefix_lens, run.plan.setup.eos_ids, offered=outcome.offered, previous=before
    )
    values |= _left_over(state, outcome, prefix_lens)
    values |= reward_metrics(scores.rewards, scores.failed, settings.group_size)
    values |= outcome.metrics() | rollout_clock.lap | reward_clock.lap | update_clock.lap
    seen = state.step * settings.prompts_per_step
    return values | {"data/prompts_seen": seen, "data/passes": seen / len(run.prompts.lens)}


def _drafts(run: Run, state: State, prompts: Prompts) -> Drafts | None:
    """Earlier responses to `prompts`, or what was begun for them ahead."""
    settings, drafts = run.config.rollout, None
    if "previous" in settings.draft:
        drafts = state.store.get(
            prompts, settings.group_size, age=settings.draft_age, step=state.step
        )
    return drafts if state.ahead is None else state.ahead.over(drafts, prompts)


def _corpus(run: Run, state: State, prompts: Prompts, ahead: Prompts | None) -> Corpus | None:
    """What tree drafts read; also begins to fetch what the next step will need of the store."""
    batches = [prompts] if ahead is None else [prompts, ahead]
    found = []
    if "tree" in run.config.rollout.draft:
        found = [state.store.sources(batch, step=state.step) for batch in batches]
    if state.carried is None:  # else nobody knows yet who the next step's prompts are
        state.store.prefetch(state.stream.peek())
    if not found:
        return None
    tokens, lens = (jnp.concatenate(x) for x in zip(*found))
    return make_corpus(run.plan, tokens, lens, run.config.rollout.tree.decay)


def _left_over(state: State, outcome: Outcome, prefix_lens: np.ndarray) -> dict[str, float]:
    """Takes what the rollout leaves to the next one into `state`; returns what came of the last."""
    values = {}
    if state.ahead is not None:
        begun = jax.device_get(state.ahead.drafts.lens) if state.ahead.prompt_ids else np.zeros(1)
        if begun.any():
            values["rollout/ahead_kept"] = int(prefix_lens[begun > 0].sum()) / int(begun.sum())
        state.ahead = outcome.ahead or dataclasses.replace(state.ahead, prompt_ids=())
    state.carried = outcome.carried
    return values


def learn(run: Run, state: State, batch: Batch) -> dict[str, float]:
    """The optimizer updates of a step; changes `state.train`, returns their metrics."""
    settings, learner = run.config.updates, run.learner
    rows, size = batch.response_lens.shape[0], settings.mini_batch_size
    index = micro_batches(rows, learner.micro_batch_size or size)
    gap = None  # where the old log-probs are the rollout's, the first update measures it
    if settings.old_logprobs == "recompute":
        old = logprobs(learner, state.train.params, batch, index)
        gap = float(logprob_gap(batch, old))
        batch = dataclasses.replace(batch, old_logprobs=old)
    if state.reference is not None:
        reference = logprobs(learner, state.reference, batch, index)
        batch = dataclasses.replace(batch, ref_logprobs=reference)
    history = []
    for first in [*range(0, rows, size)] * settings.passes:
        index = first + micro_batches(size, learner.micro_batch_size)
        state.train, sums = update(learner, state.train, batch, index)
        history.append(sums)
    history = jax.device_get(history)
    values = policy_metrics(jax.tree.map(lambda *x: np.sum(x, axis=0), *history))
    if gap is None:
        gap = float(history[0]["logprob_gap"] / max(history[0]["tokens"], 1))
    return {name: float(value) for name, value in values.items()} | {
        "policy/loss": float(np.mean([sums["loss"] for sums in history])),
        "policy/rollout_train_logprob_gap": gap,
        "update/grad_norm": float(np.mean([sums["grad_norm"] for sums in history])),
        "update/lr": float(run.schedule(state.step * len(history) - 1)),
    }


def held_out_metrics(run: Run, state: State) -> dict[str, float]:
    """Mean reward on held-out prompts; nothing where the run has none."""
    if not run.held_out:
        return {}
    with _Clock("eval") as clock:
        weights = _weights(run.model, state.train.params)
        inputs = (run.eval_plan, weights, run.held_out, run.tokenizer, run.pool)
        reward = evaluate(*inputs, key=run.key, step=state.step)
    return {"reward/eval": reward} | clock.lap


def _finish(run: Run, state: State, workdir: Path, stopped_by: str) -> None:
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


def _open_log(run: Run, workdir: Path) -> MetricsLog:
    return MetricsLog(
        workdir,
        total_steps=run.total_steps,
        wandb_mode=run.config.log.wandb,
        run_name=workdir.name,
        config_dict=run.config.to_dict(),
    )


def _open_records(run: Run, workdir: Path) -> RolloutRecords:
    return RolloutRecords(
        workdir,
        run.config.log.rollouts,
        decode=run.tokenizer.decode,
        eos_ids=run.plan.setup.eos_ids,
        enabled=jax.process_index() == 0,
    )


def _told(rollout: Rollout) -> Rollout:
    """What records tell of a rollout, on the host."""
    left_out = ("sampling_logprobs", "origin_logprobs", "top_ids", "top_logprobs")
    return jax.device_get(dataclasses.replace(rollout, **dict.fromkeys(left_out)))


class _Clock:
    """Seconds of a `with` block, as the metric time/NAME in `lap`."""

    def __init__(self, name: str):
        self.name = f"time/{name}"

    def __enter__(self) -> "_Clock":
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.lap = {self.name: time.perf_counter() - self.start}
