"""Preference pairs of a mini-batch: how far the policy prefers each, and what its rows weigh.

Online DPO (arXiv 2410.18252, section 3; DPO: arXiv 2305.18290, eq. 7) compares two responses y⁺, y⁻
to a prompt, whose log-probs are sums over whole responses. Its loss and gradient are

    −log σ(m),              m = β·(log π(y⁺) / π_ref(y⁺) − log π(y⁻) / π_ref(y⁻))
    −β·σ(−m)·(∇log π(y⁺) − ∇log π(y⁻))

so that with β·σ(−m) of a first pass, y⁺ and y⁻ need not be in one micro-batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.types import Batch


def weigh_pairs(
    batch: Batch, logprobs: Array, config: LossConfig
) -> tuple[Batch, dict[str, Array]]:
    """Return the batch with ±β·σ(−m) as advantages, and sums over its pairs.

    batch: whole groups, the rows of each contiguous; advantages are 1 on a group's y⁺, −1 on its
        y⁻ and 0 on others, see `advantages.best_and_worst`; `ref_logprobs` and `mask` are read.
    logprobs: float32 [n, R] nats, under the weights that are differentiated. Those of rows without
        an advantage may be anything finite.
    config: `group_size` (G) and `kl_coef` (β) are read.

    The sums are `pairs`, `pair_loss` (−log σ(m)) and `pair_accuracy` (pairs with m > 0).
    """
    signs = masked_mean(batch.advantages, batch.mask, axis=-1)
    log_ratios = jnp.sum(logprobs - batch.ref_logprobs, axis=-1, where=batch.mask)
    terms = jax.sharding.reshard(signs * log_ratios, jax.P(None))  # a group may lie on two devices
    margins = config.kl_coef * jnp.sum(terms.reshape(-1, config.group_size), axis=1)
    by_row = jnp.repeat(margins, config.group_size)
    by_row = jax.sharding.reshard(by_row, jax.P(jax.typeof(signs).sharding.spec[0]))
    weights = config.kl_coef * signs * jax.nn.sigmoid(-by_row)
    count = (signs > 0).astype(jnp.float32)
    sums = {
        "pairs": jnp.sum(count),
        "pair_loss": jnp.sum(count * jax.nn.softplus(-by_row)),
        "pair_accuracy": jnp.sum(count * (by_row > 0)),
    }
    advantages = jnp.where(batch.mask, weights[:, None], 0)
    return dataclasses.replace(batch, advantages=advantages), sums
