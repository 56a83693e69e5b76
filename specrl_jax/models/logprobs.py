"""Log-probabilities over a vocabulary that may be split over "tensor".

Long vocabularies are looked at as [C, N], token c·N + n at (c, n), split over "tensor" along C:
what goes on along N stays on a device. Long responses go through the head in chunks, so that
[B, T, V] is never whole on one device or in memory at once.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.transformer import Transformer
from specrl_jax.sharding import reshard, shards, spec

SHORT = 1_024  # vocabularies below it are one column: C = V
MOST_ROWS = 128  # C of the others, at most: a power of 2, so that meshes of such sizes divide it


def vocab_ids(size: int) -> Array:
    """int32 [V], laid out like the vocabulary."""
    return reshard(jnp.arange(size, dtype=jnp.int32), "vocab")


def fold(scores: Array) -> Array:
    """[..., V] → [..., C, N], C split like the vocabulary; the same on every mesh.

    Where "tensor" has a size that does not divide C, which no power of 2 up to 128 is, the scores
    are gathered.
    """
    vocab = scores.shape[-1]
    rows = vocab if vocab < SHORT else math.gcd(vocab, MOST_ROWS)
    axes = jax.typeof(scores).sharding.spec[:-1]
    split = spec("vocab")[0] if rows > 1 and rows % shards("vocab") == 0 else None
    if split is None:
        scores = jax.sharding.reshard(scores, jax.P(*axes, None))
    shape = (*scores.shape[:-1], rows, vocab // rows)
    return jnp.reshape(scores, shape, out_sharding=jax.P(*axes, split, None))


def row_ids(rows: int) -> Array:
    """int32 [C], laid out like the first of a folded vocabulary's axes."""
    ids = jnp.arange(rows, dtype=jnp.int32)
    return ids if rows % shards("vocab") else reshard(ids, "vocab")


def column(folded: Array, index: Array) -> Array:
    """[..., C]: of [..., C, N] the column `index` int32 [...]."""
    if folded.shape[-1] == 1:
        return folded[..., 0]
    index = jnp.broadcast_to(index[..., None, None], (*folded.shape[:-1], 1))
    index = jax.sharding.reshard(index, jax.typeof(folded).sharding.spec)
    return jnp.take_along_axis(folded, index, axis=-1)[..., 0]


def pick(scores: Array, tokens: Array) -> Array:
    """scores [..., V] at tokens [...]; exact, also where other scores are -inf.

    Looked up along N and summed under a mask along C: a mask along V took a fifth of a verification
    pass on CPU. Backwards that mask is the cheaper, as it goes into the operation that follows.
    """
    return _pick(jax.typeof(scores), scores, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pick(kind, scores: Array, tokens: Array) -> Array:
    folded = fold(scores)
    rows, length = folded.shape[-2:]
    here = row_ids(rows)[(None,) * tokens.ndim] == (tokens // length)[..., None]
    return jnp.sum(jnp.where(here, column(folded, tokens % length), 0.0), axis=-1)


def _pick_forward(kind, scores: Array, tokens: Array):
    return _pick(kind, scores, tokens), tokens


def _pick_backward(kind, tokens: Array, gradient: Array):
    here = vocab_ids(kind.shape[-1])[(None,) * tokens.ndim] == tokens[..., None]
    gradient = jnp.where(here, gradient[..., None], 0.0)
    return jax.sharding.reshard(gradient, kind.sharding.spec), None


_pick.defvjp(_pick_forward, _pick_backward)


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
