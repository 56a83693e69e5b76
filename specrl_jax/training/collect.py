"""Collectors of a step's batch: which prompts are rolled out, and what is trained on.

`build` chooses one of `COLLECTORS` for a run. A collector has no state of its own: what waits for
the next step is a part of `RolloutState`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from specrl_jax import hosts
from specrl_jax.algorithms import off_policy
from specrl_jax.data.curriculum import part_of
from specrl_jax.rollout.carry_over import Resumed, RunAhead, without_drafts
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftHistory
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.rollout.engine.spec import noise_visits
from specrl_jax.rollout.generate import RolloutInputs
from specrl_jax.rollout.rows import assemble
from specrl_jax.telemetry.rollout_metrics import (
    GROUP_REWARDS,
    noise_metrics,
    reward_metrics,
    rollout_metrics,
    turn_metrics,
)
from specrl_jax.training.batch import TrainBatch
from specrl_jax.training.group_buffer import KEPT, GroupBuffer, part_size, pick_rows
from specrl_jax.training.responses import Responses, mean_by_function
from specrl_jax.training.state import RolloutState, Run, rollout_rows
from specrl_jax.types import Drafts, Prompts, Rollout, Source


class WholeRollout:
    """One rollout of whole groups. The other collectors say where they differ."""

    def is_asked_for(self, config: Any) -> bool:
        return True

    def add_waiting(self, run: Run, state: RolloutState) -> None:
        """Add the part of the state that keeps what waits between two steps. Here: nothing does."""

    def wants_rollout(self, state: RolloutState, rollouts: Sequence[Responses]) -> bool:
        """Return whether the step needs one more rollout after these."""
        return not rollouts

    def choose_prompts(self, run: Run, state: RolloutState) -> RolloutInputs:
        """Choose the prompts of the next rollout; return its inputs, without drafts."""
        prompts = state.stream.next()
        return RolloutInputs(prompts, state.noise_key(prompts))

    def drafts_to_verify(
        self, state: RolloutState, prompts: Prompts, drafts: Drafts | None
    ) -> Drafts | None:
        """Return the drafts to verify; drafts: those that the store gave."""
        return drafts

    def history(self, run: Run, state: RolloutState, prompts: Prompts) -> DraftHistory:
        """Return earlier responses for the draft source, newest generation first.

        Groups that are rolled out in parts are stored in parts: these are put together.
        """
        part = run.rollout_spec.group_size
        firsts = range(0, run.config.rollout.group_size, part)
        if len(firsts) == 1:
            return state.store.history(prompts, step=state.step)
        whole = state.stream.find([example.base_id for example in prompts.examples])
        parts = [state.store.history(part_of(whole, first), step=state.step) for first in firsts]
        tokens = jnp.concatenate([tokens for tokens, _ in parts], axis=2)
        return tokens, jnp.concatenate([lens for _, lens in parts], axis=2)

    def observe(self, state: RolloutState, responses: Responses) -> None:
        """Give a rollout's rewards to what chooses the next prompts."""
        state.stream.observe(responses.prompts, responses.group_rewards)

    def batch(self, run: Run, state: RolloutState, rollouts: Sequence[Responses]) -> TrainBatch:
        """Return what the step trains on; put what is left for the next step into `state`."""
        (responses,) = rollouts
        rewards = responses.rewards
        return TrainBatch(
            responses.prompts,
            responses.rollout,
            rewards.rewards,
            responses.result.metrics(),
            state.step,
            state.epoch,
            by_function={
                name: np.where(rewards.failed, 0, values).astype(np.float32)
                for name, values in rewards.by_function.items()
            },
            turns=responses.turns,
            ended=responses.ended,
        )


