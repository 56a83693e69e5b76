"""Acceptance of draft tokens, and the distribution of the token after them.

`match` (default) samples every token and keeps draft tokens that are equal; it reads no stored
log-probs. `ratio` and `block` compare the policy π with π_old, the distribution that sampled the
draft. `random` keeps a random part of the draft.

A rule looks at one row's draft from left to right. The accepted tokens are the *verified prefix*.
The token after them is sampled from π, or from a *residual* of π and π_old.

`block` emits exactly π. It needs more of π_old than the probabilities of the draft tokens: the k
likeliest tokens are kept one by one, and all *other tokens* as one outcome z.

    stored at one position, k = 2    7: 0.5   3: 0.3   other tokens: 0.2
    draft token 3                    π(z) / π_old(z) = π(3) / 0.3
    draft token 9                    (1 - π(7) - π(3)) / 0.2; if it is accepted, a new token is
                                     sampled from π without 7 and 3, and the draft ends
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.row_slices import read_slots
from specrl_jax.rollout.one_pass import FusedDistributions
from specrl_jax.rollout.sampling import TokenDistributions, add_at, logprobs_at
from specrl_jax.types import Tokens

_LOWEST = float(jnp.finfo(jnp.float32).min)
LEAST_REST = 1e-6  # least probability of all other tokens where it divides


@dataclasses.dataclass(frozen=True)
class DraftTokens:
    """Draft tokens of b rows at t positions, and the numbers that rules compare them with."""

    lens: Array  # int32 [b], tokens that count: the first ones
    stored: Tokens  # [b, t], with the stored log-probs under π_old
    uniforms: Array  # float32 [b, t] in (0, 1]


@dataclasses.dataclass(frozen=True)
class Residual:
    """Distribution of a token after the verified prefix, ∝ (P π - π_old)_+."""

    top_ids: Array  # int32 [..., k], the likeliest tokens of π_old at this position
    top_logprobs: Array  # float32 [..., k], log-probs of `top_ids` under π_old
    other_tokens: Array  # bool [...], the draft's outcome "other tokens" was accepted
    log_scale: Array  # float32 [...], log P of the verified prefix; inf: the residual is π

    def weigh(self, scores: Array) -> Array:
        """Return the log-weights [..., V] of the token, unnormalised.

        scores: [..., V] of π, tempered and truncated. The weights are those of π without top_ids
        where other tokens were accepted, and of π for P = inf and where no token has any weight.
        """
        log_scale = self.log_scale
        now = logprobs_at(scores, self.top_ids)
        # Over P, so that P = inf leaves π: log(π - π_old / P) = log π + log(1 - π_old / (P π)).
        excess = _with_others(self.top_logprobs) - log_scale[..., None] - _with_others(now)
        factor = jnp.where(excess < 0, jnp.log1p(-jnp.exp(jnp.minimum(excess, 0.0))), -jnp.inf)
        factor = jnp.where(jnp.isposinf(log_scale)[..., None], 0.0, factor)  # also where π is 0
        elsewhere = jnp.where(self.other_tokens, 0.0, factor[..., -1])
        at_ids = jnp.where(self.other_tokens[..., None], -jnp.inf, factor[..., :-1])
        weights = add_at(scores, self.top_ids, at_ids, elsewhere=elsewhere)
        empty = jnp.max(weights, axis=-1, keepdims=True) == -jnp.inf
        return jnp.where(empty, scores, weights)


class AcceptanceRule:
    """Rule of `ACCEPTANCE_RULES`: a pytree; its numbers are arguments of the compiled programs.

    A rule `look`s at a draft, some tokens at a time, until it rejects one or the draft ends. Then
    it `decide`s. A rule that compares each draft token's log-prob with a known number overrides
    `accept_threshold` alone. `algorithm.importance_cap` takes rules that are exact or have an
    `importance_weight`.
    """

    exact = False  # responses are distributed as π, whatever the draft
    # Every token is sampled; a draft token that equals the sampled one is kept. Such a rule reads
    # no stored log-probs.
    samples_anew = False
    needs_distribution = False  # π_old's k likeliest tokens are stored at every position
    cuts_draft = False  # drafts are cut by `cut` before anything is verified
    # (log π(y) - log π_old(y), rejected_mass) -> weight of an accepted token y. The weights turn
    # means over emitted tokens into means under π. Arrays [B, R]; None: there is no weight.
    importance_weight: ClassVar[Callable[[Any, Array, Array], Array] | None] = None
    # (π, π_old) [..., k + 1], from `outcomes` -> chance that a token is the draft's, and accepted.
    # After a rejection the token is from π. None: the rule emits π.
    accepted_probs: ClassVar[Callable[[Any, Array, Array], Array] | None] = None
    # log π(y) - log π_old(y) -> chance in [0, 1] that an accepted token y is rejected at ℓ = 1.
    # Arrays [B, R]; None: the rule has no lenience.
    lenient_share: ClassVar[Callable[[Any, Array], Array] | None] = None

    @classmethod
    def of(cls, lenience: float) -> "AcceptanceRule":
        """Return the rule. lenience: ℓ >= 0, for rules that have one."""
        return cls()

    def cut(self, uniforms: Array, draft_lens: Array) -> Array:
        """Return how many tokens of each draft are verified, the first ones, int32 [B]."""
        return draft_lens

    def accept_threshold(self, uniforms: Array, draft_logprobs: Array) -> Array:
        """Return the least log π(y) at which a draft token y is accepted, float32 [b, t].

        draft_logprobs: log π_old(y) [b, t].
        """
        raise NotImplementedError

    def look(
        self, draft: DraftTokens, policy: TokenDistributions | FusedDistributions
    ) -> tuple[Array, Tokens, Any]:
        """Look at t draft tokens of each row; all draft tokens before them were kept.

        policy: π at the t positions. Returns how many of the tokens are kept, int32 [b]; the
        columns [b, t] that the row gets for kept tokens; and evidence for `decide`, a pytree of
        arrays [b, t, ...].
        """
        now = policy.score(draft.stored.ids)
        threshold = self.accept_threshold(draft.uniforms, draft.stored.sampling_logprobs)
        return count_leading(now.sampling_logprobs >= threshold, draft.lens), now, ()

    def decide(
        self, draft: DraftTokens, kept: Array, now: Tokens, evidence: Any
    ) -> tuple[Array, Residual | None]:
        """Decide on whole drafts; `look` has seen each one up to a rejection or its end.

        kept (int32 [b]), now, evidence: results of `look`, zeros at positions that it has not
        seen. Returns how many tokens are accepted, int32 [b], and the distribution of the next
        token, [b, 1]; None: π.
        """
        return kept, None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ratio(AcceptanceRule):
    """SPEC-RL (arXiv 2509.23232, eq. 5): u <= min(1, ℓ π(y) / π_old(y)).

    As published, the token after the prefix is sampled from π, not from a residual. The rule emits
    min(π_old, ℓ π) + d π with d = 1 - Σ min(π_old, ℓ π), which `rejected_mass` estimates. This is
    not π even at ℓ = 1.

    Differs from the paper: uniforms are keyed by the step. The published code seeds them once, so
    that a token accepted in one epoch meets the same number in the next.
    """

    log_lenience: Array | np.float32  # log ℓ in nats, in [-inf, inf]

    @classmethod
    def of(cls, lenience):
        return cls(np.float32(math.log(lenience) if lenience else -math.inf))

    def accept_threshold(self, uniforms, draft_logprobs):
        threshold = jnp.log(uniforms) + draft_logprobs - self.log_lenience
        # A token that the policy never samples is accepted by full reuse (ℓ = inf) alone.
        lowest = jnp.where(jnp.isposinf(self.log_lenience), -jnp.inf, _LOWEST)
        threshold = jnp.maximum(threshold, lowest)
        return jnp.where(jnp.isneginf(self.log_lenience), jnp.inf, threshold)

    def accepted_probs(self, now, old):
        """Return min(π_old, ℓ π)."""
        return jnp.minimum(old, jnp.where(now > 0, jnp.exp(jnp.log(now) + self.log_lenience), 0.0))

    def importance_weight(self, log_ratio, rejected_mass):
        """Return (1 - d) max(π / π_old, 1 / ℓ): π over the accepted part of the emitted law."""
        return (1 - rejected_mass) * jnp.exp(jnp.maximum(log_ratio, -self.log_lenience))

    def lenient_share(self, log_ratio):
        """Return 1 - min(1, r) / min(1, ℓ r), where r = π / π_old."""
        lenience = jnp.where(self.log_lenience > 0, self.log_lenience, 0.0)
        return -jnp.expm1(jnp.minimum(log_ratio, 0) - jnp.minimum(log_ratio + lenience, 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomCut(AcceptanceRule):
    """SPEC-RL's ablation "random reuse": a uniformly random part of the draft is accepted."""

    cuts_draft = True

    def cut(self, uniforms, draft_lens):
        cut = jnp.floor(uniforms * draft_lens).astype(jnp.int32)
        return jnp.minimum(cut, jnp.maximum(draft_lens - 1, 0))

    def accept_threshold(self, uniforms, draft_logprobs):
        return jnp.full_like(draft_logprobs, -jnp.inf)

    def accepted_probs(self, now, old):
        """Return π_old."""
        return old

    def importance_weight(self, log_ratio, rejected_mass):
        """Return π / π_old."""
        return jnp.exp(log_ratio)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block(AcceptanceRule):
    """Block verification of whole drafts (arXiv 2403.10444, algorithm 2), see `verify_block`."""

    exact = True
    needs_distribution = True

    def look(self, draft, policy):
        # A prefix may be kept although a shorter one is not: the whole draft is looked at.
        now = policy.score(draft.stored.ids)
        return draft.lens, now, logprobs_at(policy.truncated, draft.stored.top_ids)

    def decide(self, draft, kept, now, evidence):
        stored = draft.stored
        kept, other_tokens, log_scale = verify_block(
            draft.uniforms,
            now.sampling_logprobs,
            stored.sampling_logprobs,
            evidence,
            stored.top_logprobs,
            jnp.any(stored.ids[..., None] == stored.top_ids, axis=-1),
            draft.lens,
        )
        here = jnp.minimum(kept, stored.ids.shape[1] - 1)
        top_ids = read_slots(stored.top_ids, here, 1)
        top_logprobs = read_slots(stored.top_logprobs, here, 1)
        return kept, Residual(top_ids, top_logprobs, other_tokens[:, None], log_scale[:, None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Match(AcceptanceRule):
    """Every token is sampled from π; a draft token that is equal saves a decode step."""

    exact = True
    samples_anew = True

    def look(self, draft, policy):
        sampled = policy.sample()
        return count_leading(sampled.ids == draft.stored.ids, draft.lens), sampled, ()


MATCH = Match()

# `rollout.accept`. The only place where a rule's name is written.
ACCEPTANCE_RULES: dict[str, type[AcceptanceRule]] = {
    "ratio": Ratio,
    "random": RandomCut,
    "block": Block,
    "match": Match,
}


def count_leading(accept_BW: Array, lens_B: Array) -> Array:
    """Count the leading True within each row's first `lens` entries, int32 [B]."""
    width = accept_BW.shape[1]
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(accept_BW & (offsets < lens_B[:, None]), width, offsets), axis=1)


def outcomes(logprobs: Array, least: float = 0.0) -> Array:
    """Return the probabilities [..., k + 1] of k tokens and of all others.

    logprobs: [..., k]; -inf where there are fewer tokens. least: of the others, at least.
    """
    probs = jnp.exp(logprobs)
    rest = jnp.maximum(1.0 - jnp.sum(probs, axis=-1, keepdims=True), least)
    return jnp.concatenate([probs, rest], axis=-1)


def logprobs_of_ids(ids: Array, logprobs: Array, wanted: Array, law: Array) -> Array:
    """Return log-probs [..., k] of the tokens `wanted`, where those of other tokens are known.

    A token that is not known has a share of what the others leave, in proportion to another law.

    ids, logprobs: [..., j], tokens and their log-probs. wanted: int32 [..., k]; -1 for none. law:
    [..., k], log-probs of the other law at `wanted`.
    """
    same = (wanted[..., :, None] == ids[..., None, :]) & (wanted >= 0)[..., :, None]
    known = jnp.any(same, axis=-1)
    found = jnp.max(jnp.where(same, logprobs[..., None, :], -jnp.inf), axis=-1)
    rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(logprobs), axis=-1, keepdims=True), 0.0)
    law_known = jnp.sum(jnp.where(known, jnp.exp(law), 0.0), axis=-1, keepdims=True)
    law_rest = jnp.maximum(1.0 - law_known, LEAST_REST)
    shared = jnp.where(wanted >= 0, law + jnp.log(rest / law_rest), -jnp.inf)
    return jnp.where(known, found, shared)


