"""From the rewards of a batch to its advantages. Pure functions, no state.

`group_relative` gives one advantage per response, which the update spreads over its tokens; `gae`
gives one per token, from a critic's values.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.masked import masked_mean


def group_relative(
    rewards: Array,
    group_size: int,
    *,
    normalize_std: bool,
    leave_one_out: bool = False,
    epsilon: float = 1e-6,
) -> Array:
    """Advantage of a response over the other responses to its prompt.

        Aᵢ = (rᵢ − mean(r)) / (std(r) + ε)     GRPO, arXiv 2402.03300, section 4.1.2
        Aᵢ =  rᵢ − mean(r)                     Dr. GRPO, arXiv 2503.20783, section 3.2
        Aᵢ =  rᵢ − mean(r without rᵢ)          RLOO, arXiv 2402.14740, eq. 7: G / (G − 1) times that

    mean and std are over the G responses of one prompt. The paper does not say which std: here it
    is the sample's, √(Σ(r − mean)² / (G − 1)), as in verl (`torch.std`), on which SPEC-RL's runs
    were made; the population's would make every advantage √(G / (G − 1)) times larger.

    A group of equal rewards gets exactly 0. Worked row, G = 4: rewards 1 0 0 1 have mean 0.5 and
    std √(1/3) = 0.577, hence advantages 0.866 −0.866 −0.866 0.866, or ±0.5 without the division.

    Args:
        rewards: float32 [B]; the rows of a group are contiguous (B = Q·G).
        group_size: G, responses per prompt, at least 2.
        normalize_std: Divide by the group's standard deviation.
        leave_one_out: Compare with the mean of the others.
        epsilon: ε, in units of reward.

    Returns:
        float32 [B].

    Raises:
        ValueError: G < 2, or B is not a multiple of G.
    """
    if group_size < 2:
        raise ValueError(
            f"group_size must be >= 2 for group-relative advantages, got {group_size}; "
            "a lone response has nothing to be compared with"
        )
    rows = rewards.shape[0]
    if rows % group_size:
        raise ValueError(
            f"rewards must hold whole groups of group_size {group_size}, got {rows} rows"
        )
    groups = rewards.reshape(rows // group_size, group_size)
    # Measured from the group's first reward, equal rewards are zeros and their mean is exact;
    # the rounding error of a mean of eight 0.1s, divided by ε, would be an advantage of 0.01.
    shifted = groups - groups[:, :1]
    centred = shifted - jnp.mean(shifted, axis=1, keepdims=True)
    if normalize_std:
        variance = jnp.sum(jnp.square(centred), axis=1, keepdims=True) / (group_size - 1)
        centred = centred / (jnp.sqrt(variance) + epsilon)
    if leave_one_out:
        centred = centred * (group_size / (group_size - 1))
    return centred.reshape(rows)


def gae(
    rewards: Array, values: Array, mask: Array, *, gamma: float, gae_lambda: float
) -> tuple[Array, Array]:
    """Generalized advantage estimation over the tokens of responses (arXiv 1506.02438, eq. 16).

        δₜ = rₜ + γ·V(sₜ₊₁) − V(sₜ)        rₜ: the response's reward at its last token, else 0
        Aₜ = δₜ + γλ·Aₜ₊₁                  V and A behind the last token: 0
        Rₜ = Aₜ + V(sₜ)                    the critic's target

    γ = λ = 1 is reward − V(sₜ). Worked row, γ = 1, λ = 0.5, reward 1, values 0.2 0.4 0.6: δ = 0.2
    0.2 0.4, A = 0.4 0.4 0.4, R = 0.6 0.8 1.

    Args:
        rewards: float32 [B].
        values: float32 [B, R], of the state before each token.
        mask: bool [B, R], the policy's tokens; those of its turns need not be side by side.
        gamma: Discount per token, in [0, 1].
        gae_lambda: λ, in [0, 1]: 0 trusts the critic (little variance), 1 the reward (no bias).

    Returns:
        Advantages and returns [B, R], 0 outside the mask.
    """
    values = jnp.where(mask, values, 0)

    def back(behind: tuple[Array, Array, Array], now: tuple[Array, Array]):
        advantage, next_value, given = behind
        value, here = now
        delta = given + gamma * next_value - value
        advantage_here = delta + gamma * gae_lambda * advantage
        # What lies outside the mask, behind a response or between its turns, is passed over.
        behind = (
            jnp.where(here, advantage_here, advantage),
            jnp.where(here, value, next_value),
            jnp.where(here, 0.0, given),
        )
        return behind, jnp.where(here, advantage_here, 0.0)

    zero = jnp.zeros_like(values[:, 0])
    start = (zero, zero, rewards)  # the reward is that of the first token from the right
    _, found = jax.lax.scan(back, start, (values.T, mask.T), reverse=True)
    advantages = found.T
    return advantages, jnp.where(mask, advantages + values, 0)


def whiten(advantages: Array, mask: Array, epsilon: float = 1e-8) -> Array:
    """Advantages [B, R] with mean 0 and variance 1 over the mask's tokens; 0 outside."""
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(jnp.square(centred), mask)
    return jnp.where(mask, centred * jax.lax.rsqrt(variance + epsilon), 0)


def overlong_penalty(lens: Array, longest: int, buffer: int) -> Array:
    """What a response's length costs, in [0, 1] (DAPO, arXiv 2503.14476, eq. 13, negated).

    Nothing up to longest - buffer tokens, then rising evenly to 1 at `longest`. Worked row,
    longest 10, buffer 4: lengths 6, 7, 8, 10 cost 0, 0.25, 0.5, 1.

    Args:
        lens: int [B], tokens. longest: at which responses are cut off. buffer: >= 1, tokens.
    """
    return jnp.clip((lens - (longest - buffer)) / buffer, 0, 1)
