"""Evidence that an advantage is estimated from, and the estimate."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
from jax import Array

from specrl_jax.config.fields import Rules, filled, no_rules
from specrl_jax.types import Batch


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """Settings of an advantage; hashable. A recipe's is a subclass with fields of its own."""

    group_size: int  # G, responses per prompt
    normalize_std: bool  # divide by the group's standard deviation
    leave_one_out: bool  # compare with the mean of the others
    gamma: float  # discount per token, in [0, 1]
    gae_lambda: float  # in [0, 1]: 0 trusts the critic (little variance), 1 the reward (no bias)

    @classmethod
    def from_config(cls, config, group_size: int, **own: Any) -> Self:
        """Return the settings of a configuration; own: what a subclass adds."""
        section = {**config.critic, **config.algorithm}
        return filled(cls, section, group_size=group_size, **own)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Data that advantages are estimated from. Rows of a group are contiguous.

    Arrays on the host are whole in every process.
    """

    rewards: Array  # float32 [B], split along B, less the penalty of length
    batch: Batch  # its advantages are 0; `values` are those of a critic, where there is one
    length_penalty: np.ndarray | None = None  # float32 [B], on the host; None: it is off
    # float32 [B], on the host, of each function of a sum, before its weight; {} where groups wait
    by_function: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    turns: Any = None  # `responses.Turns` of episodes, on the host; None where groups wait


class Estimate(NamedTuple):
    """Result of an advantage function."""

    advantages: Array  # float32 [B, R], 0 outside the mask, split along B
    returns: Array | None  # float32 [B, R], the critic's targets; None without a critic
    metrics: dict[str, Array]  # scalars by metric name; nan where there is no value


@dataclasses.dataclass(frozen=True)
class Advantage:
    """One choice of `config.algorithm.advantage`."""

    estimate: Callable[[Evidence, AdvantageConfig], Estimate]
    # (config, group size) → the settings that `estimate` gets
    settings: Callable[[Any, int], AdvantageConfig] = AdvantageConfig.from_config
    needs_critic: bool = False  # the batch has values, and returns are asked for
    min_group_size: int = 2  # responses per prompt
    rules: Rules = no_rules
