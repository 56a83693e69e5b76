"""Attention among packed tokens on GPUs, by kernels that skip what no query sees.

FlashAttention-2 (arXiv 2307.08691): a program keeps a block of queries and loops over blocks of
keys; scores never reach memory, and the backward pass recomputes them. XLA lists, for each block of
queries, the blocks of keys that it may see, and a program loops over its list.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from specrl_jax.models.gpu import triton
from specrl_jax.models.scores import softcapped

_LOWEST = float(jnp.finfo(jnp.float32).min)
_LEAST_BLOCK = 16  # of a tensor-core product


class Mask(NamedTuple):
    """Attention mask: query i sees key j if j <= i < ends[j] and first[i] <= positions[j]."""

    ends: Array  # int32 [B, T]
    first: Array | None  # int32 [B, T], of queries; None: no window
    positions: Array | None  # int32 [B, T], of keys; None: no window


class Blocks(NamedTuple):
    """Block sizes of a program."""

    queries: int
    keys: int
    warps: int


class Tiling(NamedTuple):
    """Blocks of the three kernels."""

    forward: Blocks
    d_queries: Blocks
    d_keys: Blocks


_STAGES = 2  # blocks of a list that are being loaded at a time
# By item size and maximum head size. Larger blocks would not fit in a program's registers, or in
# the shared memory of an L4. The backward blocks for bfloat16 and heads of 128 are those that
# tokamax tuned on an H100.
_TILINGS = {
    2: {
        64: Tiling(Blocks(128, 64, 4), Blocks(64, 64, 4), Blocks(64, 64, 4)),
        128: Tiling(Blocks(128, 64, 8), Blocks(64, 32, 4), Blocks(32, 64, 4)),
        256: Tiling(Blocks(64, 32, 8), Blocks(64, 16, 8), Blocks(16, 64, 8)),
    },
    4: {
        128: Tiling(Blocks(64, 32, 8), Blocks(64, 16, 8), Blocks(16, 64, 8)),
        256: Tiling(Blocks(32, 16, 4), Blocks(32, 16, 4), Blocks(16, 16, 8)),
    },
}
LARGEST_HEAD = 256


class Inputs(NamedTuple):
    """Arrays of a kernel, or a program's view of them.

    I: blocks of the program's own tokens, J: blocks of the other side.
    """

    q: Array  # [B, T, N, H]; in a program over keys [B, T, K, G, H]
    k: Array  # [B, T, K, H]
    v: Array  # [B, T, K, H]
    mask: Mask
    index: Array  # int32 [B, I, J], the blocks to visit
    count: Array  # int32 [B, I], their number


class Outputs(NamedTuple):
    """Arrays of the output that the backward pass needs, or a program's view of them."""

    d_out: Array  # as the queries
    sums: Array  # float32 [B, N, T], log Σ exp(scores); in a program over keys [B, K, G, T]
    deltas: Array  # float32, like `sums`: the product of the output and its gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, mask: Mask, softcap: float, interpret: bool
) -> Array:
    """Compute `attention.attend_packed` for a shard's queries, [B, T, N, H].

    T must be a multiple of all blocks of `tiling`, and every query must see itself.
    interpret: Run the kernels as plain JAX, for tests.
    """
    return _forward(q_BTNH, k_BTKH, v_BTKH, mask, softcap, interpret)[0]


def tiling(tokens: int, size: int, dtype) -> Tiling:
    """Return the blocks for `tokens` tokens with heads of this size and type."""
    by_size = _TILINGS[jnp.dtype(dtype).itemsize]
    chosen = by_size[next(most for most in by_size if size <= most)]
    most = max(pl.next_power_of_2(tokens), _LEAST_BLOCK)
    return Tiling(
        *(x._replace(queries=min(x.queries, most), keys=min(x.keys, most)) for x in chosen)
    )


