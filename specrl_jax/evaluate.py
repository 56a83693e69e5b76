"""The mean reward on held-out prompts, with the same rollout."""

from collections.abc import Sequence

import numpy as np
from jax import Array

from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.episodes import Responses, respond
from specrl_jax.models.transformer import Params
from specrl_jax.rewards.workers import RewardPool
from specrl_jax.rollout.generate import Noise, RolloutSpec
from specrl_jax.rollout.sampling import Purpose
from specrl_jax.types import Prompts


def evaluate(
    plan: RolloutSpec,
    weights: Params,
    batches: Sequence[tuple[Prompts, int]],
    tokenizer: Tokenizer,
    pool: RewardPool,
    *,
    key: Array,
    step: int,
    max_turns: int = 0,
) -> tuple[float, Responses]:
    """Mean reward over all responses to the real prompts of `batches` (see data.eval_batches), and
    the responses to the first batch.

    max_turns: as in `episodes.respond`.
    """
    rewards, options = [], {"pool": pool, "tokenizer": tokenizer, "max_turns": max_turns}
    first = None
    for prompts, real in batches:
        found = respond(plan, weights, prompts, Noise(key, step, Purpose.EVALUATE), **options)
        rewards.append(found.scores.rewards[: real * plan.group_size])
        first = first or found
    return float(np.mean(np.concatenate(rewards))), first
