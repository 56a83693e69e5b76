"""Settings of the update (`UpdateSpec`), state it changes (`PolicyState`), and its optimizer."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.algorithms.corrections import masks_from
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.config.fields import filled
from specrl_jax.models import lora
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import init_draft_head
from specrl_jax.models.transformer import Params, init_critic
from specrl_jax.registry import Table, all_chosen
from specrl_jax.sharding import axes, reshard, shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Module:
    """Trained weights with their training state."""

    params: Params  # float32, stored layout; the policy's: all weights, or adapters
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftHeadState(Module):
    """Draft head with its training state."""

    overlap: Array  # float32 [depth], mean Σ min(p, q) of the last update, by token of a draft
    counts: Array | None  # int32 [V], response tokens so far; None: it drafts all tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyState:
    """Everything trained, by name: "policy", and "critic" and "draft_head" if there are any."""

    modules: dict[str, Module]

    @property
    def policy(self) -> Module:
        return self.modules["policy"]

    @property
    def draft_head(self) -> DraftHeadState | None:
        return self.modules.get("draft_head")

    def replace(self, **modules: Module) -> "PolicyState":
        """Return the state with the modules of these names replaced."""
        return PolicyState(self.modules | modules)


@dataclasses.dataclass(frozen=True)
class Training:
    """How a module is trained; this class: the policy. Hashable."""

    optimizer: optax.GradientTransformation

    prefix: ClassVar[str] = ""  # of its scalars
    rate: ClassVar[str] = "updates.learning_rate"  # field of its learning rate

    def start(self, model: ModelConfig, policy: Params) -> Module:
        """Return the module before its first update; policy: all weights of the policy."""
        raise NotImplementedError

    def step(self, module: Module, grads: Params, scalars: Mapping[str, Array]) -> Module:
        """Return the module after an update; scalars: of the mini-batch."""
        updates, opt_state = self.optimizer.update(grads, module.opt_state, module.params)
        params = optax.apply_updates(module.params, updates)
        return dataclasses.replace(module, params=params, opt_state=opt_state)

    def metrics(self, total: Callable[[str], Any]) -> dict[str, Any]:
        """Return its own metrics from a step's scalars; total: adds those of a name."""
        return {}


@dataclasses.dataclass(frozen=True)
class Critic(Training):
    """A value function trained alongside the policy; fields as in `config.critic`."""

    kind: str
    coef: float
    clip: float

    prefix = "critic_"
    rate = "critic.learning_rate"

    def start(self, model: ModelConfig, policy: Params) -> Module:
        params = init_critic(model, self.kind, policy)
        return Module(params, jax.jit(self.optimizer.init)(params))

    def metrics(self, total):
        tokens = max(total("tokens"), 1)  # a batch may have none
        return {"critic/clip_fraction": total("critic_clipped") / tokens}


@dataclasses.dataclass(frozen=True)
class DraftHeadTraining(Training):
    """How the draft head is trained; fields as in `config.rollout.head`."""

    depth: int
    vocab: int

    prefix = "head_"
    rate = "rollout.head.learning_rate"

    def start(self, model: ModelConfig, policy: Params) -> DraftHeadState:
        params = init_draft_head(model, policy)
        opt_state = jax.jit(self.optimizer.init)(params)
        counts = None
        if self.vocab:
            # Tokens that are never sampled rank last.
            counts = jnp.zeros(model.vocab_size, jnp.int32)
            for first, stop in model.unused_ids:
                counts = counts.at[first:stop].set(-1)
            counts = reshard(counts, None)
        overlap = jnp.zeros(self.depth, jnp.float32, out_sharding=axes(None))
        return DraftHeadState(params, opt_state, overlap, counts)

    def step(self, module, grads, scalars):
        tokens = scalars["head_tokens"]
        overlap = scalars["head_overlap"] / jnp.maximum(tokens, 1)
        overlap = jnp.where(tokens > 0, overlap, module.overlap)
        return dataclasses.replace(super().step(module, grads, scalars), overlap=overlap)

    def metrics(self, total):
        tokens = max(total("head_tokens"), 1)
        return {"draft_head/overlap": total("head_overlap")[0] / tokens}


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """Settings of the update's programs; hashable."""

    model: ModelConfig
    loss: LossConfig
    optimizer: optax.GradientTransformation
    temperature: float  # of the rollout, whose log-probs are the old ones
    logits_chunk: int  # tokens
    micro_batch_size: int  # maximum number of maximum-length rows at a time; 0: no bound
    packing: str = "trie"  # key of PACKINGS
    critic: Critic | None = None
    draft_head: DraftHeadTraining | None = None
    loss_count: int = 0  # divisor of the policy's loss; 0: the aggregation's count
    balance_coef: float = 0.0  # of the balance loss of a mixture's routers
    skip_nonfinite: bool = False  # keep the state if loss or gradients are not finite

    @property
    def trained(self) -> dict[str, Training]:
        """Return how each module of `PolicyState` is trained, by name."""
        policy = Training(self.optimizer)
        modules = {"policy": policy, "critic": self.critic, "draft_head": self.draft_head}
        return {name: training for name, training in modules.items() if training}


