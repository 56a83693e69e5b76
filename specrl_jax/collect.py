"""The first half of a step: prompts → drafts → rollout → rewards, until there is a batch.

Takes the run and its state, gives a `TrainBatch`, and changes the state: the prompt stream, the
draft store, and all that one rollout leaves to the next. Most steps are one rollout; with dynamic
sampling or screening (`group_buffer`) as many as fill the batch.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import hosts
from specrl_jax.algorithms import off_policy
from specrl_jax.data.curriculum import base_id, part_of
from specrl_jax.data.prompts import concatenate, select
from specrl_jax.episodes import Responses, respond, timed
from specrl_jax.group_buffer import KEPT, places_of, rewards_of
from specrl_jax.models.transformer import rollout_weights
from specrl_jax.rewards.failures import FailureLog
from specrl_jax.rollout.carry_over import CarryOver, assemble, without_drafts
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftHistory
from specrl_jax.rollout.engine.speculation import Seconds
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.rollout.generate import DraftInputs, Noise, measure
from specrl_jax.run import Run
from specrl_jax.state import RunState
from specrl_jax.telemetry.rollout_metrics import GROUP_REWARDS, reward_metrics, rollout_metrics
from specrl_jax.types import Drafts, Prompts, Rollout, Source


@dataclasses.dataclass(frozen=True)
class ScoredRollout:
    """One rollout of whole groups, on the host where a metric reads it."""

    prompts: Prompts
    responses: Responses
    prefix_lens: np.ndarray  # int32 [B]
    forced: np.ndarray  # int [B], tokens that were not the policy's
    previous: tuple[np.ndarray, np.ndarray]  # the rows' last responses, int32 [B, R], and lengths

    @property
    def rollout(self) -> Rollout:
        return self.responses.result.rollout

    @property
    def draft_lens(self) -> np.ndarray:
        """int32 [B], draft tokens that the rows had to verify."""
        return self.responses.result.draft_lens


class Groups(NamedTuple):
    """Q groups, G rows each."""

    prompts: Prompts
    rollout: Rollout
    rewards: np.ndarray  # float32 [Q * G]


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Groups that a step trains on, and how they came about."""

    groups: Groups
    metrics: dict[str, float]
    rollouts: list[ScoredRollout]  # all of the step, whether trained on or not
    rejected_mass: float  # as `off_policy.estimate_rejected_mass` gives it


def collect(run: Run, state: RunState) -> TrainBatch:
    """The batch of the step that begins (`state.step` counts it); changes `state`."""
    state.stream.begin(state.step)
    rollouts = []
    times = {}
    while not rollouts or (state.groups is not None and state.groups.wants_rollout()):
        prompts, carry_over = _next_prompts(run, state)
        rollouts.append(generate_and_score(run, state, prompts, carry_over, times))
        if state.groups is not None:
            ids = [example.prompt_id for example in prompts.examples]
            rewards = rollouts[-1].responses.scores.rewards
            state.groups.add(ids, rewards.reshape(-1, run.rollout_spec.group_size))
    if state.groups is None:
        groups, values = _whole_rollout(state, rollouts[0])
    else:
        groups, values = _full_batch(run, state, rollouts)
    values |= _rollout_metrics(run, groups, rollouts) | times
    values["rollout/draft_store_gib"] = state.store.nbytes / 2**30
    rejected_mass, reuse_metrics = _measure_reuse(run, groups.rollout, rollouts)
    return TrainBatch(groups, values | reuse_metrics, rollouts, rejected_mass)


def generate_and_score(
    run: Run,
    state: RunState,
    prompts: Prompts,
    carry_over: CarryOver,
    times: dict[str, float],
) -> ScoredRollout:
    """Rolls `prompts` out, scores the responses and stores them as drafts.

    carry_over: what the rollout takes up and leaves. times: gets the seconds of the rollout and of
    the rewards.
    """
    group = run.rollout_spec.group_size
    with timed(times, "time/rollout"):
        previous = state.store.get(prompts, step=state.step)
        weights = rollout_weights(run.model, state.train.params)
        drafts = DraftInputs(
            _drafts(run, state, prompts, previous),
            run.log_lenience,
            _draft_history(run, state, prompts, carry_over.next_prompts),
        )
    responses = respond(
        run.rollout_spec,
        weights,
        prompts,
        Noise(run.key, state.step),
        run.scorer,
        drafts=drafts,
        metrics=times,
        speculation=state.speculation,
        carry_over=carry_over,
    )
    result = responses.result
    prompts = select(prompts, result.groups)
    rollout = result.rollout
    prefix_lens, sources = hosts.fetch((rollout.prefix_lens, rollout.sources))
    tokens, lens = hosts.fetch((previous.tokens, previous.lens))
    rewards = responses.scores.rewards.reshape(-1, group)
    state.store.put(prompts, rollout, step=state.step, unsolved=_unsolved(rewards))
    state.stream.observe(prompts, rewards)
    forced = np.sum(sources == Source.FORCED, axis=1)
    last_responses = tokens[result.rows], lens[result.rows]
    return ScoredRollout(prompts, responses, prefix_lens, forced, last_responses)


