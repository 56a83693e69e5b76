"""Score centering: the mean score of the sampled tokens is taken out (arXiv 2609.20807).

Over tokens y ~ q of another law than the policy p, the score ∇ log p(y) has a mean that is not 0,
and it drifts the weights even where all advantages are equal. With advantages A and a weight w of
each token the loss gets the term A·C per token (eq. 14):

    C = Σ_{v∈H} sg(m(v) − α·p(v))·log p(v),    m = q·w,    sg: no gradient through it

H are the k likeliest tokens of the sampler. All others are one outcome z, in which q is
proportional to p: with ρ = q(z) / p(z) they have α = ρ·w(z), as Σ_v p(v) ∇ log p(v) = 0. Without
weights m = q and α = ρ; with w = clip(p / q, lo, hi), m = clip(p, lo·q, hi·q) and
α = clip(1, lo·ρ, hi·ρ).

Worked example, k = 1, no weights: q(H) = 0.5 and p(H) = 0.6 give ρ = 0.5 / 0.4 = 1.25 and
C = (0.5 − 1.25·0.6)·log p(H) = −0.25·log p(H).
"""

import jax
import jax.numpy as jnp
from jax import Array

# Least mass of all other tokens under p, as published: ρ stays finite.
LEAST_REST = 1e-6


# Laws on outcomes: the k tokens of H, then all others, [..., k + 1] --------------------------


def outcomes(logprobs: Array, least: float = 0.0) -> Array:
    """Return the probabilities [..., k + 1] of the tokens of H and of all others.

    logprobs: [..., k], log-probs at H; -inf where H has fewer tokens. least: of all others.
    """
    probs = jnp.exp(logprobs)
    rest = jnp.maximum(1 - jnp.sum(probs, axis=-1, keepdims=True), least)
    return jnp.concatenate([probs, rest], axis=-1)


def split_emitted(now: Array, old: Array, log_lenience: Array) -> tuple[Array, Array]:
    """Return the two parts of what SPEC-RL's ratio rule emits at a verified position.

        accepted = min(π_old, ℓ·π),    sampled = (1 − Σ accepted)·π

    A draft token is from π_old, and a token after a rejection from π. The parts add to 1. Exact
    where the draft was sampled from π_old, and where π_old is proportional to π outside H.

    now, old: π and π_old [..., k + 1], from `outcomes`. log_lenience: log ℓ, may be inf.
    """
    lenient = jnp.where(now > 0, jnp.exp(jnp.log(now) + log_lenience), 0.0)
    accepted = jnp.minimum(old, lenient)
    rejected = 1 - jnp.sum(accepted, axis=-1, keepdims=True)
    return accepted, jnp.maximum(rejected, 0.0) * now


def at_ids(ids: Array, logprobs: Array, wanted: Array, law: Array) -> Array:
    """Return log-probs [..., k] at the tokens `wanted`, known at the tokens `ids`.

    A token that is not known has a share of what they leave, in proportion to another law.

    ids, logprobs: [..., j], tokens and their log-probs. wanted: int32 [..., k]; -1 for none.
    law: [..., k], log-probs of the other law at `wanted`.
    """
    same = (wanted[..., :, None] == ids[..., None, :]) & (wanted >= 0)[..., :, None]
    known = jnp.any(same, axis=-1)
    found = jnp.max(jnp.where(same, logprobs[..., None, :], -jnp.inf), axis=-1)
    rest = jnp.maximum(1 - jnp.sum(jnp.exp(logprobs), axis=-1, keepdims=True), 0.0)
    law_known = jnp.sum(jnp.where(known, jnp.exp(law), 0.0), axis=-1, keepdims=True)
    law_rest = jnp.maximum(1 - law_known, LEAST_REST)
    return jnp.where(known, found, jnp.where(wanted >= 0, law + jnp.log(rest / law_rest), -jnp.inf))


# The term ------------------------------------------------------------------------------------


def centering(logprobs: Array, mass: Array) -> Array:
    """Return C [...], whose gradient is the mean weighted score of the sampler's tokens.

    logprobs: log p at H [..., k]; carries the gradient. -inf or less than any where H has fewer
        tokens.
    mass: m [..., k + 1], of the tokens of H and of all others.
    """
    known = jnp.isfinite(logprobs)
    finite = jnp.where(known, logprobs, 0.0)
    probs = outcomes(jax.lax.stop_gradient(logprobs), LEAST_REST)
    alpha = mass[..., -1:] / probs[..., -1:]
    weights = jnp.where(known, mass[..., :-1] - alpha * probs[..., :-1], 0.0)
    return jnp.sum(jax.lax.stop_gradient(weights) * finite, axis=-1)


def log_ratios(logprobs: Array, sampler: Array) -> Array:
    """Return log p − log q [..., k + 1] of the outcomes, without gradient; 0 where q is 0.

    logprobs, sampler: log p and log q at H [..., k].
    """
    p = outcomes(jax.lax.stop_gradient(logprobs), LEAST_REST)
    q = outcomes(sampler)
    return jnp.where(q > 0, jnp.log(p) - jnp.log(jnp.where(q > 0, q, 1.0)), 0.0)
