"""Terms of the policy's loss that recipes add to the objective, and weights that they read.

A term reads columns of `Batch.extra`, provided by a stage, and may read the logits of each token.
Rows that share a packed slot share everything before it, and what `read` returns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from jax import Array

from specrl_jax.algorithms.corrections import Policies
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Params
from specrl_jax.types import Batch


class TokenValues(NamedTuple):
    """Values of a micro-batch that a term reads; arrays [n, R], 0 outside the mask."""

    logprobs: Array  # log π(y), with gradient
    log_ratio: Array  # log π(y) − log π_old(y), with gradient
    policies: Policies
    advantages: Array
    weights: Array | None  # importance weights after the cap; None: all are 1
    batch: Batch
    read: Any  # result of `LossTerm.read`, [n, R, ...]; it carries the gradient


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """A term of the policy's loss; hashable. Slot `LOSS_TERM` of recipes."""

    # Whether it is added even where a mask excludes the token from the objective.
    ignores_masks: ClassVar[bool] = False
    # Whether it gives no gradient to rows without an advantage, so that updates may skip them.
    needs_advantage: ClassVar[bool] = False
    # Names of `Batch.extra`, int32 [B, R, k], passed to `token_inputs` for each packed slot.
    by_slot: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the config field that selects it; overridden by recipes."""
        return ""

    @classmethod
    def from_config(cls, config: Any, frozen: Any) -> "LossTerm":
        """Return the term of a configuration. frozen: shape of the weights of `Run.frozen`."""
        return cls()

    @staticmethod
    def kept_logprobs(config: Any) -> int:
        """Return how many of the sampler's likeliest tokens rollouts keep at each position."""
        return 0

    def token_inputs(self, frozen: Any, sequences: Any, columns: Mapping[str, Array]) -> Any:
        """Return the inputs of `read` besides the logits, a pytree of arrays [m, T, ...].

        frozen: weights of `Run.frozen`. sequences: packed, [m, T]. columns: those of `by_slot`,
        [m, T, k], -1 in slots without a row.
        """
        return ()

    def shared(self, frozen: Any) -> Any:
        """Return what is passed to `read` whole, a pytree."""
        return ()

    def read(self, logits: Array, inputs: Any, shared: Any) -> Any:
        """Return floats [m, t, ...] from tempered logits [m, t, V], which carry the gradient."""
        return ()

    def per_token(self, values: TokenValues, config: Any) -> tuple[Array, dict[str, Array]]:
        """Return the term of each token [n, R], and values [n, R] by metric, to be averaged.

        config: `LossConfig`.
        """
        raise NotImplementedError


class FrozenModel:
    """Weights that are never trained, for loss terms. Slot `FROZEN` of recipes."""

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the config field that selects them; overridden by recipes."""
        return ""

    @staticmethod
    def load(config: Any, tokenizer: Any) -> tuple[ModelConfig, Params]:
        """Return the shape and float32 weights; tokenizer: the policy's.

        Raises a one-line ValueError if they cannot be read.
        """
        raise NotImplementedError

    @staticmethod
    def shape(config: Any, vocab_size: int) -> ModelConfig:
        """Return only the shape, which plans need before any weights are read."""
        raise NotImplementedError

    @staticmethod
    def scores_tokens(config: Any) -> bool:
        """Return whether a stage scores the batch's tokens with them, in a program of its own."""
        return False
