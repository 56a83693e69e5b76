"""Losses of policy and critic: objective, KL to a reference, entropy, mean over tokens.

Pure functions of arrays [B, R]: B responses, R slots, float32 nats, with a bool mask that is True
on the policy's tokens (including the end of sequence). Follows GRPO (arXiv 2402.03300, eq. 3 and 4)
with the variants named at each function. Four tables contain the choices of
`algorithm.objective`, `ratio`, `kl_estimator` and `aggregation`.

A loss is a sum over tokens or rows divided by a `normalizer`. With the same normalizer for all
micro-batches, their losses and gradients *add up* to the mini-batch's.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.corrections import (
    MASKS,
    MAX_LOG_RATIO,
    OLD_LOGPROBS,
    capped_weights,
    exp_bounded,
    find_masked,
)
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.algorithms.terms import LossTerm, TokenValues
from specrl_jax.config.fields import Rules, no_rules
from specrl_jax.registry import Table
from specrl_jax.types import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Settings of the policy's losses, as in `config.algorithm`; hashable."""

    objective: str = "clip"  # key of OBJECTIVES
    ratio: str = "token"  # key of RATIOS
    clip_low: float = 0.2  # ε_low, in [0, 1]
    clip_high: float = 0.28  # ε_high, >= 0
    dual_clip: float = 0.0  # c of `clipped_surrogate`, > 1; 0 turns the dual clip off
    aggregation: str = "token"  # key of AGGREGATIONS
    kl_coef: float = 0.0  # β, weight of the KL
    kl_estimator: str = "k3+"  # key of KL_ESTIMATORS
    entropy_coef: float = 0.0  # η, weight of the entropy
    importance_cap: float = math.inf  # of the batch's importance weights, if it has any
    masks: tuple[tuple[str, float], ...] = ()  # from `corrections.masks_from`
    terms: tuple[LossTerm, ...] = ()  # added to the objective
    old_logprobs: str = "rollout"  # key of OLD_LOGPROBS
    group_size: int = 1  # G, responses of a group
    max_response_len: int  # tokens, >= 1


# Objectives ---------------------------------------------------------------------------------


def clipped_surrogate(
    log_ratio: Array, logprobs: Array, advantages: Array, config: LossConfig
) -> tuple[Array, Array]:
    """Return PPO's clipped objective as a loss per token, and where a clip binds.

        r = π(y) / π_old(y)
        loss = −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A)       PPO, arXiv 1707.06347, eq. 7
        loss = min(loss, c·|A|) where A < 0                      dual clip, arXiv 1912.09729, eq. 5

    ε_low = ε_high is PPO; ε_high > ε_low is DAPO's clip-higher (arXiv 2503.14476, eq. 10).
    Worked row, ε = 0.2, c = 3: (r, A) = (1.5, 1) → −1.2, clipped; (1.5, −1) → 1.5, not clipped;
    (0.5, −1) → 0.8, clipped; (9, −1) → 3, clipped.

    log_ratio: log r [B, R], one of RATIOS; carries the gradient.
    logprobs: log π(y) [B, R]; not used here.
    advantages: A [B, R].

    Returns the loss [B, R], and bool [B, R]: a clip (low, high or dual) makes this token's loss
    constant, so it has no gradient.
    """
    ratio = exp_bounded(log_ratio)
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    clipped_ratio = jnp.clip(ratio, low, high)
    loss = -jnp.minimum(ratio * advantages, clipped_ratio * advantages)
    negative = advantages < 0
    clipped = jnp.where(negative, ratio < low, (ratio > high) & (advantages > 0))
    if config.dual_clip:
        loss = jnp.where(negative, jnp.minimum(loss, -config.dual_clip * advantages), loss)
        clipped = clipped | (negative & (ratio > config.dual_clip))
    return loss, clipped


