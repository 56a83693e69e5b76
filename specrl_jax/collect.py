"""Ways to collect the batch of a step: which prompts are rolled out, and what is trained on.

`COLLECTORS` holds them; `build` chooses one for a run. Most steps are one rollout. With dynamic
sampling or screening (`group_buffer`) they are as many as fill the batch. A way has no state of its
own: what waits for the next step is a part of `RunState`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import hosts
from specrl_jax.algorithms import off_policy
from specrl_jax.data.curriculum import base_id, part_of
from specrl_jax.data.prompts import concatenate, select
from specrl_jax.drafts import stored_responses
from specrl_jax.episodes import Responses
from specrl_jax.group_buffer import KEPT, GroupBuffer, part_size, places_of, rewards_of
from specrl_jax.rollout.carry_over import CarryOver, Resumed, RunAhead, assemble
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.run import Run
from specrl_jax.state import RunState
from specrl_jax.telemetry.rollout_metrics import GROUP_REWARDS, reward_metrics, rollout_metrics
from specrl_jax.types import Drafts, Prompts, Rollout, Source


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Q groups that a step trains on, G rows each."""

    prompts: Prompts
    rollout: Rollout
    rewards: np.ndarray  # float32 [Q * G]
    metrics: dict[str, float]  # of how it came about
    rejected_mass: float = 0.0  # as `off_policy.estimate_rejected_mass` gives it


class WholeRollout:
    """One rollout of whole groups. The other ways say where they differ."""

    def is_asked_for(self, config: Any) -> bool:
        return True

    def add_part(self, run: Run, state: RunState) -> None:
        """Add what waits between two steps to a new state, empty."""

    def wants_rollout(self, state: RunState, rollouts: Sequence[Responses]) -> bool:
        """Return whether the step needs one more rollout after these."""
        return not rollouts

    def next_prompts(self, run: Run, state: RunState) -> tuple[Prompts, CarryOver]:
        """Return the prompts of the next rollout, and what it takes up and leaves."""
        return state.stream.next(), CarryOver()

    def carry_over_to_time(self, state: RunState, prompts: Prompts) -> CarryOver:
        """Return the carry-over of a rollout of `prompts` whose programs are timed."""
        return CarryOver()

    def drafts(self, state: RunState, prompts: Prompts, drafts: Drafts | None) -> Drafts | None:
        """Return the drafts to verify; drafts: those that the store gave."""
        return drafts

    def stored_responses(
        self, run: Run, state: RunState, prompts: Prompts
    ) -> tuple[jax.Array, ...]:
        """Return earlier responses for the draft source: tokens [Q, n, R], lens [Q, n]."""
        return stored_responses(run, state, prompts)

    def observe(self, state: RunState, responses: Responses) -> None:
        """Tell what chooses the next prompts of a rollout's rewards."""
        state.stream.observe(responses.prompts, responses.group_rewards)

    def batch(self, run: Run, state: RunState, rollouts: Sequence[Responses]) -> TrainBatch:
        """Return what the step trains on; what is left for the next one goes into `state`."""
        (responses,) = rollouts
        inputs = (responses.prompts, responses.rollout, responses.scores.rewards)
        return TrainBatch(*inputs, responses.result.metrics())


