"""Distributions of the policy over the next token, made of its hidden states.

Where a run takes the kernel for the head, and nothing needs all log-probs, tokens are sampled and
scored in one pass of the head that keeps no logits: its columns (`models.head`) are what the race
of `sampling.sample` asks for. Tokens are the same, unless two candidates tie within rounding.
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
    exponential,
    exponentials,
    likeliest_tokens,
    logprobs_at,
    noise_keys,
    sample,
    temper,
    truncate,
)
from specrl_jax.sharding import reshard
from specrl_jax.types import TokenColumns


@dataclasses.dataclass(frozen=True)
class TokenDistributions:
    """Distributions of the policy at positions of rows: it samples tokens and scores them."""

    model: Transformer
    hidden: Array  # [B, T, D], final states
    seeds: Array  # uint32 [B, 2]
    positions: Array  # int32 [B, T], of the tokens in their responses
    config: SamplingConfig
    k: int = 0  # likeliest tokens whose log-probs are kept

    @functools.cached_property
    def logits(self) -> Array:
        """[B, T, V], tempered."""
        return temper(self.model.logits(self.hidden), self.config)

    @functools.cached_property
    def cut(self) -> Array:
        """[B, T, V], truncated too: what is sampled from."""
        return truncate(self.logits, self.config)

    def sample(self, weigh: Callable[[Array], Array] | None = None) -> TokenColumns:
        """Sample a token from each distribution.

        weigh: from the truncated scores to the log-weights [B, T, V] that are sampled from in
        their place; None: the scores themselves.
        """
        if weigh is not None:
            tokens, _, _ = sample(weigh(self.cut), self.seeds, self.positions, self.config)
            return self.score(tokens)
        if self._keeps_no_logits:
            tokens, logprobs = _sample_columns(self)
            return TokenColumns(tokens, logprobs, logprobs)
        tokens, logprobs, log_z = sample(self.cut, self.seeds, self.positions, self.config)
        return self._kept(tokens, logprobs, log_z[..., None])

    def score(self, tokens: Array) -> TokenColumns:
        """Look up the log-probs of tokens int32 [B, T]."""
        if self._keeps_no_logits:
            columns = _reduce(self, _is_given, tokens)
            logprobs = _logprobs(columns, tokens)
            return TokenColumns(tokens, logprobs, logprobs)
        return self._kept(tokens, logprobs_at(self.cut, tokens[..., None])[..., 0], None)

    @property
    def _keeps_no_logits(self) -> bool:
        return KERNEL in self.model.config.kernels and not self.config.truncates and not self.k

    def _kept(self, tokens: Array, sampling: Array, log_z: Array | None) -> TokenColumns:
        policy = sampling
        if self.config.truncates:
            # Looked up: on a CPU a mask over the vocabulary would cost as much as log-sum-exp does.
            policy = logprobs_at(self.logits, tokens[..., None])[..., 0]
        if not self.k:
            return TokenColumns(tokens, policy, sampling)
        top_ids, top_logprobs = likeliest_tokens(self.cut, self.k, log_z)
        return TokenColumns(tokens, policy, sampling, top_ids, top_logprobs)


# In one pass of the head --------------------------------------------------------------------------


def _reduce(policy: TokenDistributions, weigh: Callable[..., Array], *values: Array) -> Columns:
    """Reduce the policy's logits to their columns; arguments as in `head_gpu.reduce_columns`."""
    from specrl_jax.models import head_gpu

    config = policy.model.config

    def finish(products: Array, ids: Array) -> Array:
        return temper(final_logits(products, config, ids), policy.config)

    head_VD = compute_head(policy.model.head, config.dtype)
    rows = folded_rows(config.vocab_size)
    return head_gpu.reduce_columns(policy.hidden, head_VD, rows, values, finish, weigh)


def _sample_columns(policy: TokenDistributions) -> tuple[Array, Array]:
    """Sample as `sampling.sample` does; return tokens and their log-probs [B, T]."""
    if policy.config.temperature == 0:
        columns = _reduce(policy, _is_likely)
        top = jnp.max(columns.logits, axis=(-2, -1), keepdims=True)
        # Of equal logits the first token has it.
        tokens = jnp.min(jnp.where(columns.logits == top, columns.ids, MAX_INT), axis=(-2, -1))
        return tokens, _logprobs(columns, tokens)
    columns = _reduce(policy, _race, *noise_keys(policy.seeds, policy.positions))
    noise = functools.partial(exponentials, policy.seeds, policy.positions)
    top = jnp.max(columns.top, axis=(-2, -1), keepdims=True)
    masses = jnp.sum(columns.mass * jnp.exp(columns.top - top), axis=-2)
    numbers = jnp.arange(masses.shape[-1], dtype=jnp.int32)[None, None]
    won = jnp.argmax(masses / noise(policy.model.config.vocab_size + numbers), axis=-1)
    here = (numbers == won[..., None])[:, :, None]
    # The column's tokens on each shard, of which one is left.
    ids = reshard(jnp.sum(jnp.where(here, columns.ids, 0), axis=-1), "batch", None, None)
    logits = jnp.sum(jnp.where(here, columns.logits, 0.0), axis=-1)
    logits = reshard(logits, "batch", None, None)
    shard = jnp.argmax(jnp.exp(logits - top[..., 0]) / noise(ids), axis=-1)
    tokens = jnp.take_along_axis(ids, shard[..., None], axis=-1)[..., 0]
    return tokens, _logprobs(columns, tokens)


def _logprobs(columns: Columns, tokens: Array) -> Array:
    """Return the log-probs of tokens [B, T], each of which its column has chosen."""
    top = jnp.max(columns.top, axis=(-2, -1), keepdims=True)
    mass = jnp.sum(columns.mass * jnp.exp(columns.top - top), axis=(-2, -1))
    here = columns.ids == tokens[..., None, None]
    logit = jnp.sum(jnp.where(here, columns.logits - top, 0.0), axis=(-2, -1))
    return logit - jnp.log(mass)


# What chooses a column's token: weights [m, c] of logits less the column's highest, and of tokens
# [1, c]. They run inside the kernel.


def _is_likely(inside: Array, ids: Array) -> Array:
    return inside


def _race(inside: Array, ids: Array, first: Array, second: Array) -> Array:
    return jnp.exp(inside) / exponential(ids, first, second)


def _is_given(inside: Array, ids: Array, token: Array) -> Array:
    return (ids == token).astype(jnp.float32)
