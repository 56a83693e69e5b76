"""Attention by kernels for GPUs; the arguments are those of `attention`.

Steps over the cache, of one token or of several, go to a Pallas kernel that reads only the slots
that a row has filled, and reads them once for all queries of a key/value head: flash-decoding.
Packed sequences go to cuDNN, which takes the mask as an array, but keeps no scores in memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import Layer
from specrl_jax.sharding import on_shards

try:  # jax 0.11 and later say that it will be removed
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

AHEAD_OF_TIME = ("cached",)  # cuDNN needs the device
_LEAST_CAPABILITY = 8.0  # Ampere
_LEAST_ROWS = 16  # of a product by tensor cores
_MOST_ROWS = 64  # queries of a program; more would not fit its registers
_MOST_SLOTS = 64  # keys that a program reads at once
_BLOCK_BYTES = 2**14  # of these keys, at most: four such blocks fit the smallest shared memory
_PROGRAMS = 512  # keep a large GPU busy; where there are fewer, several share a row's slots
_LOWEST = float(jnp.finfo(jnp.float32).min)
_INTERPRET = False  # for tests


def refusal(use: str, model: ModelConfig, slots: int) -> str:
    """Return why the kernel for `use` cannot take the model and a cache of `slots`, or ""."""
    size = model.head_dim
    if (capability := _capability()) < _LEAST_CAPABILITY:
        return f"kernels need compute capability {_LEAST_CAPABILITY:g}, this GPU has {capability:g}"
    if any(model.local_layers) and model.sliding_window < slots:
        return f"local layers see a window of {model.sliding_window} tokens, kernels see all"
    if model.attn_softcap:
        return f"scores have a soft cap of {model.attn_softcap:g}, kernels have none"
    if use == "cached":
        if triton is None:
            return f"jax {jax.__version__} has no Triton backend of Pallas"
        if size < 16 or size & (size - 1):
            return f"heads must be 16, 32, 64, ... wide, these are {size}"
    elif model.dtype != "bfloat16" or size % 8 or size > 128:
        return f"cuDNN needs bfloat16 and heads of 8, 16, .. 128, these are {model.dtype} of {size}"
    return ""


def _capability() -> float:
    """Return the compute capability of the mesh's GPUs, present or absent."""
    device = jax.sharding.get_mesh().devices.flat[0]
    return float(getattr(device, "compute_capability", _LEAST_CAPABILITY))


def attend(
    q_BTNH: Array,
    layer: Layer,
    start_B: Array,
    kv_heads: int,
    *,
    window: None = None,
    softcap: float = 0.0,
) -> Array:
    """Compute `attention.attend` of a cache whose layers are one array, without window and cap: see
    `refusal`. The array's shape says kv_heads."""
    return on_shards(_attend_on_shard, q_BTNH, *layer, start_B, like=q_BTNH)


def _attend_on_shard(q_BTNH: Array, kv_BCSH: Array, start_B: Array) -> Array:
    """Attend with a key/value head's T·G queries as rows of one product: a block in a program."""
    batch, width, heads, size = q_BTNH.shape
    kv_heads = kv_BCSH.shape[1] // 2
    slots = kv_BCSH.shape[2]
    groups = heads // kv_heads
    rows = width * groups
    block_rows = min(max(pl.next_power_of_2(rows), _LEAST_ROWS), _MOST_ROWS)
    row_blocks = pl.cdiv(rows, block_rows)
    block = min(_MOST_SLOTS, _BLOCK_BYTES // (size * kv_BCSH.dtype.itemsize))
    blocks = pl.cdiv(slots, block)
    parts = min(pl.cdiv(_PROGRAMS, batch * kv_heads * row_blocks), blocks)
    kernel = functools.partial(_attend_block, block_rows, block, pl.cdiv(blocks, parts))
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


def _attend_block(
    block_rows: int, block: int, steps: int, q_ref, k_ref, v_ref, start_ref, out_ref, sums_ref
) -> None:
    """Compute outputs and log Σ exp(scores) of some rows over `steps` blocks of slots.

    Row r is of query r // G, which sees the slots up to its own.
    """
    width, groups, size = q_ref.shape
    rows = pl.program_id(2) * block_rows + jnp.arange(block_rows)
    rows = jnp.minimum(rows, width * groups - 1)  # the last row fills the last block up
    query = rows // groups
    head = rows % groups
    seen = start_ref[...] + query + 1  # slots
    most = jnp.max(seen)
    q = q_ref[query, head]

    def add_block(number: Array, carry: tuple) -> tuple:
        out, highest, total = carry
        slot = number * block + jnp.arange(block)
        part = pl.ds(number * block, block)
        filled = (slot < most)[:, None]
        k = triton.load(k_ref.at[part], mask=filled, other=0)
        scores = jnp.where(slot[None, :] < seen[:, None], triton.dot(q, k.T), _LOWEST)
        higher = jnp.maximum(highest, jnp.max(scores, axis=1))
        shrink = jnp.exp(highest - higher)
        weights = jnp.exp(scores - higher[:, None])
        v = triton.load(v_ref.at[part], mask=filled, other=0)
        out = out * shrink[:, None] + triton.dot(weights.astype(v.dtype), v)
        return out, higher, total * shrink + jnp.sum(weights, axis=1)

    first = pl.program_id(3) * steps
    nothing = (
        jnp.zeros((block_rows, size), jnp.float32),
        jnp.full(block_rows, _LOWEST),
        jnp.zeros(block_rows, jnp.float32),
    )
    last = jnp.minimum(first + steps, pl.cdiv(most, block))
    out, highest, total = jax.lax.fori_loop(first, last, add_block, nothing)
    # The highest score counts 1. A part that sees nothing has no score, and no weight.
    total = jnp.maximum(total, 1.0)
    out_ref[query, head] = (out / total[:, None]).astype(out_ref.dtype)
    sums_ref[query, head] = highest + jnp.log(total)


def attend_packed(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    ends_BT: Array | None,
    *,
    local: None = None,
    softcap: float = 0.0,
) -> Array:
    """Compute `attention.attend_packed`, without window and cap, with its gradient."""
    return on_shards(_packed_on_shard, q_BTNH, k_BTKH, v_BTKH, ends_BT, like=q_BTNH)


def _packed_on_shard(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, ends_BT: Array | None) -> Array:
    if ends_BT is None:
        return _cudnn(q_BTNH, k_BTKH, v_BTKH, None)
    tokens = q_BTNH.shape[1]
    extra = tokens % 2  # cuDNN's backward pass with a mask takes even lengths alone
    pads = ((0, 0), (0, extra))
    padded = [jnp.pad(x, (*pads, (0, 0), (0, 0))) for x in (q_BTNH, k_BTKH, v_BTKH)]
    # A padded token sees itself.
    ends_BT = jnp.pad(ends_BT, pads, constant_values=tokens + extra)
    j = jnp.arange(tokens + extra)[None, None, :]
    i = j.swapaxes(1, 2)
    return _cudnn(*padded, (j <= i) & (i < ends_BT[:, None, :]))[:, :tokens]


def _cudnn(q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, mask_BTS: Array | None) -> Array:
    """Attend by cuDNN. mask: bool, True where a query sees a key; None: causal."""
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=None if mask_BTS is None else mask_BTS[:, None],
        is_causal=mask_BTS is None,
        scale=1.0,
        implementation="xla" if _INTERPRET else "cudnn",
    )
