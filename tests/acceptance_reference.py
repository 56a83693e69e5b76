"""The acceptance rules as tests call them: jitted, on host arrays."""

import jax
import numpy as np

from specrl_jax.rollout import acceptance
from specrl_jax.sharding import put

least_logprobs = jax.jit(acceptance.least_logprobs)
random_cut = jax.jit(acceptance.random_cut)
leading = jax.jit(acceptance.leading)
in_top = jax.jit(acceptance.in_top)
ratio_residual = jax.jit(acceptance.ratio_residual)
block = jax.jit(acceptance.block)
residual_scores = jax.jit(acceptance.residual_scores)
logprobs_at = jax.jit(acceptance.logprobs_at)
likeliest_tokens = jax.jit(acceptance.likeliest_tokens, static_argnums=1)


def ratio(uniforms, logprobs, draft_logprobs, log_lenience) -> np.ndarray:
    """Whether the ratio rule keeps a token, bool."""
    return np.asarray(logprobs) >= np.asarray(
        least_logprobs(uniforms, draft_logprobs, log_lenience)
    )


def log(x) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, np.float32))


def total_variation(p: dict, q: dict) -> float:
    return 0.5 * sum(abs(p.get(k, 0.0) - q.get(k, 0.0)) for k in p.keys() | q.keys())


def put_scores(scores):
    return put(scores.astype(np.float32), "batch", *(None,) * (scores.ndim - 2), "vocab")


def put_rows(*arrays):
    """Host arrays [B, ...] → device arrays split over the batch."""
    put_one = lambda x: put(x, "batch", *(None,) * (np.ndim(x) - 1))  # noqa: E731
    return tuple(put_one(x) for x in arrays) if len(arrays) > 1 else put_one(*arrays)


def softmax(scores) -> np.ndarray:
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def judge_ratio(uniforms, arguments, lens):
    """SPEC-RL at ℓ = 1: (kept, tail, log_scale); the next token from π itself."""
    kept = np.asarray(leading(ratio(uniforms, *arguments[:2], log(1.0)), lens))
    return kept, np.zeros(len(lens), bool), np.full(len(lens), np.inf, np.float32)


def judge_ratio_residual(uniforms, arguments, lens):
    accept, tail = (np.asarray(x) for x in ratio_residual(uniforms, *arguments))
    kept = np.asarray(leading(accept, lens))
    inside = kept < lens
    tail = np.array([inside[i] and tail[i, kept[i]] for i in range(len(lens))])
    return kept, tail, np.where(inside, 0.0, np.inf).astype(np.float32)


def judge_block(uniforms, arguments, lens):
    got = block(uniforms, *arguments, lens)
    return tuple(np.asarray(x) for x in (got.kept, got.tail, got.log_scale))
