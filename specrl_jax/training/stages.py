"""Stages between a step's rollouts and its updates.

Each adds columns to the batch, or chooses which of its rows the updates use. `choices.stages_of`
returns a configuration's stages in their order.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms import off_policy
from specrl_jax.algorithms.advantages import choose_advantage, has_critic, overlong_penalty
from specrl_jax.algorithms.corrections import OLD_LOGPROBS
from specrl_jax.algorithms.evidence import Evidence
from specrl_jax.algorithms.scoring import (
    PackedRows,
    RowTokens,
    critic_values,
    logprob_gap,
    logprobs,
    pack_rows,
)
from specrl_jax.sharding import put
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.stage import Stage, StageResult
from specrl_jax.training.state import RunState
from specrl_jax.types import Batch, Rollout, Source

# Separates these random draws from others with the same seed and step.
_ROWS = 2


class SamplingMask(Stage):
    """Log-probs over the tokens that the sampler allowed."""

    @staticmethod
    def asked_by(config) -> str:
        return "algorithm.keep_sampling_mask" if config.algorithm.keep_sampling_mask else ""

    @staticmethod
    def shapes(config, rollout: Rollout, batch: Batch) -> Batch:
        return dataclasses.replace(batch, support=rollout.tokens.top_ids)

    def __call__(self, run, state, batch: Batch, collected: Collected) -> StageResult:
        tokens = collected.rollout.tokens
        support = _allowed(tokens.top_ids, tokens.top_logprobs)
        old = tokens.sampling_logprobs
        batch = dataclasses.replace(batch, old_logprobs=old, support=support)
        return StageResult(batch)


@jax.jit
def _allowed(ids: Array, logprobs: Array) -> Array:
    return jnp.where(jnp.isneginf(logprobs), -1, ids)


class Advantages(Stage):
    """Advantages; with a critic also its values, and its target returns."""

    @staticmethod
    def asked_by(config) -> str:
        return "algorithm.advantage"

    @staticmethod
    def shapes(config, rollout: Rollout, batch: Batch) -> Batch:
        if not has_critic(config.critic.kind):
            return batch
        return dataclasses.replace(batch, values=batch.advantages, returns=batch.advantages)

    def __call__(
        self, run: Run, state: RunState, batch: Batch, collected: Collected
    ) -> StageResult:
        critic = has_critic(run.config.critic.kind)
        if critic:
            base_params = state.base_params(run.model)
            packed = pack_all(run, batch)
            values = critic_values(
                run.update_spec, state.policy_state, packed, base_params, batch.routing
            )
            batch = dataclasses.replace(batch, values=values)
        advantage = choose_advantage(run.config)
        evidence = gather_evidence(run, batch, collected)
        settings = advantage.settings(run.config, run.trained_group_size)
        estimate = advantage.estimate(evidence, settings)
        batch = dataclasses.replace(batch, advantages=estimate.advantages, returns=estimate.returns)
        metrics = {name: float(x) for name, x in hosts.fetch(estimate.metrics).items()}
        if evidence.length_penalty is not None:
            metrics["reward/overlong"] = float(np.mean(evidence.length_penalty))
        # With a filter of groups or a critic, the rewards give the share instead.
        if not (run.collector_type.keeps_signal(run.config) or critic):
            by_group = has_signal(batch).reshape(-1, run.trained_group_size).any(axis=1)
            metrics["reward/no_signal"] = float(np.mean(~by_group))
        return StageResult(
            batch, metrics={name: x for name, x in metrics.items() if not math.isnan(x)}
        )


def gather_evidence(run: Run, batch: Batch, collected: Collected) -> Evidence:
    """Return the data from which a batch's advantages are estimated."""
    rewards = collected.rewards
    penalty = length_penalty(run.config, collected.rollout)
    if penalty is not None:
        rewards = (rewards - penalty).astype(np.float32)
    return Evidence(
        rewards=put(rewards, "batch"),
        batch=batch,
        length_penalty=penalty,
        by_function=collected.by_function,
        turns=collected.turns,
    )


def length_penalty(config, rollout: Rollout) -> np.ndarray | None:
    """Return the length penalty of each response, float32 [B]; None if there is none."""
    settings = config.reward
    if not settings.overlong_tokens:
        return None
    lens, sources = hosts.fetch((rollout.lens, rollout.tokens.sources))
    lens = lens - np.sum(sources == Source.ENVIRONMENT, axis=1)  # the policy's own tokens
    longest = config.rollout.response_len
    return settings.overlong_penalty * overlong_penalty(lens, longest, settings.overlong_tokens)


