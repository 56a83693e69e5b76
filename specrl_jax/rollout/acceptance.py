"""Acceptance of draft tokens, and the distribution of the token after them.

An acceptance rule looks at one row's draft from left to right. The accepted tokens are the
*verified prefix*; the token after it is sampled from the policy π, or from a *residual* of it.

A rule that emits exactly π, if the draft was sampled from π_old, needs more of π_old than the
draft's own probabilities: its k likeliest tokens are kept one by one, all *other tokens* as one
outcome z.

    stored at one position, k = 2    7: 0.5   3: 0.3   other tokens: 0.2
    draft token 3                    π(z) / π_old(z) = π(3) / 0.3
    draft token 9                    (1 - π(7) - π(3)) / 0.2; if it is accepted, a new token is
                                     sampled from π without 7 and 3, and the draft ends
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.rollout.sampling import add_at, logprobs_at

_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class Residual:
    """Distribution of the token after the verified prefix, see `residual_scores`."""

    other_tokens: Array  # bool [b], the draft's outcome "other tokens" was accepted
    log_scale: Array  # float32 [b], log P of the verified prefix; inf: sample from π


@dataclasses.dataclass(frozen=True)
class Verification:
    """Inputs of a rule at W draft positions of b rows; log-probs are float32 nats."""

    draft_len: Array  # int32 [b], draft tokens among these positions
    logprobs: Array  # [b, W], of the draft tokens under π
    accept_threshold: Array | None = None  # [b, W], from `AcceptanceRule.accept_threshold`
    # Where the rule `needs_distribution`:
    uniforms: Array | None = None  # float32 [b, W] in (0, 1]
    old_logprobs: Array | None = None  # [b, W], of the draft tokens under π_old
    top_logprobs: Array | None = None  # [b, W, k], under π, of the k likeliest tokens of π_old
    old_top_logprobs: Array | None = None  # [b, W, k], of these under π_old
    in_top: Array | None = None  # bool [b, W], the draft token is one of these


@dataclasses.dataclass(frozen=True)
class AcceptanceRule:
    """A rule of `ACCEPTANCE_RULES`: a hashable object, fixed in the compiled programs.

    A rule that compares each draft token's log-prob with a number known beforehand overrides
    `accept_threshold`; any other rule overrides `accept`. A rule that is not exact brings its
    `importance_weight`, or cannot be used with `algorithm.importance_cap`.
    """

    exact = False  # responses are distributed as π, whatever the draft
    # Every token is sampled; a draft token is accepted where it is the sampled one.
    samples_anew = False
    # A draft is decided on at its end, with π_old's k likeliest tokens at every position;
    # `accept` gives a residual. Any other rule may see a draft in parts.
    needs_distribution = False
    cuts_draft = False  # drafts are cut by `cut` before anything is verified
    # (log π(y) - log π_old(y), log ℓ, share of rejections) -> weight of an accepted token y, which
    # turns means over emitted tokens into means under π; arrays [B, R], None: there is none.
    importance_weight: ClassVar[Callable[[Array, Array, Array], Array] | None] = None
    # (log π(y) - log π_old(y), log ℓ) -> chance that an accepted token y is rejected at ℓ = 1, in
    # [0, 1]; arrays [B, R], None: `log_lenience` has no meaning.
    lenient_share: ClassVar[Callable[[Array, Array], Array] | None] = None

    def cut(self, uniforms: Array, draft_lens: Array) -> Array:
        """Draft tokens that are left of each draft, int32 [B]."""
        return draft_lens

    def accept_threshold(
        self, uniforms: Array, draft_logprobs: Array, log_lenience: Array
    ) -> Array:
        """log π(y) from which on a draft token y is accepted, float32 [B, W].

        draft_logprobs: log π_old(y) [B, W]. log_lenience: scalar in [-inf, inf].
        """
        raise NotImplementedError

    def accept(self, step: Verification) -> tuple[Array, Residual | None]:
        """Return the accepted tokens of each draft, int32 [b], and the residual; None: π. The
        residual of a row without draft tokens is π."""
        return count_leading(step.logprobs >= step.accept_threshold, step.draft_len), None


class Ratio(AcceptanceRule):
    """SPEC-RL (arXiv 2509.23232, eq. 5): u <= min(1, ℓ π(y) / π_old(y)).

    With r = π / π_old it emits min(π_old, ℓ π) + d π, d = 1 - Σ min(π_old, ℓ π): as published, the
    token after the prefix is sampled from π, not from a residual, so this is not π even at ℓ = 1.

    Differs from the paper: uniforms are keyed by the step. The published code seeds them once, so
    that a token accepted in one epoch meets the same number in the next.
    """

    def accept_threshold(self, uniforms, draft_logprobs, log_lenience):
        threshold = jnp.log(uniforms) + draft_logprobs - log_lenience
        # A token that the policy never samples is accepted by full reuse (ℓ = inf) alone.
        lowest = jnp.where(jnp.isposinf(log_lenience), -jnp.inf, _LOWEST)
        threshold = jnp.maximum(threshold, lowest)
        return jnp.where(jnp.isneginf(log_lenience), jnp.inf, threshold)

    @staticmethod
    def importance_weight(log_ratio, log_lenience, rejected_mass):
        """Return (1 - d) max(r, 1 / ℓ): π over the accepted part of the emitted distribution."""
        return (1 - rejected_mass) * jnp.exp(jnp.maximum(log_ratio, -log_lenience))

    @staticmethod
    def lenient_share(log_ratio, log_lenience):
        """Return 1 - min(1, r) / min(1, ℓ r)."""
        lenience = jnp.where(log_lenience > 0, log_lenience, 0.0)
        return -jnp.expm1(jnp.minimum(log_ratio, 0) - jnp.minimum(log_ratio + lenience, 0))


class RandomCut(AcceptanceRule):
    """SPEC-RL's ablation "random reuse": a uniformly random part of the draft is accepted."""

    cuts_draft = True

    def cut(self, uniforms, draft_lens):
        cut = jnp.floor(uniforms * draft_lens).astype(jnp.int32)
        return jnp.minimum(cut, jnp.maximum(draft_lens - 1, 0))

    def accept_threshold(self, uniforms, draft_logprobs, log_lenience):
        return jnp.full_like(draft_logprobs, -jnp.inf)

    @staticmethod
    def importance_weight(log_ratio, log_lenience, rejected_mass):
        """r = π / π_old."""
        return jnp.exp(log_ratio)


