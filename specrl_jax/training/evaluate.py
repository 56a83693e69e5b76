"""Responses to held-out prompts, and figures of them.

The engine is training's; `Run.eval_spec` has no drafts.
"""

import dataclasses
import math
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

    Their prompts are those without padding, whose rows come first.
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


def pass_at_k(right: np.ndarray, k: int) -> np.ndarray:
    """float64 [Q]: the probability that one of k responses is right, for bool [Q, n], k <= n.

    The unbiased estimator of Chen et al. (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k), where c of
    n responses are right.
    """
    samples = right.shape[1]
    wrong = samples - np.count_nonzero(right, axis=1)
    return np.array([1 - math.comb(w, k) / math.comb(samples, k) for w in wrong.tolist()])


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean of a figure of each prompt [Q], and half its 95 % interval; nan for one.

    Normal, with the standard error over prompts: responses to one prompt are not independent
    (arXiv 2411.00640).
    """
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(1.96 * error)


def figures(rewards: np.ndarray) -> dict[str, tuple[float, float]]:
    """Return means and half intervals of rewards [Q, n]: avg@n, pass@k for k = 1, 2, 4 ... n.

    A response is right from reward 1 on.
    """
    samples = rewards.shape[1]
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    by_name = {f"avg@{samples}": np.mean(rewards, axis=1)}
    by_name |= {f"pass@{k}": pass_at_k(rewards >= 1, k) for k in ks if k <= samples}
    return {name: mean_and_interval(values) for name, values in by_name.items()}