class RunningAhead(WholeRollout):
    """One rollout, whose free slots begin the prompts of the next step (`carry_over.RunAhead`)."""

    def is_asked_for(self, config: Any) -> bool:
        return config.rollout.run_ahead

    def add_waiting(self, run: Run, state: RolloutState) -> None:
        rows = rollout_rows(run.config)
        state.run_ahead = RunAhead.empty(rows, run.config.rollout.response_len)

    def choose_prompts(self, run: Run, state: RolloutState) -> RolloutInputs:
        inputs = super().choose_prompts(run, state)
        later = state.stream.peek()
        noise_steps = state.kept_noise.noise_steps(later, state.step + 1)
        return dataclasses.replace(inputs, next_prompts=later, next_noise_steps=noise_steps)

    def drafts_to_verify(
        self, state: RolloutState, prompts: Prompts, drafts: Drafts | None
    ) -> Drafts | None:
        run_ahead = state.run_ahead
        if drafts is not None:
            # On kept noise a row repeats its last response for longer than what was run ahead.
            on_kept_noise = state.kept_noise.noise_steps(prompts, state.step) < state.step
            others = without_drafts(run_ahead.drafts, on_kept_noise.reshape(-1))
            run_ahead = dataclasses.replace(run_ahead, drafts=others)
        return run_ahead.drafts_for(prompts, drafts)

    def history(self, run: Run, state: RolloutState, prompts: Prompts) -> DraftHistory:
        tokens, lens = super().history(run, state, prompts)
        # Newest: a sibling may go on where one stopped.
        ahead_tokens, ahead_lens = state.run_ahead.history(prompts)
        tokens = jnp.concatenate([ahead_tokens, tokens], axis=1)
        return tokens, jnp.concatenate([ahead_lens, lens], axis=1)

    def batch(self, run: Run, state: RolloutState, rollouts: Sequence[Responses]) -> TrainBatch:
        batch = super().batch(run, state, rollouts)
        run_ahead = state.run_ahead
        lens = hosts.fetch(run_ahead.drafts.lens) if run_ahead.prompt_ids else np.zeros(1)
        if DRAFT_SOURCES[run.config.rollout.draft].verifies_previous:  # see `drafts_to_verify`
            lens = np.where(rollouts[0].on_kept_noise, 0, lens)
        if lens.any():
            prefix_lens = hosts.fetch(batch.rollout.prefix_lens)
            share = int(prefix_lens[lens > 0].sum()) / int(lens.sum())
            metrics = batch.metrics | {"rollout/run_ahead_accepted": share}
            batch = dataclasses.replace(batch, metrics=metrics)
        state.run_ahead = rollouts[0].result.run_ahead
        return batch


class PartialRollout(WholeRollout):
    """One rollout of more groups than are trained on, which ends once enough are done.

    The others go on in the next step (`carry_over.Resumed`).
    """

    def is_asked_for(self, config: Any) -> bool:
        return config.rollout.partial > 0

    def add_waiting(self, run: Run, state: RolloutState) -> None:
        settings = run.config.rollout
        rows = settings.partial * settings.group_size
        stored = run.rollout_spec.stored_logprobs
        state.resumed = Resumed.empty(rows, settings.response_len, stored)

    def choose_prompts(self, run: Run, state: RolloutState) -> RolloutInputs:
        config = run.config.rollout
        resumed_ids = state.resumed.prompt_ids
        size = config.prompts_per_step
        # The prompts that the rest of the run trains on: the last step leaves none unfinished.
        rest = max(run.total_steps - state.step + 1, 1) * size
        # All groups that have begun go on, also where the run was made shorter.
        count = max(min(size + config.partial, rest), len(resumed_ids))
        new = state.stream.take(count - len(resumed_ids), busy=resumed_ids)
        prompts = Prompts.concatenate(state.stream.find(resumed_ids), new)
        fillers = size + config.partial - count
        filled = np.append(np.arange(count), np.zeros(fillers, int))
        prompts = prompts.select(filled)
        return RolloutInputs(
            prompts,
            state.noise_key(prompts),
            resumed=state.resumed,
            stop_after_groups=size,
            fillers=fillers,
        )

    def batch(self, run: Run, state: RolloutState, rollouts: Sequence[Responses]) -> TrainBatch:
        result = rollouts[0].result
        state.resumed = result.resumed
        batch = super().batch(run, state, rollouts)
        return dataclasses.replace(batch, stale=bool(result.resumed_lens.any()))