def measure_rollout(run: Run, state: RunState) -> Seconds:
    """Time the programs of a rollout, on prompts whose drafts all count as stored."""
    spec = run.rollout_spec
    size = run.rows // spec.group_size
    prompts = select(run.prompts, np.resize(np.arange(len(run.prompts.lens)), size))
    next_prompts = prompts if state.run_ahead is not None else None
    previous = state.store.get(prompts, step=state.step)
    drafts = DraftInputs(
        _drafts(run, state, prompts, previous),
        np.inf,
        _draft_history(run, state, prompts, next_prompts),
    )
    weights = rollout_weights(run.model, state.train.params)
    carry_over = CarryOver(next_prompts, state.resumed)
    return measure(spec, weights, prompts, Noise(run.key, 0), drafts, carry_over)


# Prompts ------------------------------------------------------------------------------------------


def _next_prompts(run: Run, state: RunState) -> tuple[Prompts, CarryOver]:
    """Return the prompts of the next rollout, and what it takes up and leaves."""
    config = run.config.rollout
    if state.groups is not None:
        return _group_prompts(state), CarryOver()
    if state.resumed is not None:
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
    prompts = state.stream.next()
    return prompts, CarryOver(state.stream.peek() if config.run_ahead else None)


def _group_prompts(state: RunState) -> Prompts:
    """New prompts, and then the further parts of the groups that are to be finished."""
    groups = state.groups
    prompts = state.stream.take(groups.num_new_prompts, busy=tuple(groups.busy))
    if not groups.to_finish:
        return prompts
    begun = state.stream.find(groups.to_finish)
    return concatenate(prompts, *(part_of(begun, first) for first in groups.first_samples))


# Drafts -------------------------------------------------------------------------------------------


def _drafts(run: Run, state: RunState, prompts: Prompts, previous: Drafts) -> Drafts | None:
    """Earlier responses to `prompts`, or what was begun for them ahead.

    previous: the newest responses, which the store has given already.
    """
    config = run.config.rollout
    drafts = None
    if DRAFT_SOURCES[config.draft].previous:
        drafts = previous
        if config.draft_age > 1:
            drafts = state.store.get(prompts, age=config.draft_age, step=state.step)
        drafts = _without_unsolved(run, state, prompts, drafts)
    return drafts if state.run_ahead is None else state.run_ahead.drafts_for(prompts, drafts)


def _unsolved(rewards: np.ndarray) -> np.ndarray:
    """bool [Q], the groups of rewards [Q, G] that have no signal and no right response."""
    return (np.ptp(rewards, axis=1) == 0) & (rewards[:, 0] < 1)


def _without_unsolved(run: Run, state: RunState, prompts: Prompts, drafts: Drafts) -> Drafts:
    """The drafts without a share of those of unsolved groups, other samples at every visit.

    A group whose responses are all wrong and all reused would be the same for ever. An exact rule
    keeps all: what it emits is exact only if no reward decides which drafts it sees.
    """
    share = run.config.rollout.refresh_unsolved
    rule = run.rollout_spec.program.accept
    unsolved = state.store.unsolved(prompts)
    if rule.exact or not share:
        return drafts
    group = len(drafts.lens) // len(unsolved)
    left_out = np.zeros((len(unsolved), group), bool)
    for row in np.flatnonzero(unsolved):
        rng = np.random.default_rng([run.config.seed, state.step, *prompts.ids[row].tolist()])
        left_out[row, rng.permutation(group)[: math.ceil(share * group)]] = True
    return without_drafts(drafts, left_out.reshape(-1))


def _draft_history(
    run: Run, state: RunState, prompts: Prompts, next_prompts: Prompts | None
) -> DraftHistory | None:
    """Stored responses for the draft source; None where it wants none."""
    if not run.rollout_spec.program.draft_history:
        return None
    batches = [prompts] if next_prompts is None else [prompts, next_prompts]
    stored = [_stored_responses(run, state, batch) for batch in batches]
    if state.run_ahead is not None:  # newest: a sibling may go on where one stopped
        begun = [state.run_ahead.sources(batch) for batch in batches]
        stored = [[jnp.concatenate(x, axis=1) for x in zip(*pair)] for pair in zip(begun, stored)]
    tokens, lens = (jnp.concatenate(x) for x in zip(*stored))
    return DraftHistory.from_store(tokens, lens, run.config.rollout.group_size)


