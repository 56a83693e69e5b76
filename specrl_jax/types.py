"""The data that passes between rooms.

`Example` and `Prompts` live on the host; `Drafts`, `Rollout` and `Batch` are pytrees of device
arrays. Response arrays are `[B, R]`: column j is the j-th response token, whatever the length of
its prompt, so nothing has to be shifted between verification, decoding and the update.
"""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem of a dataset.

    `prompt_id` is a content hash of 16 hexadecimal digits, stable across runs and machines.
    `prompt` is text, or chat messages as a tuple of `{"role": ..., "content": ...}`.
    """

    prompt_id: str
    prompt: str | tuple[dict, ...]
    answer: str
    task: str
    metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of Q encoded prompts (NumPy, on the host).

    tokens: int32 [Q, P], right-padded. lens: int32 [Q]. ids: uint32 [Q, 2], the prompt_id as two
    words, high word first; they key the noise. examples: the Q problems.
    """

    tokens: np.ndarray
    lens: np.ndarray
    ids: np.ndarray
    examples: tuple[Example, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """What the draft store offers for a batch of B rows.

    tokens: int32 [B, R]. lens: int32 [B], 0 where there is no draft. sampling_logprobs: float32
    [B, R] nats, under the truncated law that sampled or last kept each token. origin_logprobs,
    origin_steps: [B, R], from when each token was first sampled. top_ids int32, top_logprobs
    float32 [B, R, k]: the k likeliest tokens of that law, likeliest first; None unless the
    acceptance rule asks for whole distributions.
    """

    tokens: Array
    lens: Array
    sampling_logprobs: Array
    origin_logprobs: Array
    origin_steps: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None


class Source(enum.IntEnum):
    """Where a token of a response came from."""

    SAMPLED = 0  # drawn where nothing was drafted, or behind the last accepted token
    DRAFTED = 1  # drawn, and equal to a tree draft's token: it cost no decode step
    REUSED = 2  # kept from the earlier response that the acceptance rule judged
    FORCED = 3  # not the policy's: an environment's answer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """B finished responses.

    tokens: int32 [B, R], right-padded. lens: int32 [B], end-of-sequence included. prefix_lens:
    int32 [B], tokens kept from the draft. policy_logprobs: float32 [B, R] nats, under the policy
    of this rollout with temperature and without truncation (the update's old log-probs).
    sampling_logprobs: the same after top-k/top-p (the next acceptance's denominator).
    draft_logprobs: where a token was kept from a draft by a ratio of laws, its log-prob under the
    law that the draft was from; elsewhere as sampling_logprobs.
    origin_logprobs, origin_steps: [B, R], from when each token was first sampled. sources: int8
    [B, R], a `Source` each. top_ids, top_logprobs: [B, R, k] of the sampling law, as in `Drafts`.
    """

    tokens: Array
    lens: Array
    prefix_lens: Array
    policy_logprobs: Array
    sampling_logprobs: Array
    origin_logprobs: Array
    origin_steps: Array
    sources: Array
    draft_logprobs: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What one update reads; B rows of T = P + R slots, prompt and response contiguous.

    tokens: int32 [B, T], right-padded. prompt_lens, response_lens: int32 [B]. old_logprobs,
    ref_logprobs, advantages: float32 [B, R]; ref_logprobs is None without a reference. values,
    returns: float32 [B, R], the critic's before the update and what it learns; None without one.
    weights: float32 [B, R], importance weights of the tokens; None: all 1. forced: bool [B, R],
    tokens that are not the policy's; None: none is.
    """

    tokens: Array
    prompt_lens: Array
    response_lens: Array
    old_logprobs: Array
    advantages: Array
    ref_logprobs: Array | None = None
    values: Array | None = None
    returns: Array | None = None
    weights: Array | None = None
    forced: Array | None = None

    @property
    def mask(self) -> Array:
        """bool [B, R], the tokens that are trained on."""
        slots = self.old_logprobs.shape[1]
        inside = jnp.arange(slots)[None, :] < self.response_lens[:, None]
        return inside if self.forced is None else inside & ~self.forced
