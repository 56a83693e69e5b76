"""Scene `device`, on a GPU or TPU: how much of what the device can do is used.

A decode step is bound by what it reads, the weights and the cache; prefill and verification by
their multiplications. Both are held against what simple programs reach on the same device: a copy
or a sum of one large array, and a product of two large bfloat16 matrices.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.benchmarks.policies import Size, policy, random_prompts
from specrl_jax.benchmarks.steps import (
    STEPS,
    WIDTH,
    DecodeBatch,
    forward_flops,
    in_turn,
    made_up_drafts,
    make_rung,
    row_counts,
)
from specrl_jax.benchmarks.timing import Goal, spread
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import cache_bytes, cache_slots
from specrl_jax.models.transformer import param_shapes
from specrl_jax.rollout.engine import decode
from specrl_jax.sharding import put

_COPY_BYTES, _MATMUL = 2**31, 8192


def decode_bytes(model: ModelConfig, count: int, slots: int) -> int:
    """Bytes that a decode step must read: every weight once (of an untied embedding nearly
    nothing) and the whole cache window."""
    shapes = param_shapes(model)
    if not model.tie_embeddings:
        shapes = {key: shape for key, shape in shapes.items() if key != "embed"}
    weights = sum(np.prod(s) for s in jax.tree.leaves(shapes, is_leaf=lambda x: type(x) is tuple))
    return int(weights) * jnp.dtype(model.dtype).itemsize + cache_bytes(model, count, slots)


def measure(name: str, size: Size, repeats: int) -> dict[str, Any]:
    """Shares of the measured bandwidth and of the measured matmul rate that are used."""
    _, model, weights, _ = policy(name, size)
    peaks = measure_peaks(repeats)
    rungs = []
    for count in row_counts(size):
        plain = make_rung(size, model, weights, count, "match", size.response_len)
        wide = make_rung(size, model, weights, count, "ratio", WIDTH)
        drafts = made_up_drafts(count, WIDTH, model.vocab_size)
        steps = min(STEPS, size.response_len)
        calls = {
            "decode": functools.partial(plain.seconds, steps),
            "prefill": functools.partial(prefill_seconds, plain),
            "verify": functools.partial(wide.seconds, 1, width=WIDTH, drafts=drafts),
        }
        times = in_turn(calls, repeats)
        times["decode"] = [s / steps for s in times["decode"]]
        seconds = {of: spread(values) for of, values in times.items()}
        prompt = size.prompt_len
        moved = decode_bytes(model, count, cache_slots(plain.cache))
        flops = {
            "prefill": forward_flops(model, count, prompt, prompt, head=False),
            "verify": forward_flops(model, count, WIDTH, prompt + WIDTH, head=True),
        }
        shares = {k: f / peaks["flops_per_second"] / seconds[k]["median"] for k, f in flops.items()}
        shares["decode"] = moved / peaks["bytes_per_second"] / seconds["decode"]["median"]
        rung = {"rows": count, "seconds": seconds, "bytes": moved, "flops": flops}
        rungs.append(rung | {"shares": shares})
    return {"peaks": peaks, "repeats": repeats, "rungs": rungs}


def prefill_seconds(rung: DecodeBatch) -> float:
    """Of `rows` different prompts."""
    prompts = random_prompts(rung.rows, rung.prompt_slots, rung.setup.model.vocab_size).tokens
    prompts = jax.block_until_ready(put(prompts, "batch", None))
    start = time.perf_counter()
    jax.block_until_ready(decode.prefill(rung.setup, rung.weights, prompts))
    return time.perf_counter() - start


def measure_peaks(
    repeats: int, copy_bytes: int = _COPY_BYTES, matmul: int = _MATMUL
) -> dict[str, float]:
    """Bytes a second of the better of a copy and a sum, operations a second of a bf16 matmul."""
    copy, add = jax.jit(lambda x: x + 1), jax.jit(jnp.sum)
    multiply = jax.jit(lambda a: a @ a)
    values = jax.block_until_ready(jnp.ones(copy_bytes // 4, jnp.float32))
    # Random, since constant bits cost less power and run at a higher clock.
    matrix = jax.random.normal(jax.random.key(0), (matmul, matmul), jnp.bfloat16)
    jax.block_until_ready(matrix)

    def timed(function, x) -> float:
        start = time.perf_counter()
        jax.block_until_ready(function(x))
        return time.perf_counter() - start

    calls = {
        "copy": lambda: timed(copy, values),
        "sum": lambda: timed(add, values),
        "matmul": lambda: timed(multiply, matrix),
    }
    best = {name: min(seconds) for name, seconds in in_turn(calls, repeats).items()}
    return {
        "bytes_per_second": max(2 * copy_bytes / best["copy"], copy_bytes / best["sum"]),
        "flops_per_second": 2 * matmul**3 / best["matmul"],
    }


def goals(record: dict[str, Any], backend: str) -> list[Goal]:
    """What the scene's figures are held against, on an accelerator: decoding at every row count,
    wide passes at the most rows."""
    if backend == "cpu":
        return []
    rungs = sorted(record["rungs"], key=lambda rung: rung["rows"])
    found = [
        Goal(f"decode, share of bandwidth, {r['rows']} rows", r["shares"]["decode"], 0.6)
        for r in rungs
    ]
    for name in ("prefill", "verify"):
        of = f"{name}, share of matmul rate, {rungs[-1]['rows']} rows"
        found.append(Goal(of, rungs[-1]["shares"][name], 0.4))
    return found


def table(record: dict[str, Any]) -> str:
    """The scene as text, a line a row count."""
    peaks = record["peaks"]
    lines = [
        f"device: measured {peaks['bytes_per_second'] / 1e9:.0f} GB/s and "
        f"{peaks['flops_per_second'] / 1e12:.1f} TFLOP/s (bfloat16); shares used",
        f"{'rows':>6}{'decode, bandwidth':>20}{'prefill, matmul':>18}{'verify, matmul':>17}",
    ]
    for rung in record["rungs"]:
        of = rung["shares"]
        lines.append(
            f"{rung['rows']:6}{of['decode']:20.3f}{of['prefill']:18.3f}{of['verify']:17.3f}"
        )
    return "\n".join(lines)
