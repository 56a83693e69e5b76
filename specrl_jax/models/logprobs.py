"""Log-probabilities over a vocabulary that may be split over "tensor".

A mask and a sum pick a token's score, so that the gradient needs no scatter. Long responses go
through the head in chunks, so that no device holds all of [B, T, V] at once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.transformer import Transformer
from specrl_jax.sharding import reshard, spec


def vocab_ids(size: int) -> Array:
    """int32 [V], laid out like the vocabulary."""
    return reshard(jnp.arange(size, dtype=jnp.int32), "vocab")


def pick(scores: Array, tokens: Array) -> Array:
    """Scores [..., V] at tokens [...]; exact, also where other scores are -inf."""
    ids = vocab_ids(scores.shape[-1])[(None,) * tokens.ndim]
    return jnp.sum(jnp.where(ids == tokens[..., None], scores, 0.0), axis=-1)


def token_logprobs(logits: Array, tokens: Array) -> Array:
    """log softmax(logits) at tokens, float32 nats; logits [..., V], tokens [...]."""
    return pick(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)


def entropy(logits: Array) -> Array:
    """Entropy of softmax(logits) in nats, [...] for logits [..., V]."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    probs = jnp.exp(logits - log_z[..., None])
    return log_z - jnp.sum(probs * logits, axis=-1)


def map_tokens(function: Callable, model: Transformer, hidden_BTD: Array, inputs, chunk: int):
    """`function(logits [B, t, V], inputs [B, t, ...])` over chunks of t <= `chunk` tokens.

    inputs is a pytree of arrays [B, T, ...]. The function gives arrays [B, t, ...]; the result has
    them joined, [B, T, ...]. Where there are several chunks, the backward pass recomputes their
    logits: one chunk's at a time is in memory there too.
    """
    width = hidden_BTD.shape[1]

    def run_chunk(hidden: Array, inputs):
        return function(model.logits(hidden), inputs)

    if width <= chunk:
        return run_chunk(hidden_BTD, inputs)
    run_chunk = jax.checkpoint(run_chunk)
    multiple = width // chunk * chunk

    def reshape(x: Array, *shape: int) -> Array:
        # With its layout: a reshape of a single row would lose the split of the batch.
        return jnp.reshape(x, shape, out_sharding=spec("batch", *(None,) * (len(shape) - 1)))

    def cut(x: Array) -> Array:  # [B, n * chunk, ...] → [n, B, chunk, ...]
        return jnp.moveaxis(reshape(x[:, :multiple], x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:  # and back
        return reshape(jnp.moveaxis(x, 0, 1), x.shape[1], multiple, *x.shape[3:])

    pieces = jax.lax.map(lambda x: run_chunk(*x), jax.tree.map(cut, (hidden_BTD, inputs)))
    pieces = jax.tree.map(join, pieces)
    if multiple == width:
        return pieces
    rest = run_chunk(hidden_BTD[:, multiple:], jax.tree.map(lambda x: x[:, multiple:], inputs))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), pieces, rest)
