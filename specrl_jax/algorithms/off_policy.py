"""Distance of reused draft tokens from the policy: measures and importance weights.

At one position, with the draft from π_old and r = π / π_old, SPEC-RL's ratio rule emits

    b(y) = min(π_old(y), ℓ·π(y)) + d·π(y),    d = 1 − Σ min(π_old, ℓ·π)

accepted tokens by the first term, tokens sampled after a rejection by the second. For every ℓ,
even 1, b lies between π_old and π: a token after a rejection is not sampled from the residual.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.types import Rollout, Source


def _accepted_mask(rollout: Rollout) -> Array:
    """Return bool [B, R], tokens accepted from earlier responses."""
    inside = jnp.arange(rollout.tokens.ids.shape[1])[None, :] < rollout.lens[:, None]
    return inside & (rollout.tokens.sources == Source.REUSED)


def measure(rollout: Rollout, rejected_mass: float, rule: Any) -> dict[str, float]:
    """Return the `reuse/*` metrics of a rollout; empty if no token was accepted.

    rejected_mass: from `estimate_rejected_mass`.
    rule: the acceptance rule in use; without its `lenience_dependent_share` there is no
        `reuse/lenient_fraction`.
    """
    measured = _measure(rollout, rule)
    values, prefix_lens = hosts.fetch((measured, rollout.prefix_lens))
    if not prefix_lens.any():
        return {}
    return {name: float(x) for name, x in values.items()} | {"reuse/rejected_mass": rejected_mass}


@jax.jit
def _measure(rollout: Rollout, rule: Any) -> dict[str, Array]:
    mask = _accepted_mask(rollout)
    tokens = rollout.tokens
    log_ratio = jnp.where(mask, tokens.sampling_logprobs - tokens.draft_logprobs, 0.0)
    # Over y ~ π_old the mean of r − 1 − log r is KL(π_old ‖ π). Accepted tokens are distributed as
    # min(π_old, ℓπ) instead.
    divergence = jnp.expm1(log_ratio) - log_ratio
    replicated = jax.sharding.reshard(jnp.where(mask, log_ratio, jnp.nan), jax.P(None, None))
    low, middle, high = jnp.nanquantile(replicated, jnp.array([0.05, 0.5, 0.95]))

    values = {
        "reuse/log_ratio_mean": masked_mean(log_ratio, mask),
        "reuse/log_ratio_p05": low,
        "reuse/log_ratio_p50": middle,
        "reuse/log_ratio_p95": high,
        "reuse/kl": masked_mean(divergence, mask),
    }
    if rule.lenience_dependent_share is not None:
        values["reuse/lenient_fraction"] = masked_mean(
            rule.lenience_dependent_share(log_ratio), mask
        )
    return values


def estimate_rejected_mass(prefix_lens: np.ndarray, draft_lens: np.ndarray) -> float:
    """Return d, the mean probability of a rejection: rejections / verified positions.

    prefix_lens, draft_lens: int [B], tokens accepted and drafted.
    """
    rejected = int(np.sum(prefix_lens < draft_lens))
    return rejected / max(int(np.sum(prefix_lens)) + rejected, 1)


@jax.jit
def importance_weights(rollout: Rollout, rejected_mass: Array, rule: Any) -> Array:
    """Return weights float32 [B, R] >= 0 that turn means over emitted tokens into means under π.

        accepted by ratio      (1 − d)·max(r, 1/ℓ)
        accepted at random     r
        all others             1

    With these, for any f: Σ min(π_old, ℓπ)·(1 − d)·π/min(π_old, ℓπ)·f + d·Σ π·f = Σ π·f. Exact at
    a position for its own d and a draft sampled from π_old. Two approximations: d is the rollout's
    mean, and a token that was accepted before counts as sampled from the policy that last accepted
    it. Rows verified in earlier steps use this step's d.

    rejected_mass: d.
    rule: the acceptance rule in use; it has no weight if it emits exactly π.
    """
    tokens = rollout.tokens
    if rule.importance_weight is None:
        return jnp.ones_like(tokens.sampling_logprobs)
    log_ratio = tokens.sampling_logprobs - tokens.draft_logprobs
    weights = rule.importance_weight(log_ratio, rejected_mass)
    return jnp.where(_accepted_mask(rollout), weights, 1.0)