def verify_block(
    uniforms: Array,
    logprobs: Array,
    old_logprobs: Array,
    top_logprobs: Array,
    old_top_logprobs: Array,
    in_top: Array,
    lens: Array,
) -> tuple[Array, Array, Array]:
    """Verify whole drafts.

        P_0 = 1,  P_i = min(1, P_{i-1} π(z_i) / π_old(z_i))
        s_i = Σ_x (P_i π(x) - π_old(x))_+ at position i + 1
        h_i = s_i / (s_i + 1 - P_i),  h_T = P_T

    The accepted prefix is the longest one with u_i <= h_i; i is its length, u_i the uniform of its
    last token. The token after it is sampled ∝ (P_i π - π_old)_+, or from π if all is accepted.

    uniforms: [b, T] in (0, 1]. logprobs, old_logprobs: [b, T], of the draft tokens under π and
    π_old. top_logprobs, old_top_logprobs: [b, T, k], of the k likeliest tokens of π_old, under π
    and π_old. in_top: bool [b, T], draft tokens among these k. lens: int32 [b].

    Returns the length of the prefix int32 [b], `other_tokens` and `log_scale` of the `Residual`.
    """
    columns = jnp.arange(uniforms.shape[1], dtype=jnp.int32)[None, :]
    log_p = _joint_log_ratio(
        jnp.where(in_top, logprobs, _with_others(top_logprobs)[..., -1]),
        jnp.where(in_top, old_logprobs, _with_others(old_top_logprobs)[..., -1]),
    )
    # The draft ends with its first token that is not among the k; this token is an outcome too.
    outcomes = jnp.minimum(count_leading(in_top, lens) + 1, lens)

    # A prefix that is not the whole draft is decided with the distributions one column later.
    log_p_before = jnp.pad(log_p[:, :-1], ((0, 0), (1, 0)))
    uniforms_before = jnp.pad(uniforms[:, :-1], ((0, 0), (1, 0)))
    keep = uniforms_before <= _keep_prob(log_p_before, top_logprobs, old_top_logprobs)
    cut = jnp.max(jnp.where(keep & (columns < outcomes[:, None]), columns, 0), axis=1)

    last = columns == outcomes[:, None] - 1
    whole = jnp.any(last & (jnp.log(uniforms) <= log_p), axis=1) | (lens <= 0)
    others = jnp.any(last & ~in_top, axis=1) & whole
    log_p_cut = jnp.take_along_axis(log_p_before, cut[:, None], axis=1)[:, 0]
    accepted = jnp.where(whole, outcomes - others, cut)
    return accepted, others, jnp.where(whole, jnp.inf, log_p_cut)


