"""Setup of a configuration's `Run`, and of the `RunState` that it starts or resumes with."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specrl_jax.agents.responder import make_episode_responder
from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.algorithms.update_spec import (
    DraftHeadState,
    PolicyState,
    init_policy_state,
    make_schedule,
    make_update_spec,
)
from specrl_jax.data.curriculum import count_steps, make_stream
from specrl_jax.data.prompts import (
    Dataset,
    encode_prompts,
    eval_batches,
    load_examples,
)
from specrl_jax.models import lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.load import load_policy
from specrl_jax.models.transformer import Params, abstract_trained
from specrl_jax.process.checkpoint import Checkpointer, checksum
from specrl_jax.process.runtime import machine
from specrl_jax.responses import Responder
from specrl_jax.rewards.scorers import reads_answer_part, scorers_of
from specrl_jax.rewards.sums import make_pool
from specrl_jax.rewards.thoughts import ThoughtTags
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES
from specrl_jax.rollout.drafts.store import DraftStore, StoreShape
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.reused_noise import ReusedNoise
from specrl_jax.rollout.spec import RolloutSpec, noise_visits
from specrl_jax.rollout.stop_strings import StopStrings, make_stop_strings
from specrl_jax.rollout.verification import Verification
from specrl_jax.sharding import move
from specrl_jax.text.tokenizer import Tokenizer, load_tokenizer
from specrl_jax.training.choices import (
    batch_source_of,
    collector_of,
    frozen_of,
    kept_logprobs,
    roll_out_of,
    stages_of,
)
from specrl_jax.training.description import describe, policy_updates, rate_jump
from specrl_jax.training.origin import Reference, RunOrigin
from specrl_jax.training.run import Frozen, Run
from specrl_jax.training.state import RolloutState, RunState
from specrl_jax.training.warmup import warm_up
from specrl_jax.types import Prompts

# (config, model, prompts to train on) → None, or a one-line ValueError
CheckModel = Callable[[Any, ModelConfig, int], None]


def build(config, check_model: CheckModel = lambda *_: None) -> tuple[Run, Params]:
    """Load everything that `config` names; return the run and the policy's initial weights.

    check_model: may reject a model before its weights are read, see `hooks.Hooks.check_model`.
    Raises a one-line ValueError if something is missing or does not fit.
    """
    tokenizer = load_tokenizer(config)
    responder = make_responder(config, tokenizer)
    dataset = load_examples(config)
    prompts = encode_prompts(dataset.train, tokenizer, config.data.prompt_len)
    make_stream(config, prompts)  # checks early what it can
    collector_of(config).check_enough(config, len(prompts.lens))
    total_steps = count_steps(config, len(prompts.lens))

    def check(model: ModelConfig) -> None:
        check_model(config, model, len(prompts.lens))

    model, params = load_policy(config, tokenizer.vocab_size, tokenizer.unused_ids, check)
    frozen = load_frozen(config, tokenizer)
    schedule = policy_schedule(config, total_steps)
    eos_ids = tuple(tokenizer.eos_ids)
    spec = training_spec(config, model, eos_ids, tokenizer.pad_id, responder.stop)
    source = batch_source_of(config)
    run = Run(
        config=config,
        dataset=dataset,
        prompts=prompts,
        held_out=_held_out(config, dataset, tokenizer),
        stages=tuple(stage(config, prompts, tokenizer) for stage in stages_of(config)),
        model=model,
        rollout_spec=spec,
        eval_spec=spec.for_evaluation(config.evaluate.samples, config.evaluate.temperature),
        responder=responder,
        roll_out=roll_out_of(config, responder),
        update_spec=make_update_spec(
            config, model, schedule, spec.draft_head is not None, frozen and frozen.model
        ),
        schedule=schedule,
        collector_type=collector_of(config),
        total_steps=total_steps,
        key=jax.random.key(config.seed),
        batches_type=source,
        rollout_mesh=source.rollout_mesh(config),
        frozen=frozen,
    )
    with jax.set_mesh(run.rollout_mesh):
        spec.check_max_rows()
    describe(run)
    return run, params


def load_frozen(config, tokenizer: Tokenizer) -> Frozen | None:
    """Load the frozen weights that a recipe needs, in the compute type."""
    recipe = frozen_of(config)
    if recipe is None:
        return None
    model, params = recipe.load(config, tokenizer)
    return Frozen(model, lora.freeze(model, params), f"{checksum(params):08x}")


def make_responder(config, tokenizer: Tokenizer) -> Responder:
    """Make the responder that `config` describes; its pool must be closed afterwards."""
    settings = config.reward
    stop = make_stop_strings(config, tokenizer)
    tags = ThoughtTags.parse(settings.thought_tags, settings.extract)
    limits = {
        "timeout": settings.timeout,
        "memory_mib": settings.memory_mib,
        "workers": settings.workers,
        "threshold": settings.threshold,
        "readable": settings.readable,
    }
    common = {
        "tokenizer": tokenizer,
        "keep_special_tokens": settings.keep_special_tokens,
        "thought_tags": tags,
        "stop": stop,
        "keep_stop": settings.keep_stop,
    }
    if config.environment.name:
        responder = make_episode_responder(config, limits, common)
        reads_thoughts = responder.pool.reads_whole
    else:
        texts = {"format": settings.format, "extract": settings.extract}
        pool = make_pool(settings.name, **texts, **limits)
        responder = Responder(pool, **common)
        reads_thoughts = not reads_answer_part(settings.name, settings.extract)
    if not reads_thoughts:
        _check_tags(settings, tags, tokenizer)
    return responder


def try_reward(run: Run) -> None:
    """Score two responses to the first problem, before anything compiles: its answer, and "".

    Raises a one-line ValueError if a user's function can score neither.
    """
    name = run.config.reward.name
    if run.config.environment.name or all(scorer.score for scorer in scorers_of(name)):
        return
    example = run.prompts.examples[0]
    problem = (example.answer, example.task, example.metadata)
    rewards = run.responder.pool.score([example.answer, ""], *([x] * 2 for x in problem))
    if rewards.failed.all():
        raise ValueError(
            f"reward.name must score responses; {name} scores neither the first problem's answer, "
            f"{example.answer[:50]!r}, nor an empty response: {rewards.reasons[0]}"
        )


def _check_tags(settings, tags: ThoughtTags, tokenizer: Tokenizer) -> None:
    """Raise ValueError if rewards cannot see the tags because they are special tokens."""
    hidden = [tag for pair in tags.pairs for tag in pair if tokenizer.is_special(tag)]
    if hidden and not settings.keep_special_tokens:
        raise ValueError(
            f"reward.keep_special_tokens must be True where {hidden[0]} of reward.thought_tags is "
            'a special token, got False; or set reward.thought_tags=""'
        )


def _held_out(config, dataset: Dataset, tokenizer) -> list[tuple[Prompts, int]]:
    if not config.evaluate.every:
        return []
    encoded = encode_prompts(dataset.eval, tokenizer, config.data.prompt_len)
    if encoded.dropped:
        print(f"data: {encoded.dropped} held-out prompts longer than data.prompt_len left out")
    return eval_batches(encoded, config.evaluate.batch_size)


def training_spec(
    config,
    model: ModelConfig,
    eos_ids: tuple[int, ...],
    pad_id: int,
    stop: StopStrings | None = None,
) -> RolloutSpec:
    """Return the spec of training rollouts, with the collector's group size."""
    spec = RolloutSpec.from_config(config, model, eos_ids=eos_ids, pad_id=pad_id, stop=stop)
    kept = kept_logprobs(config)
    return dataclasses.replace(
        spec,
        group_size=collector_of(config).rollout_group_size(config),
        stored_logprobs=max(spec.stored_logprobs, kept),
        keeps_accepted=kept > 0 and spec.accept.accepted_probs is not None,
    )


