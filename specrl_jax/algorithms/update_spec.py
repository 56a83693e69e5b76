"""Settings of the update (`UpdateSpec`), what it changes (`PolicyState`), and its optimizer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.algorithms.corrections import masks_from
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.models import lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import init_draft_head
from specrl_jax.models.transformer import Params, init_critic
from specrl_jax.sharding import axes, reshard, shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftHeadState:
    """Draft head, with what its training keeps."""

    params: Params  # float32, stored layout
    opt_state: Any
    overlap: Array  # float32 [depth], mean Σ min(p, q) of the last update, by token of a draft
    counts: Array | None  # int32 [V], tokens of responses so far; None: it drafts all tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyState:
    """Weights and optimizer states of the policy, its critic and its draft head."""

    params: Params  # float32, stored layout; all weights, or adapters of base weights
    opt_state: Any
    critic: Params | None = None
    critic_opt_state: Any = None
    draft_head: DraftHeadState | None = None


@dataclasses.dataclass(frozen=True)
class Critic:
    """A value function that is trained beside the policy; fields as in `config.critic`."""

    kind: str
    coef: float
    clip: float
    optimizer: optax.GradientTransformation


@dataclasses.dataclass(frozen=True)
class DraftHeadTraining:
    """How the draft head is trained; fields as in `config.rollout.head`."""

    optimizer: optax.GradientTransformation
    depth: int
    vocab: int


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """Settings of the update's programs; hashable."""

    model: ModelConfig
    loss: LossConfig
    optimizer: optax.GradientTransformation
    temperature: float  # of the rollout, whose log-probs are the old ones
    logits_chunk: int  # tokens
    micro_batch_size: int  # rows of the longest length at once, at most; 0: no bound
    packing: str = "trie"  # key of PACKINGS
    critic: Critic | None = None
    draft_head: DraftHeadTraining | None = None
    token_budget: int = 0  # what the policy's loss is divided by; 0: the aggregation's count
    balance_coef: float = 0.0  # of the balance loss of a mixture's routers
    skip_nonfinite: bool = False  # leave the state as it is where loss or gradients are not finite


def make_update_spec(
    config, model: ModelConfig, schedule: optax.Schedule, has_draft_head: bool = False
) -> UpdateSpec:
    """Return the update that `config.algorithm`, `config.updates` and `config.critic` ask for.

    has_draft_head: the rollout drafts by a learned head. Raises ValueError in one line where the
    model or the mesh does not allow its settings.
    """
    return UpdateSpec(
        model=model,
        loss=_make_loss_config(config),
        optimizer=make_optimizer(config.updates, schedule),
        temperature=config.rollout.temperature,
        logits_chunk=config.updates.logits_chunk,
        micro_batch_size=config.updates.micro_batch_size,
        packing=config.updates.packing,
        critic=_make_critic(config) if has_critic(config.critic.kind) else None,
        draft_head=_make_head_training(config, model) if has_draft_head else None,
        token_budget=config.updates.token_budget,
        balance_coef=_balance_coef(config, model),
        skip_nonfinite=config.updates.skip_nonfinite > 0,
    )


def _make_loss_config(config) -> LossConfig:
    settings = config.algorithm
    return LossConfig(
        objective=settings.objective,
        ratio=settings.ratio,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        aggregation=settings.aggregation,
        kl_coef=settings.kl_coef,
        kl_estimator=settings.kl_estimator,
        entropy_coef=settings.entropy_coef,
        solution_coef=settings.solution_coef,
        importance_cap=settings.importance_cap,
        masks=masks_from(settings.mask),
        old_logprobs=config.updates.old_logprobs,
        group_size=config.rollout.group_size,
        max_response_len=config.rollout.response_len,
    )


def _balance_coef(config, model: ModelConfig) -> float:
    coef = config.algorithm.balance_coef
    if coef and model.dense:
        raise ValueError(
            f"algorithm.balance_coef needs a mixture of experts, family {model.family} is none; "
            f"add --config.algorithm.balance_coef=0, got {coef:g}"
        )
    return coef


