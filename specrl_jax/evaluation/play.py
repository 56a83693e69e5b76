"""Episodes of a saved policy, one at a time, with each turn printed as it is played."""

import dataclasses

from specrl_jax.agents.environment_protocol import StepResult
from specrl_jax.evaluation.saved_policy import SavedPolicy
from specrl_jax.models.transformer import Params
from specrl_jax.responses import Responder
from specrl_jax.rewards.reading import Reading
from specrl_jax.rollout.requests import Requests


def play(
    policy: SavedPolicy,
    weights: Params,
    responder: Responder,
    prompt: str,
    answer: str,
    number: int,
) -> None:
    """Play an episode at the temperature of the run's evaluation, and print it as it proceeds.

    weights: from `policy.weights`.
    responder: from `build.make_responder`, with an environment.
    answer: of the problem.
    number: of the prompt, so each has its own noise.

    Raises a one-line ValueError if the prompt does not fit.
    """
    prompts = policy.prompts(prompt, answer)
    spec = policy.spec(prompts.tokens.shape[1], 1, policy.config.evaluate.temperature)
    shown = dataclasses.replace(responder, watch=_show)
    responses = shown.respond(spec, weights, Requests(prompts, policy.noise(number)))
    failure = responses.rewards.reasons[0]
    reward = f"reward {responses.rewards.rewards[0]:.4g}, turns {responses.turns.counts[0]}"
    print(f"{reward}, failed: {failure}" if failure else reward, flush=True)


def _show(row: int, said: Reading | StepResult) -> None:
    """Print what is said in the first episode; the others pad its batch."""
    if row:
        return
    if isinstance(said, Reading):
        cut = "" if said.ended else " [cut at rollout.response_len]"
        print(f"assistant: {said.text}{cut}", flush=True)
    elif said.observation:
        print(f"{said.role}: {said.observation}", flush=True)