def policy_schedule(config, total_steps: int) -> optax.Schedule:
    """Return the policy's learning rate by its updates; none while the critic warms up."""
    return make_schedule(config.updates, policy_updates(config, total_steps))


# The state ----------------------------------------------------------------------------------------


def init_state(run: Run, params: Params) -> RunState:
    """Return the state before step 1: the policy warmed up, nothing stored."""
    origin = RunOrigin.of(run, params, is_reference=False)
    trained, reference, draft_head = _warm_up_policy(run, params)
    base_params = reference.params if run.model.lora else None
    policy_state = init_policy_state(run.update_spec, trained, base_params, draft_head)
    return _new_state(run, policy_state, origin, reference)


def _warm_up_policy(
    run: Run, params: Params
) -> tuple[Params, Reference | None, DraftHeadState | None]:
    """Warm up the policy; return what is trained later, the reference and the draft head, if any.

    params: as returned by `build`; may be donated. A warm-up trains what is trained later, except
    that it trains all weights of a randomly initialized policy: there is nothing to adapt yet.
    """
    config = run.config
    model = run.model
    warm = config.sft.steps > 0
    tokenizer = run.responder.tokenizer
    adapts = model.lora and config.model.source
    draft_head = None
    if warm and not adapts:
        update_spec = dataclasses.replace(run.update_spec, model=model.replace(lora=None))
        params, draft_head = warm_up(config, update_spec, params, tokenizer, run.dataset)
    if model.lora is None:
        reference = None
        if config.algorithm.kl_coef:
            reference = Reference(jax.tree.map(jnp.copy, params), saved=warm)
        return params, reference, draft_head
    base_params = lora.freeze(model, params)
    adapters = lora.init_adapters(model, run.key)
    if not (warm and adapts):
        return adapters, Reference(base_params, saved=warm), draft_head
    adapters, draft_head = warm_up(
        config, run.update_spec, adapters, tokenizer, run.dataset, base_params
    )
    return adapters, Reference(base_params, False, jax.tree.map(jnp.copy, adapters)), draft_head


