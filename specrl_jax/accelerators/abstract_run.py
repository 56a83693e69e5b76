"""Shapes of what a run holds, with layouts on the mesh in use, from its config alone.

Nothing is read or allocated: no weights, no data. Every shape is what the functions of a run
return for such inputs. Bounds are the scheduler's: the largest buckets, the longest cache.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specrl_jax.algorithms.advantages import AdvantageConfig, choose_advantage
from specrl_jax.algorithms.learner import Learner, TrainState, init_train_state, make_learner
from specrl_jax.algorithms.scoring import PackedRows, critic_values, pack_rows
from specrl_jax.algorithms.update import make_batch
from specrl_jax.build import policy_copy, policy_schedule, rollout_rows, training_spec
from specrl_jax.data.tokenizer import OF_ALPHABET, load_tokenizer
from specrl_jax.group_buffer import trained_group_size
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import KVCache, init_cache
from specrl_jax.models.load import load_shape
from specrl_jax.models.transformer import Params, abstract_params, param_count
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftHistory
from specrl_jax.rollout.drafts.store import Stored, pick_drafts, pick_sources
from specrl_jax.rollout.engine import decode_state
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.rows import Noise, read_rollout, start_all_rows
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.sharding import eval_shape, spec
from specrl_jax.state import store_shape
from specrl_jax.types import Batch, Drafts, Prompts, Rollout

UNKNOWN_PROMPTS = 8_192  # training prompts where data.prompts is 0: all of a data set


# Shapes --------------------------------------------------------------------------------------


def abstract(function: Callable, *args) -> Any:
    """Shapes, dtypes and layouts, on the mesh in use, of what `function(*args)` returns."""
    return _placed(eval_shape(function, *args))


def _placed(tree: Any) -> Any:
    mesh = jax.sharding.get_mesh()

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes = jax.P(*(None,) * len(x.shape)) if x.sharding is None else x.sharding.spec
        layout = jax.sharding.NamedSharding(mesh, axes)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout, weak_type=x.weak_type)

    return jax.tree.map(place, tree)


def array(dtype: Any, shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
    layout = jax.sharding.NamedSharding(jax.sharding.get_mesh(), spec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def on_host(*shape: int) -> jax.ShapeDtypeStruct:
    """An int32 array that is handed over by the host, as NumPy's are."""
    return jax.ShapeDtypeStruct(shape, np.int32)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on the first device."""

    def size(x: jax.ShapeDtypeStruct | np.ndarray) -> int:
        layout = getattr(x, "sharding", None)
        shape = layout.shard_shape(x.shape) if layout else x.shape
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """Shapes of what a run holds. Rows that begin together: `first`, later `refill`; those that
    decode together: `running`, in a cache of `slots`."""

    config: Any
    model: ModelConfig
    spec: RolloutSpec
    learner: Learner
    num_prompts: int  # to train on

    def describe(self) -> str:
        """Describe the run in a line."""
        count = f"{param_count(self.model) / 1e6:,.1f}M parameters, {self.model.dtype}"
        rows = f"{self.rows:,} rows a step, {self.running:,} at once"
        known = "" if self.config.data.prompts else " (data.prompts is 0: a guess)"
        return f"{count}; {rows}; drafts of {self.num_prompts:,} prompts{known}"

    # Of the rollout

    @functools.cached_property
    def rows(self) -> int:
        return rollout_rows(self.config)

    @functools.cached_property
    def buckets(self) -> Buckets:
        return self.spec.buckets(self.rows)

    @functools.cached_property
    def program(self) -> ProgramSpec:
        return self.spec.program_for(self.buckets)

    @property
    def running(self) -> int:
        return self.buckets.rows[0]

    @property
    def first(self) -> int:
        return self.buckets.admission(self.rows, self.running)

    @property
    def refill(self) -> int:
        return self.buckets.refill

    @property
    def slots(self) -> int:
        return self.buckets.slots(self.buckets.responses[-1])

    @functools.cached_property
    def state(self) -> TrainState:
        init = functools.partial(init_train_state, self.learner)
        return abstract(init, abstract_params(self.model))

    @functools.cached_property
    def reference(self) -> Params | None:
        return _placed(abstract_params(self.model)) if self.config.algorithm.kl_coef else None

    @functools.cached_property
    def weights(self) -> Params:
        return abstract(functools.partial(policy_copy, self.model), self.state.params)

    @functools.cached_property
    def stored(self) -> Stored:
        """The draft store's arrays."""
        return _placed(store_shape(self.config, self.spec, self.num_prompts).abstract())

    def prompts(self, rows: int) -> Prompts:
        """Prompts of zeros for so many rows of a rollout."""
        shape = rows // self.spec.group_size, self.spec.prompt_slots
        ids = np.zeros((shape[0], 2), np.uint32)
        return Prompts(np.zeros(shape, np.int32), np.full(shape[0], shape[1], np.int32), ids, ())

    def start(self, rows: int) -> DecodeState:
        def rows_of(key: jax.Array) -> DecodeState:
            prompts = self.prompts(rows)
            steps = np.zeros(len(prompts.lens), int)
            return start_all_rows(self.program, prompts, Noise(key, 0), steps)

        return abstract(rows_of, jax.eval_shape(lambda: jax.random.key(0)))

    @functools.cached_property
    def picked(self) -> tuple[Stored, Any, Any]:
        """The arguments of `pick_drafts` for a rollout's prompts."""
        numbers = array(np.int32, (self.rows // self.spec.group_size,), "batch")
        return self.stored, numbers, numbers

    @functools.cached_property
    def drafts(self) -> Drafts | None:
        if not DRAFT_SOURCES[self.config.rollout.draft].previous:
            return None
        return abstract(functools.partial(pick_drafts, age=1), *self.picked)

    @functools.cached_property
    def all_rows(self) -> DecodeState:
        rows = self.start(self.rows)
        if self.drafts is None:
            return rows
        rule = self.program.accept
        return abstract(lambda *x: decode_state.with_drafts(*x, rule), rows, self.drafts)

    def batch_rows(self, size: int, *, with_drafts: bool = False) -> DecodeState:
        rows = self.all_rows if with_drafts else decode_state.without_drafts(self.all_rows)
        return abstract(decode_state.gather, rows, on_host(size))

    def cache(self, rows: int, slots: int) -> KVCache:
        return abstract(lambda: init_cache(self.model, rows, slots))

    @functools.cached_property
    def draft_state(self) -> Any:
        """State of the draft source for a rollout's prompts."""
        source = self.program.draft_source
        group = self.config.rollout.group_size
        prompts = self.prompts(self.rows)
        read = self.program.draft_history * group

        def init(tokens: jax.Array, lens: jax.Array) -> Any:
            history = DraftHistory.from_store(tokens[:, :read], lens[:, :read], group)
            return source.init(prompts, history, self.program.group_size)

        return abstract(init, *abstract(pick_sources, *self.picked))

    # Of the update

    @functools.cached_property
    def rollout(self) -> Rollout:
        """The responses that a step trains on."""
        rows = self.config.rollout.prompts_per_step * trained_group_size(self.config)
        read = functools.partial(read_rollout, self.program)
        return abstract(lambda x: read(x, None, None, np.int32(0)), self.start(rows))

    @functools.cached_property
    def plain_batch(self) -> Batch:
        """Batch of the longest responses, before the advantages."""
        prompts = self.prompts(self.rollout.lens.shape[0])
        return abstract(lambda x: make_batch(prompts, x), self.rollout)

    @functools.cached_property
    def batch(self) -> Batch:
        """Batch as the update gets it."""
        config = self.config
        batch = self.plain_batch
        rewards = array(np.float32, batch.response_lens.shape, "batch")
        values = self.learner.critic and abstract(
            functools.partial(critic_values, self.learner),
            self.state,
            self.packed(rewards.shape[0]),
        )
        settings = AdvantageConfig.from_config(config, trained_group_size(config))
        estimate = abstract(
            lambda r, v, b: choose_advantage(config).estimate(r, v, b.mask, settings),
            rewards, values, batch,
        )  # fmt: skip
        return dataclasses.replace(
            batch,
            values=values,
            advantages=estimate.advantages,
            returns=estimate.returns,
            ref_logprobs=batch.old_logprobs if config.algorithm.kl_coef else None,
            weights=batch.old_logprobs if config.algorithm.importance_cap else None,
        )

    def packed(self, rows: int) -> PackedRows:
        """Return `rows` rows of the batch, packed for the model."""
        batch = self.plain_batch
        tokens = np.zeros((rows, batch.tokens.shape[1]), np.int32)
        tokens[:, 0] = np.arange(rows)
        lens = np.zeros(rows, np.int32)
        lens[0] = tokens.shape[1]
        host = Batch(tokens, np.zeros_like(lens), lens, batch.old_logprobs, advantages=None)
        return abstract(lambda: pack_rows(self.learner, host, np.arange(rows)))

    @functools.cached_property
    def mini_batch(self) -> PackedRows:
        return self.packed(self.config.updates.mini_batch_size)


def abstract_run(config) -> AbstractRun:
    """Return the run of a config whose mesh is in use; ValueError as from `build.build`."""
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
    prompts = config.data.prompts or UNKNOWN_PROMPTS
    steps_per_epoch = max(prompts // config.rollout.prompts_per_step, 1)
    steps = config.train.steps or config.train.epochs * steps_per_epoch
    learner = make_learner(config, model, policy_schedule(config, steps))
    return AbstractRun(config, model, rollout, learner, prompts)
