"""Attention on GPUs by kernels, on a shard; the arguments are those of `attention`.

Steps over the cache, of one or several tokens, use a Pallas kernel that reads only the slots that a
row has filled and that are in its window, once for all queries of a key/value head: flash-decoding.
Packed sequences use the kernels of `attention_gpu_packed`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from specrl_jax.models import attention_gpu_packed, gpu
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.gpu import triton
from specrl_jax.models.scores import Local, softcapped

_LEAST_ROWS = 16  # of a tensor-core product
_MOST_ROWS = 64  # queries per program; more would not fit in its registers
_MOST_SLOTS = 64  # keys that a program reads at a time
# Bytes of these keys, at most; a program's queries take at most twice as many. The smallest shared
# memory has room for both, and for keys and values that are read ahead.
_BLOCK_BYTES = 2**14
_PROGRAMS = 512  # enough to keep a large GPU busy; with fewer, several share a row's slots
_LOWEST = float(jnp.finfo(jnp.float32).min)
_INTERPRET = False  # for tests


def refusal(use: str, model: ModelConfig, slots: int) -> str:
    """Return why kernels cannot run the model, or ""; the same for each use and all slots."""
    size = model.head_dim
    largest = attention_gpu_packed.LARGEST_HEAD
    if reason := gpu.refusal():
        return reason
    if not 16 <= size <= largest or size & (size - 1):
        return f"heads must be 16, 32, .. {largest} wide, these are {size}"
    return ""


def attend(
    q_BTNH: Array, kv_BCSH: Array, start_B: Array, *, window: int | None, softcap: float
) -> Array:
    """Compute `attention.attend` over a cache whose layers are one array.

    A key/value head's T·G queries are the rows of one product: a block per program.
    """
    batch, width, heads, size = q_BTNH.shape
    kv_heads = kv_BCSH.shape[1] // 2
    slots = kv_BCSH.shape[2]
    groups = heads // kv_heads
    rows = width * groups
    row_bytes = size * kv_BCSH.dtype.itemsize
    block_rows = max(pl.next_power_of_2(rows), _LEAST_ROWS)
    block_rows = min(block_rows, _MOST_ROWS, 2 * _BLOCK_BYTES // row_bytes)
    row_blocks = pl.cdiv(rows, block_rows)
    block = min(_MOST_SLOTS, _BLOCK_BYTES // row_bytes)
    window = slots if window is None else window
    # The slots that a row's queries see may start and end within a block.
    blocks = min(pl.cdiv(slots, block), pl.cdiv(window + width - 2, block) + 1)
    parts = min(pl.cdiv(_PROGRAMS, batch * kv_heads * row_blocks), blocks)
    sizes = _Sizes(block_rows, block, pl.cdiv(blocks, parts), window, softcap)
    kernel = functools.partial(_attend_block, sizes)
    shape = (None, None, slots, size)
    out_BPTKGH, log_sums_BPTKG = pl.pallas_call(
        kernel,
        grid=(batch, kv_heads, row_blocks, parts),
        in_specs=[
            pl.BlockSpec((None, width, None, groups, size), lambda b, k, r, p: (b, 0, k, 0, 0)),
            pl.BlockSpec(shape, lambda b, k, r, p: (b, 2 * k, 0, 0)),
            pl.BlockSpec(shape, lambda b, k, r, p: (b, 2 * k + 1, 0, 0)),
            pl.BlockSpec((None,), lambda b, k, r, p: (b,)),
        ],
        out_specs=[
            pl.BlockSpec(
                (None, None, width, None, groups, size), lambda b, k, r, p: (b, p, 0, k, 0, 0)
            ),
            pl.BlockSpec((None, None, width, None, groups), lambda b, k, r, p: (b, p, 0, k, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, parts, width, kv_heads, groups, size), q_BTNH.dtype),
            jax.ShapeDtypeStruct((batch, parts, width, kv_heads, groups), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=_INTERPRET,
        name="attend_rows",
    )(
        q_BTNH.reshape(batch, width, kv_heads, groups, size),
        kv_BCSH,
        kv_BCSH,
        start_B,
    )
    if parts == 1:
        return out_BPTKGH.reshape(q_BTNH.shape)
    # A part weighs as much as the sum of its exponentials.
    weights_BPTKG = jax.nn.softmax(log_sums_BPTKG, axis=1)
    out_BTKGH = jnp.sum(out_BPTKGH * weights_BPTKG[..., None], axis=1)
    return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


class _Sizes(NamedTuple):
    """Sizes and settings shared by the programs of a call."""

    rows: int  # of a block of queries
    slots: int  # of a block of keys
    steps: int  # blocks of keys per program
    window: int
    softcap: float


def _attend_block(sizes: _Sizes, q_ref, k_ref, v_ref, start_ref, out_ref, sums_ref) -> None:
    """Compute outputs and log Σ exp(scores) of some rows over `steps` blocks of slots.

    Row r belongs to query r // G, which sees the slots up to its own, within its window.
    """
    width, groups, size = q_ref.shape
    rows = pl.program_id(2) * sizes.rows + jnp.arange(sizes.rows)
    rows = jnp.minimum(rows, width * groups - 1)  # the last row pads the last block
    query = rows // groups
    head = rows % groups
    stop = start_ref[...] + query + 1  # slot after those that a query sees
    begin = jnp.maximum(stop - sizes.window, 0)
    least = jnp.min(begin)
    most = jnp.max(stop)
    q = q_ref[query, head]

    def add_block(number: Array, carry: tuple) -> tuple:
        out, highest, total = carry
        slot = number * sizes.slots + jnp.arange(sizes.slots)
        part = pl.ds(number * sizes.slots, sizes.slots)
        read = ((least <= slot) & (slot < most))[:, None]
        seen = (begin[:, None] <= slot[None, :]) & (slot[None, :] < stop[:, None])
        k = triton.load(k_ref.at[part], mask=read, other=0)
        scores = jnp.where(seen, softcapped(triton.dot(q, k.T), sizes.softcap), _LOWEST)
        higher = jnp.maximum(highest, jnp.max(scores, axis=1))
        shrink = jnp.exp(highest - higher)
        weights = jnp.exp(scores - higher[:, None])
        v = triton.load(v_ref.at[part], mask=read, other=0)
        out = out * shrink[:, None] + triton.dot(weights.astype(v.dtype), v)
        return out, higher, total * shrink + jnp.sum(weights, axis=1)

    first = least // sizes.slots + pl.program_id(3) * sizes.steps
    nothing = (
        jnp.zeros((sizes.rows, size), jnp.float32),
        jnp.full(sizes.rows, _LOWEST),
        jnp.zeros(sizes.rows, jnp.float32),
    )
    last = jnp.minimum(first + sizes.steps, pl.cdiv(most, sizes.slots))
    out, highest, total = jax.lax.fori_loop(first, last, add_block, nothing)
    # The highest score counts 1. A part that sees nothing has no score and no weight.
    total = jnp.maximum(total, 1.0)
    out_ref[query, head] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[query, head] = highest + jnp.log(total)


def attend_packed(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    ends_BT: Array,
    local: Local | None,
    *,
    softcap: float,
) -> Array:
    """Compute `attention.attend_packed`, with its gradient."""
    batch, tokens, _, size = q_BTNH.shape
    tiling = attention_gpu_packed.tiling(tokens, size, q_BTNH.dtype)
    extra = -tokens % max(max(blocks.queries, blocks.keys) for blocks in tiling)

    def padded(x: Array, value: int = 0) -> Array:
        x = jnp.broadcast_to(x, (batch, *x.shape[1:]))
        pads = ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))
        return jnp.pad(x, pads, constant_values=value) if extra else x

    # A padded token sees itself, and is seen only by padded ones.
    mask = attention_gpu_packed.Mask(padded(ends_BT, tokens + extra), None, None)
    if local is not None:
        mask = mask._replace(first=padded(local.first), positions=padded(local.positions))
    out_BTNH = attention_gpu_packed.attend(
        padded(q_BTNH), padded(k_BTKH), padded(v_BTKH), mask, softcap, _INTERPRET
    )
    return out_BTNH[:, :tokens]
