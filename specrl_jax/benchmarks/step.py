"""Benchmarks `step` and `device`: single programs of a rollout against what bounds them.

step: a decode step against the hand-written loop, on the same rows, cache slots and weights.
device: on a GPU or TPU, a decode step against the bytes that it reads and verification against its
multiplications, at the rates of a copy of a large array and of a large matrix product.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.benchmarks import handwritten_loop
from specrl_jax.benchmarks.policies import GROUP, Size, random_prompts, random_weights
from specrl_jax.benchmarks.reports import Report, spread
from specrl_jax.benchmarks.rollout import make_drafts, make_spec
from specrl_jax.benchmarks.timing import Case, Log, run
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import cache_bytes, init_cache
from specrl_jax.models.transformer import Params, param_count
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES, MATCH, AcceptanceRule
from specrl_jax.rollout.generate import DraftInputs, Noise, generate
from specrl_jax.sharding import put


def measure_step(name: str, size: Size, log: Log) -> Report:
    """Milliseconds of a step, for the fewest rows and for all of them."""
    weights, rows = random_weights(size.model), []
    for count in sorted({GROUP, size.rows}):
        case = full_length(size, weights, count)
        decoded, by_hand = [], []
        for number in range(size.repeats + 1):
            decoded.append(1e3 * _step_seconds(case))
            by_hand.append(1e3 * _seconds_by_hand(size, weights, count))
            log(f"{count} rows, round {number} of {size.repeats}")
        del decoded[0], by_hand[0]  # they compile
        row = {"rows": count, "cache_slots": size.prompt_len + size.response_len}
        row |= {"rollout_ms": spread(decoded), "handwritten_ms": spread(by_hand)}
        rows.append(row | {"handwritten_share": spread(np.divide(by_hand, decoded))})
    title = f"step {name}: {size.describe()}; a decode step, median (min-max) of {size.repeats} "
    return Report(f"{title}rollouts; share: of it that the hand-written loop takes", rows)


def full_length(size: Size, weights: Params, rows: int, *, accept: AcceptanceRule = MATCH) -> Case:
    """A rollout of `rows` rows that all end at the longest length, in one bucket."""
    spec, noise = make_spec(size, accept=accept, one_bucket=True), Noise(jax.random.key(0), 1)
    lens = np.full(rows, size.response_len, np.int32)
    prompts = random_prompts(size, rows)
    return functools.partial(generate, spec, weights, prompts, noise, max_lens=lens)


def _step_seconds(case: Case) -> float:
    stats = run(case).stats
    return stats.decode_seconds / stats.decode_steps


def _seconds_by_hand(size: Size, weights: Params, rows: int) -> float:
    """Of one step of the hand-written loop, on a cache of zeros."""
    seeds = np.random.default_rng(rows).integers(0, 2**32, (rows, 2), np.uint32)
    ones, lens = np.ones(rows, np.int32), np.full(rows, size.prompt_len, np.int32)
    begin = put(ones, "batch"), put(lens, "batch"), put(seeds, "batch", None)
    cache = init_cache(size.model, rows, size.prompt_len + size.response_len)
    inputs, steps = jax.block_until_ready((cache, begin)), size.response_len
    loop = functools.partial(handwritten_loop.decode, size.model, weights, *inputs, steps=steps)
    return _seconds(loop) / steps


def _seconds(call: Callable[[], jax.Array]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def measure_device(name: str, size: Size, log: Log) -> Report:
    """Shares of the measured bandwidth and of the measured rate of a matrix product."""
    bandwidth, rate = copy_rate(), matmul_rate(size.model.dtype)
    weights, rng, rows = random_weights(size.model), np.random.default_rng(0), []
    slots = size.prompt_len + size.response_len
    rule = next(x for x in ACCEPTANCE_RULES.values() if not x.samples_anew)
    for count in sorted({GROUP, size.rows}):
        plain = full_length(size, weights, count, accept=rule)
        drafts, _ = make_drafts(run(plain).rollout, 0.0, size.model.vocab_size, rng)
        verifying = functools.partial(plain, drafts=DraftInputs(drafts))
        tokens = run(verifying).stats.verify_work
        least = decode_bytes(size.model, count, slots) / bandwidth
        steps = [_step_seconds(plain) for _ in range(size.repeats)]
        row = {"rows": count, "decode_ms": spread(1e3 * s for s in steps)}
        row["share_of_bandwidth"] = spread(least / s for s in steps)
        least = forward_flops(size.model, tokens, slots) / rate
        passes = [run(verifying).stats.verify_seconds for _ in range(size.repeats)]
        row["verify_ms"] = spread(1e3 * s for s in passes)
        rows.append(row | {"share_of_matmul": spread(least / s for s in passes)})
        log(f"{count} rows measured")
    title = f"device {name}: {size.describe()}; measured {bandwidth / 1e9:.0f} GB/s and "
    title += f"{rate / 1e12:.1f} TFLOP/s; verified: {size.response_len} tokens a row"
    return Report(title, rows)


def copy_rate() -> float:
    """Bytes a second of a copy of a large array."""
    size = 2**24 if jax.default_backend() == "cpu" else 2**31
    values = jnp.ones(size // 4, jnp.float32)
    copy = functools.partial(jax.jit(lambda x: x + 1), values)
    return 2 * size / min(_seconds(copy) for _ in range(8))


def matmul_rate(dtype: str) -> float:
    """Operations a second of a large matrix product."""
    width = 1_024 if jax.default_backend() == "cpu" else 8_192
    # Random, since constant bits cost less power and run at a higher clock.
    matrix = jax.random.normal(jax.random.key(0), (width, width), dtype)
    product = functools.partial(jax.jit(lambda a: a @ a), matrix)
    return 2 * width**3 / min(_seconds(product) for _ in range(8))


def weights_read(model: ModelConfig) -> int:
    """Weights that a decode step reads: all, of an untied embedding nearly nothing."""
    lookup_only = 0 if model.tie_embeddings else model.vocab_size * model.embed_dim
    return param_count(model) - lookup_only


def decode_bytes(model: ModelConfig, rows: int, slots: int) -> int:
    """Bytes that a decode step must read: the weights once, and the whole cache."""
    size = jnp.dtype(model.dtype).itemsize
    return weights_read(model) * size + cache_bytes(model, rows, slots)


def forward_flops(model: ModelConfig, tokens: int, slots: int) -> int:
    """Operations on `tokens`: all weights, and attention to all slots; two a multiplication."""
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * slots
    return 2 * tokens * (weights_read(model) + attention)
