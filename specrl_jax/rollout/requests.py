"""Requests of a rollout: what its rows start with, where they stop, and when it may end."""

import dataclasses

import numpy as np

from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.types import Drafts, Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class Requests:
    """Requests for B = Q · G rows; G consecutive rows share a prompt.

    Each shard of the batch rolls out B / shards consecutive rows.
    """

    prompts: Prompts  # [Q]
    noise: NoiseKey  # with the step whose noise each row uses
    drafts: Drafts | None = None  # [B], to verify; a draft starts with the row's own tokens
    history: DraftHistory | None = None  # of the prompts, for the draft source
    held: Rollout | None = None  # [B], tokens that rows start with; None: none
    done: np.ndarray | None = None  # bool [B], rows that get no more tokens; None: none
    max_lens: np.ndarray | None = None  # int32 [B], lengths at which rows stop; None: R
    # bool [B], background rows: the rollout does not wait for them. They fill slots that would be
    # empty, equally many on every shard. None: none.
    background: np.ndarray | None = None
    # bool [Q], groups that start before the others; rows that have tokens already start before
    # both. None: none.
    first: np.ndarray | None = None
    enough_groups: int = 0  # finished groups after which the rollout may end; 0: all