def clipped_weight(
    log_ratio: Array, logprobs: Array, advantages: Array, config: LossConfig
) -> tuple[Array, Array]:
    """Return CISPO's objective as a loss per token (arXiv 2506.13585, eq. 4 and 5).

        loss = −sg(clip(r, 1 − ε_low, 1 + ε_high))·A·log π(y),   sg: no gradient through it

    The weight is clipped, never the token: every token keeps a gradient. The paper sets no lower
    bound, ε_low = 1. Worked row, ε_low = 1, ε_high = 0.2, log π(y) = −0.5: (r, A) = (1.5, 2) → 1.2,
    its gradient by log π −2.4; (0.1, 2) → 0.1, −0.2.

    Arguments as in `clipped_surrogate`; the gradient flows through `logprobs`. The returned bool
    marks clipped weights.
    """
    ratio = exp_bounded(log_ratio)
    low = 1 - config.clip_low
    high = 1 + config.clip_high
    weight = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    return -weight * advantages * logprobs, (ratio < low) | (ratio > high)


@dataclasses.dataclass(frozen=True)
class Objective:
    """One choice of `config.algorithm.objective`."""

    # (log r, log π(y), advantages [B, R], config) → the loss of each token, and where it is clipped
    loss: Callable[[Array, Array, Array, LossConfig], tuple[Array, Array]]
    # (mini-batch, log π(y) [n, R] before its update, config) → the batch with its final advantages,
    # and sums like those of `policy_loss`. None: the advantages are used as they are.
    prepare: Callable[[Batch, Array, LossConfig], tuple[Batch, dict[str, Array]]] | None = None
    by_token: bool = True  # ratio, advantage and KL are per token; otherwise per response
    whole_groups: bool = False  # mini-batches consist of whole groups, and use every row once
    dual_clip: bool = False  # the loss has a dual clip
    advantage: str = ""  # key of ADVANTAGES that this objective requires, exclusively
    rules: Rules = no_rules


OBJECTIVES: dict[str, Objective] = Table(
    "OBJECTIVES",
    {"clip": Objective(clipped_surrogate, dual_clip=True), "cispo": Objective(clipped_weight)},
)


# Ratios -------------------------------------------------------------------------------------


def token_ratio(log_ratio: Array, mask: Array) -> Array:
    """Return log r [B, R] of each token, log π(yₜ) − log π_old(yₜ): PPO, GRPO."""
    return log_ratio


def sequence_ratio(log_ratio: Array, mask: Array) -> Array:
    """Return log s [B, R] of each token's response: GSPO-token (arXiv 2507.18071, eq. 13, 14).

        log sᵢ   = mean over the response of log π(yₜ) − log π_old(yₜ)
        log sᵢ,ₜ = sg(log sᵢ) + log π(yₜ) − sg(log π(yₜ)),      sg: no gradient through it

    All tokens have the value of the response's ratio, but each has the gradient of its own log π.
    So each token keeps its own advantage and weight. If these are the same for a whole response,
    the gradient is that of GSPO (eq. 5). Worked row, log-ratios 0.2 and 0.4, advantages 1 and −3,
    nothing clipped: s = e^0.3 = 1.35, gradients of the losses −1.35 and 4.05.
    """
    no_gradient = jax.lax.stop_gradient
    mean = jnp.broadcast_to(masked_mean(log_ratio, mask, axis=-1)[:, None], log_ratio.shape)
    return no_gradient(mean) + (log_ratio - no_gradient(log_ratio))


# (log π − log π_old of the tokens [B, R], mask [B, R]) → log r [B, R]
RATIOS: dict[str, Callable[[Array, Array], Array]] = Table(
    "RATIOS",
    {
        "token": token_ratio,
        "sequence": sequence_ratio,
    },
)


# KL -----------------------------------------------------------------------------------------


def k1(log_ratio: Array) -> Array:
    """Return −d: unbiased, may be negative."""
    return -log_ratio


def k2(log_ratio: Array) -> Array:
    """Return d² / 2: biased, never negative."""
    return jnp.square(log_ratio) / 2


def k3(log_ratio: Array) -> Array:
    """Return eᵈ − d − 1: unbiased, never negative; GRPO's (arXiv 2402.03300, eq. 4).

    Differs from verl: the estimate is not clamped; verl clamps it to ±10.
    """
    bounded = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return jnp.exp(bounded) - bounded - 1


