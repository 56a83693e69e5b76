"""Responses to held-out prompts.

Uses the training engine; `Run.eval_spec` has no drafts.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specrl_jax.models.transformer import Params
from specrl_jax.responses import Responder, Responses
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.types import Prompts


def evaluate(
    spec: RolloutSpec,
    weights: Params,
    batches: Sequence[tuple[Prompts, int]],
    noise: NoiseKey,
    responder: Responder,
) -> list[Responses]:
    """Return the responses to each of `batches` (see data.prompts.eval_batches).

    Their `prompts` exclude padding, whose rows come last.
    """
    answered = []
    for prompts, real in batches:
        responses = responder.respond(spec, weights, Requests(prompts, noise))
        real_prompts = prompts.select(np.arange(real))
        answered.append(dataclasses.replace(responses, prompts=real_prompts))
    return answered


def group_rewards(answered: Sequence[Responses]) -> np.ndarray:
    """float32 [Q, G], the rewards of the G responses to each real prompt."""
    return np.concatenate([responses.group_rewards for responses in answered])
