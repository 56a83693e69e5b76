"""Stage of a batch: what every stage between rollouts and updates has."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from specrl_jax.data.prompts import EncodedDataset
from specrl_jax.text.tokenizer import Tokenizer
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.state import RunState
from specrl_jax.types import Batch, Rollout


class StageResult(NamedTuple):
    """Result of a stage. A row whose `response_lens` is 0 is left out of the updates."""

    batch: Batch
    # int [B], rows in the order in which the updates take them; some may come twice, others not
    # at all. None: the order stays.
    row_ids: np.ndarray | None = None
    metrics: Mapping[str, float] = MappingProxyType({})


class Stage:
    """A stage, made once for a run. A recipe takes the slot `STAGE` by a subclass."""

    # A recipe's stage comes after the log-probs of `Logprobs`; else before, so that none are
    # computed of what it leaves out.
    after_logprobs = False

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the field of the configuration that asks for the stage; "" where none does."""
        raise NotImplementedError

    @staticmethod
    def loss_count(config: Any) -> int:
        """Return what the policy's loss is divided by; 0: the count of its aggregation."""
        return 0

    @staticmethod
    def shapes(config: Any, rollout: Rollout, batch: Batch) -> Batch:
        """Return the shapes of the batch after the stage; rollout, batch: shapes before it."""
        return batch

    def __init__(self, config: Any, prompts: EncodedDataset, tokenizer: Tokenizer):
        """Make the stage; read what it needs beside rollouts."""

    @property
    def digests(self) -> dict[str, str]:
        """Return digests, by name, of the data that it has read; a resume refuses others."""
        return {}

    def __call__(
        self, run: Run, state: RunState, batch: Batch, collected: Collected
    ) -> StageResult:
        """Return the batch that the next stage gets; collected: what the rollouts left."""
        raise NotImplementedError
