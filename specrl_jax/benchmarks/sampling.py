"""How a token may be drawn: what each construction costs, and how often rounding flips its draw.

Programs of different width or mesh compute the same scores up to rounding. A construction is robust
if such a difference changes few draws: no fewer than the distance between the two laws in total
variation can be had, and no more are needed. Scores are made up, normal, of a given perplexity;
each difference is normal too, of a given size.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.benchmarks.timing import spread
from specrl_jax.rollout.sampling import SamplingConfig, sample, uniforms
from specrl_jax.sharding import put

ERRORS = (1e-5, 3e-5, 1e-2)  # std of the scores' differences; the last is about bfloat16's
PERPLEXITY = 28.0


def race(logits: Array, seeds: Array, positions: Array) -> Array:
    """Ours: exponential races, of columns and of the tokens of one; their noise is a counter hash
    of (row seed, position, candidate)."""
    return sample(logits, seeds, positions, SamplingConfig())


def gumbel(logits: Array, seeds: Array, positions: Array) -> Array:
    """argmax of scores + Gumbel noise, by threefry keyed by (row seed, position)."""

    def one(logits: Array, seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), position)
        return jnp.argmax(logits + jax.random.gumbel(key, logits.shape))

    return jax.vmap(one)(logits, seeds, positions).astype(jnp.int32)


def inverse_cdf(logits: Array, seeds: Array, positions: Array) -> Array:
    """The first token at which the running sum of probabilities passes one uniform number."""
    sums = jnp.cumsum(jax.nn.softmax(logits, axis=-1), axis=-1)
    bound = uniforms(seeds, positions) * sums[:, -1]
    return jnp.sum(sums < bound[:, None], axis=-1, dtype=jnp.int32)


CONSTRUCTIONS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "exponential races, counter hash": race,
    "Gumbel, threefry": gumbel,
    "inverse CDF, one uniform": inverse_cdf,
}


def measure(
    rows: int = 32, vocab: int = 49_152, draws: int = 4_096, repeats: int = 10
) -> dict[str, Any]:
    """Seconds a call on [rows, vocab], and the share of `draws` draws that each error flips."""
    logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32)
    logits *= scale_for(logits, min(PERPLEXITY, vocab / 2))
    clean = put(logits, "batch", None)
    seeds = np.random.default_rng(1).integers(0, 2**32, (rows, 2), np.uint32)
    seeds = put(seeds, "batch", None)
    functions = {name: jax.jit(function) for name, function in CONSTRUCTIONS.items()}
    record: dict[str, Any] = {
        "setting": {"rows": rows, "vocab": vocab, "draws": draws, "repeats": repeats},
        "perplexity": float(np.exp(_entropy(logits)).mean()),
        "seconds": _seconds(functions, clean, seeds, repeats),
        "flips": {},
    }
    for error in ERRORS:
        noise = np.random.default_rng(2).normal(size=logits.shape).astype(np.float32)
        other = logits + np.float32(error) * noise
        flips = {
            name: _flips(function, clean, put(other, "batch", None), seeds, draws)
            for name, function in functions.items()
        }
        record["flips"][str(error)] = flips | {"total variation": _distance(logits, other)}
    return record


def _seconds(functions, logits: Array, seeds: Array, repeats: int) -> dict[str, Any]:
    """Spread of a call's seconds, constructions in turn after one call that compiles."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        positions = put(np.full(logits.shape[0], repeat, np.int32), "batch")
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(logits, seeds, positions))
            found[name].append(time.perf_counter() - start)
    return {name: spread(seconds[1:]) for name, seconds in found.items()}


def _flips(function, clean: Array, other: Array, seeds: Array, draws: int) -> float:
    rows = clean.shape[0]
    calls, flipped = -(-draws // rows), 0
    for position in range(calls):
        at = put(np.full(rows, position, np.int32), "batch")
        pair = function(clean, seeds, at), function(other, seeds, at)
        flipped += int(np.sum(np.asarray(pair[0]) != np.asarray(pair[1])))
    return flipped / (calls * rows)


def scale_for(scores: np.ndarray, perplexity: float) -> float:
    """The factor at which softmax(factor x scores [B, V]) has this perplexity in the mean."""
    low, high = 0.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        if np.exp(_entropy(middle * scores)).mean() > perplexity:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _probs(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def _entropy(logits: np.ndarray) -> np.ndarray:
    probs = _probs(logits)
    return -np.sum(probs * np.log(np.maximum(probs, 1e-300)), axis=1)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Mean distance in total variation of the laws of two sets of scores [B, V]."""
    return float(np.abs(_probs(a) - _probs(b)).sum(axis=1).mean() / 2)


def table(record: dict[str, Any]) -> str:
    """The record as text, a line a construction."""
    setting = record["setting"]
    heading = f"{'':34}{'ms a call':>10}" + "".join(f"{e:>14}" for e in record["flips"])
    lines = [
        f"sampling: {setting['rows']} x {setting['vocab']} scores of perplexity "
        f"{record['perplexity']:.0f}; share of {setting['draws']} draws flipped by a difference "
        "of the scores",
        heading,
    ]
    for name in [*record["seconds"], "total variation"]:
        seconds = record["seconds"].get(name)
        cost = f"{1e3 * seconds['median']:.2f}" if seconds else "-"
        flips = "".join(f"{100 * of[name]:>12.4f} %" for of in record["flips"].values())
        lines.append(f"{name:34}{cost:>10}{flips}")
    return "\n".join(lines)