def make_update_spec(
    config,
    model: ModelConfig,
    schedule: optax.Schedule,
    has_draft_head: bool = False,
    frozen: ModelConfig | None = None,
) -> UpdateSpec:
    """Return the update that `config.algorithm`, `config.updates` and `config.critic` describe.

    has_draft_head: the rollout drafts with a learned head. frozen: shape of the run's other, frozen
    weights. Raises a one-line ValueError if the model or the mesh does not support these settings.
    """
    _of_mixture(model, "updates.replay_routing", config.updates.replay_routing)
    return UpdateSpec(
        model=model,
        loss=_make_loss_config(config, frozen),
        optimizer=make_optimizer(config.updates, schedule),
        temperature=config.rollout.temperature,
        logits_chunk=config.updates.logits_chunk,
        micro_batch_size=config.updates.micro_batch_size,
        packing=config.updates.packing,
        critic=_make_critic(config) if has_critic(config.critic.kind) else None,
        draft_head=_make_head_training(config, model) if has_draft_head else None,
        loss_count=max((x.loss_count(config) for x in all_chosen(config, "STAGE")), default=0),
        balance_coef=_of_mixture(model, "algorithm.balance_coef", config.algorithm.balance_coef),
        skip_nonfinite=config.updates.skip_nonfinite > 0,
    )


def _make_loss_config(config, frozen: ModelConfig | None) -> LossConfig:
    return filled(
        LossConfig,
        config.algorithm,
        masks=masks_from(config.algorithm.mask),
        terms=tuple(term.from_config(config, frozen) for term in all_chosen(config, "LOSS_TERM")),
        old_logprobs=config.updates.old_logprobs,
        group_size=config.rollout.group_size,
        max_response_len=config.rollout.response_len,
    )


def _of_mixture(model: ModelConfig, field: str, value: float) -> float:
    """Return the value of a field that only mixtures of experts have."""
    if value and model.dense:
        raise ValueError(
            f"{field} needs a mixture of experts, family {model.family} is not one; "
            f"add --config.{field}={type(value)()!r}, got {value!r}"
        )
    return value


def _make_critic(config) -> Critic:
    settings = config.critic
    rate = settings.learning_rate
    schedule = _after_ramp(optax.constant_schedule(rate), rate, settings.lr_warmup_steps)
    optimizer = make_optimizer(config.updates, schedule)
    return filled(Critic, settings, optimizer=optimizer)


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


# Names of the ways to choose the rows for updates. The stage behind each selects itself.
ROW_SELECTIONS: dict[str, Any] = Table("ROW_SELECTIONS", {"all": None})


def make_schedule(settings, total_updates: int) -> optax.Schedule:
    """Return the learning rate by optimizer step of the policy, from `config.updates`."""
    peak = settings.learning_rate
    ramp_steps = settings.lr_warmup_steps
    schedule = SCHEDULES[settings.lr_schedule](peak, max(total_updates - ramp_steps, 1))
    return _after_ramp(schedule, peak, ramp_steps)


def _after_ramp(schedule: optax.Schedule, peak: float, steps: int) -> optax.Schedule:
    if not steps:
        return schedule
    # Step n has (n + 1) / steps of the peak, so the first update is not wasted at rate 0.
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

    trained: all weights, or adapters of the weights `base_params`. draft_head: an already trained
    one; None: make a new one if the run has one.
    """
    modules = {"policy": Module(trained, jax.jit(update_spec.optimizer.init)(trained))}
    if draft_head is not None:
        modules["draft_head"] = draft_head
    policy = lora.adapted(update_spec.model, trained, base_params)
    for name, training in update_spec.trained.items():
        if name not in modules:
            modules[name] = training.start(update_spec.model, policy)
    return PolicyState(modules)
