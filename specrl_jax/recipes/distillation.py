"""On-policy distillation: a teacher scores the student's own tokens (arXiv 2306.13649).

The loss of a context is KL(π ‖ π_T), from the student to the teacher at the rollout's temperature.
Contexts count as they were sampled: what a token does to later tokens has no gradient.

    full     Σ_v π(v)·(log π(v) − log π_T(v)), over the whole vocabulary
    score    r·d with the gradient r·d·∇log π(y), d = log π(y) − log π_T(y),  r = π(y) / π_old(y)

The mean of the second over y ~ π_old is the first, and so is the mean of its gradient.

Worked example: π = (0.5, 0.5) and π_T = (0.8, 0.2) have d = (−0.470, 0.916) and KL 0.223. The
gradient by the first logit is −0.347 in both: 0.5·(−0.470 − 0.223).
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.losses import kl_penalty


def full_kl(logits: Array, teacher_logits: Array) -> Array:
    """Return KL(π ‖ π_T) in nats [...] of softmax(logits) [..., V]; carries the gradient.

    A token that the student cannot sample, of logit -inf, counts with 0.
    """
    logprobs = jax.nn.log_softmax(logits)
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits))
    possible = logits > -jnp.inf
    gap = jnp.where(possible, logprobs, 0.0) - jnp.where(possible, teacher, 0.0)
    return jnp.sum(jnp.exp(logprobs) * gap, axis=-1)


def score_kl(logprobs: Array, teacher_logprobs: Array, log_ratio: Array) -> Array:
    """Return r·d [...] of sampled tokens, with the gradient r·d·∇log π(y).

    logprobs, teacher_logprobs: log π(y) and log π_T(y). log_ratio: log r.
    """
    return kl_penalty("k1+", teacher_logprobs - logprobs, log_ratio)
