"""The optimizer step: log-probs under the current weights, the losses, AdamW.

A mini-batch is a set of row indices into the step's `Batch`; its micro-batches are scanned and
their gradients added, so that the result does not depend on how it is cut.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specrl_jax.algorithms.losses import loss_normalizer, policy_loss, value_loss
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.models import value
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.logprobs import entropy, map_tokens, token_logprobs
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.sharding import put, spec, take_rows
from specrl_jax.types import Batch, Prompts, Rollout, Source


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Master weights (float32, stored layout) and the optimizer's state; the same of a critic."""

    params: Params
    opt_state: Any
    critic: Params | None = None
    critic_opt_state: Any = None


@dataclasses.dataclass(frozen=True)
class Loss:
    """Settings of the update's program; hashable. Fields as in `config.algorithm`, and the length
    that "constant" divides by: the longest response."""

    aggregation: str
    clip_low: float
    clip_high: float
    dual_clip: float
    kl_coef: float
    kl_estimator: str
    entropy_coef: float
    objective: str = "clip"
    ratio: str = "token"
    length: int = 0


@dataclasses.dataclass(frozen=True)
class Critic:
    """A value function that is trained beside the policy; fields as in `config.critic`."""

    kind: str
    coef: float
    clip: float
    optimizer: optax.GradientTransformation


@dataclasses.dataclass(frozen=True)
class Learner:
    """What the update is compiled for. temperature: the rollout's, since old log-probs have it."""

    model: ModelConfig
    loss: Loss
    optimizer: optax.GradientTransformation
    temperature: float
    logits_chunk: int
    micro_batch_size: int  # rows; 0: the whole mini-batch
    critic: Critic | None = None


def make_learner(config, model: ModelConfig, schedule: optax.Schedule) -> Learner:
    """The update that `config.algorithm`, `config.updates` and `config.critic` ask for."""
    critic, settings = None, config.critic
    if settings.kind != "none":
        ramp = _ramp(settings.learning_rate, settings.schedule_warmup)
        schedule_of_it = optax.join_schedules(
            [ramp, optax.constant_schedule(settings.learning_rate)], [settings.schedule_warmup]
        )
        optimizer = make_optimizer(config.updates, schedule_of_it)
        critic = Critic(settings.kind, settings.coef, settings.clip, optimizer)
    return Learner(
        model=model,
        loss=Loss(
            **{f.name: config.algorithm[f.name] for f in dataclasses.fields(Loss)[:-1]},
            length=config.rollout.response_len,
        ),
        optimizer=make_optimizer(config.updates, schedule),
        temperature=config.rollout.temperature,
        logits_chunk=config.rollout.logits_chunk,
        micro_batch_size=config.updates.micro_batch_size,
        critic=critic,
    )


