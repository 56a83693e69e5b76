"""Advantage of each turn of an episode over the same turn in the prompt's other episodes."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.algorithms.advantages import EPSILON, whole
from specrl_jax.algorithms.evidence import Advantage, AdvantageConfig, Estimate, Evidence
from specrl_jax.config.fields import NEW_RUN, Check, Section, Values, When, field
from specrl_jax.config.kinds import SHARE
from specrl_jax.sharding import put
from specrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class TurnConfig(AdvantageConfig):
    discount: float = 1.0  # per turn, in [0, 1]

    @classmethod
    def of(cls, config, group_size: int) -> "TurnConfig":
        return cls.from_config(config, group_size, discount=config.algorithm.turn_discount)


def turn_relative(rewards: Array, turn_ends: Array, config: TurnConfig) -> Array:
    """Return the advantage [B, K] of each turn over the same turn in the other episodes.

        Gₖ = Σⱼ γ^(j − k)·rⱼ over the turns j ≥ k,    Aₖ = (Gₖ − mean(Gₖ)) / (std(Gₖ) + ε)

    mean and std are over the prompt's episodes that have a turn k, with the options of
    `group_relative`; a turn that only one episode has gets 0. So a turn is not blamed for earlier
    turns. Worked row, G = 2, γ = 0.5, without the division: rewards 0 1 and 1, two turns and one,
    have returns 0.5 1 and 1, hence advantages −0.25 0 and 0.25.

    rewards: float32 [B, K], of each turn; not split; B = Q·G, the rows of a group are contiguous.
    turn_ends: int32 [B, K], 0 for turns that an episode does not have.
    """
    later = jnp.zeros_like(rewards[:, 0])
    returns = []
    for reward in rewards.T[::-1]:
        later = reward + config.discount * later
        returns.append(later)
    groups = jnp.stack(returns[::-1], axis=1).reshape(-1, config.group_size, rewards.shape[1])
    has = (turn_ends > 0).reshape(groups.shape)
    count = jnp.sum(has, axis=1, keepdims=True)
    both = has[:, :, None] & has[:, None, :]
    differences = jnp.where(both, groups[:, :, None] - groups[:, None, :], 0)  # [Q, G, G, K]
    centred = jnp.sum(differences, axis=2) / jnp.maximum(count, 1)
    others = jnp.maximum(count - 1, 1)
    if config.normalize_std:
        variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True) / others
        centred = centred / (jnp.sqrt(variance) + EPSILON)
    if config.leave_one_out:
        centred = centred * (count / others)
    return centred.reshape(rewards.shape)


def estimate(evidence: Evidence, config: TurnConfig) -> Estimate:
    """Estimate by `turn_relative`; the last turn also gets the length penalty."""
    turns = evidence.turns
    rewards = turns.rewards
    if evidence.length_penalty is not None:
        last = np.arange(rewards.shape[1]) == turns.counts[:, None] - 1
        rewards = (rewards - np.where(last, evidence.length_penalty[:, None], 0)).astype(np.float32)
    rewards = put(rewards, "batch", None)
    return _by_token(rewards, put(turns.ends, "batch", None), evidence.batch, config)


@functools.partial(jax.jit, static_argnums=3)
def _by_token(rewards: Array, turn_ends: Array, batch: Batch, config: TurnConfig) -> Estimate:
    """Estimate by `turn_relative`, the same for all tokens of a turn."""
    ends = whole(turn_ends)
    advantages = turn_relative(whole(rewards), ends, config)
    slots = jnp.arange(batch.old_logprobs.shape[1], dtype=jnp.int32)
    over = (ends > 0)[:, None, :] & (slots[None, :, None] >= ends[:, None, :])
    turn = jnp.minimum(jnp.sum(over, axis=2), ends.shape[1] - 1)
    by_token = jnp.take_along_axis(advantages, turn, axis=1)
    rows = jax.typeof(batch.mask).sharding.spec
    by_token = jax.sharding.reshard(by_token, jax.P(*rows))
    return Estimate(jnp.where(batch.mask, by_token, 0), None, {})


def rules(config: Values) -> Iterator[Check]:
    """Yield the rules of an advantage that separates turns."""
    where = f"where algorithm.advantage is {config.algorithm.advantage}"
    yield "environment.name", f"an environment {where}", config.environment.name != ""
    rule = f"0 {where} (a threshold applies to the whole episode)"
    yield "reward.threshold", rule, not config.reward.threshold
    rule = f"all {where} (it has no single value for a response)"
    yield "updates.select", rule, config.updates.select == "all"
    rule = f"False {where} (groups wait without their turns)"
    yield "algorithm.dynamic_sampling", rule, not config.get("algorithm.dynamic_sampling")
    rule = f"a curriculum that does not screen {where} (groups wait without their turns)"
    yield "curriculum.name", rule, not config.meaning("curriculum.name").by_parts


ADVANTAGES = {"turn": Advantage(estimate, TurnConfig.of, rules=rules)}

BY_TURN = When("algorithm.advantage", lambda c: c.algorithm.advantage == "turn", "turn")
# fmt: off
SECTIONS = (Section("algorithm", "", (
    field("turn_discount", 1.0, "γ of turn: weight of a turn's reward in the turn before", SHARE,
          BY_TURN, neutral=1.0, may_change=NEW_RUN),
)),)
# fmt: on
