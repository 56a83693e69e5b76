"""Model on packed rows: log-probs, entropies and values of their tokens.

Rows are packed on the host (`pack_rows`), split into micro-batches of sequences, and computed one
micro-batch after another. The state of a token's parent predicts the token. The results for a token
are then read for each row that contains it, as [n, R].
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract, hosts
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.algorithms.update_spec import PolicyState, UpdateSpec
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.experts import Load
from specrl_jax.models.kv_cache import round_slots
from specrl_jax.models.logprobs import entropy, map_tokens, token_logprobs
from specrl_jax.models.lora import adapted
from specrl_jax.models.row_slices import gather_tokens
from specrl_jax.models.transformer import Params, Transformer, critic_decoder, token_values
from specrl_jax.packing import PACKINGS, Packing, Sequences, pack
from specrl_jax.sharding import axes, chunk_tokens, put, reshape, reshard, shards, take_rows
from specrl_jax.types import Batch

# Tokens that a shard computes together even under a bound: fewer would leave compute idle, and the
# memory saved does not matter.
LEAST_TOKENS = 256


class TokenLogprobs(NamedTuple):
    """Log-probs of tokens under the weights being trained, and more; float32, [m, T] or [n, R]."""

    logprobs: Array  # nats, at the rollout's temperature; over the sampler's tokens, if given
    entropy: Array  # nats
    values: Array | None  # of the state before each token, in units of reward; None: no critic
    terms: tuple = ()  # for each loss term, what it read from the logits, [m, T, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """n rows of a batch in M micro-batches of m sequences of T slots."""

    sequences: Sequences  # [M, m, T]
    count: Array  # int32 [], number of micro-batches with tokens, the first ones
    row_ids: Array  # int32 [n], which rows of the batch these are
    nodes: Array  # int32 [n, R], slot in [M * m * T] of a row's response tokens; -1: left out


class RowTokens(NamedTuple):
    """Tokens of B rows on the host, ready for packing; NumPy arrays, int32."""

    tokens: np.ndarray  # [B, P + R], prompt and response without a gap
    prompt_lens: np.ndarray  # [B]
    response_lens: np.ndarray  # [B]
    slots: int  # R, of responses

    @classmethod
    def fetch(cls, batch: Batch) -> "RowTokens":
        """Return the rows of a batch, whole in every process."""
        arrays = hosts.fetch((batch.tokens, batch.prompt_lens, batch.response_lens))
        return cls(*arrays, slots=batch.old_logprobs.shape[1])


def packed_shape(packing: Packing, num_rows: int, slots: int, at_once: int) -> tuple[int, int, int]:
    """Return [M, m, T] of packed rows: micro-batches, sequences in each, slots per sequence.

    num_rows: n. slots: P + R. at_once: maximum number of maximum-length rows that fit in a
    micro-batch; 0: no bound. A shard always computes at least a sequence or `LEAST_TOKENS`.
    """
    pieces = shards("batch")
    length = round_slots(packing.rows_per_sequence * slots)
    # This many rows fit in any sequence, and first fit leaves at most one sequence with fewer.
    total = -(-num_rows // packing.rows_per_sequence)
    tokens = chunk_tokens()
    if at_once:
        tokens = min(tokens, max(at_once * slots // pieces, LEAST_TOKENS))
    size = min(max(tokens // length, 1), -(-total // pieces)) * pieces
    return -(-total // size), size, length


def pack_rows(
    update_spec: UpdateSpec,
    row_tokens: RowTokens,
    row_ids: np.ndarray,
    included: np.ndarray | None = None,
) -> PackedRows:
    """Pack the rows `row_ids` int [n]. Results for the same n have the same shapes.

    included: bool [n], the rows to compute; None: all.
    """
    tokens = row_tokens.tokens[row_ids]
    prompt_lens = row_tokens.prompt_lens[row_ids]
    lens = prompt_lens + row_tokens.response_lens[row_ids]
    if included is not None:
        lens = np.where(included, lens, 0)
    packing = PACKINGS[update_spec.packing]
    slots = tokens.shape[1]
    shape = packed_shape(packing, len(row_ids), slots, update_spec.micro_batch_size)
    count, size, length = shape
    sequences, paths = pack(tokens, lens, length, packing)
    used = -(-len(sequences.tokens) // size)
    sequences = sequences.padded(count * size, used * size)
    nodes = np.full((len(row_ids), row_tokens.slots), -1, np.int32)
    for row, path in enumerate(paths):
        response = path[prompt_lens[row] :]
        nodes[row, : len(response)] = response
    return PackedRows(
        sequences=Sequences(*(put(x.reshape(shape), None, "batch", None) for x in sequences)),
        count=put(np.int32(used)),
        row_ids=put(row_ids.astype(np.int32), "batch"),
        nodes=put(nodes, "batch", None),
    )


def abstract_packed(update_spec: UpdateSpec, batch: Batch, num_rows: int) -> PackedRows:
    """Return the shapes of `num_rows` packed rows of a batch."""
    tokens = np.zeros((num_rows, batch.tokens.shape[1]), np.int32)
    lens = np.zeros(num_rows, np.int32)
    row_tokens = RowTokens(tokens, lens, lens + 1, batch.old_logprobs.shape[1])
    return abstract.result(lambda: pack_rows(update_spec, row_tokens, np.arange(num_rows)))


def unpacked(tokens_BT: Array, prompt_lens: Array, slots: int) -> PackedRows:
    """Return every row as its own sequence, in one micro-batch; slots: R, of responses.

    For rows made inside a program: it needs nothing from the host.
    """
    rows, width = tokens_BT.shape
    offsets = jnp.broadcast_to(jnp.arange(width), tokens_BT.shape, out_sharding=axes("batch", None))
    ends = jnp.full_like(offsets, width)
    sequences = Sequences(tokens_BT, offsets, ends, parents=jnp.maximum(offsets - 1, 0))
    first = reshard(jnp.arange(rows) * width, "batch")
    return PackedRows(
        sequences=jax.tree.map(lambda x: x[None], sequences),
        count=jnp.int32(1),
        row_ids=reshard(jnp.arange(rows, dtype=jnp.int32), "batch"),
        nodes=first[:, None] + prompt_lens[:, None] + jnp.arange(slots)[None, :],
    )


def slot_logprobs(
    update_spec: UpdateSpec,
    params: Params,
    critic: Params | None,
    sequences: Sequences,
    support_mTk: Array | None = None,
    term_inputs: tuple = (),
    shared: tuple = (),
    routing_mTLk: Array | None = None,
) -> tuple[TokenLogprobs, Array, Load | None]:
    """Run a micro-batch through the policy, and through a critic with its own decoder.

    support: from `slot_support`; log-probs are over these tokens, entropies over all.
    term_inputs, shared: for each loss term, the inputs of its `read`; (): they read nothing.
    routing: from `slot_routing`, which the policy replays.

    Returns the results for each slot's token from its parent's state, [m, T], the policy's states
    [m, T, D], and the load of its experts by layer; None without experts.
    """
    model = Transformer(update_spec.model, params)
    counted_mT = None if update_spec.model.dense else held_slots(sequences)
    states_mTD, load = _states(model, sequences, counted_mT, routing_mTLk)
    hidden_mTD = gather_tokens(states_mTD, sequences.parents)

    def read_logits(logits: Array, inputs: tuple, *shared: Any) -> tuple[Array, Array, tuple]:
        tokens, support, term_inputs = inputs
        logits = logits / update_spec.temperature
        terms = zip(update_spec.loss.terms, term_inputs, shared)
        read = tuple(term.read(logits, own, whole) for term, own, whole in terms)
        return token_logprobs(logits, tokens, support), entropy(logits), read

    inputs = (sequences.tokens, support_mTk, term_inputs)
    logprobs_mT, entropy_mT, read = map_tokens(
        read_logits, model, hidden_mTD, inputs, update_spec.logits_chunk, shared
    )
    columns = TokenLogprobs(logprobs_mT, entropy_mT, values=None, terms=read)
    if critic is None:
        return columns, states_mTD, load
    decoder = critic_decoder(update_spec.model, critic)
    if decoder is not None:
        hidden_mTD = gather_tokens(hidden_states(decoder, sequences), sequences.parents)
    return columns._replace(values=token_values(critic, hidden_mTD)), states_mTD, load


def read_nodes(slots: Any, nodes_nR: Array) -> Any:
    """Return the rows' values, [n, R], from a pytree of slots [..., T]; 0 without a slot."""

    def read(x: Array) -> Array:
        flat = jax.sharding.reshard(x, jax.P(*(None,) * x.ndim)).reshape(-1)
        inside = (nodes_nR >= 0) & (nodes_nR < flat.size)
        picked = flat.at[jnp.where(inside, nodes_nR, 0)].get(out_sharding=axes("batch", None))
        return jnp.where(inside, picked, 0)

    return jax.tree.map(read, slots)