class WholeResponses(Stage):
    """Removes rows cut by the length limit: they get no tokens and count in no mean of a loss."""

    @staticmethod
    def asked_by(config) -> str:
        return "algorithm.mask.truncated" if config.algorithm.mask.truncated else ""

    def __call__(self, run, state, batch: Batch, collected: Collected) -> StageResult:
        kept = put(collected.ended, "batch")
        batch = dataclasses.replace(
            batch,
            response_lens=jnp.where(kept, batch.response_lens, 0),
            advantages=jnp.where(kept[:, None], batch.advantages, 0),
        )
        return StageResult(batch)


class ImportanceWeights(Stage):
    """Weights that correct the acceptance rule's bias; the loss caps them."""

    @staticmethod
    def asked_by(config) -> str:
        return "algorithm.importance_cap" if config.algorithm.importance_cap else ""

    @staticmethod
    def shapes(config, rollout: Rollout, batch: Batch) -> Batch:
        return dataclasses.replace(batch, importance_weights=batch.advantages)

    def __call__(self, run: Run, state, batch: Batch, collected: Collected) -> StageResult:
        mass = np.float32(collected.rejected_mass)
        rule = run.rollout_spec.accept
        weights = off_policy.importance_weights(collected.rollout, mass, rule)
        batch = dataclasses.replace(batch, importance_weights=weights)
        return StageResult(batch)


class Logprobs(Stage):
    """Log-probs under the reference, and old log-probs by the update's arithmetic."""

    @staticmethod
    def asked_by(config) -> str:
        if OLD_LOGPROBS[config.updates.old_logprobs].recomputed:
            return "updates.old_logprobs"
        return "algorithm.kl_coef" if config.algorithm.kl_coef else ""

    @staticmethod
    def shapes(config, rollout: Rollout, batch: Batch) -> Batch:
        column = batch.old_logprobs
        recomputed = OLD_LOGPROBS[config.updates.old_logprobs].recomputed
        return dataclasses.replace(
            batch,
            recomputed_logprobs=column if recomputed else None,
            ref_logprobs=column if config.algorithm.kl_coef else None,
        )

    def __call__(
        self, run: Run, state: RunState, batch: Batch, collected: Collected
    ) -> StageResult:
        packed = pack_all(run, batch)
        metrics = {}
        if OLD_LOGPROBS[run.config.updates.old_logprobs].recomputed:
            policy = state.policy_weights(run.model)
            old = logprobs(run.update_spec, policy, packed, batch.support, batch.routing)
            if not collected.stale:  # otherwise the difference is not due to arithmetic alone
                metrics["policy/rollout_train_logprob_gap"] = logprob_gap(batch, old)
            batch = dataclasses.replace(batch, recomputed_logprobs=old)
        if run.config.algorithm.kl_coef:
            policy = state.reference.policy(run.model)
            reference = logprobs(run.update_spec, policy, packed, batch.support, None)
            batch = dataclasses.replace(batch, ref_logprobs=reference)
        return StageResult(batch, metrics=metrics)


# Tools of stages ----------------------------------------------------------------------------------


def pack_all(run: Run, batch: Batch) -> PackedRows:
    """Pack all rows of a batch that have a response."""
    row_tokens = RowTokens.fetch(batch)
    row_ids = np.arange(len(row_tokens.tokens))
    return pack_rows(run.update_spec, row_tokens, row_ids, row_tokens.response_lens > 0)


def has_signal(batch: Batch) -> np.ndarray:
    """bool [B], rows with an advantage that is not exactly 0."""
    return hosts.fetch(_has_signal(batch.advantages, batch.mask))


@jax.jit
def _has_signal(advantages: Array, mask: Array) -> Array:
    return jnp.any((advantages != 0) & mask, axis=1)


def row_rng(run: Run, state: RunState) -> np.random.Generator:
    """Return a random generator for the rows of a step, the same in every process."""
    return np.random.default_rng([run.config.seed, _ROWS, state.step])


def mini_batches(run: Run, row_ids: np.ndarray) -> list[np.ndarray]:
    """Split row ids into mini-batches."""
    return np.split(row_ids, len(row_ids) // run.config.updates.mini_batch_size)
