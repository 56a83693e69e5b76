"""Advantages of the tokens of a batch, from its rewards. Pure functions.

`ADVANTAGES` holds every choice of `config.algorithm.advantage`. To add one, write a function with
the signature of `Advantage.estimate` and add it to the table.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.inputs import reward_terms
from specrl_jax.types import Batch

EPSILON = 1e-6  # ε, which is added to standard deviations
# Rewards that cancel leave a share of what they are, from rounding and from ε.
_CANCELLED = 1e-4


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """Settings of all advantages; hashable."""

    group_size: int  # G, responses per prompt
    normalize_std: bool  # divide by the group's standard deviation
    leave_one_out: bool  # compare with the mean of the others
    gamma: float  # discount per token, in [0, 1]
    gae_lambda: float  # in [0, 1]: 0 trusts the critic (little variance), 1 the reward (no bias)
    reward_weights: tuple[float, ...] = ()  # of K rewards, where an advantage takes each apart
    segment: int = 0  # tokens between two boundaries at which responses fork
    turn_discount: float = 1.0  # per turn, in [0, 1]

    @classmethod
    def from_config(cls, config, group_size: int) -> "AdvantageConfig":
        weights = ()
        if choose_advantage(config).by_function:
            weights = tuple(reward_terms(config.reward.name).values())
            weights += (-1.0,) * bool(config.reward.overlong_tokens)
        return cls(
            reward_weights=weights,
            group_size=group_size,
            normalize_std=config.algorithm.normalize_std,
            leave_one_out=config.algorithm.leave_one_out,
            gamma=config.critic.gamma,
            gae_lambda=config.critic.gae_lambda,
            segment=config.rollout.fork.segment,
            turn_discount=config.algorithm.turn_discount,
        )


class Estimate(NamedTuple):
    """Result of an advantage function."""

    advantages: Array  # [B, R], 0 outside the mask
    returns: Array | None  # [B, R], the critic's targets; None without a critic
    metrics: dict[str, Array]  # scalars by metric name; nan where there is no value


@dataclasses.dataclass(frozen=True)
class Advantage:
    """One choice of `config.algorithm.advantage`."""

    # (rewards [B] or [B, K], batch, config) → Estimate. Rows of a group are contiguous; all arrays
    # are split along B. The batch's own advantages are 0.
    estimate: Callable[[Array, Batch, AdvantageConfig], Estimate]
    needs_critic: bool = False  # the batch has values, and returns are asked for
    min_group_size: int = 2  # responses per prompt
    # Rewards are [B, K]: of each function of a sum, and last of all the price of length, if any.
    by_function: bool = False
    pairs: bool = False  # they mark the pairs of an objective that compares pairs
    needs_forks: bool = False  # they compare responses that share a beginning
    by_turn: bool = False  # rewards are [B, K], of each turn of an episode; 0 after the last


def group_relative(rewards: Array, config: AdvantageConfig) -> Array:
    """Return the advantage [B] of a response over the other responses to its prompt.

        Aᵢ = (rᵢ − mean(r)) / (std(r) + ε)     GRPO, arXiv 2402.03300, section 4.1.2
        Aᵢ =  rᵢ − mean(r)                     Dr. GRPO, arXiv 2503.20783, section 3.2
        Aᵢ =  rᵢ − mean(r without rᵢ)          RLOO, arXiv 2402.14740, eq. 7: G / (G − 1) times that

    mean and std are over the G responses of one prompt. std is the sample's,
    √(Σ(r − mean)² / (G − 1)), as in verl; the paper does not say which. A group of equal rewards
    gets exactly 0. Worked row, G = 4: rewards 1 0 0 1 have mean 0.5 and std √(1/3) = 0.577, hence
    advantages 0.866 −0.866 −0.866 0.866, or ±0.5 without the division.

    rewards: float [B], of JAX, not split, or NumPy; B = Q·G, the rows of a group are contiguous.
    """
    size = config.group_size
    rows = rewards.shape[0]
    xp = rewards.__array_namespace__()  # so that a report computes them without JAX's compiler
    groups = rewards.reshape(rows // size, size)
    # Measured from the group's first reward, equal rewards are zeros and their mean is exact.
    # Otherwise the rounding error of a mean of eight 0.1s, divided by ε, is an advantage of 0.01.
    shifted = groups - groups[:, :1]
    centred = shifted - xp.mean(shifted, axis=1, keepdims=True)
    if config.normalize_std:
        variance = xp.sum(xp.square(centred), axis=1, keepdims=True) / (size - 1)
        centred = centred / (xp.sqrt(variance) + EPSILON)
    if config.leave_one_out:
        centred = centred * (size / (size - 1))
    return centred.reshape(rows)


def group_decoupled(rewards: Array, config: AdvantageConfig) -> Array:
    """Return the advantage [B] of a response by K rewards (GDPO, arXiv 2601.05242, section 3).

        Aᵢ = Σₖ wₖ·Aᵢₖ / (std(Σₖ wₖ·Aₖ) + ε),    Aᵢₖ: `group_relative` of reward k

    Each reward is normalised in its group before the sum, so that two responses with the same sum
    of rewards may differ. std is over the batch, √(Σ x² / (B − 1)); the mean is 0, as in each
    group. Worked row, G = 2, weights 1: rewards (0, 1) and (0, 2) in one group, (0, 1) and (1, 1)
    in the other: A₁ = ∓0.707 ∓0.707, A₂ = ∓0.707 0; sums ∓1.414 ∓0.707, std 1.291, advantages
    ∓1.095 ∓0.548.

    rewards: float [B, K], of JAX, not split, or NumPy; B = Q·G, the rows of a group are contiguous.
    config: `reward_weights` has the K weights w.
    """
    weighted = [
        weight * group_relative(rewards[:, k], config)
        for k, weight in enumerate(config.reward_weights)
    ]
    total = sum(weighted)
    xp = rewards.__array_namespace__()
    # Else a batch of nothing but that remainder would be scaled to a standard deviation of 1.
    total = xp.where(xp.abs(total) <= _CANCELLED * sum(map(xp.abs, weighted)), 0, total)
    variance = xp.sum(xp.square(total)) / (len(total) - 1)
    return total / (xp.sqrt(variance) + EPSILON)


def best_and_worst(rewards: Array, config: AdvantageConfig) -> Array:
    """Return 1 for the best response of a group, −1 for the worst, else 0, float32 [B].

    Of responses with the same reward the first counts. All are 0 where all rewards are equal.
    Worked row, G = 4: rewards 0 1 1 0 give −1 1 0 0.

    rewards: float [B], not split; B = Q·G, the rows of a group are contiguous.
    """
    groups = rewards.reshape(-1, config.group_size)
    best = jax.nn.one_hot(jnp.argmax(groups, axis=1), config.group_size)
    worst = jax.nn.one_hot(jnp.argmin(groups, axis=1), config.group_size)
    return (best - worst).reshape(-1)


def prefix_relative(
    rewards: Array,
    tokens: Array,
    lens: Array,
    config: AdvantageConfig,
    *,
    by_size: bool,
) -> Array:
    """Return the advantage [B] of a response over those that share its prefixes (arXiv 2508.17445).

        Aᵢ = Σ_d w_d·(rᵢ − mean(r of the responses that share the first d segments)) / Σ_d w_d

    w_d is 1, or with `by_size` the number n of these responses, and 0 where a response shares its
    first d segments with no other, or ends with them. At d = 0 all of the group share the prompt.
    As options of `group_relative` the sums are divided by their std over the batch, and each
    difference gets the factor n / (n − 1). Differs from the authors' code, which whitens over
    tokens: here a group of equal rewards gets exactly 0. Worked row, G = 4: rewards 1 0 0 0, the
    first two share a segment, and so do the others. d = 0: 0.75 −0.25 −0.25 −0.25; d = 1: 0.5 −0.5
    0 0; advantages 0.625 −0.375 −0.125 −0.125, by size 0.667 −0.333 −0.167 −0.167.

    rewards: float32 [B], not split; B = Q·G, the rows of a group are contiguous.
    tokens, lens: int32 [B, R] and [B], the responses, not split.
    """
    size = config.group_size
    rewards = rewards.reshape(-1, size)
    tokens = tokens.reshape(-1, size, tokens.shape[1])
    lens = lens.reshape(-1, size)
    differences = rewards[:, :, None] - rewards[:, None, :]
    alike = jnp.ones(differences.shape, bool)  # [Q, G, G]: two responses share the first segments
    total = jnp.zeros_like(rewards)
    weights = jnp.zeros_like(rewards)
    for first in range(0, tokens.shape[2], config.segment):
        if first:
            segment = tokens[:, :, first - config.segment : first]
            alike &= jnp.all(segment[:, :, None] == segment[:, None, :], axis=3)
            goes_on = lens > first
            alike &= goes_on[:, :, None] & goes_on[:, None, :]
        count = jnp.sum(alike, axis=2)
        others = count - 1 if config.leave_one_out else count
        centred = jnp.sum(jnp.where(alike, differences, 0), axis=2) / jnp.maximum(others, 1)
        weight = jnp.where(count > 1, count if by_size else 1, 0)
        total += weight * centred
        weights += weight
    advantages = total / weights
    if config.normalize_std:
        advantages = advantages / (jnp.std(advantages, ddof=1) + EPSILON)
    return advantages.reshape(-1)


def turn_relative(rewards: Array, turn_ends: Array, config: AdvantageConfig) -> Array:
    """Return the advantage [B, K] of each turn over the same turn of the other episodes.

        Gₖ = Σⱼ γ^(j − k)·rⱼ over the turns j ≥ k,    Aₖ = (Gₖ − mean(Gₖ)) / (std(Gₖ) + ε)

    mean and std are over the episodes of the prompt that have a turn k, with the options of
    `group_relative`; a turn that one episode alone has gets 0. So a turn is not blamed for the
    turns before it. Worked row, G = 2, γ = 0.5, without the division: rewards 0 1 and 1, two turns
    and one, have returns 0.5 1 and 1, hence advantages −0.25 0 and 0.25.

    rewards: float32 [B, K], of each turn; not split; B = Q·G, the rows of a group are contiguous.
    turn_ends: int32 [B, K], 0 for turns that an episode does not have.
    """
    later = jnp.zeros_like(rewards[:, 0])
    returns = []
    for reward in rewards.T[::-1]:
        later = reward + config.turn_discount * later
        returns.append(later)
    groups = jnp.stack(returns[::-1], axis=1).reshape(-1, config.group_size, rewards.shape[1])
    has = (turn_ends > 0).reshape(groups.shape)
    count = jnp.sum(has, axis=1, keepdims=True)
    both = has[:, :, None] & has[:, None, :]
    differences = jnp.where(both, groups[:, :, None] - groups[:, None, :], 0)  # [Q, G, G, K]
    centred = jnp.sum(differences, axis=2) / jnp.maximum(count, 1)
    others = jnp.maximum(count - 1, 1)
    if config.normalize_std:
        variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True) / others
        centred = centred / (jnp.sqrt(variance) + EPSILON)
    if config.leave_one_out:
        centred = centred * (count / others)
    return centred.reshape(rewards.shape)


def gae(rewards: Array, values: Array, mask: Array, config: AdvantageConfig) -> tuple[Array, Array]:
    """Estimate generalized advantages of responses' tokens (arXiv 1506.02438, eq. 16).

        δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ)        rₜ: the response's reward at its last token, else 0
        Aₜ = δₜ + γλ·Aₜ₊₁                  V and A after the last token: 0
        Rₜ = Aₜ + V(sₜ)                    the critic's target

    γ = λ = 1 is reward − V(sₜ). Worked row, γ = 1, λ = 0.5, reward 1, values 0.2 0.4 0.6: δ = 0.2
    0.2 0.4, A = 0.4 0.4 0.4, R = 0.6 0.8 1.

    rewards: float32 [B].
    values: float32 [B, R], of the state before each token.
    mask: bool [B, R], the policy's tokens; an environment's tokens may lie between them.

    Returns advantages and returns [B, R], 0 outside the mask.
    """
    values = jnp.where(mask, values, 0)

    def step_back(later: tuple[Array, Array, Array], token: tuple[Array, Array]):
        next_advantage, next_value, reward = later
        value, inside = token
        delta = reward + config.gamma * next_value - value
        advantage = delta + config.gamma * config.gae_lambda * next_advantage
        # Tokens outside the mask are passed over.
        later = (
            jnp.where(inside, advantage, next_advantage),
            jnp.where(inside, value, next_value),
            jnp.where(inside, 0.0, reward),
        )
        return later, jnp.where(inside, advantage, 0.0)

    zero = jnp.zeros_like(values[:, 0])
    start = (zero, zero, rewards)  # the first token from the right gets the reward
    _, advantages = jax.lax.scan(step_back, start, (values.T, mask.T), reverse=True)
    advantages = advantages.T
    return advantages, jnp.where(mask, advantages + values, 0)


def whiten(advantages: Array, mask: Array) -> Array:
    """Return advantages [B, R] with mean 0 and variance 1 over the mask's tokens; 0 outside.

    Differs from verl: the variance is Σ(A − mean)² / n; verl divides by n − 1.
    """
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(jnp.square(centred), mask)
    return jnp.where(mask, centred * jax.lax.rsqrt(variance + 1e-8), 0)


def _by_group(compare: Callable[[Array, AdvantageConfig], Array]) -> Callable[..., Estimate]:
    """Return the estimate by `compare(rewards, config)`, the same for all tokens of a response."""
    return lambda rewards, batch, config: _for_all_tokens(compare(_whole(rewards), config), batch)


@functools.partial(jax.jit, static_argnames=("config", "by_size"))
def _estimate_by_prefix(
    rewards: Array, batch: Batch, config: AdvantageConfig, *, by_size: bool
) -> Estimate:
    """Estimate by `prefix_relative`, the same for all tokens of a response."""
    slots = _whole(batch.prompt_lens)[:, None] + jnp.arange(batch.old_logprobs.shape[1])[None, :]
    tokens = jnp.take_along_axis(_whole(batch.tokens), slots, axis=1)
    lens = _whole(batch.response_lens)
    advantages = prefix_relative(_whole(rewards), tokens, lens, config, by_size=by_size)
    return _for_all_tokens(advantages, batch)


@functools.partial(jax.jit, static_argnums=2)
def _estimate_by_turn(rewards: Array, batch: Batch, config: AdvantageConfig) -> Estimate:
    """Estimate by `turn_relative`, the same for all tokens of a turn."""
    ends = _whole(batch.turn_ends)
    advantages = turn_relative(_whole(rewards), ends, config)
    slots = jnp.arange(batch.old_logprobs.shape[1], dtype=jnp.int32)
    over = (ends > 0)[:, None, :] & (slots[None, :, None] >= ends[:, None, :])
    turn = jnp.minimum(jnp.sum(over, axis=2), ends.shape[1] - 1)
    by_token = jnp.take_along_axis(advantages, turn, axis=1)
    rows = jax.typeof(batch.mask).sharding.spec
    by_token = jax.sharding.reshard(by_token, jax.P(*rows))
    return Estimate(jnp.where(batch.mask, by_token, 0), None, {})


def _whole(array: Array) -> Array:
    """Return [B, ...] whole on every device: a group may lie on two."""
    return jax.sharding.reshard(array, jax.P(*(None,) * array.ndim))


def _for_all_tokens(advantages: Array, batch: Batch) -> Estimate:
    """Give the tokens of responses their advantages [B], which are whole on every device."""
    rows = jax.typeof(batch.response_lens).sharding.spec[0]
    advantages = jax.sharding.reshard(advantages, jax.P(rows))
    return Estimate(jnp.where(batch.mask, advantages[:, None], 0), None, {})


@functools.partial(jax.jit, static_argnums=2)
def _estimate_by_gae(rewards: Array, batch: Batch, config: AdvantageConfig) -> Estimate:
    """Estimate by `gae`, whitened; measure what the critic explains of the returns."""
    mask = batch.mask
    values = batch.values
    advantages, returns = gae(rewards, values, mask, config)
    mean = masked_mean(returns, mask)
    variance = masked_mean(jnp.square(returns - mean), mask)
    errors = returns - values
    unexplained = masked_mean(jnp.square(errors - masked_mean(errors, mask)), mask)
    metrics = {
        "critic/value_mean": masked_mean(values, mask),
        # Where all returns are equal there is nothing to explain.
        "critic/explained_variance": jnp.where(
            variance > 1e-8, 1 - unexplained / variance, jnp.nan
        ),
    }
    return Estimate(whiten(advantages, mask), returns, metrics)


ADVANTAGES: dict[str, Advantage] = {
    "group": Advantage(_by_group(group_relative)),
    "gdpo": Advantage(_by_group(group_decoupled), by_function=True),
    "pair": Advantage(_by_group(best_and_worst), pairs=True),
    "tree": Advantage(functools.partial(_estimate_by_prefix, by_size=False), needs_forks=True),
    "tree_by_size": Advantage(
        functools.partial(_estimate_by_prefix, by_size=True), needs_forks=True
    ),
    "turn": Advantage(_estimate_by_turn, by_turn=True),
    "gae": Advantage(_estimate_by_gae, needs_critic=True, min_group_size=1),
}


def has_critic(kind: str) -> bool:
    """Return whether `config.critic.kind` is the kind of a critic; else there is none."""
    return kind != "none"


def choose_advantage(config) -> Advantage:
    """Return the advantage that `config.algorithm.advantage` names; "auto" is the first that fits.

    Raises ValueError where the advantage needs a critic and there is none, or the other way round.
    """
    name = config.algorithm.advantage
    critic = has_critic(config.critic.kind)
    fitting = {n: a for n, a in ADVANTAGES.items() if a.needs_critic == critic}
    if name == "auto":
        return next(iter(fitting.values()))
    if name not in fitting:
        raise ValueError(
            f"algorithm.advantage must be auto or {' or '.join(fitting)} where critic.kind is "
            f"{config.critic.kind}, got {name!r}"
        )
    return fitting[name]


def overlong_penalty(lens: Array, max_len: int, buffer: int) -> Array:
    """Return the penalty [B] in [0, 1] of a length (DAPO, arXiv 2503.14476, eq. 13, negated).

    0 up to max_len − buffer tokens, then rising evenly to 1 at `max_len`. Worked row, max_len 10,
    buffer 4: lengths 6, 7, 8, 10 cost 0, 0.25, 0.5, 1.

    lens: int [B], tokens.
    max_len: Tokens at which responses are cut off.
    buffer: Tokens, >= 1.
    """
    return jnp.clip((lens - (max_len - buffer)) / buffer, 0, 1)
