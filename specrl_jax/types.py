"""Data that passes between modules.

`Example` and `Prompts` live on the host; `Drafts`, `Rollout` and `Batch` are pytrees of device
arrays. Response arrays are [B, R]: column j is the j-th response token, however long the prompt is,
so verification, decoding and the update share one layout. Log-probs are in nats.
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

# Task of an `Example` that pads a batch; no data file has that name.
FILLER_TASK = "<padding>"


class StatePart:
    """Part of the run's state that is saved in checkpoints and restored from them."""

    def arrays(self) -> Any:
        """Return the arrays that a checkpoint saves; `restore` gets the same structure."""
        return {}

    def host(self) -> Any:
        """Return everything else that a checkpoint saves, JSON-able."""
        return {}

    def restore(self, host: Any, arrays: Any) -> "StatePart":
        """Return the part as saved; may be `self`, modified."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Example:
    """One problem of a dataset."""

    prompt_id: str  # content hash, 16 hexadecimal digits, the same in every run
    prompt: str | tuple[dict, ...]  # text, or chat messages {"role": ..., "content": ...}
    answer: str
    task: str
    metadata: dict[str, Any]
    first_sample: int = 0  # index of this part's first response: a group may be split into parts

    @property
    def key(self) -> str:
        """Key of this part's responses: those from `first_sample` on."""
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
        """Return prompts of zeros that fill their slots, to derive shapes from."""
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


class Source(enum.IntEnum):
    """Origin of a token of a response."""

    SAMPLED = 0  # from the policy, without a draft or after the last accepted token
    DRAFTED = 1  # from the policy, and equal to the draft's token in a decode step: it was free
    REUSED = 2  # accepted from the earlier response by the acceptance rule
    ENVIRONMENT = 3  # from an environment
    COPIED = 4  # from another row of its group, whose prefix the row started with


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of B responses, and columns with values per token, [B, T]; None: not kept."""

    ids: Array  # int32, right-padded
    # float32, under this rollout's policy, with temperature, without top-k/top-p: the update's old
    # log-probs, unless it keeps the sampling mask
    policy_logprobs: Array | None = None
    # float32, the same after top-k/top-p, from the step that sampled or last accepted each token:
    # the denominator at the next acceptance, and the old log-probs of an update that keeps the
    # sampling mask
    sampling_logprobs: Array | None = None
    sources: Array | None = None  # int8, a `Source` each
    origin_logprobs: Array | None = None  # float32, from the step that first sampled each token
    origin_steps: Array | None = None  # int32, that step
    # float32, log-prob of a token under its draft's distribution if accepted by a ratio; otherwise
    # equal to sampling_logprobs
    draft_logprobs: Array | None = None
    # The k likeliest tokens of the sampling distribution, likeliest first, if the acceptance rule
    # needs distributions, or the update needs the tokens that could be sampled.
    top_ids: Array | None = None  # int32 [B, T, k]
    top_logprobs: Array | None = None  # float32 [B, T, k]
    # float32 [B, T, k + 1], probability that a draft token was emitted here, for each of top_ids
    # and all other tokens; 0 without a draft token. Only if a recipe needs it.
    accepted_probs: Array | None = None
    # `ModelConfig.routing` [B, T, L, k], expert ids + 1 of the preceding token, whose state chose
    # this one, by layer; 0: unknown. Only if updates replay them.
    routing: Array | None = None

    def only(self, *names: str) -> "Tokens":
        """Return the ids and the named columns."""
        return Tokens(self.ids, **{name: getattr(self, name) for name in names})

    def like(self, other: "Tokens") -> "Tokens":
        """Return the columns that `other` keeps."""
        kept = [name for name, array in vars(other).items() if array is not None]
        return Tokens(**{name: getattr(self, name) for name in kept})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """Draft tokens of B rows."""

    tokens: Tokens  # [B, R]; only ids if the acceptance rule samples every token anew
    # int32 [B], ends of the drafts, counted from the start of the response: a draft starts with
    # the tokens that its row already has. 0 without a draft.
    lens: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
    """B responses, finished or not."""

    tokens: Tokens  # [B, R]
    lens: Array  # int32 [B], end of sequence included
    prefix_lens: Array  # int32 [B], tokens accepted from the draft

    @classmethod
    def empty(
        cls,
        rows: int,
        slots: int,
        k: int = 0,
        *,
        accepted: bool = False,
        routing: jax.ShapeDtypeStruct | None = None,
    ) -> "Rollout":
        """Return empty responses.

        k: number of likeliest tokens kept. accepted: with `Tokens.accepted_probs`. routing: shape
        per token; None: without.
        """

        def zeros(dtype, *rest: int) -> Array:
            dims = axes("batch", *(None,) * len(rest))
            return jnp.zeros((rows, *rest), dtype, out_sharding=dims)

        tokens = Tokens(
            ids=zeros(jnp.int32, slots),
            policy_logprobs=zeros(jnp.float32, slots),
            sampling_logprobs=zeros(jnp.float32, slots),
            sources=zeros(jnp.int8, slots),
            origin_logprobs=zeros(jnp.float32, slots),
            origin_steps=zeros(jnp.int32, slots),
            draft_logprobs=zeros(jnp.float32, slots),
            top_ids=zeros(jnp.int32, slots, k) if k else None,
            top_logprobs=zeros(jnp.float32, slots, k) if k else None,
            accepted_probs=zeros(jnp.float32, slots, k + 1) if accepted else None,
            routing=zeros(routing.dtype, slots, *routing.shape) if routing else None,
        )
        return cls(tokens, lens=zeros(jnp.int32), prefix_lens=zeros(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Input of one update: B rows of T = P + R slots, each a contiguous prompt and response."""

    tokens: Array  # int32 [B, T], right-padded
    prompt_lens: Array  # int32 [B]
    response_lens: Array  # int32 [B]
    # float32 [B, R], from the rollout: over all tokens, or over those of `support`
    old_logprobs: Array
    advantages: Array  # float32 [B, R]
    # float32 [B, R], under the same policy by the update's arithmetic; None: not computed
    recomputed_logprobs: Array | None = None
    ref_logprobs: Array | None = None  # float32 [B, R]; None without a reference
    values: Array | None = None  # float32 [B, R], the critic's before the update; None without one
    returns: Array | None = None  # float32 [B, R], the critic's targets; None without one
    importance_weights: Array | None = None  # float32 [B, R]; None: all 1
    from_environment: Array | None = (
        None  # bool [B, R], tokens that are not the policy's; None: none
    )
    # int32 [B, R, k], ids that the truncated sampler allowed, padded with -1: log-probs are over
    # these. None: over all tokens.
    support: Array | None = None
    routing: Array | None = None  # [B, R, L, k], `Tokens.routing` to replay; None: none
    # float32 [B], weight of -log π, the only loss of a row that the policy did not write. 0 for
    # rows that it wrote; None: it wrote all.
    supervised: Array | None = None
    # [B, ...] by name, columns that loss terms read
    extra: dict[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def mask(self) -> Array:
        """Return bool [B, R], the tokens to train on."""
        slots = self.old_logprobs.shape[1]
        inside = jnp.arange(slots)[None, :] < self.response_lens[:, None]
        return inside if self.from_environment is None else inside & ~self.from_environment
