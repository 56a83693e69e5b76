"""From the rewards of a batch to its advantages. Pure functions, no state.

Takes one reward per response, gives one advantage per response; the update spreads it over the
response's tokens.
"""

import jax.numpy as jnp
from jax import Array


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