class WaitingGroups(WholeRollout):
    """Rollouts until groups that teach fill the batch; those beyond it wait (`group_buffer`)."""

    def is_asked_for(self, config: Any) -> bool:
        screens = part_size(config) < config.rollout.group_size
        return config.algorithm.dynamic_sampling or screens

    def add_waiting(self, run: Run, state: RolloutState) -> None:
        groups = GroupBuffer(run.config, len(run.prompts.lens))
        stored = run.rollout_spec.stored_logprobs
        slots = run.config.rollout.response_len
        groups.kept_rows = Rollout.empty(groups.max_waiting_rows, slots, stored)
        state.groups = groups

    def wants_rollout(self, state: RolloutState, rollouts: Sequence[Responses]) -> bool:
        return state.groups.wants_rollout()

    def choose_prompts(self, run: Run, state: RolloutState) -> RolloutInputs:
        """Return new prompts, and then the further parts of the groups that are to be finished."""
        groups = state.groups
        prompts = state.stream.take(groups.num_new_prompts, busy=tuple(groups.busy))
        if groups.to_finish:
            to_finish = state.stream.find(groups.to_finish)
            parts = (part_of(to_finish, first) for first in groups.first_samples)
            prompts = Prompts.concatenate(prompts, *parts)
        return RolloutInputs(prompts, state.noise_key(prompts))

    def observe(self, state: RolloutState, responses: Responses) -> None:
        super().observe(state, responses)
        ids = [example.base_id for example in responses.prompts.examples]
        ended = responses.ended[: responses.num_rows].reshape(-1, responses.group_size)
        state.groups.add(ids, responses.group_rewards, ended)

    def batch(self, run: Run, state: RolloutState, rollouts: Sequence[Responses]) -> TrainBatch:
        """Return the groups that the buffer gives; the rows of the others wait in it."""
        size = run.trained_group_size
        filler = rollouts[0].prompts.examples[0].base_id
        groups, metrics = state.groups.take_batch(filler)
        row_ids, rewards, ended = pick_rows(groups, size)
        sources = [state.groups.kept_rows, *(x.rollout for x in rollouts)]
        rollout = assemble(sources, row_ids)
        lens = hosts.fetch(rollout.lens)
        stale = int(lens[row_ids[:, 0] == KEPT].sum())
        metrics["rollout/stale_fraction"] = stale / max(int(lens.sum()), 1)
        state.groups.kept_rows = assemble(sources, state.groups.keep())
        prompts = state.stream.find([group.prompt_id for group in groups])
        metrics |= Stats.total([x.result.stats for x in rollouts]).metrics()
        return TrainBatch(
            prompts,
            rollout,
            rewards,
            metrics,
            state.step,
            state.epoch,
            stale=stale > 0,
            ended=ended,
        )


# A run has the first that its configuration asks for. `config.cross_rules` refuses a configuration
# that asks for two of the first three.
COLLECTORS = (RunningAhead(), PartialRollout(), WaitingGroups(), WholeRollout())


def next_inputs(run: Run, state: RolloutState) -> tuple[RolloutInputs, Drafts]:
    """Return the next rollout's inputs, and the newest stored responses to its prompts, [Q * G]."""
    inputs = run.collector.choose_prompts(run, state)
    previous = state.store.get(inputs.prompts, step=state.step)
    return _with_drafts(run, state, inputs, previous), previous


