"""Limits of a device, measured, and what the policy's programs ask of it, counted.

Rates are those of a copy of a large array and of a large matrix product. Bytes and operations are
the least that a program needs, padding and masked-out work not counted.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import param_count


def seconds_of(call: Callable[[], Any]) -> float:
    """Wall-clock seconds until the arrays that `call` returns are computed."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


@functools.cache
def copy_rate() -> float:
    """Bytes a second of a copy of a large array."""
    size = 2**24 if jax.default_backend() == "cpu" else 2**31
    values = jnp.ones(size // 4, jnp.float32)
    copy = functools.partial(jax.jit(lambda x: x + 1), values)
    return 2 * size / min(seconds_of(copy) for _ in range(8))


@functools.cache
def matmul_rate(dtype: str) -> float:
    """Operations a second of a large matrix product."""
    width = 1_024 if jax.default_backend() == "cpu" else 8_192
    # Random, since constant bits cost less power and run at a higher clock.
    matrix = jax.random.normal(jax.random.key(0), (width, width), dtype)
    product = functools.partial(jax.jit(lambda a: a @ a), matrix)
    return 2 * width**3 / min(seconds_of(product) for _ in range(8))


def decode_bytes(model: ModelConfig, rows: int, slots: int) -> int:
    """Bytes that a decode step reads: the weights once, and the keys and values of `slots` tokens
    a row. Of an untied embedding it reads nearly nothing."""
    lookup_only = 0 if model.tie_embeddings else model.vocab_size * model.embed_dim
    weights = param_count(model) - lookup_only
    held = 2 * model.num_layers * rows * slots * model.num_kv_heads * model.head_dim
    return (weights + held) * jnp.dtype(model.dtype).itemsize


def forward_flops(model: ModelConfig, tokens: int, slots: int, *, scored: int = -1) -> int:
    """Operations on `tokens` that attend to `slots` slots in the mean; a multiplication counts
    two. scored: tokens whose logits are computed; -1: all."""
    head = model.vocab_size * model.embed_dim
    layers = param_count(model) - head * (1 if model.tie_embeddings else 2)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * slots
    return 2 * (tokens * (layers + attention) + (tokens if scored < 0 else scored) * head)
