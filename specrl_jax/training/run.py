"""Parts of a run that never change."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from specrl_jax import __version__
from specrl_jax.algorithms.update_spec import UpdateSpec
from specrl_jax.data.prompts import Dataset, EncodedDataset, digest
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Params
from specrl_jax.responses import Responder
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.types import Prompts


class Frozen(NamedTuple):
    """Weights that are loaded but never trained; a resumed run reads them again."""

    model: ModelConfig
    params: Params  # as returned by `lora.freeze`
    digest: str  # of the weights when they were read


@dataclasses.dataclass(frozen=True)
class Run:
    """Parts of a run that `config` builds on the mesh in use."""

    config: Any
    dataset: Dataset
    prompts: EncodedDataset
    held_out: list[tuple[Prompts, int]]  # batches, and how many of their prompts are not padding
    stages: tuple[Any, ...]  # `stage.Stage`s, between a step's rollouts and its updates
    model: ModelConfig
    rollout_spec: RolloutSpec
    eval_spec: RolloutSpec
    responder: Responder
    roll_out: Callable[..., RolloutResult]  # in training; `Responder.roll_out`, or a recipe's
    update_spec: UpdateSpec
    schedule: optax.Schedule
    collector_type: type  # makes the state's collector
    total_steps: int
    key: jax.Array
    batches_type: type  # makes the state's source of batches
    rollout_mesh: jax.sharding.Mesh  # for rollouts and evaluation; updates run on the mesh in use
    frozen: Frozen | None = None  # for terms of the loss

    @property
    def trained_group_size(self) -> int:
        return self.collector_type.trained_group_size(self.config)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints, by name, of data that all processes of a run must have read identically."""
        read = [self.prompts, *(prompts for prompts, _ in self.held_out)]
        by_stages = {f"the {name}": x for name, x in stage_digests(self.stages).items()}
        return by_stages | {
            "specrl_jax": __version__,
            "data.source": digest(*(prompts.ids for prompts in read)),
            "tokenizer.source": self.responder.tokenizer.fingerprint,
            "the prompts' tokens": digest(*(prompts.tokens for prompts in read)),
            "model.source": repr(self.model),
        }


def stage_digests(stages: Sequence[Any]) -> dict[str, str]:
    """Return digests, by name, of all data that stages have read."""
    return {name: value for stage in stages for name, value in stage.digests.items()}
