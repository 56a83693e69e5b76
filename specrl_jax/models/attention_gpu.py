"""Attention by kernels for GPUs; the arguments are those of `attention`.

Steps of one token go to JAX's Pallas kernel for decoding, which reads only the slots that a row has
filled. Wider steps and packed sequences go to cuDNN, which takes the mask as an array, but keeps no
scores in memory.
"""

import math
import warnings

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import Layer, keys_and_values
from specrl_jax.sharding import on_shards

try:
    with warnings.catch_warnings():  # jax 0.11 and later say that it will be removed
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import decode_attention
except ImportError:
    decode_attention = None

AHEAD_OF_TIME = ("decode",)  # cuDNN needs the device
_LEAST_CAPABILITY = 8.0  # Ampere
_LEAST_BLOCK = 16  # slots
_BLOCK = 64
_SPLITS = 16  # parts of a row that are computed side by side
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
    if use == "decode":
        if decode_attention is None:
            return f"jax {jax.__version__} has no kernel decode_attention"
        if size < 16 or size & (size - 1):
            return f"heads must be 16, 32, 64, ... wide, these are {size}"
        if slots % _LEAST_BLOCK:
            return f"a cache must have a multiple of {_LEAST_BLOCK} slots, this has {slots}"
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
    """Compute `attention.attend`, without window and cap: see `refusal`."""
    local = _decode if q_BTNH.shape[1] == 1 else _verify
    held = keys_and_values(layer, kv_heads, q_BTNH.shape[3])
    return on_shards(local, q_BTNH, *held, start_B, like=q_BTNH)


def _decode(q_B1NH: Array, k_BKHS: Array, v_BKSH: Array, start_B: Array) -> Array:
    # The kernel turns [B, S, K, H] to [B, K, S, H]: nothing moves where the cache lies so.
    k_BSKH, v_BSKH = k_BKHS.transpose(0, 3, 1, 2), v_BKSH.transpose(0, 2, 1, 3)
    if extra := -k_BSKH.shape[1] % _LEAST_BLOCK:
        pads = (0, 0), (0, extra), (0, 0), (0, 0)
        k_BSKH, v_BSKH = jnp.pad(k_BSKH, pads), jnp.pad(v_BSKH, pads)
    slots = k_BSKH.shape[1]
    block = math.gcd(slots, _BLOCK)
    out = decode_attention.gqa(
        q_B1NH[:, 0],
        k_BSKH,
        v_BSKH,
        kv_seq_len=start_B + 1,
        sm_scale=1.0,
        block_k=block,
        k_splits=math.gcd(slots // block, _SPLITS),
        interpret=_INTERPRET,
    )
    return out[:, None].astype(q_B1NH.dtype)


def _verify(q_BTNH: Array, k_BKHS: Array, v_BKSH: Array, start_B: Array) -> Array:
    slots_BT = start_B[:, None] + jnp.arange(q_BTNH.shape[1])[None, :]
    mask_BTS = jnp.arange(k_BKHS.shape[-1])[None, None, :] <= slots_BT[:, :, None]
    k_BSKH, v_BSKH = k_BKHS.transpose(0, 3, 1, 2), v_BKSH.transpose(0, 2, 1, 3)
    return _cudnn(q_BTNH, k_BSKH, v_BSKH, mask_BTS)


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
    ends = () if ends_BT is None else (ends_BT,)
    return on_shards(_packed, q_BTNH, k_BTKH, v_BTKH, *ends, like=q_BTNH)


def _packed(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, *ends: Array) -> Array:
    if not ends:
        return _cudnn(q_BTNH, k_BTKH, v_BTKH, None)
    tokens = q_BTNH.shape[1]
    extra = tokens % 2  # cuDNN's backward pass with a mask takes even lengths alone
    pads = (0, 0), (0, extra)
    q, k, v = (jnp.pad(x, (*pads, (0, 0), (0, 0))) for x in (q_BTNH, k_BTKH, v_BTKH))
    # A padded token sees itself.
    ends_BT = jnp.pad(ends[0], pads, constant_values=tokens + extra)
    slots = jnp.arange(tokens + extra)
    i, j = slots[None, :, None], slots[None, None, :]
    return _cudnn(q, k, v, (j <= i) & (i < ends_BT[:, None, :]))[:, :tokens]


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
