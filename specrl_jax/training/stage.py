"""Interface of the stages between rollouts and updates."""

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
    # int [B], rows in the order in which updates use them; rows may be repeated or left out.
    # None: the order is unchanged.
    row_ids: np.ndarray | None = None
    metrics: Mapping[str, float] = MappingProxyType({})


class Stage:
    """A stage, made once per run. A recipe fills the slot `STAGE` with a subclass."""

    # Whether it runs after `Logprobs`; otherwise before, so that rows it leaves out get no
    # log-probs.
    after_logprobs = False

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the config field that selects the stage; "" if none does."""
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
        """Make the stage; read what it needs besides rollouts."""

    @property
    def digests(self) -> dict[str, str]:
        """Return digests, by name, of the data that it has read; a resume rejects others."""
        return {}

    def __call__(
        self, run: Run, state: RunState, batch: Batch, collected: Collected
    ) -> StageResult:
        """Return the batch for the next stage; collected: the rollouts' results."""
        raise NotImplementedError
