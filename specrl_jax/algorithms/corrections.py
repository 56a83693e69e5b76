"""Off-policy corrections: importance weights, and token and sequence masks.

Pure functions of arrays [B, R] in float32 nats, without gradient. `OLD_LOGPROBS` selects the old
policy, `MASKS` the tokens that are left out. All log-probs are at the rollout's temperature, over
the tokens of `Batch.support` or over all. docs/off_policy.md explains what to use when.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.registry import Table
from specrl_jax.types import Batch

# Log-ratios are bounded by ±20, where the gradient is 0. e^20 = 4.9e8 keeps products with
# advantages finite; e^89 is inf in float32, and inf · 0 in the gradient of an unused branch is nan.
# No clip range reaches it. Differs from verl, where GSPO's log s is bounded by 10.
MAX_LOG_RATIO = 20.0


def exp_bounded(log_ratio: Array) -> Array:
    """Return e^log_ratio, with log-ratios bounded by ±MAX_LOG_RATIO."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


# Policies -----------------------------------------------------------------------------------


class Policies(NamedTuple):
    """Log-probs [B, R] of the same tokens under the policies that an update compares."""

    rollout: Array  # π_rollout: as sampled
    old: Array  # π_old: the denominator of the ratio that objectives clip
    train: Array  # π_train: the numerator of the ratio π_train / π_rollout of masks
    current: Array  # π: the weights being trained

    @property
    def log_ratio(self) -> Array:
        """Return log π_train − log π_rollout."""
        return self.train - self.rollout


@dataclasses.dataclass(frozen=True)
class OldLogprobs:
    """One choice of `config.updates.old_logprobs`."""

    by_update: bool = True  # π_old uses the update's arithmetic, not the rollout's
    recomputed: bool = False  # needs `Batch.recomputed_logprobs`
    one_update: bool = False  # valid only if a rollout feeds one update

    def policies(self, current: Array, batch: Batch) -> Policies:
        """Return the policies of a batch's tokens; current: log π [B, R]."""
        train = batch.recomputed_logprobs if self.recomputed else current
        old = train if self.by_update else batch.old_logprobs
        return Policies(batch.old_logprobs, old, train, current)


OLD_LOGPROBS: dict[str, OldLogprobs] = {
    "rollout": OldLogprobs(by_update=False),
    "recompute": OldLogprobs(recomputed=True),
    # The ratio is exactly 1, and its gradient that of log π: rounding never triggers a clip.
    "current": OldLogprobs(one_update=True),
}


# Weights ------------------------------------------------------------------------------------


def capped_weights(weights: Array, policies: Policies, cap: float) -> tuple[Array, Array]:
    """Return min(w · π_old / π_rollout, cap) [B, R], and bool [B, R], where the cap binds.

    Truncated importance sampling (Ionides, JCGS 17, 2008). The ratio is 1 if π_old is the
    rollout's: then the objective's own ratio covers it.

    weights: w [B, R], from `off_policy.importance_weights`.
    """
    weights = weights * exp_bounded(policies.old - policies.rollout)
    return jnp.minimum(weights, cap), weights > cap


# Masks --------------------------------------------------------------------------------------

# float32 log-probs are exact to about 1e-7: closer to 0 and 1 a probability's own rounding would
# look like a divergence. As in verl and prime-rl.
MIN_PROB = 1e-6


def binary_kl(logprobs: Array, other: Array) -> Array:
    """Return KL(p ‖ q) in nats over two outcomes, a token and all others; p, q are the token's.

        p·log(p / q) + (1 − p)·log((1 − p) / (1 − q))

    p and q are bounded to [1e-6, 1 − 1e-6]. Worked rows: (0.5, 0.25) → 0.144, (0.25, 0.5) → 0.131.

    logprobs, other: log p and log q, of one shape.
    """
    low = math.log(MIN_PROB)
    high = math.log1p(-MIN_PROB)
    log_p = jnp.clip(logprobs, low, high)
    log_q = jnp.clip(other, low, high)
    rest_p = jax.nn.log1mexp(-log_p)
    rest_q = jax.nn.log1mexp(-log_q)
    return jnp.exp(log_p) * (log_p - log_q) + jnp.exp(rest_p) * (rest_p - rest_q)


def _row_mean(values: Array, mask: Array) -> Array:
    return masked_mean(values, mask, axis=-1)[:, None]


# (policies, advantages [B, R], mask [B, R], bound) → bool, broadcast to [B, R]: tokens left out
Mask = Callable[[Policies, Array, Array, float], Array]


def _compare_tokens(beyond: Callable) -> Mask:
    """Return the mask of tokens with log r beyond log bound."""
    return lambda policies, _, mask, bound: beyond(policies.log_ratio, math.log(bound))


def _compare_rows(beyond: Callable) -> Mask:
    """Return the mask of rows with mean log r beyond log bound."""
    return lambda policies, _, mask, bound: beyond(
        _row_mean(policies.log_ratio, mask), math.log(bound)
    )


def _find_outliers(beyond: Callable) -> Mask:
    """Return the mask of rows with a token with log r beyond log bound."""
    return lambda policies, _, mask, bound: jnp.any(
        beyond(policies.log_ratio, math.log(bound)) & mask, axis=-1, keepdims=True
    )


def _negative_kl(policies: Policies, advantages: Array, mask: Array, bound: float) -> Array:
    divergence = _row_mean(policies.rollout - policies.current, mask)
    return (advantages < 0) & (divergence > bound)


def _binary_kl(policies: Policies, advantages: Array, mask: Array, bound: float) -> Array:
    forward = binary_kl(policies.train, policies.rollout)
    backward = binary_kl(policies.rollout, policies.train)
    return jnp.maximum(forward, backward) > bound


# One mask per field of `config.algorithm.mask`, whose value is its bound; 0 turns it off. r is
# π_train / π_rollout; it is compared in log space, so nothing overflows.
MASKS: dict[str, Mask] = Table(
    "MASKS",
    {
        # A token whose r is below or above the bound: IcePop (arXiv 2510.18855), [0.5, 5].
        "token_low": _compare_tokens(jnp.less),
        "token_high": _compare_tokens(jnp.greater),
        # All tokens of a row whose geometric mean of r is outside: SkyRL, [0.99, 1.01].
        "row_low": _compare_rows(jnp.less),
        "row_high": _compare_rows(jnp.greater),
        # All tokens of a row with any r outside: SkyRL, [1e-4, 100].
        "outlier_low": _find_outliers(jnp.less),
        "outlier_high": _find_outliers(jnp.greater),
        # Tokens of negative advantage in a row with mean log π_rollout − log π above the bound:
        # DeepSeek-V3.2 (arXiv 2512.02556, section 3.1). There the KL penalty has no mask.
        "negative_kl": _negative_kl,
        # A token with either `binary_kl` of π_train and π_rollout above the bound: KPop
        # (ringtech.notion.site/kpop), 0.1.
        "binary_kl": _binary_kl,
    },
)


def masks_from(settings) -> tuple[tuple[str, float], ...]:
    """Return (name, bound) of the masks that `config.algorithm.mask` turns on."""
    return tuple((name, settings[name]) for name in MASKS if settings[name])


def find_masked(
    masks: tuple[tuple[str, float], ...], policies: Policies, advantages: Array, mask: Array
) -> dict[str, Array]:
    """Return bool [B, R] by name of a mask: the tokens that it leaves out.

    masks: from `masks_from`. policies, advantages: finite. mask: bool [B, R], the policy's tokens;
    rows are whole.
    """
    return {
        name: mask & MASKS[name](policies, advantages, mask, float(bound)) for name, bound in masks
    }
