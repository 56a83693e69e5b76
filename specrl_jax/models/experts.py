"""Mixture of experts: each token passes through k of E feed-forwards (arXiv 1701.06538).

Tokens are sorted by expert, and a grouped product multiplies each run of them with its expert's
weights: no token is dropped, and none is padded. A shard of the batch sorts its own tokens; each of
its devices has a part of every expert's width F, so that no token travels.

Suffixes as in `layers`, and E experts, k experts of a token, C = M·k copies of tokens.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import axes


class Load(NamedTuple):
    """Sums over tokens of what a router did, float32; of a stack of layers [L, ...]."""

    tokens: Array  # [E], tokens that each expert got
    probs: Array  # [E], probabilities of each expert
    count: Array  # [], tokens


def route(x_MD: Array, router_DE: Array, chosen: int, norm: bool) -> tuple[Array, Array, Array]:
    """Return probabilities [M, E], and weights and ids [M, k] of each token's experts.

    All in float32, as a bfloat16 router would choose other experts. norm: weights add up to 1.
    """
    layout = axes("batch", None)
    scores = jnp.einsum("MD,DE->ME", x_MD.astype(jnp.float32), router_DE, out_sharding=layout)
    probs_ME = jax.nn.softmax(scores, axis=-1)
    weights_Mk, ids_Mk = jax.lax.top_k(probs_ME, chosen)
    if norm:
        weights_Mk = weights_Mk / jnp.sum(weights_Mk, axis=-1, keepdims=True)
    return probs_ME, weights_Mk, ids_Mk


def mix(
    activation: Callable[[Array], Array],
    x_MD: Array,
    weights_Mk: Array,
    ids_Mk: Array,
    gate_EDF: Array,
    up_EDF: Array,
    down_EFD: Array,
) -> Array:
    """Return the weighted sum of the outputs of each token's experts, [M, D]."""
    own = functools.partial(_mix_own, activation)
    mapped = jax.shard_map(own, out_specs=axes("batch", "mlp", None), check_vma=False)
    # Each device has summed over its part of F.
    return jnp.sum(mapped(x_MD, weights_Mk, ids_Mk, gate_EDF, up_EDF, down_EFD), axis=1)


def _mix_own(activation, x_MD, weights_Mk, ids_Mk, gate_EDF, up_EDF, down_EFD) -> Array:
    """Return [M, 1, D] of a device's tokens and its part of F."""
    tokens, chosen = ids_Mk.shape
    ids_C = ids_Mk.reshape(-1)
    order_C = jnp.argsort(ids_C, stable=True)
    sizes_E = jnp.bincount(ids_C, length=gate_EDF.shape[0])
    sorted_CD = x_MD[order_C // chosen]
    gate_CF = jax.lax.ragged_dot(sorted_CD, gate_EDF, sizes_E)
    up_CF = jax.lax.ragged_dot(sorted_CD, up_EDF, sizes_E)
    out_CD = jax.lax.ragged_dot(activation(gate_CF) * up_CF, down_EFD, sizes_E)
    back_C = jnp.argsort(order_C)
    out_MkD = out_CD[back_C].reshape(tokens, chosen, -1)
    return jnp.sum(out_MkD * weights_Mk[..., None].astype(out_CD.dtype), axis=1)[:, None]


def load(probs_ME: Array, ids_Mk: Array, counted_M: Array | None) -> Load:
    """Return the load of the experts; counted: bool, the tokens to count, None: all."""
    counted_M = jnp.ones_like(probs_ME[:, 0]) if counted_M is None else counted_M
    counted_M = counted_M.astype(jnp.float32)
    chosen_ME = jnp.sum(jax.nn.one_hot(ids_Mk, probs_ME.shape[-1]), axis=1)
    return Load(
        tokens=jnp.sum(chosen_ME * counted_M[:, None], axis=0),
        probs=jnp.sum(probs_ME * counted_M[:, None], axis=0),
        count=jnp.sum(counted_M),
    )


def balance_loss(load: Load) -> Array:
    """Return E · Σ_e f_e · p_e, over all layers as in transformers (arXiv 2101.03961, eq. 4).

    f: an expert's tokens for each token, p: its mean probability; k where all get as many.
    """
    count = jnp.maximum(jnp.sum(load.count), 1)
    share_E = jax.lax.stop_gradient(jnp.sum(load.tokens, axis=0)) / count
    return share_E.size * jnp.sum(share_E * jnp.sum(load.probs, axis=0) / count)
