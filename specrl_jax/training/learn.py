"""Second half of a step: rewards → advantages → updates."""

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract, hosts
from specrl_jax.algorithms import off_policy
from specrl_jax.algorithms.advantages import Evidence, choose_advantage, overlong_penalty
from specrl_jax.algorithms.corrections import OLD_LOGPROBS
from specrl_jax.algorithms.draft_training import count_tokens
from specrl_jax.algorithms.losses import OBJECTIVES
from specrl_jax.algorithms.row_selection import ROW_SELECTIONS, cut_to_budget, draw_pairs
from specrl_jax.algorithms.scoring import (
    PackedRows,
    RowTokens,
    critic_values,
    logprob_gap,
    logprobs,
    pack_rows,
)
from specrl_jax.algorithms.terms import Term
from specrl_jax.algorithms.update import join, make_batch, update
from specrl_jax.rollout.engine.all_rows import abstract_rollout
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.training.batch import TrainBatch
from specrl_jax.training.description import critic_only_steps
from specrl_jax.training.slots import trained_group_size
from specrl_jax.training.state import Run, RunState
from specrl_jax.training.update_metrics import (
    drop_skipped_updates,
    packing_metrics,
    update_metrics,
)
from specrl_jax.types import Batch, Prompts, Rollout, Source

# Sets the draws of rows apart from others of the same seed and step.
_SELECTION = 2


def update_policy(run: Run, state: RunState, collected: TrainBatch) -> dict[str, float]:
    """Make the updates of a step; change `state.policy_state` and `state.skipped_in_row`.

    Returns metrics.
    """
    _count_tokens(state, collected.rollout)
    keep_mask = run.config.algorithm.keep_sampling_mask
    batch = make_batch(collected.prompts, collected.rollout, keep_mask)
    batch, metrics = with_advantages(run, state, batch, collected)
    if run.config.algorithm.mask.truncated:
        batch = without_cut_rows(batch, collected.ended)
    if run.config.algorithm.importance_cap:
        # They undo the bias of the acceptance rule, and are capped in the loss.
        weights = off_policy.importance_weights(
            collected.rollout,
            np.float32(collected.rejected_mass),
            run.rollout_spec.accept,
        )
        batch = dataclasses.replace(batch, importance_weights=weights)
    metrics |= _update_by_mini_batches(run, state, batch, collected)
    if collected.stale:
        # Old log-probs of earlier policies: the difference is not one of arithmetic alone.
        metrics.pop("policy/rollout_train_logprob_gap", None)
    return metrics


