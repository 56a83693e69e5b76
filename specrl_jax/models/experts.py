"""Mixture of experts: each token passes through k of E feed-forwards (arXiv 1701.06538).

Tokens are sorted by expert, and each run of them is multiplied with its expert's weights: no token
is dropped. A batch shard sorts its own tokens; each of its devices has a part of every expert's
width F, so no token is sent.

Suffixes as in `layers`, plus E experts, k experts per token, C = M·k copies of tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import axes, platform, shards


class Routed(NamedTuple):
    """Decisions of a layer's router."""

    load: "Load"
    ids: Array  # int32 [B, T, k], experts of each token


class Load(NamedTuple):
    """Sums over tokens of a router's decisions, float32; for a stack of layers [L, ...]."""

    tokens: Array  # [E], tokens that each expert got
    probs: Array  # [E], probabilities of each expert
    count: Array  # [], tokens


def route(
    x_MD: Array, router_DE: Array, chosen: int, norm: bool, replayed_Mk: Array | None = None
) -> tuple[Array, Array, Array]:
    """Return probabilities [M, E], and weights and ids [M, k] of each token's experts.

    All in float32, as a bfloat16 router would choose other experts. norm: weights add up to 1.
    replayed: ids + 1 that replace the router's choice but not its weights (R3, arXiv 2510.11370);
    0: the router chooses.
    """
    layout = axes("batch", None)
    scores = jnp.einsum("MD,DE->ME", x_MD.astype(jnp.float32), router_DE, out_sharding=layout)
    probs_ME = jax.nn.softmax(scores, axis=-1)
    _, ids_Mk = jax.lax.top_k(probs_ME, chosen)
    if replayed_Mk is not None:
        ids_Mk = jnp.where(replayed_Mk > 0, replayed_Mk.astype(jnp.int32) - 1, ids_Mk)
    # Without a gather, whose gradient XLA for TPUs would sort.
    chosen_MkE = jax.nn.one_hot(ids_Mk, probs_ME.shape[-1])
    weights_Mk = jnp.sum(chosen_MkE * probs_ME[:, None], axis=-1)
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
    tokens = x_MD.shape[0] // shards("batch")
    few = tokens <= _FEW_TOKENS.get(platform(), _FEW_TOKENS_ELSEWHERE)
    product = _through_all if few else _PRODUCTS.get(platform(), _through_blocks)
    mapped = jax.shard_map(
        lambda *arrays: product(activation, *arrays)[:, None],
        out_specs=axes("batch", "mlp", None),
        check_vma=False,
    )
    weights_Mk = weights_Mk.astype(x_MD.dtype)
    # Each device has summed over its part of F.
    return jnp.sum(mapped(x_MD, weights_Mk, ids_Mk, gate_EDF, up_EDF, down_EFD), axis=1)


def _through_all(activation, x_MD, weights_Mk, ids_Mk, gate_EDF, up_EDF, down_EFD) -> Array:
    """Return [M, D]; all experts compute all tokens, with weight 0 unless chosen.

    For few tokens: the experts' weights are read once, which a decode step must do anyway.
    """
    chosen_MkE = jax.nn.one_hot(ids_Mk, gate_EDF.shape[0], dtype=x_MD.dtype)
    weights_ME = jnp.sum(chosen_MkE * weights_Mk[..., None], axis=1)
    hidden_EMF = activation(jnp.einsum("MD,EDF->EMF", x_MD, gate_EDF))
    hidden_EMF = hidden_EMF * jnp.einsum("MD,EDF->EMF", x_MD, up_EDF) * weights_ME.T[..., None]
    return jnp.einsum("EMF,EFD->MD", hidden_EMF, down_EFD)


def _through_runs(activation, x_MD, weights_Mk, ids_Mk, gate_EDF, up_EDF, down_EFD) -> Array:
    """Return [M, D] by grouped products, which XLA has on TPU; elsewhere they cost E / k times."""
    order_C = jnp.argsort(ids_Mk.reshape(-1), stable=True)
    slots_C = jnp.zeros_like(order_C).at[order_C].set(jnp.arange(ids_Mk.size), unique_indices=True)
    slots_Mk = slots_C.reshape(ids_Mk.shape)
    sizes_E = jnp.bincount(ids_Mk.reshape(-1), length=gate_EDF.shape[0])
    sorted_CD = _spread(x_MD, order_C, slots_Mk)
    gate_CF = jax.lax.ragged_dot(sorted_CD, gate_EDF, sizes_E)
    up_CF = jax.lax.ragged_dot(sorted_CD, up_EDF, sizes_E)
    out_CD = jax.lax.ragged_dot(activation(gate_CF) * up_CF, down_EFD, sizes_E)
    return jnp.sum(_collect(out_CD, order_C, slots_Mk) * weights_Mk[..., None], axis=1)


