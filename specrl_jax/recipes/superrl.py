"""SuperRL (arXiv 2506.01096, section 3): an unsolved group learns its problem's solution.

A group is unsolved if none of its responses has reward 1. The solution replaces its last response,
with the loss −c·log π in place of all others. Only the update sees solutions.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.algorithms.update import join
from specrl_jax.config.fields import NEW_RUN, Check, Section, Values, When, field
from specrl_jax.config.kinds import WEIGHT
from specrl_jax.data.prompts import digest, encode_solutions
from specrl_jax.data.settings import SOLUTIONS
from specrl_jax.rollout.rows import where_rows
from specrl_jax.sharding import put
from specrl_jax.training.stage import Stage, StageResult
from specrl_jax.types import Batch


class Solutions(Stage):
    """Replaces the last response of each unsolved group with its problem's solution, if any."""

    after_logprobs = True  # its rows have none

    @staticmethod
    def asked_by(config) -> str:
        return "algorithm.solution_coef" if config.algorithm.solution_coef else ""

    @staticmethod
    def shapes(config, rollout, batch: Batch) -> Batch:
        weights = abstract.array(np.float32, batch.response_lens.shape, "batch")
        return dataclasses.replace(batch, supervised=weights)

    def __init__(self, config, prompts, tokenizer):
        length = config.rollout.response_len
        field = config.data.solution_field
        self.solutions = encode_solutions(prompts.examples, tokenizer, field, length)
        if not self.solutions:
            raise ValueError(
                f"rollout.response_len must fit a solution, got {length}: none of the "
                f"{len(prompts.lens)} training prompts has one that fits"
            )
        print(
            f"data: {len(self.solutions)} training prompts have a solution that fits in {length} "
            "tokens"
        )

    @property
    def digests(self) -> dict[str, str]:
        return {"solutions": digest(*self.solutions.values())}

    def __call__(self, run, state, batch, collected) -> StageResult:
        group_size = run.trained_group_size
        tokens = np.zeros(batch.old_logprobs.shape, np.int32)
        lens = np.zeros(len(tokens), np.int32)
        unsolved = collected.rewards.reshape(-1, group_size).max(axis=1) < 1
        for group in np.flatnonzero(unsolved):
            solution = self.solutions.get(collected.prompts.examples[group].prompt_id, ())
            row = (group + 1) * group_size - 1
            tokens[row, : len(solution)] = solution
            lens[row] = len(solution)
        weights = np.where(lens > 0, run.config.algorithm.solution_coef, 0).astype(np.float32)
        batch = _replace_rows(
            batch, put(tokens, "batch", None), put(lens, "batch"), put(weights, "batch")
        )
        return StageResult(
            batch, metrics={"update/solutions": np.count_nonzero(lens) / len(unsolved)}
        )


@jax.jit
def _replace_rows(batch: Batch, tokens_BR: Array, lens: Array, weights: Array) -> Batch:
    """Put the solutions `tokens_BR` into the batch where their length is not 0."""
    replaced = lens > 0
    slots = batch.tokens.shape[1] - tokens_BR.shape[1]
    tokens = join(batch.tokens[:, :slots], batch.prompt_lens, tokens_BR)
    return dataclasses.replace(
        batch,
        tokens=jnp.where(replaced[:, None], tokens, batch.tokens),
        response_lens=jnp.where(replaced, lens, batch.response_lens),
        advantages=jnp.where(replaced[:, None], 0, batch.advantages),
        supervised=weights,
        routing=jax.tree.map(lambda x: where_rows(replaced, jnp.zeros_like(x), x), batch.routing),
    )


STAGE = Solutions
METRICS = {"update/solutions": ("share of groups whose solution is learned", "1")}
LEARNS = When("algorithm.solution_coef", lambda c: c.algorithm.solution_coef > 0, "0.1")
EFFECTS = {SOLUTIONS: LEARNS}
# fmt: off
SECTIONS = (Section("algorithm", "", (
    field("solution_coef", 0.0, "SuperRL: weight of log π(solution) in unsolved groups; 0: off",
          WEIGHT, may_change=NEW_RUN),
)),)
# fmt: on


def _rules(config: Values) -> Iterator[Check]:
    if not config.algorithm.solution_coef:
        return
    coef = "algorithm.solution_coef"
    turns = config.environment.name
    yield coef, "0 where environment.name is set (a solution is one response)", not turns
    critic = config.critic.kind
    rule = f"0 where critic.kind is {critic} (it values what the policy wrote)"
    yield coef, rule, not has_critic(critic)
    rule = "0 where algorithm.dynamic_sampling is True (it leaves unsolved groups out)"
    yield coef, rule, not config.get("algorithm.dynamic_sampling")
    curriculum = config.curriculum.name
    rule = f"0 where curriculum.name is {curriculum} (it leaves unsolved groups out)"
    yield coef, rule, not config.meaning("curriculum.name").by_parts
    rule = "0 where algorithm.keep_sampling_mask is True (no sampler wrote a solution)"
    yield coef, rule, not config.algorithm.keep_sampling_mask


RULES = (_rules,)
