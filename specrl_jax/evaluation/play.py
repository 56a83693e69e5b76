"""Episodes of a saved policy, one at a time, whose turns are printed while they are played."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specrl_jax.evaluation.saved_policy import SavedPolicy
from specrl_jax.models.transformer import Params
from specrl_jax.rewards.environment_pool import EnvironmentPool, Episode
from specrl_jax.rewards.worker_process import Result
from specrl_jax.rollout.generate import RolloutInputs
from specrl_jax.training.responses import Responder


def play(
    policy: SavedPolicy,
    weights: Params,
    responder: Responder,
    prompt: str,
    answer: str,
    number: int,
) -> None:
    """Play an episode, at the temperature of the run's evaluation, and print it as it goes on.

    weights: of `policy.weights`.
    responder: of `build.make_responder`, with an environment.
    answer: of the problem.
    number: of the prompt, so that each has its own noise.

    Raises ValueError in one line where the prompt does not fit.
    """
    prompts = policy.prompts(prompt, answer)
    spec = policy.spec(prompts.tokens.shape[1], 1, policy.config.evaluate.temperature)
    shown = dataclasses.replace(responder, pool=_ShownPool(responder.pool))
    responses = shown.respond(spec, weights, RolloutInputs(prompts, policy.noise(number)))
    failure = responses.rewards.reasons[0]
    reward = f"reward {responses.rewards.rewards[0]:.4g}, turns {responses.turns.counts[0]}"
    print(f"{reward}, failed: {failure}" if failure else reward, flush=True)


class _ShownPool:
    """Environment pool that prints what is said in the first of its episodes."""

    def __init__(self, pool: EnvironmentPool):
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def begin(self, problems: Sequence[tuple[str, str, dict]]) -> list[Episode]:
        episodes = self._pool.begin(problems)
        self._first = episodes[0]
        return episodes

    def submit(self, episodes: Sequence[Episode], responses: Sequence[str]) -> None:
        for episode, response in zip(episodes, responses, strict=True):
            if episode is self._first:
                print(f"assistant: {response}", flush=True)
        self._pool.submit(episodes, responses)

    def collect(self, episodes: Sequence[Episode], most_waiting: int = 0) -> dict[int, Result]:
        answers = self._pool.collect(episodes, most_waiting)
        for i, answer in answers.items():
            if episodes[i] is self._first and answer.observation:
                print(f"{answer.role}: {answer.observation}", flush=True)
        return answers
