"""GDPO (arXiv 2601.05242): the rewards of a sum are normalised separately within each group."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jax import Array

from specrl_jax.algorithms.advantages import EPSILON, for_all_tokens, group_relative, whole
from specrl_jax.algorithms.evidence import Advantage, AdvantageConfig, Estimate, Evidence
from specrl_jax.config.fields import Check, Values
from specrl_jax.inputs import reward_terms
from specrl_jax.sharding import put

# Rewards that cancel leave this share of themselves, from rounding and ε.
CANCELLED = 1e-4


@dataclasses.dataclass(frozen=True)
class DecoupledConfig(AdvantageConfig):
    names: tuple[str, ...] = ()  # of the functions of the sum
    weights: tuple[float, ...] = ()  # of K rewards; a length penalty, if any, is the last

    @classmethod
    def of(cls, config, group_size: int) -> "DecoupledConfig":
        terms = reward_terms(config.reward.name)
        weights = (*terms.values(), *(-1.0,) * bool(config.reward.overlong_tokens))
        return cls.from_config(config, group_size, names=tuple(terms), weights=weights)


def group_decoupled(rewards: Array, config: DecoupledConfig) -> Array:
    """Return the advantage [B] of a response from K rewards (GDPO, arXiv 2601.05242, section 3).

        Aᵢ = Σₖ wₖ·Aᵢₖ / (std(Σₖ wₖ·Aₖ) + ε),    Aᵢₖ: `group_relative` of reward k

    Each reward is normalised within its group before the sum, so two responses with the same sum of
    rewards may differ. std is over the batch, √(Σ x² / (B − 1)); the mean is 0, as in each group.
    Worked row, G = 2, weights 1: rewards (0, 1) and (0, 2) in one group, (0, 1) and (1, 1) in the
    other: A₁ = ∓0.707 ∓0.707, A₂ = ∓0.707 0; sums ∓1.414 ∓0.707, std 1.291, advantages ∓1.095
    ∓0.548.

    rewards: float [B, K], JAX and not split, or NumPy; B = Q·G, a group's rows are contiguous.
    config: `weights` has the K weights w.
    """
    weighted = [
        weight * group_relative(rewards[:, k], config) for k, weight in enumerate(config.weights)
    ]
    total = sum(weighted)
    xp = rewards.__array_namespace__()
    # Otherwise a batch of only that remainder would be scaled to a standard deviation of 1.
    total = xp.where(xp.abs(total) <= CANCELLED * sum(map(xp.abs, weighted)), 0, total)
    variance = xp.sum(xp.square(total)) / (len(total) - 1)
    return total / (xp.sqrt(variance) + EPSILON)


def estimate(evidence: Evidence, config: DecoupledConfig) -> Estimate:
    """Estimate by `group_decoupled`, the same for all tokens of a response."""
    columns = [evidence.by_function[name] for name in config.names]
    if evidence.length_penalty is not None:
        columns.append(evidence.length_penalty)
    rewards = put(np.stack(columns, axis=1).astype(np.float32), "batch", None)
    return for_all_tokens(group_decoupled(whole(rewards), config), evidence.batch)


def rules(config: Values) -> Iterator[Check]:
    """Yield the rules of rewards that are normalised separately."""
    where = f"where algorithm.advantage is {config.algorithm.advantage}"
    is_sum = len(reward_terms(config.reward.name)) > 1
    yield "reward.name", f"a sum of functions {where}", is_sum
    rule = f"0 {where} (it takes the rewards before they are summed)"
    yield "reward.threshold", rule, not config.reward.threshold
    rule = f'"" {where} (an environment has one reward)'
    yield "environment.name", rule, not config.environment.name
    rule = f"False {where} (groups wait with only the sum)"
    yield "algorithm.dynamic_sampling", rule, not config.get("algorithm.dynamic_sampling")
    rule = f"a curriculum that does not screen {where} (groups wait with only the sum)"
    yield "curriculum.name", rule, not config.meaning("curriculum.name").by_parts


ADVANTAGES = {"gdpo": Advantage(estimate, DecoupledConfig.of, rules=rules)}
