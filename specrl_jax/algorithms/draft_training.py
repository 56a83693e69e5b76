"""Training of the draft head alongside the policy: it learns to predict the policy's tokens.

Its inputs and targets are states that an update computes anyway. At token y_i the policy has the
distribution p of the next token; the head's is q, from y_i and the state that chose it. The loss is
λ KL(p ‖ q) + (1 - λ) TV(p, q), λ = exp(-3 α), with the overlap α = Σ min(p, q) of the last update
(arXiv 2602.23881): KL dominates while they agree little, then TV, which determines acceptance. With
depth two the head also predicts from its own state instead of the policy's, as it does for the
second token of a draft, and so on. No gradient flows into the policy.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.scoring import read_nodes
from specrl_jax.algorithms.update_spec import DraftHeadState, UpdateSpec
from specrl_jax.models.draft_head import DraftHead, take_frequent
from specrl_jax.models.logprobs import scan_chunks
from specrl_jax.models.row_slices import gather_tokens
from specrl_jax.models.transformer import (
    Params,
    Transformer,
    compute_head,
    final_logits,
    head_logits,
)
from specrl_jax.packing import Sequences

DECAY = 3.0  # of λ with the overlap


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
    """Return gradients of the head's parameters on one micro-batch, and float32 sums: `head_loss`,
    `head_overlap` and `head_tokens`.

    hidden: the policy's states of the sequences. nodes: slot of each token of the rows. mask: bool,
    tokens that count. token_count: over all micro-batches; the loss is a mean over this many.
    """
    model = Transformer(update_spec.model, policy)
    embedded_mTD = model.lookup(sequences.tokens)
    rows_VD = compute_head(model.head, update_spec.model.dtype)
    if vocab := update_spec.draft_head.vocab:
        _, rows_VD = take_frequent(rows_VD, head.counts, vocab)
    weights = jnp.exp(-DECAY * head.overlap)

    def loss(params: Params) -> tuple[Array, dict[str, Array]]:
        own_head = DraftHead(update_spec.model, params)
        guessed = []
        states_mTD = hidden_mTD
        for _ in weights:
            before = gather_tokens(states_mTD, sequences.parents)
            states_mTD, _ = own_head(
                before, embedded_mTD, positions_BT=sequences.depths, ends_BT=sequences.ends
            )
            guessed.append(states_mTD)
        distances = _distances(update_spec, rows_VD, hidden_mTD, guessed)
        # A token was chosen from the state of its parent.
        distances = jax.tree.map(lambda x: gather_tokens(x, sequences.parents), distances)
        sums = [jnp.sum(x, where=mask_nR) for x in jax.tree.leaves(read_nodes(distances, nodes_nR))]
        kl = jnp.stack(sums[::2])
        tv = jnp.stack(sums[1::2])
        total = jnp.mean(weights * kl + (1 - weights) * tv) / jnp.maximum(token_count, 1)
        tokens = jnp.sum(mask_nR, dtype=jnp.float32)
        return total, {"head_loss": total, "head_overlap": tokens - tv, "head_tokens": tokens}

    return jax.grad(loss, has_aux=True)(head.params)


def _distances(
    update_spec: UpdateSpec, rows_VD: Array, hidden_mTD: Array, guessed: list[Array]
) -> list[tuple[Array, Array]]:
    """Return KL(p ‖ q) in nats and TV(p, q) at each slot, [m, T]; p by `hidden`, q by `guessed`.

    rows: of the policy's output. If not all are given, p and q are distributions over these.
    """
    config = update_spec.model
    if rows_VD.shape[0] < config.vocab_size:
        config = config.replace(unused_ids=())

    def log_probs(states: Array) -> Array:
        logits = final_logits(head_logits(states, rows_VD), config)
        return jax.nn.log_softmax(logits / update_spec.temperature)

    def compare(nothing: None, chunk: tuple[Array, list[Array]]) -> tuple[None, list]:
        hidden, guessed = chunk
        log_p = log_probs(hidden)
        p = jnp.exp(log_p)

        def distance(states: Array) -> tuple[Array, Array]:
            log_q = log_probs(states)
            kl = jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)
            return kl, jnp.sum(jnp.abs(p - jnp.exp(log_q)), axis=-1) / 2

        return nothing, [distance(states) for states in guessed]

    every = (hidden_mTD, guessed)
    if hidden_mTD.shape[1] <= update_spec.logits_chunk:
        return compare(None, every)[1]
    # Only one chunk's logits are in memory, also in the backward pass.
    return scan_chunks(jax.checkpoint(compare), None, every, update_spec.logits_chunk)[1]


@jax.jit
def count_tokens(counts: Array, tokens_BR: Array, mask_BR: Array) -> Array:
    """Add the tokens marked in `mask` to `counts` int32 [V]."""
    ids = jnp.where(mask_BR, tokens_BR, counts.shape[0])  # the rest is dropped
    ids = jax.sharding.reshard(ids, jax.P(None, None))
    return counts.at[ids.reshape(-1)].add(1, mode="drop")
