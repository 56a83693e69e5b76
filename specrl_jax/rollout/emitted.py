"""Distribution of the tokens that a rule emits at draft positions, from each policy's k likeliest.

The outcomes at a position are k tokens, then all others: arrays [..., k + 1].
"""

import jax.numpy as jnp
from jax import Array

LEAST_REST = 1e-6  # least probability of all other tokens when it is a divisor


def outcomes(logprobs: Array, least: float = 0.0) -> Array:
    """Return the probabilities [..., k + 1] of k tokens and of all others.

    logprobs: [..., k]; -inf if there are fewer tokens. least: lower bound for the others.
    """
    probs = jnp.exp(logprobs)
    rest = jnp.maximum(1.0 - jnp.sum(probs, axis=-1, keepdims=True), least)
    return jnp.concatenate([probs, rest], axis=-1)


def logprobs_of_ids(ids: Array, logprobs: Array, wanted: Array, law: Array) -> Array:
    """Return log-probs [..., k] of the tokens `wanted`, given those of other tokens.

    An unknown token gets a share of the remaining mass, in proportion to another distribution.

    ids, logprobs: [..., j], tokens and their log-probs. wanted: int32 [..., k]; -1 for none. law:
    [..., k], log-probs of the other distribution at `wanted`.
    """
    same = (wanted[..., :, None] == ids[..., None, :]) & (wanted >= 0)[..., :, None]
    known = jnp.any(same, axis=-1)
    found = jnp.max(jnp.where(same, logprobs[..., None, :], -jnp.inf), axis=-1)
    rest = jnp.maximum(1.0 - jnp.sum(jnp.exp(logprobs), axis=-1, keepdims=True), 0.0)
    law_known = jnp.sum(jnp.where(known, jnp.exp(law), 0.0), axis=-1, keepdims=True)
    law_rest = jnp.maximum(1.0 - law_known, LEAST_REST)
    shared = jnp.where(wanted >= 0, law + jnp.log(rest / law_rest), -jnp.inf)
    return jnp.where(known, found, shared)
