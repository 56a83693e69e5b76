"""Trust regions in probability: a token whose probability has moved too far has no gradient.

    moved       |π(y) − π_rollout(y)| > δ                               prime-rl's default, δ = 0.3
    moved on    π(y) − π_rollout(y) > δ where A > 0, < −δ where A < 0     DPPO, arXiv 2602.04879

A ratio is large where a rare token has moved by next to nothing, and near 1 where a likely token
has moved by much: 1e-4 → 5e-4 has r = 5, 0.9 → 0.6 has r = 0.67. |π − π_rollout| is the total
variation between "this token, or another" under both policies. DPPO's rule takes the place of
the ratio's clip, and like the clip it lets a token come back.

Worked rows, δ = 0.2, (π_rollout → π, A): (0.5 → 0.8, 1) is dropped by both; (0.5 → 0.8, −1) by
the first alone; (0.5 → 0.2, −1) by both; (1e-4 → 5e-4, 1) by none.
"""

import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.corrections import Policies


def find_moved(policies: Policies, advantages: Array, mask: Array, bound: float) -> Array:
    """Return bool [B, R], tokens with |π_train − π_rollout| above the bound."""
    return jnp.abs(jnp.exp(policies.train) - jnp.exp(policies.rollout)) > bound


def find_moved_on(policies: Policies, advantages: Array, mask: Array, bound: float) -> Array:
    """Return bool [B, R], tokens that have moved by more than the bound as their advantage asks."""
    change = jnp.exp(policies.current) - jnp.exp(policies.rollout)
    return change * jnp.sign(advantages) > bound
