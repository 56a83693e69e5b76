"""Score centering: subtract the mean score of the sampled tokens (arXiv 2609.20807).

Over tokens y ~ q from a distribution other than the policy p, the score ∇ log p(y) has a nonzero
mean, which makes the weights drift even if all advantages are equal. With advantages A and a weight
w per token the loss gets the term A·C per token (eq. 14):

    C = Σ_{v∈H} sg(m(v) − α·p(v))·log p(v),    m = q·w,    sg: no gradient through it

H is the sampler's k likeliest tokens. All others are one outcome z, in which q is proportional to
p: with ρ = q(z) / p(z) they have α = ρ·w(z), as Σ_v p(v) ∇ log p(v) = 0. Without weights m = q and
α = ρ; with w = clip(p / q, lo, hi), m = clip(p, lo·q, hi·q) and α = clip(1, lo·ρ, hi·ρ).

Here −A·w is the slope of the run's own loss in log p (a clip, truncated weights or a trust region),
evaluated at every token of H. Tokens emitted at draft positions by an acceptance rule come from no
single policy: q is then `accepted + (1 − Σ accepted)·π`, see `AcceptanceRule.accepted_probs`.

Worked example, k = 1, no weights: q(H) = 0.5 and p(H) = 0.6 give ρ = 0.5 / 0.4 = 1.25 and
C = (0.5 − 1.25·0.6)·log p(H) = −0.25·log p(H).
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.algorithms.corrections import MASKS, OLD_LOGPROBS, Policies, exp_bounded
from specrl_jax.algorithms.losses import OBJECTIVES, LossConfig
from specrl_jax.algorithms.terms import LossTerm, TokenValues
from specrl_jax.config.fields import Check, Section, Values, field
from specrl_jax.config.kinds import integer
from specrl_jax.models.logprobs import CUT_OFF_LOGPROB, scores_at
from specrl_jax.rollout.acceptance import AcceptanceRule
from specrl_jax.rollout.emitted import LEAST_REST, outcomes
from specrl_jax.training.stage import Stage, StageResult
from specrl_jax.types import Batch, Rollout

# Masks that look at whole rows.
_OF_ROWS = ("row_low", "row_high", "outlier_low", "outlier_high", "negative_kl")


def centering(logprobs: Array, mass: Array) -> Array:
    """Return C [...], whose gradient is the mean weighted score of the sampler's tokens.

    logprobs: log p at H [..., k]; carries the gradient. -inf if H has fewer tokens.
    mass: m [..., k + 1], of the tokens of H and of all others.
    """
    known = jnp.isfinite(logprobs)
    finite = jnp.where(known, logprobs, 0.0)
    probs = outcomes(jax.lax.stop_gradient(logprobs), LEAST_REST)
    alpha = mass[..., -1:] / probs[..., -1:]
    weights = jnp.where(known, mass[..., :-1] - alpha * probs[..., :-1], 0.0)
    return jnp.sum(jax.lax.stop_gradient(weights) * finite, axis=-1)


def log_ratios(logprobs: Array, sampler: Array) -> Array:
    """Return log p − log q [..., k + 1] of the outcomes, without gradient; 0 if q is 0.

    logprobs, sampler: log p and log q at H [..., k].
    """
    p = outcomes(jax.lax.stop_gradient(logprobs), LEAST_REST)
    q = outcomes(sampler)
    return jnp.where(q > 0, jnp.log(p) - jnp.log(jnp.where(q > 0, q, 1.0)), 0.0)


def match_ids(own: Array, ids: Array, values: Array) -> tuple[Array, Array]:
    """Return the values of the tokens `own` [..., k], and a mask of those that have one.

    ids, values: [..., j], tokens and their values, which carry the gradient.
    """
    same = (own[..., :, None] == ids[..., None, :]) & (own >= 0)[..., :, None]
    return jnp.sum(jnp.where(same, values[..., None, :], 0.0), axis=-1), jnp.any(same, axis=-1)


@dataclasses.dataclass(frozen=True)
class Centering(LossTerm):
    """Term A·C of the loss."""

    truncated: bool  # p is over the sampler's tokens, which H then contains

    ignores_masks = True
    needs_advantage = True
    by_slot = ("top_ids",)

    @staticmethod
    def asked_by(config) -> str:
        return "score_centering.top_k" if config.score_centering.top_k else ""

    @classmethod
    def from_config(cls, config, frozen) -> "Centering":
        return cls(config.algorithm.keep_sampling_mask)

    @staticmethod
    def kept_logprobs(config) -> int:
        return config.score_centering.top_k

    def token_inputs(self, frozen, sequences, columns) -> Array:
        return columns["top_ids"]

    def read(self, logits: Array, inputs: Array, shared) -> tuple[Array, Array]:
        """Return log p at the tokens of H [m, t, k], and these tokens as floats."""
        scores = jnp.where(inputs >= 0, scores_at(logits, inputs), jnp.finfo(logits.dtype).min)
        total = jax.nn.logsumexp(scores if self.truncated else logits, axis=-1, keepdims=True)
        return scores - total, inputs.astype(jnp.float32)

    def per_token(self, values: TokenValues, config: LossConfig) -> tuple[Array, dict[str, Array]]:
        own = values.batch.extra
        # Rows that share a packed slot may order their tokens differently.
        logprobs, known = match_ids(own["top_ids"], values.read[1], values.read[0])
        logprobs = jnp.where(known, logprobs, -jnp.inf)
        sampler = jnp.where(known, own["top_logprobs"], -jnp.inf)
        parts = emitted_parts(outcomes(sampler), own, known)
        slopes = self._slopes(logprobs, sampler, parts, values, config)
        mask = values.batch.mask
        term = -centering(logprobs, slopes)
        term = jnp.where(mask, term - jax.lax.stop_gradient(term), 0.0)  # only a gradient
        distance = sum(mass for mass, _ in parts) - outcomes(jax.lax.stop_gradient(logprobs))
        variation = jnp.where(mask, jnp.sum(jnp.abs(distance), axis=-1) / 2, 0.0)
        return term, {"policy/sampler_distance": variation}

    def _slopes(
        self,
        logprobs: Array,
        sampler: Array,
        parts: list[tuple[Array, Array | float]],
        values: TokenValues,
        config: LossConfig,
    ) -> Array:
        """Return q·∂loss / ∂log p [..., k + 1] of the outcomes, as if each were sampled."""
        ratios = log_ratios(logprobs, sampler)
        now = jnp.log(outcomes(jax.lax.stop_gradient(logprobs), LEAST_REST))
        now = jnp.maximum(now, CUT_OFF_LOGPROB)
        moves = OLD_LOGPROBS[config.old_logprobs].by_update  # π_old is p itself
        advantages = values.advantages[..., None]
        slope = loss_slope(jnp.zeros_like(ratios) if moves else ratios, now, advantages, config)
        slope = jnp.where(token_masks(ratios, now, advantages, config), 0.0, slope)
        if values.weights is None:
            return slope * sum(mass for mass, _ in parts)
        factor = exp_bounded(ratios) if moves else 1.0
        cap = config.importance_cap
        return slope * sum(mass * jnp.minimum(weight * factor, cap) for mass, weight in parts)


def emitted_parts(
    sampler: Array, columns: dict[str, Array], known: Array
) -> list[tuple[Array, Array | float]]:
    """Return a token's distribution as parts: the mass [..., k + 1] and importance weight of each.

    sampler: π, from `outcomes`. columns: of the batch; without "accepted" all is from π.
    known: bool [..., k], tokens of H whose log p is known; the rest count as all others.
    """
    if "accepted" not in columns:
        return [(sampler, 1.0)]
    accepted = columns["accepted"]
    unknown = jnp.sum(accepted[..., :-1], axis=-1, keepdims=True, where=~known)
    accepted = jnp.concatenate(
        [jnp.where(known, accepted[..., :-1], 0.0), accepted[..., -1:] + unknown], axis=-1
    )
    rejected = jnp.maximum(1 - jnp.sum(accepted, axis=-1, keepdims=True), 0.0)
    return [(accepted, columns.get("accepted_weights", 1.0)), (rejected * sampler, 1.0)]


def loss_slope(log_ratio: Array, logprobs: Array, advantages: Array, config: LossConfig) -> Array:
    """Return the slope of the objective in log p, at these log-ratios and log-probs."""

    def total(change: Array) -> Array:
        objective = OBJECTIVES[config.objective]
        return jnp.sum(objective.loss(log_ratio + change, logprobs + change, advantages, config)[0])

    return jax.grad(total)(jnp.zeros_like(log_ratio))


def token_masks(log_ratio: Array, logprobs: Array, advantages: Array, config: LossConfig) -> Array:
    """Return which outcomes a mask would exclude if each were the sampled token."""
    rollout = logprobs - log_ratio
    policies = Policies(rollout, rollout, logprobs, logprobs)
    sampled = jnp.ones_like(logprobs, bool)
    masked = jnp.zeros_like(logprobs, bool)
    for name, bound in config.masks:
        masked |= MASKS[name](policies, advantages, sampled, float(bound))
    return masked


class Law(Stage):
    """Adds the distribution of each token as columns of the batch."""

    @staticmethod
    def asked_by(config) -> str:
        return Centering.asked_by(config)

    @staticmethod
    def shapes(config, rollout: Rollout, batch: Batch) -> Batch:
        tokens = rollout.tokens
        columns = {"top_ids": tokens.top_ids, "top_logprobs": tokens.top_logprobs}
        if tokens.accepted_probs is not None:
            columns["accepted"] = tokens.accepted_probs
            if config.algorithm.importance_cap:
                columns["accepted_weights"] = tokens.accepted_probs
        return dataclasses.replace(batch, extra=batch.extra | columns)

    def __call__(self, run, state, batch: Batch, collected) -> StageResult:
        columns = _columns(
            collected.rollout,
            np.float32(collected.rejected_mass),
            run.rollout_spec.accept,
            weigh=run.config.algorithm.importance_cap > 0,
        )
        batch = dataclasses.replace(batch, extra=batch.extra | columns)
        return StageResult(batch)


@functools.partial(jax.jit, static_argnames="weigh")
def _columns(
    rollout: Rollout, rejected_mass: Array, rule: AcceptanceRule, *, weigh: bool
) -> dict[str, Array]:
    """Return the distribution of each token, [B, R, ...]; weigh: with importance weights."""
    tokens = rollout.tokens
    ids = jnp.where(jnp.isneginf(tokens.top_logprobs), -1, tokens.top_ids)
    columns = {"top_ids": ids, "top_logprobs": tokens.top_logprobs}
    accepted = tokens.accepted_probs
    if accepted is None:
        return columns
    columns["accepted"] = accepted
    if weigh:
        there = accepted > 0
        # π / min(π_old, ℓ π) is the larger of the two ratios that the rule's weight compares.
        ratio = jnp.log(outcomes(tokens.top_logprobs)) - jnp.log(jnp.where(there, accepted, 1.0))
        weights = rule.importance_weight(ratio, rejected_mass)
        columns["accepted_weights"] = jnp.where(there, weights, 0.0)
    return columns


LOSS_TERM = Centering
STAGE = Law
METRICS = {
    "policy/sampler_distance": ("total variation of the policy and a token's own law, mean", "1")
}
# fmt: off
SECTIONS = (Section("score_centering", "subtract the mean score of sampled tokens", (
    field("top_k", 0, "k, likeliest tokens of the sampler that centre; 0: off; SkyRL 20",
          integer()),
)),)
# fmt: on


def _rules(config: Values) -> Iterator[Check]:
    if not config.score_centering.top_k:
        return
    algorithm = config.algorithm
    where = "where score_centering.top_k is > 0"
    recomputed = config.meaning("updates.old_logprobs").recomputed
    rule = f"rollout or current {where} (π_old is known only for the sampled token)"
    yield "updates.old_logprobs", rule, not recomputed
    rule = f"token {where} (a response's ratio is not one of its tokens')"
    yield "algorithm.ratio", rule, algorithm.ratio == "token"
    rule = f"another one {where} (a token has no weight of its own)"
    yield "algorithm.objective", rule, config.meaning("algorithm.objective").by_token
    truncates = config.rollout.top_k > 0 or config.rollout.top_p < 1
    rule = f"True {where} and rollout.top_k or rollout.top_p cuts tokens off"
    yield "algorithm.keep_sampling_mask", rule, algorithm.keep_sampling_mask or not truncates
    for name in _OF_ROWS:
        yield f"algorithm.mask.{name}", f"0 {where} (it is of rows)", not algorithm.mask[name]
    drafts = config.meaning("rollout.draft").verifies_previous
    inexact = drafts and not config.meaning("rollout.accept").exact
    rule = f'"" {where} and rollout.accept is {config.rollout.accept} (drafts lie in turns)'
    yield "environment.name", rule, not (inexact and config.environment.name)


RULES = (_rules,)
