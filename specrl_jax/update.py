"""The optimizer step: log-probs under the current weights, the GRPO loss, AdamW.

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

from specrl_jax.losses import loss_normalizer, policy_loss
from specrl_jax.masked import masked_mean
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.logprobs import entropy, map_tokens, token_logprobs
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.sharding import put, spec, take_rows
from specrl_jax.types import Batch, Prompts, Rollout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Master weights (float32, stored layout) and the optimizer's state."""

    params: Params
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Loss:
    """Settings of the update's program; hashable. Fields as in `config.grpo`, and the length that
    "constant" divides by: the longest response."""

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
class Learner:
    """What the update is compiled for. temperature: the rollout's, since old log-probs have it."""

    model: ModelConfig
    loss: Loss
    optimizer: optax.GradientTransformation
    temperature: float
    logits_chunk: int
    micro_batch_size: int  # rows; 0: the whole mini-batch


def make_learner(config, model: ModelConfig, schedule: optax.Schedule) -> Learner:
    """The update that `config.grpo` and `config.updates` ask for."""
    return Learner(
        model=model,
        loss=Loss(
            **{f.name: config.grpo[f.name] for f in dataclasses.fields(Loss)[:-1]},
            length=config.rollout.response_len,
        ),
        optimizer=make_optimizer(config.updates, schedule),
        temperature=config.rollout.temperature,
        logits_chunk=config.rollout.logits_chunk,
        micro_batch_size=config.updates.micro_batch_size,
    )


def make_schedule(settings, total_updates: int) -> optax.Schedule:
    """Learning rate by optimizer step, from `config.updates`."""
    peak, ramp = settings.learning_rate, settings.schedule_warmup
    rest = max(total_updates - ramp, 1)
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest),
    }[settings.schedule]
    # Step n of the ramp has (n + 1) / ramp of the peak: the first update is not wasted at rate 0.
    rise = optax.linear_schedule(peak / max(ramp, 1), peak, max(ramp - 1, 1))
    return optax.join_schedules([rise, after], [ramp]) if ramp else after


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


def make_batch(
    prompts: Prompts, rollout: Rollout, advantages: Array, *, lengths: tuple[int, ...]
) -> Batch:
    """The rows of a rollout with their advantages [B], as the update reads them.

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
        advantages=jnp.tile(advantages[:, None], (1, slots)),
    )


def abstract_state(optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    """Shapes and layouts of `init_state(optimizer, params)`, for parameters that are abstract."""
    state = jax.eval_shape(lambda p: init_state(optimizer, p), params)
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
    """Log-prob and entropy [B, R] in nats of every response slot, with the rollout's temperature.

    Only the slots that predict a response go through the head: slot prompt_len - 1 + j predicts
    response token j.
    """
    model = Transformer(learner.model, params)
    hidden_BTD, _ = model(tokens_BT)

    def cut(row: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, start, response_slots, axis=0)

    hidden_BRD = jax.vmap(cut)(hidden_BTD, prompt_lens - 1)
    responses_BR = jax.vmap(cut)(tokens_BT, prompt_lens)

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

    def one(_, index: Array) -> tuple[None, Array]:
        rows = _rows(batch, index)
        scores, _ = response_logprobs(learner, params, rows.tokens, rows.prompt_lens, slots)
        return None, scores

    _, scores = jax.lax.scan(one, None, index_Mm)
    flat = jax.sharding.reshard(scores, jax.P(None, None, None)).reshape(-1, slots)
    return jax.sharding.reshard(flat, spec("batch", None))


@jax.jit
def logprob_gap(batch: Batch, logprobs_BR: Array) -> Array:
    """Mean |old_logprobs - logprobs| over the response tokens, nats."""
    mask = jnp.arange(logprobs_BR.shape[1])[None, :] < batch.response_lens[:, None]
    return masked_mean(jnp.abs(batch.old_logprobs - logprobs_BR), mask)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def update(
    learner: Learner, state: TrainState, batch: Batch, index_Mm: Array
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step on the rows `index` [M micro-batches, m rows] of a batch.

    Returns the new state and float32 scalars: `loss`, `grad_norm` (before clipping) and the sums
    of `losses.policy_loss` over the mini-batch.
    """
    slots = batch.old_logprobs.shape[1]
    lens = batch.response_lens.at[index_Mm.reshape(-1)].get(out_sharding=jax.P(None))
    whole = jnp.arange(slots)[None, :] < lens[:, None]
    normalizer = loss_normalizer(whole, how=learner.loss.aggregation)

    def loss(params: Params, rows: Batch) -> tuple[Array, dict[str, Array]]:
        scores, spread = response_logprobs(learner, params, rows.tokens, rows.prompt_lens, slots)
        return policy_loss(
            scores,
            spread,
            rows.old_logprobs,
            rows.advantages,
            jnp.arange(slots)[None, :] < rows.response_lens[:, None],
            rows.ref_logprobs,
            normalizer=normalizer,
            **dataclasses.asdict(learner.loss),
        )

    def accumulate(total, index: Array):
        (value, sums), grads = jax.value_and_grad(loss, has_aux=True)(
            state.params, _rows(batch, index)
        )
        return jax.tree.map(jnp.add, total, (grads, value, sums)), None

    shapes = jax.eval_shape(lambda: loss(state.params, _rows(batch, index_Mm[0])))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    start = (jax.tree.map(jnp.zeros_like, state.params), *zeros)
    (grads, value, sums), _ = jax.lax.scan(accumulate, start, index_Mm)
    updates, opt_state = learner.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **sums}
    return TrainState(params, opt_state), metrics


def micro_batches(rows: int, size: int) -> np.ndarray:
    """int32 [rows / size, size]: the rows 0 … rows - 1, cut into micro-batches."""
    return np.arange(rows, dtype=np.int32).reshape(-1, size or rows)


def _rows(batch: Batch, index: Array) -> Batch:
    return jax.tree.map(lambda x: take_rows(x, index, *(None,) * (x.ndim - 1)), batch)
