"""A run's two halves: what never changes (`Run`) and what every step changes (`State`).

Beside train.py the only file that sees every room, and only to build its part of a run.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specrl_jax import data
from specrl_jax.checkpoint import Checkpointer
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Params, abstract_params, param_count
from specrl_jax.policy import load_policy
from specrl_jax.reward_pool import RewardPool
from specrl_jax.rollout.draft_store import DraftStore
from specrl_jax.rollout.generate import Plan
from specrl_jax.tokenizer import Tokenizer, load_tokenizer
from specrl_jax.types import Prompts
from specrl_jax.update import (
    Learner,
    TrainState,
    abstract_state,
    init_state,
    make_learner,
    make_schedule,
)
from specrl_jax.warmup import warm_up


@dataclasses.dataclass(frozen=True)
class Run:
    """What a configuration amounts to on the mesh in use."""

    config: Any
    tokenizer: Tokenizer
    dataset: data.Dataset
    prompts: data.EncodedDataset
    held_out: list[tuple[Prompts, int]]
    model: ModelConfig
    plan: Plan
    eval_plan: Plan
    learner: Learner
    schedule: optax.Schedule
    pool: RewardPool
    total_steps: int
    key: jax.Array

    @property
    def keeps_reference(self) -> bool:
        """A pretrained reference is read from its source again; one warmed up here is saved."""
        return bool(self.config.grpo.kl_coef and self.config.warmup.steps)


@dataclasses.dataclass
class State:
    """What a checkpoint holds. `step` counts finished steps; reference is None without a KL.

    tokenizer: fingerprint of the tokenizer whose ids the draft store holds.
    """

    step: int
    train: TrainState
    reference: Params | None
    stream: data.PromptStream
    store: DraftStore
    tokenizer: str

    def arrays(self, run: Run) -> dict[str, Any]:
        """The device's part."""
        tree = {"train": self.train, "store": self.store.arrays}
        return tree | ({"reference": self.reference} if run.keeps_reference else {})

    def host(self) -> dict[str, Any]:
        """The host's part, JSON-able."""
        return {
            "step": self.step,
            "stream": self.stream.state(),
            "store": self.store.state(),
            "tokenizer": self.tokenizer,
        }


def build(config) -> tuple[Run, Params]:
    """Load all that `config` names; the policy's first weights come beside the run.

    Raises ValueError in one line where something is missing or does not fit.
    """
    tokenizer = load_tokenizer(config)
    fields = {f: config.reward[f] for f in ("timeout", "memory_mib", "workers", "threshold")}
    pool = RewardPool(config.reward.name, extract=config.reward.extract, **fields)
    dataset = data.load_examples(config)
    prompts = data.encode_prompts(dataset.train, tokenizer, config.data.prompt_len)
    held_out = []
    if config.evaluate.every:
        encoded = data.encode_prompts(dataset.eval, tokenizer, config.data.prompt_len)
        held_out = data.eval_batches(encoded, config.evaluate.batch_size)
        if encoded.dropped:
            print(f"data: {encoded.dropped} held-out prompts longer than data.prompt_len left out")
    stream = data.PromptStream(prompts, config.rollout.prompts_per_step, config.seed)
    total_steps = config.train.steps or config.train.epochs * stream.steps_per_epoch
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    per_step = config.updates.passes * (rows // config.updates.mini_batch_size)
    model, params = load_policy(config, tokenizer)
    schedule = make_schedule(config.updates, total_steps * per_step)
    plan = Plan.from_config(
        config, model, eos_ids=tuple(tokenizer.eos_ids), pad_id=tokenizer.pad_id
    )
    run = Run(
        config=config,
        tokenizer=tokenizer,
        dataset=dataset,
        prompts=prompts,
        held_out=held_out,
        model=model,
        plan=plan,
        eval_plan=plan.for_evaluation(config.evaluate.samples, config.evaluate.temperature),
        learner=make_learner(config, model, schedule),
        schedule=schedule,
        pool=pool,
        total_steps=total_steps,
        key=jax.random.key(config.seed),
    )
    _describe(run, stream)
    return run, params


def begin(run: Run, params: Params) -> State:
    """The state before step 1: the policy warmed up, nothing stored."""
    if run.config.warmup.steps:
        params = warm_up(run.config, run.learner, params, run.tokenizer, run.dataset)
    reference = jax.tree.map(jnp.copy, params) if run.config.grpo.kl_coef else None
    return _state(run, init_state(run.learner.optimizer, params), reference)


def resume(run: Run, params: Params, checkpoints: Checkpointer, step: int) -> State:
    """The state that a checkpoint holds, bit for bit. `params`: those that `build` gave."""
    reference = params if run.config.grpo.kl_coef else None
    like = abstract_state(run.learner.optimizer, abstract_params(run.model))
    state = _state(run, like, reference)
    arrays, host = checkpoints.restore(step, state.arrays(run))
    if host["tokenizer"] != state.tokenizer:
        raise ValueError(
            f"tokenizer.source must be the checkpoint's tokenizer {host['tokenizer']}, whose ids "
            f"its drafts hold, got {state.tokenizer}"
        )
    state.step, state.train = host["step"], arrays["train"]
    state.reference = arrays.get("reference", reference)
    state.stream.restore(host["stream"])
    state.store.restore(host["store"], arrays["store"])
    print(f"resumed at step {step} of {run.total_steps}", flush=True)
    return state


def _state(run: Run, train: TrainState, reference: Params | None) -> State:
    settings = run.config.rollout
    stream = data.PromptStream(run.prompts, settings.prompts_per_step, run.config.seed)
    # A multiple of 64: the same shape, and so resumable, on meshes that cut the batch otherwise.
    capacity = -(-len(run.prompts.lens) // 64) * 64
    store = DraftStore(capacity, settings.group_size, settings.response_len, settings.draft_age)
    return State(0, train, reference, stream, store, run.tokenizer.fingerprint)


def _describe(run: Run, stream: data.PromptStream) -> None:
    """What was loaded, and all that was left out."""
    shape = dict(jax.sharding.get_mesh().shape)
    count = param_count(run.model)
    print(f"policy: {count / 1e6:.2f}M parameters, {run.model.dtype}; mesh {shape}")
    held_out = int(np.sum([real for _, real in run.held_out], dtype=int))
    print(
        f"data: {len(run.prompts.lens)} training prompts ({run.dataset.duplicates} duplicates and "
        f"{run.prompts.dropped} longer than data.prompt_len left out), {held_out} held out; "
        f"{stream.steps_per_epoch} steps an epoch ({stream.leftover} prompts wait for the next "
        f"one), {run.total_steps} in all",
        flush=True,
    )
