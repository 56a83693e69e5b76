"""Online DPO (arXiv 2410.18252, section 3; DPO: arXiv 2305.18290, eq. 7).

The best and the worst response to a prompt, y⁺ and y⁻, are a preference pair. Log-probs are sums
over whole responses. The loss and its gradient are

    −log σ(m),              m = β·(log π(y⁺) / π_ref(y⁺) − log π(y⁻) / π_ref(y⁻))
    −β·σ(−m)·(∇log π(y⁺) − ∇log π(y⁻))

so with β·σ(−m) from a first pass, y⁺ and y⁻ need not be in the same micro-batch.
"""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.advantages import by_group
from specrl_jax.algorithms.evidence import Advantage, AdvantageConfig
from specrl_jax.algorithms.losses import LossConfig, Objective
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.config.fields import Check, Values
from specrl_jax.types import Batch


def best_and_worst(rewards: Array, config: AdvantageConfig) -> Array:
    """Return 1 for the best response of a group, −1 for the worst, else 0, float32 [B].

    Of responses with equal rewards the first counts. All are 0 if all rewards are equal. Worked
    row, G = 4: rewards 0 1 1 0 give −1 1 0 0.

    rewards: float [B], not split; B = Q·G, the rows of a group are contiguous.
    """
    groups = rewards.reshape(-1, config.group_size)
    best = jax.nn.one_hot(jnp.argmax(groups, axis=1), config.group_size)
    worst = jax.nn.one_hot(jnp.argmin(groups, axis=1), config.group_size)
    return (best - worst).reshape(-1)


def weigh_pairs(
    batch: Batch, logprobs: Array, config: LossConfig
) -> tuple[Batch, dict[str, Array]]:
    """Return the batch with ±β·σ(−m) as advantages, and sums over its pairs.

    batch: whole groups, the rows of each contiguous; advantages are 1 on a group's y⁺, −1 on its
        y⁻ and 0 on others, see `best_and_worst`; `ref_logprobs` and `mask` are read.
    logprobs: float32 [n, R] nats, under the weights being differentiated. Those of rows without an
        advantage may be anything finite.
    config: `group_size` (G) and `kl_coef` (β) are read.

    The sums are `policy/pair_loss` (−log σ(m)) and `policy/pair_accuracy` (pairs with m > 0), each
    with the number of pairs.
    """
    signs = masked_mean(batch.advantages, batch.mask, axis=-1)
    log_ratios = jnp.sum(logprobs - batch.ref_logprobs, axis=-1, where=batch.mask)
    terms = jax.sharding.reshard(signs * log_ratios, jax.P(None))  # a group may span two devices
    margins = config.kl_coef * jnp.sum(terms.reshape(-1, config.group_size), axis=1)
    by_row = jnp.repeat(margins, config.group_size)
    by_row = jax.sharding.reshard(by_row, jax.P(jax.typeof(signs).sharding.spec[0]))
    weights = config.kl_coef * signs * jax.nn.sigmoid(-by_row)
    count = (signs > 0).astype(jnp.float32)
    totals = {
        "policy/pair_loss": jnp.sum(count * jax.nn.softplus(-by_row)),
        "policy/pair_accuracy": jnp.sum(count * (by_row > 0)),
    }
    pairs = jnp.sum(count)
    sums = {name: jnp.stack([total, pairs]) for name, total in totals.items()}
    advantages = jnp.where(batch.mask, weights[:, None], 0)
    return dataclasses.replace(batch, advantages=advantages), sums


def preference(
    log_ratio: Array, logprobs: Array, advantages: Array, config: LossConfig
) -> tuple[Array, Array]:
    """Return a loss per token with the gradient of the pairs' loss.

        loss = −w·log π(y),    w = ±β·σ(−m)

    Worked row, β = 0.1, m = 0: w = 0.05 on the better response, −0.05 on the worse one.

    Arguments as in `losses.clipped_surrogate`; advantages: w, from `weigh_pairs`. No token is
    clipped.
    """
    return -advantages * logprobs, jnp.zeros_like(logprobs, bool)


def rules(config: Values) -> Iterator[Check]:
    """Yield the rules of preference pairs."""
    algorithm = config.algorithm
    where = f"where algorithm.objective is {algorithm.objective}"
    yield "algorithm.kl_coef", f"> 0 {where} (it is β)", algorithm.kl_coef > 0
    rule = f"token or constant {where} (a response's log-prob is a sum)"
    yield "algorithm.aggregation", rule, config.meaning("algorithm.aggregation").sums_tokens
    rule = f"0 {where} (a pair has no ratio)"
    yield "algorithm.importance_cap", rule, not algorithm.importance_cap
    rule = f"0 {where} (a solution would replace a response of a pair)"
    yield "algorithm.solution_coef", rule, not config.get("algorithm.solution_coef")
    group_size = config.rollout.group_size
    rule = (
        f"a multiple of rollout.group_size = {group_size} {where} (a mini-batch has whole groups)"
    )
    yield "updates.mini_batch_size", rule, config.updates.mini_batch_size % group_size == 0
    screens = config.meaning("curriculum.name").by_parts
    rule = f"True {where}"
    reuses = config.get("curriculum.reuse_screening")
    yield "curriculum.reuse_screening", rule, reuses or not screens


METRICS = {
    "policy/pair_loss": ("-log σ of the margin of a preference pair, mean", "nats"),
    "policy/pair_accuracy": ("share of pairs whose better response is preferred", "1"),
}
ADVANTAGES = {"pair": Advantage(by_group(best_and_worst))}
OBJECTIVES = {
    "dpo": Objective(
        preference,
        prepare=weigh_pairs,
        by_token=False,
        whole_groups=True,
        advantage="pair",
        rules=rules,
    )
}
