"""The data that passes between rooms.

`Example` and `Prompts` live on the host; `Drafts`, `Rollout` and `Batch` are pytrees of device
arrays. Response arrays are `[B, R]`: column j is the j-th response token, whatever the length of
its prompt, so nothing has to be shifted between verification, decoding and the update.
"""

import dataclasses
from typing import Any

import jax
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
    origin_steps: [B, R], from when each token was first sampled.
    """

    tokens: Array
    lens: Array
    sampling_logprobs: Array
    origin_logprobs: Array
    origin_steps: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """B finished responses.

    tokens: int32 [B, R], right-padded. lens: int32 [B], end-of-sequence included. prefix_lens:
    int32 [B], tokens kept from the draft. policy_logprobs: float32 [B, R] nats, under the policy
    of this rollout with temperature and without truncation (the update's old log-probs).
    sampling_logprobs: the same after top-k/top-p (the next acceptance's denominator).
    origin_logprobs, origin_steps: [B, R], from when each token was first sampled.
    """

    tokens: Array
    lens: Array
    prefix_lens: Array
    policy_logprobs: Array
    sampling_logprobs: Array
    origin_logprobs: Array
    origin_steps: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """What one update reads; B rows of T = P + R slots, prompt and response contiguous.

    tokens: int32 [B, T], right-padded. prompt_lens, response_lens: int32 [B]. old_logprobs,
    ref_logprobs, advantages: float32 [B, R]; ref_logprobs is None without a reference.
    """

    tokens: Array
    prompt_lens: Array
    response_lens: Array
    old_logprobs: Array
    advantages: Array
    ref_logprobs: Array | None = None
