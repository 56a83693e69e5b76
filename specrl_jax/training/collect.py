"""Collector of a step's batch: which prompts are rolled out, and what is trained on.

`Collector` makes one rollout of whole groups. A recipe may have its own collector, a subclass that
overrides what differs.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.transformer import Params
from specrl_jax.responses import CompletedGroups, Responses
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftHistory
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.requests import Requests
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.training.collect_metrics import collect_metrics, rejected_mass
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.state import RolloutState
from specrl_jax.types import Drafts, Prompts, StatePart


class Collector(StatePart):
    """Makes one rollout of whole groups. Subclasses keep what waits between steps."""

    def __init__(self, run: Run):
        self.run = run

    # What follows from the configuration alone

    @staticmethod
    def asked_by(config) -> str:
        """Return the config field that selects it; overridden by recipes."""
        return ""

    @staticmethod
    def rollout_group_size(config) -> int:
        """Return how many responses per prompt one rollout has."""
        return config.rollout.group_size

    @staticmethod
    def trained_group_size(config) -> int:
        """Return how many responses of a group are used for training."""
        return config.rollout.group_size

    @classmethod
    def check_enough(cls, config, prompts: int) -> None:
        """Raise a one-line ValueError if there are too few prompts to train on."""

    @staticmethod
    def keeps_signal(config) -> bool:
        """Return whether groups without a signal are left out of batches."""
        return False

    @classmethod
    def rows_per_rollout(cls, config) -> tuple[int, int]:
        """Return how many rows a rollout has besides background rows, and how many of these."""
        return config.rollout.prompts_per_step * config.rollout.group_size, 0

    @staticmethod
    def has_drafts(config) -> bool:
        """Return whether rollouts have drafts to verify."""
        return DRAFT_SOURCES[config.rollout.draft].verifies_previous

    @staticmethod
    def generations(stored: int) -> int:
        """Return how many generations `history` returns, if the store has `stored`: a shape."""
        return stored

    # A step

    @property
    def prompts_waiting(self) -> int:
        """Prompts of earlier steps whose rollout is incomplete."""
        return 0

    def wants_rollout(self, done: Sequence[Responses]) -> bool:
        """Return whether the step needs another rollout after these."""
        return not done

    def choose_prompts(self, state: RolloutState) -> Requests:
        """Choose the prompts of the next rollout; return its requests, without drafts."""
        prompts = state.stream.next()
        return Requests(prompts, state.noise_key(prompts))

    def drafts(
        self, state: RolloutState, requests: Requests, stored: Drafts | None
    ) -> Drafts | None:
        """Return the drafts to verify. stored: earlier responses; None: none are verified."""
        return stored

    def history(self, state: RolloutState, prompts: Prompts) -> DraftHistory:
        """Return earlier responses for the draft source, newest generation first."""
        return state.store.history(prompts, step=state.step)

    def take(
        self, state: RolloutState, requests: Requests, result: RolloutResult
    ) -> CompletedGroups:
        """Return the groups to score now; keep those that wait for another step."""
        return CompletedGroups(np.arange(len(requests.prompts.lens)), result)

    def observe(self, state: RolloutState, responses: Responses) -> None:
        """Pass a rollout's rewards to whatever chooses the next prompts."""
        state.stream.observe(responses.prompts, responses.group_rewards)

    def finish_step(self, state: RolloutState, done: Sequence[Responses]) -> Collected:
        """Return what the step trains on; keep what waits for another step."""
        (responses,) = done
        rewards = responses.rewards
        return Collected(
            responses.prompts,
            responses.rollout,
            rewards.rewards,
            responses.stats.metrics(),
            state.step,
            state.epoch,
            by_function={
                name: np.where(rewards.failed, 0, values).astype(np.float32)
                for name, values in rewards.by_function.items()
            },
            turns=responses.turns,
            ended=responses.ended,
        )

    def restore(self, host, arrays) -> "Collector":
        return self


def next_requests(run: Run, state: RolloutState) -> tuple[Requests, Drafts]:
    """Return the next rollout's requests, and the newest stored responses to its prompts, [B]."""
    config = run.config.rollout
    collector = state.collector
    requests = collector.choose_prompts(state)
    prompts = requests.prompts
    previous = state.store.get(prompts, step=state.step)
    drafts = None
    if DRAFT_SOURCES[config.draft].verifies_previous:
        drafts = previous
        if config.draft_age > 1:
            drafts = state.store.get(prompts, age=config.draft_age, step=state.step)
    drafts = collector.drafts(state, requests, drafts)
    history = None
    if run.rollout_spec.draft_history:
        history = collector.history(state, prompts)
    return dataclasses.replace(requests, drafts=drafts, history=history), previous


def collect(run: Run, state: RolloutState, weights: Params) -> tuple[Collected, list[Responses]]:
    """Roll out until the batch is complete, with one copy of the weights; changes `state`."""
    clock = Stopwatch()
    spec = run.rollout_spec
    state.start_step()
    choice = state.verification
    if choice and (lines := choice.review()) and hosts.is_primary():
        print(*(f"step {state.step}: {line}" for line in lines), sep="\n", flush=True)
    rollouts: list[Responses] = []
    while state.collector.wants_rollout(rollouts):
        with clock.timed("time/rollout"):
            requests, previous = next_requests(run, state)
            if choice:
                requests = choice.skip(requests)
        result = run.roll_out(spec, weights, requests, speculation=state.speculation, clock=clock)
        with clock.timed("time/rollout"):
            if choice:
                choice.observe(requests, result)
            taken = state.collector.take(state, requests, result)
        responses = run.responder.score(spec, requests.prompts, taken, clock)
        rollouts.append(state.store_responses(responses, requests, previous))
    collected = state.collector.finish_step(state, rollouts)
    mass = rejected_mass(run.rollout_spec.accept, rollouts)
    collected = dataclasses.replace(collected, rejected_mass=mass)
    metrics = collect_metrics(run, state, collected, rollouts) | clock.take()
    if choice:
        metrics |= choice.take_metrics()
    return dataclasses.replace(collected, metrics=metrics), rollouts
