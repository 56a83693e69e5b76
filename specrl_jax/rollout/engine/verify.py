"""Verification of drafts: how much of their drafts rows keep when they start or continue.

The states of a row's prompt, own tokens and draft are computed whole, or piece by piece as needed
(`text_states.py`). The acceptance rule looks at the draft tokens from left to right, then decides.
The row gets the accepted tokens and one sampled after them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.kv_cache import take_nodes
from specrl_jax.models.row_slices import read_slots
from specrl_jax.models.transformer import Transformer
from specrl_jax.rollout.acceptance import DraftTokens
from specrl_jax.rollout.block import Residual
from specrl_jax.rollout.engine.decode import emit, policy_at
from specrl_jax.rollout.fused_sampling import FusedDistributions
from specrl_jax.rollout.rows import Rows, gather
from specrl_jax.rollout.sampling import TokenDistributions, uniforms
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import axes, on_shards, reshard, take_own_rows
from specrl_jax.types import Drafts, Source, Tokens


class RowBlock(NamedTuple):
    """Rows of every shard whose drafts are decided together; int32."""

    shard_row_ids: Array  # [b], among the shard's rows of the rollout; -1: none
    shard_slots: Array  # [b], slots of the shard's part of the batch; outside it: none
    draft_ends: Array  # [b]
    nodes: Array  # [b, S], slots of the rows' tokens in the computed sequences, as in `PackedTexts`


def verify_and_sample(
    spec: RolloutSpec,
    verify_width: int,
    model: Transformer,
    compute: Callable[[Any, Array, Array], Any],
    states: Any,
    all_rows: Rows,
    drafts: Drafts | None,
    block: RowBlock,
) -> tuple[Rows, Any, Array, Array]:
    """Start the block's rows with the accepted tokens of their drafts and one sampled token.

    states: of the rows' texts; its `hidden` is [m, T, D], and `block.nodes` are slots in it.
    compute: maps states, nodes int32 [b, S] that may be computed (-1: none) and bool [b, S], those
    that must be, to states with more known slots. verify_width: draft tokens of a row that are
    verified together.

    Returns the rows, the states, the known and the read tokens of each text int32 [b, 2], and
    verified and accepted draft tokens, int32 [2].
    """
    rows = gather(all_rows, block.shard_row_ids)
    texts = _BlockTexts(spec, model, compute, rows, block)
    accepted = jnp.zeros_like(rows.lens)
    draft_len = accepted
    residual = None
    if drafts is not None:
        draft_slots = -(-spec.response_slots // verify_width) * verify_width
        stored = _take_drafts(drafts, block.shard_row_ids, rows.lens, draft_slots)
        draft_len = jnp.where(rows.done, 0, jnp.maximum(block.draft_ends - rows.lens, 0))
        accepted, residual, reused_tokens, states = _verify(
            texts, verify_width, stored, draft_len, states
        )
    else:
        states = texts.compute_to(states, ~rows.done, accepted, accepted)
    weigh = None if residual is None else residual.weigh
    new = texts.policy_after(states, accepted, 1).sample(weigh)
    if drafts is not None:
        new = jax.tree.map(functools.partial(_put_after, accepted), reused_tokens, new)
    real = ~rows.done
    known = rows
    rows, count = emit(spec, rows, new, accepted, Source.REUSED)
    if states.routing is not None:
        routing = _fill_routing(spec, known, states.routing, block.nodes)
        rows = dataclasses.replace(rows, tokens=dataclasses.replace(rows.tokens, routing=routing))
    if spec.draft_head is not None:
        newest = jnp.maximum(count - 1, 0)
        rows = dataclasses.replace(rows, last_state=texts.states_at(states, newest, 1)[:, 0])
    reused = jnp.minimum(accepted, count)
    rejected = (accepted < draft_len) & (count > accepted)
    counts = jnp.stack([jnp.where(real, reused + rejected, 0), jnp.where(real, reused, 0)])
    rows = dataclasses.replace(rows, prefix_lens=rows.prefix_lens + reused)
    read = jnp.where(
        real[:, None],
        texts.depths[:, None] + jnp.stack([jnp.ones_like(accepted), accepted + 1], axis=1),
        0,
    )
    return rows, states, read, jnp.sum(counts, axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class _BlockTexts:
    """Texts of a block's rows, whose states are computed as the rule asks for them."""

    spec: RolloutSpec
    model: Transformer
    compute: Callable[[Any, Array, Array], Any]  # see `verify_and_sample`
    rows: Rows  # before they start
    block: RowBlock

    @property
    def depths(self) -> Array:
        """Depth of each row's last known token, int32 [b]."""
        return self.rows.prompt_lens + self.rows.lens - 1

    def compute_to(self, states: Any, asked: Array, offset: Array, most: Array) -> Any:
        """Compute the `asked` rows' tokens up to `offset` [b]; it may compute up to `most` [b]."""
        nodes = self.block.nodes
        positions = jnp.arange(nodes.shape[1])[None, :]
        asked &= self.block.shard_row_ids >= 0
        maybe = asked[:, None] & (positions <= (self.depths + most)[:, None])
        required = positions <= (self.depths + offset)[:, None]
        return self.compute(states, jnp.where(maybe, nodes, -1), required)

    def states_at(self, states: Any, offset: Array, count: int) -> Array:
        """Return states [b, count, D]; the first gives the distribution of response token
        `rows.lens + offset`."""
        slots = self.block.nodes.shape[1]
        nodes = jnp.pad(self.block.nodes, ((0, 0), (0, count)), constant_values=-1)
        read = read_slots(nodes, jnp.minimum(self.depths + offset, slots), count)
        return take_nodes(states.hidden, read)

    def policy_after(
        self, states: Any, offset: Array, count: int
    ) -> TokenDistributions | FusedDistributions:
        """Return the policy in these states."""
        hidden = self.states_at(states, offset, count)
        return policy_at(self.spec, self.rows, self.rows.lens + offset, self.model, hidden)