def abstract_batch(
    config, spec: RolloutSpec, has_critic: bool, terms: tuple[Term, ...] = ()
) -> Batch:
    """Return the shapes of the batch that `update_policy` gives to `update`.

    terms: of the loss.
    """
    algorithm = config.algorithm
    group_size = trained_group_size(config)
    num_rows = config.rollout.prompts_per_step * group_size
    prompts = Prompts.blank(num_rows // spec.group_size, spec.prompt_slots)
    make = functools.partial(make_batch, prompts, keep_mask=algorithm.keep_sampling_mask)
    rollout = abstract_rollout(spec, num_rows)
    batch = abstract.result(make, rollout)
    column = batch.old_logprobs  # as all others of float32 [B, R]
    batch = dataclasses.replace(batch, values=column if has_critic else None)
    marks = abstract.array(np.bool_, (num_rows,), "batch")
    recomputed = OLD_LOGPROBS[config.updates.old_logprobs].recomputed
    return dataclasses.replace(
        batch,
        recomputed_logprobs=column if recomputed else None,
        returns=column if has_critic else None,
        ref_logprobs=column if algorithm.kl_coef else None,
        importance_weights=column if algorithm.importance_cap else None,
        is_solution=marks if algorithm.solution_coef else None,
        extra=functools.reduce(
            operator.or_, (x.abstract_columns(config, spec, batch, rollout) for x in terms), {}
        ),
    )


def _count_tokens(state: RunState, rollout: Rollout) -> None:
    """Count the tokens that the policy drew, for a draft head that drafts the most frequent."""
    head = state.policy_state.draft_head
    if head is None or head.counts is None:
        return
    lens, sources = hosts.fetch((rollout.lens, rollout.tokens.sources))
    own = (np.arange(sources.shape[1]) < lens[:, None]) & (sources != Source.FORCED)
    counts = count_tokens(head.counts, rollout.tokens.ids, put(own, "batch", None))
    head = dataclasses.replace(head, counts=counts)
    state.policy_state = dataclasses.replace(state.policy_state, draft_head=head)


def price_of_length(config, rollout: Rollout) -> np.ndarray | None:
    """Return what each response's length costs, float32 [B]; None where it is free."""
    settings = config.reward
    if not settings.overlong_tokens:
        return None
    lens, sources = hosts.fetch((rollout.lens, rollout.tokens.sources))
    lens = lens - np.sum(sources == Source.FORCED, axis=1)  # the policy's own tokens
    longest = config.rollout.response_len
    return settings.overlong_penalty * overlong_penalty(lens, longest, settings.overlong_tokens)


def gather_evidence(run: Run, batch: Batch, collected: TrainBatch) -> Evidence:
    """Return what the advantages of a batch are estimated from."""
    rewards = collected.rewards
    price = price_of_length(run.config, collected.rollout)
    if price is not None:
        rewards = (rewards - price).astype(np.float32)
    return Evidence(
        rewards=put(rewards, "batch"),
        batch=batch,
        price=price,
        by_function=collected.by_function,
        turns=collected.turns,
    )


def with_advantages(
    run: Run, state: RunState, batch: Batch, collected: TrainBatch
) -> tuple[Batch, dict[str, float]]:
    """Return the batch with advantages; with a critic also with its values and returns."""
    if run.update_spec.critic:
        packed = _pack_all(run, batch)
        base_params = state.base_params(run.model)
        values = critic_values(run.update_spec, state.policy_state, packed, base_params)
        batch = dataclasses.replace(batch, values=values)
    advantage = choose_advantage(run.config)
    evidence = gather_evidence(run, batch, collected)
    settings = advantage.settings(run.config, run.trained_group_size)
    estimate = advantage.estimate(evidence, settings)
    batch = dataclasses.replace(batch, advantages=estimate.advantages, returns=estimate.returns)
    metrics = {name: float(x) for name, x in hosts.fetch(estimate.metrics).items()}
    if evidence.price is not None:
        metrics["reward/overlong"] = float(np.mean(evidence.price))
    # A filter of groups, and a critic's part in the advantages, leave the share to the rewards.
    if not (run.config.algorithm.dynamic_sampling or run.update_spec.critic):
        signal = hosts.fetch(_has_signal(batch.advantages, batch.mask))
        by_group = signal.reshape(-1, run.trained_group_size).any(axis=1)
        metrics["reward/no_signal"] = float(np.mean(~by_group))
    return batch, {name: x for name, x in metrics.items() if not math.isnan(x)}


def without_cut_rows(batch: Batch, ended: np.ndarray) -> Batch:
    """Return the batch without the rows that the length cut, as rows of no tokens.

    They count in no mean of a loss. ended: bool [B].
    """
    kept = put(ended, "batch")
    return dataclasses.replace(
        batch,
        response_lens=jnp.where(kept, batch.response_lens, 0),
        advantages=jnp.where(kept[:, None], batch.advantages, 0),
    )


def _update_by_mini_batches(
    run: Run, state: RunState, batch: Batch, collected: TrainBatch
) -> dict[str, float]:
    """Make the optimizer updates of a step, mini-batch by mini-batch; return their metrics."""
    settings = run.config.updates
    batch, row_ids, metrics = select_rows(run, state, batch)
    batch, more = with_reference_and_old_logprobs(run, state, batch)
    metrics |= more
    batch = with_columns_of_terms(run, state, batch, collected)
    if run.config.algorithm.solution_coef:
        batch, more = with_solutions(run, batch, collected)
        metrics |= more
    critic_only = state.step <= critic_only_steps(run.config)
    history = []
    mini_batches = []

    def make_update(packed: PackedRows) -> None:
        state.policy_state, scalars = update(
            run.update_spec,
            state.policy_state,
            batch,
            packed,
            state.base_params(run.model),
            run.frozen and run.frozen.params,
            critic_only=critic_only,
        )
        history.append(scalars)

    # The next mini-batch is packed while the device works.
    for packed in pack_mini_batches(run, batch, row_ids):
        mini_batches.append(packed)
        make_update(packed)
    for packed in mini_batches * (settings.passes - 1):
        make_update(packed)
    history = drop_skipped_updates(run, state, hosts.fetch(history))
    metrics = update_metrics(run, history) | metrics
    metrics |= packing_metrics(mini_batches, batch, settings.passes)
    if settings.skip_nonfinite:
        metrics["update/skipped"] = len(mini_batches) * settings.passes - len(history)
    updates = state.updates
    last = 0.0 if critic_only else float(run.schedule(max(updates - 1, 0)))
    state.rates = (last, float(run.schedule(updates)))
    metrics["update/lr"] = last
    return {name: float(value) for name, value in metrics.items()}


def select_rows(
    run: Run, state: RunState, batch: Batch
) -> tuple[Batch, np.ndarray, dict[str, float]]:
    """Return the batch, the row ids that the updates take in order, and metrics.

    The ids are int [B] and may repeat. `updates.token_budget` cuts rows of the batch short: a row
    that it leaves out has the length 0.
    """
    updates = run.config.updates
    rng = np.random.default_rng([run.config.seed, _SELECTION, state.step])
    row_ids = np.arange(len(batch.tokens))
    if keep := ROW_SELECTIONS[updates.select]:
        # All tokens of a response have the same advantage, and the first is the policy's.
        advantages = hosts.fetch(batch.advantages)[:, 0]
        row_ids = draw_pairs(keep, advantages, run.trained_group_size, rng)
        taken = len(np.unique(row_ids)) / len(row_ids)
        return batch, row_ids, {"update/selected_fraction": taken}
    budget = updates.token_budget
    if not budget:
        return batch, row_ids, {}
    response_lens, mask = hosts.fetch((batch.response_lens, batch.mask))
    lens = np.zeros_like(response_lens)
    tokens = []
    for part in _mini_batches(run, row_ids):
        lens[part] = cut_to_budget(response_lens[part], mask[part], budget, rng)
        tokens.append(min(np.sum(mask[part]), budget))
    batch = dataclasses.replace(batch, response_lens=put(lens, "batch"))
    metrics = {
        "update/selected_fraction": np.mean(lens > 0),
        "update/budget_filled": np.mean(tokens) / budget,
    }
    return batch, row_ids, metrics


def with_reference_and_old_logprobs(
    run: Run, state: RunState, batch: Batch
) -> tuple[Batch, dict[str, float]]:
    """Return the batch with the reference's log-probs, and recomputed old ones, if asked for."""
    metrics = {}
    recompute = OLD_LOGPROBS[run.config.updates.old_logprobs].recomputed
    penalized = run.config.algorithm.kl_coef > 0
    if not recompute and not penalized:
        return batch, metrics
    packed = _pack_all(run, batch)
    if recompute:
        old = logprobs(run.update_spec, state.policy(run.model), packed, batch.support)
        metrics["policy/rollout_train_logprob_gap"] = logprob_gap(batch, old)
        batch = dataclasses.replace(batch, recomputed_logprobs=old)
    if penalized:
        policy = state.reference.policy(run.model)
        reference = logprobs(run.update_spec, policy, packed, batch.support)
        batch = dataclasses.replace(batch, ref_logprobs=reference)
    return batch, metrics


def with_columns_of_terms(run: Run, state: RunState, batch: Batch, collected: TrainBatch) -> Batch:
    """Return the batch with the columns that terms of the loss read."""
    for term in run.update_spec.loss.terms:
        own = term.columns(run, state, batch, collected)
        batch = dataclasses.replace(batch, extra=batch.extra | own)
    return batch


def with_solutions(run: Run, batch: Batch, collected: TrainBatch) -> tuple[Batch, dict[str, float]]:
    """Replace the last response of each unsolved group by its problem's solution, if it has one.

    A group is unsolved where none of its responses has the reward of a right one, 1. Only the
    update sees solutions. SuperRL (arXiv 2506.01096, section 3).
    """
    group_size = run.trained_group_size
    tokens = np.zeros(batch.old_logprobs.shape, np.int32)
    lens = np.zeros(len(tokens), np.int32)
    unsolved = collected.rewards.reshape(-1, group_size).max(axis=1) < 1
    for group in np.flatnonzero(unsolved):
        solution = run.solutions.get(collected.prompts.examples[group].prompt_id, ())
        row = (group + 1) * group_size - 1
        tokens[row, : len(solution)] = solution
        lens[row] = len(solution)
    batch = _put_solutions(batch, put(tokens, "batch", None), put(lens, "batch"))
    return batch, {"update/solutions": np.count_nonzero(lens) / len(unsolved)}


@jax.jit
def _put_solutions(batch: Batch, tokens_BR: Array, lens: Array) -> Batch:
    """Put the solutions `tokens_BR` in the batch where their length is not 0."""
    is_solution = lens > 0
    slots = batch.tokens.shape[1] - tokens_BR.shape[1]
    tokens = join(batch.tokens[:, :slots], batch.prompt_lens, tokens_BR)
    return dataclasses.replace(
        batch,
        tokens=jnp.where(is_solution[:, None], tokens, batch.tokens),
        response_lens=jnp.where(is_solution, lens, batch.response_lens),
        advantages=jnp.where(is_solution[:, None], 0, batch.advantages),
        is_solution=is_solution,
    )


def _mini_batches(run: Run, row_ids: np.ndarray) -> list[np.ndarray]:
    return np.split(row_ids, len(row_ids) // run.config.updates.mini_batch_size)


def pack_mini_batches(run: Run, batch: Batch, row_ids: np.ndarray) -> Iterator[PackedRows]:
    """Yield the mini-batches of `row_ids` in order, without rows that teach nothing."""
    row_tokens = RowTokens.fetch(batch)
    algorithm = run.config.algorithm
    included = row_tokens.response_lens > 0
    # A KL, an entropy bonus or a critic gives a gradient to rows without an advantage.
    penalized = algorithm.kl_coef and OBJECTIVES[algorithm.objective].by_token
    by_term = any(term.teaches_all_rows for term in run.update_spec.loss.terms)
    all_rows_teach = penalized or algorithm.entropy_coef or run.update_spec.critic or by_term
    if run.config.updates.skip_no_signal and not all_rows_teach:
        included = hosts.fetch(_has_signal(batch.advantages, batch.mask))
        if batch.is_solution is not None:
            included = included | hosts.fetch(batch.is_solution)
    for part in _mini_batches(run, row_ids):
        yield pack_rows(run.update_spec, row_tokens, part, included[part])


@jax.jit
def _has_signal(advantages: Array, mask: Array) -> Array:
    """bool [B], rows with an advantage that is not exactly 0."""
    return jnp.any((advantages != 0) & mask, axis=1)


def _pack_all(run: Run, batch: Batch) -> PackedRows:
    row_tokens = RowTokens.fetch(batch)
    row_ids = np.arange(len(row_tokens.tokens))
    return pack_rows(run.update_spec, row_tokens, row_ids, row_tokens.response_lens > 0)
