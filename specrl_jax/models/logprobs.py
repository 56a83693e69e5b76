"""Log-probabilities over a vocabulary that may be split over "tensor".

A mask and a sum select a token's score, so the gradient needs no scatter. Long responses go through
the head in chunks, so no device holds all of [B, T, V] at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.transformer import Transformer, compute_head, final_logits, head_logits
from specrl_jax.sharding import COMPUTE, axes, reshard, shards

# Log-prob used instead of -inf if a rule accepted a token that truncation cuts off. Ratios with it
# are finite, and so are their exponentials.
CUT_OFF_LOGPROB = -50.0


def pick(scores: Array, tokens: Array) -> Array:
    """Return scores [..., V] at tokens [...]; exact, even if other scores are -inf."""
    ids = reshard(jnp.arange(scores.shape[-1], dtype=jnp.int32), "vocab")[(None,) * tokens.ndim]
    return jnp.sum(jnp.where(ids == tokens[..., None], scores, 0.0), axis=-1)


def token_logprobs(logits: Array, tokens: Array, support: Array | None = None) -> Array:
    """Return log softmax(logits) at tokens, float32 nats; logits [..., V], tokens [...].

    support: int32 [..., k], the ids S that a truncated sampler allowed at each token, padded with
        -1; None: all. Then it is log π(y) / Σ_{j in S} π(j) with S fixed, the "keep sampling mask"
        of DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). Outside S it is `CUT_OFF_LOGPROB`, without
        gradient.
    """
    if support is None:
        return pick(logits, tokens) - jax.nn.logsumexp(logits, axis=-1)
    lowest = jnp.finfo(logits.dtype).min  # finite: a token may have no id
    allowed = jnp.where(support >= 0, scores_at(logits, support), lowest)
    here = support == tokens[..., None]
    logprobs = jnp.sum(jnp.where(here, allowed, 0.0), axis=-1) - jax.nn.logsumexp(allowed, axis=-1)
    return jnp.where(jnp.any(here, axis=-1), logprobs, CUT_OFF_LOGPROB)


def scores_at(scores: Array, ids: Array) -> Array:
    """Return scores [..., V] at ids int32 [..., k]; 0 if an id is -1."""
    inner = (None,) * (scores.ndim - 2)

    @functools.partial(jax.shard_map, out_specs=axes("batch", *inner, "vocab", None))
    def pick_own(scores: Array, ids: Array) -> Array:
        local, here = own_ids(scores.shape[-1], ids)
        values = jnp.take_along_axis(scores, local, axis=-1, mode="clip")
        return jnp.where(here, values, 0.0)[..., None, :]

    pieces = pick_own(
        reshard(scores, "batch", *inner, "vocab"), reshard(ids, "batch", *inner, None)
    )
    # Not `psum`, which remains a collective operation in a CPU program that is not split.
    return jnp.sum(pieces, axis=-2)


def own_ids(size: int, ids: Array) -> tuple[Array, Array]:
    """Return the indices of ids within this device's `size` tokens of the vocabulary, and which are
    among them; inside `shard_map`."""
    local = ids - size * jax.lax.axis_index(COMPUTE["vocab"])
    return local, (ids >= 0) & (local >= 0) & (local < size)


def entropy(logits: Array) -> Array:
    """Return the entropy of softmax(logits) in nats, [...] for logits [..., V]."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    probs = jnp.exp(logits - log_z[..., None])
    finite = jnp.where(jnp.isneginf(logits), 0.0, logits)  # 0 times -inf would be NaN
    return log_z - jnp.sum(probs * finite, axis=-1)


