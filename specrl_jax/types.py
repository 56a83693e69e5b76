"""Data that passes between modules.

`Example` and `Prompts` live on the host; `Drafts`, `Rollout` and `Batch` are pytrees of device
arrays. Response arrays are [B, R]: column j is the j-th response token, whatever the length of its
prompt, so that verification, decoding and the update share one layout. Log-probs are in nats.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.sharding import axes

# Task of an `Example` that fills up a batch; no file of data has that name.
FILLER_TASK = "<padding>"


class StatePart:
    """A part of the run's state that gives and takes back what a checkpoint holds."""

    def arrays(self) -> Any:
        """Return the arrays that a checkpoint saves; `restore` gets arrays of this structure."""
        return {}

    def host(self) -> Any:
        """Return the rest of what a checkpoint saves, JSON-able."""
        return {}

    def restore(self, host: Any, arrays: Any) -> "StatePart":
        """Return the part as it was saved; may be `self`, changed."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem of a dataset."""

    prompt_id: str  # content hash of 16 hexadecimal digits, the same in every run
    prompt: str | tuple[dict, ...]  # text, or chat messages {"role": ..., "content": ...}
    answer: str
    task: str
    metadata: dict[str, Any]
    first_sample: int = 0  # number of the first response that this is for: groups may have parts

    @property
    def key(self) -> str:
        """Name of the responses that this is for: those from `first_sample` on."""
        return f"{self.prompt_id}+{self.first_sample}" if self.first_sample else self.prompt_id


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A batch of Q encoded prompts (NumPy, on the host)."""

    tokens: np.ndarray  # int32 [Q, P], right-padded
    lens: np.ndarray  # int32 [Q]
    ids: np.ndarray  # uint32 [Q, 2], the prompt_id as two words, high word first; keys the noise
    examples: tuple[Example, ...]  # the Q problems

    @classmethod
    def blank(cls, count: int, slots: int) -> "Prompts":
        """Return prompts of zeros that fill their slots, for the shapes of what is made of them."""
        return cls(
            tokens=np.zeros((count, slots), np.int32),
            lens=np.full(count, slots, np.int32),
            ids=np.zeros((count, 2), np.uint32),
            examples=(),
        )

    def select(self, rows: Sequence[int] | np.ndarray) -> "Prompts":
        """Return the prompts at these indices, in this order."""
        rows = np.asarray(rows, np.int64)
        examples = tuple(self.examples[i] for i in rows)
        return Prompts(self.tokens[rows], self.lens[rows], self.ids[rows], examples)

    @staticmethod
    def concatenate(*batches: "Prompts") -> "Prompts":
        """Return the prompts of all batches, [Q1 + Q2 + ...]."""
        return Prompts(
            tokens=np.concatenate([x.tokens for x in batches]),
            lens=np.concatenate([x.lens for x in batches]),
            ids=np.concatenate([x.ids for x in batches]),
            examples=tuple(example for x in batches for example in x.examples),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """Draft tokens of B rows."""

    tokens: Array  # int32 [B, R]
    lens: Array  # int32 [B], 0 where there is no draft
    # The next three are None where the acceptance rule samples every token anew.
    # float32 [B, R], under the truncated distribution that sampled or last accepted each token
    sampling_logprobs: Array | None = None
    origin_logprobs: Array | None = None  # float32 [B, R], from the step that sampled each token
    origin_steps: Array | None = None  # int32 [B, R], that step
    # The k likeliest tokens of the sampling distribution, likeliest first. None unless the
    # acceptance rule needs distributions, or the update the tokens that could be sampled.
    top_ids: Array | None = None  # int32 [B, R, k]
    top_logprobs: Array | None = None  # float32 [B, R, k]

    @classmethod
    def of(cls, responses: Any) -> "Drafts":
        """Return a `Rollout`, or stored responses, as drafts."""
        return cls(
            tokens=responses.tokens,
            lens=responses.lens,
            sampling_logprobs=responses.sampling_logprobs,
            origin_logprobs=responses.origin_logprobs,
            origin_steps=responses.origin_steps,
            top_ids=responses.top_ids,
            top_logprobs=responses.top_logprobs,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenColumns:
    """Response tokens with their log-probs in nats, as a `Rollout` and its rows keep them."""

    tokens: Array  # int32 [B, T]
    policy_logprobs: Array | None  # float32 [B, T], as in `Rollout`
    sampling_logprobs: Array | None  # float32 [B, T], as in `Rollout`
    top_ids: Array | None = None  # int32 [B, T, k], as in `Drafts`
    top_logprobs: Array | None = None  # float32 [B, T, k], as in `Drafts`

    @classmethod
    def of(cls, rows: Any) -> "TokenColumns":
        """Return the columns of a `Rollout`, or of the rows of one."""
        return cls(
            rows.tokens,
            rows.policy_logprobs,
            rows.sampling_logprobs,
            rows.top_ids,
            rows.top_logprobs,
        )


class Source(enum.IntEnum):
    """Origin of a token of a response."""

    SAMPLED = 0  # from the policy, without a draft for it or after the last accepted token
    DRAFTED = 1  # from the policy, and equal to a draft's token in a decode step: it cost none
    REUSED = 2  # accepted from the earlier response by the acceptance rule
    FORCED = 3  # from an environment
    COPIED = 4  # of another row of its group, with which the row began


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """B responses, finished or not."""

    tokens: Array  # int32 [B, R], right-padded
    lens: Array  # int32 [B], end of sequence included
    prefix_lens: Array  # int32 [B], tokens accepted from the draft
    # float32 [B, R], under this rollout's policy, with temperature, without top-k/top-p:
    # the old log-probs of the update, unless it keeps the sampling mask
    policy_logprobs: Array
    # float32 [B, R], the same after top-k/top-p: the denominator of the next acceptance, and the
    # old log-probs of an update that keeps the sampling mask
    sampling_logprobs: Array
    origin_logprobs: Array  # float32 [B, R], from the step that first sampled each token
    origin_steps: Array  # int32 [B, R], that step
    sources: Array  # int8 [B, R], a `Source` each
    # float32 [B, R], log-prob of a token accepted by a ratio under its draft's distribution;
    # elsewhere as sampling_logprobs
    draft_logprobs: Array | None = None
    top_ids: Array | None = None  # int32 [B, R, k], as in `Drafts`
    top_logprobs: Array | None = None  # float32 [B, R, k], as in `Drafts`

    @classmethod
    def empty(cls, rows: int, slots: int, k: int = 0) -> "Rollout":
        """Return responses of no tokens; k: likeliest tokens that are kept."""

        def zeros(dtype, *rest: int) -> Array:
            dims = axes("batch", *(None,) * len(rest))
            return jnp.zeros((rows, *rest), dtype, out_sharding=dims)

        return cls(
            tokens=zeros(jnp.int32, slots),
            lens=zeros(jnp.int32),
            prefix_lens=zeros(jnp.int32),
            policy_logprobs=zeros(jnp.float32, slots),
            sampling_logprobs=zeros(jnp.float32, slots),
            origin_logprobs=zeros(jnp.float32, slots),
            origin_steps=zeros(jnp.int32, slots),
            sources=zeros(jnp.int8, slots),
            draft_logprobs=zeros(jnp.float32, slots),
            top_ids=zeros(jnp.int32, slots, k) if k else None,
            top_logprobs=zeros(jnp.float32, slots, k) if k else None,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Input of one update: B rows of T = P + R slots, prompt and response contiguous."""

    tokens: Array  # int32 [B, T], right-padded
    prompt_lens: Array  # int32 [B]
    response_lens: Array  # int32 [B]
    # float32 [B, R], as the rollout gave them: among all tokens, or among those of `support`
    old_logprobs: Array
    advantages: Array  # float32 [B, R]
    # float32 [B, R], under the same policy by the update's arithmetic; None: not asked for
    recomputed_logprobs: Array | None = None
    ref_logprobs: Array | None = None  # float32 [B, R]; None without a reference
    values: Array | None = None  # float32 [B, R], the critic's before the update; None without one
    returns: Array | None = None  # float32 [B, R], the critic's targets; None without one
    importance_weights: Array | None = None  # float32 [B, R]; None: all 1
    forced: Array | None = None  # bool [B, R], tokens that are not the policy's; None: none
    # int32 [B, R, k], ids that the truncated sampler allowed, and -1: log-probs are among these.
    # None: among all tokens.
    support: Array | None = None
    # int32 [B, K], where a response's turns end, 0 for none; for an advantage by turn, else None.
    turn_ends: Array | None = None
    is_solution: Array | None = None  # bool [B], rows that hold a solution of the data; None: none

    @property
    def mask(self) -> Array:
        """Return bool [B, R], the tokens that are trained on."""
        slots = self.old_logprobs.shape[1]
        inside = jnp.arange(slots)[None, :] < self.response_lens[:, None]
        return inside if self.forced is None else inside & ~self.forced