def _with_others(top_logprobs: Array) -> Array:
    """Append the log-mass of all other tokens: [..., k] → [..., k + 1]."""
    rest = 1.0 - jnp.sum(jnp.exp(top_logprobs), axis=-1, keepdims=True)
    return jnp.concatenate([top_logprobs, jnp.log(jnp.maximum(rest, 0.0))], axis=-1)


def _joint_log_ratio(now: Array, old: Array) -> Array:
    """Return log P_i = min(0, log P_{i-1} + log π(z_i) - log π_old(z_i)), [b, T]; log P_0 = 0."""
    # Token by token: a difference of cumulative sums loses digits on long drafts.
    log_ratio = jnp.where(old > -jnp.inf, now - old, -jnp.inf)

    def step(log_p: Array, change: Array) -> tuple[Array, Array]:
        log_p = jnp.minimum(log_p + change, 0.0)
        return log_p, log_p

    _, log_p = jax.lax.scan(step, jnp.zeros_like(log_ratio[:, 0]), log_ratio.T, unroll=8)
    return log_p.T


def _keep_prob(log_p: Array, top_logprobs: Array, old_top_logprobs: Array) -> Array:
    """Return h [b, T] of prefixes with joint ratio P [b, T].

    top_logprobs, old_top_logprobs: [b, T, k], of the token after the prefix.
    """
    gain = jnp.exp(log_p[..., None] + _with_others(top_logprobs))
    gain = jnp.sum(jnp.maximum(gain - jnp.exp(_with_others(old_top_logprobs)), 0.0), axis=-1)
    total = gain - jnp.expm1(log_p)
    # 0 / 0: P = 1 and equal distributions. The next token is then accepted, and so is the prefix.
    return jnp.where(total > 0, gain / total, 1.0)
