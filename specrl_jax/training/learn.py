"""Second half of a step: rewards → advantages → updates."""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from specrl_jax import abstract, hosts
from specrl_jax.algorithms.draft_training import count_tokens
from specrl_jax.algorithms.losses import OBJECTIVES
from specrl_jax.algorithms.scoring import PackedRows, RowTokens, pack_rows
from specrl_jax.algorithms.update import make_batch, update
from specrl_jax.rollout.engine.all_rows import abstract_rollout
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.training.choices import stages_of, trained_group_size
from specrl_jax.training.collected import Collected
from specrl_jax.training.description import critic_only_steps
from specrl_jax.training.run import Run
from specrl_jax.training.stage import StageResult
from specrl_jax.training.stages import has_signal, mini_batches
from specrl_jax.training.state import RunState
from specrl_jax.training.update_metrics import (
    drop_skipped_updates,
    packing_metrics,
    update_metrics,
)
from specrl_jax.types import Batch, Prompts, Rollout, Source


def update_policy(run: Run, state: RunState, collected: Collected) -> dict[str, float]:
    """Run the updates of a step; changes `state.policy_state` and `state.skipped_in_row`.

    Returns metrics.
    """
    _count_tokens(state, collected.rollout)
    batch = make_batch(collected.prompts, collected.rollout)
    batch, row_ids, metrics = pass_stages(run, state, batch, collected)
    made = _update_by_mini_batches(run, state, batch, row_ids, stale=collected.stale)
    return {name: float(value) for name, value in (made | metrics).items()}


def pass_stages(run: Run, state: RunState, batch: Batch, collected: Collected) -> StageResult:
    """Return the batch after all stages, with the rows of its updates and all metrics.

    Raises a one-line ValueError if two stages order the rows, or one changes their number.
    """
    metrics = {}
    ordered = None
    row_ids = np.arange(len(batch.tokens))
    for stage in run.stages:
        result = stage(run, state, batch, collected)
        batch = result.batch
        metrics |= result.metrics
        if result.row_ids is None:
            continue
        if ordered is not None or len(result.row_ids) != len(row_ids):
            by = " and ".join(type(x).__name__ for x in (ordered, stage) if x)
            raise ValueError(
                f"row_ids must be {len(row_ids)} ids of one stage, got {len(result.row_ids)} of "
                f"{by}; set response_lens to 0 to leave a row out"
            )
        ordered = stage
        row_ids = result.row_ids
    return StageResult(batch, row_ids, metrics)


def abstract_batch(config, spec: RolloutSpec) -> Batch:
    """Return the shapes of the batch that `update_policy` passes to `update`."""
    num_rows = config.rollout.prompts_per_step * trained_group_size(config)
    prompts = Prompts.blank(num_rows // spec.group_size, spec.prompt_slots)
    rollout = abstract_rollout(spec, num_rows)
    batch = abstract.result(functools.partial(make_batch, prompts), rollout)
    for stage in stages_of(config):
        batch = stage.shapes(config, rollout, batch)
    return batch


def _count_tokens(state: RunState, rollout: Rollout) -> None:
    """Count the tokens that the policy sampled, for a draft head limited to the most frequent."""
    head = state.policy_state.draft_head
    if head is None or head.counts is None:
        return
    lens, sources = hosts.fetch((rollout.lens, rollout.tokens.sources))
    own = (np.arange(sources.shape[1]) < lens[:, None]) & (sources != Source.ENVIRONMENT)
    counts = count_tokens(head.counts, rollout.tokens.ids, put(own, "batch", None))
    head = dataclasses.replace(head, counts=counts)
    state.policy_state = state.policy_state.replace(draft_head=head)


def _update_by_mini_batches(
    run: Run, state: RunState, batch: Batch, row_ids: np.ndarray, *, stale: bool
) -> dict[str, float]:
    """Run a step's optimizer updates, mini-batch by mini-batch; return their metrics.

    stale: as in `Collected`.
    """
    settings = run.config.updates
    critic_only = state.step <= critic_only_steps(run.config)
    scalars_of_updates = []
    packed_batches = []

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
        scalars_of_updates.append(scalars)

    # The next mini-batch is packed while the device is busy.
    for packed in pack_mini_batches(run, batch, row_ids):
        packed_batches.append(packed)
        make_update(packed)
    for packed in packed_batches * (settings.passes - 1):
        make_update(packed)
    made = drop_skipped_updates(run, state, hosts.fetch(scalars_of_updates))
    metrics = update_metrics(run, made, stale=stale)
    metrics |= packing_metrics(packed_batches, batch, settings.passes)
    if settings.skip_nonfinite:
        metrics["update/skipped"] = len(packed_batches) * settings.passes - len(made)
    updates = state.updates
    last = 0.0 if critic_only else float(run.schedule(max(updates - 1, 0)))
    state.rates = (last, float(run.schedule(updates)))
    metrics["update/lr"] = last
    return metrics


def pack_mini_batches(run: Run, batch: Batch, row_ids: np.ndarray) -> Iterator[PackedRows]:
    """Yield the mini-batches of `row_ids` in order, without rows that have no gradient."""
    row_tokens = RowTokens.fetch(batch)
    algorithm = run.config.algorithm
    included = row_tokens.response_lens > 0
    # A KL, an entropy bonus or a critic gives a gradient even to rows without an advantage.
    penalized = algorithm.kl_coef and OBJECTIVES[algorithm.objective].by_token
    by_term = any(not term.needs_advantage for term in run.update_spec.loss.terms)
    all_rows_teach = penalized or algorithm.entropy_coef or run.update_spec.critic or by_term
    if run.config.updates.skip_no_signal and not all_rows_teach:
        included = has_signal(batch)
        if batch.supervised is not None:
            included = included | (hosts.fetch(batch.supervised) > 0)
    for part in mini_batches(run, row_ids):
        yield pack_rows(run.update_spec, row_tokens, part, included[part])
