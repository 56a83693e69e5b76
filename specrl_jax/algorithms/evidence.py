"""Inputs of advantage estimation, and its result."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from jax import Array

from specrl_jax.config.fields import Rules, filled, no_rules
from specrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """Settings of an advantage; hashable. A recipe's is a subclass with its own fields."""

    group_size: int  # G, responses per prompt
    normalize_std: bool  # divide by the group's standard deviation
    leave_one_out: bool  # compare with the mean of the group's other responses
    gamma: float  # discount per token, in [0, 1]
    gae_lambda: float  # in [0, 1]: 0 trusts the critic (little variance), 1 the reward (no bias)

    @classmethod
    def from_config(cls, config, group_size: int, **own: Any) -> Self:
        """Return the settings of a configuration; own: what a subclass adds."""
        section = {**config.critic, **config.algorithm}
        return filled(cls, section, group_size=group_size, **own)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Data that advantages are estimated from. A group's rows are contiguous.

    Host arrays are whole in every process.
    """

    rewards: Array  # float32 [B], split along B, minus the length penalty
    batch: Batch  # its advantages are 0; `values` are a critic's, if there is one
    length_penalty: np.ndarray | None = None  # float32 [B], on the host; None: it is off
    # float32 [B], on the host, unweighted rewards by each function of a sum; {} if groups wait
    by_function: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    turns: Any = None  # `responses.Turns` of episodes, on the host; None if groups wait


class Estimate(NamedTuple):
    """Result of an advantage function."""

    advantages: Array  # float32 [B, R], 0 outside the mask, split along B
    returns: Array | None  # float32 [B, R], the critic's targets; None without a critic
    metrics: dict[str, Array]  # scalars by metric name; nan if undefined


@dataclasses.dataclass(frozen=True)
class Advantage:
    """One choice of `config.algorithm.advantage`."""

    estimate: Callable[[Evidence, AdvantageConfig], Estimate]
    # (config, group size) → the settings passed to `estimate`
    settings: Callable[[Any, int], AdvantageConfig] = AdvantageConfig.from_config
    needs_critic: bool = False  # the batch needs values, and the estimate has returns
    min_group_size: int = 2  # responses per prompt
    rules: Rules = no_rules