# Estimates of KL(π ‖ π_ref) in nats from one token y ~ π, of d = log π_ref(y) − log π(y) [B, R].
# Source: J. Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html. Worked row,
# π(y) = 0.5 and π_ref(y) = 0.25: d = −0.693, k1 = 0.693, k2 = 0.240, k3 = 0.193. On its own, k1 has
# gradient 0 in expectation, and k3 that of KL(π_ref ‖ π). "+" means that the loss adds their score
# terms, as in verl: `kl_penalty` gives each estimate the same gradient.
KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = Table(
    "KL_ESTIMATORS", {"k3+": k3, "k1+": k1, "k2": k2}
)


def kl_penalty(estimator: str, ref_log_ratio: Array, token_log_ratio: Array) -> Array:
    """Return the KL penalty [B, R] of each token y: r·k, with the gradient −r·d·∇log π(y).

    r = π(y) / π_old(y) weighs tokens of an older policy. Over y ~ π_old the mean of the gradient is
    that of KL(π ‖ π_ref), in every update of a step, and the mean of the value is KL(π ‖ π_ref) for
    k1 and k3. Tokens that are not from π_old need the batch's importance weights. With top-k or
    top-p it holds if all log-probs are over the sampler's tokens. No clip affects the penalty.
    Contexts count as sampled: a token's effect on the KL of later tokens has no gradient, as in
    GRPO. r·k3 with the gradient through r is the same (DeepSeek-V3.2, arXiv 2512.02556, eq. 7).
    Differs from verl and GRPO, which leave out r: their gradient is right only in the first update.

    estimator: key of KL_ESTIMATORS.
    ref_log_ratio: d = log π_ref(y) − log π(y) [B, R]; carries the gradient.
    token_log_ratio: log r [B, R].
    """
    no_gradient = jax.lax.stop_gradient
    value = no_gradient(KL_ESTIMATORS[estimator](ref_log_ratio))
    fixed = no_gradient(ref_log_ratio)
    with_gradient = value + fixed * (ref_log_ratio - fixed)  # adds 0
    return no_gradient(exp_bounded(token_log_ratio)) * with_gradient


# Aggregation --------------------------------------------------------------------------------


