"""Batch that a step trains on, as the rollouts leave it."""

import dataclasses
from typing import NamedTuple

import numpy as np

from specrl_jax.types import Prompts, Rollout


class Turns(NamedTuple):
    """Turns of B episodes, of at most K turns each."""

    rewards: np.ndarray  # float32 [B, K], their sum is the episode's; 0 after the last turn
    ends: np.ndarray  # int32 [B, K], response tokens up to a turn's end; 0 for none
    roles: np.ndarray  # str [B, K], role of the environment's answer to a turn; "" for no answer

    @property
    def counts(self) -> np.ndarray:
        """int [B], turns of each episode."""
        return np.count_nonzero(self.ends, axis=1)


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Q groups that a step trains on, G rows each."""

    prompts: Prompts
    rollout: Rollout
    rewards: np.ndarray  # float32 [Q * G]
    metrics: dict[str, float]  # of the rollouts
    step: int  # the step that trains on the batch
    epoch: int  # the epoch in which the rollouts began
    stale: bool = False  # whether earlier weights sampled some of its tokens
    rejected_mass: float = 0.0  # from `off_policy.estimate_rejected_mass`
    # float32 [Q * G], rewards by each function of a sum, before its weight; {} where groups wait
    by_function: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    turns: Turns | None = None  # of episodes; None where groups wait
    # bool [Q * G], responses that came to an end; the length cut the others. None: all came
    ended: np.ndarray | None = None
