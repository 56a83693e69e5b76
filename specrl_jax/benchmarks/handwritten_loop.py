"""A hand-written decode loop to hold the engine's against: what the arithmetic alone costs.

Plain `jnp` over the same weights and the same cache, layers unrolled, one token a step for rows at
positions of their own, in one `jax.lax.while_loop`. It keeps what a rollout must keep (tokens,
their log-probs, lengths, which rows are done) and nothing else: no drafts, no rungs, no
end-of-sequence beyond a row's last slot. Weights that multiply the same input are joined.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.benchmarks.sampling import gumbel, inverse_cdf, race
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import KVCache, cache_slots
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import spec

Sampler = Callable[[Array, Array, Array], Array]  # logits [B, V], seeds [B, 2], positions [B]

SAMPLERS: dict[str, Sampler] = {
    "race": race,  # the engine's
    "gumbel": gumbel,
    "inverse_cdf": inverse_cdf,
    "argmax": lambda logits, seeds, positions: jnp.argmax(logits, axis=-1).astype(jnp.int32),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Responses so far. tokens, logprobs: [B, R]; lens, last, prompt_lens: [B]; seeds: [B, 2]."""

    tokens: Array
    logprobs: Array
    lens: Array
    last: Array
    prompt_lens: Array
    seeds: Array


@functools.partial(jax.jit, static_argnums=0)
def floor_weights(model: ModelConfig, weights: Params) -> Params:
    """The rollout's weights as matrices."""

    def layer(w: dict[str, Array]) -> dict[str, Array]:
        norms = {name: w[name] for name in ("attn_norm", "mlp_norm")}
        heads = {name: w[name] for name in ("q_norm", "k_norm") if name in w}
        return (
            norms
            | heads
            | {
                "qkv": w["qkv_proj"].reshape(model.embed_dim, -1),
                "o": w["o_proj"].reshape(-1, model.embed_dim),
                "gate_up": jnp.concatenate([w["gate_up_proj"][:, i] for i in (0, 1)], axis=1),
                "down": w["down_proj"],
            }
        )

    head = weights["embed"] if model.tie_embeddings else weights["lm_head"]
    return {
        "embed": weights["embed"],
        "head": head,
        "final_norm": weights["final_norm"],
        "layers": tuple(layer(w) for w in weights["layers"]),
    }


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def decode(
    model: ModelConfig, sampler: str, weights: Params, cache: KVCache, state: State, steps: Array
) -> tuple[KVCache, State]:
    """`steps` steps, or fewer where all rows are full. weights: of `floor_weights`."""
    slots, room = cache_slots(cache), state.tokens.shape[1]

    def go_on(carry) -> Array:
        step, _, state = carry
        return (step < steps) & jnp.any(state.lens < room)

    def step(carry):
        count, cache, state = carry
        position = jnp.clip(state.prompt_lens + state.lens - 1, 0, slots - 1)
        # Hand-written code names no layout; the loop's arrays keep theirs.
        layouts = spec("batch", None), jax.tree.map(lambda x: jax.typeof(x).sharding.spec, cache)
        forward = jax.sharding.auto_axes(functools.partial(_forward, model), out_sharding=layouts)
        logits, cache = forward(weights, cache, state.last, position)
        token = SAMPLERS[sampler](logits, state.seeds, state.lens)
        score = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        logprob = score - jax.nn.logsumexp(logits, axis=-1)
        return count + 1, cache, _append(state, token, logprob)

    _, cache, state = jax.lax.while_loop(go_on, step, (jnp.int32(0), cache, state))
    return cache, state


def _append(state: State, token: Array, logprob: Array) -> State:
    going = state.lens < state.tokens.shape[1]
    at = jnp.minimum(state.lens, state.tokens.shape[1] - 1)

    def put(matrix: Array, new: Array) -> Array:
        old = jnp.take_along_axis(matrix, at[:, None], axis=1)[:, 0]
        return _write(matrix, jnp.where(going, new, old)[:, None], at)

    return dataclasses.replace(
        state,
        tokens=put(state.tokens, token),
        logprobs=put(state.logprobs, logprob),
        lens=state.lens + going,
        last=jnp.where(going, token, state.last),
    )


def _forward(model: ModelConfig, weights: Params, cache: KVCache, token: Array, position: Array):
    """Scores float32 [B, V] behind one token a row, and the cache with its keys and values."""
    x = weights["embed"][token]
    half = model.head_dim // 2
    freqs = model.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    places = jnp.arange(cache_slots(cache))
    angles = places[:, None, None].astype(jnp.float32) * freqs[None, None, :]
    turn = jnp.cos(angles)[position], jnp.sin(angles)[position]  # looked up: see Transformer._rope
    seen = places[None, :] <= position[:, None]
    new_cache = []
    for w, layer in zip(weights["layers"], cache):
        attended, layer = _attention(model, w, _norm(model, x, w["attn_norm"]), turn, seen,
                                     position, layer)  # fmt: skip
        x = x + attended
        gate, up = jnp.split(_norm(model, x, w["mlp_norm"]) @ w["gate_up"], 2, axis=1)
        x = x + (jax.nn.silu(gate) * up) @ w["down"]
        new_cache.append(layer)
    x = _norm(model, x, weights["final_norm"])
    logits = jnp.einsum("BD,VD->BV", x, weights["head"], preferred_element_type=jnp.float32)
    return logits, tuple(new_cache)


def _attention(model: ModelConfig, w, x, turn, seen, position, layer):
    rows, heads, kv = x.shape[0], model.num_heads, model.num_kv_heads
    qkv = (x @ w["qkv"]).reshape(rows, kv, heads // kv + 2, model.head_dim)
    q, k, v = qkv[:, :, :-2].reshape(rows, heads, model.head_dim), qkv[:, :, -2], qkv[:, :, -1]
    if model.qk_norm:
        q, k = _norm(model, q, w["q_norm"]), _norm(model, k, w["k_norm"])
    q, k = _turn(q, turn), _turn(k, turn)
    keys, values = layer = (
        _write(layer[0], k[:, :, :, None], position, axis=2),
        _write(layer[1], v[:, :, None], position, axis=1),
    )
    q = q.reshape(rows, kv, heads // kv, model.head_dim)
    scores = jnp.einsum("BKGH,BKHS->BKGS", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * model.head_dim**-0.5, -1e30)
    share = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("BKGS,BKSH->BKGH", share, values)
    return out.reshape(rows, -1) @ w["o"], layer


def _turn(x: Array, turn: tuple[Array, Array]) -> Array:
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _norm(model: ModelConfig, x: Array, scale: Array) -> Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + model.norm_eps)
    return (x32 * scale[(None,) * (x.ndim - 1)].astype(jnp.float32)).astype(x.dtype)


def _write(matrix: Array, new: Array, at: Array, axis: int = 0) -> Array:
    """`new` in slot `at` [B] of every row; axis: of a row's slots."""
    return jax.vmap(lambda row, x, i: jax.lax.dynamic_update_slice_in_dim(row, x, i, axis))(
        matrix, new, at
    )