def read_wide_nodes(slots: Any, nodes_nR: Array) -> Any:
    """Return the rows' values, [n, R, ...], from a pytree of slots [m, T, ...], as `read_nodes`."""

    def read(x: Array) -> Array:
        inner = (None,) * (x.ndim - 2)
        flat = jax.sharding.reshard(x, jax.P(*(None,) * x.ndim)).reshape(-1, *x.shape[2:])
        inside = (nodes_nR >= 0) & (nodes_nR < len(flat))
        out = axes("batch", None, *inner)
        picked = flat.at[jnp.where(inside, nodes_nR, 0)].get(out_sharding=out)
        return jnp.where(inside.reshape(*inside.shape, *(1,) * len(inner)), picked, 0)

    return jax.tree.map(read, slots)


def slot_support(support_nRk: Array | None, nodes_nR: Array, sequences: Sequences) -> Array | None:
    """Return the `Batch.support` of a micro-batch's slots, int32 [m, T, k]; None of None.

    Rows that share a slot share everything before it, so also the sampler's tokens: the last row's
    are used. nodes: slots of the rows' tokens in [m * T]; all other slots get -1.
    """
    if support_nRk is None:
        return None
    shape = sequences.tokens.shape
    size = sequences.tokens.size
    nodes = jax.sharding.reshard(nodes_nR, jax.P(None, None)).reshape(-1)
    nodes = jnp.where(nodes < 0, size, nodes)  # dropped
    owner = jnp.full(size, -1).at[nodes].max(jnp.arange(nodes.size), mode="drop")
    support = reshape(support_nRk, (nodes.size, -1), "batch", None)
    picked = jnp.where(owner[:, None] < 0, -1, take_rows(support, jnp.maximum(owner, 0)))
    return reshape(picked, (*shape, -1), "batch", None, None)