def _fill_routing(spec: RolloutSpec, rows: Rows, routing: Array, nodes: Array) -> Array:
    """Return `Tokens.routing` [b, C, L, k] of rows that start, filled in from `routing`.

    rows: before they start: tokens they already have keep the experts that chose them, if known.
    routing: of `TextStates`. nodes: of `RowBlock`.
    """
    held = rows.tokens.routing
    columns = held.shape[1]
    nodes = jnp.pad(nodes, ((0, 0), (0, spec.max_width)), constant_values=-1)
    computed = take_nodes(routing, read_slots(nodes, rows.prompt_lens - 1, columns))
    inside = jnp.arange(columns)[None, :] < rows.lens[:, None]
    return jnp.where(inside[..., None, None] & (held > 0), held, computed)


def _take_drafts(drafts: Drafts, shard_row_ids: Array, lens: Array, slots: int) -> Tokens:
    """Return the rows' drafts [b, `slots`] from token `lens` [b] on, then zeros."""
    stored = drafts.tokens.only("sampling_logprobs", "top_ids", "top_logprobs")
    own = on_shards(take_own_rows, stored, jnp.maximum(shard_row_ids, 0), like=stored)

    def align(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, slots), *((0, 0),) * (x.ndim - 2)))
        return read_slots(x, lens, slots)

    return jax.tree.map(align, own)


def _verify(
    texts: _BlockTexts,
    verify_width: int,
    stored: Tokens,
    draft_len: Array,
    states: Any,
) -> tuple[Array, Residual | None, Tokens, Any]:
    """Return how many draft tokens the rule accepts, verifying `verify_width` at a time.

    The rule looks at a draft until it rejects a token or reaches the draft's end. Then it decides.

    stored: the drafts [b, W]; the first `draft_len` [b] tokens count. Returns the accepted tokens
    int32 [b], the residual, the columns [b, W] that rows get for accepted tokens, and the states.
    """
    spec = texts.spec
    rows = texts.rows
    slots = stored.ids.shape[1]

    def draft_at(first: Array | int, count: int) -> DraftTokens:
        positions = (rows.lens + first)[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=1
        )
        noise = uniforms(rows.accept_seeds, reshard(positions, "batch", None))
        lens = jnp.clip(draft_len - first, 0, count)
        return DraftTokens(lens, jax.tree.map(cut, stored), noise)

    def look(states: Any, first: Array) -> tuple:
        policy = texts.policy_after(states, first, verify_width)
        return spec.accept.look(draft_at(first, verify_width), policy)

    def zeros(x: jax.ShapeDtypeStruct, *sizes: int) -> Array:
        shape = (x.shape[0], *sizes, *x.shape[1 + len(sizes) :])
        return jnp.zeros(shape, x.dtype, out_sharding=axes("batch", *(None,) * (len(shape) - 1)))

    def goes_on(state: tuple) -> Array:
        first, num_kept, *_ = state
        return (num_kept == first) & (first < draft_len)

    def step(state: tuple) -> tuple:
        first, num_kept, looked, states = state
        asked = goes_on(state)
        # For its last token a draft needs the state after it.
        after = first + verify_width
        offset = jnp.where(after >= draft_len, draft_len, after - 1)
        states = texts.compute_to(states, asked | ((first == 0) & ~rows.done), offset, draft_len)
        new_kept, *new = jax.lax.cond(
            jnp.any(asked),
            look,
            lambda states, first: jax.tree.map(zeros, shapes),
            states,
            first,
        )
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        looked = jax.tree.map(write, looked, new)
        num_kept = jnp.where(asked, first + new_kept, num_kept)
        return after, num_kept, looked, states

    shapes = jax.eval_shape(look, states, jnp.int32(0))
    looked = jax.tree.map(lambda x: zeros(x, slots), list(shapes[1:]))
    state = (jnp.int32(0), jnp.zeros_like(draft_len), looked, states)
    # At least one step: it computes the prompts.
    state = jax.lax.while_loop(lambda x: (x[0] == 0) | jnp.any(goes_on(x)), step, state)
    _, num_kept, (reused_tokens, evidence), states = state
    accepted, residual = spec.accept.decide(draft_at(0, slots), num_kept, reused_tokens, evidence)
    return accepted, residual, reused_tokens, states


def _put_after(counts: Array, draft: Array, sampled: Array) -> Array:
    """Put `sampled` [b, 1, ...] after the first `counts` [b] of `draft` [b, W, ...]."""
    here = jnp.arange(draft.shape[1], dtype=jnp.int32)[None, :] == counts[:, None]
    return jnp.where(jnp.expand_dims(here, tuple(range(2, draft.ndim))), sampled, draft)
