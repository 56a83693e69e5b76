"""The acceptance rules as tests call them: jitted, on host arrays."""

import jax
import numpy as np

from specrl_jax.rollout import acceptance, sampling
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES, Residual
from specrl_jax.sharding import put

accept_threshold = jax.jit(ACCEPTANCE_RULES["ratio"].accept_threshold)
random_cut = jax.jit(ACCEPTANCE_RULES["random"].cut)
count_leading = jax.jit(acceptance.count_leading)
logprobs_at = jax.jit(sampling.logprobs_at)
likeliest_tokens = jax.jit(sampling.likeliest_tokens, static_argnums=1)


@jax.jit
def residual_scores(scores, top_ids, top_logprobs, other_tokens, log_scale):
    return Residual(top_ids, top_logprobs, other_tokens, log_scale).weigh(scores)


def ratio(uniforms, logprobs, draft_logprobs, log_lenience) -> np.ndarray:
    """Whether the ratio rule accepts a token, bool."""
    threshold = accept_threshold(uniforms, draft_logprobs, log_lenience)
    return np.asarray(logprobs) >= np.asarray(threshold)


def log(x) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, np.float32))


def put_scores(scores):
    return put(scores.astype(np.float32), "batch", *(None,) * (scores.ndim - 2), "vocab")


def softmax(scores) -> np.ndarray:
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@jax.jit
def _accept(uniforms, arguments, lens):
    return acceptance.verify_block(uniforms, *arguments, lens)


def accept_block(uniforms, arguments, lens):
    return jax.device_get(_accept(uniforms, arguments, lens))
