"""Steps of a recipe's collector without a run: prompts come in order, and nothing is rewarded."""

import copy
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import rollout_reference as ref

from specrl_jax.responses import CompletedGroups, Responses
from specrl_jax.rewards.pool import Rewards
from specrl_jax.rollout.generate import RolloutResult, generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.reused_noise import ReusedNoise
from specrl_jax.training.collect import Collected, Collector
from specrl_jax.training.state import RolloutState
from specrl_jax.types import Prompts


class InOrder:
    """Endless stream of the same prompts in their order, `size` a step."""

    def __init__(self, prompts: Prompts, size: int):
        self.prompts, self.size, self.given = prompts, size, 0

    def take(self, count: int, busy=()) -> Prompts:
        rows = np.arange(self.given, self.given + count) % len(self.prompts.lens)
        self.given += count
        return self.prompts.select(rows)

    def next(self) -> Prompts:
        return self.take(self.size)

    def peek(self) -> Prompts:
        return copy.copy(self).next()

    def find(self, prompt_ids) -> Prompts:
        rows = {example.prompt_id: row for row, example in enumerate(self.prompts.examples)}
        return self.prompts.select([rows[prompt_id] for prompt_id in prompt_ids])


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of `one_step`: what was requested, what came out, and the collector on both sides."""

    number: int
    requests: Requests
    whole: RolloutResult  # of all rows that were requested
    groups: np.ndarray  # int [Q], those that are trained on
    batch: Collected
    result: RolloutResult  # of the groups that are trained on
    before: Collector
    after: Collector

    @property
    def rollout(self):
        return ref.host(self.result.rollout)

    @property
    def prompts(self) -> Prompts:
        return self.requests.prompts.select(self.groups)


def make_state(
    collector: type, spec, prompts: Prompts, size: int, *, total_steps: int = 1000, **rollout
) -> RolloutState:
    """Return the state before step 1, with a `collector` that takes `size` prompts a step.

    rollout: further fields of the configuration's part of that name.
    """
    settings = {"prompts_per_step": size, "group_size": spec.group_size, "draft": "none"}
    settings |= {"response_len": spec.response_slots} | rollout
    config = SimpleNamespace(rollout=SimpleNamespace(**settings))
    run = SimpleNamespace(config=config, rollout_spec=spec, total_steps=total_steps)
    stream, noise = InOrder(prompts, size), ReusedNoise(1, 0.0, spec.group_size)
    state = RolloutState(jax.random.key(ref.KEY), stream, None, noise)
    state.collector = collector(run)
    return state


def one_step(state: RolloutState, weights, stored=None) -> Step:
    """The next step's rollout; stored: returns earlier responses to prompts, as drafts."""
    state.step += 1
    collector = state.collector
    before = copy.copy(collector)
    requests = collector.choose_prompts(state)
    earlier = stored(requests.prompts) if stored else None
    requests = dataclasses.replace(requests, drafts=collector.drafts(state, requests, earlier))
    whole = generate(collector.run.rollout_spec, weights, requests)
    taken = collector.take(state, requests, whole)
    prompts, result = taken.select(requests.prompts)
    batch = collector.finish_step(state, [_unrewarded(prompts, taken, result)])
    return Step(
        state.step, requests, whole, taken.groups, batch, result, before, copy.copy(collector)
    )


def _unrewarded(prompts: Prompts, taken: CompletedGroups, result: RolloutResult) -> Responses:
    tokens, lens = np.asarray(result.rollout.tokens.ids), np.asarray(result.rollout.lens)
    rewards = Rewards.make_whole(np.zeros(len(lens)), [""] * len(lens))
    none = np.zeros(len(lens), bool)
    return Responses(
        prompts, taken.groups, result.rollout, result.stats, tokens, lens, result.draft_lens,
        rewards, result.finished, on_reused_noise=none,
    )  # fmt: skip
