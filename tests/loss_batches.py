"""Small batches and settings for the tests of losses, and derivatives by finite differences."""

import dataclasses

import jax
import numpy as np

from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.types import Batch

MAX_LEN = 9
PLAIN = LossConfig(max_response_len=MAX_LEN)
# Every term of the loss at once.
FULL = dataclasses.replace(PLAIN, dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01)


def as_batch(mask, old_logprobs=None, advantages=None, **fields) -> Batch:
    """The part of a batch that losses read; arrays [B, R]; old log-probs are 0 if not given."""
    zeros = np.zeros(mask.shape, np.float32)
    return Batch(
        tokens=zeros.astype(np.int32),
        prompt_lens=np.ones(len(mask), np.int32),
        response_lens=np.sum(mask, axis=1).astype(np.int32),
        old_logprobs=zeros if old_logprobs is None else old_logprobs,
        advantages=zeros if advantages is None else advantages,
        **fields,
    )


def make_batch(seed=0, rows=6, slots=7):
    """(log-probs, entropy, the rest) in float64; ragged rows, one of them empty."""
    generator = np.random.default_rng(seed)
    logprobs = -generator.gamma(1.0, 1.0, (rows, slots))
    old_logprobs = logprobs + generator.normal(scale=0.5, size=logprobs.shape)
    ref_logprobs = logprobs + generator.normal(scale=0.5, size=logprobs.shape)
    entropy = generator.gamma(2.0, 1.0, logprobs.shape)
    advantages = generator.normal(scale=2.0, size=logprobs.shape)
    lens = np.append(generator.integers(1, slots + 1, rows - 1), 0)
    mask = np.arange(slots) < lens[:, None]
    return logprobs, entropy, as_batch(mask, old_logprobs, advantages, ref_logprobs=ref_logprobs)


def as_float32(tree):
    cast = lambda x: x.astype(np.float32) if x.dtype == np.float64 else x  # noqa: E731
    return jax.tree.map(cast, tree)


def take(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


def slopes(function, point, width=1e-6):
    """Central differences of a scalar function in float64."""
    result = np.zeros_like(point)
    for place in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[place] += width
        down[place] -= width
        result[place] = (function(up) - function(down)) / (2 * width)
    return result
