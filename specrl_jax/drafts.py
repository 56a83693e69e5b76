"""Drafts of a step's rollout: earlier responses that the draft store holds.

Takes prompts, gives `DraftInputs`, and stores the responses that come of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.data.curriculum import base_id, part_of
from specrl_jax.episodes import Responses
from specrl_jax.rollout.carry_over import without_drafts
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftHistory
from specrl_jax.rollout.generate import DraftInputs
from specrl_jax.run import Run
from specrl_jax.state import RunState
from specrl_jax.types import Drafts, Prompts


def find_drafts(
    run: Run, state: RunState, prompts: Prompts, previous: Drafts, next_prompts: Prompts | None
) -> DraftInputs:
    """Return what the rollout of `prompts` may draft from.

    previous: the newest responses, which the store has given already.
    next_prompts: of the step after it, begun in the same rollout; None: there are none.
    """
    config = run.config.rollout
    drafts = None
    if DRAFT_SOURCES[config.draft].previous:
        drafts = previous
        if config.draft_age > 1:
            drafts = state.store.get(prompts, age=config.draft_age, step=state.step)
        drafts = _without_unsolved(run, state, prompts, drafts)
    drafts = run.collector.drafts(state, prompts, drafts)
    history = None
    if run.rollout_spec.program.draft_history:
        batches = [prompts] if next_prompts is None else [prompts, next_prompts]
        stored = [run.collector.stored_responses(run, state, batch) for batch in batches]
        tokens, lens = (jnp.concatenate(x) for x in zip(*stored))
        history = DraftHistory.from_store(tokens, lens, config.group_size)
    return DraftInputs(drafts, run.log_lenience, history)


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


def stored_responses(run: Run, state: RunState, prompts: Prompts) -> tuple[jax.Array, ...]:
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


def store(state: RunState, responses: Responses) -> None:
    """Store responses as the next drafts of their prompts."""
    rewards = responses.group_rewards
    unsolved = (np.ptp(rewards, axis=1) == 0) & (rewards[:, 0] < 1)
    inputs = (responses.prompts, responses.rollout)
    state.store.put(*inputs, step=state.step, unsolved=unsolved)
