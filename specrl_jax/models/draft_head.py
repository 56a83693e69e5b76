"""Learned draft head: one decoder layer that guesses what the policy has not computed yet.

At token y_i the head reads the policy's state that chose it, h_{i-1}, and its embedding:

    x_i = U norm(h_{i-1}) + V norm(embed(y_i))        z_i = norm(layer(x_0 ... x_i))

z_i approximates h_i, which the policy has yet to compute: the policy's output head turns it into
scores for y_{i+1}, and the head continues from it. Embeddings and output head are the policy's.
After EAGLE (arXiv 2401.15077) and the MTP module of DeepSeek-V3 (2412.19437, section 2.2).
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import Layer
from specrl_jax.models.layers import (
    LAYER_AXES,
    DecoderLayer,
    Place,
    join_projections,
    rms_norm,
    rope_tables,
)
from specrl_jax.models.parameters import LAYER, Params, select
from specrl_jax.models.transformer import compute_head, convert_weight
from specrl_jax.sharding import axes, reshard

_NORMS = ("state_norm", "embed_norm", "final_norm")
_JOINS = ("state_proj", "embed_proj")  # U and V, [D, D]
# Of the stored arrays. Compute layouts are those of `sharding.COMPUTE`.
_OWN_AXES = dict.fromkeys(_NORMS, (None,)) | dict.fromkeys(_JOINS, ("embed", None))


class DraftHead(nnx.Module):
    """Head over its parameters, a nested dict; reads the policy's states and embeddings."""

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        for name in _OWN_AXES:
            setattr(self, name, nnx.Param(params[name]))
        self.layer = DecoderLayer(config, params["layer"])

    def __call__(
        self,
        states_BTD: Array,
        embedded_BTD: Array,
        start_B: Array | None = None,
        layer: Layer | None = None,
        *,
        positions_BT: Array | None = None,
        ends_BT: Array | None = None,
    ) -> tuple[Array, Layer]:
        """Return z [B, T, D] at T tokens, and the cache's layer with these tokens written.

        states: the policy's, after its final norm, that chose the tokens; or the head's own.
        embedded: the tokens' embeddings. Others: see `Transformer`; the tokens start in the cache's
        slots `start`, or they are packed tries, whose keys and values [B, T, K, H] are returned
        instead of the layer.
        """
        if start_B is not None:
            positions_BT = start_B[:, None] + jnp.arange(states_BTD.shape[1])[None, :]
        states_BTD = rms_norm(states_BTD, self.state_norm[...], self.config)
        embedded_BTD = rms_norm(embedded_BTD, self.embed_norm[...], self.config)
        x_BTD = self._project("state_proj", states_BTD) + self._project("embed_proj", embedded_BTD)
        rope = rope_tables(positions_BT, self.config)
        x_BTD, layer, _ = self.layer(x_BTD, rope, Place(start_B, ends_BT), layer)
        return rms_norm(x_BTD, self.final_norm[...], self.config), layer

    def _project(self, name: str, x_BTD: Array) -> Array:
        weight = reshard(getattr(self, name)[...].astype(self.config.dtype), None, None)
        return jnp.einsum("BTD,DE->BTE", x_BTD, weight, out_sharding=axes("batch", None, None))


@functools.partial(jax.jit, static_argnums=0)
def init_draft_head(config: ModelConfig, policy: Params) -> Params:
    """Return initial parameters, float32: the policy's last global layer and norm, U = V = 1."""

    def place(x: Array, *dims: str | None) -> Array:
        copied = jnp.copy(x).astype(jnp.float32)
        return jax.sharding.reshard(copied, axes(*dims, stored=True))

    size = config.embed_dim
    last = _last_plain_layer(config)
    norm = jnp.zeros(size) if config.norm_adds_one else jnp.ones(size)
    own = {"state_norm": norm, "embed_norm": norm, "final_norm": policy["final_norm"]}
    own |= {name: jnp.eye(size) for name in _JOINS}
    params = {name: place(x, *_OWN_AXES[name]) for name, x in own.items()}
    params["layer"] = {
        name: place(policy["layers"][name][last], *parameter.layout)
        for name, parameter in select(LAYER, config).items()
    }
    return params


def _last_plain_layer(config: ModelConfig) -> int:
    """Return the last global, rotated layer, as the head is one; the last if there is none."""
    kinds = (config.local_layers, config.unrotated_layers)
    plain = [i for i in range(config.num_layers) if not any(kind[i] for kind in kinds if kind)]
    return max(plain, default=config.num_layers - 1)


def draft_head_size(config: ModelConfig) -> int:
    """Return the number of parameters."""
    size = config.embed_dim
    layer = sum(math.prod(p.shape(config)) for p in select(LAYER, config).values())
    return layer + len(_JOINS) * size**2 + len(_NORMS) * size


@functools.partial(jax.jit, static_argnames=("config", "vocab"))
def copy_draft_head(
    config: ModelConfig, params: Params, policy: Params, counts: Array | None, *, vocab: int
) -> Params:
    """Return the rollout's copy in the compute type, except norm scales, with joined projections.

    vocab: number of tokens the head drafts, the most frequent by `counts` int32 [V]; 0: all. The
    copy then includes them, and their rows of the policy's output, as `vocab`.
    """
    convert = functools.partial(convert_weight, config)
    layer = {n: convert(n, x, LAYER_AXES[n]) for n, x in params["layer"].items()}
    own = {n: convert(n, x, (None,) * x.ndim) for n, x in params.items() if n != "layer"}
    copied = own | {"layer": join_projections(layer)}
    if not vocab:
        return copied
    output = compute_head(policy["embed" if config.tie_embeddings else "lm_head"], config.dtype)
    ids, rows = take_frequent(output, counts, vocab)
    return copied | {"vocab": {"ids": ids, "rows": rows}}


def take_frequent(output_VD: Array, counts: Array, number: int) -> tuple[Array, Array]:
    """Return ids int32 [number] of the most frequent tokens, and their rows of the policy's output.

    Ids are in order; of equally frequent ones the first are used (FR-Spec, arXiv 2502.14856).
    counts: int32 [V].
    """
    _, ids = jax.lax.top_k(counts, number)
    ids = jnp.sort(ids)
    rows = output_VD.at[ids].get(out_sharding=axes(None, None))
    return ids, reshard(rows, "vocab", None)
