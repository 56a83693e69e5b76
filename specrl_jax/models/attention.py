"""Attention over keys and values as the KV cache holds them: the one place for its backends.

`attention` is the function that layers call. `_reference` is plain JAX. A kernel takes the same
arguments and stands beside it.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import spec

QUERIES_AT_ONCE = 512  # bounds the scores in memory to [B, N, 512, S]


def attention(q_BTNH: Array, k_BKHS: Array, v_BKSH: Array, mask_BTS: Array) -> Array:
    """Grouped-query attention (arXiv 2305.13245), [B, T, N, H].

    q_BTNH: Queries, already scaled by H^-1/2.
    k_BKHS, v_BKSH: Keys and values of S slots, in the layout of `kv_cache`.
    mask_BTS: bool, True where a query sees a slot.

    Many queries go in pieces. The backward pass recomputes the scores of a piece.
    """
    queries, step = q_BTNH.shape[1], QUERIES_AT_ONCE
    if queries <= step:
        return _reference(q_BTNH, k_BKHS, v_BKSH, mask_BTS)
    pieces = [
        jax.checkpoint(_reference)(
            q_BTNH[:, i : i + step], k_BKHS, v_BKSH, mask_BTS[:, i : i + step]
        )
        for i in range(0, queries, step)
    ]
    return jnp.concatenate(pieces, axis=1)


def _reference(q_BTNH: Array, k_BKHS: Array, v_BKSH: Array, mask_BTS: Array) -> Array:
    """softmax(q·k + mask)·v as two plain products for each row and key/value head.

    The queries of a key/value head form one axis Q = T·G (G query heads for each key/value head),
    so that keys and values need no transpose. The mask is a sum: XLA on CPU fuses it with the
    softmax and both products; `where` would be one more pass over the scores.
    """
    batch, queries, heads, head_dim = q_BTNH.shape
    kv_heads, groups = k_BKHS.shape[1], heads // k_BKHS.shape[1]

    # Each reshape names its layout: with one key/value head JAX would split another axis.
    def reshape(x: Array, sizes: tuple[int, ...], *axes: str | None) -> Array:
        return jnp.reshape(x, (batch, *sizes, head_dim), out_sharding=spec("batch", *axes, None))

    q_BTKGH = reshape(q_BTNH, (queries, kv_heads, groups), None, "kv_heads", None)
    q_BKTGH = q_BTKGH.transpose(0, 2, 1, 3, 4)
    q_BKQH = reshape(q_BKTGH, (kv_heads, queries * groups), "kv_heads", None)
    scores = jnp.einsum("BKQH,BKHS->BKQS", q_BKQH, k_BKHS, preferred_element_type=jnp.float32)
    bias_BTS = jnp.where(mask_BTS, 0.0, jnp.finfo(jnp.float32).min)
    bias_BQS = jnp.repeat(bias_BTS, groups, axis=1)
    weights = jax.nn.softmax(scores + bias_BQS[:, None], axis=-1).astype(v_BKSH.dtype)
    out_BKQH = jnp.einsum("BKQS,BKSH->BKQH", weights, v_BKSH)
    out_BKTGH = reshape(out_BKQH, (kv_heads, queries, groups), "kv_heads", None, None)
    return reshape(out_BKTGH.transpose(0, 2, 1, 3, 4), (queries, heads), None, "heads")
