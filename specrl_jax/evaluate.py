"""Responses to scores, and the mean reward on held-out prompts with the same rollout."""

from collections.abc import Sequence

import jax
import numpy as np
from jax import Array

from specrl_jax.models.transformer import Params
from specrl_jax.reward_pool import RewardPool, Scores
from specrl_jax.rollout.generate import Plan, generate
from specrl_jax.rollout.sampling import Purpose
from specrl_jax.tokenizer import Tokenizer
from specrl_jax.types import Prompts


def score(
    pool: RewardPool, tokenizer: Tokenizer, prompts: Prompts, tokens: np.ndarray, lens: np.ndarray
) -> Scores:
    """Rewards of responses [Q * G, R] to Q prompts, G in a row for each."""
    group_size = len(lens) // len(prompts.examples)
    examples = [example for example in prompts.examples for _ in range(group_size)]
    return pool.score(
        [tokenizer.decode(row[:n].tolist()) for row, n in zip(tokens, lens)],
        [example.answer for example in examples],
        [example.task for example in examples],
        [example.metadata for example in examples],
    )


def evaluate(
    plan: Plan,
    weights: Params,
    batches: Sequence[tuple[Prompts, int]],
    tokenizer: Tokenizer,
    pool: RewardPool,
    *,
    key: Array,
    step: int,
) -> float:
    """Mean reward over all responses to the real prompts of `batches` (see data.eval_batches)."""
    rewards = []
    for prompts, real in batches:
        rollout, _ = generate(plan, weights, prompts, key=key, step=step, purpose=Purpose.EVALUATE)
        tokens, lens = jax.device_get((rollout.tokens, rollout.lens))
        scores = score(pool, tokenizer, prompts, tokens, lens)
        rewards.append(scores.rewards[: real * plan.group_size])
    return float(np.mean(np.concatenate(rewards)))