def _reference_to_restore(run: Run, params: Params) -> Reference | None:
    """Return the reference of a resumed run, without what its checkpoint contains."""
    config = run.config
    warm = config.sft.steps > 0
    if run.model.lora is None:
        return Reference(params, saved=warm) if config.algorithm.kl_coef else None
    base_params = lora.freeze(run.model, params)
    if warm and config.model.source:
        return Reference(base_params, False, lora.abstract_adapters(run.model))
    return Reference(base_params, saved=warm)


def resume(
    run: Run, params: Params, checkpoints: Checkpointer, step: int | None = None
) -> RunState:
    """Return a checkpoint's state, bit for bit.

    params: as returned by `build`. step: None for the newest; another run's checkpoint may have
    another `algorithm.kl_coef`: a reference that this run does not need is dropped, a missing one
    is made again.
    """
    reference = _reference_to_restore(run, params)
    saved = step is None or checkpoints.holds(step, "reference")
    is_reference = reference is not None and not (saved and reference.saved)
    origin = RunOrigin.of(run, params, is_reference)
    base_params = reference.params if run.model.lora else None
    init = functools.partial(init_policy_state, run.update_spec)
    policy_state = jax.eval_shape(init, abstract_trained(run.model), base_params)
    state = _new_state(run, policy_state, origin, reference)
    like = state.arrays()
    if step is None:
        step, arrays, host = checkpoints.restore_newest(like)
    else:
        if not saved:
            like.pop("reference", None)
        arrays, host = checkpoints.restore(step, like, partial=True)
    state.restore(host, arrays)
    if reference is not None and not saved and run.config.sft.steps:
        print("the checkpoint has no reference for the KL penalty: it is recreated", flush=True)
        _, state.reference, _ = _warm_up_policy(run, params)
    choices = [x for x in (state.rollout.speculation, state.rollout.verification) if x]
    if choices and host["machine"] != machine():
        print(f"rollout: now on {machine()}, was on {host['machine']}")
        for choice in choices:
            choice.seconds = None  # to be timed again
    print(f"resumed at step {step} of {run.total_steps}", flush=True)
    if line := rate_jump(run, state):
        print(line, flush=True)
    return state


def _new_state(
    run: Run, policy_state: PolicyState, origin: RunOrigin, reference: Reference | None
) -> RunState:
    """Return an empty state with every part that the configuration needs."""
    with jax.set_mesh(run.rollout_mesh):
        rollout = _new_rollout_state(run)
    return RunState(
        policy_state=policy_state,
        rollout=rollout,
        batches=run.batches_type(run, rollout.stream),
        origin=origin,
        reference=reference,
    )


def _new_rollout_state(run: Run) -> RolloutState:
    config = run.config
    settings = config.rollout
    state = RolloutState(
        key=move(run.key, run.rollout_mesh),
        stream=make_stream(config, run.prompts, run.total_steps),
        store=_draft_store(run),
        reused_noise=ReusedNoise(
            noise_visits(config),
            settings.noise_refresh,
            run.rollout_spec.group_size,
            needs_signal=not has_critic(config.critic.kind),
        ),
    )
    if settings.adaptive and DRAFT_SOURCES[settings.draft].proposes:
        state.speculation = Speculation()
    if settings.adaptive and _may_skip_drafts(run):
        state.verification = Verification()
    state.collector = run.collector_type(run)
    return state


def _may_skip_drafts(run: Run) -> bool:
    """Return whether rollouts verify drafts, and rows have the same tokens without them."""
    verifies = run.collector_type.has_drafts(run.config)
    return verifies and run.rollout_spec.accept.samples_every_token


def _draft_store(run: Run) -> DraftStore:
    model = run.model
    sizes = f"{model.num_layers} x {model.embed_dim}, {model.vocab_size} tokens"
    policy = f"{run.config.model.source or 'from nothing'} ({model.family}, {sizes})"
    owner = {"tokenizer": run.responder.tokenizer.fingerprint, "model": policy}
    shape = store_shape(run.config, run.rollout_spec, len(run.prompts.lens))
    return DraftStore(shape, max_age=run.config.rollout.store_age, owner=owner)


def store_shape(config, spec: RolloutSpec, prompts: int) -> StoreShape:
    """Return the draft store's shape for `prompts` training prompts."""
    settings = config.rollout
    parts = settings.group_size // spec.group_size
    return StoreShape(
        prompts=(settings.store_prompts or prompts) * parts,
        samples=spec.group_size,
        response_slots=settings.response_len,
        generations=settings.draft_age,
        history=spec.draft_history,
        logprobs=not spec.accept.samples_every_token,
        k=spec.stored_logprobs if spec.accept.needs_distribution or spec.keeps_accepted else 0,
    )