class Block(AcceptanceRule):
    """Block verification of whole drafts (arXiv 2403.10444, algorithm 2).

        P_0 = 1,  P_i = min(1, P_{i-1} π(z_i) / π_old(z_i))
        s_i = Σ_x (P_i π(x) - π_old(x))_+ at position i + 1
        h_i = s_i / (s_i + 1 - P_i),  h_T = P_T

    The longest prefix with u_i <= h_i is accepted, i its length and u_i the uniform of its last
    token. The token after it is sampled ∝ (P_i π - π_old)_+, or from π if all is accepted.
    """

    exact = True
    needs_distribution = True

    def accept(self, step):
        columns = jnp.arange(step.uniforms.shape[1], dtype=jnp.int32)[None, :]
        log_p = _joint_log_ratio(_outcome_log_ratio(step))
        # The token that ends the draft is an outcome still.
        outcomes = jnp.minimum(count_leading(step.in_top, step.draft_len) + 1, step.draft_len)

        # A prefix that may go on is decided with the distributions one column later.
        log_p_before = jnp.pad(log_p[:, :-1], ((0, 0), (1, 0)))
        uniforms_before = jnp.pad(step.uniforms[:, :-1], ((0, 0), (1, 0)))
        keep = uniforms_before <= _keep_prob(log_p_before, step)
        cut = jnp.max(jnp.where(keep & (columns < outcomes[:, None]), columns, 0), axis=1)

        last = columns == outcomes[:, None] - 1
        whole = jnp.any(last & (jnp.log(step.uniforms) <= log_p), axis=1) | (step.draft_len <= 0)
        others = jnp.any(last & ~step.in_top, axis=1) & whole
        accepted = jnp.where(whole, outcomes - others, cut)
        log_p_cut = jnp.take_along_axis(log_p_before, cut[:, None], axis=1)[:, 0]
        log_scale = jnp.where(whole, jnp.inf, log_p_cut)
        return accepted, Residual(others, log_scale)


class Match(AcceptanceRule):
    """Every token is sampled from π; a draft saves the steps in which it says the same."""

    exact = True
    samples_anew = True


