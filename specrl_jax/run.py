"""All of a run that never changes. `state` holds what every step changes."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax

from specrl_jax import __version__
from specrl_jax.algorithms.update_spec import UpdateSpec
from specrl_jax.data.prompts import Dataset, EncodedDataset, digest
from specrl_jax.episodes import ResponseScorer
from specrl_jax.group_buffer import trained_group_size
from specrl_jax.models.config import ModelConfig
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.types import Prompts


@dataclasses.dataclass(frozen=True)
class Run:
    """Parts of a run that `config` builds on the mesh in use."""

    config: Any
    dataset: Dataset
    prompts: EncodedDataset
    held_out: list[tuple[Prompts, int]]  # batches, and how many of their prompts are real
    solutions: dict[str, np.ndarray]  # tokens by prompt_id, for algorithm.solution_coef; else {}
    model: ModelConfig
    rollout_spec: RolloutSpec
    eval_spec: RolloutSpec
    scorer: ResponseScorer
    update_spec: UpdateSpec
    schedule: optax.Schedule
    collector: Any  # the way to collect a batch, of `collect.COLLECTORS`
    total_steps: int
    key: jax.Array

    @property
    def rows(self) -> int:
        return rollout_rows(self.config)

    @property
    def trained_group_size(self) -> int:
        return trained_group_size(self.config)

    @property
    def log_lenience(self) -> float:
        """log ℓ of the acceptance rule in nats, in [-inf, inf]."""
        lenience = self.config.rollout.lenience
        return math.log(lenience) if lenience else -math.inf

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints, by name, of what all processes of a run must have read alike."""
        read = [self.prompts, *(prompts for prompts, _ in self.held_out)]
        return {
            "specrl_jax": __version__,
            "data.source": digest(*(prompts.ids for prompts in read)),
            "tokenizer.source": self.scorer.tokenizer.fingerprint,
            "the prompts' tokens": digest(*(prompts.tokens for prompts in read)),
            "the solutions' tokens": digest(*self.solutions.values()),
            "model.source": repr(self.model),
        }


def rollout_rows(config) -> int:
    """Rows of a step's rollout."""
    settings = config.rollout
    return (settings.prompts_per_step + settings.partial) * settings.group_size
