"""What keeping draft tokens by SPEC-RL's ratio rule does to the law of the responses.

At one position, with the draft from π_old and r = π / π_old, the rule emits

    b(y) = min(π_old(y), ℓ·π(y)) + d·π(y),    d = 1 − Σ min(π_old, ℓ·π)

kept tokens by the first term, tokens drawn after a rejection by the second: pulled towards π_old
for every ℓ (ℓ = 1 included, since what is drawn is not the residual). Here is what of that can be
measured, a weight that undoes it, and a controller that bounds it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.types import Rollout, Source

# Metric of `measure` that each choice of config.rollout.lenience_measure holds.
MEASURES = {"share": "reuse/lenient_fraction", "kl": "reuse/kl"}


def kept(rollout: Rollout) -> Array:
    """bool [B, R], tokens kept from earlier responses."""
    inside = jnp.arange(rollout.tokens.shape[1])[None, :] < rollout.lens[:, None]
    return inside & (rollout.sources == Source.REUSED)


def measure(rollout: Rollout, log_lenience: float, rejected_mass: float) -> dict[str, float]:
    """The `reuse/*` metrics of a rollout; nothing where no token was kept.

    rejected_mass: as `estimate_rejected_mass` gives it.
    """
    count = int(jnp.sum(rollout.prefix_lens))
    if not count:
        return {}
    values = jax.device_get(_measure(rollout, jnp.float32(log_lenience), jnp.int32(count)))
    return {name: float(x) for name, x in values.items()} | {"reuse/rejected_mass": rejected_mass}


@jax.jit
def _measure(rollout: Rollout, log_lenience: Array, count: Array) -> dict[str, Array]:
    mask = kept(rollout)
    log_ratio = jnp.where(mask, rollout.sampling_logprobs - rollout.draft_logprobs, 0.0)
    # Of a token that was kept, the chance that without lenience it would not have been:
    # 1 − min(1, r) / min(1, ℓ·r).
    lenient = jnp.where(log_lenience > 0, log_lenience, 0.0)
    share = -jnp.expm1(jnp.minimum(log_ratio, 0) - jnp.minimum(log_ratio + lenient, 0))
    # Over y ~ π_old the mean of r − 1 − log r is KL(π_old ‖ π). Kept tokens have the law
    # min(π_old, ℓπ) instead: of the tokens that moved far, ℓ decides how many are kept.
    divergence = jnp.expm1(log_ratio) - log_ratio
    whole = jax.sharding.reshard(jnp.where(mask, log_ratio, jnp.nan), jax.P(None, None))
    low, middle, high = jnp.nanquantile(whole, jnp.array([0.05, 0.5, 0.95]))

    def mean(values: Array) -> Array:
        return jnp.sum(jnp.where(mask, values, 0)) / count

    return {
        "reuse/log_ratio_mean": mean(log_ratio),
        "reuse/log_ratio_p05": low,
        "reuse/log_ratio_p50": middle,
        "reuse/log_ratio_p95": high,
        "reuse/lenient_fraction": mean(share),
        "reuse/kl": mean(divergence),
    }


def estimate_rejected_mass(prefix_lens: np.ndarray, offered: np.ndarray) -> float:
    """d, the mean chance of a rejection at a judged position: rejections over judged positions.

    prefix_lens, offered: int [B], tokens kept and offered.
    """
    rejected = int(np.sum(prefix_lens < offered))
    return rejected / max(int(np.sum(prefix_lens)) + rejected, 1)


@functools.partial(jax.jit, static_argnames="rule")
def importance_weights(
    rollout: Rollout, log_lenience: Array, rejected_mass: Array, rule: str
) -> Array:
    """float32 [B, R] >= 0, which turn means over emitted tokens into means under π.

        kept by ratio     (1 − d)·max(r, 1/ℓ)
        kept at random    r
        all others        1

    With these, for any f: Σ min(π_old, ℓπ)·(1 − d)·π/min(π_old, ℓπ)·f + d·Σ π·f = Σ π·f. Unlike
    π/b they need π_old at the kept token alone. Exact, position by position, for the position's own
    d and for a draft whose law was π_old; estimated in two ways: d is the rollout's mean, and a
    token that was kept before is taken as drawn from the policy that kept it last. Rows that
    earlier steps judged have this step's d. Tokens of the exact rules have weight 1.

    rule: the acceptance rule in force. log_lenience: nats, in [-inf, inf].
    """
    log_ratio = rollout.sampling_logprobs - rollout.draft_logprobs
    if rule == "ratio":
        weights = (1 - rejected_mass) * jnp.exp(jnp.maximum(log_ratio, -log_lenience))
    elif rule == "random":
        weights = jnp.exp(log_ratio)
    else:
        return jnp.ones_like(log_ratio)
    return jnp.where(kept(rollout), weights, 1.0)


def next_log_lenience(
    log_lenience: float, found: float, *, target: float, gain: float, low: float, high: float
) -> float:
    """log ℓ of the next step: raised where `found` is below its target, lowered where above.

        log ℓ ← clip(log ℓ + gain·clip(1 − found / target, −1, 1), log low, log high)

    gain: nats that one step changes at most. low, high: bounds of ℓ.
    """
    error = min(max(1 - found / target, -1.0), 1.0)
    return min(max(log_lenience + gain * error, math.log(low)), math.log(high))
