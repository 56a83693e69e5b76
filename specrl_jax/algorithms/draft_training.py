"""Training of the draft head beside the policy: it learns to say what the policy will say.

The states that an update computes anyway are its inputs and its targets. At token y_i the policy
says p of the next token; the head says q, from y_i and the state that chose it. The loss is
λ KL(p ‖ q) + (1 - λ) TV(p, q), λ = exp(-3 α), with the overlap α = Σ min(p, q) of the update before
(arXiv 2602.23881): where they agree little KL leads, then TV, on which acceptance depends. With a
depth of two the head also says q from its own state in the place of the policy's, as the second
token of a draft is guessed, and so on; keys and values are then of its own states too. No gradient
flows into the policy.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specrl_jax.algorithms.scoring import read_nodes
from specrl_jax.algorithms.update_spec import DraftHeadState, UpdateSpec
from specrl_jax.models.draft_head import DraftHead, frequent_tokens, take_tokens
from specrl_jax.models.logprobs import scan_chunks
from specrl_jax.models.row_slices import take_slots
from specrl_jax.models.transformer import (
    Params,
    Transformer,
    compute_head,
    final_logits,
    head_logits,
)
from specrl_jax.packing import Sequences

DECAY = 3.0  # of λ by the overlap


def head_gradients(
    update_spec: UpdateSpec,
    head: DraftHeadState,
    policy: Params,
    sequences: Sequences,
    hidden_mTD: Array,
    nodes_nR: Array,
    mask_nR: Array,
    token_count: Array,
) -> tuple[Params, dict[str, Array]]:
    """Gradients of the head's parameters on one micro-batch, and float32 sums: `head_loss`,
    `head_overlap` and `head_tokens`.

    hidden: the policy's states of the sequences. nodes: slot of each token of the rows. mask: bool,
    those that count. token_count: of all micro-batches; the loss is a mean over so many.
    """
    model = Transformer(update_spec.model, policy)
    embedded_mTD = model.lookup(sequences.tokens)
    places = {"positions_BT": sequences.depths, "ends_BT": sequences.ends}
    weights = jnp.exp(-DECAY * head.overlap)

    def loss(params: Params) -> tuple[Array, dict[str, Array]]:
        own_head = DraftHead(update_spec.model, params)
        total = 0.0
        overlaps = []
        tokens = jnp.sum(mask_nR, dtype=jnp.float32)
        states_mTD = hidden_mTD
        for weight in weights:
            states_mTD, _ = own_head(
                take_slots(states_mTD, sequences.parents), embedded_mTD, **places
            )
            distances = _distances(update_spec, head, model, states_mTD, hidden_mTD)
            # A token was chosen in the state of its parent.
            of_tokens = [take_slots(x, sequences.parents) for x in distances]
            kl, tv = (jnp.sum(x, where=mask_nR) for x in read_nodes(of_tokens, nodes_nR))
            total += weight * kl + (1 - weight) * tv
            overlaps.append(tokens - tv)
        total /= jnp.maximum(token_count, 1) * len(overlaps)
        sums = {"head_overlap": jnp.stack(overlaps), "head_tokens": tokens}
        return total, {"head_loss": total, **sums}

    return jax.grad(loss, has_aux=True)(head.params)


def _distances(
    update_spec: UpdateSpec,
    head: DraftHeadState,
    model: Transformer,
    states_mTD: Array,
    hidden_mTD: Array,
) -> tuple[Array, Array]:
    """KL(p ‖ q) in nats and TV(p, q) at each slot, [m, T]; p by `hidden`, q by `states`.

    Of a head that drafts some tokens alone both are distributions over these.
    """
    config = update_spec.model
    rows_VD = compute_head(model.head, config.dtype)
    if update_spec.draft_head.vocab:
        rows_VD = take_tokens(rows_VD, frequent_tokens(head.counts, update_spec.draft_head.vocab))
        config = config.replace(unused_ids=())

    def log_probs(states: Array) -> Array:
        logits = final_logits(head_logits(states, rows_VD), config)
        return jax.nn.log_softmax(logits / update_spec.temperature)

    @jax.checkpoint
    def of_chunk(nothing: None, chunk: tuple[Array, Array]) -> tuple[None, tuple[Array, Array]]:
        log_q, log_p = map(log_probs, chunk)
        p = jnp.exp(log_p)
        kl = jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
        tv = jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1) / 2
        return nothing, (kl, tv)

    both = (states_mTD, hidden_mTD)
    if states_mTD.shape[1] <= update_spec.logits_chunk:
        return of_chunk(None, both)[1]
    return scan_chunks(of_chunk, None, both, update_spec.logits_chunk)[1]


def apply_gradients(
    update_spec: UpdateSpec, head: DraftHeadState, grads: Params, sums: dict[str, Array]
) -> DraftHeadState:
    """The head after an update. sums: of `head_gradients`, added over micro-batches."""
    optimizer = update_spec.draft_head.optimizer
    updates, opt_state = optimizer.update(grads, head.opt_state, head.params)
    overlap = sums["head_overlap"] / jnp.maximum(sums["head_tokens"], 1)
    return dataclasses.replace(
        head,
        params=optax.apply_updates(head.params, updates),
        opt_state=opt_state,
        overlap=jnp.where(sums["head_tokens"] > 0, overlap, head.overlap),
    )


@jax.jit
def count_tokens(head: DraftHeadState, tokens_BR: Array, lens_B: Array) -> DraftHeadState:
    """The head that has seen the first `lens` tokens of each response."""
    inside = jnp.arange(tokens_BR.shape[1])[None, :] < lens_B[:, None]
    outside = head.counts.shape[0]  # dropped
    places = jnp.where(inside, tokens_BR, outside).reshape(-1)
    counts = head.counts.at[jax.sharding.reshard(places, jax.P(None))].add(1, mode="drop")
    return dataclasses.replace(head, counts=counts)
