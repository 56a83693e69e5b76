"""How much of a draft is kept: SPEC-RL's ratio rule and its random-reuse ablation.

The rule looks at one draft token at a time; the first token it rejects ends the *verified prefix*.

Differs from the paper: the uniforms are fresh at every step (keyed by it). The published code
seeds them once, so that a token accepted in one epoch meets the same number in the next.
As published, nothing is resampled from the residual at the first rejection, so even at lenience
1 the emitted law is b = min(π_old, ℓ π) + d π with d = 1 - Σ min(π_old, ℓ π), not π.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array


def ratio(
    uniforms_BW: Array,
    logprobs_BW: Array,
    draft_logprobs_BW: Array,
    lens_B: Array,
    log_lenience: Array,
) -> Array:
    """Accept token i while u_i <= min(1, ℓ π(y_i) / π_old(y_i)) (arXiv 2509.23232, eq. 5).

    logprobs: float32 [B, W] nats of the draft tokens under the current (truncated) law;
    draft_logprobs: under the law they were sampled or last kept by. log_lenience: scalar; inf
    keeps the whole draft, -inf none of it. Returns accepted lengths int32 [B] <= lens.
    """
    log_ratio = log_lenience + logprobs_BW - draft_logprobs_BW
    accept = jnp.log(uniforms_BW) <= log_ratio
    # -inf + inf is nan: full reuse does not ask the policy, no reuse does not ask the draft.
    accept = jnp.where(jnp.isposinf(log_lenience), True, accept)
    accept = jnp.where(jnp.isneginf(log_lenience), False, accept)
    return leading(accept, lens_B)


def random(
    uniforms_BW: Array,
    logprobs_BW: Array,
    draft_logprobs_BW: Array,
    lens_B: Array,
    log_lenience: Array,
) -> Array:
    """Rejection position uniform over the draft (SPEC-RL's ablation "random reuse")."""
    del logprobs_BW, draft_logprobs_BW, log_lenience
    cut = jnp.floor(uniforms_BW[:, 0] * lens_B).astype(jnp.int32)
    return jnp.minimum(cut, jnp.maximum(lens_B - 1, 0))


def leading(accept_BW: Array, lens_B: Array) -> Array:
    """Number of leading True within each row's first `lens` entries, int32 [B]."""
    inside = jnp.arange(accept_BW.shape[1])[None, :] < lens_B[:, None]
    return jnp.sum(jnp.cumprod((accept_BW & inside).astype(jnp.int32), axis=1), axis=1)


RULES: dict[str, Callable[..., Array]] = {"ratio": ratio, "random": random}
