"""config → `Run`: loads all that a run needs, and makes what never changes in it."""

import dataclasses
import functools

import jax
import numpy as np
import optax

from specrl_jax import memory
from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.algorithms.update_spec import make_schedule, make_update_spec
from specrl_jax.collect import COLLECTORS
from specrl_jax.data.curriculum import PromptStream, make_stream
from specrl_jax.data.prompts import (
    Dataset,
    EncodedDataset,
    encode_prompts,
    encode_solutions,
    eval_batches,
    load_examples,
)
from specrl_jax.data.tokenizer import Tokenizer, load_tokenizer
from specrl_jax.episodes import EpisodeScorer, ResponseScorer
from specrl_jax.group_buffer import part_size, trained_group_size
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.load import load_policy
from specrl_jax.models.lora import adapter_count
from specrl_jax.models.transformer import Params, param_count
from specrl_jax.rewards.sums import make_pool
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.run import Run
from specrl_jax.types import Prompts


def build(config) -> tuple[Run, Params]:
    """Load all that `config` names; returns the run and the policy's first weights.

    Raises ValueError in one line where something is missing or does not fit.
    """
    tokenizer = load_tokenizer(config)
    scorer = make_scorer(config, tokenizer)
    dataset = load_examples(config)
    prompts = encode_prompts(dataset.train, tokenizer, config.data.prompt_len)
    stream = make_stream(config, prompts)
    _check_enough(config, stream, len(prompts.lens))
    total_steps = config.train.steps or config.train.epochs * stream.steps_per_epoch
    fits = functools.partial(memory.check, config, prompts=len(prompts.lens))
    model, params = load_policy(config, tokenizer.vocab_size, tokenizer.unused_ids, fits)
    schedule = policy_schedule(config, total_steps)
    spec = training_spec(config, model, tuple(tokenizer.eos_ids), tokenizer.pad_id)
    run = Run(
        config=config,
        dataset=dataset,
        prompts=prompts,
        held_out=_held_out(config, dataset, tokenizer),
        solutions=_solutions(config, prompts, tokenizer),
        model=model,
        rollout_spec=spec,
        eval_spec=spec.for_evaluation(config.evaluate.samples, config.evaluate.temperature),
        scorer=scorer,
        update_spec=make_update_spec(config, model, schedule, spec.draft_head is not None),
        schedule=schedule,
        collector=next(way for way in COLLECTORS if way.is_asked_for(config)),
        total_steps=total_steps,
        key=jax.random.key(config.seed),
    )
    spec.check_max_rows()
    if run.held_out:
        run.eval_spec.check_max_rows()
    _describe(run, stream)
    return run, params


def make_scorer(config, tokenizer: Tokenizer) -> ResponseScorer:
    """Make the scorer that `config` describes; its pool must be closed."""
    settings = config.reward
    environment = config.environment
    fields = {f: settings[f] for f in ("timeout", "memory_mib", "workers", "threshold", "extract")}
    named = {"environment": environment.name, "format": settings.format}
    pool = make_pool(settings.name, **named, **fields)
    inputs = (pool, tokenizer, settings.keep_special_tokens)
    if not environment.name:
        return ResponseScorer(*inputs)
    turns = {"max_turns": environment.max_turns, "allow_unfinished": environment.allow_unfinished}
    return EpisodeScorer(*inputs, **turns)


def _held_out(config, dataset: Dataset, tokenizer) -> list[tuple[Prompts, int]]:
    if not config.evaluate.every:
        return []
    encoded = encode_prompts(dataset.eval, tokenizer, config.data.prompt_len)
    if encoded.dropped:
        print(f"data: {encoded.dropped} held-out prompts longer than data.prompt_len left out")
    return eval_batches(encoded, config.evaluate.batch_size)


def _solutions(config, prompts: EncodedDataset, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    if not config.algorithm.solution_coef:
        return {}
    length = config.rollout.response_len
    field = config.data.solution_field
    solutions = encode_solutions(prompts.examples, tokenizer, field, length)
    if not solutions:
        raise ValueError(
            f"rollout.response_len must hold a solution, got {length}: none of the "
            f"{len(prompts.lens)} training prompts has one that fits"
        )
    print(f"data: {len(solutions)} training prompts have a solution that fits in {length} tokens")
    return solutions


def training_spec(config, model: ModelConfig, eos_ids: tuple[int, ...], pad_id: int) -> RolloutSpec:
    """The training rollout: of whole groups, or of the parts that screen prompts."""
    spec = RolloutSpec.from_config(config, model, eos_ids=eos_ids, pad_id=pad_id)
    return dataclasses.replace(spec, group_size=part_size(config))


def policy_schedule(config, total_steps: int) -> optax.Schedule:
    """The policy's learning rate by optimizer update; it makes none while the critic warms up."""
    rows = config.rollout.prompts_per_step * trained_group_size(config)
    per_step = config.updates.passes * (rows // config.updates.mini_batch_size)
    return make_schedule(config.updates, max(total_steps - frozen_steps(config), 1) * per_step)


def frozen_steps(config) -> int:
    """Steps at the start in which the policy is frozen: only the critic learns."""
    return config.critic.warmup_steps if has_critic(config.critic.kind) else 0


def _check_enough(config, stream: PromptStream, count: int) -> None:
    """Raise ValueError where no prompts are left for a rollout beside all that may wait."""
    size = config.rollout.prompts_per_step
    reason = ""
    if config.algorithm.dynamic_sampling:
        least = 2 * size
        reason = "algorithm.dynamic_sampling"
    if stream.screens:
        parts = config.rollout.group_size // config.curriculum.screening
        least = (3 * parts + 1) * size
        reason = f"curriculum.name = {config.curriculum.name}"
    if reason and count < least:
        raise ValueError(
            f"data.prompts must be >= {least} for {reason} with rollout.prompts_per_step = {size}, "
            f"got {count}; fewer prompts a step would fit"
        )


def _describe(run: Run, stream: PromptStream) -> None:
    """Prints what was loaded, and all that was left out."""
    shape = dict(jax.sharding.get_mesh().shape)
    count = f"{param_count(run.model) / 1e6:.2f}M parameters, {run.model.dtype}"
    if run.model.lora:
        count += f", and {adapter_count(run.model) / 1e6:.2f}M in adapters, which are trained"
    print(f"policy: {count}; mesh {shape}")
    held_out = int(np.sum([real for _, real in run.held_out], dtype=int))
    dropped = run.prompts.dropped
    dataset = run.dataset
    empty = f"{dataset.empty} without a question, " if dataset.empty else ""
    print(
        f"data: {len(run.prompts.lens)} training prompts ({empty}{dataset.duplicates} "
        f"duplicates and {dropped} longer than data.prompt_len left out), {held_out} held out; "
        f"{stream.steps_per_epoch} steps an epoch ({stream.leftover} prompts wait for the next "
        f"one), {run.total_steps} in all",
        flush=True,
    )
