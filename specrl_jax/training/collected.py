"""Batch that a step trains on, as collected from its rollouts."""

import dataclasses

import numpy as np

from specrl_jax.responses import Turns
from specrl_jax.types import Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class Collected:
    """Q groups that a step trains on, G rows each."""

    prompts: Prompts
    rollout: Rollout
    rewards: np.ndarray  # float32 [Q * G]
    metrics: dict[str, float]  # of the rollouts
    step: int  # the step that trains on the batch
    epoch: int  # the epoch in which the rollouts started
    stale: bool = False  # whether earlier weights sampled some of its tokens
    rejected_mass: float = 0.0  # from `off_policy.estimate_rejected_mass`
    # float32 [Q * G], unweighted rewards by each function of a sum; {} if groups wait
    by_function: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    turns: Turns | None = None  # of episodes; None if groups wait
    # bool [Q * G], responses that finished; the others were cut by the length limit. None: all
    ended: np.ndarray | None = None
