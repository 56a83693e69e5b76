"""The model on the tokens of a batch: log-probs, entropies and values [B, R] of its responses.

Slot prompt_len − 1 + j of a row predicts response token j, and holds the state in which that token
is chosen. Only these slots reach the output head.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.algorithms.learner import Learner, TrainState
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.models import value
from specrl_jax.models.logprobs import entropy, map_tokens, token_logprobs
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.sharding import spec, take_rows
from specrl_jax.types import Batch


class Scores(NamedTuple):
    """What the weights being trained say of a batch; float32 [B, R]."""

    logprobs: Array  # nats, at the rollout's temperature
    entropy: Array  # nats
    values: Array | None  # of the state before each token, in units of reward; None: no critic


@functools.partial(jax.jit, static_argnames="response_slots")
def pack(
    prompts_BP: Array, prompt_lens: Array, responses_BR: Array, *, response_slots: int
) -> Array:
    """tokens [B, P + R']: every response right behind its prompt, cut to R' = response_slots."""
    padded = jnp.pad(prompts_BP, ((0, 0), (0, response_slots)))

    def join(row: Array, response: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, response, start, axis=0)

    return jax.vmap(join)(padded, responses_BR[:, :response_slots], prompt_lens)


def score(
    learner: Learner,
    params: Params,
    critic: Params | None,
    tokens_BT: Array,
    prompt_lens: Array,
    response_slots: int,
) -> Scores:
    """One pass of the policy over a micro-batch, and one of a critic with its own decoder."""
    model = Transformer(learner.model, params)
    hidden_BRD = _response_hidden(model, tokens_BT, prompt_lens, response_slots)
    responses_BR = _slice_rows(tokens_BT, prompt_lens, response_slots)

    def score_chunk(logits: Array, tokens: Array) -> tuple[Array, Array]:
        logits = logits / learner.temperature
        return token_logprobs(logits, tokens), entropy(logits)

    scores = map_tokens(score_chunk, model, hidden_BRD, responses_BR, learner.logits_chunk)
    if critic is None:
        return Scores(*scores, values=None)
    decoder = value.decoder(learner.model, critic)
    if decoder is not None:
        hidden_BRD = _response_hidden(decoder, tokens_BT, prompt_lens, response_slots)
    return Scores(*scores, value.values(critic, hidden_BRD))


@functools.partial(jax.jit, static_argnums=0)
def logprobs(learner: Learner, params: Params, batch: Batch, index_Mm: Array) -> Array:
    """Log-probs [B, R] of a whole batch, micro-batch by micro-batch (reference, old policy).

    index: int32 [M, m], the rows 0 … B - 1 in order.
    """
    slots = batch.old_logprobs.shape[1]

    def of_rows(rows: Batch) -> Array:
        return score(learner, params, None, rows.tokens, rows.prompt_lens, slots).logprobs

    return _map_micro_batches(of_rows, batch, index_Mm)


@functools.partial(jax.jit, static_argnums=0)
def critic_values(learner: Learner, state: TrainState, batch: Batch, index_Mm: Array) -> Array:
    """The critic's values [B, R] of a whole batch; index: as in `logprobs`."""
    weights, slots = (state.params, state.critic), batch.old_logprobs.shape[1]

    def of_rows(rows: Batch) -> Array:
        return score(learner, *weights, rows.tokens, rows.prompt_lens, slots).values

    return _map_micro_batches(of_rows, batch, index_Mm)


@jax.jit
def logprob_gap(batch: Batch, logprobs_BR: Array) -> Array:
    """Mean |old_logprobs - logprobs| over the response tokens, nats."""
    return masked_mean(jnp.abs(batch.old_logprobs - logprobs_BR), batch.mask)


def micro_batches(rows: int, size: int) -> np.ndarray:
    """int32 [rows / size, size]: the rows 0 … rows - 1, cut into micro-batches; size 0: one."""
    return np.arange(rows, dtype=np.int32).reshape(-1, size or rows)


def _response_hidden(
    model: Transformer, tokens_BT: Array, prompt_lens: Array, response_slots: int
) -> Array:
    """Hidden states [B, R, D] of the slots that predict a response."""
    hidden_BTD, _ = model(tokens_BT)
    return _slice_rows(hidden_BTD, prompt_lens - 1, response_slots)


def _slice_rows(array: Array, starts: Array, width: int) -> Array:
    """array[b, starts[b] : starts[b] + width] of every row b."""

    def slice_row(row: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, start, width, axis=0)

    return jax.vmap(slice_row)(array, starts)


def _map_micro_batches(function: Callable[[Batch], Array], batch: Batch, index_Mm: Array) -> Array:
    """`function(rows)` [m, R] over micro-batches, as [B, R]."""

    def step(_, index: Array) -> tuple[None, Array]:
        return None, function(take_rows(batch, index))

    _, results = jax.lax.scan(step, None, index_Mm)
    flat = jax.sharding.reshard(results, jax.P(None, None, None)).reshape(-1, results.shape[-1])
    return jax.sharding.reshard(flat, spec("batch", None))
