"""Sampling and scoring in one pass of the output head, without materializing logits.

The tokens are those of `sampling.sample`, unless two candidates tie within rounding. The race of
`sampling.sample` needs the mass of each column of the folded vocabulary, and each column's winning
token. The head's kernel returns both (`models.head.Columns`).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import MAX_INT
from specrl_jax.models.head import KERNEL, Columns, folded_rows
from specrl_jax.models.transformer import Transformer, compute_head, final_logits
from specrl_jax.rollout.sampling import (
    SamplingConfig,
    TokenDistributions,
    exponential,
    exponentials,
    noise_keys,
    temper,
)
from specrl_jax.sharding import reshard
from specrl_jax.types import Tokens


def distributions(
    model: Transformer,
    hidden: Array,
    seeds: Array,
    positions: Array,
    config: SamplingConfig,
    k: int = 0,
) -> "TokenDistributions | FusedDistributions":
    """Return the policy's distributions at its hidden states [B, T, D].

    They keep no logits if the run uses the head's kernel, unless top-k, top-p or k > 0 need them.
    Other arguments: the fields of `TokenDistributions`.
    """
    if KERNEL in model.config.kernels and not config.truncates and not k:
        return FusedDistributions(model, hidden, seeds, positions, config)
    return TokenDistributions.of(model.logits(hidden), seeds, positions, config, k)


@dataclasses.dataclass(frozen=True)
class FusedDistributions:
    """Distributions from the head's kernel, without logits unless `whole` is read."""

    model: Transformer
    hidden: Array  # [B, T, D], after the final norm
    seeds: Array  # uint32 [B, 2]
    positions: Array  # int32 [B, T], of the tokens in their responses
    config: SamplingConfig

    @functools.cached_property
    def whole(self) -> TokenDistributions:
        """Return the same distributions with their logits, for callers that need all log-probs."""
        logits = self.model.logits(self.hidden)
        return TokenDistributions.of(logits, self.seeds, self.positions, self.config)

    @property
    def truncated(self) -> Array:
        """Logits [B, T, V], tempered."""
        return self.whole.truncated

    def sample(self, weigh: Callable[[Array], Array] | None = None) -> Tokens:
        """Sample a token from each distribution; weigh: as in `TokenDistributions.sample`."""
        if weigh is not None:
            return self.whole.sample(weigh)
        if self.config.temperature == 0:
            columns, tokens = _most_likely(self)
        else:
            columns, tokens = _race(self)
        return _with_logprobs(columns, tokens)

    def score(self, tokens: Array) -> Tokens:
        """Look up the log-probs of tokens int32 [B, T]."""
        return _with_logprobs(_reduce(self, _is_given, tokens), tokens)


def _reduce(policy: FusedDistributions, weigh: Callable[..., Array], *values: Array) -> Columns:
    """Reduce the policy's logits to their columns; arguments as in `head_gpu.reduce_columns`."""
    from specrl_jax.models import head_gpu

    config = policy.model.config

    def finish(products: Array, ids: Array) -> Array:
        return temper(final_logits(products, config, ids), policy.config)

    head_VD = compute_head(policy.model.head, config.dtype)
    rows = folded_rows(config.vocab_size)
    return head_gpu.reduce_columns(policy.hidden, head_VD, rows, values, finish, weigh)


def _most_likely(policy: FusedDistributions) -> tuple[Columns, Array]:
    """Return the likeliest tokens [B, T] (the first if several tie), and their columns."""
    columns = _reduce(policy, _is_likely)
    top = jnp.max(columns.logits, axis=(-2, -1), keepdims=True)
    return columns, jnp.min(jnp.where(columns.logits == top, columns.ids, MAX_INT), axis=(-2, -1))


def _race(policy: FusedDistributions) -> tuple[Columns, Array]:
    """Return sampled tokens [B, T], and their columns."""
    columns = _reduce(policy, _wins, *noise_keys(policy.seeds, policy.positions))
    noise = functools.partial(exponentials, policy.seeds, policy.positions)
    # First the columns race, by mass. A column's id is one that no token has.
    top = jnp.max(columns.top, axis=(-2, -1), keepdims=True)
    masses = jnp.sum(columns.mass * jnp.exp(columns.top - top), axis=-2)
    numbers = jnp.arange(masses.shape[-1], dtype=jnp.int32)[None, None]
    won = jnp.argmax(masses / noise(policy.model.config.vocab_size + numbers), axis=-1)
    # Then the winning column's tokens race. Each shard already has the winner of its part.
    here = (numbers == won[..., None])[:, :, None]
    ids = reshard(jnp.sum(jnp.where(here, columns.ids, 0), axis=-1), "batch", None, None)
    logits = jnp.sum(jnp.where(here, columns.logits, 0.0), axis=-1)
    logits = reshard(logits, "batch", None, None)
    shard = jnp.argmax(jnp.exp(logits - top[..., 0]) / noise(ids), axis=-1)
    return columns, jnp.take_along_axis(ids, shard[..., None], axis=-1)[..., 0]


def _with_logprobs(columns: Columns, tokens: Array) -> Tokens:
    """Return tokens [B, T] with their log-probs. Each token is the choice of its column."""
    top = jnp.max(columns.top, axis=(-2, -1), keepdims=True)
    mass = jnp.sum(columns.mass * jnp.exp(columns.top - top), axis=(-2, -1))
    here = columns.ids == tokens[..., None, None]
    ahead = jnp.sum(jnp.where(here, columns.logits - top, 0.0), axis=(-2, -1))
    logprobs = ahead - jnp.log(mass)
    return Tokens(tokens, logprobs, logprobs)


# Functions inside the kernel: weights [m, c]; the highest picks a column's token.
# inside: logits minus the column's highest logit. ids: tokens [1, c].


def _is_likely(inside: Array, ids: Array) -> Array:
    return inside


def _wins(inside: Array, ids: Array, first: Array, second: Array) -> Array:
    return jnp.exp(inside) / exponential(ids, first, second)


def _is_given(inside: Array, ids: Array, token: Array) -> Array:
    return (ids == token).astype(jnp.float32)
