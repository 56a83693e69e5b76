"""A small update and batch, and its loss by rows that are scored one by one."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from loss_batches import take
from small_models import random_params

from specrl_jax import sharding
from specrl_jax.algorithms.losses import LossConfig, policy_loss
from specrl_jax.algorithms.scoring import RowTokens, pack_rows
from specrl_jax.algorithms.update import update
from specrl_jax.algorithms.update_spec import UpdateSpec, init_policy_state
from specrl_jax.models import transformer
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Transformer
from specrl_jax.sharding import put
from specrl_jax.types import Batch

MODEL = ModelConfig(
    vocab_size=12, embed_dim=8, mlp_dim=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
)
LOSS = LossConfig(dual_clip=3.0, max_response_len=5)
# Hands the gradient out as its state and leaves the parameters alone.
GRADIENT = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)
LEARNER = UpdateSpec(MODEL, LOSS, GRADIENT, temperature=0.8, logits_chunk=3, micro_batch_size=0)
ROWS, PROMPT, RESPONSE = 4, 4, 5
TWO_ROWS = 2 * (PROMPT + RESPONSE)  # tokens


@functools.cache
def host_params():
    return random_params(MODEL, 0.4)


def place_params():
    return transformer.place_params(MODEL, host_params())


def host_batch(reference: bool = False, shared: bool = False) -> Batch:
    """Ragged rows; old log-probs some way off the policy's, so that every clip binds somewhere.

    shared: rows 0 and 1 share a prompt, rows 2 and 3 all but their last token.
    """
    rng = np.random.default_rng(1)
    prompt_lens = rng.integers(1, PROMPT + 1, ROWS).astype(np.int32)
    response_lens = np.array([5, 1, 4, 2], np.int32)
    tokens = np.zeros((ROWS, PROMPT + RESPONSE), np.int32)
    for row, count in enumerate(prompt_lens + response_lens):
        tokens[row, :count] = rng.integers(0, 12, count)
    if shared:
        prompt_lens[1], prompt_lens[3], response_lens[3] = prompt_lens[0], prompt_lens[2], 4
        tokens[1, : prompt_lens[1]] = tokens[0, : prompt_lens[0]]
        tokens[3] = tokens[2]
        tokens[3, prompt_lens[3] + 3] += 1
    shape = (ROWS, RESPONSE)
    return Batch(
        tokens=tokens,
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        old_logprobs=rng.normal(-2.5, 1.0, shape).astype(np.float32),
        advantages=np.tile(rng.normal(size=(ROWS, 1)), (1, RESPONSE)).astype(np.float32),
        ref_logprobs=rng.normal(-2.5, 0.7, shape).astype(np.float32) if reference else None,
    )


def on_mesh(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: put(x, "batch", *(None,) * (x.ndim - 1)), batch)


def row_scores(params, tokens, first: int, temperature: float):
    """Log-probs [n] and entropies [n] of tokens[first:], from a pass over this row alone."""
    model = Transformer(MODEL, params)
    logits = model.logits(model(jnp.asarray(tokens)[None])[0])
    logits = jax.sharding.reshard(logits, jax.P(None, None, None))
    log_p = jax.nn.log_softmax(logits[0, first - 1 : -1] / temperature)
    taken = jnp.sum(log_p * np.eye(MODEL.vocab_size)[tokens[first:]], axis=-1)
    return taken, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def plain_loss(params, batch: Batch, settings: LossConfig, rows) -> jax.Array:
    """The loss of rows that are scored one by one."""
    scores = []
    for row in rows:
        first, count = batch.prompt_lens[row], batch.response_lens[row]
        of_row = row_scores(params, batch.tokens[row, : first + count], first, 0.8)
        scores.append([jnp.pad(x, (0, RESPONSE - count)) for x in of_row])
    logprobs, entropy = (jnp.stack(x) for x in zip(*scores))
    return policy_loss(logprobs, entropy, take(batch, np.array(rows)), settings)[0]


def distance(one, two) -> float:
    """‖one − two‖ / ‖two‖ over all leaves."""
    gap = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), one, two)
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))  # noqa: E731
    return norm(gap) / norm(jax.tree.map(np.asarray, two))


def pack(batch: Batch, update_spec=LEARNER, rows=range(ROWS), included=None, chunk=TWO_ROWS):
    """chunk: tokens that a shard computes at a time; few, so gradients of several are added."""
    with mock.patch.dict(sharding.CHUNK_TOKENS, cpu=chunk):
        return pack_rows(update_spec, RowTokens.fetch(batch), np.array(rows), included)


def gradient(update_spec: UpdateSpec, batch: Batch, **packed):
    state = init_policy_state(update_spec, place_params())
    batch = on_mesh(batch)
    state, metrics = update(update_spec, state, batch, pack(batch, update_spec, **packed))
    return state.policy.opt_state, metrics
