"""Log-probabilities over a vocabulary that may be split over "tensor".

A token's score is picked by mask-and-sum, whose gradient needs no scatter (what is not
differentiated can look it up: `rollout.acceptance.logprobs_at`), and long responses go through the
head in chunks, so that [B, T, V] is never whole on one device or in memory at once.
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
    """scores [..., V] at tokens [...]; exact, also where other scores are -inf."""
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

    inputs: a pytree of arrays [B, T, ...], cut alike. The function's results are arrays
    [B, t, ...]; they come back joined as [B, T, ...]. Logits of a chunk are recomputed in the
    backward pass instead of kept.
    """
    width = hidden_BTD.shape[1]

    @jax.checkpoint
    def one(hidden: Array, inputs):
        return function(model.logits(hidden), inputs)

    if width <= chunk:
        return one(hidden_BTD, inputs)
    whole = width // chunk * chunk

    def reshape(x: Array, *shape: int) -> Array:
        # Said aloud: a reshape of a single row forgets that its axis is the batch.
        return jnp.reshape(x, shape, out_sharding=spec("batch", *(None,) * (len(shape) - 1)))

    def cut(x: Array) -> Array:  # [B, n * chunk, ...] → [n, B, chunk, ...]
        return jnp.moveaxis(reshape(x[:, :whole], x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:  # and back
        return reshape(jnp.moveaxis(x, 0, 1), x.shape[1], whole, *x.shape[3:])

    pieces = jax.lax.map(lambda x: one(*x), jax.tree.map(cut, (hidden_BTD, inputs)))
    pieces = jax.tree.map(join, pieces)
    if whole == width:
        return pieces
    rest = one(hidden_BTD[:, whole:], jax.tree.map(lambda x: x[:, whole:], inputs))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), pieces, rest)
