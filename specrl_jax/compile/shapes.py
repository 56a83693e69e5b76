"""Shapes of a run's arrays, from its configuration and the mesh in use; nothing is allocated."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specrl_jax.algorithms.advantages import AdvantageConfig, choose_advantage
from specrl_jax.algorithms.corrections import OLD_LOGPROBS
from specrl_jax.algorithms.scoring import PackedRows, RowTokens, critic_values, pack_rows
from specrl_jax.algorithms.update import make_batch
from specrl_jax.algorithms.update_spec import (
    PolicyState,
    UpdateSpec,
    init_policy_state,
    make_update_spec,
)
from specrl_jax.data.curriculum import count_steps
from specrl_jax.data.tokenizer import OF_ALPHABET, load_tokenizer
from specrl_jax.models import lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import copy_draft_head
from specrl_jax.models.kv_cache import KVCache, init_cache
from specrl_jax.models.load import load_shape
from specrl_jax.models.transformer import (
    Params,
    abstract_params,
    abstract_trained,
    param_count,
    rollout_weights,
)
from specrl_jax.rollout.drafts.store import Stored, pick_drafts
from specrl_jax.rollout.engine.all_rows import RowStarts, read_rollout, start_rows
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.extend import PackedTexts, pack_texts
from specrl_jax.rollout.engine.feed import Fed, pack_fed
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import Rows, gather
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.sharding import axes, eval_shape, move
from specrl_jax.training.build import policy_schedule, store_shape, training_spec
from specrl_jax.training.collect import WholeRollout
from specrl_jax.training.slots import collector_of, source_of, trained_group_size
from specrl_jax.training.state import Run
from specrl_jax.types import Batch, Drafts, Prompts, Rollout


def abstract(function: Callable, *args) -> Any:
    """Return shapes, dtypes and layouts of the result of `function(*args)` on the mesh in use."""
    return placed(eval_shape(function, *args))


def placed(tree: Any) -> Any:
    """Return shapes with layouts on the mesh in use: whole on every device where they have none."""
    mesh = jax.sharding.get_mesh()

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dims = jax.P(*(None,) * len(x.shape)) if x.sharding is None else x.sharding.spec
        layout = jax.sharding.NamedSharding(mesh, dims)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout, weak_type=x.weak_type)

    return jax.tree.map(place, tree)


def array(dtype: Any, shape: tuple[int, ...], *dims: str | None) -> jax.ShapeDtypeStruct:
    layout = jax.sharding.NamedSharding(jax.sharding.get_mesh(), axes(*dims))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def on_host(tree: Any) -> Any:
    """Return shapes without layouts, as those of NumPy's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def made_up_prompts(spec: RolloutSpec, rows: int) -> Prompts:
    """Return prompts of zeros for so many rows of a rollout."""
    count = rows // spec.group_size
    return Prompts(
        tokens=np.zeros((count, spec.prompt_slots), np.int32),
        lens=np.full(count, spec.prompt_slots, np.int32),
        ids=np.zeros((count, 2), np.uint32),
        examples=(),
    )