def make_schedule(settings, total_updates: int, frozen: int = 0) -> optax.Schedule:
    """Learning rate by optimizer step, from `config.updates`; 0 for the first `frozen` ones."""
    if frozen:
        rest = make_schedule(settings, max(total_updates - frozen, 1))
        return optax.join_schedules([optax.constant_schedule(0.0), rest], [frozen])
    peak, ramp = settings.learning_rate, settings.schedule_warmup
    rest = max(total_updates - ramp, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[settings.schedule]
    return optax.join_schedules([_ramp(peak, ramp), after], [ramp]) if ramp else after


def _ramp(peak: float, steps: int) -> optax.Schedule:
    # Step n has (n + 1) / steps of the peak: the first update is not wasted at rate 0.
    return optax.linear_schedule(peak / max(steps, 1), peak, max(steps - 1, 1))


def make_optimizer(settings, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (arXiv 1711.05101)."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    adamw = optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
    )
    return optax.chain(clip, adamw)


@functools.partial(jax.jit, static_argnums=0)
def init_state(optimizer: optax.GradientTransformation, params: Params) -> TrainState:
    return TrainState(params, optimizer.init(params))


def begin_state(learner: Learner, params: Params) -> TrainState:
    """The state before the first update; a critic of its own decoder begins as the policy."""
    state = init_state(learner.optimizer, params)
    if learner.critic is None:
        return state
    critic = value.init_critic(learner.model, learner.critic.kind, params)
    opt_state = init_state(learner.critic.optimizer, critic).opt_state
    return dataclasses.replace(state, critic=critic, critic_opt_state=opt_state)


def make_batch(
    prompts: Prompts, rollout: Rollout, advantages: Array | None, *, lengths: tuple[int, ...]
) -> Batch:
    """The rows of a rollout with their advantages [B] (None: zeros), as the update reads them.

    Responses are cut to the shortest of `lengths` that holds them all, so that the
    update is compiled for a few lengths and short responses cost little.
    """
    longest = int(jax.device_get(jnp.max(rollout.lens)))
    slots = min(length for length in lengths if length >= longest)
    group = rollout.lens.shape[0] // len(prompts.lens)
    prompt_lens = put(np.repeat(prompts.lens, group), "batch")
    tokens = put(np.repeat(prompts.tokens, group, axis=0), "batch", None)
    return Batch(
        tokens=pack(tokens, prompt_lens, rollout.tokens, response_slots=slots),
        prompt_lens=prompt_lens,
        response_lens=rollout.lens,
        old_logprobs=rollout.policy_logprobs[:, :slots],
        forced=rollout.sources[:, :slots] == Source.FORCED,
        advantages=(
            jnp.zeros_like(rollout.policy_logprobs[:, :slots])
            if advantages is None
            else jnp.tile(advantages[:, None], (1, slots))
        ),
    )


def abstract_state(learner: Learner, params: Any) -> TrainState:
    """Shapes and layouts of `begin_state(learner, params)`, for parameters that are abstract."""
    state = jax.eval_shape(lambda p: init_state(learner.optimizer, p), params)
    if learner.critic is not None:
        critic = value.abstract_critic(learner.model, learner.critic.kind)
        beside = jax.eval_shape(lambda p: init_state(learner.critic.optimizer, p), critic)
        state = dataclasses.replace(state, critic=critic, critic_opt_state=beside.opt_state)
    whole = jax.sharding.NamedSharding(jax.sharding.get_mesh(), jax.P())

    def laid_out(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Step counters depend on no parameter and so have no layout: whole on every device.
        return (
            leaf if leaf.sharding else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole)
        )

    return jax.tree.map(laid_out, state)


@functools.partial(jax.jit, static_argnames="response_slots")
def pack(
    prompts_BP: Array, prompt_lens: Array, responses_BR: Array, *, response_slots: int
) -> Array:
    """tokens [B, P + R']: every response right behind its prompt, cut to R' = response_slots."""
    wide = jnp.pad(prompts_BP, ((0, 0), (0, response_slots)))

    def join(row: Array, response: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, response, start, axis=0)

    return jax.vmap(join)(wide, responses_BR[:, :response_slots], prompt_lens)


def response_logprobs(
    learner: Learner, params: Params, tokens_BT: Array, prompt_lens: Array, response_slots: int
) -> tuple[Array, Array]:
    """Log-prob and entropy [B, R] in nats of the response slots, at the rollout's temperature."""
    model = Transformer(learner.model, params)
    hidden_BRD = _response_hidden(model, tokens_BT, prompt_lens, response_slots)
    return _score(learner, model, hidden_BRD, tokens_BT, prompt_lens)


def _response_hidden(
    model: Transformer, tokens_BT: Array, prompt_lens: Array, response_slots: int
) -> Array:
    """[B, R, D], of the slots that predict a response alone: slot prompt_len - 1 + j predicts
    response token j, and holds the state that it is chosen in."""
    hidden_BTD, _ = model(tokens_BT)
    return _cut(hidden_BTD, prompt_lens - 1, response_slots)


def _cut(matrix: Array, starts: Array, width: int) -> Array:
    def cut(row: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, start, width, axis=0)

    return jax.vmap(cut)(matrix, starts)


def _score(
    learner: Learner, model: Transformer, hidden_BRD: Array, tokens_BT: Array, prompt_lens: Array
) -> tuple[Array, Array]:
    responses_BR = _cut(tokens_BT, prompt_lens, hidden_BRD.shape[1])

    def score(logits: Array, tokens: Array) -> tuple[Array, Array]:
        logits = logits / learner.temperature
        return token_logprobs(logits, tokens), entropy(logits)

    return map_tokens(score, model, hidden_BRD, responses_BR, learner.logits_chunk)


@functools.partial(jax.jit, static_argnums=0)
def logprobs(learner: Learner, params: Params, batch: Batch, index_Mm: Array) -> Array:
    """Log-probs [B, R] of a whole batch, micro-batch by micro-batch (reference, old policy).

    index: int32 [M, m], the rows 0 … B - 1 in order.
    """
    slots = batch.old_logprobs.shape[1]

    def one(rows: Batch) -> Array:
        return response_logprobs(learner, params, rows.tokens, rows.prompt_lens, slots)[0]

    return _in_pieces(one, batch, index_Mm)


@functools.partial(jax.jit, static_argnums=0)
def critic_values(learner: Learner, state: TrainState, batch: Batch, index_Mm: Array) -> Array:
    """The critic's values [B, R] of a whole batch: column j is of the state before token j.

    index: as in `logprobs`.
    """

    def one(rows: Batch) -> Array:
        hidden = None
        if learner.critic.kind == "head":
            model = Transformer(learner.model, state.params)
            slots = rows.old_logprobs.shape[1]
            hidden = _response_hidden(model, rows.tokens, rows.prompt_lens, slots)
        return _values(learner, state.critic, rows, hidden)

    return _in_pieces(one, batch, index_Mm)


def _values(learner: Learner, critic: Params, rows: Batch, hidden_BRD: Array | None) -> Array:
    """[B, R]; hidden: the policy's, which a critic of its own decoder does not read."""
    if learner.critic.kind == "network":
        model = value.decoder(learner.model, critic)
        slots = rows.old_logprobs.shape[1]
        hidden_BRD = _response_hidden(model, rows.tokens, rows.prompt_lens, slots)
    return value.values(critic, hidden_BRD)


def _in_pieces(function, batch: Batch, index_Mm: Array) -> Array:
    """`function(rows)` [m, R] over micro-batches, as [B, R]."""
    _, found = jax.lax.scan(lambda _, i: (None, function(_rows(batch, i))), None, index_Mm)
    flat = jax.sharding.reshard(found, jax.P(None, None, None)).reshape(-1, found.shape[-1])
    return jax.sharding.reshard(flat, spec("batch", None))


@jax.jit
def logprob_gap(batch: Batch, logprobs_BR: Array) -> Array:
    """Mean |old_logprobs - logprobs| over the response tokens, nats."""
    return masked_mean(jnp.abs(batch.old_logprobs - logprobs_BR), batch.mask)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(
    learner: Learner, state: TrainState, batch: Batch, index_Mm: Array
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step on the rows `index` [M micro-batches, m rows] of a batch.

    Returns the new state and float32 scalars: `loss` of the policy, `grad_norm` (before clipping)
    and the sums of `losses.policy_loss` over the mini-batch; with a critic also `critic_grad_norm`
    and the sums of `losses.value_loss`.
    """
    slots = batch.old_logprobs.shape[1]
    whole = batch.mask.at[index_Mm.reshape(-1)].get(out_sharding=jax.P(None, None))
    normalizer = loss_normalizer(whole, how=learner.loss.aggregation)

    def loss(params: Params, critic: Params | None, rows: Batch) -> tuple[Array, dict[str, Array]]:
        model = Transformer(learner.model, params)
        hidden = _response_hidden(model, rows.tokens, rows.prompt_lens, slots)
        scores, spread = _score(learner, model, hidden, rows.tokens, rows.prompt_lens)
        mask = rows.mask
        total, sums = policy_loss(
            scores,
            spread,
            rows.old_logprobs,
            rows.advantages,
            mask,
            rows.ref_logprobs,
            rows.weights,
            normalizer=normalizer,
            **dataclasses.asdict(learner.loss),
        )
        sums["loss"] = total
        if critic is not None:
            estimates = _values(learner, critic, rows, hidden)
            targets = (rows.values, rows.returns, mask)
            error, more = value_loss(
                estimates, *targets, clip=learner.critic.clip, normalizer=jnp.sum(whole)
            )
            total, sums = total + learner.critic.coef * error, sums | more
        return total, sums

    both = (state.params, state.critic)

    def accumulate(total, index: Array):
        (_, sums), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
            *both, _rows(batch, index)
        )
        return jax.tree.map(jnp.add, total, (grads, sums)), None

    _, shapes = jax.eval_shape(lambda: loss(*both, _rows(batch, index_Mm[0])))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = (jax.tree.map(jnp.zeros_like, both), zeros)
    ((grads, critic_grads), metrics), _ = jax.lax.scan(accumulate, start, index_Mm)
    metrics["grad_norm"] = optax.tree.norm(grads)
    state = dataclasses.replace(
        state, **_step(learner.optimizer, grads, state.params, state.opt_state)
    )
    if learner.critic is not None:
        metrics["critic_grad_norm"] = optax.tree.norm(critic_grads)
        new = _step(learner.critic.optimizer, critic_grads, state.critic, state.critic_opt_state)
        state = dataclasses.replace(state, critic=new["params"], critic_opt_state=new["opt_state"])
    return state, metrics


def _step(optimizer: optax.GradientTransformation, grads, params, opt_state) -> dict[str, Any]:
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}


def micro_batches(rows: int, size: int) -> np.ndarray:
    """int32 [rows / size, size]: the rows 0 … rows - 1, cut into micro-batches."""
    return np.arange(rows, dtype=np.int32).reshape(-1, size or rows)


def _rows(batch: Batch, index: Array) -> Batch:
    return jax.tree.map(lambda x: take_rows(x, index, *(None,) * (x.ndim - 1)), batch)
