"""Parts of a decoder block, as NNX modules over a plain dict of arrays (`params`).

A module wraps the arrays as `nnx.Param`; its call mutates nothing. Building one inside a traced
function costs nothing at run time, so the weights stay an ordinary pytree for optax and Orbax.

Suffixes name axes: B rows, T tokens of this call, M = B·T, S cache slots, D embed, F feed-forward,
N query heads, K key/value heads, G query heads per key/value head, H head dim, A = N·H.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from specrl_jax.models import experts
from specrl_jax.models.attention import attend, attend_packed
from specrl_jax.models.config import LinearScaling, ModelConfig, Scaling, YarnScaling
from specrl_jax.models.kv_cache import Layer, write
from specrl_jax.models.parameters import ADAPTED, ADAPTERS, LAYER, adapter_names
from specrl_jax.models.row_slices import put_tokens
from specrl_jax.sharding import axes, platform, reshard, shards

Rope = tuple[Array, Array]  # cos and sin [B, T, 1, H/2]

# Logical axes of one layer's parameters, with those of `join_projections`.
LAYER_AXES: dict[str, tuple[str | None, ...]] = {
    **{name: parameter.layout for name, parameter in (LAYER | ADAPTERS).items()},
    "qkv_proj": ("embed", "kv_heads", None, None),
    "qkv_bias": ("kv_heads", None, None),
    "gate_up_proj": ("embed", None, "mlp"),
    "gate_up_bias": (None, "mlp"),
}


# Activation of the MLP's gate, by its name in Hugging Face's files.
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# Axes of gate_up by platform, others as cpu. XLA on TPU would transpose another order at each call.
_GATE_UP = {"cpu": "DCF", "tpu": "CDF"}


def _gate_up_axes() -> str:
    return _GATE_UP.get(platform(), _GATE_UP["cpu"])


def join_projections(layer: dict[str, Array]) -> dict[str, Array]:
    """Return a layer's parameters, with weights that multiply the same input joined into one array.

    A decode step then has fewer and wider products. qkv is [D, K, G + 2, H]: the queries of a
    key/value head, its key, its value, so that a split over "tensor" falls between heads. gate_up
    is [D, 2, F], on TPU [2, D, F]. Biases likewise, without D. Weights with adapters are not
    joined: each has its own narrow products next to it.
    """

    def heads(kind: str) -> Array:
        q = layer[f"q_{kind}"]
        k = layer[f"k_{kind}"]
        v = layer[f"v_{kind}"]
        shape = (*k.shape[:-1], q.shape[-2] // k.shape[-2], k.shape[-1])
        dims = LAYER_AXES[f"qkv_{kind}"]
        q = jnp.reshape(q, shape, out_sharding=axes(*dims))
        return jnp.concatenate([q, k[..., None, :], v[..., None, :]], axis=-2)

    def gate_up(kind: str) -> Array:
        pair = [layer[f"{name}_{kind}"] for name in ("gate", "up")]
        return jnp.stack(pair, axis=_gate_up_axes().index("C") if kind == "proj" else -2)

    result = dict(layer)
    groups = {"qkv": (("q", "k", "v"), heads), "gate_up": (("gate", "up"), gate_up)}
    for name, (parts, join) in groups.items():
        if any(adapter_names(f"{part}_proj")[0] in layer for part in parts):
            continue
        for kind in ("proj", "bias"):
            if f"{parts[0]}_{kind}" in layer:
                result[f"{name}_{kind}"] = join(kind)
                for part in parts:
                    del result[f"{part}_{kind}"]
    return result


def rms_norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """Compute the root-mean-square norm over the weight's axes, which are the last ones, in float32
    (arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    over = tuple(range(-weight.ndim, 0))
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=over, keepdims=True) + config.norm_eps)
    scale = weight.astype(jnp.float32)[(None,) * (x.ndim - weight.ndim)]
    if config.norm_adds_one:
        scale = 1 + scale
    return (x32 * scale).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: Scaling | None) -> Array:
    """Return angular frequencies [H/2] of rotary positions (arXiv 2104.09864), scaled.

    Llama 3 and YaRN divide the frequencies of long wavelengths by `factor`, keep those of short
    ones, and interpolate in between: Llama 3 by frequency, YaRN by index.
    """
    freqs = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return freqs
    if isinstance(scaling, LinearScaling):
        return freqs / scaling.factor
    if isinstance(scaling, YarnScaling):
        low, high = _yarn_range(head_dim, theta, scaling)
        ramp = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / (high - low), 0, 1)
        return freqs / scaling.factor * ramp + freqs * (1 - ramp)
    turns = scaling.original_max_positions * freqs / (2 * jnp.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = jnp.clip(smooth, 0.0, 1.0)
    return freqs * (smooth + (1 - smooth) / scaling.factor)


def _yarn_range(head_dim: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    """Return the indices of the frequencies between which YaRN interpolates."""

    def index(turns: float) -> float:
        wavelength = scaling.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = index(scaling.beta_fast)
    high = index(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


def rope_tables(positions: Array, config: ModelConfig, local: bool = False) -> Rope:
    """Return cos and sin [B, T, 1, H/2] of int32 positions [B, T]. local: for local layers."""
    theta = config.rope_theta
    scaling = config.rope_scaling
    if local and config.rope_local_theta:
        theta = config.rope_local_theta
        scaling = None
    freqs = rope_frequencies(config.head_dim, theta, scaling)
    angles = positions[:, :, None, None].astype(jnp.float32) * freqs[None, None, None, :]
    if not isinstance(scaling, YarnScaling):
        return jnp.cos(angles), jnp.sin(angles)
    return scaling.magnitude * jnp.cos(angles), scaling.magnitude * jnp.sin(angles)


def apply_rope(x_BTNH: Array, rope: Rope, scale: float = 1.0) -> Array:
    """Rotate the two halves of every head (as Hugging Face does), times `scale`."""
    cos, sin = rope
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return (rotated * scale).astype(x_BTNH.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def float32_einsum(equation: str, layout: PartitionSpec, x: Array, w: Array) -> Array:
    """Compute an einsum whose result is float32; its gradients are products in the type of x."""
    return jnp.einsum(equation, x, w, out_sharding=layout, preferred_element_type=jnp.float32)


def _float32_einsum_forward(equation: str, layout: PartitionSpec, x: Array, w: Array):
    return float32_einsum(equation, layout, x, w), (x, w)


def _float32_einsum_backward(
    equation: str, layout: PartitionSpec, factors: tuple[Array, Array], grad: Array
):
    product = functools.partial(jnp.einsum, equation, out_sharding=layout)
    return jax.vjp(product, *factors)[1](grad.astype(factors[0].dtype))


float32_einsum.defvjp(_float32_einsum_forward, _float32_einsum_backward)


class Place(NamedTuple):
    """Slots and positions of a call's T tokens, and the attention mask between them."""

    starts: Array | None = None  # int32 [B], cache slot of each row's first token; None: 0
    ends: Array | None = None  # int32 [B, T], see `attend_packed`; only where starts is None
    positions: Array | None = None  # int32 [B, T], only where starts is None and layers are local
    # int32 [B, T], slots of the tokens in packed sequences that have keys; then the two above are
    # for all slots. None: the tokens are the sequences.
    slots: Array | None = None
    window: int | Array | None = None  # of a local layer; None: it sees everything
    counted: Array | None = None  # bool [B, T], tokens counted in the load of experts; None: all
    routing: Array | None = None  # [B, T, k], experts to replay, see `experts.route`; None: none


class LayerModule(nnx.Module):
    """Parameters `names` of a layer; `weight` returns one in compute type and layout."""

    names: tuple[str, ...] = ()

    def __init__(self, config: ModelConfig, params: dict[str, Array]):
        self.config = config
        adapted = [name for name in self.names if name in ADAPTED]
        adapters = [adapter for name in adapted for adapter in adapter_names(name)]
        for name in (*self.names, *adapters):
            setattr(self, name, nnx.Param(params[name]) if name in params else None)

    def weight(self, name: str) -> Array:
        # Cast before the gather over "fsdp": half the bytes in bfloat16.
        value = getattr(self, name)[...].astype(self.config.dtype)
        return reshard(value, *LAYER_AXES[name])

    def project(self, equation: str, x: Array, name: str, *dims: str | None, part=None) -> Array:
        """Compute an einsum with `{name}_proj`, plus `{name}_bias` if the model has one.

        part: an index on the axis before the last, to use only that part of both.
        """
        cut = (lambda w: w) if part is None else (lambda w: w[..., part, :])
        weight = cut(self.weight(f"{name}_proj"))
        out = self.multiply(equation, x, weight, f"{name}_proj", *dims)
        out = self.adapt(out, equation, x, f"{name}_proj", *dims)
        if getattr(self, f"{name}_bias", None) is not None:
            bias = cut(self.weight(f"{name}_bias"))
            out = out + bias[(None,) * (out.ndim - bias.ndim)]
        return out

    def multiply(self, equation: str, x: Array, w: Array, name: str, *dims: str | None) -> Array:
        """Compute x·W with the weight `name`: in float32 if `adapt` adds to it."""
        if getattr(self, adapter_names(name)[0], None) is None:
            return jnp.einsum(equation, x, w, out_sharding=axes(*dims))
        return float32_einsum(equation, axes(*dims), x, w)

    def adapt(self, out: Array, equation: str, x: Array, name: str, *dims: str | None) -> Array:
        """Add the adapters of W to x·W of the einsum `equation`: scale·(x·A)·B.

        Only the sum is rounded to the compute type: otherwise a change below half the last bit of
        x·W would vanish. out: from `multiply`.

        The path is through the narrow A and B, so the gradient of W, as wide as W, is never
        computed. For "BTD,DNH->BTNH" the products are "BTD,Dr->BTr" and "BTr,rNH->BTNH".
        """
        a, b = adapter_names(name)
        if getattr(self, a, None) is None:
            return out
        factors, result = equation.split("->")
        x_axes, weight_axes = factors.split(",")
        rows = "".join(axis for axis in x_axes if axis in result)
        inputs = "".join(axis for axis in x_axes if axis not in result)
        outputs = "".join(axis for axis in weight_axes if axis not in inputs)
        layout = axes("batch", *(None,) * len(rows))
        down = jnp.einsum(f"{x_axes},{inputs}r->{rows}r", x, self.weight(a), out_sharding=layout)
        up = f"{rows}r,r{outputs}->{result}"
        added = float32_einsum(up, axes(*dims), down, self.weight(b))
        return (out + self.config.lora.scale * added).astype(self.config.dtype)


class Attention(LayerModule):
    """Self-attention over a KV cache, or over a call's tokens, whose keys and values it returns."""

    names = (
        *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
        *("q_bias", "k_bias", "v_bias", "qkv_bias", "o_bias", "q_norm", "k_norm"),
        *("q_all_norm", "k_all_norm"),
    )

    def __call__(self, x_BTD, rope, place: Place, cache: Layer | None = None):
        q, k, v = self._heads(x_BTD)
        if self.q_norm is not None:
            q = rms_norm(q, self.weight("q_norm"), self.config)
            k = rms_norm(k, self.weight("k_norm"), self.config)
        if self.q_all_norm is not None:
            q = rms_norm(q, self.weight("q_all_norm"), self.config)
            k = rms_norm(k, self.weight("k_all_norm"), self.config)
        q = apply_rope(q, rope, self.config.query_scale)  # while it is float32
        k = apply_rope(k, rope)
        options = {
            "kernels": self.config.kernels,
            "window": place.window,
            "softcap": self.config.attn_softcap,
        }
        if place.starts is None:
            if place.slots is None:
                cache = (k, v)
            else:
                cache = (put_tokens(cache[0], k, place.slots), put_tokens(cache[1], v, place.slots))
            attended = attend_packed(q, *cache, place.ends, place.positions, place.slots, **options)
        else:
            cache = write(cache, k, v, place.starts)
            attended = attend(q, cache, place.starts, self.config.num_kv_heads, **options)
        return self._output(attended), cache

    def _output(self, out_BTNH: Array) -> Array:
        """Return [B, T, D], by one product over A: over N and H, XLA on CPU copies the weight."""
        flat = (*out_BTNH.shape[:2], -1)
        out_BTA = jnp.reshape(out_BTNH, flat, out_sharding=axes("batch", None, "heads"))
        weight = self.weight("o_proj")
        w_AD = jnp.reshape(weight, (-1, weight.shape[-1]), out_sharding=axes("heads", None))
        dims = ("batch", None, None)
        out = self.multiply("BTA,AD->BTD", out_BTA, w_AD, "o_proj", *dims)
        out = self.adapt(out, "BTNH,NHD->BTD", out_BTNH, "o_proj", *dims)
        return out if self.o_bias is None else out + self.weight("o_bias")[None, None]

    def _heads(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        """Return queries [B, T, N, H], keys and values [B, T, K, H]."""
        if self.qkv_proj is None:
            q = self.project("BTD,DNH->BTNH", x_BTD, "q", "batch", None, "heads", None)
            k = self.project("BTD,DKH->BTKH", x_BTD, "k", "batch", None, "kv_heads", None)
            v = self.project("BTD,DKH->BTKH", x_BTD, "v", "batch", None, "kv_heads", None)
            return q, k, v
        dims = ("batch", None, "kv_heads", None, None)
        rows, width, embed = x_BTD.shape
        # In wide steps the smaller array is split: the weight, or the product on a device. XLA on
        # GPU splits the product at no cost, when rotating queries and writing keys.
        if platform() != "gpu" and width > 1 and rows // shards("batch") * width > embed:
            q = self.project("BTD,DKGH->BTKGH", x_BTD, "qkv", *dims, part=slice(None, -2))
            k = self.project("BTD,DKH->BTKH", x_BTD, "qkv", *dims[:-1], part=-2)
            v = self.project("BTD,DKH->BTKH", x_BTD, "qkv", *dims[:-1], part=-1)
        else:
            all_BTKXH = self.project("BTD,DKXH->BTKXH", x_BTD, "qkv", *dims)
            q = all_BTKXH[..., :-2, :]
            k = all_BTKXH[..., -2, :]
            v = all_BTKXH[..., -1, :]
        shape = (rows, width, self.config.num_heads, self.config.head_dim)
        return jnp.reshape(q, shape, out_sharding=axes("batch", None, "heads", None)), k, v


class MLP(LayerModule):
    """Gated feed-forward: SwiGLU or GeGLU (arXiv 2002.05202)."""

    names = (
        *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
        *("gate_bias", "up_bias", "gate_up_bias", "down_bias"),
    )

    def __call__(self, x_BTD: Array) -> Array:
        # Rows and tokens as one axis: over two, XLA on CPU transposes the inputs of a weight's
        # gradient and recomputes SiLU and its derivative.
        flat = axes("batch", None)
        x_MD = jnp.reshape(x_BTD, (-1, x_BTD.shape[-1]), out_sharding=flat)
        if self.gate_up_proj is None:
            gate_MF = self.project("MD,DF->MF", x_MD, "gate", "batch", "mlp")
            up_MF = self.project("MD,DF->MF", x_MD, "up", "batch", "mlp")
        else:
            both_MCF = self.project(
                f"MD,{_gate_up_axes()}->MCF", x_MD, "gate_up", "batch", None, "mlp"
            )
            gate_MF = both_MCF[:, 0]
            up_MF = both_MCF[:, 1]
        hidden_MF = ACTIVATIONS[self.config.activation](gate_MF) * up_MF
        out_MD = self.project("MF,FD->MD", hidden_MF, "down", "batch", None)
        return jnp.reshape(out_MD, x_BTD.shape, out_sharding=axes("batch", None, None))


class Experts(LayerModule):
    """Gated feed-forwards, of which a router chooses a few for each token."""

    names = ("router", "expert_gate", "expert_up", "expert_down")

    def __call__(self, x_BTD: Array, place: Place) -> tuple[Array, experts.Routed]:
        config = self.config

        def flatten(x: Array | None) -> Array | None:
            if x is None:
                return None
            layout = axes("batch", *(None,) * (x.ndim - 2))
            return jnp.reshape(x, (-1, *x.shape[2:]), out_sharding=layout)

        x_MD = flatten(x_BTD)
        router_DE = reshard(self.router[...].astype(jnp.float32), None, None)
        probs_ME, weights_Mk, ids_Mk = experts.route(
            x_MD, router_DE, config.experts_per_token, config.norm_topk, flatten(place.routing)
        )
        weights = [self.weight(name) for name in self.names[1:]]
        out_MD = experts.mix(ACTIVATIONS[config.activation], x_MD, weights_Mk, ids_Mk, *weights)
        layout = axes("batch", None, None)
        out_BTD = jnp.reshape(out_MD, x_BTD.shape, out_sharding=layout)
        ids_BTk = jnp.reshape(ids_Mk, (*x_BTD.shape[:2], -1), out_sharding=layout)
        load = experts.load(probs_ME, ids_Mk, flatten(place.counted))
        return out_BTD, experts.Routed(load, ids_BTk)


class DecoderLayer(nnx.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    With post norms: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))); without pre norms
    the inner ones are left out. A call also returns `experts.Routed`, None without experts.
    """

    def __init__(self, config: ModelConfig, params: dict[str, Array]):
        self.config = config
        self.attention = Attention(config, params)
        self.mlp = MLP(config, params) if config.dense else Experts(config, params)
        mlp_norm = "pre_mlp_norm" if config.post_norms else "mlp_norm"
        self.pre_norms = self._norms(params, config.pre_norms, "attn_norm", mlp_norm)
        self.post_norms = self._norms(params, config.post_norms, "post_attn_norm", "post_mlp_norm")

    def _norms(self, params: dict[str, Array], present: bool, *names: str) -> nnx.List:
        """Return the weights of the norms of attention and MLP; None if there are none."""
        return nnx.List([nnx.Param(params[name]) if present else None for name in names])

    def __call__(self, x_BTD, rope: Rope, place: Place, cache: Layer | None = None):
        out_BTD, cache = self.attention(self._norm(x_BTD, self.pre_norms[0]), rope, place, cache)
        x_BTD = self._add(x_BTD, out_BTD, self.post_norms[0])
        normed = self._norm(x_BTD, self.pre_norms[1])
        routed = None
        if self.config.dense:
            out_BTD = self.mlp(normed)
        else:
            out_BTD, routed = self.mlp(normed, place)
        return self._add(x_BTD, out_BTD, self.post_norms[1]), cache, routed

    def _norm(self, x_BTD: Array, weight: nnx.Param | None) -> Array:
        return x_BTD if weight is None else rms_norm(x_BTD, weight[...], self.config)

    def _add(self, x_BTD: Array, out_BTD: Array, weight: nnx.Param | None) -> Array:
        """Add the output of attention or MLP, normed and scaled, to the residual stream."""
        out_BTD = self._norm(out_BTD, weight)
        factor = self.config.residual_multiplier
        return x_BTD + (out_BTD if factor == 1.0 else factor * out_BTD)
