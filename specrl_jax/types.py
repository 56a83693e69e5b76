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


class Source(enum.IntEnum):
    """Origin of a token of a response."""

    SAMPLED = 0  # from the policy, without a draft for it or after the last accepted token
    DRAFTED = 1  # from the policy, and equal to a draft's token in a decode step: it cost none
    REUSED = 2  # accepted from the earlier response by the acceptance rule
    ENVIRONMENT = 3  # from an environment
    COPIED = 4  # of another row of its group, with which the row started


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens of B responses, and what is kept of each, [B, T]; None: it is not kept."""

    ids: Array  # int32, right-padded
    # float32, under this rollout's policy, with temperature, without top-k/top-p: the old log-probs
    # of the update, unless it keeps the sampling mask
    policy_logprobs: Array | None = None
    # float32, the same after top-k/top-p, from the step that sampled or last accepted each token:
    # the denominator of the next acceptance, and the old log-probs of an update that keeps the
    # sampling mask
    sampling_logprobs: Array | None = None
    sources: Array | None = None  # int8, a `Source` each
    origin_logprobs: Array | None = None  # float32, from the step that first sampled each token
    origin_steps: Array | None = None  # int32, that step
    # float32, log-prob of a token accepted by a ratio under its draft's distribution; elsewhere as
    # sampling_logprobs
    draft_logprobs: Array | None = None
    # The k likeliest tokens of the sampling distribution, likeliest first, where the acceptance
    # rule needs distributions, or the update the tokens that could be sampled.
    top_ids: Array | None = None  # int32 [B, T, k]
    top_logprobs: Array | None = None  # float32 [B, T, k]
    # float32 [B, T, k + 1], chance that a token of the draft was emitted here, by token of top_ids
    # and of all others; 0 where there was none. Where a recipe asks for it.
    accepted_probs: Array | None = None
    # `ModelConfig.routing` [B, T, L, k], ids + 1 of the experts of the token before, whose state
    # chose this one, by layer; 0: not known. Where updates replay them.
    routing: Array | None = None

    def only(self, *names: str) -> "Tokens":
        """Return the ids and the columns of these names."""
        return Tokens(self.ids, **{name: getattr(self, name) for name in names})

    def like(self, other: "Tokens") -> "Tokens":
        """Return the columns that `other` keeps."""
        kept = [name for name, array in vars(other).items() if array is not None]
        return Tokens(**{name: getattr(self, name) for name in kept})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """Draft tokens of B rows."""

    tokens: Tokens  # [B, R]; the ids alone where the acceptance rule samples every token anew
    # int32 [B], where drafts end, counted from the response's beginning: a draft starts with the
    # tokens that its row holds. 0 where there is none.
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
        """Return responses of no tokens.

        k: likeliest tokens that are kept. accepted: with `Tokens.accepted_probs`. routing: of each
        token; None: without.
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
    from_environment: Array | None = (
        None  # bool [B, R], tokens that are not the policy's; None: none
    )
    # int32 [B, R, k], ids that the truncated sampler allowed, and -1: log-probs are among these.
    # None: among all tokens.
    support: Array | None = None
    routing: Array | None = None  # [B, R, L, k], `Tokens.routing` to replay; None: none
    # float32 [B], weight of -log π, which is then a row's only loss: the policy did not write it.
    # 0 for rows that it wrote; None: it wrote all.
    supervised: Array | None = None
    # [B, ...] by name, columns that terms of the loss read
    extra: dict[str, Array] = dataclasses.field(default_factory=dict)

    @property
    def mask(self) -> Array:
        """Return bool [B, R], the tokens that are trained on."""
        slots = self.old_logprobs.shape[1]
        inside = jnp.arange(slots)[None, :] < self.response_lens[:, None]
        return inside if self.from_environment is None else inside & ~self.from_environment