class RunningAhead(WholeRollout):
    """One rollout, whose idle places begin the prompts of the next step (`carry_over.RunAhead`)."""

    def is_asked_for(self, config: Any) -> bool:
        return config.rollout.run_ahead

    def add_part(self, run: Run, state: RunState) -> None:
        state.run_ahead = RunAhead.empty(run.rows, run.config.rollout.response_len)

    def next_prompts(self, run: Run, state: RunState) -> tuple[Prompts, CarryOver]:
        prompts = state.stream.next()
        return prompts, CarryOver(state.stream.peek())

    def carry_over_to_time(self, state: RunState, prompts: Prompts) -> CarryOver:
        return CarryOver(prompts)

    def drafts(self, state: RunState, prompts: Prompts, drafts: Drafts | None) -> Drafts | None:
        return state.run_ahead.drafts_for(prompts, drafts)

    def stored_responses(
        self, run: Run, state: RunState, prompts: Prompts
    ) -> tuple[jax.Array, ...]:
        stored = stored_responses(run, state, prompts)
        begun = state.run_ahead.sources(prompts)  # newest: a sibling may go on where one stopped
        return tuple(jnp.concatenate(x, axis=1) for x in zip(begun, stored))

    def batch(self, run: Run, state: RunState, rollouts: Sequence[Responses]) -> TrainBatch:
        batch = super().batch(run, state, rollouts)
        begun = state.run_ahead
        lens = hosts.fetch(begun.drafts.lens) if begun.prompt_ids else np.zeros(1)
        if lens.any():
            prefix_lens = hosts.fetch(batch.rollout.prefix_lens)
            accepted = int(prefix_lens[lens > 0].sum())
            batch.metrics["rollout/run_ahead_accepted"] = accepted / int(lens.sum())
        state.run_ahead = rollouts[0].result.run_ahead
        return batch


class PartialRollout(WholeRollout):
    """One rollout of more groups than are trained on, which ends once enough are done; the others
    go on in the next step (`carry_over.Resumed`)."""

    def is_asked_for(self, config: Any) -> bool:
        return config.rollout.partial > 0

    def add_part(self, run: Run, state: RunState) -> None:
        settings = run.config.rollout
        rows = settings.partial * settings.group_size
        stored = run.rollout_spec.program.stored_logprobs
        state.resumed = Resumed.empty(rows, settings.response_len, stored)

    def next_prompts(self, run: Run, state: RunState) -> tuple[Prompts, CarryOver]:
        config = run.config.rollout
        begun = state.resumed.prompt_ids
        size = config.prompts_per_step
        # No more than the rest of the run trains on: its last step leaves nothing unfinished.
        rest = max(run.total_steps - state.step + 1, 1) * size
        count = min(size + config.partial, rest)
        new = state.stream.take(count - len(begun), busy=begun)
        prompts = concatenate(state.stream.find(begun), new)
        fillers = size + config.partial - count
        places = np.append(np.arange(count), np.zeros(fillers, int))
        carry_over = CarryOver(resumed=state.resumed, stop_after_groups=size, fillers=fillers)
        return select(prompts, places), carry_over

    def carry_over_to_time(self, state: RunState, prompts: Prompts) -> CarryOver:
        return CarryOver(resumed=state.resumed)

    def batch(self, run: Run, state: RunState, rollouts: Sequence[Responses]) -> TrainBatch:
        state.resumed = rollouts[0].result.resumed
        return super().batch(run, state, rollouts)