def _stored_responses(run: Run, state: RunState, prompts: Prompts) -> tuple[jax.Array, ...]:
    """All stored responses of the prompts, newest generation first: tokens [Q, E * G, R], lens.

    Groups that are rolled out in parts are stored in parts: these are put together.
    """
    part = run.rollout_spec.group_size
    firsts = range(0, run.config.rollout.group_size, part)
    if len(firsts) == 1:
        return state.store.sources(prompts, step=state.step)
    whole = state.stream.find([base_id(example.prompt_id) for example in prompts.examples])
    parts = [state.store.sources(part_of(whole, first), step=state.step) for first in firsts]

    def joined(arrays: tuple[jax.Array, ...]) -> jax.Array:
        """[Q, E * part, ...] of every part → [Q, E * G, ...]"""
        by_generation = [x.reshape(x.shape[0], -1, part, *x.shape[2:]) for x in arrays]
        samples = jnp.concatenate(by_generation, axis=2)
        return samples.reshape(samples.shape[0], -1, *samples.shape[3:])

    return tuple(joined(arrays) for arrays in zip(*parts))


# The batch ----------------------------------------------------------------------------------------


def _whole_rollout(state: RunState, scored: ScoredRollout) -> tuple[Groups, dict[str, float]]:
    """All of a rollout; what it leaves to the next one goes into `state`."""
    result = scored.responses.result
    values = result.metrics()
    if state.run_ahead is not None:
        begun = state.run_ahead
        lens = hosts.fetch(begun.drafts.lens) if begun.prompt_ids else np.zeros(1)
        if lens.any():
            accepted = int(scored.prefix_lens[lens > 0].sum())
            values["rollout/run_ahead_accepted"] = accepted / int(lens.sum())
        state.run_ahead = result.run_ahead or dataclasses.replace(begun, prompt_ids=())
    state.resumed = result.resumed
    return Groups(scored.prompts, scored.rollout, scored.responses.scores.rewards), values


def _full_batch(
    run: Run, state: RunState, rollouts: list[ScoredRollout]
) -> tuple[Groups, dict[str, float]]:
    """The groups that the buffer gives; the rows of the others wait in it."""
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
    values |= Stats.total([x.responses.result.stats for x in rollouts]).metrics()
    return Groups(prompts, rollout, rewards_of(groups, size)), values


# Metrics ------------------------------------------------------------------------------------------


def _joined(arrays) -> np.ndarray:
    return np.concatenate(list(arrays))


def _rollout_metrics(run: Run, groups: Groups, rollouts: list[ScoredRollout]) -> dict[str, float]:
    """Metrics of all that was rolled out, whether it is trained on or not."""
    responses = [x.responses for x in rollouts]
    values = rollout_metrics(
        _joined(x.tokens for x in responses),
        _joined(x.lens for x in responses),
        _joined(x.prefix_lens for x in rollouts),
        run.rollout_spec.program.eos_ids,
        draft_lens=_joined(x.draft_lens for x in rollouts),
        previous=tuple(map(_joined, zip(*(x.previous for x in rollouts)))),
        forced=_joined(x.forced for x in rollouts),
    )
    if run.scorer.max_turns:
        values["rollout/turns_mean"] = float(np.mean(_joined(x.turns for x in responses)))
    rewards = _joined(x.scores.rewards for x in responses)
    failed = _joined(x.scores.failed for x in responses)
    values |= reward_metrics(rewards, failed, run.rollout_spec.group_size)
    if run.rollout_spec.group_size < run.config.rollout.group_size:  # rollouts of parts
        none_failed = np.zeros(len(groups.rewards), bool)
        trained = reward_metrics(groups.rewards, none_failed, run.trained_group_size)
        values |= {name: trained[name] for name in GROUP_REWARDS}
    return values


def record_failures(
    failures: FailureLog, run: Run, step: int, rollouts: list[ScoredRollout]
) -> None:
    """Tells of the answers of a step that could not be scored; as `FailureLog.record` raises."""
    reasons = []
    tasks = []
    rows = []
    for x in rollouts:
        reasons += x.responses.scores.reasons
        rows += list(zip(x.responses.tokens, x.responses.lens, strict=True))
        group = len(x.responses.lens) // len(x.prompts.examples)
        tasks += [example.task for example in x.prompts.examples for _ in range(group)]

    def text_of(row: int) -> str:
        tokens, length = rows[row]
        return run.scorer.text(tokens[:length])

    failures.record(step, reasons, tasks, text_of)


def _measure_reuse(
    run: Run, batch: Rollout, rollouts: list[ScoredRollout]
) -> tuple[float, dict[str, float]]:
    """Return the share of rejections and the `reuse/*` metrics."""
    rule = run.rollout_spec.program.accept
    if rule.samples_anew:
        return 0.0, {}
    rejected_mass = off_policy.estimate_rejected_mass(
        _joined(x.prefix_lens for x in rollouts), _joined(x.draft_lens for x in rollouts)
    )
    share = rule.lenient_share
    return rejected_mass, off_policy.measure(batch, run.log_lenience, rejected_mass, share)
