"""Attention over keys and values from a KV cache: the one place for its backends.

`attention` is the function that layers call. `_reference` is plain JAX. A kernel takes the same
arguments and stands beside it. Who sees whom follows from integers alone, see `attention`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import spec

QUERIES_AT_ONCE = 512  # bounds the scores in memory to [B, N, 512, S]


class Visible(NamedTuple):
    """Who sees whom: a query in slot i sees the key in slot j where j <= i < ends[j]."""

    slots: Array | None = None  # int32 [B, T], of the queries; None: query t is in slot t, S = T
    ends: Array | None = None  # int32 [B, S], slot after a token's subtree (`packing`); None: S


def attention(q_BTNH: Array, k_BKHS: Array, v_BKSH: Array, visible: Visible) -> Array:
    """Grouped-query attention (arXiv 2305.13245), [B, T, N, H].

    q_BTNH: Queries, already scaled by H^-1/2.
    k_BKHS, v_BKSH: Keys and values of S slots, as `kv_cache.keys_and_values` gives them.

    Many queries go in pieces. The backward pass recomputes the scores of a piece. Where query t is
    in slot t, a piece skips the keys that none of its queries sees.
    """
    queries, step = q_BTNH.shape[1], QUERIES_AT_ONCE
    if queries <= step:
        return _reference(q_BTNH, k_BKHS, v_BKSH, visible)
    slots_BT, ends_BS = visible
    pieces = []
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        q = q_BTNH[:, start:stop]
        if slots_BT is None:
            pieces.append(_windowed(q, k_BKHS, v_BKSH, ends_BS, start))
        else:
            part = Visible(slots_BT[:, start:stop], ends_BS)
            pieces.append(jax.checkpoint(_reference)(q, k_BKHS, v_BKSH, part))
    return jnp.concatenate(pieces, axis=1)


def _windowed(
    q_BTNH: Array, k_BKHS: Array, v_BKSH: Array, ends_BS: Array | None, start: int
) -> Array:
    """Attention of the queries in the slots from `start` on, over the keys that they may see.

    These lie between the first slot whose subtree reaches `start` and the last query. A window of
    1, 2, 4, ... pieces that holds them is chosen on the device.
    """
    rows, queries = q_BTNH.shape[:2]
    stop = start + queries
    slots_BT = jnp.broadcast_to(
        jnp.arange(start, stop), (rows, queries), out_sharding=spec("batch", None)
    )

    def attend(first: int, q: Array, k: Array, v: Array, ends: Array | None) -> Array:
        keys, values = k[..., first:stop], v[:, :, first:stop]
        ends = None if ends is None else ends[:, first:stop] - first
        return jax.checkpoint(_reference)(q, keys, values, Visible(slots_BT - first, ends))

    inputs = q_BTNH, k_BKHS, v_BKSH, ends_BS
    if ends_BS is None or not start:
        return attend(0, *inputs)
    firsts, size = [], queries
    while (first := stop - size) > 0:
        firsts.append(first)
        size *= 2
    firsts.append(0)
    seen = jnp.min(jnp.argmax(ends_BS > start, axis=1))  # the first slot that a query sees
    choice = jnp.sum(seen < jnp.array(firsts))
    return jax.lax.switch(choice, [functools.partial(attend, first) for first in firsts], *inputs)


def _reference(q_BTNH: Array, k_BKHS: Array, v_BKSH: Array, visible: Visible) -> Array:
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
    mask_BTS = _mask(visible, queries, k_BKHS.shape[-1])
    bias_BTS = jnp.where(mask_BTS, 0.0, jnp.finfo(jnp.float32).min)
    bias_BQS = jnp.repeat(bias_BTS, groups, axis=1)
    weights = jax.nn.softmax(scores + bias_BQS[:, None], axis=-1).astype(v_BKSH.dtype)
    out_BKQH = jnp.einsum("BKQS,BKSH->BKQH", weights, v_BKSH)
    out_BKTGH = reshape(out_BKQH, (kv_heads, queries, groups), "kv_heads", None, None)
    return reshape(out_BKTGH.transpose(0, 2, 1, 3, 4), (queries, heads), None, "heads")


def _mask(visible: Visible, queries: int, keys: int) -> Array:
    """bool [B or 1, T, S], True where a query sees a slot."""
    slots_BT, ends_BS = visible
    slots_BT = jnp.arange(queries)[None, :] if slots_BT is None else slots_BT
    mask_BTS = jnp.arange(keys)[None, None, :] <= slots_BT[:, :, None]
    return mask_BTS if ends_BS is None else mask_BTS & (slots_BT[:, :, None] < ends_BS[:, None, :])
