"""The losses: clipped surrogate, KL to a reference, entropy, how tokens are averaged; the critic's.

Pure functions of arrays `[B, R]`: B responses, R slots, float32 nats, with a bool mask that holds
on the tokens of a response (its end-of-sequence token included). Follows GRPO (arXiv 2402.03300,
eq. 3 and 4) with the variants of DAPO (arXiv 2503.14476), the dual clip (arXiv 1912.09729), the
constant length of Dr. GRPO (arXiv 2503.20783), GSPO's ratio (arXiv 2507.18071) and CISPO's
objective (arXiv 2506.13585).

Gradient accumulation: the loss is a sum over tokens or rows divided by a count. With the count of
the whole mini-batch (`loss_normalizer`) passed in, micro-batches' losses and gradients *add up* to
the mini-batch's, whatever their lengths.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.masked import masked_mean, masked_sum

# Differs from the paper: log ratios are held within ±20, where the gradient is 0. e^20 = 4.9e8
# keeps products with advantages finite; e^89 is inf in float32, and inf · 0 in the gradient of an
# unselected branch would be nan. No clip range is reached by it.
MAX_LOG_RATIO = 20.0


def _exp_ratio(log_ratio: Array) -> Array:
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Array, Array]:
    """PPO's clipped objective as a loss per token, and where a clip binds.

        r = π(y) / π_old(y)
        loss = −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A)       PPO, arXiv 1707.06347, eq. 7
        loss = min(loss, c·|A|) where A < 0                      dual clip, arXiv 1912.09729, eq. 5

    ε_low = ε_high is PPO; ε_high > ε_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10).

    Worked row, ε = 0.2, c = 3: (r, A) = (1.5, 1) → −1.2, clipped; (1.5, −1) → 1.5, not clipped;
    (0.5, −1) → 0.8, clipped; (9, −1) → 3, clipped.

    Args:
        logprobs: [B, R] nats, of the policy being trained; carries the gradient.
        old_logprobs: [B, R] nats, of the policy that generated.
        advantages: [B, R].
        clip_low: ε_low, in [0, 1].
        clip_high: ε_high, >= 0.
        dual_clip: c, > 1; 0 turns the dual clip off. A Python number.

    Returns:
        loss [B, R], and bool [B, R]: a clip (low, high or dual) holds this token's loss constant,
        so that it has no gradient.
    """
    ratio = _exp_ratio(logprobs - old_logprobs)
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    too_low, too_high = ratio < 1 - clip_low, ratio > 1 + clip_high
    negative = advantages < 0
    clipped = jnp.where(negative, too_low, too_high & (advantages > 0))
    if dual_clip:
        loss = jnp.where(negative, jnp.minimum(loss, -dual_clip * advantages), loss)
        clipped = clipped | (negative & (ratio > dual_clip))
    return loss, clipped


def clipped_weight(
    logprobs: Array,
    old_logprobs: Array,
    advantages: Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Array, Array]:
    """CISPO's objective as a loss per token (arXiv 2506.13585, eq. 4 and 5).

        loss = −sg(clip(r, 1 − ε_low, 1 + ε_high))·A·log π(y),   sg: no gradient through it

    The weight is cut, never the token: all keep a gradient. The paper leaves the lower end open,
    ε_low = 1. Worked row, ε_low = 1, ε_high = 0.2, log π(y) = −0.5: (r, A) = (1.5, 2) → 1.2, its
    gradient by log π −2.4; (0.1, 2) → 0.1, −0.2.

    Args and returns are those of `clipped_surrogate`; `dual_clip` is not used, and the bool says
    that the weight was cut.
    """
    ratio = _exp_ratio(logprobs - old_logprobs)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - clip_low, 1 + clip_high))
    return -weight * advantages * logprobs, (ratio < 1 - clip_low) | (ratio > 1 + clip_high)


OBJECTIVES: dict[str, Callable[..., tuple[Array, Array]]] = {
    "clip": clipped_surrogate,
    "cispo": clipped_weight,
}


def _token_log_ratio(log_ratio: Array, mask: Array) -> Array:
    return log_ratio


def _sequence_log_ratio(log_ratio: Array, mask: Array) -> Array:
    return jnp.broadcast_to(masked_mean(log_ratio, mask, axis=-1)[:, None], log_ratio.shape)


# Of a response's tokens, from the log-ratios of its tokens [B, R] and the mask.
#   "token"      log π(yₜ) − log π_old(yₜ)                              PPO, GRPO
#   "sequence"   its mean over the response: sᵢ of GSPO, eq. 7, whose gradient reaches all tokens
RATIOS: dict[str, Callable[[Array, Array], Array]] = {
    "token": _token_log_ratio,
    "sequence": _sequence_log_ratio,
}


def _k1(log_ratio: Array) -> Array:
    return -log_ratio


def _k2(log_ratio: Array) -> Array:
    return jnp.square(log_ratio) / 2


def _k3(log_ratio: Array) -> Array:
    bounded = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(bounded) - bounded - 1


KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": _k1, "k2": _k2, "k3": _k3}


def kl(logprobs: Array, ref_logprobs: Array, estimator: str) -> Array:
    """Estimate of KL(π ‖ π_ref) in nats from one token y ~ π, per token.

        d = log π_ref(y) − log π(y)
        k1 = −d              unbiased, may be negative
        k2 = d² / 2          biased, but its gradient is the KL's in expectation
        k3 = eᵈ − d − 1      unbiased, never negative; GRPO's (arXiv 2402.03300, eq. 4)

    As a loss, k1's gradient is 0 in expectation: it is for reporting. Source: J. Schulman,
    "Approximating KL divergence", joschu.net/blog/kl-approx.html. Worked row, π(y) = 0.5 and
    π_ref(y) = 0.25: d = −0.693, k1 = 0.693, k2 = 0.240, k3 = 0.193.

    Args:
        logprobs: [B, R] nats, of the policy.
        ref_logprobs: [B, R] nats, of the reference.
        estimator: "k1", "k2" or "k3".

    Raises:
        ValueError: The estimator is unknown.
    """
    return _choose(KL_ESTIMATORS, "kl estimator", estimator)(ref_logprobs - logprobs)


class Aggregation(NamedTuple):
    """A mean, as its two halves: what is added up [B, R] → [], and how many there are."""

    total: Callable[[Array, Array], Array]
    count: Callable[[Array], Array]


def _sum_of_row_means(per_token: Array, mask: Array) -> Array:
    return jnp.sum(masked_mean(per_token, mask, axis=-1))


def _count_tokens(mask: Array) -> Array:
    return jnp.sum(mask, dtype=jnp.int32)


def _count_rows(mask: Array) -> Array:
    return jnp.sum(jnp.any(mask, axis=-1), dtype=jnp.int32)


AGGREGATIONS: dict[str, Aggregation] = {
    "token": Aggregation(masked_sum, _count_tokens),
    "sequence": Aggregation(_sum_of_row_means, _count_rows),
    "constant": Aggregation(masked_sum, _count_rows),  # and by a length, see aggregate
}


def loss_normalizer(mask: Array, *, how: str) -> Array:
    """What a mini-batch's loss is divided by: its tokens ("token") or its rows (the others).

    Args:
        mask: bool [B, R] of the *whole* mini-batch.
        how: "token", "sequence" or "constant".

    Returns:
        int32 []. Rows without a token are padding and not counted.
    """
    return _choose(AGGREGATIONS, "aggregation", how).count(mask)


def aggregate(
    per_token: Array,
    mask: Array,
    *,
    how: str,
    normalizer: Array | int | None = None,
    length: int = 0,
) -> Array:
    """Mean of a per-token loss.

        "token"      Σ over all tokens / number of tokens            DAPO, arXiv 2503.14476, eq. 8
        "sequence"   Σ over rows of the row's mean / number of rows  GRPO, arXiv 2402.03300, eq. 3
        "constant"   Σ over all tokens / (number of rows · length)   Dr. GRPO, arXiv 2503.20783, 3.2

    Args:
        per_token: [B, R]; masked positions may hold anything.
        mask: bool [B, R].
        how: "token", "sequence" or "constant".
        length: Of the longest possible response, for "constant": what a token weighs then does not
            depend on how long any response came out.
        normalizer: `loss_normalizer` of the whole mini-batch, when these rows are a part of it:
            the parts then sum to the mini-batch's loss. None: these rows are all there is.

    Returns:
        Scalar. Rows without tokens add 0; no tokens at all give 0.

    Raises:
        ValueError: `how` is unknown, or a length is missing.
    """
    aggregation = _choose(AGGREGATIONS, "aggregation", how)
    if how == "constant":
        if length < 1:
            raise ValueError(f'length must be >= 1 for aggregation "constant", got {length}')
        per_token = per_token / length
    if normalizer is None:
        normalizer = aggregation.count(mask)
    return aggregation.total(per_token, mask) / jnp.maximum(normalizer, 1)


def policy_loss(
    logprobs: Array,
    entropy: Array,
    old_logprobs: Array,
    advantages: Array,
    mask: Array,
    ref_logprobs: Array | None = None,
    weights: Array | None = None,
    *,
    normalizer: Array | int | None = None,
    aggregation: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coef: float = 0.0,
    objective: str = "clip",
    ratio: str = "token",
    length: int = 0,
) -> tuple[Array, dict[str, Array]]:
    """The loss of a micro-batch, and sums from which exact mini-batch metrics are made.

        loss = aggregate(surrogate + β·KL(π ‖ π_ref) − η·H(π))       arXiv 2402.03300, eq. 3

    Args:
        logprobs, entropy: [B, R] nats, of the policy being trained; they carry the gradient.
        old_logprobs, advantages: [B, R].
        mask: bool [B, R]. What lies outside it reaches neither loss, gradient nor sums, be it inf.
        ref_logprobs: [B, R] nats, or None without a reference.
        weights: [B, R], by which each token's surrogate is multiplied; None: 1.
        normalizer: `loss_normalizer` of the whole mini-batch; None if these rows are all of it.
        aggregation, length: As in `aggregate`.
        objective: "clip" or "cispo". ratio: "token" or "sequence", only for "clip".
        clip_low, clip_high, dual_clip: As in `clipped_surrogate`.
        kl_coef: β, a Python number. kl_estimator: "k1", "k2" or "k3".
        entropy_coef: η, a Python number.

    Returns:
        The loss, and float sums over these tokens: `tokens`, `clip_fraction`, `ratio_mean`,
        `entropy`, `logprob_gap` (|log π − log π_old|) and, with a reference, `kl`. The KL that is
        reported is always k3, whichever is trained on, so that the metric has one meaning. Add
        them over micro-batches, then `policy_metrics`.

    Raises:
        ValueError: An unknown name, or kl_coef without a reference.
    """
    estimate = _choose(KL_ESTIMATORS, "kl estimator", kl_estimator)
    surrogate = _choose(OBJECTIVES, "objective", objective)
    if objective != "clip" and ratio != "token":
        raise ValueError(f"ratio must be token for objective {objective!r}, got {ratio!r}")
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef must be 0 without reference log-probs, got {kl_coef}")
    # Zeroed before any arithmetic: a `where` after it would leave 0 · inf in the gradient.
    logprobs, entropy, old_logprobs, advantages = (
        jnp.where(mask, x, 0) for x in (logprobs, entropy, old_logprobs, advantages)
    )
    log_ratio = logprobs - old_logprobs
    if objective == "clip":  # it depends on the ratio alone
        scores, old_scores = _choose(RATIOS, "ratio", ratio)(log_ratio, mask), 0.0
    else:
        scores, old_scores = logprobs, old_logprobs
    per_token, clipped = surrogate(
        scores,
        old_scores,
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    if weights is not None:
        per_token = per_token * jax.lax.stop_gradient(jnp.where(mask, weights, 0))
    values = {
        "tokens": jnp.ones_like(log_ratio),
        "clip_fraction": clipped.astype(log_ratio.dtype),
        "ratio_mean": _exp_ratio(log_ratio),
        "entropy": entropy,
        "logprob_gap": jnp.abs(log_ratio),
    }
    if ref_logprobs is not None:
        ref_log_ratio = jnp.where(mask, ref_logprobs, 0) - logprobs
        values["kl"] = _k3(ref_log_ratio)
        if kl_coef:
            per_token = per_token + kl_coef * estimate(ref_log_ratio)
    if entropy_coef:
        per_token = per_token - entropy_coef * entropy
    loss = aggregate(per_token, mask, how=aggregation, normalizer=normalizer, length=length)
    return loss, {name: masked_sum(value, mask) for name, value in values.items()}


def policy_metrics(sums: dict[str, Array]) -> dict[str, Array]:
    """Means per token, by metric name, from `policy_loss`'s sums added over micro-batches.

    `logprob_gap` is left out: only where the weights are still the rollout's (the first update of
    a step) is its mean the metric `policy/rollout_train_logprob_gap`.
    """
    tokens = jnp.maximum(sums["tokens"], 1)
    means = ("clip_fraction", "ratio_mean", "entropy", "kl")
    return {f"policy/{name}": sums[name] / tokens for name in means if name in sums}


def value_loss(
    values: Array,
    old_values: Array,
    returns: Array,
    mask: Array,
    *,
    clip: float = 0.0,
    normalizer: Array | int | None = None,
) -> tuple[Array, dict[str, Array]]:
    """The critic's loss, a mean over tokens, and sums for its metrics.

        loss = max((V − R)², (clip(V, V_old ± c) − R)²) / 2          as in PPO's code

    The larger error counts: a value that has moved further than c towards its return has no
    gradient. Source: arXiv 2005.12729, section 3 (value function clipping). Worked row, c = 0.2,
    V_old = 0, R = 1: V = 0.1 → 0.405; V = 0.5 → 0.32, the error of 0.2, clipped; V = −0.5 → 1.125.

    Args:
        values: [B, R], in units of reward; carries the gradient.
        old_values, returns: [B, R].
        mask: bool [B, R]. What lies outside it reaches neither loss, gradient nor sums.
        clip: c; 0 turns the clip off. A Python number.
        normalizer: Tokens of the whole mini-batch; None if these rows are all of it.

    Returns:
        The loss, and float sums over these tokens: `critic_loss` (already divided, so the parts
        add up) and `critic_clipped`, tokens that the clip holds.
    """
    values, old_values, returns = (jnp.where(mask, x, 0) for x in (values, old_values, returns))
    error = jnp.square(values - returns)
    clipped = jnp.zeros_like(mask)
    if clip:
        held = old_values + jnp.clip(values - old_values, -clip, clip)
        held_error = jnp.square(held - returns)
        clipped = held_error > error
        error = jnp.maximum(error, held_error)
    loss = aggregate(error / 2, mask, how="token", normalizer=normalizer)
    return loss, {
        "critic_loss": loss,
        "critic_clipped": masked_sum(clipped.astype(error.dtype), mask),
    }


def _choose(table: dict[str, Any], what: str, name: str) -> Any:
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}, got {name!r}")
    return table[name]
