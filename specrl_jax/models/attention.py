"""Attention over rows of the KV cache and over packed sequences, with all backends in one place.

Layers call `attend` and `attend_packed`. The plain reference runs everywhere; the kernels that a
run uses (`kernels`) run on each shard.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.kernels import kernel_module
from specrl_jax.models.kv_cache import Layer, is_flat, keys_and_values
from specrl_jax.models.row_slices import gather_tokens
from specrl_jax.models.scores import Local, softcapped
from specrl_jax.sharding import axes, on_shards, platform, shards

QUERIES_AT_ONCE = 512  # bounds the reference's scores in memory to [B, N, 512, S]


def attend(
    q_BTNH: Array,
    layer: Layer,
    start_B: Array,
    kv_heads: int,
    *,
    kernels: tuple[str, ...] = (),
    window: int | Array | None = None,
    softcap: float = 0.0,
) -> Array:
    """Compute grouped-query attention (arXiv 2305.13245) over the KV cache, [B, T, N, H].

    Query t of row b is in slot start[b] + t and sees the slots up to its own.

    q_BTNH: Queries, already scaled.
    layer: A cache layer that includes the T tokens.
    start_B: int32 [B]; start + T <= S.
    kv_heads: K, over all devices.
    kernels: Those of `USES` for which a kernel replaces the reference.
    window: Slots that a query sees, including its own; None: all.
    softcap: Scores become cap * tanh(score / cap); 0: unchanged.
    """
    width = q_BTNH.shape[1]
    if "cached" in kernels:
        kernel = kernel_module(platform()).attend
        kernel = functools.partial(kernel, window=window, softcap=softcap)
        return on_shards(kernel, q_BTNH, *layer, start_B, like=q_BTNH)
    slots_BT = start_B[:, None] + jnp.arange(width)[None, :]
    if is_flat(layer):
        reference = functools.partial(_flat_reference, kv_heads=kv_heads, softcap=softcap)
        slots = layer[0].shape[1]
    else:
        layer = keys_and_values(layer)
        reference = functools.partial(_reference, softcap=softcap)
        slots = layer[0].shape[3]
    local = _local(window, slots_BT, jnp.arange(slots)[None, :])
    if width <= QUERIES_AT_ONCE:
        return reference(q_BTNH, *layer, slots_BT, local)
    pieces = [
        jax.checkpoint(reference)(q_BTNH[:, part], *layer, slots_BT[:, part], _part(local, part))
        for part in _pieces(width)
    ]
    return jnp.concatenate(pieces, axis=1)


def attend_packed(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    ends_BT: Array | None = None,
    positions_BT: Array | None = None,
    slots_BQ: Array | None = None,
    *,
    kernels: tuple[str, ...] = (),
    window: int | Array | None = None,
    softcap: float = 0.0,
) -> Array:
    """Compute grouped-query attention of T tokens among themselves, [B, T, N, H].

    Query i sees key j if j <= i < ends[j] and, with a window, if its position is less than the
    window after the key's.

    q_BTNH: Queries, already scaled.
    ends_BT: int32, slot after a token's subtree (`packing`); None: T for all.
    positions_BT: int32, for the window; None: the slots.
    slots_BQ: int32, slots of the queries, which are then [B, Q, N, H]; None: all T. A slot >= T
        sees nothing. Not supported by kernels.
    kernels, window, softcap: As in `attend`.

    The reference splits many queries into pieces. Its backward pass recomputes a piece's scores,
    and a piece skips the keys that none of its queries sees.
    """
    rows, queries = q_BTNH.shape[:2]
    slots_BT = jnp.arange(k_BTKH.shape[1])[None, :]
    if ends_BT is None:
        ends_BT = jnp.full((rows, queries), queries, out_sharding=axes("batch", None))
    positions_BT = slots_BT if positions_BT is None else positions_BT
    if slots_BQ is not None:
        local = None
        if window is not None:
            own_BQ = gather_tokens(positions_BT, jnp.minimum(slots_BQ, positions_BT.shape[1] - 1))
            local = _local(window, own_BQ, positions_BT)
        k_BKHS = k_BTKH.transpose(0, 2, 3, 1)
        v_BKSH = v_BTKH.transpose(0, 2, 1, 3)
        return _reference(q_BTNH, k_BKHS, v_BKSH, slots_BQ, local, ends_BT, softcap=softcap)
    local = _local(window, positions_BT, positions_BT)
    if "packed" in kernels:
        kernel = functools.partial(kernel_module(platform()).attend_packed, softcap=softcap)
        return on_shards(kernel, q_BTNH, k_BTKH, v_BTKH, ends_BT, local, like=q_BTNH)
    k_BKHS = k_BTKH.transpose(0, 2, 3, 1)
    v_BKSH = v_BTKH.transpose(0, 2, 1, 3)
    reference = functools.partial(_reference, softcap=softcap)
    if queries <= QUERIES_AT_ONCE:
        return reference(q_BTNH, k_BKHS, v_BKSH, slots_BT, local, ends_BT)
    pieces = []
    for part in _pieces(queries):
        q = q_BTNH[:, part]
        own = _part(local, part)
        pieces.append(_last_keys(reference, part.start, q, k_BKHS, v_BKSH, ends_BT, own))
    return jnp.concatenate(pieces, axis=1)


def _pieces(queries: int) -> list[slice]:
    step = QUERIES_AT_ONCE
    return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]


def _local(window: int | Array | None, queries_BT: Array, keys_BS: Array) -> Local | None:
    """Return the limits that a window sets for queries and keys at these positions."""
    return None if window is None else Local(queries_BT - window + 1, keys_BS)


def _part(local: Local | None, queries: slice) -> Local | None:
    return None if local is None else local._replace(first=local.first[:, queries])


def _last_keys(
    reference: Callable,
    start: int,
    q_BTNH: Array,
    k_BKHS: Array,
    v_BKSH: Array,
    ends_BS: Array,
    local: Local | None,
) -> Array:
    """Attend with the queries from slot `start` on, over the keys that they may see.

    These lie between the first slot whose subtree reaches `start` and the last query. The device
    chooses the last 1, 2, 4, ... pieces that contain them.
    """
    rows, queries = q_BTNH.shape[:2]
    stop = start + queries
    slots_BT = jnp.broadcast_to(
        jnp.arange(start, stop), (rows, queries), out_sharding=axes("batch", None)
    )

    def attend(first: int, q: Array, k: Array, v: Array, ends: Array, local: Local | None) -> Array:
        keys = k[..., first:stop]
        values = v[:, :, first:stop]
        ends = ends[:, first:stop] - first
        if local is not None:
            local = local._replace(positions=local.positions[:, first:stop])
        return jax.checkpoint(reference)(q, keys, values, slots_BT - first, local, ends)

    if not start:
        return attend(0, q_BTNH, k_BKHS, v_BKSH, ends_BS, local)
    firsts = []
    size = queries
    while (first := stop - size) > 0:
        firsts.append(first)
        size *= 2
    firsts.append(0)
    seen = jnp.min(jnp.argmax(ends_BS > start, axis=1))  # the first slot that a query sees
    choice = jnp.sum(seen < jnp.array(firsts))
    branches = [functools.partial(attend, first) for first in firsts]
    return jax.lax.switch(choice, branches, q_BTNH, k_BKHS, v_BKSH, ends_BS, local)


def _reference(
    q_BTNH: Array,
    k_BKHS: Array,
    v_BKSH: Array,
    slots_BT: Array,
    local: Local | None,
    ends_BS: Array | None = None,
    *,
    softcap: float,
) -> Array:
    """Compute softmax(q·k + mask)·v as two plain products for each row and key/value head.

    slots_BT: int32 [B or 1, T], of the queries; a query in slot i sees slot j if j <= i < ends[j],
    in a local layer only within `local`.

    The queries of a key/value head form one axis Q = T·G (G query heads per key/value head), so
    keys and values need no transpose. The mask is a sum: XLA on CPU fuses it with the softmax and
    both products; `where` would be another pass over the scores.
    """
    batch, queries, heads, head_dim = q_BTNH.shape
    kv_heads = k_BKHS.shape[1]
    groups = heads // kv_heads

    # Each reshape names its layout: with one key/value head JAX would split another axis.
    def reshape(x: Array, sizes: tuple[int, ...], *dims: str | None) -> Array:
        return jnp.reshape(x, (batch, *sizes, head_dim), out_sharding=axes("batch", *dims, None))

    q_BTKGH = reshape(q_BTNH, (queries, kv_heads, groups), None, "kv_heads", None)
    q_BKTGH = q_BTKGH.transpose(0, 2, 1, 3, 4)
    q_BKQH = reshape(q_BKTGH, (kv_heads, queries * groups), "kv_heads", None)
    scores = jnp.einsum("BKQH,BKHS->BKQS", q_BKQH, k_BKHS, preferred_element_type=jnp.float32)
    scores = softcapped(scores, softcap)
    bias_BQS = _bias(slots_BT, ends_BS, local, k_BKHS.shape[-1], groups)
    weights = jax.nn.softmax(scores + bias_BQS[:, None], axis=-1).astype(v_BKSH.dtype)
    out_BKQH = jnp.einsum("BKQS,BKSH->BKQH", weights, v_BKSH)
    out_BKTGH = reshape(out_BKQH, (kv_heads, queries, groups), "kv_heads", None, None)
    return reshape(out_BKTGH.transpose(0, 2, 1, 3, 4), (queries, heads), None, "heads")


def _flat_reference(
    q_BTNH: Array,
    k_BSC: Array,
    v_BSC: Array,
    slots_BT: Array,
    local: Local | None,
    *,
    kv_heads: int,
    softcap: float,
) -> Array:
    """Compute `_reference` on keys and values whose heads are contiguous, in place.

    Splitting them into heads would copy the cache. So a query is 0 in the columns of other heads,
    and keeps only its own head's part of the weighted values: K times the products.
    """
    own_heads = kv_heads // shards("kv_heads")

    def attend(
        q_BTNH: Array, k_BSC: Array, v_BSC: Array, slots_BT: Array, local: Local | None
    ) -> Array:
        batch, queries, heads, head_dim = q_BTNH.shape
        groups = heads // own_heads
        own_NK = jnp.arange(heads)[:, None] // groups == jnp.arange(own_heads)[None, :]
        q_BTNKH = jnp.where(own_NK[:, :, None], q_BTNH[:, :, :, None], 0)
        q_BQC = q_BTNKH.reshape(batch, queries * heads, own_heads * head_dim)
        filled = q_BQC.shape[2]
        q_BQC = jnp.pad(q_BQC, ((0, 0), (0, 0), (0, k_BSC.shape[2] - filled)))
        scores = jnp.einsum("BQC,BSC->BQS", q_BQC, k_BSC, preferred_element_type=jnp.float32)
        scores = softcapped(scores, softcap)
        bias_BQS = _bias(slots_BT, None, local, k_BSC.shape[1], heads)
        weights = jax.nn.softmax(scores + bias_BQS, axis=-1)
        out_BQC = jnp.einsum("BQS,BSC->BQC", weights.astype(v_BSC.dtype), v_BSC)
        out_BTNKH = out_BQC[:, :, :filled].reshape(q_BTNKH.shape)
        return jnp.sum(jnp.where(own_NK[:, :, None], out_BTNKH, 0), axis=3)

    return on_shards(attend, q_BTNH, k_BSC, v_BSC, slots_BT, local, like=q_BTNH)


def _bias(
    slots_BT: Array, ends_BS: Array | None, local: Local | None, keys: int, times: int
) -> Array:
    """Return float32 [B or 1, T · times, S], each query `times` times: 0 where it sees a slot."""
    mask_BTS = jnp.arange(keys)[None, None, :] <= slots_BT[:, :, None]
    if ends_BS is not None:
        mask_BTS &= slots_BT[:, :, None] < ends_BS[:, None, :]
    if local is not None:
        mask_BTS &= local.first[:, :, None] <= local.positions[:, None, :]
    return jnp.repeat(jnp.where(mask_BTS, 0.0, jnp.finfo(jnp.float32).min), times, axis=1)