def map_tokens(
    function: Callable,
    model: Transformer,
    hidden_BTD: Array,
    inputs: Any,
    chunk: int,
    shared: tuple = (),
) -> Any:
    """Map `function(logits [B, t, V], inputs [B, t, ...], *shared)` over chunks of tokens.

    t <= `chunk`. inputs is a pytree of arrays [B, T, ...]. The function returns arrays [B, t, ...];
    the result has them joined, [B, T, ...]. shared: pytrees passed whole to every chunk.

    Gradients flow to the hidden states and the head, not to the inputs. With several chunks the
    backward pass recomputes their logits, so only one chunk's are in memory. The function's results
    are then floats, and it closes over no traced array.
    """
    if hidden_BTD.shape[1] <= chunk:
        return function(model.logits(hidden_BTD), inputs, *shared)
    hidden_BTD = reshard(hidden_BTD, "batch", None, None)
    config = model.config

    def finish(logits: Array, inputs: Any, shared: tuple):
        return function(final_logits(logits, config), inputs, *shared)

    return _map_chunks(finish, chunk, model.head, hidden_BTD, inputs, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _map_chunks(
    function: Callable, chunk: int, head_VD: Array, hidden_BTD: Array, inputs: Any, shared: tuple
):
    """Map over chunks. The head is gathered, and its gradient summed, once, outside the loops."""
    return _map_chunks_forward(function, chunk, head_VD, hidden_BTD, inputs, shared)[0]


def _map_chunks_forward(
    function: Callable, chunk: int, head_VD: Array, hidden_BTD: Array, inputs: Any, shared: tuple
):
    compute_VD = compute_head(head_VD, hidden_BTD.dtype)

    def step(nothing: None, part: tuple):
        hidden, inputs = part
        return nothing, function(head_logits(hidden, compute_VD), inputs, shared)

    _, results = scan_chunks(step, None, (hidden_BTD, inputs), chunk)
    return results, (head_VD, compute_VD, hidden_BTD, inputs, shared)


def _map_chunks_backward(function: Callable, chunk: int, saved: tuple, given):
    stored_VD, head_VD, hidden_BTD, inputs, shared = saved
    layout = jax.typeof(stored_VD).sharding.spec
    # Each batch shard has its own sum, over its rows: the loop does not sum over devices.
    start = jnp.zeros(
        (shards("batch"), *head_VD.shape), jnp.float32, out_sharding=axes("batch", "vocab", None)
    )

    def step(total_XVD: Array, part: tuple):
        hidden, inputs, given = part
        _, pull = jax.vjp(
            lambda logits: function(logits, inputs, shared), head_logits(hidden, head_VD)
        )
        (grad_BTV,) = pull(given)
        grad_BTV = grad_BTV.astype(head_VD.dtype)
        hidden_grad = jnp.einsum(
            "BTV,VD->BTD", grad_BTV, head_VD, out_sharding=axes("batch", None, None)
        )
        head_grad = jnp.einsum(
            "XBTV,XBTD->XVD",
            _by_shard(grad_BTV, None, "vocab"),
            _by_shard(hidden, None, None),
            preferred_element_type=jnp.float32,
            out_sharding=axes("batch", "vocab", None),
        )
        return total_XVD + head_grad, hidden_grad

    total_XVD, hidden_grad = scan_chunks(step, start, (hidden_BTD, inputs, given), chunk)
    head_grad = jax.sharding.reshard(jnp.sum(total_XVD, axis=0), layout)
    return head_grad.astype(stored_VD.dtype), hidden_grad, None, None


_map_chunks.defvjp(_map_chunks_forward, _map_chunks_backward)


def _by_shard(array: Array, *dims: str | None) -> Array:
    """Reshape [B, ...] → [X, B / X, ...], X batch shards; `axes` lay out the other axes."""
    shape = (shards("batch"), -1, *array.shape[1:])
    return jnp.reshape(array, shape, out_sharding=axes("batch", None, *dims))


def scan_chunks(step: Callable, carry, arrays, chunk: int):
    """Scan `carry, result = step(carry, part)` over chunks of arrays [B, T, ...]; join results."""
    width = jax.tree.leaves(arrays)[0].shape[1]
    multiple = width // chunk * chunk

    def reshape(x: Array, *shape: int) -> Array:
        # With its layout: reshaping a single row would lose the split of the batch.
        return jnp.reshape(x, shape, out_sharding=axes("batch", *(None,) * (len(shape) - 1)))

    def cut(x: Array) -> Array:  # [B, n * chunk, ...] → [n, B, chunk, ...]
        return jnp.moveaxis(reshape(x[:, :multiple], x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:  # and back
        return reshape(jnp.moveaxis(x, 0, 1), x.shape[1], multiple, *x.shape[3:])

    carry, pieces = jax.lax.scan(step, carry, jax.tree.map(cut, arrays))
    pieces = jax.tree.map(join, pieces)
    if multiple == width:
        return carry, pieces
    carry, rest = step(carry, jax.tree.map(lambda x: x[:, multiple:], arrays))
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), pieces, rest)
