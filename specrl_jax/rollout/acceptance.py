"""Acceptance of draft tokens, and the distribution of the token after them.

`match` (default) samples every token and keeps draft tokens that are equal; it does not read stored
log-probs. `ratio` and `block` compare the policy π with π_old, the distribution that sampled the
draft. `random` keeps a random part of the draft.

A rule looks at one row's draft from left to right. The accepted tokens are the *verified prefix*.
The token after them is sampled from π, or from a *residual* of π and π_old (`block.py`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.row_slices import count_leading, read_slots
from specrl_jax.registry import Table
from specrl_jax.rollout.block import Residual, verify_block
from specrl_jax.rollout.fused_sampling import FusedDistributions
from specrl_jax.rollout.sampling import TokenDistributions, logprobs_at
from specrl_jax.types import Tokens

_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class DraftTokens:
    """Draft tokens of b rows at t positions, and the values that rules compare them with."""

    lens: Array  # int32 [b], number of valid tokens, the first ones
    stored: Tokens  # [b, t], with the stored log-probs under π_old
    uniforms: Array  # float32 [b, t] in (0, 1]


class AcceptanceRule:
    """Rule of `ACCEPTANCE_RULES`: a pytree; its numbers are arguments of the compiled programs.

    A rule `look`s at a draft, a few tokens at a time, until it rejects one or the draft ends. Then
    it `decide`s. A rule that compares each draft token's log-prob with a known number only
    overrides `accept_threshold`. `algorithm.importance_cap` accepts rules that are exact or have an
    `importance_weight`.
    """

    exact = False  # responses are distributed as π, whatever the draft
    # Every token is sampled; a draft token that equals the sampled one is kept. Such a rule reads
    # no stored log-probs.
    samples_every_token = False
    needs_distribution = False  # needs π_old's k likeliest tokens at every position
    cuts_draft = False  # drafts are cut by `cut` before verification
    # (log π(y) - log π_old(y), rejected_mass) -> weight of an accepted token y. The weights turn
    # means over emitted tokens into means under π. Arrays [B, R]; None: there is no weight.
    importance_weight: ClassVar[Callable[[Any, Array, Array], Array] | None] = None
    # (π, π_old) [..., k + 1], from `outcomes` -> probability that a token comes from the draft and
    # is accepted. After a rejection the token is from π. None: the rule emits π.
    accepted_probs: ClassVar[Callable[[Any, Array, Array], Array] | None] = None
    # log π(y) - log π_old(y) -> probability that an accepted token y is rejected at ℓ = 1.
    # Arrays [B, R]; None: the rule has no lenience.
    lenience_dependent_share: ClassVar[Callable[[Any, Array], Array] | None] = None

    @classmethod
    def of(cls, lenience: float) -> "AcceptanceRule":
        """Return the rule. lenience: ℓ >= 0, for rules that have one."""
        return cls()

    def cut(self, uniforms: Array, draft_lens: Array) -> Array:
        """Return how many tokens of each draft (its first ones) are verified, int32 [B]."""
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
        columns [b, t] to store for kept tokens; and evidence for `decide`, a pytree of arrays
        [b, t, ...].
        """
        now = policy.score(draft.stored.ids)
        threshold = self.accept_threshold(draft.uniforms, draft.stored.sampling_logprobs)
        return count_leading(now.sampling_logprobs >= threshold, draft.lens), now, ()

    def decide(
        self, draft: DraftTokens, kept: Array, now: Tokens, evidence: Any
    ) -> tuple[Array, Residual | None]:
        """Decide on whole drafts; `look` has seen each one up to a rejection or its end.

        kept (int32 [b]), now, evidence: results of `look`, zeros at positions it has not seen.
        Returns how many tokens are accepted, int32 [b], and the distribution of the next token,
        [b, 1]; None: π.
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
    a token accepted in one epoch is tested against the same number in the next.
    """

    log_lenience: Array | np.float32  # log ℓ in nats, in [-inf, inf]

    @classmethod
    def of(cls, lenience):
        return cls(np.float32(math.log(lenience) if lenience else -math.inf))

    def accept_threshold(self, uniforms, draft_logprobs):
        threshold = jnp.log(uniforms) + draft_logprobs - self.log_lenience
        # A token that the policy never samples is accepted only by full reuse (ℓ = inf).
        lowest = jnp.where(jnp.isposinf(self.log_lenience), -jnp.inf, _LOWEST)
        threshold = jnp.maximum(threshold, lowest)
        return jnp.where(jnp.isneginf(self.log_lenience), jnp.inf, threshold)

    def accepted_probs(self, now, old):
        """Return min(π_old, ℓ π)."""
        return jnp.minimum(old, jnp.where(now > 0, jnp.exp(jnp.log(now) + self.log_lenience), 0.0))

    def importance_weight(self, log_ratio, rejected_mass):
        """Return (1 - d) max(π / π_old, 1 / ℓ): π over the accepted part of the emitted law."""
        return (1 - rejected_mass) * jnp.exp(jnp.maximum(log_ratio, -self.log_lenience))

    def lenience_dependent_share(self, log_ratio):
        """Return 1 - min(1, r) / min(1, ℓ r), where r = π / π_old."""
        lenience = jnp.where(self.log_lenience > 0, self.log_lenience, 0.0)
        return -jnp.expm1(jnp.minimum(log_ratio, 0) - jnp.minimum(log_ratio + lenience, 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomCut(AcceptanceRule):
    """SPEC-RL's ablation "random reuse": accept a uniformly random part of the draft."""

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
        # A prefix may be kept even if a shorter one is not, so look at the whole draft.
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
    """Every token is sampled from π; a matching draft token saves a decode step."""

    exact = True
    samples_every_token = True

    def look(self, draft, policy):
        sampled = policy.sample()
        return count_leading(sampled.ids == draft.stored.ids, draft.lens), sampled, ()


MATCH = Match()

# `rollout.accept`. The only place where a rule's name is written.
ACCEPTANCE_RULES: dict[str, type[AcceptanceRule]] = Table(
    "ACCEPTANCE_RULES",
    {
        "ratio": Ratio,
        "random": RandomCut,
        "block": Block,
        "match": Match,
    },
)