MATCH = Match()

# `rollout.accept`. The only place where a rule's name is written.
ACCEPTANCE_RULES: dict[str, AcceptanceRule] = {
    "ratio": Ratio(),
    "random": RandomCut(),
    "block": Block(),
    "match": MATCH,
}


def count_leading(accept_BW: Array, lens_B: Array) -> Array:
    """Number of leading True within each row's first `lens` entries, int32 [B]."""
    width = accept_BW.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(accept_BW & (steps < lens_B[:, None]), width, steps), axis=1)


def in_top(tokens: Array, top_ids: Array) -> Array:
    """Return whether tokens [...] are among top_ids [..., k], bool [...]."""
    return jnp.any(tokens[..., None] == top_ids, axis=-1)


def residual_scores(
    scores: Array, top_ids: Array, top_logprobs: Array, residual: Residual
) -> Array:
    """Log-weights [..., V] of the token after the prefix, ∝ (P π - π_old)_+, unnormalised.

    scores: [..., V] of π, tempered and truncated. top_ids, top_logprobs: [..., k] of π_old at this
    position. Where other tokens were accepted: π without top_ids. π itself for P = inf, and where
    no token has any weight.
    """
    log_scale = residual.log_scale
    now = logprobs_at(scores, top_ids)
    # Over P, so that P = inf leaves π: log(π - π_old / P) = log π + log(1 - π_old / (P π)).
    excess = _with_others(top_logprobs) - log_scale[..., None] - _with_others(now)
    factor = jnp.where(excess < 0, jnp.log1p(-jnp.exp(jnp.minimum(excess, 0.0))), -jnp.inf)
    factor = jnp.where(jnp.isposinf(log_scale)[..., None], 0.0, factor)  # also where π is 0
    elsewhere = jnp.where(residual.other_tokens, 0.0, factor[..., -1])
    at_ids = jnp.where(residual.other_tokens[..., None], -jnp.inf, factor[..., :-1])
    weights = add_at(scores, top_ids, at_ids, elsewhere=elsewhere)
    empty = jnp.max(weights, axis=-1, keepdims=True) == -jnp.inf
    return jnp.where(empty, scores, weights)


def _with_others(top_logprobs: Array) -> Array:
    """Append the log-mass of all other tokens: [..., k] → [..., k + 1]."""
    rest = 1.0 - jnp.sum(jnp.exp(top_logprobs), axis=-1, keepdims=True)
    return jnp.concatenate([top_logprobs, jnp.log(jnp.maximum(rest, 0.0))], axis=-1)


def _outcome_log_ratio(step: Verification) -> Array:
    """log π(z) / π_old(z) of the draft's outcomes [b, W]; -inf where π_old(z) is 0."""
    now = jnp.where(step.in_top, step.logprobs, _with_others(step.top_logprobs)[..., -1])
    old = jnp.where(step.in_top, step.old_logprobs, _with_others(step.old_top_logprobs)[..., -1])
    return jnp.where(old > -jnp.inf, now - old, -jnp.inf)


def _joint_log_ratio(log_ratio: Array) -> Array:
    """log P_i = min(0, log P_{i-1} + log_ratio_i) over [b, W], from log P_0 = 0.

    Token by token: cheap beside the model, and a difference of cumulative sums loses digits on
    long drafts.
    """

    def step(log_p: Array, change: Array) -> tuple[Array, Array]:
        log_p = jnp.minimum(log_p + change, 0.0)
        return log_p, log_p

    _, log_p = jax.lax.scan(step, jnp.zeros_like(log_ratio[:, 0]), log_ratio.T, unroll=8)
    return log_p.T


def _keep_prob(log_p: Array, step: Verification) -> Array:
    """h of prefixes with joint ratio P [b, W], from the distributions after them."""
    gain = jnp.exp(log_p[..., None] + _with_others(step.top_logprobs))
    gain = jnp.sum(jnp.maximum(gain - jnp.exp(_with_others(step.old_top_logprobs)), 0.0), axis=-1)
    total = gain - jnp.expm1(log_p)
    # 0 / 0: P = 1 and equal distributions. The next token is then accepted, and so is the prefix.
    return jnp.where(total > 0, gain / total, 1.0)
