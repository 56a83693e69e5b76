"""Responses to held-out prompts and their mean reward, with the same rollout as in training."""

from collections.abc import Sequence

import numpy as np

from specrl_jax.data.prompts import select
from specrl_jax.episodes import Responses, ResponseScorer, respond
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.generate import Noise, RolloutSpec
from specrl_jax.types import Prompts


def evaluate(
    spec: RolloutSpec,
    weights: Params,
    batches: Sequence[tuple[Prompts, int]],
    noise: Noise,
    scorer: ResponseScorer,
) -> tuple[float, list[tuple[Prompts, Responses]]]:
    """Mean reward over all responses to the real prompts of `batches` (see data.eval_batches).

    Also returns the real prompts of each batch, and the batch's responses: first those to the real
    prompts.
    """
    rewards, answered = [], []
    for prompts, real in batches:
        responses = respond(spec, weights, prompts, noise, scorer)
        rewards.append(responses.scores.rewards[: real * spec.group_size])
        answered.append((select(prompts, np.arange(real)), responses))
    return float(np.mean(np.concatenate(rewards))), answered
