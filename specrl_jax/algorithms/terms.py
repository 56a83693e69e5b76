"""Terms of the policy's loss that recipes add to the objective, and weights that they read.

A term reads columns of `Batch.extra`, which a stage puts there, and may read the logits of each
token. Rows that share a packed slot share what was before it, and what `read` gives.
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
    """Values that a term sees of a micro-batch; arrays [n, R], 0 outside the mask."""

    logprobs: Array  # log π(y), with gradient
    log_ratio: Array  # log π(y) − log π_old(y), with gradient
    policies: Policies
    advantages: Array
    weights: Array | None  # importance weights after the cap; None: all are 1
    batch: Batch
    read: Any  # what `LossTerm.read` gave, [n, R, ...]; it carries the gradient


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """A term of the policy's loss; hashable. Slot `LOSS_TERM` of recipes."""

    # It is added where a mask leaves the token's objective out, too.
    ignores_masks: ClassVar[bool] = False
    # Without an advantage a row has no gradient by it, so the updates may leave the row out.
    needs_advantage: ClassVar[bool] = False
    # Names of `Batch.extra`, int32 [B, R, k], that `token_inputs` gets for each packed slot.
    by_slot: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the field of the configuration that asks for it; a recipe's own says which."""
        return ""

    @classmethod
    def from_config(cls, config: Any, frozen: Any) -> "LossTerm":
        """Return the term of a configuration. frozen: shape of the weights of `Run.frozen`."""
        return cls()

    @staticmethod
    def kept_logprobs(config: Any) -> int:
        """Return how many of the sampler's likeliest tokens rollouts keep at every position."""
        return 0

    def token_inputs(self, frozen: Any, sequences: Any, columns: Mapping[str, Array]) -> Any:
        """Return what `read` gets beside the logits, a pytree of arrays [m, T, ...].

        frozen: weights of `Run.frozen`. sequences: packed, [m, T]. columns: those of `by_slot`,
        [m, T, k], -1 in slots of no row.
        """
        return ()

    def shared(self, frozen: Any) -> Any:
        """Return what `read` gets whole, a pytree."""
        return ()

    def read(self, logits: Array, inputs: Any, shared: Any) -> Any:
        """Return floats [m, t, ...] of tempered logits [m, t, V], which carry the gradient."""
        return ()

    def per_token(self, values: TokenValues, config: Any) -> tuple[Array, dict[str, Array]]:
        """Return the term of each token [n, R], and values [n, R] by metric, for their means.

        config: `LossConfig`.
        """
        raise NotImplementedError


class FrozenModel:
    """Weights that are never trained, for terms of the loss. Slot `FROZEN` of recipes."""

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the field of the configuration that asks for them; a recipe's own says which."""
        return ""

    @staticmethod
    def load(config: Any, tokenizer: Any) -> tuple[ModelConfig, Params]:
        """Return the shape and float32 weights; tokenizer: the policy's.

        Raises ValueError in one line where they cannot be read.
        """
        raise NotImplementedError

    @staticmethod
    def shape(config: Any, vocab_size: int) -> ModelConfig:
        """Return the shape alone, which plans need before any weights are read."""
        raise NotImplementedError

    @staticmethod
    def scores_tokens(config: Any) -> bool:
        """Return whether a stage scores the batch's tokens with them, a program to compile."""
        return False