def slot_routing(routing_nRLk: Array | None, nodes_nR: Array, sequences: Sequences) -> Array | None:
    """Return the experts of a micro-batch's slots to replay, ids + 1 [m, T, L, k]; None of None.

    0 in slots with unknown experts: of prompts before their last token, and of last tokens. If rows
    share a slot, the last row's are used. Arguments: see `slot_support`.
    """
    if routing_nRLk is None:
        return None
    shape = sequences.tokens.shape
    firsts = jnp.arange(0, sequences.tokens.size, shape[1])[:, None]
    parents = jax.sharding.reshard(sequences.parents, jax.P(None, None)) + firsts
    here = (nodes_nR >= 0) & (nodes_nR < parents.size)
    nodes = jnp.where(here, nodes_nR, 0)
    nodes = parents.reshape(-1).at[nodes].get(out_sharding=axes("batch", None))
    per_token = routing_nRLk.shape[2:]
    flat = reshape(routing_nRLk, (*nodes.shape, -1), "batch", None, None).astype(jnp.int32)
    slots = slot_support(flat, jnp.where(here, nodes, -1), sequences)
    return reshape(jnp.maximum(slots, 0), (*shape, *per_token), "batch", None, None, None)


@functools.partial(jax.jit, static_argnums=0)
def logprobs(
    update_spec: UpdateSpec,
    params: Params,
    packed: PackedRows,
    support_nRk: Array | None = None,
    routing_nRLk: Array | None = None,
) -> Array:
    """Return log-probs [n, R] of packed rows (reference, old policy).

    support, routing: of `Batch`, for these rows; routing of the policy only.
    """

    def read(part: Sequences, nodes_nR: Array) -> Array:
        support = slot_support(support_nRk, nodes_nR, part)
        routing = slot_routing(routing_nRLk, nodes_nR, part)
        slots, *_ = slot_logprobs(update_spec, params, None, part, support, routing_mTLk=routing)
        return slots.logprobs

    return _map_micro_batches(read, packed)


