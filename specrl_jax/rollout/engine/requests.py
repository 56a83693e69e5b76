"""Requests of one rollout to the scheduler and the model runner."""

import dataclasses

import numpy as np

from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.sharding import shards
from specrl_jax.types import Drafts, Prompts


@dataclasses.dataclass(frozen=True)
class DraftInputs:
    """Inputs that a rollout may draft from."""

    previous: Drafts | None = None  # [B], for the acceptance rule to verify
    log_lenience: float = 0.0  # log ℓ in nats, in [-inf, inf]
    # Stored responses of the prompts, and of the next step's after them, for the draft source.
    history: DraftHistory | None = None


@dataclasses.dataclass(frozen=True)
class Requests:
    """The B rows of a rollout as they begin, on the host; G rows in a row share a prompt.

    Each shard of the batch holds B / shards rows in a row: first those to train on, of which all
    have as many, then those that only use idle places (run-ahead).
    """

    prompts: Prompts  # [B / G]
    noise_steps: np.ndarray  # int [B / G, G], the step whose noise each row uses
    num_train_rows: int  # rows to train on
    held_lens: np.ndarray  # int32 [B], tokens that rows hold
    done: np.ndarray  # bool [B], rows that need no more tokens
    draft_lens: np.ndarray  # int32 [B], draft tokens to verify, what is held included
    begin_first: np.ndarray | None = None  # bool [B / G], groups that begin before all others
    # When the rollout may end before all rows are done; 0: not at all.
    stop_after_groups: int = 0  # so many groups are done
    allow_unfinished: int = 0  # so few train rows are not done

    @property
    def shard_rows(self) -> int:
        """Rows of a shard."""
        return len(self.done) // shards("batch")

    @property
    def shard_train_rows(self) -> int:
        return self.num_train_rows // shards("batch")

    def trained(self, rows: np.ndarray) -> np.ndarray:
        """bool [n]: which of these rows, int [n], are to train on; padding is not."""
        inside = (rows >= 0) & (rows < len(self.done))
        return inside & (rows % self.shard_rows < self.shard_train_rows)