def visible(mask: Mask, blocks: Blocks) -> Array:
    """Return bool [B, T / queries, T / keys]: whether a block of queries may see a block of keys.

    Exact without a window. With one, it compares the first position that a block of queries sees
    with the last of a block of keys, which includes a few blocks too many.
    """
    tokens = mask.ends.shape[1]
    queries_I = jnp.arange(0, tokens, blocks.queries)  # the first of each block
    keys_J = jnp.arange(0, tokens, blocks.keys)
    ends_BJ = jnp.max(_cut(mask.ends, blocks.keys), axis=2)
    seen_BIJ = (keys_J[None, :] < queries_I[:, None] + blocks.queries)[None]
    seen_BIJ &= queries_I[None, :, None] < ends_BJ[:, None, :]
    if mask.first is not None:
        first_BI = jnp.min(_cut(mask.first, blocks.queries), axis=2)
        last_BJ = jnp.max(_cut(mask.positions, blocks.keys), axis=2)
        seen_BIJ &= first_BI[:, :, None] <= last_BJ[:, None, :]
    return seen_BIJ


def _cut(x_BT: Array, block: int) -> Array:
    return x_BT.reshape(x_BT.shape[0], -1, block)


def list_blocks(visible_BIJ: Array) -> tuple[Array, Array]:
    """Return int32 [B, I, J], the visible J of each I in order, and their number [B, I]."""
    none = visible_BIJ.shape[2]  # sorts last
    index_BIJ = jnp.where(visible_BIJ, jnp.arange(none)[None, None, :], none)
    return jnp.sort(index_BIJ, axis=2), jnp.sum(visible_BIJ, axis=2, dtype=jnp.int32)


# --- Programs -------------------------------------------------------------------------------------


def _seen(i: Array, j: Array, ends: Array, first: Array | None, positions: Array | None) -> Array:
    """Return the mask, from arrays that broadcast."""
    seen = (j <= i) & (i < ends)
    return seen if first is None else seen & (first <= positions)


def _forward_block(softcap: float, blocks: Blocks, x: Inputs, out_ref, sums_ref) -> None:
    """Compute the outputs of a block of queries and their `sums`."""
    i = pl.program_id(0) * blocks.queries + jnp.arange(blocks.queries)
    first = None if x.mask.first is None else x.mask.first[...]
    q = x.q[...]

    def add_block(number: Array, carry: tuple) -> tuple:
        out, highest, total = carry
        part, seen = _seen_keys(blocks, x, number, i, first)
        scores = jnp.where(seen, softcapped(triton.dot(q, x.k[part].T), softcap), _LOWEST)
        higher = jnp.maximum(highest, jnp.max(scores, axis=1))
        shrink = jnp.exp(highest - higher)
        weights = jnp.exp(scores - higher[:, None])
        v = x.v[part]
        out = out * shrink[:, None] + triton.dot(weights.astype(v.dtype), v)
        return out, higher, total * shrink + jnp.sum(weights, axis=1)

    nothing = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(blocks.queries, _LOWEST),
        jnp.zeros(blocks.queries, jnp.float32),
    )
    # Unseen keys count until a query sees its first one, then they weigh nothing.
    out, highest, total = jax.lax.fori_loop(0, x.count[...], add_block, nothing)
    out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[...] = highest + jnp.log(total)


def _seen_keys(
    blocks: Blocks, x: Inputs, number: Array, i: Array, first: Array | None
) -> tuple[pl.Slice, Array]:
    """Return the slots of a block in the list, and its mask, bool [queries, keys]."""
    start = x.index[number] * blocks.keys
    part = pl.ds(start, blocks.keys)
    j = start + jnp.arange(blocks.keys)
    positions = None
    if first is not None:
        first = first[:, None]
        positions = x.mask.positions[part][None, :]
    return part, _seen(i[:, None], j[None, :], x.mask.ends[part][None, :], first, positions)


def _d_scores(
    softcap: float, scores: Array, seen: Array, d_weights: Array, sums: Array, deltas: Array
) -> tuple[Array, Array]:
    """Return weights, and the gradient of scores given that of weights."""
    scores = softcapped(scores, softcap)
    weights = jnp.exp(jnp.where(seen, scores, _LOWEST) - sums)
    d_scores = weights * (d_weights - deltas)
    if softcap:
        d_scores = d_scores * (1 - jnp.square(scores / softcap))
    return weights, d_scores