class WaitingGroups(WholeRollout):
    """As many rollouts as fill the batch with groups that teach (`group_buffer`); the groups and
    parts of groups beyond it wait."""

    def is_asked_for(self, config: Any) -> bool:
        screens = part_size(config) < config.rollout.group_size
        return config.algorithm.dynamic_sampling or screens

    def add_part(self, run: Run, state: RunState) -> None:
        groups = GroupBuffer(run.config, len(run.prompts.lens))
        stored = run.rollout_spec.program.stored_logprobs
        slots = run.config.rollout.response_len
        groups.kept_rows = Rollout.empty(groups.max_waiting_rows, slots, stored)
        state.groups = groups

    def wants_rollout(self, state: RunState, rollouts: Sequence[Responses]) -> bool:
        return state.groups.wants_rollout()

    def next_prompts(self, run: Run, state: RunState) -> tuple[Prompts, CarryOver]:
        """New prompts, and then the further parts of the groups that are to be finished."""
        groups = state.groups
        prompts = state.stream.take(groups.num_new_prompts, busy=tuple(groups.busy))
        if groups.to_finish:
            begun = state.stream.find(groups.to_finish)
            parts = (part_of(begun, first) for first in groups.first_samples)
            prompts = concatenate(prompts, *parts)
        return prompts, CarryOver()

    def observe(self, state: RunState, responses: Responses) -> None:
        super().observe(state, responses)
        ids = [example.prompt_id for example in responses.prompts.examples]
        state.groups.add(ids, responses.group_rewards)

    def batch(self, run: Run, state: RunState, rollouts: Sequence[Responses]) -> TrainBatch:
        """Return the groups that the buffer gives; the rows of the others wait in it."""
        size = run.trained_group_size
        filler = base_id(rollouts[0].prompts.examples[0].prompt_id)
        groups, values = state.groups.take_batch(filler)
        places = places_of(groups, size)
        sources = [state.groups.kept_rows, *(x.rollout for x in rollouts)]
        rollout = assemble(sources, places)
        lens = hosts.fetch(rollout.lens)
        stale = int(lens[places[:, 0] == KEPT].sum())
        values["rollout/stale_fraction"] = stale / max(int(lens.sum()), 1)
        state.groups.kept_rows = assemble(sources, state.groups.keep())
        prompts = state.stream.find([group.prompt_id for group in groups])
        values |= Stats.total([x.result.stats for x in rollouts]).metrics()
        return TrainBatch(prompts, rollout, rewards_of(groups, size), values)


# A run's way is the first that its configuration asks for; no configuration asks for two.
COLLECTORS = (RunningAhead(), PartialRollout(), WaitingGroups(), WholeRollout())


def take_batch(run: Run, state: RunState, rollouts: Sequence[Responses]) -> TrainBatch:
    """Return what a step trains on, with the metrics of all that was rolled out."""
    batch = run.collector.batch(run, state, rollouts)
    on_host = [hosts.fetch((x.rollout.prefix_lens, x.rollout.sources)) for x in rollouts]
    prefix_lens = _joined(prefix_lens for prefix_lens, _ in on_host)
    draft_lens = _joined(x.draft_lens for x in rollouts)
    values = rollout_metrics(
        _joined(x.tokens for x in rollouts),
        _joined(x.lens for x in rollouts),
        prefix_lens,
        run.rollout_spec.program.eos_ids,
        draft_lens=draft_lens,
        previous=tuple(map(_joined, zip(*(x.previous for x in rollouts)))),
        forced=_joined(np.sum(sources == Source.FORCED, axis=1) for _, sources in on_host),
    )
    if rollouts[0].turns is not None:
        values["rollout/turns_mean"] = float(np.mean(_joined(x.turns for x in rollouts)))
    values |= _reward_metrics(run, batch, rollouts)
    values["rollout/draft_store_gib"] = state.store.nbytes / 2**30
    rejected_mass = 0.0
    rule = run.rollout_spec.program.accept
    if not rule.samples_anew:
        rejected_mass = off_policy.estimate_rejected_mass(prefix_lens, draft_lens)
        inputs = (batch.rollout, run.log_lenience, rejected_mass, rule.lenient_share)
        values |= off_policy.measure(*inputs)
    return dataclasses.replace(batch, metrics=batch.metrics | values, rejected_mass=rejected_mass)


def _reward_metrics(run: Run, batch: TrainBatch, rollouts: Sequence[Responses]) -> dict[str, float]:
    """Metrics of all rewards; those of groups are of the batch where rollouts are of parts."""
    rewards = _joined(x.scores.rewards for x in rollouts)
    failed = _joined(x.scores.failed for x in rollouts)
    values = reward_metrics(rewards, failed, run.rollout_spec.group_size)
    if run.rollout_spec.group_size < run.config.rollout.group_size:
        none_failed = np.zeros(len(batch.rewards), bool)
        trained = reward_metrics(batch.rewards, none_failed, run.trained_group_size)
        values |= {name: trained[name] for name in GROUP_REWARDS}
    return values


def _joined(arrays) -> np.ndarray:
    return np.concatenate(list(arrays))
