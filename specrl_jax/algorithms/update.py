"""Optimizer step: log-probs under the current weights → losses → gradients → AdamW.

A mini-batch is a set of packed rows of the step's `Batch`. The gradients of its micro-batches are
added, so the result does not depend on how it is split.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specrl_jax.algorithms.draft_training import head_gradients
from specrl_jax.algorithms.losses import (
    AGGREGATIONS,
    OBJECTIVES,
    policy_loss,
    value_loss,
)
from specrl_jax.algorithms.scoring import (
    PackedRows,
    abstract_packed,
    logprobs,
    read_nodes,
    read_wide_nodes,
    slot_logprobs,
    slot_routing,
    slot_support,
)
from specrl_jax.algorithms.terms import LossTerm
from specrl_jax.algorithms.update_spec import Module, PolicyState, UpdateSpec
from specrl_jax.models.experts import balance_loss
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params
from specrl_jax.packing import Sequences
from specrl_jax.sharding import reshard, take_rows
from specrl_jax.types import Batch, Prompts, Rollout, Source

# float32 []; `head_overlap`: [depth]; a metric's name: [2], a total and its divisor.
Scalars = dict[str, Array]
Gradients = dict[str, Params]  # by name of a module


def make_batch(prompts: Prompts, rollout: Rollout) -> Batch:
    """Return a rollout in the layout of updates, with all advantages 0."""
    group_size = rollout.lens.shape[0] // len(prompts.lens)
    prompt_lens = np.repeat(prompts.lens, group_size)
    return _make_batch(np.repeat(prompts.tokens, group_size, axis=0), prompt_lens, rollout)


@jax.jit
def _make_batch(prompts_BP: Array, prompt_lens: Array, rollout: Rollout) -> Batch:
    """Make the batch from prompts on the host, with one program for all arrays."""
    prompt_lens = reshard(prompt_lens, "batch")
    tokens = rollout.tokens
    return Batch(
        tokens=join(reshard(prompts_BP, "batch", None), prompt_lens, tokens.ids),
        prompt_lens=prompt_lens,
        response_lens=rollout.lens,
        old_logprobs=tokens.policy_logprobs,
        from_environment=tokens.sources == Source.ENVIRONMENT,
        routing=tokens.routing,
        advantages=jnp.zeros_like(tokens.policy_logprobs),
    )


@jax.jit
def join(prompts_BP: Array, prompt_lens: Array, responses_BR: Array) -> Array:
    """Return tokens [B, P + R]: every response right after its prompt."""
    padded = jnp.pad(prompts_BP, ((0, 0), (0, responses_BR.shape[1])))

    def join_row(row: Array, response: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, response, start, axis=0)

    return jax.vmap(join_row)(padded, responses_BR, prompt_lens)


@functools.partial(jax.jit, static_argnums=0, static_argnames="critic_only", donate_argnums=1)
def update(
    update_spec: UpdateSpec,
    state: PolicyState,
    batch: Batch,
    packed: PackedRows,
    base_params: Params | None = None,
    frozen: Params | None = None,
    *,
    critic_only: bool = False,
) -> tuple[PolicyState, Scalars]:
    """Take one optimizer step on the packed rows of a batch, the mini-batch.

    Rows left out of the packing count in the mean of the loss, as tokens without gradient.

    base_params: with adapters, the weights that they modify.
    frozen: other weights that are not trained, for loss terms.
    critic_only: train only the critic and the draft head. The policy's weights and its whole
    optimizer state (moments, step count) stay as they are.

    Returns the new state and scalars: `loss` of the policy, `grad_norm` (before clipping),
    `weight_norm` and `moments` (see `_sizes`) after the update, the last three also as `critic_*`
    and `head_*`; and the sums of `policy_loss`, `value_loss`, `head_gradients` and the objective.
    """
    grads, scalars = _gradients(
        update_spec, state, take_rows(batch, packed.row_ids), packed, base_params, frozen
    )
    before = state
    for name, training in update_spec.trained.items():
        scalars[f"{training.prefix}grad_norm"] = optax.tree.norm(grads[name])
        if not (critic_only and name == "policy"):
            module = training.step(state.modules[name], grads[name], scalars)
            state = state.replace(**{name: module})
    if update_spec.skip_nonfinite:
        must_be_finite = [
            x
            for name, x in scalars.items()
            if name.endswith(("loss", "grad_norm")) and "/" not in name
        ]
        finite = jnp.all(jnp.isfinite(jnp.stack(must_be_finite)))
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), state, before)
    for name, training in update_spec.trained.items():
        norm, moments = _sizes(state.modules[name])
        scalars[f"{training.prefix}weight_norm"] = norm
        scalars[f"{training.prefix}moments"] = moments
    return state, scalars


def update_inputs(
    update_spec: UpdateSpec,
    state: PolicyState,
    batch: Batch,
    num_rows: int,
    base_params: Params | None,
    frozen: Params | None = None,
) -> tuple:
    """Return the inputs of `update` for mini-batches of `num_rows` rows."""
    packed = abstract_packed(update_spec, batch, num_rows)
    return update_spec, state, batch, packed, base_params, frozen


def _sizes(module: Module) -> tuple[Array, Array]:
    """Return the global norm of the weights, and the sum of the largest value of each moment.

    Not finite if an element is not, or if the squares of weights overflow float32.
    """
    leaves = jax.tree.leaves(module.opt_state)
    moments = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    largest = [jnp.max(jnp.abs(x)) for x in moments]
    return optax.tree.norm(module.params), sum(largest, start=jnp.float32(0))


def _gradients(
    update_spec: UpdateSpec,
    state: PolicyState,
    batch: Batch,
    packed: PackedRows,
    base_params: Params | None,
    frozen: Params | None,
) -> tuple[Gradients, Scalars]:
    """Return gradients and sums of a mini-batch, added over its micro-batches."""
    head = state.draft_head
    own_sums: Scalars = {}
    if prepare := OBJECTIVES[update_spec.loss.objective].prepare:
        policy = adapted(update_spec.model, state.policy.params, base_params)
        before = logprobs(update_spec, policy, packed, batch.support, batch.routing)
        batch, own_sums = prepare(batch, before, update_spec.loss)
    params = {name: module.params for name, module in state.modules.items()}
    by_loss = {name: params[name] for name in ("policy", "critic") if name in params}
    loss = _loss_of(update_spec, batch, packed, base_params, frozen)
    head_normalizer = jnp.sum(batch.mask & (packed.nodes >= 0))
    size = packed.sequences.tokens[0].size

    def differentiate(index: Array) -> tuple[Gradients, Scalars]:
        sequences = jax.tree.map(lambda x: x[index], packed.sequences)
        nodes = packed.nodes - index * size
        # Rows packed in other micro-batches get length 0 here, so their mask is empty.
        here = (nodes[:, 0] >= 0) & (nodes[:, 0] < size)
        part = dataclasses.replace(batch, response_lens=jnp.where(here, batch.response_lens, 0))
        grads, (sums, states) = jax.grad(loss, has_aux=True)(by_loss, part, sequences, nodes)
        if head is None:
            return grads, sums
        policy = adapted(update_spec.model, state.policy.params, base_params)
        head_grads, head_sums = head_gradients(
            update_spec, head, policy, sequences, states, nodes, part.mask, head_normalizer
        )
        return grads | {"draft_head": head_grads}, sums | head_sums

    def accumulate(index: Array, total: tuple[Gradients, Scalars]) -> tuple[Gradients, Scalars]:
        return jax.tree.map(jnp.add, total, differentiate(index))

    _, shapes = jax.eval_shape(lambda: differentiate(jnp.int32(0)))
    zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero_grads = jax.tree.map(jnp.zeros_like, params)
    grads, sums = jax.lax.fori_loop(0, packed.count, accumulate, (zero_grads, zero_sums))
    return grads, sums | own_sums


def _loss_of(
    update_spec: UpdateSpec,
    batch: Batch,
    packed: PackedRows,
    base_params: Params | None,
    frozen: Params | None,
) -> Callable[..., tuple]:
    """Return the loss of policy and critic for a part of the mini-batch, in the form of `jax.grad`.

    It is divided by the counts of the whole mini-batch, so parts add up. Sums and the policy's
    states are returned with it.
    """
    policy_normalizer = update_spec.loss_count
    if not policy_normalizer:
        policy_normalizer = AGGREGATIONS[update_spec.loss.aggregation].count(batch.mask)
    critic_normalizer = jnp.sum(batch.mask)
    terms = update_spec.loss.terms

    def loss(weights: Gradients, part: Batch, sequences: Sequences, nodes: Array) -> tuple:
        policy = adapted(update_spec.model, weights["policy"], base_params)
        support = slot_support(part.support, nodes, sequences)
        routing = slot_routing(part.routing, nodes, sequences)
        term_inputs, shared = _term_inputs(terms, part, frozen, sequences, nodes)
        slots, states, load = slot_logprobs(
            update_spec,
            policy,
            weights.get("critic"),
            sequences,
            support,
            term_inputs,
            shared,
            routing,
        )
        rows = read_nodes(slots._replace(terms=()), nodes)
        read = read_wide_nodes(slots.terms, nodes)
        total, sums = policy_loss(
            rows.logprobs, rows.entropy, part, update_spec.loss, policy_normalizer, read
        )
        sums["loss"] = total
        if load is not None:
            balance = balance_loss(load) / packed.count
            total = total + update_spec.balance_coef * balance
            sums |= {"balance_loss": balance, "expert_tokens": load.tokens}
        if rows.values is not None:
            critic = update_spec.critic
            error, critic_sums = value_loss(rows.values, part, critic.clip, critic_normalizer)
            total = total + critic.coef * error
            sums = sums | critic_sums
        return total, (sums, states)

    return loss


def _term_inputs(
    terms: tuple[LossTerm, ...],
    batch: Batch,
    frozen: Params | None,
    sequences: Sequences,
    nodes_nR: Array,
) -> tuple[tuple, tuple]:
    """Return the inputs of each term's `read`, per slot and whole; without gradient."""
    by_slot = []
    shared = []
    for term in terms:
        columns = {x: slot_support(batch.extra[x], nodes_nR, sequences) for x in term.by_slot}
        by_slot.append(term.token_inputs(frozen, sequences, columns))
        shared.append(term.shared(frozen))
    return jax.lax.stop_gradient((tuple(by_slot), tuple(shared)))