def _d_queries_block(softcap: float, blocks: Blocks, x: Inputs, y: Outputs, dq_ref) -> None:
    """Compute the gradient of a block of queries."""
    i = pl.program_id(0) * blocks.queries + jnp.arange(blocks.queries)
    first = None if x.mask.first is None else x.mask.first[...]
    q = x.q[...]
    d_out = y.d_out[...]
    sums = y.sums[...][:, None]
    deltas = y.deltas[...][:, None]

    def add_block(number: Array, dq: Array) -> Array:
        part, seen = _seen_keys(blocks, x, number, i, first)
        k = x.k[part]
        scores = triton.dot(q, k.T)
        d_weights = triton.dot(d_out, x.v[part].T)
        _, d_scores = _d_scores(softcap, scores, seen, d_weights, sums, deltas)
        return dq + triton.dot(d_scores.astype(k.dtype), k)

    dq = jax.lax.fori_loop(0, x.count[...], add_block, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = dq.astype(dq_ref.dtype)


def _d_keys_block(softcap: float, blocks: Blocks, x: Inputs, y: Outputs, dk_ref, dv_ref) -> None:
    """Compute the gradients of a block of keys and values; scores are [keys, queries]."""
    j = pl.program_id(0) * blocks.keys + jnp.arange(blocks.keys)
    ends = x.mask.ends[...]
    positions = None if x.mask.first is None else x.mask.positions[...][:, None]
    k = x.k[...]
    v = x.v[...]

    def add_block(number: Array, carry: tuple, group: Array) -> tuple:
        dk, dv = carry
        start = x.index[number] * blocks.queries
        part = pl.ds(start, blocks.queries)
        i = start + jnp.arange(blocks.queries)
        first = None if positions is None else x.mask.first[part][None, :]
        seen = _seen(i[None, :], j[:, None], ends[:, None], first, positions)
        q = x.q[part, group]
        d_out = y.d_out[part, group]
        sums = y.sums[group, part][None, :]
        deltas = y.deltas[group, part][None, :]
        scores = triton.dot(k, q.T)
        d_weights = triton.dot(v, d_out.T)
        weights, d_scores = _d_scores(softcap, scores, seen, d_weights, sums, deltas)
        dv = dv + triton.dot(weights.astype(d_out.dtype), d_out)
        return dk + triton.dot(d_scores.astype(q.dtype), q), dv

    def add_head(group: Array, carry: tuple) -> tuple:
        add = functools.partial(add_block, group=group)
        return jax.lax.fori_loop(0, x.count[...], add, carry)

    nothing = jnp.zeros(k.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(0, x.q.shape[1], add_head, (nothing, nothing))
    dk_ref[...] = dk.astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


# --- Calls ----------------------------------------------------------------------------------------


def _call(kernel, blocks: Blocks, grid: tuple[int, ...], interpret: bool, **specs):
    return pl.pallas_call(
        kernel,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=_STAGES),
        interpret=interpret,
        **specs,
    )


def _query_specs(x: Inputs, blocks: Blocks) -> tuple[Inputs, pl.BlockSpec, pl.BlockSpec]:
    """Return a program over queries' view of the inputs, of the output and of `sums`.

    Its indices are a block, a head and a sequence.
    """
    tokens, heads, size = x.q.shape[1:]
    groups = heads // x.k.shape[2]
    own = pl.BlockSpec((None, blocks.queries, None, size), lambda i, n, b: (b, i, n, 0))
    every = pl.BlockSpec((None, tokens, None, size), lambda i, n, b: (b, 0, n // groups, 0))
    keys = pl.BlockSpec((None, tokens), lambda i, n, b: (b, 0))
    queries = pl.BlockSpec((None, blocks.queries), lambda i, n, b: (b, i))
    is_local = x.mask.first is not None
    return (
        Inputs(
            q=own,
            k=every,
            v=every,
            mask=Mask(keys, queries, keys) if is_local else Mask(keys, None, None),
            index=pl.BlockSpec((None, None, x.index.shape[2]), lambda i, n, b: (b, i, 0)),
            count=pl.BlockSpec((None, None), lambda i, n, b: (b, i)),
        ),
        own,
        pl.BlockSpec((None, None, blocks.queries), lambda i, n, b: (b, n, i)),
    )


def _forward(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, mask: Mask, softcap: float, interpret: bool
) -> tuple[Array, tuple]:
    """Return the output, and what the backward pass needs."""
    batch, tokens, heads, size = q_BTNH.shape
    blocks = tiling(tokens, size, q_BTNH.dtype).forward
    x = Inputs(q_BTNH, k_BTKH, v_BTKH, mask, *list_blocks(visible(mask, blocks)))
    inputs, own, sums = _query_specs(x, blocks)
    out_BTNH, sums_BNT = _call(
        functools.partial(_forward_block, softcap, blocks),
        blocks,
        (tokens // blocks.queries, heads, batch),
        interpret,
        in_specs=[inputs],
        out_specs=[own, sums],
        out_shape=[
            jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype),
            jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32),
        ],
        name="attend_packed",
    )(x)
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, mask, out_BTNH, sums_BNT)


def _backward(softcap: float, interpret: bool, kept: tuple, d_out_BTNH: Array) -> tuple:
    """Return the gradients of queries, keys and values, and None for the mask."""
    q_BTNH, k_BTKH, v_BTKH, mask, out_BTNH, sums_BNT = kept
    products = out_BTNH.astype(jnp.float32) * d_out_BTNH.astype(jnp.float32)
    deltas_BNT = jnp.sum(products, axis=3).swapaxes(1, 2)
    _, tokens, _, size = q_BTNH.shape
    chosen = tiling(tokens, size, q_BTNH.dtype)
    x = Inputs(q_BTNH, k_BTKH, v_BTKH, mask, None, None)
    y = Outputs(d_out_BTNH, sums_BNT, deltas_BNT)
    dq_BTNH = _d_queries(softcap, interpret, chosen.d_queries, x, y)
    dk_BTKH, dv_BTKH = _d_keys(softcap, interpret, chosen.d_keys, x, y)
    return dq_BTNH, dk_BTKH, dv_BTKH, None


def _d_queries(softcap: float, interpret: bool, blocks: Blocks, x: Inputs, y: Outputs) -> Array:
    index_BIJ, count_BI = list_blocks(visible(x.mask, blocks))
    x = x._replace(index=index_BIJ, count=count_BI)
    batch, tokens, heads, _ = x.q.shape
    inputs, own, sums = _query_specs(x, blocks)
    return _call(
        functools.partial(_d_queries_block, softcap, blocks),
        blocks,
        (tokens // blocks.queries, heads, batch),
        interpret,
        in_specs=[inputs, Outputs(own, sums, sums)],
        out_specs=own,
        out_shape=jax.ShapeDtypeStruct(x.q.shape, x.q.dtype),
        name="attend_packed_d_queries",
    )(x, y)


def _d_keys(
    softcap: float, interpret: bool, blocks: Blocks, x: Inputs, y: Outputs
) -> tuple[Array, Array]:
    batch, tokens, heads, size = x.q.shape
    kv_heads = x.k.shape[2]
    groups = heads // kv_heads
    index_BJI, count_BJ = list_blocks(visible(x.mask, blocks).swapaxes(1, 2))
    in_groups = (batch, tokens, kv_heads, groups, size)
    x = x._replace(q=x.q.reshape(in_groups), index=index_BJI, count=count_BJ)
    y = Outputs(
        d_out=y.d_out.reshape(in_groups),
        sums=y.sums.reshape(batch, kv_heads, groups, tokens),
        deltas=y.deltas.reshape(batch, kv_heads, groups, tokens),
    )
    own = pl.BlockSpec((None, blocks.keys, None, size), lambda j, k, b: (b, j, k, 0))
    every = pl.BlockSpec((None, tokens, None, groups, size), lambda j, k, b: (b, 0, k, 0, 0))
    sums = pl.BlockSpec((None, None, groups, tokens), lambda j, k, b: (b, k, 0, 0))
    keys = pl.BlockSpec((None, blocks.keys), lambda j, k, b: (b, j))
    queries = pl.BlockSpec((None, tokens), lambda j, k, b: (b, 0))
    inputs = Inputs(
        q=every,
        k=own,
        v=own,
        mask=Mask(keys, None, None) if x.mask.first is None else Mask(keys, queries, keys),
        index=pl.BlockSpec((None, None, index_BJI.shape[2]), lambda j, k, b: (b, j, 0)),
        count=pl.BlockSpec((None, None), lambda j, k, b: (b, j)),
    )
    return _call(
        functools.partial(_d_keys_block, softcap, blocks),
        blocks,
        (tokens // blocks.keys, kv_heads, batch),
        interpret,
        in_specs=[inputs, Outputs(every, sums, sums)],
        out_specs=[own, own],
        out_shape=[jax.ShapeDtypeStruct(x.k.shape, x.k.dtype)] * 2,
        name="attend_packed_d_keys",
    )(x, y)


attend.defvjp(_forward, _backward)
