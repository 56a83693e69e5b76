"""Advantages of the tokens of a batch, from its rewards. Pure functions.

`ADVANTAGES` contains every choice of `config.algorithm.advantage`. To add one, write a function
with the signature of `Advantage.estimate` and add `"name": Advantage(function)` to the table.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.evidence import Advantage, AdvantageConfig, Estimate, Evidence
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.registry import Table
from specrl_jax.types import Batch

EPSILON = 1e-6  # ε, added to standard deviations


def group_relative(rewards: Array, config: AdvantageConfig) -> Array:
    """Return the advantage [B] of a response relative to the other responses to its prompt.

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
    xp = rewards.__array_namespace__()  # reports use NumPy, without JAX's compiler
    groups = rewards.reshape(rows // size, size)
    # Relative to the group's first reward, equal rewards are zeros and their mean is exact.
    # Otherwise the rounding error of a mean of eight 0.1s, divided by ε, is an advantage of 0.01.
    shifted = groups - groups[:, :1]
    centred = shifted - xp.mean(shifted, axis=1, keepdims=True)
    if config.normalize_std:
        variance = xp.sum(xp.square(centred), axis=1, keepdims=True) / (size - 1)
        centred = centred / (xp.sqrt(variance) + EPSILON)
    if config.leave_one_out:
        centred = centred * (size / (size - 1))
    return centred.reshape(rows)


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
        # Tokens outside the mask are skipped.
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


def by_group(compare: Callable[[Array, AdvantageConfig], Array]) -> Callable[..., Estimate]:
    """Return the estimate by `compare(rewards, config)`, the same for all tokens of a response."""

    def estimate(evidence: Evidence, config: AdvantageConfig) -> Estimate:
        return for_all_tokens(compare(whole(evidence.rewards), config), evidence.batch)

    return estimate


def whole(array: Array) -> Array:
    """Replicate [B, ...] on every device: a group may be split over two."""
    return jax.sharding.reshard(array, jax.P(*(None,) * array.ndim))


def for_all_tokens(advantages: Array, batch: Batch) -> Estimate:
    """Give all tokens of each response its advantage [B], replicated on every device."""
    rows = jax.typeof(batch.response_lens).sharding.spec[0]
    advantages = jax.sharding.reshard(advantages, jax.P(rows))
    return Estimate(jnp.where(batch.mask, advantages[:, None], 0), None, {})


def _estimate_by_gae(evidence: Evidence, config: AdvantageConfig) -> Estimate:
    return _whitened_gae(evidence.rewards, evidence.batch, config)


@functools.partial(jax.jit, static_argnums=2)
def _whitened_gae(rewards: Array, batch: Batch, config: AdvantageConfig) -> Estimate:
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
        # If all returns are equal there is nothing to explain.
        "critic/explained_variance": jnp.where(
            variance > 1e-8, 1 - unexplained / variance, jnp.nan
        ),
    }
    return Estimate(whiten(advantages, mask), returns, metrics)


ADVANTAGES: dict[str, Advantage] = Table(
    "ADVANTAGES",
    {
        "group": Advantage(by_group(group_relative)),
        "gae": Advantage(_estimate_by_gae, needs_critic=True, min_group_size=1),
    },
)


def has_critic(kind: str) -> bool:
    """Return whether `config.critic.kind` means that there is a critic."""
    return kind != "none"


def choose_advantage(config) -> Advantage:
    """Return the advantage that `config.algorithm.advantage` names; "auto" is the first that fits.

    Raises ValueError if the advantage needs a critic and there is none, or the reverse.
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

    0 up to max_len − buffer tokens, then rising linearly to 1 at `max_len`. Worked row, max_len 10,
    buffer 4: lengths 6, 7, 8, 10 cost 0, 0.25, 0.5, 1.

    lens: int [B], tokens.
    max_len: Tokens at which responses are cut off.
    buffer: Tokens, >= 1.
    """
    return jnp.clip((lens - (max_len - buffer)) / buffer, 0, 1)
