"""A run's two halves: what never changes (`Run`) and what every step changes (`State`).

Beside train.py the only file that sees every room, and only to build its part of a run.
"""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specrl_jax.algorithms.learner import (
    Learner,
    TrainState,
    abstract_train_state,
    init_train_state,
    make_learner,
    make_schedule,
)
from specrl_jax.checkpoint import Checkpointer
from specrl_jax.data import prompts as data
from specrl_jax.data.curriculum import PromptStream, make_stream
from specrl_jax.data.tokenizer import Tokenizer, load_tokenizer
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.load import load_policy
from specrl_jax.models.transformer import (
    Params,
    abstract_params,
    param_count,
    rollout_weights,
)
from specrl_jax.rewards.workers import RewardPool
from specrl_jax.rollout.adaptive import measure_steps as timing
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.adaptive.step_costs import StepCosts
from specrl_jax.rollout.carry_over import Resumed, RunAhead, Waiting
from specrl_jax.rollout.drafts.store import DraftStore
from specrl_jax.rollout.engine.kv_budget import KVBudget
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.runtime import cache_folder
from specrl_jax.selection import Sampled, Selection
from specrl_jax.types import Prompts
from specrl_jax.warmup import warm_up

# The rollout's copy of the weights.
policy_copy = jax.jit(rollout_weights, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What a configuration amounts to on the mesh in use."""

    config: Any
    tokenizer: Tokenizer
    dataset: data.Dataset
    prompts: data.EncodedDataset
    held_out: list[tuple[Prompts, int]]
    model: ModelConfig
    plan: RolloutSpec
    eval_plan: RolloutSpec
    learner: Learner
    schedule: optax.Schedule
    pool: RewardPool
    total_steps: int
    key: jax.Array

    @property
    def chooses(self) -> bool:
        """Whether rollouts choose by measured cost."""
        settings = self.config.rollout
        return settings.adaptive and (settings.draft != "none" or settings.run_ahead)

    @property
    def rows(self) -> int:
        """Rows in flight at a step."""
        settings = self.config.rollout
        return (settings.prompts_per_step + settings.partial) * settings.group_size

    @property
    def response_slots(self) -> int:
        return self.config.rollout.response_len

    @property
    def measures_selection(self) -> bool:
        """Whether responses to training and to held-out prompts are of the same law."""
        rollout, evaluation = self.config.rollout, self.config.evaluate
        whole = not rollout.top_k and rollout.top_p == 1 and not rollout.partial
        return (
            bool(self.held_out)
            and "previous" in rollout.draft
            and whole
            and rollout.temperature == evaluation.temperature
        )

    @property
    def max_turns(self) -> int:
        """Turns of an episode; 0 without an environment."""
        return self.config.environment.max_turns if self.config.environment.name else 0

    @property
    def trained_group(self) -> int:
        """Responses to a prompt that are trained on."""
        return trained_group(self.config)

    @property
    def keeps_reference(self) -> bool:
        """A pretrained reference is read from its source again; one warmed up here is saved."""
        return bool(self.config.algorithm.kl_coef and self.config.warmup.steps)


def trained_group(config) -> int:
    """Responses to a prompt that are trained on: all, or all that did not choose the prompt."""
    settings, group = config.curriculum, config.rollout.group_size
    screens = settings.name == "speed" and not settings.reuse_screening
    return group - settings.screening if screens else group


@dataclasses.dataclass
class TrainerState:
    """What a checkpoint holds. `step` counts finished steps; reference is None without a KL.

    cost: what the rollout's choices rest on, None where there is nothing to choose. ahead, carried,
    waiting: what the last rollout left to the next one; None without run-ahead, partial rollouts,
    or where every group is trained on at once. screened: first responses to prompts that are worth
    more (SPEED). selection: None where there are no drafts, or no comparable evaluations.
    log_lenience: nats, of the next step.
    """

    step: int
    train: TrainState
    reference: Params | None
    stream: PromptStream
    store: DraftStore
    cost: Speculation | None = None
    ahead: RunAhead | None = None
    carried: Resumed | None = None
    waiting: Waiting | None = None
    screened: Waiting | None = None
    selection: Selection | None = None
    log_lenience: float = 0.0

    @property
    def epoch(self) -> int:
        """The pass over the prompts that the next step begins in, from 1."""
        return self.prompts_seen // self.stream.prompts_per_epoch + 1

    @property
    def prompts_seen(self) -> int:
        """Prompts whose rollout is complete, with repeats."""
        return self.stream.given - (len(self.carried.prompt_ids) if self.carried else 0)

    def next_prompts(self, run: Trainer) -> tuple[Prompts, Prompts | None]:
        """Those in flight at the step that begins (`step` counts it), and those run ahead."""
        settings, last = run.config.rollout, self.step >= run.total_steps
        if self.carried is None:
            prompts = self.stream.next()
            return prompts, self.stream.peek() if settings.run_ahead and not last else None
        begun, size = self.carried.prompt_ids, settings.prompts_per_step
        # No more than the rest of the run trains on: its last step leaves nothing unfinished.
        rest = max(run.total_steps - self.step + 1, 1) * size
        fresh = self.stream.take(min(size + settings.partial, rest) - len(begun), busy=begun)
        return data.concatenate(self.stream.find(begun), fresh), None

    def arrays(self, run: Trainer) -> dict[str, Any]:
        """The device's part."""
        tree = {"train": self.train, "store": self.store.arrays}
        if self.ahead is not None:
            tree["ahead"] = self.ahead.drafts
        if self.carried is not None:
            tree["carried"] = self.carried.rows
        for name in ("waiting", "screened"):
            if (groups := getattr(self, name)) is not None:
                tree[name] = groups.rollout
        if self.selection is not None:
            tree["selection"] = (self.selection.held_out, self.selection.trained)
        return tree | ({"reference": self.reference} if run.keeps_reference else {})

    def host(self) -> dict[str, Any]:
        """The host's part, JSON-able."""
        return {
            "step": self.step,
            "stream": self.stream.state(),
            "store": self.store.state(),
            "cost": self.cost.state() if self.cost else None,
            "machine": timing.machine(),
            "ahead": self.ahead.prompt_ids if self.ahead else (),
            "carried": (self.carried.prompt_ids, self.carried.steps) if self.carried else ((), ()),
            "selection": (self.selection.step, self.selection.complete) if self.selection else (),
            "log_lenience": repr(self.log_lenience),  # JSON has no inf
            "waiting": (self.waiting.prompt_ids, self.waiting.rewards) if self.waiting else (),
            "screened": (self.screened.prompt_ids, self.screened.rewards) if self.screened else (),
        }


def build(config) -> tuple[Trainer, Params]:
    """Load all that `config` names; the policy's first weights come beside the run.

    Raises ValueError in one line where something is missing or does not fit.
    """
    tokenizer = load_tokenizer(config)
    fields = {f: config.reward[f] for f in ("timeout", "memory_mib", "workers", "threshold")}
    fields |= {"extract": config.reward.extract, "environment": config.environment.name}
    pool = RewardPool(config.reward.name, **fields)
    dataset = data.load_examples(config)
    prompts = data.encode_prompts(dataset.train, tokenizer, config.data.prompt_len)
    held_out = []
    if config.evaluate.every:
        encoded = data.encode_prompts(dataset.eval, tokenizer, config.data.prompt_len)
        held_out = data.eval_batches(encoded, config.evaluate.batch_size)
        if encoded.dropped:
            print(f"data: {encoded.dropped} held-out prompts longer than data.prompt_len left out")
    stream = make_stream(config, prompts)
    _check_enough(config, len(prompts.lens))
    total_steps = config.train.steps or config.train.epochs * stream.steps_per_epoch
    rows = config.rollout.prompts_per_step * trained_group(config)
    per_step = config.updates.passes * (rows // config.updates.mini_batch_size)
    model, params = load_policy(config, tokenizer.vocab_size)
    frozen = config.critic.warmup_steps if config.critic.kind != "none" else 0
    schedule = make_schedule(config.updates, (total_steps - frozen) * per_step)
    plan = RolloutSpec.from_config(
        config, model, eos_ids=tuple(tokenizer.eos_ids), pad_id=tokenizer.pad_id
    )
    run = Trainer(
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
    ladders = [plan.buckets(run.rows)]
    if run.held_out:
        rows = config.evaluate.batch_size * config.evaluate.samples
        ladders.append(run.eval_plan.buckets(rows))
    for ladder in ladders:
        KVBudget(model, ladder, cache_bytes=plan.cache_bytes).check()
    _describe(run, stream)
    return run, params


def _check_enough(config, count: int) -> None:
    """Whether there are prompts for a round beside all that may wait."""
    size, reason = config.rollout.prompts_per_step, ""
    if config.algorithm.dynamic_sampling:
        least, reason = 2 * size, "algorithm.dynamic_sampling"
    if config.curriculum.name == "speed":
        parts = config.rollout.group_size // config.curriculum.screening
        least, reason = (3 * parts + 1) * size, "curriculum.name = speed"
    if reason and count < least:
        raise ValueError(
            f"data.prompts must be >= {least} for {reason} with rollout.prompts_per_step = {size}, "
            f"got {count}; fewer prompts a step would fit"
        )


def begin(run: Trainer, params: Params) -> TrainerState:
    """The state before step 1: the policy warmed up, nothing stored."""
    if run.config.warmup.steps:
        params = warm_up(run.config, run.learner, params, run.tokenizer, run.dataset)
    reference = jax.tree.map(jnp.copy, params) if run.config.algorithm.kl_coef else None
    state = _state(run, init_train_state(run.learner, params), reference)
    if run.chooses:
        state.cost = Speculation(_measure(run, state.train.params))
    return state


def resume(run: Trainer, params: Params, checkpoints: Checkpointer, step: int) -> TrainerState:
    """The state that a checkpoint holds, bit for bit. `params`: those that `build` gave."""
    reference = params if run.config.algorithm.kl_coef else None
    like = abstract_train_state(run.learner, abstract_params(run.model))
    state = _state(run, like, reference)
    like = state.arrays(run) | {"store": state.store.like}
    arrays, host = checkpoints.restore(step, like)
    state.step, state.train = host["step"], arrays["train"]
    state.reference = arrays.get("reference", reference)
    state.stream.restore(host["stream"])
    state.store.restore(host["store"], arrays["store"])
    if state.selection is not None:
        state.selection = Selection(*arrays["selection"], *host["selection"])
    state.log_lenience = float(host["log_lenience"])
    if host["cost"]:
        state.cost = Speculation.from_state(host["cost"])
        if host.get("machine") != timing.machine():
            print(f"rollout: now on {timing.machine()}, was on {host.get('machine')}")
            state.cost.table = _measure(run, state.train.params)
    if state.ahead is not None:
        state.ahead = RunAhead(arrays["ahead"], tuple(host["ahead"]))
    if state.carried is not None:
        state.carried = Resumed(arrays["carried"], *map(tuple, host["carried"]))
    for name in ("waiting", "screened"):
        if getattr(state, name) is not None:
            ids, rewards = host[name]
            groups = Waiting(arrays[name], tuple(ids), tuple(map(tuple, rewards)))
            setattr(state, name, groups)
    print(f"resumed at step {step} of {run.total_steps}", flush=True)
    return state


def _state(run: Trainer, train: TrainState, reference: Params | None) -> TrainerState:
    settings, setup = run.config.rollout, run.plan.program
    stream = make_stream(run.config, run.prompts, run.total_steps)
    parts = settings.group_size // run.plan.group_size
    store = DraftStore(
        (settings.store_prompts or len(run.prompts.lens)) * parts,
        run.plan.group_size,
        settings.response_len,
        settings.draft_age,
        history=settings.tree.history if setup.tree else 0,
        k=setup.stored_logprobs,
        max_age=settings.store_age,
        kind=settings.store,
        owner={"tokenizer": run.tokenizer.fingerprint, "model": _model_name(run)},
    )
    state = TrainerState(0, train, reference, stream, store)
    state.log_lenience = math.log(settings.lenience) if settings.lenience else -math.inf
    if settings.run_ahead:
        state.ahead = RunAhead.empty(run.rows, settings.response_len)
    if run.measures_selection:
        prompts, _ = run.held_out[0]
        shape = run.config.data.prompt_len, settings.response_len
        held_out = Sampled.empty(len(prompts.lens) * run.eval_plan.group_size, *shape)
        trained = Sampled.empty(settings.prompts_per_step * run.trained_group, *shape)
        state.selection = Selection(held_out, trained)
    if settings.partial:
        waiting = settings.partial * settings.group_size
        state.carried = Resumed.empty(waiting, settings.response_len, setup.stored_logprobs)
    screens = run.config.curriculum.name == "speed"
    if run.config.algorithm.dynamic_sampling or screens:
        rows = settings.prompts_per_step * run.trained_group
        state.waiting = Waiting.empty(rows, settings.response_len, setup.stored_logprobs)
    if screens:
        state.screened = Waiting.empty(2 * run.rows, settings.response_len, setup.stored_logprobs)
    return state


def _model_name(run: Trainer) -> str:
    """What tells one policy from another in a stored draft."""
    shape = run.model
    sizes = f"{shape.num_layers} x {shape.embed_dim}, {shape.vocab_size} tokens"
    return f"{run.config.model.source or 'from nothing'} ({shape.family}, {sizes})"


def _measure(run: Trainer, params: Params) -> StepCosts:
    """Seconds of the rollout's programs on the device at hand; read from disk where known."""
    settings = run.config.rollout
    weights = policy_copy(run.model, params)
    sources = (settings.tree.history + settings.run_ahead) * settings.group_size
    start = time.perf_counter()
    table = timing.cost_table(
        run.plan, weights, run.rows, sources=sources, directory=cache_folder() / "step_costs"
    )
    seconds = time.perf_counter() - start
    print(f"rollout: cost of {len(table.to_json())} programs known in {seconds:.0f} s", flush=True)
    return table


def _describe(run: Trainer, stream: PromptStream) -> None:
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
