"""Shapes of a run's arrays on the mesh in use; nothing is allocated."""

import dataclasses
import functools
from typing import Any

import jax

from specrl_jax import abstract
from specrl_jax.algorithms.update_spec import (
    PolicyState,
    UpdateSpec,
    init_policy_state,
)
from specrl_jax.models import lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import copy_draft_head
from specrl_jax.models.transformer import (
    Params,
    abstract_params,
    abstract_trained,
    param_count,
    rollout_weights,
)
from specrl_jax.rollout.drafts.sources import abstract_state
from specrl_jax.rollout.drafts.store import Stored, pick_drafts, pick_inputs
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import move
from specrl_jax.training.build import store_shape
from specrl_jax.training.choices import batch_source_of, collector_of
from specrl_jax.training.collect import Collector
from specrl_jax.training.learn import abstract_batch
from specrl_jax.training.run import Run
from specrl_jax.types import Batch, Drafts, Prompts


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """Shapes of a run on the mesh in use: its state, drafts, rollouts and batches."""

    config: Any
    model: ModelConfig
    spec: RolloutSpec
    eval_spec: RolloutSpec
    update_spec: UpdateSpec
    num_prompts: int  # to train on
    key: Any  # of the run, or its shape
    rollout_mesh: jax.sharding.Mesh
    apart: bool = False  # whether the mesh in use is for rollouts only
    frozen_model: ModelConfig | None = None  # of frozen weights, besides the policy's

    @classmethod
    def of(cls, run: Run) -> "AbstractRun":
        return cls(
            config=run.config,
            model=run.model,
            spec=run.rollout_spec,
            eval_spec=run.eval_spec,
            update_spec=run.update_spec,
            num_prompts=len(run.prompts.lens),
            key=run.key,
            rollout_mesh=run.rollout_mesh,
            frozen_model=run.frozen and run.frozen.model,
        )

    def describe(self) -> str:
        """Describe the run in a line."""
        count = f"{param_count(self.model) / 1e6:,.1f}M parameters, {self.model.dtype}"
        rows = f"{self.rows:,} rows per step, {self.training.buckets.sizes[0]:,} at a time"
        return f"{count}; {rows}; drafts of {self.num_prompts:,} prompts"

    @property
    def collector(self) -> type[Collector]:
        return collector_of(self.config)

    @property
    def rows(self) -> int:
        """Rows of a rollout, without background rows."""
        return self.collector.rows_per_rollout(self.config)[0]

    @property
    def total_rows(self) -> int:
        """Rows of a rollout, including background rows."""
        return sum(self.collector.rows_per_rollout(self.config))

    @functools.cached_property
    def state(self) -> PolicyState:
        init = functools.partial(init_policy_state, self.update_spec)
        return abstract.result(
            init, abstract.placed(abstract_trained(self.model)), self.base_params
        )

    @functools.cached_property
    def base_params(self) -> Params | None:
        """Weights that adapters modify."""
        if self.model.lora is None:
            return None
        params = abstract.placed(abstract_params(self.model))
        return abstract.result(functools.partial(lora.freeze, self.model), params)

    @functools.cached_property
    def policy(self) -> Params:
        return lora.adapted(self.model, self.state.policy.params, self.base_params)

    @functools.cached_property
    def reference_policy(self) -> Params | None:
        """Weights of the policy that the KL penalty is measured against."""
        if not self.config.algorithm.kl_coef:
            return None
        warm = self.config.sft.steps and self.config.model.source  # by adapters
        return self.policy if self.base_params is None or warm else self.base_params

    @functools.cached_property
    def frozen(self) -> Params | None:
        """Frozen weights, besides the policy's."""
        if self.frozen_model is None:
            return None
        params = abstract.placed(abstract_params(self.frozen_model))
        return abstract.result(functools.partial(lora.freeze, self.frozen_model), params)

    @functools.cached_property
    def weights(self) -> Params:
        return abstract.result(functools.partial(rollout_weights, self.model), self.policy)

    @functools.cached_property
    def draft_head(self) -> Params | None:
        """Draft head's weights in a rollout."""
        head = self.state.draft_head
        if head is None:
            return None
        vocab = self.update_spec.draft_head.vocab
        copy = functools.partial(copy_draft_head, self.model, vocab=vocab)
        return abstract.result(copy, head.params, self.policy, head.counts)

    @functools.cached_property
    def stored(self) -> Stored:
        return abstract.result(store_shape(self.config, self.spec, self.num_prompts).empty)

    @property
    def prompts_per_rollout(self) -> int:
        return self.total_rows // self.spec.group_size

    @property
    def kept(self) -> tuple:
        """Arrays that the run keeps the whole time: its state, a reference, the draft store.

        On a mesh for rollouts only: the store, and the weights of waiting or running rollouts.
        """
        if self.apart:
            return self.stored, self.kept_weights
        return self.state, self.base_params or self.reference_policy, self.frozen, self.stored

    # The rollouts

    def of_rollouts(self) -> "AbstractRun":
        """Return the run whose properties must be read with the mesh of rollouts in use."""
        if self.rollout_mesh == jax.sharding.get_mesh():
            return self
        return dataclasses.replace(self, apart=True, key=move(self.key, self.rollout_mesh))

    @property
    def kept_weights(self) -> tuple:
        """Weights on a mesh for rollouts only: the layers in use, and all of waiting rollouts."""
        if not self.apart:
            return ()
        waiting = [self.training.weights] * batch_source_of(self.config).most_ahead(self.config)
        return self.weights["stacked"], waiting

    @functools.cached_property
    def drafts(self) -> Drafts | None:
        if not self.collector.has_drafts(self.config):
            return None
        inputs = pick_inputs(self.stored, self.prompts_per_rollout)
        return abstract.result(functools.partial(pick_drafts, age=1), *inputs)

    @functools.cached_property
    def draft_state(self) -> Any:
        """State of the draft source for a rollout's prompts."""
        source = self.spec.draft_source
        if source is None:
            return None
        prompts = Prompts.blank(self.prompts_per_rollout, self.spec.prompt_slots)
        generations = self.collector.generations(self.spec.draft_history)
        samples = self.config.rollout.group_size
        shape = (len(prompts.lens), generations, samples, self.spec.response_slots)
        return abstract_state(source, prompts, shape, self.spec.group_size)

    @functools.cached_property
    def training(self) -> RolloutShapes:
        rows = self.total_rows
        weights = self.weights
        if self.draft_head is not None:
            weights = weights | {"draft_head": self.draft_head}
        return RolloutShapes(self.spec, weights, rows, self.rows, self.drafts, self.draft_state)

    @functools.cached_property
    def evaluation(self) -> RolloutShapes:
        rows = self.config.evaluate.batch_size * self.eval_spec.group_size
        return RolloutShapes(self.eval_spec, self.weights, rows, rows, None)

    # The update

    @functools.cached_property
    def batch(self) -> Batch:
        return abstract_batch(self.config, self.spec)
