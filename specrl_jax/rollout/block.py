"""Block verification of whole drafts (arXiv 2403.10444, algorithm 2), which emits exactly π.

It needs more of π_old than the probabilities of the draft tokens: the k likeliest tokens are kept
individually, and all *other tokens* as one outcome z.

    stored at one position, k = 2    7: 0.5   3: 0.3   other tokens: 0.2
    draft token 3                    π(z) / π_old(z) = π(3) / 0.3
    draft token 9                    (1 - π(7) - π(3)) / 0.2; if it is accepted, a new token is
                                     sampled from π without 7 and 3, and the draft ends
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.row_slices import count_leading
from specrl_jax.rollout.sampling import add_at, logprobs_at


@dataclasses.dataclass(frozen=True)
class Residual:
    """Distribution of the token after the verified prefix, ∝ (P π - π_old)_+."""

    top_ids: Array  # int32 [..., k], the likeliest tokens of π_old at this position
    top_logprobs: Array  # float32 [..., k], log-probs of `top_ids` under π_old
    other_tokens: Array  # bool [...], the draft's outcome "other tokens" was accepted
    log_scale: Array  # float32 [...], log P of the verified prefix; inf: the residual is π

    def weigh(self, scores: Array) -> Array:
        """Return the log-weights [..., V] of the token, unnormalised.

        scores: [..., V] of π, tempered and truncated. The weights are those of π without top_ids
        if other tokens were accepted, and those of π if P = inf or no token has any weight.
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
    # The draft ends at its first token outside the k; this token is an outcome too.
    outcomes = jnp.minimum(count_leading(in_top, lens) + 1, lens)

    # A prefix shorter than the draft is decided with the distributions one column later.
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
    # Token by token: a difference of cumulative sums loses precision on long drafts.
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