def with_model(update_spec: UpdateSpec, model: ModelConfig) -> UpdateSpec:
    """Return the spec with which `logprobs` scores tokens under another model."""
    return dataclasses.replace(update_spec, model=model)


def logprobs_inputs(
    update_spec: UpdateSpec, params: Params, batch: Batch, routing: Array | None = None
) -> tuple:
    """Return the inputs of `logprobs` for all rows of a batch."""
    packed = abstract_packed(update_spec, batch, len(batch.tokens))
    return update_spec, params, packed, batch.support, routing


@functools.partial(jax.jit, static_argnums=0)
def critic_values(
    update_spec: UpdateSpec,
    state: PolicyState,
    packed: PackedRows,
    base_params: Params | None = None,
    routing_nRLk: Array | None = None,
) -> Array:
    """Return the critic's values [n, R] of packed rows. base_params: as in `update.update`.

    routing: `Batch.routing` of these rows.
    """
    policy = adapted(update_spec.model, state.policy.params, base_params)
    critic = state.modules["critic"].params

    def read(part: Sequences, nodes_nR: Array) -> Array:
        routing = slot_routing(routing_nRLk, nodes_nR, part)
        slots, *_ = slot_logprobs(update_spec, policy, critic, part, routing_mTLk=routing)
        return slots.values

    return _map_micro_batches(read, packed)


def values_inputs(
    update_spec: UpdateSpec, state: PolicyState, batch: Batch, base_params: Params | None
) -> tuple:
    """Return the inputs of `critic_values` for all rows of a batch."""
    packed = abstract_packed(update_spec, batch, len(batch.tokens))
    return update_spec, state, packed, base_params, batch.routing


@jax.jit
def logprob_gap(batch: Batch, logprobs_BR: Array) -> Array:
    """Return the mean |old_logprobs - logprobs| over the response tokens, nats."""
    return masked_mean(jnp.abs(batch.old_logprobs - logprobs_BR), batch.mask)


def hidden_states(model: Transformer, sequences: Sequences) -> Array:
    """Return hidden states [m, T, D] of the slots."""
    return _states(model, sequences)[0]


def _states(
    model: Transformer,
    sequences: Sequences,
    counted_mT: Array | None = None,
    routing_mTLk: Array | None = None,
) -> tuple[Array, Load | None]:
    """Return hidden states [m, T, D] of the slots, and the load of experts in counted slots.

    The state of a token's parent predicts the token.
    """
    return model(
        sequences.tokens,
        positions_BT=sequences.depths,
        ends_BT=sequences.ends,
        counted_BT=counted_mT,
        routing_BTLk=routing_mTLk,
    )


def held_slots(sequences: Sequences) -> Array:
    """Return which slots [..., T] contain a token."""
    slots = jnp.arange(sequences.tokens.shape[-1])[(None,) * (sequences.tokens.ndim - 1)]
    # A slot without a token is its own parent and sees only itself, or nothing. A prompt's first
    # token has a token after it.
    alone = (sequences.parents == slots) & (sequences.ends == slots + 1)
    return (sequences.ends > slots) & ~alone


def _map_micro_batches(function: Callable[[Sequences, Array], Array], packed: PackedRows) -> Array:
    """Map `function(sequences, nodes)` [m, T] over the micro-batches in use; return [n, R].

    nodes: int32 [n, R], like `PackedRows.nodes`, in the micro-batch's slots; others lie outside.
    """
    size = packed.sequences.tokens[0].size

    def step(index: Array, slots_MmT: Array) -> Array:
        part = jax.tree.map(lambda x: x[index], packed.sequences)
        return slots_MmT.at[index].set(function(part, packed.nodes - index * size))

    start = jnp.zeros_like(packed.sequences.tokens, jnp.float32)
    slots_MmT = jax.lax.fori_loop(0, packed.count, step, start)
    return read_nodes(slots_MmT, packed.nodes)