@jax.custom_vjp
def _spread(x_MD: Array, order_C: Array, slots_Mk: Array) -> Array:
    """Return the copies of tokens in the order of their experts, [C, D].

    order: of each sorted copy, its number among all copies. slots: of each copy, where it is
    sorted to. The gradients of this and of `_collect` are each other's gather: those of a gather by
    itself would be added up by a scatter, which XLA for TPUs sorts.
    """
    return x_MD[order_C // slots_Mk.shape[1]]


@jax.custom_vjp
def _collect(sorted_CD: Array, order_C: Array, slots_Mk: Array) -> Array:
    """Return the copies of each token, [M, k, D], of sorted ones; arguments as of `_spread`."""
    return sorted_CD[slots_Mk]


_spread.defvjp(
    lambda x_MD, *places: (_spread(x_MD, *places), places),
    lambda places, grad_CD: (jnp.sum(_collect(grad_CD, *places), axis=1), None, None),
)
_collect.defvjp(
    lambda sorted_CD, *places: (_collect(sorted_CD, *places), places),
    lambda places, grad_MkD: (grad_MkD.reshape(-1, grad_MkD.shape[-1])[places[0]], None, None),
)


def _through_blocks(activation, x_MD, weights_Mk, ids_Mk, gate_EDF, up_EDF, down_EFD) -> Array:
    """Return [M, D] by a batched product over blocks of b tokens of one expert each.

    Blocks are zero-padded: at most E more blocks than the tokens fill. Each takes its own copy of
    its expert's weights.
    """
    experts = gate_EDF.shape[0]
    copies = ids_Mk.size
    size = min(max(copies // experts, _BLOCKS[0]), _BLOCKS[1])
    count = copies // size + experts
    ids_C = ids_Mk.reshape(-1)
    order_C = jnp.argsort(ids_C, stable=True)
    sizes_E = jnp.bincount(ids_C, length=experts)
    blocks_E = -(-sizes_E // size)
    first_E = size * (jnp.cumsum(blocks_E) - blocks_E) - (jnp.cumsum(sizes_E) - sizes_E)
    sorted_slots_C = first_E[ids_C[order_C]] + jnp.arange(copies)
    slots_C = jnp.zeros_like(order_C).at[order_C].set(sorted_slots_C, unique_indices=True)
    sources = jnp.full(count * size, x_MD.shape[0])  # per slot; past the end: no token
    sources = sources.at[slots_C].set(jnp.arange(copies) // ids_Mk.shape[1], unique_indices=True)
    owner_n = jnp.repeat(jnp.arange(experts), blocks_E, total_repeat_length=count)
    x_nbD = x_MD.at[sources].get(mode="fill", fill_value=0).reshape(count, size, -1)
    hidden_nbF = activation(jnp.einsum("nbD,nDF->nbF", x_nbD, gate_EDF[owner_n]))
    hidden_nbF = hidden_nbF * jnp.einsum("nbD,nDF->nbF", x_nbD, up_EDF[owner_n])
    out_nbD = jnp.einsum("nbF,nFD->nbD", hidden_nbF, down_EFD[owner_n])
    out_MkD = out_nbD.reshape(count * size, -1)[slots_C].reshape(*ids_Mk.shape, -1)
    return jnp.sum(out_MkD * weights_Mk[..., None], axis=1)


_PRODUCTS = {"tpu": _through_runs}  # by platform; others by blocks
_BLOCKS = (16, 128)  # smallest and largest b
# Tokens of a shard up to which reading weights, not computing products, takes the time.
_FEW_TOKENS = {"cpu": 8}
_FEW_TOKENS_ELSEWHERE = 256


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

    f: an expert's tokens per token, p: its mean probability; k if all get equally many.
    """
    count = jnp.maximum(jnp.sum(load.count), 1)
    share_E = jax.lax.stop_gradient(jnp.sum(load.tokens, axis=0)) / count
    return share_E.size * jnp.sum(share_E * jnp.sum(load.probs, axis=0) / count)