@dataclasses.dataclass(frozen=True)
class RolloutShapes:
    """Shapes of a rollout of `rows` rows, of which `trained` are to train on."""

    spec: RolloutSpec
    weights: Params
    rows: int
    trained: int
    drafts: Drafts | None  # None: it verifies none
    draft_state: Any = None  # of the draft source

    @functools.cached_property
    def buckets(self) -> Buckets:
        return self.spec.buckets(self.trained)

    @functools.cached_property
    def all_rows(self) -> Rows:
        key = jax.eval_shape(lambda: jax.random.key(0))
        return abstract(lambda key: start_rows(self.spec, 0, key, self.starts), key)

    @property
    def starts(self) -> RowStarts:
        prompts = made_up_prompts(self.spec, self.rows)
        return RowStarts.of(self.spec, Requests(prompts, NoiseKey(None, 0)))

    def batch_rows(self, size: int) -> Rows:
        return abstract(gather, self.all_rows, array(np.int32, (size,), "batch"))

    def cache(self, rows: int) -> KVCache:
        has_head = self.spec.draft_head is not None
        return abstract(lambda: init_cache(self.spec.model, rows, self.buckets.slots, has_head))

    @functools.cached_property
    def texts(self) -> PackedTexts:
        nothing = np.zeros((0, self.spec.prompt_slots + self.spec.response_slots), np.int32)
        none = nothing[:, 0]
        pieces = self.buckets.shards
        return on_host(pack_texts(self.buckets, nothing, none, [none] * pieces, none))

    @functools.cached_property
    def fed(self) -> Fed:
        none = np.zeros(0, np.int32)
        return on_host(pack_fed(self.buckets, self.rows // self.buckets.shards, *[none] * 5))

    @functools.cached_property
    def rollout(self) -> Rollout:
        read = functools.partial(read_rollout, self.spec)
        return abstract(lambda *x: read(*x, None, np.int32(0)), self.all_rows, self.drafts)


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
    apart: bool = False  # whether the mesh in use is of rollouts alone

    def describe(self) -> str:
        """Describe the run in a line."""
        count = f"{param_count(self.model) / 1e6:,.1f}M parameters, {self.model.dtype}"
        rows = f"{self.rows:,} rows a step, {self.training.buckets.sizes[0]:,} at once"
        return f"{count}; {rows}; drafts of {self.num_prompts:,} prompts"

    @property
    def collector(self) -> type[WholeRollout]:
        return collector_of(self.config)

    @property
    def rows(self) -> int:
        """Rows of a rollout, without idle ones."""
        return self.collector.rows_per_rollout(self.config)[0]

    @property
    def total_rows(self) -> int:
        """Rows of a rollout, idle ones included."""
        return sum(self.collector.rows_per_rollout(self.config))

    @functools.cached_property
    def state(self) -> PolicyState:
        init = functools.partial(init_policy_state, self.update_spec)
        return abstract(init, placed(abstract_trained(self.model)), self.base_params)

    @functools.cached_property
    def base_params(self) -> Params | None:
        """Weights that adapters are trained for."""
        if self.model.lora is None:
            return None
        params = placed(abstract_params(self.model))
        return abstract(functools.partial(lora.freeze, self.model), params)

    @functools.cached_property
    def policy(self) -> Params:
        return lora.adapted(self.model, self.state.params, self.base_params)

    @functools.cached_property
    def reference_policy(self) -> Params | None:
        """Weights of the policy that the KL penalty is measured from."""
        if not self.config.algorithm.kl_coef:
            return None
        warm = self.config.warmup.steps and self.config.model.source  # by adapters
        return self.policy if self.base_params is None or warm else self.base_params

    @functools.cached_property
    def weights(self) -> Params:
        return abstract(functools.partial(rollout_weights, self.model), self.policy)

    @functools.cached_property
    def draft_head(self) -> Params | None:
        """Draft head's weights in a rollout."""
        head = self.state.draft_head
        if head is None:
            return None
        vocab = self.update_spec.draft_head.vocab
        copy = functools.partial(copy_draft_head, self.model, vocab=vocab)
        return abstract(copy, head.params, self.policy, head.counts)

    @functools.cached_property
    def stored(self) -> Stored:
        return abstract(store_shape(self.config, self.spec, self.num_prompts).empty)

    @functools.cached_property
    def picked(self) -> tuple[Stored, Any, Any]:
        """Arguments of `pick_drafts` for the prompts of a step's rollout."""
        numbers = array(np.int32, (self.total_rows // self.spec.group_size,), "batch")
        return self.stored, numbers, numbers

    @property
    def kept(self) -> tuple:
        """Arrays that the run keeps all the time: its state, a reference, the draft store.

        On a mesh of rollouts alone: the store, and the weights of rollouts that wait or run.
        """
        if self.apart:
            return self.stored, self.kept_weights
        return self.state, self.base_params or self.reference_policy, self.stored

    # The rollouts

    def of_rollouts(self) -> "AbstractRun":
        """Return the run whose properties are to be read with the mesh of rollouts in use."""
        if self.rollout_mesh == jax.sharding.get_mesh():
            return self
        return dataclasses.replace(self, apart=True, key=move(self.key, self.rollout_mesh))

    @property
    def kept_weights(self) -> tuple:
        """Weights on a mesh of rollouts alone: the layers in use, and all of rollouts that wait."""
        if not self.apart:
            return ()
        waiting = [self.training.weights] * source_of(self.config).most_ahead(self.config)
        return self.weights["stacked"], waiting

    @functools.cached_property
    def drafts(self) -> Drafts | None:
        if not self.collector.has_drafts(self.config):
            return None
        return abstract(functools.partial(pick_drafts, age=1), *self.picked)

    @functools.cached_property
    def draft_state(self) -> Any:
        """State of the draft source for a rollout's prompts."""
        source = self.spec.draft_source
        if source is None:
            return None
        settings = self.config.rollout
        made_up = made_up_prompts(self.spec, self.total_rows)
        generations = self.collector.generations(self.spec.draft_history)
        shape = (len(made_up.lens), generations, settings.group_size)

        def init(tokens: jax.Array, lens: jax.Array) -> Any:
            return source.init(made_up, (tokens, lens), self.spec.group_size)

        tokens = array(np.int32, (*shape, settings.response_len), *(None,) * 4)
        return abstract(init, tokens, array(np.int32, shape, *(None,) * 3))

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
        """Batch of the longest responses, as the update gets it."""
        config = self.config
        rows = config.rollout.prompts_per_step * trained_group_size(config)
        rollout = RolloutShapes(self.spec, self.weights, rows, rows, None).rollout
        prompts = made_up_prompts(self.spec, rows)
        keep_mask = config.algorithm.keep_sampling_mask
        batch = abstract(lambda x: make_batch(prompts, x, keep_mask), rollout)
        if self.update_spec.critic:
            evaluate = functools.partial(critic_values, self.update_spec)
            values = abstract(evaluate, self.state, self.packed(rows), self.base_params)
            batch = dataclasses.replace(batch, values=values)
        settings = AdvantageConfig.from_config(config, trained_group_size(config))
        rewards = array(np.float32, (rows,), "batch")
        if settings.reward_weights:
            rewards = array(np.float32, (rows, len(settings.reward_weights)), "batch", None)
        if choose_advantage(config).by_turn:
            turns = (rows, config.environment.max_turns)
            rewards = array(np.float32, turns, "batch", None)
            batch = dataclasses.replace(batch, turn_ends=array(np.int32, turns, "batch", None))
        estimate = abstract(
            lambda r, b: choose_advantage(config).estimate(r, b, settings), rewards, batch
        )
        recomputed = OLD_LOGPROBS[config.updates.old_logprobs].recomputed
        return dataclasses.replace(
            batch,
            recomputed_logprobs=batch.old_logprobs if recomputed else None,
            advantages=estimate.advantages,
            returns=estimate.returns,
            turn_ends=None,
            ref_logprobs=batch.old_logprobs if config.algorithm.kl_coef else None,
            importance_weights=batch.old_logprobs if config.algorithm.importance_cap else None,
            is_solution=array(np.bool_, (rows,), "batch")
            if config.algorithm.solution_coef
            else None,
        )

    def packed(self, rows: int) -> PackedRows:
        """Return `rows` rows of the batch, packed for the model."""
        settings = self.config
        slots = settings.data.prompt_len + settings.rollout.response_len
        tokens = np.zeros((rows, slots), np.int32)
        lens = np.zeros(rows, np.int32)
        row_tokens = RowTokens(tokens, lens, lens + 1, settings.rollout.response_len)
        return abstract(lambda: pack_rows(self.update_spec, row_tokens, np.arange(rows)))


UNKNOWN_PROMPTS = 8_192  # training prompts where data.prompts is 0: all of a data set


def of_run(run: Run) -> AbstractRun:
    return AbstractRun(
        config=run.config,
        model=run.model,
        spec=run.rollout_spec,
        eval_spec=run.eval_spec,
        update_spec=run.update_spec,
        num_prompts=len(run.prompts.lens),
        key=run.key,
        rollout_mesh=run.rollout_mesh,
    )


def of_config(config) -> AbstractRun:
    """Return shapes of a run whose mesh is in use, from its config alone: no weights, no data.

    Raises ValueError as `build.build` does.
    """
    vocab_size = 0
    eos_ids = None
    pad_id = 0
    if config.tokenizer.source in OF_ALPHABET:
        tokenizer = load_tokenizer(config)
        vocab_size = tokenizer.vocab_size
        eos_ids = tokenizer.eos_ids
        pad_id = tokenizer.pad_id
    model = load_shape(config, vocab_size)
    # Which token ends a response changes a constant of the programs, nothing else.
    rollout = training_spec(config, model, eos_ids or (model.vocab_size - 1,), pad_id)
    evaluation = rollout.for_evaluation(config.evaluate.samples, config.evaluate.temperature)
    prompts = config.data.prompts or UNKNOWN_PROMPTS
    steps = count_steps(config, prompts)
    has_head = rollout.draft_head is not None
    update_spec = make_update_spec(config, model, policy_schedule(config, steps), has_head)
    key = placed(jax.eval_shape(lambda: jax.random.key(0)))
    mesh = jax.sharding.get_mesh()
    return AbstractRun(config, model, rollout, evaluation, update_spec, prompts, key, mesh)


def device_bytes(tree: Any, mesh: jax.sharding.Mesh | None = None) -> int:
    """Return bytes of a tree of arrays on one device; mesh: of those on it, None: of all."""

    def size(x: Any) -> int:
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    leaves = jax.tree.leaves(tree)
    return sum(size(x) for x in leaves if mesh in (None, x.sharding.mesh))