def _make_critic(config) -> Critic:
    settings = config.critic
    rate = settings.learning_rate
    schedule = _after_ramp(optax.constant_schedule(rate), rate, settings.schedule_warmup)
    optimizer = make_optimizer(config.updates, schedule)
    return Critic(settings.kind, settings.coef, settings.clip, optimizer)


def _make_head_training(config, model: ModelConfig) -> DraftHeadTraining:
    settings = config.rollout.head
    pieces = shards("vocab")
    if settings.vocab > model.vocab_size or settings.vocab % pieces:
        raise ValueError(
            f"rollout.head.vocab must be 0 or a multiple of mesh.tensor = {pieces}, at most "
            f"{model.vocab_size}, the model's tokens, got {settings.vocab}"
        )
    schedule = optax.constant_schedule(settings.learning_rate)
    optimizer = make_optimizer(config.updates, schedule)
    return DraftHeadTraining(optimizer, settings.depth, settings.vocab)


SCHEDULES = {  # (peak, optimizer steps) → rate by step
    "constant": lambda peak, steps: optax.constant_schedule(peak),
    "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
    "cosine": lambda peak, steps: optax.cosine_decay_schedule(peak, steps),
}


def make_schedule(settings, total_updates: int) -> optax.Schedule:
    """Return the learning rate by optimizer step of the policy, from `config.updates`."""
    peak = settings.learning_rate
    ramp_steps = settings.schedule_warmup
    schedule = SCHEDULES[settings.schedule](peak, max(total_updates - ramp_steps, 1))
    return _after_ramp(schedule, peak, ramp_steps)


def _after_ramp(schedule: optax.Schedule, peak: float, steps: int) -> optax.Schedule:
    if not steps:
        return schedule
    # Step n has (n + 1) / steps of the peak: the first update is not wasted at rate 0.
    ramp = optax.linear_schedule(peak / steps, peak, max(steps - 1, 1))
    return optax.join_schedules([ramp, schedule], [steps])


def make_optimizer(settings, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return clipping by global norm, then AdamW (arXiv 1711.05101), from `config.updates`."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adamw = optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    return optax.chain(clip, adamw)


def init_policy_state(
    update_spec: UpdateSpec,
    trained: Params,
    base_params: Params | None = None,
    draft_head: DraftHeadState | None = None,
) -> PolicyState:
    """Return the state before the first update; a critic's own decoder starts as the policy's.

    trained: all weights, or adapters of the weights `base_params`. draft_head: one that is trained
    already; None: a new one, where there is to be any.
    """
    state = PolicyState(trained, jax.jit(update_spec.optimizer.init)(trained))
    model = update_spec.model
    policy = lora.adapted(model, trained, base_params)
    if update_spec.draft_head is not None:
        draft_head = draft_head or init_head_state(update_spec, policy)
        state = dataclasses.replace(state, draft_head=draft_head)
    if update_spec.critic is None:
        return state
    critic = init_critic(model, update_spec.critic.kind, policy)
    opt_state = jax.jit(update_spec.critic.optimizer.init)(critic)
    return dataclasses.replace(state, critic=critic, critic_opt_state=opt_state)


def init_head_state(update_spec: UpdateSpec, policy: Params) -> DraftHeadState:
    """Return the policy's draft head before its first update."""
    settings = update_spec.draft_head
    model = update_spec.model
    params = init_draft_head(model, policy)
    opt_state = jax.jit(settings.optimizer.init)(params)
    counts = None
    if settings.vocab:
        # Tokens that are never sampled come after all others.
        counts = jnp.zeros(model.vocab_size, jnp.int32)
        for first, stop in model.unused_ids:
            counts = counts.at[first:stop].set(-1)
        counts = reshard(counts, None)
    overlap = jnp.zeros(settings.depth, jnp.float32, out_sharding=axes(None))
    return DraftHeadState(params, opt_state, overlap, counts)
