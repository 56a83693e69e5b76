"""Metrics of a step's rollouts."""

from collections.abc import Sequence

import numpy as np

from specrl_jax import hosts
from specrl_jax.algorithms import off_policy
from specrl_jax.responses import Responses, mean_by_function
from specrl_jax.rollout.acceptance import AcceptanceRule
from specrl_jax.rollout.spec import noise_visits
from specrl_jax.telemetry.rollout_metrics import (
    GROUP_REWARDS,
    noise_metrics,
    reward_metrics,
    rollout_metrics,
    turn_metrics,
)
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.state import RolloutState
from specrl_jax.types import Source


def collect_metrics(
    run: Run, state: RolloutState, collected: Collected, rollouts: Sequence[Responses]
) -> dict[str, float]:
    """Return the metrics of all rollouts of a step."""
    metrics = collected.metrics | _reward_metrics(run, collected, rollouts)
    metrics["data/prompts_seen"] = state.prompts_seen
    metrics["data/passes"] = state.prompts_seen / len(run.prompts.lens)
    metrics["rollout/draft_store_gib"] = state.store.nbytes / 2**30
    on_host = [hosts.fetch((x.rollout.prefix_lens, x.rollout.tokens.sources)) for x in rollouts]
    prefix_lens = _joined(prefix_lens for prefix_lens, _ in on_host)
    draft_lens = _joined(x.draft_lens for x in rollouts)
    tokens = _joined(x.tokens for x in rollouts)
    lens = _joined(x.lens for x in rollouts)
    metrics |= rollout_metrics(
        tokens,
        lens,
        prefix_lens,
        _joined(x.ended for x in rollouts),
        draft_lens=draft_lens,
        previous=(
            _joined(x.previous[0] for x in rollouts),
            _joined(x.previous[1] for x in rollouts),
        ),
        environment=_joined(_count(x, Source.ENVIRONMENT) for _, x in on_host),
        copied=_joined(_count(x, Source.COPIED) for _, x in on_host),
        group_size=run.rollout_spec.group_size,
    )
    if rollouts[0].turns is not None:
        metrics |= turn_metrics(
            _joined(x.turns.counts for x in rollouts), _joined(x.turns.roles for x in rollouts)
        )
    rule = run.rollout_spec.accept
    if not rule.samples_every_token:
        metrics |= off_policy.measure(collected.rollout, collected.rejected_mass, rule)
    return metrics


def rejected_mass(rule: AcceptanceRule, rollouts: Sequence[Responses]) -> float:
    """Estimate the rejected mass of rollouts under a rule; 0 if the rule has no bias."""
    if rule.samples_every_token:
        return 0.0
    prefix_lens = _joined(hosts.fetch(x.rollout.prefix_lens) for x in rollouts)
    return off_policy.estimate_rejected_mass(prefix_lens, _joined(x.draft_lens for x in rollouts))


def _reward_metrics(run: Run, batch: Collected, rollouts: Sequence[Responses]) -> dict[str, float]:
    rewards = _joined(x.rewards.rewards for x in rollouts)
    failed = _joined(x.rewards.failed for x in rollouts)
    metrics = reward_metrics(rewards, failed, run.rollout_spec.group_size)
    metrics |= {f"reward/{name}": mean for name, mean in mean_by_function(rollouts).items()}
    if noise_visits(run.config) > 1:
        metrics |= noise_metrics(_joined(x.on_reused_noise for x in rollouts), rewards)
    if run.rollout_spec.group_size < run.config.rollout.group_size:  # rollouts of parts
        none_failed = np.zeros(len(batch.rewards), bool)
        trained = reward_metrics(batch.rewards, none_failed, run.trained_group_size)
        metrics |= {name: trained[name] for name in GROUP_REWARDS}
    return metrics


def _joined(arrays) -> np.ndarray:
    return np.concatenate(list(arrays))


def _count(sources: np.ndarray, source: Source) -> np.ndarray:
    """Return how many tokens of each row have this source, int [B]."""
    return np.sum(sources == source, axis=1)
