"""A hand-written decode loop: what the arithmetic of a decode step costs without a scheduler.

Plain `jnp` over the same weights and the same cache, layers unrolled, one token a step for rows at
positions of their own, in one `jax.lax.scan`. It gives the tokens and their log-probs and nothing
else: no drafts, no buckets, no end-of-sequence.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import KVCache, cache_slots, keys_and_values, write
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.sampling import SamplingConfig, sample
from specrl_jax.sharding import platform, spec


@functools.partial(jax.jit, static_argnames=("model", "steps"), donate_argnames="cache")
def decode(
    model: ModelConfig, weights: Params, cache: KVCache, rows: tuple[Array, ...], *, steps: int
) -> tuple[KVCache, Array, Array]:
    """The cache after `steps` steps, the tokens drawn [steps, B] and their log-probs.

    rows: the prompts' last tokens and lengths, int32 [B]; seeds of the noise, uint32 [B, 2].
    """
    last, prompt_lens, seeds = rows
    # Hand-written code names no layout; the loop's arrays keep theirs.
    layouts = spec("batch", None), jax.tree.map(lambda x: jax.typeof(x).sharding.spec, cache)
    run = jax.sharding.auto_axes(functools.partial(forward, model), out_sharding=layouts)

    def step(carry, count: Array):
        cache, last = carry
        logits, cache = run(weights, cache, last, prompt_lens + count - 1)
        token, _, _ = sample(logits, seeds, jnp.full_like(last, count), SamplingConfig())
        score = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
        return (cache, token), (token, score - jax.nn.logsumexp(logits, axis=-1))

    (cache, _), (tokens, logprobs) = jax.lax.scan(step, (cache, last), jnp.arange(steps))
    return cache, tokens, logprobs


def forward(
    model: ModelConfig, weights: Params, cache: KVCache, token: Array, position: Array
) -> tuple[Array, KVCache]:
    """Logits float32 [B, V] after one token a row, and the cache with its keys and values."""
    x = weights["embed"][token]
    half = model.head_dim // 2
    freqs = model.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    places = jnp.arange(cache_slots(cache))
    angles = places[:, None, None].astype(jnp.float32) * freqs[None, None, :]
    turn = jnp.cos(angles)[position], jnp.sin(angles)[position]  # looked up: see Transformer._rope
    seen = places[None, :] <= position[:, None]
    new_cache = []
    for w, layer in zip(weights["layers"], cache):
        normed = _norm(model, x, w["attn_norm"])
        attended, layer = _attention(model, w, normed, turn, seen, position, layer)
        x = x + attended
        # [D, 2, F], or [2, D, F] on TPU.
        gate_up = w["gate_up_proj"].swapaxes(0, -2) if platform() == "tpu" else w["gate_up_proj"]
        gate_up = gate_up.reshape(model.embed_dim, -1)
        gate, up = jnp.split(_norm(model, x, w["mlp_norm"]) @ gate_up, 2, axis=1)
        x = x + (jax.nn.silu(gate) * up) @ w["down_proj"]
        new_cache.append(layer)
    x = _norm(model, x, weights["final_norm"])
    head = weights["embed"] if model.tie_embeddings else weights["lm_head"]
    logits = jnp.einsum("BD,VD->BV", x, head, preferred_element_type=jnp.float32)
    return logits, tuple(new_cache)


def _attention(model: ModelConfig, w, x, turn, seen, position, layer):
    rows = x.shape[0]
    heads = model.num_heads
    kv = model.num_kv_heads
    qkv = (x @ w["qkv_proj"].reshape(model.embed_dim, -1)).reshape(
        rows, kv, heads // kv + 2, model.head_dim
    )
    q, k, v = qkv[:, :, :-2].reshape(rows, heads, model.head_dim), qkv[:, :, -2], qkv[:, :, -1]
    if model.qk_norm:
        q, k = _norm(model, q, w["q_norm"]), _norm(model, k, w["k_norm"])
    q, k = _turn(q, turn), _turn(k, turn)
    layer = write(layer, k[:, None], v[:, None], position)
    keys, values = keys_and_values(layer, kv, model.head_dim)
    q = q.reshape(rows, kv, heads // kv, model.head_dim)
    scores = jnp.einsum("BKGH,BKHS->BKGS", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], scores * model.head_dim**-0.5, -1e30)
    share = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("BKGS,BKSH->BKGH", share, values)
    return out.reshape(rows, -1) @ w["o_proj"].reshape(-1, model.embed_dim), layer


def _turn(x: Array, turn: tuple[Array, Array]) -> Array:
    cos, sin = turn
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _norm(model: ModelConfig, x: Array, scale: Array) -> Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + model.norm_eps)
    return (x32 * scale[(None,) * (x.ndim - 1)].astype(jnp.float32)).astype(x.dtype)