def _with_drafts(
    run: Run, state: RolloutState, inputs: RolloutInputs, previous: Drafts
) -> RolloutInputs:
    """Return the inputs with what the rollout may draft from.

    previous: the newest stored responses.
    """
    config = run.config.rollout
    prompts = inputs.prompts
    drafts = None
    if DRAFT_SOURCES[config.draft].verifies_previous:
        drafts = previous
        if config.draft_age > 1:
            drafts = state.store.get(prompts, age=config.draft_age, step=state.step)
    drafts = run.collector.drafts_to_verify(state, prompts, drafts)
    history = None
    if run.rollout_spec.draft_history:
        batches = [prompts]
        if inputs.next_prompts is not None:
            batches.append(inputs.next_prompts)
        stored = [run.collector.history(run, state, batch) for batch in batches]
        tokens = jnp.concatenate([tokens for tokens, _ in stored])
        lens = jnp.concatenate([lens for _, lens in stored])
        history = (tokens, lens)
    return dataclasses.replace(
        inputs, drafts=drafts, log_lenience=run.log_lenience, history=history
    )


def make_train_batch(
    run: Run, state: RolloutState, rollouts: Sequence[Responses], seconds: dict[str, float]
) -> TrainBatch:
    """Return what a step trains on, with the metrics of all its rollouts; seconds: of their clock.

    What the rollouts leave for the next step goes into `state`.
    """
    batch = run.collector.batch(run, state, rollouts)
    metrics = batch.metrics | _reward_metrics(run, batch, rollouts)
    metrics["data/prompts_seen"] = state.prompts_seen
    metrics["data/passes"] = state.prompts_seen / len(run.prompts.lens)
    metrics["rollout/draft_store_gib"] = state.store.nbytes / 2**30
    on_host = [hosts.fetch((x.rollout.prefix_lens, x.rollout.sources)) for x in rollouts]
    prefix_lens = _joined(prefix_lens for prefix_lens, _ in on_host)
    draft_lens = _joined(x.result.draft_lens for x in rollouts)
    tokens = _joined(x.tokens for x in rollouts)
    lens = _joined(x.lens for x in rollouts)
    metrics |= rollout_metrics(
        tokens,
        lens,
        prefix_lens,
        _joined(x.ended for x in rollouts),
        draft_lens=draft_lens,
        previous=(
            _joined(x.previous[0] for x in rollouts),
            _joined(x.previous[1] for x in rollouts),
        ),
        forced=_joined(np.sum(sources == Source.FORCED, axis=1) for _, sources in on_host),
        copied=_joined(np.sum(sources == Source.COPIED, axis=1) for _, sources in on_host),
        group_size=run.rollout_spec.group_size,
    )
    if rollouts[0].turns is not None:
        metrics |= turn_metrics(
            _joined(x.turns.counts for x in rollouts), _joined(x.turns.roles for x in rollouts)
        )
    rejected_mass = 0.0
    rule = run.rollout_spec.accept
    if not rule.samples_anew:
        rejected_mass = off_policy.estimate_rejected_mass(prefix_lens, draft_lens)
        metrics |= off_policy.measure(
            batch.rollout, run.log_lenience, rejected_mass, rule.lenient_share
        )
    return dataclasses.replace(batch, metrics=metrics | seconds, rejected_mass=rejected_mass)


def _reward_metrics(run: Run, batch: TrainBatch, rollouts: Sequence[Responses]) -> dict[str, float]:
    rewards = _joined(x.rewards.rewards for x in rollouts)
    failed = _joined(x.rewards.failed for x in rollouts)
    metrics = reward_metrics(rewards, failed, run.rollout_spec.group_size)
    metrics |= {f"reward/{name}": mean for name, mean in mean_by_function(rollouts).items()}
    if noise_visits(run.config) > 1:
        metrics |= noise_metrics(_joined(x.on_kept_noise for x in rollouts), rewards)
    if run.rollout_spec.group_size < run.config.rollout.group_size:  # rollouts of parts
        none_failed = np.zeros(len(batch.rewards), bool)
        trained = reward_metrics(batch.rewards, none_failed, run.trained_group_size)
        metrics |= {name: trained[name] for name in GROUP_REWARDS}
    return metrics


def _joined(arrays) -> np.ndarray:
    return np.concatenate(list(arrays))
