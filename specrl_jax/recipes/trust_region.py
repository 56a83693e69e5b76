"""Trust regions in probability: a token whose probability has moved too far has no gradient.

    mask `moved`        |π_train(y) − π_rollout(y)| > δ             IPO, prime-rl's default, δ = 0.3
    objective `dppo`    π(y) − π_old(y) > δ where A > 0, < −δ where A < 0
                        DPPO with the binary total variation (arXiv 2602.04879), δ = 0.2

A ratio is large when a rare token has hardly moved, and near 1 when a likely token has moved a lot:
1e-4 → 5e-4 has r = 5, 0.9 → 0.6 has r = 0.67. |π − π_rollout| is the total variation of "this
token, or another". DPPO's rule replaces the ratio's clip, and as with the clip a token may move
back; `clip_low` and `clip_high` are then δ in the two directions.

Worked rows, δ = 0.2, (π_old → π, A): (0.5 → 0.8, 1) is dropped by both; (0.5 → 0.8, −1) by the mask
only; (0.5 → 0.2, −1) by both; (1e-4 → 5e-4, 1) by neither.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.corrections import Policies, exp_bounded
from specrl_jax.algorithms.losses import LossConfig, Objective
from specrl_jax.config.fields import NEW_RUN, Check, Section, Values, field
from specrl_jax.config.kinds import BELOW_ONE


def find_moved(policies: Policies, advantages: Array, mask: Array, bound: float) -> Array:
    """Return bool [B, R], tokens with |π_train − π_rollout| above the bound."""
    return jnp.abs(jnp.exp(policies.train) - jnp.exp(policies.rollout)) > bound


def bounded_change(
    log_ratio: Array, logprobs: Array, advantages: Array, config: LossConfig
) -> tuple[Array, Array]:
    """Return DPPO's objective as a loss per token, and where it has no gradient.

        loss = −r·A,    constant where π − π_old > δ_high and A > 0, or < −δ_low and A < 0

    Arguments as in `losses.clipped_surrogate`; δ_low and δ_high are its `clip_low` and `clip_high`.
    log_ratio is per token.
    """
    loss = -exp_bounded(log_ratio) * advantages
    change = jnp.exp(logprobs) - jnp.exp(logprobs - log_ratio)
    too_high = (advantages > 0) & (change > config.clip_high)
    dropped = too_high | ((advantages < 0) & (change < -config.clip_low))
    return jnp.where(dropped, jax.lax.stop_gradient(loss), loss), dropped


def rules(config: Values) -> Iterator[Check]:
    """Yield the rules of the objective."""
    where = f"where algorithm.objective is {config.algorithm.objective}"
    rule = f"token {where} (a probability belongs to a token)"
    yield "algorithm.ratio", rule, config.algorithm.ratio == "token"


MASKS = {"moved": find_moved}
METRICS = {"policy/masked_moved": ("share of tokens masked, their probability has moved", "1")}
OBJECTIVES = {"dppo": Objective(bounded_change, rules=rules)}
# fmt: off
SECTIONS = (Section("algorithm.mask", "", (
    field("moved", 0.0, "|π_train - π_rollout| above this; IPO (prime-rl) 0.3", BELOW_ONE),
), may_change=NEW_RUN),)
# fmt: on
