"""Acceptance rules as tests call them, jitted, on host arrays; and the same by hand."""

import functools
import math

import jax
import numpy as np

from specrl_jax.models import row_slices
from specrl_jax.rollout import block, sampling
from specrl_jax.rollout.acceptance import RandomCut, Ratio
from specrl_jax.sharding import put

accept_threshold = jax.jit(Ratio.accept_threshold)
random_cut = jax.jit(RandomCut().cut)
count_leading = jax.jit(row_slices.count_leading)
logprobs_at = jax.jit(sampling.logprobs_at)


@functools.partial(jax.jit, static_argnums=1)
def likeliest_tokens(scores, k):
    """Return the k likeliest tokens, and their log-probs."""
    ids = sampling.likeliest_tokens(scores, k)
    return ids, sampling.logprobs_at(scores, ids)


@jax.jit
def residual_scores(scores, top_ids, top_logprobs, other_tokens, log_scale):
    return block.Residual(top_ids, top_logprobs, other_tokens, log_scale).weigh(scores)


def ratio(uniforms, logprobs, draft_logprobs, log_lenience) -> np.ndarray:
    """Whether the ratio rule accepts a token, bool."""
    threshold = accept_threshold(Ratio(np.float32(log_lenience)), uniforms, draft_logprobs)
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
    return block.verify_block(uniforms, *arguments, lens)


def accept_block(uniforms, arguments, lens):
    return jax.device_get(_accept(uniforms, arguments, lens))


def block_by_hand(uniforms, logprobs, old, now_top, old_top, listed) -> tuple:
    """(kept, tail, P, margin of the closest decision) of one draft [n], as algorithm 2 has it.

    The k likeliest tokens of π_old are outcomes, all others together are one. logprobs, old: of
    the draft. now_top, old_top: [n, k]. listed: the token is one of these.
    """

    def outcomes(top):
        probs = np.exp(np.asarray(top, np.float64))
        return np.append(probs, 1 - probs.sum())

    p = 1.0
    joint = []
    for i in range(len(listed)):
        ratio = outcomes(now_top[i])[-1] / outcomes(old_top[i])[-1]
        if listed[i]:
            ratio = math.exp(float(logprobs[i]) - float(old[i]))
        p = min(1.0, p * ratio)
        joint.append(p)
        if not listed[i]:
            break
    kept, tail, scale, margin = 0, False, (1.0 if joint else math.inf), math.inf
    for i, p in enumerate(joint, start=1):
        h = p
        if i < len(joint):
            gain = np.maximum(p * outcomes(now_top[i]) - outcomes(old_top[i]), 0).sum()
            h = gain / (gain + 1 - p)
        margin = min(margin, abs(uniforms[i - 1] - h))
        if uniforms[i - 1] <= h:
            tail = i == len(joint) and not listed[i - 1]
            kept = i - tail
            scale = math.inf if i == len(joint) else p
    return kept, tail, scale, margin


def residual_by_hand(new, old, ids, tail, scale):
    """Probabilities [V] of the next token, float64; π_old is known at `ids`, else as a sum."""
    ids = [i for i in ids if i >= 0]
    others = [x for x in range(len(new)) if x not in ids]
    weights = np.zeros(len(new))
    if not tail:
        weights[ids] = np.maximum(scale * new[ids] - old[ids], 0)
    if new[others].sum() > 0:
        mass = scale * new[others].sum() - old[others].sum()
        mass = new[others].sum() if tail else max(mass, 0)
        weights[others] = mass * new[others] / new[others].sum()
    return weights / weights.sum() if weights.sum() > 0 else new