def _count_rows(mask: Array) -> Array:
    return jnp.sum(jnp.any(mask, axis=-1), dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """A mean over tokens: a sum that micro-batches add up, divided by a count."""

    sum: Callable[[Array, Array, int], Array]  # (per_token [B, R], mask [B, R], max_len) → []
    count: Callable[[Array], Array]  # mask [B, R] → int32 []; rows without a token are not counted
    sums_tokens: bool = True  # all tokens have the same weight

    def mean(
        self, per_token: Array, mask: Array, max_len: int, normalizer: Array | None = None
    ) -> Array:
        """Return the mean, a scalar; 0 if there are no tokens.

        per_token: [B, R]; anything outside the mask.
        mask: bool [B, R].
        max_len: Tokens of the longest possible response.
        normalizer: Divisor of the sum: the mini-batch's `count`, or `UpdateSpec.loss_count`; None:
            the count of these rows.
        """
        normalizer = self.count(mask) if normalizer is None else normalizer
        return self.sum(per_token, mask, max_len) / jnp.maximum(normalizer, 1)


TOKEN_MEAN = Aggregation(
    sum=lambda x, mask, _: jnp.sum(x, where=mask),
    count=lambda mask: jnp.sum(mask, dtype=jnp.int32),
)
AGGREGATIONS: dict[str, Aggregation] = Table(
    "AGGREGATIONS",
    {
        # Σ over all tokens / number of tokens: DAPO, arXiv 2503.14476, eq. 8
        "token": TOKEN_MEAN,
        # Σ over rows of the row's mean / number of rows: GRPO, arXiv 2402.03300, eq. 3
        "sequence": Aggregation(
            lambda x, mask, _: jnp.sum(masked_mean(x, mask, axis=-1)),
            _count_rows,
            sums_tokens=False,
        ),
        # Σ over all tokens / (number of rows · max_len): Dr. GRPO, arXiv 2503.20783, section 3.2
        "constant": Aggregation(lambda x, mask, n: jnp.sum(x / n, where=mask), _count_rows),
    },
)


# The losses ---------------------------------------------------------------------------------


def policy_loss(
    logprobs: Array,
    entropy: Array,
    batch: Batch,
    config: LossConfig,
    normalizer: Array | None = None,
    read: tuple = (),
) -> tuple[Array, dict[str, Array]]:
    """Return the loss of a micro-batch, and sums for exact mini-batch metrics.

        loss = mean(w·(surrogate + β·kl_penalty) − η·H(π))        arXiv 2402.03300, eq. 3

    The terms of `config.terms` are added. A token excluded by a mask of `config.masks` has the loss
    0 but counts in the mean, as in IcePop and DeepSeek-V3.2. A token in a row that the policy did
    not write has −c·log π instead of these terms, with c from `Batch.supervised`.

    logprobs, entropy: [B, R] nats, of the policy being trained; they carry the gradient.
    batch: `old_logprobs`, `recomputed_logprobs`, `advantages`, `ref_logprobs`,
        `importance_weights` (w before `capped_weights`), `supervised` and `mask` are read. Values
        outside the mask, even inf, affect neither loss, gradient nor sums. Rows are whole.
    normalizer: Divisor of the sum: the mini-batch's count by the aggregation, or
        `UpdateSpec.loss_count`; None: the count of these rows.
    read: `TokenLogprobs.terms` of these rows, [B, R, ...].

    Returns the loss, and float sums over these tokens: `tokens`, `clip_fraction` (of ratios below
    1: `clip_fraction_low`, of the others: `clip_fraction_high`), `ratio_mean`, `entropy`,
    `approx_kl` (k3 of π from π_rollout), `logprob_gap` (|log π − log π_rollout|), `masked_NAME` for
    each mask; with weights `importance_mean` and `importance_capped`; with a reference `kl`, which
    is always k3 and unweighted; for each metric of a term its sum and the number of tokens. Tokens
    that the policy did not write only count in `policy/solution_nll`, the sum of -log π and their
    number. Add the sums over micro-batches, then call `policy_metrics`.
    """
    mask = batch.mask
    # Zeroed before any arithmetic: a `where` after it would leave 0 · inf in the gradient.
    logprobs = jnp.where(mask, logprobs, 0)
    entropy = jnp.where(mask, entropy, 0)
    advantages = jnp.where(mask, batch.advantages, 0)
    policies = OLD_LOGPROBS[config.old_logprobs].policies(jax.lax.stop_gradient(logprobs), batch)
    policies = jax.tree.map(lambda x: jnp.where(mask, x, 0), policies)
    token_log_ratio = logprobs - policies.old
    log_ratio = RATIOS[config.ratio](token_log_ratio, mask)
    objective = OBJECTIVES[config.objective]
    per_token, clipped = objective.loss(log_ratio, logprobs, advantages, config)
    per_token_metrics = {
        "tokens": jnp.ones_like(logprobs),
        "clip_fraction": clipped.astype(logprobs.dtype),
        "clip_fraction_low": (clipped & (log_ratio < 0)).astype(logprobs.dtype),
        "clip_fraction_high": (clipped & (log_ratio >= 0)).astype(logprobs.dtype),
        "approx_kl": k3(policies.current - policies.rollout),
        "ratio_mean": exp_bounded(token_log_ratio),
        "entropy": entropy,
        "logprob_gap": jnp.abs(policies.current - policies.rollout),
    }
    if batch.ref_logprobs is not None:
        ref_log_ratio = jnp.where(mask, batch.ref_logprobs, 0) - logprobs
        per_token_metrics["kl"] = k3(ref_log_ratio)
        if config.kl_coef and objective.by_token:
            penalty = kl_penalty(config.kl_estimator, ref_log_ratio, token_log_ratio)
            per_token = per_token + config.kl_coef * penalty
    weights = None
    if batch.importance_weights is not None:
        weights = jnp.where(mask, batch.importance_weights, 0)
        weights, capped = capped_weights(weights, policies, config.importance_cap)
        per_token = per_token * jax.lax.stop_gradient(weights)
        per_token_metrics["importance_mean"] = weights
        per_token_metrics["importance_capped"] = capped.astype(logprobs.dtype)
    if config.entropy_coef:  # exact for each context: it needs no weight
        per_token = per_token - config.entropy_coef * entropy
    values = TokenValues(logprobs, token_log_ratio, policies, advantages, weights, batch, None)
    added = {False: 0.0, True: 0.0}  # by whether masks leave the term in
    own_metrics = {}
    for term, own in zip(config.terms, read, strict=True):
        more, metrics = term.per_token(values._replace(read=own), config)
        added[term.ignores_masks] += more
        own_metrics |= metrics
    if config.terms:
        per_token = per_token + added[False]
    for name, masked in find_masked(config.masks, policies, advantages, mask).items():
        per_token = jnp.where(masked, 0, per_token)
        per_token_metrics[f"masked_{name}"] = masked.astype(logprobs.dtype)
    if config.terms:
        per_token = per_token + added[True]
    sampled = mask
    sums = {}
    if batch.supervised is not None:
        given = mask & (batch.supervised > 0)[:, None]
        sampled = mask & ~given
        per_token = jnp.where(given, -batch.supervised[:, None] * logprobs, per_token)
        count = jnp.sum(given.astype(logprobs.dtype))
        sums["policy/solution_nll"] = jnp.stack([-jnp.sum(logprobs, where=given), count])
    aggregation = AGGREGATIONS[config.aggregation]
    loss = aggregation.mean(per_token, mask, config.max_response_len, normalizer)
    sums |= {name: jnp.sum(x, where=sampled) for name, x in per_token_metrics.items()}
    for name, values in own_metrics.items():
        sums[name] = jnp.stack([jnp.sum(values, where=sampled), sums["tokens"]])
    return loss, sums


def policy_metrics(sums: dict[str, Array]) -> dict[str, Array]:
    """Return means per token, by metric name, from `policy_loss`'s sums added over micro-batches.

    `logprob_gap` is left out: its mean is the metric `policy/rollout_train_logprob_gap` only in
    the first update of a step, when the weights are still the rollout's.
    """
    tokens = jnp.maximum(sums["tokens"], 1)
    means = ["clip_fraction", "clip_fraction_low", "clip_fraction_high", "ratio_mean", "approx_kl"]
    means += ["entropy", "kl", "importance_mean", "importance_capped"]
    means += [f"masked_{name}" for name in MASKS]
    return {f"policy/{name}": sums[name] / tokens for name in means if name in sums}


def value_loss(
    values: Array, batch: Batch, clip: float, normalizer: Array | None = None
) -> tuple[Array, dict[str, Array]]:
    """Return the critic's loss, a mean over tokens, and sums for its metrics.

        loss = max((V − R)², (clip(V, V_old ± c) − R)²) / 2          arXiv 2005.12729, section 3

    The larger error counts: a value that has moved further than c towards its return has no
    gradient. Worked row, c = 0.2, V_old = 0, R = 1: V = 0.1 → 0.405; V = 0.5 → 0.32, the error at
    0.2, clipped; V = −0.5 → 1.125.

    values: V [B, R], in units of reward; carries the gradient.
    batch: `values` (V_old), `returns` (R) and `mask` are read. Values outside the mask affect
        neither loss, gradient nor sums.
    clip: c; 0 turns the clip off. A Python number.
    normalizer: Divisor of the sum: the mini-batch's tokens; None: those of these rows.

    Returns the loss, and float sums over these tokens: `critic_loss` (already divided, so the parts
    add up) and `critic_clipped`, tokens whose loss is made constant by the clip.
    """
    mask = batch.mask
    values = jnp.where(mask, values, 0)
    old = jnp.where(mask, batch.values, 0)
    returns = jnp.where(mask, batch.returns, 0)
    error = jnp.square(values - returns)
    clipped = jnp.zeros_like(mask)
    if clip:
        clipped_error = jnp.square(old + jnp.clip(values - old, -clip, clip) - returns)
        # Within the clip, V_old + (V − V_old) differs from V by rounding.
        clipped = (jnp.abs(values - old) > clip) & (clipped_error > error)
        error = jnp.maximum(error, clipped_error)
    loss = TOKEN_MEAN.mean(error / 2, mask, 0, normalizer)
    return loss, {
        "critic_loss": loss,
        "critic_clipped": jnp.sum(clipped.astype(error.dtype), where=mask),
    }
