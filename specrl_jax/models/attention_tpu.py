"""Attention on TPUs by Pallas kernels that ship with JAX, on a shard; arguments: see `attention`.

Rows of the cache use ragged_paged_attention, which reads only the slots that a row has filled: a
cache layer [B, S, 2 K, H] is split into pages in place. Packed sequences use splash_attention
(FlashAttention, arXiv 2205.14135), which skips blocks that no query sees.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.scores import Local
from specrl_jax.sharding import shards

_LANES = 128
_LEAST_PAGE = 16  # slots
_PAGE = 128
_SLOTS_AT_ONCE = 256  # of a row that are read ahead; a row reads at most this many too many
# The kernel takes a block of queries at a time. For every row with queries in it, it computes
# scores of the whole block and drops those of other rows. So a block has the queries of one row, or
# of the few that fill a register's 8 sublanes, and no row is in two blocks.
_LEAST_QUERIES = 8
_MOST_QUERIES = 128
_BLOCK = 512  # queries, and keys, per block of a packed sequence
_INTERPRET = False  # for packed sequences, in tests
_OUTPUTS = "packed_attention"  # what the backward pass keeps; masks are rebuilt


def refusal(use: str, model: ModelConfig, slots: int) -> str:
    """Return why the kernel for `use` cannot run the model and a cache of `slots`, or ""."""
    if use == "packed":
        return ""
    if model.head_dim % _LANES:
        return f"heads must be a multiple of {_LANES} wide, these are {model.head_dim}"
    if slots % _LEAST_PAGE:
        return f"a cache must have a multiple of {_LEAST_PAGE} slots, this has {slots}"
    both = 2 * model.num_kv_heads // shards("kv_heads")
    packed = both * jnp.dtype(model.dtype).itemsize / 4  # in rows of registers
    if packed not in (1, 2, 4, 8) and packed % 8:
        return f"1, 2, 4 or 8 key/value heads must be on a device, here are {both // 2}"
    return ""


def attend(
    q_BTNH: Array, kv_BSCH: Array, start_B: Array, *, window: int | None, softcap: float
) -> Array:
    """Compute `attention.attend` over a cache whose layers are one array."""
    rows, width, heads, size = q_BTNH.shape
    if extra := -kv_BSCH.shape[1] % _LEAST_PAGE:  # a copy, for caches whose slots do not fit
        kv_BSCH = jnp.pad(kv_BSCH, ((0, 0), (0, extra), (0, 0), (0, 0)))
    page = math.gcd(kv_BSCH.shape[1], _PAGE)
    pages = kv_BSCH.shape[1] // page
    at_once = max(_LEAST_QUERIES // width, 1)
    out = ragged.ragged_paged_attention(
        q_BTNH.reshape(-1, heads, size),
        kv_BSCH.reshape(-1, page, *kv_BSCH.shape[2:]),
        start_B + width,
        jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages),
        jnp.arange(rows + 1, dtype=jnp.int32) * width,
        jnp.full(1, rows, jnp.int32),
        sliding_window=window,
        soft_cap=softcap or None,
        num_kv_pages_per_block=min(_SLOTS_AT_ONCE // page, pages),
        num_queries_per_block=min(rows * width, at_once * width, _MOST_QUERIES),
    )
    return out.reshape(q_BTNH.shape)


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
    rows, tokens = q_BTNH.shape[:2]
    block = min(_BLOCK, -(-tokens // _LANES) * _LANES)
    extra = -tokens % block  # no real query sees the keys after it

    def padded(x_BTNH: Array) -> Array:
        return jnp.pad(x_BTNH, ((0, 0), (0, extra), (0, 0), (0, 0))).swapaxes(1, 2)

    # Padded tokens see themselves and some before them.
    pads = ((0, 0), (0, extra))
    ends_BT = jnp.pad(ends_BT, pads, constant_values=tokens + extra)
    if local is not None:
        local = Local(*(jnp.pad(jnp.broadcast_to(x, (rows, tokens)), pads) for x in local))
    one = jax.checkpoint(
        functools.partial(_one_sequence, block=block, softcap=softcap),
        policy=jax.checkpoint_policies.save_only_these_names(_OUTPUTS),
    )
    out_BNTH = jax.lax.map(
        lambda x: one(*x), (padded(q_BTNH), padded(k_BTKH), padded(v_BTKH), ends_BT, local)
    )
    return out_BNTH.swapaxes(1, 2)[:, :tokens]


def _one_sequence(
    q_NTH: Array,
    k_KTH: Array,
    v_KTH: Array,
    ends_T: Array,
    local: Local | None,
    *,
    block: int,
    softcap: float,
) -> Array:
    i = jnp.arange(q_NTH.shape[1])[:, None]
    j = jnp.arange(q_NTH.shape[1])[None, :]
    mask = (j <= i) & (i < ends_T[None, :])
    if local is not None:
        mask &= local.first[:, None] <= local.positions[None, :]
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = splash.make_splash_mha(
        mask[None],  # the same for all heads
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        attn_logits_soft_cap=softcap or None,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=_OUTPUTS,
        interpret=_INTERPRET,
    )
    # The library makes this an array, which it then cannot test in a trace.
    kernel.fwd_mask_info = kernel.fwd_mask_info._replace(is_dynamic_mask=True)
    return kernel(q_NTH, k_KTH, v_KTH)
