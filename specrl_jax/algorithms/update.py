"""Optimizer step: log-probs under the current weights → losses → gradients → AdamW.

A mini-batch is a set of packed rows of the step's `Batch`. The gradients of its micro-batches are
added, so that the result does not depend on how it is cut.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specrl_jax.algorithms.draft_training import apply_gradients, head_gradients
from specrl_jax.algorithms.losses import AGGREGATIONS, compares_pairs, policy_loss, value_loss
from specrl_jax.algorithms.preference import weigh_pairs
from specrl_jax.algorithms.scoring import (
    PackedRows,
    abstract_packed,
    logprobs,
    read_nodes,
    slot_logprobs,
    slot_support,
)
from specrl_jax.algorithms.update_spec import PolicyState, UpdateSpec
from specrl_jax.models.experts import balance_loss
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params
from specrl_jax.packing import Sequences
from specrl_jax.sharding import reshard, take_rows
from specrl_jax.types import Batch, Prompts, Rollout, Source

Scalars = dict[str, Array]  # float32 [], but `head_overlap` [depth]
# Of the policy, the critic and the draft head.
Gradients = tuple[Params, Params | None, Params | None]


def make_batch(prompts: Prompts, rollout: Rollout, keep_mask: bool = False) -> Batch:
    """Return a rollout as the update reads it, all advantages 0.

    keep_mask: with the tokens that the sampler allowed, and log-probs among them.
    """
    group_size = rollout.lens.shape[0] // len(prompts.lens)
    prompt_lens = np.repeat(prompts.lens, group_size)
    return _make_batch(
        np.repeat(prompts.tokens, group_size, axis=0), prompt_lens, rollout, keep_mask
    )


@functools.partial(jax.jit, static_argnames="keep_mask")
def _make_batch(prompts_BP: Array, prompt_lens: Array, rollout: Rollout, keep_mask: bool) -> Batch:
    """Make the batch of prompts on the host by one program for all arrays."""
    prompt_lens = reshard(prompt_lens, "batch")
    tokens = rollout.tokens
    support = None
    if keep_mask:
        support = jnp.where(jnp.isneginf(tokens.top_logprobs), -1, tokens.top_ids)
    return Batch(
        tokens=join(reshard(prompts_BP, "batch", None), prompt_lens, tokens.ids),
        prompt_lens=prompt_lens,
        response_lens=rollout.lens,
        old_logprobs=tokens.sampling_logprobs if keep_mask else tokens.policy_logprobs,
        forced=tokens.sources == Source.FORCED,
        advantages=jnp.zeros_like(tokens.policy_logprobs),
        support=support,
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
    *,
    critic_only: bool = False,
) -> tuple[PolicyState, Scalars]:
    """Take one optimizer step on the packed rows of a batch, the mini-batch.

    Rows that are left out of the packing count in the mean of the loss, as tokens without gradient.

    base_params: where adapters are trained, the weights that they belong to.
    critic_only: the critic learns, and a draft head. The policy's weights and all of its
    optimizer's state (moments, step count) stay as they are.

    Returns the new state and scalars: `loss` of the policy, `grad_norm` (before clipping),
    `weight_norm` and `moments` (see `_sizes`) after the update, the last three also as `critic_*`
    and `head_*`; and the sums of `policy_loss`, `value_loss`, `head_gradients` and `weigh_pairs`.
    """
    before = state
    (grads, critic_grads, head_grads), scalars = _gradients(
        update_spec, state, take_rows(batch, packed.row_ids), packed, base_params
    )
    scalars["grad_norm"] = optax.tree.norm(grads)
    if not critic_only:
        params, opt_state = _apply(update_spec.optimizer, grads, state.params, state.opt_state)
        state = dataclasses.replace(state, params=params, opt_state=opt_state)
    if update_spec.critic is not None:
        scalars["critic_grad_norm"] = optax.tree.norm(critic_grads)
        critic, opt_state = _apply(
            update_spec.critic.optimizer, critic_grads, state.critic, state.critic_opt_state
        )
        state = dataclasses.replace(state, critic=critic, critic_opt_state=opt_state)
    if state.draft_head is not None:
        scalars["head_grad_norm"] = optax.tree.norm(head_grads)
        head = apply_gradients(update_spec, state.draft_head, head_grads, scalars)
        state = dataclasses.replace(state, draft_head=head)
    if update_spec.skip_nonfinite:
        must_be_finite = [x for name, x in scalars.items() if name.endswith(("loss", "grad_norm"))]
        finite = jnp.all(jnp.isfinite(jnp.stack(must_be_finite)))
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), state, before)
    sizes = _sizes(state.params, state.opt_state)
    scalars["weight_norm"], scalars["moments"] = sizes
    if update_spec.critic is not None:
        sizes = _sizes(state.critic, state.critic_opt_state)
        scalars["critic_weight_norm"], scalars["critic_moments"] = sizes
    if head := state.draft_head:
        sizes = _sizes(head.params, head.opt_state)
        scalars["head_weight_norm"], scalars["head_moments"] = sizes
    return state, scalars


def update_inputs(
    update_spec: UpdateSpec,
    state: PolicyState,
    batch: Batch,
    num_rows: int,
    base_params: Params | None,
) -> tuple:
    """Return the inputs of `update` for mini-batches of `num_rows` rows."""
    packed = abstract_packed(update_spec, batch, num_rows)
    return update_spec, state, batch, packed, base_params


def _sizes(params: Params, opt_state: Any) -> tuple[Array, Array]:
    """Return the global norm of the weights, and the sum of the largest of each of the moments.

    Not finite where an element is not, or where the squares of weights exceed float32.
    """
    moments = [x for x in jax.tree.leaves(opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
    largest = [jnp.max(jnp.abs(x)) for x in moments]
    return optax.tree.norm(params), sum(largest, start=jnp.float32(0))


def _gradients(
    update_spec: UpdateSpec,
    state: PolicyState,
    batch: Batch,
    packed: PackedRows,
    base_params: Params | None,
) -> tuple[Gradients, Scalars]:
    """Return gradients and sums of a mini-batch, added over its micro-batches."""
    head = state.draft_head
    pair_sums: Scalars = {}
    if compares_pairs(update_spec.loss.objective):
        policy = adapted(update_spec.model, state.params, base_params)
        before = logprobs(update_spec, policy, packed, batch.support)
        batch, pair_sums = weigh_pairs(batch, before, update_spec.loss)
    weights = (state.params, state.critic)
    policy_normalizer = update_spec.token_budget
    if not policy_normalizer:
        policy_normalizer = AGGREGATIONS[update_spec.loss.aggregation].count(batch.mask)
    critic_normalizer = jnp.sum(batch.mask)
    head_normalizer = jnp.sum(batch.mask & (packed.nodes >= 0))
    size = packed.sequences.tokens[0].size

    def loss(weights: tuple, part: Batch, sequences: Sequences, nodes: Array) -> tuple:
        trained, critic_params = weights
        params = adapted(update_spec.model, trained, base_params)
        support = slot_support(part.support, nodes, sequences)
        slots, states, load = slot_logprobs(update_spec, params, critic_params, sequences, support)
        rows = read_nodes(slots, nodes)
        total, sums = policy_loss(
            rows.logprobs, rows.entropy, part, update_spec.loss, policy_normalizer
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

    def differentiate(index: Array) -> tuple[Gradients, Scalars]:
        sequences = jax.tree.map(lambda x: x[index], packed.sequences)
        nodes = packed.nodes - index * size
        # Rows packed in other micro-batches get length 0 here, so that their mask is empty.
        here = (nodes[:, 0] >= 0) & (nodes[:, 0] < size)
        part = dataclasses.replace(batch, response_lens=jnp.where(here, batch.response_lens, 0))
        grads, (sums, states) = jax.grad(loss, has_aux=True)(weights, part, sequences, nodes)
        if head is None:
            return (*grads, None), sums
        policy = adapted(update_spec.model, state.params, base_params)
        head_grads, head_sums = head_gradients(
            update_spec, head, policy, sequences, states, nodes, part.mask, head_normalizer
        )
        return (*grads, head_grads), sums | head_sums

    def accumulate(index: Array, total: tuple[Gradients, Scalars]) -> tuple[Gradients, Scalars]:
        return jax.tree.map(jnp.add, total, differentiate(index))

    _, shapes = jax.eval_shape(lambda: differentiate(jnp.int32(0)))
    zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero_grads = jax.tree.map(jnp.zeros_like, (*weights, head and head.params))
    grads, sums = jax.lax.fori_loop(0, packed.count, accumulate, (zero_grads, zero_sums))
    return grads, sums | pair_sums


def _apply(optimizer: optax.GradientTransformation, grads, params: Params, opt_state):
    """Return the new parameters and optimizer state."""
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state
