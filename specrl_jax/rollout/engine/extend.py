"""`extend` prefills rows that enter the running batch: it computes keys, values and states of a
row's prompt, own tokens and draft, and verifies the draft.

A row may hold tokens (of an earlier step or turn) and a draft. The host packs the texts of many
rows, every distinct prefix once (`pack_texts`). One program takes the sequences chunk by chunk. It
decides which draft tokens are accepted, samples the token after them, and writes keys and values
into free slots of the running batch. A chunk is computed at once, or as its slots are asked for
(`text_states.py`). `feed` decides in the same way on rows that go on in their slots.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3, no tokens yet
    tokens          a b c | x y z          draft x y z
    states of         c   x y z            give distributions at positions 0, 1, 2, 3
    x accepted, y not, w sampled           lens = 2, last = w: the next step feeds w at slot 4

A row without a draft has a draft of no tokens. Shapes follow from the configuration alone: the
number of chunks that hold tokens, of rows that begin, and of tokens of the longest draft are counts
of loops. A rejected token needs no cleaning up: it is not counted, and a later token takes
its slot.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.models.draft_head import DraftHead
from specrl_jax.models.kv_cache import KVCache, Layer, take_nodes, write_rows
from specrl_jax.models.row_slices import gather_tokens, read_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.packing import Sequences
from specrl_jax.rollout.acceptance import DraftTokens
from specrl_jax.rollout.block import Residual
from specrl_jax.rollout.engine.buckets import Buckets, TextShape
from specrl_jax.rollout.engine.decode import append, count_unfinished, policy_at
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.engine.text_states import (
    TextStates,
    blank_states,
    carry_over,
    compute_slots,
)
from specrl_jax.rollout.engine.texts import PackedTexts, TextPaths, Texts, pack_shape
from specrl_jax.rollout.fused_sampling import FusedDistributions
from specrl_jax.rollout.rows import PADDING, Rows, gather, put_rows, slot_ranks
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


class PrefillCounts(NamedTuple):
    """What `extend` or `feed` has computed and decided; int32 []."""

    computed: Array  # slots
    filled: Array  # slots that held a token
    known: Array  # slots of prompts and of tokens that rows held
    read: Array  # these, and slots of draft tokens that were accepted
    verified: Array  # draft tokens that the rule decided on
    accepted: Array  # draft tokens

    def plus(self, other: "PrefillCounts") -> "PrefillCounts":
        return jax.tree.map(jnp.add, self, other)


@functools.partial(jax.jit, static_argnames="buckets", donate_argnames=("cache", "rows"))
def extend(
    spec: RolloutSpec,
    buckets: Buckets,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    all_rows: Rows,
    drafts: Drafts | None,
    texts: PackedTexts,
) -> tuple[KVCache, Rows, TextStates | None, PrefillCounts, Array]:
    """Return the running batch with the rows of `texts` in its free slots.

    all_rows: [B], with the tokens that they hold. drafts: [B], for the acceptance rule to verify; a
    draft begins with what its row holds. None: the run has no drafts.

    Returns the cache, the rows, the states that the next call gets as `texts.before`, counts, and
    what `decode.count_unfinished` returns.
    """
    texts = texts.on_mesh()
    all_slots = on_shards(_slots_free_first, rows.done, rows.row_ids, like=rows.lens)
    model = Transformer(spec.model, weights)

    def run_chunk(chunk: Array, state: tuple) -> tuple:
        cache, rows, before, counts = state
        sequences = jax.tree.map(lambda x: x[chunk], texts.sequences)
        states, compute = _begin_chunk(
            spec, buckets, weights, sequences, before, texts.copied, chunk
        )
        copied = states.known
        take_block = functools.partial(_take_block, texts, all_slots, buckets.block_rows, chunk)

        def begin_block(number: Array, state: tuple) -> tuple:
            rows, states, marks, decided = state
            block = take_block(number)
            new_rows, states, read, new_decided = begin_rows(
                spec, buckets.verify_width, model, compute, states, all_rows, drafts, block
            )
            marks = on_shards(_mark, marks, block.nodes, block.shard_row_ids, read, like=marks)
            rows = put_rows(rows, new_rows, block.shard_slots)
            return rows, states, marks, decided + new_decided

        shape = (*sequences.tokens.shape, 3)
        marks = jnp.zeros(shape, jnp.bool_, out_sharding=axes("batch", None, None))
        state = (rows, states, marks, jnp.zeros(2, jnp.int32))
        blocks = texts.blocks[chunk]
        rows, states, marks, decided = jax.lax.fori_loop(0, blocks, begin_block, state)
        fresh = [*states.layers, *_head_layers(spec, weights, model, sequences, states.hidden)]

        def write_block(number: Array, cache: KVCache) -> KVCache:
            block = take_block(number)
            return write_rows(cache, fresh, block.nodes, block.shard_slots)

        cache = jax.lax.fori_loop(0, blocks, write_block, cache)
        counts = counts.plus(_count_slots(buckets, states, copied, marks, decided))
        return cache, rows, states if buckets.window_slots else before, counts

    none = jnp.int32(0)
    state = (cache, rows, texts.before, PrefillCounts(*(none,) * 6))
    cache, rows, states, counts = jax.lax.fori_loop(0, texts.count, run_chunk, state)
    return cache, rows, states, counts, count_unfinished(rows)


def _begin_chunk(
    spec: RolloutSpec,
    buckets: Buckets,
    weights: Params,
    sequences: Sequences,
    before: TextStates | None,
    copied: Array | None,
    chunk: Array,
) -> tuple[TextStates, Callable]:
    """Return a chunk's states, and the function that computes more of them, see `begin_rows`."""
    if buckets.window_slots:
        model = Transformer(spec.model, weights)
        compute = functools.partial(compute_slots, model, sequences, buckets.window_slots)
        return carry_over(before, copied[chunk]), compute
    # The stacked layers are scanned: this compiles fast, and costs little, as chunks are few.
    model = Transformer(spec.model, weights | {"layers": weights["stacked"]})
    hidden, stacked = model(
        sequences.tokens,
        positions_BT=sequences.depths,
        ends_BT=sequences.ends,
        gives_cache=True,
        gives_routing=spec.keeps_routing,
    )
    stacked, routing = stacked if spec.keeps_routing else (stacked, None)
    layers = tuple(tuple(x[i] for x in stacked) for i in range(spec.model.num_layers))
    none = jnp.zeros(sequences.tokens.shape, jnp.bool_, out_sharding=axes("batch", None))
    states = TextStates(hidden, layers, none, jnp.int32(0), routing)
    return states, lambda states, nodes, required: states


def _head_layers(
    spec: RolloutSpec, weights: Params, model: Transformer, sequences: Sequences, hidden: Array
) -> list[Layer]:
    """Return keys and values of the draft head's layer, if there is one."""
    if spec.draft_head is None:
        return []
    head = DraftHead(spec.model, weights["draft_head"])
    states = gather_tokens(hidden, sequences.parents)
    embedded = model.lookup(sequences.tokens)
    _, own = head(states, embedded, positions_BT=sequences.depths, ends_BT=sequences.ends)
    return [own]


def _mark(marks: Array, nodes: Array, shard_row_ids: Array, read: Array) -> Array:
    """Mark the slots of rows' tokens: all, known ones, and those that were read; bool [m, T, 3].

    nodes: int32 [b, S]. shard_row_ids: int32 [b]. read: int32 [b, 2], known tokens and those read.
    """
    slots = marks.shape[0] * marks.shape[1]
    every = jnp.full_like(shard_row_ids, nodes.shape[1])
    counts = jnp.concatenate([every[:, None], read], axis=1)
    here = jnp.arange(nodes.shape[1])[None, :, None] < counts[:, None, :]
    here &= ((nodes >= 0) & (shard_row_ids >= 0)[:, None])[:, :, None]
    kinds = jnp.broadcast_to(jnp.arange(3), here.shape)
    places = jnp.where(here, nodes[:, :, None], slots)
    flat = marks.reshape(slots, 3)
    return flat.at[places, kinds].set(True, mode="drop").reshape(marks.shape)


def _count_slots(
    buckets: Buckets, states: TextStates, copied: Array, marks: Array, decided: Array
) -> PrefillCounts:
    """Return the counts of a chunk. copied: bool [m, T], slots that nobody computed.

    marks: of `_mark`. decided: int32 [2], verified and accepted draft tokens.
    """
    computed = states.windows * (buckets.window_slots * buckets.shards)
    filled = states.known
    if not buckets.window_slots:
        computed = jnp.int32(copied.size)
        filled = marks[..., 0]

    def count(mark: Array) -> Array:
        return jnp.sum(mark & ~copied, dtype=jnp.int32)

    return PrefillCounts(
        computed, count(filled), count(marks[..., 1]), count(marks[..., 2]), *decided
    )


def extend_inputs(shapes: RolloutShapes, text_shape: TextShape) -> tuple:
    """Return the inputs of `extend` for packed texts of a shape."""
    spec = shapes.spec
    buckets = shapes.buckets
    cache, rows = shapes.batch(buckets.sizes[0])
    none = np.zeros((0, spec.prompt_slots + spec.response_slots), np.int32)
    no_lens = none[:, 0]
    nothing = Texts(none, no_lens, no_lens, [no_lens] * buckets.shards, no_lens)
    before = ()
    states = None
    if buckets.window_slots:
        before = [TextPaths() for _ in range(buckets.shards)]
        states = abstract.result(functools.partial(blank_states, buckets=buckets), spec)
    texts = abstract.on_host(pack_shape(buckets, text_shape, nothing, before))
    return (
        spec,
        buckets,
        shapes.weights,
        cache,
        rows,
        shapes.all_rows,
        shapes.drafts,
        texts._replace(before=states),
    )


def _slots_free_first(done: Array, index: Array) -> Array:
    """Return all slots, int32 [b]: empty, then finished, then running."""
    return jnp.argsort(slot_ranks(done, index), stable=True, descending=True)


def _take_block(
    texts: PackedTexts, all_slots: Array, size: int, chunk: Array, number: Array
) -> RowBlock:
    """Return block `number` of a chunk's rows, `size` of each shard.

    all_slots: int32 [b], by `_slots_free_first`.
    """

    def local(chunk, number, all_slots, first_row, shard_row_ids, draft_ends, nodes) -> RowBlock:
        start = first_row[0, chunk] + number * size
        index = start + jnp.arange(size)
        real = index < first_row[0, chunk + 1]
        shard_row_ids = jax.lax.dynamic_slice_in_dim(shard_row_ids[0], start, size)
        nearest = jnp.minimum(index, all_slots.shape[0] - 1)
        shard_slots = all_slots.at[nearest].get(mode="promise_in_bounds")
        return RowBlock(
            jnp.where(real, shard_row_ids, -1),
            jnp.where(real, shard_slots, PADDING),
            jax.lax.dynamic_slice_in_dim(draft_ends[0], start, size),
            jax.lax.dynamic_slice_in_dim(nodes[0], start, size),
        )

    row = axes("batch")
    layouts = RowBlock(row, row, row, axes("batch", None))
    take = jax.shard_map(local, out_specs=layouts, check_vma=False)
    return take(
        chunk,
        number,
        all_slots,
        texts.first_row,
        texts.shard_row_ids,
        texts.draft_ends,
        texts.nodes,
    )


def begin_rows(
    spec: RolloutSpec,
    verify_width: int,
    model: Transformer,
    compute: Callable[[Any, Array, Array], Any],
    states: Any,
    all_rows: Rows,
    drafts: Drafts | None,
    block: RowBlock,
) -> tuple[Rows, Any, Array, Array]:
    """Begin the block's rows with the accepted tokens of their drafts and one that is sampled.

    states: of the rows' texts; its `hidden` is [m, T, D], and `block.nodes` are slots in it.
    compute: gives the states with more that are known, of states, nodes int32 [b, S] that may be
    computed, -1: none, and bool [b, S], those of them that must be. verify_width: draft tokens of a
    row that are decided together.

    Returns the rows, the states, the known tokens of each text and all that were read int32 [b, 2],
    and verified and accepted draft tokens, int32 [2].
    """
    rows = gather(all_rows, block.shard_row_ids)
    depths = rows.prompt_lens + rows.lens - 1  # depth of each row's last known token
    slots = block.nodes.shape[1]
    nodes = jnp.pad(block.nodes, ((0, 0), (0, verify_width)), constant_values=-1)

    def demand(states: Any, asked: Array, offset: Array, most: Array) -> Any:
        """Compute the `asked` rows' tokens up to `offset` [b], as it may be up to `most` [b]."""
        positions = jnp.arange(slots)[None, :]
        asked &= block.shard_row_ids >= 0
        maybe = asked[:, None] & (positions <= (depths + most)[:, None])
        required = positions <= (depths + offset)[:, None]
        return compute(states, jnp.where(maybe, block.nodes, -1), required)

    def states_at(states: Any, offset: Array, count: int) -> Array:
        """Return states [b, count, D]; the first gives the distribution of response token
        `rows.lens + offset`."""
        read = read_slots(nodes, jnp.minimum(depths + offset, slots), count)
        return take_nodes(states.hidden, read)

    def policy_after(
        states: Any, offset: Array, count: int
    ) -> TokenDistributions | FusedDistributions:
        """Return the policy in these states."""
        return policy_at(spec, rows, rows.lens + offset, model, states_at(states, offset, count))

    accepted = jnp.zeros_like(rows.lens)
    draft_len = accepted
    residual = None
    if drafts is not None:
        draft_slots = -(-spec.response_slots // verify_width) * verify_width
        stored = _take_drafts(drafts, block.shard_row_ids, rows.lens, draft_slots)
        draft_len = jnp.where(rows.done, 0, jnp.maximum(block.draft_ends - rows.lens, 0))
        accepted, residual, reused_tokens, states = _verify(
            spec, verify_width, rows, stored, draft_len, (demand, policy_after), states
        )
    else:
        states = demand(states, ~rows.done, accepted, accepted)
    weigh = None if residual is None else residual.weigh
    new = policy_after(states, accepted, 1).sample(weigh)
    if drafts is not None:
        new = jax.tree.map(functools.partial(_put_after, accepted), reused_tokens, new)
    real = ~rows.done
    known = rows
    rows, count = append(spec, rows, new, accepted, Source.REUSED)
    if states.routing is not None:
        routing = _fill_routing(spec, known, states.routing, block.nodes)
        rows = dataclasses.replace(rows, tokens=dataclasses.replace(rows.tokens, routing=routing))
    if spec.draft_head is not None:
        newest = jnp.maximum(count - 1, 0)
        rows = dataclasses.replace(rows, last_state=states_at(states, newest, 1)[:, 0])
    reused = jnp.minimum(accepted, count)
    rejected = (accepted < draft_len) & (count > accepted)
    counts = jnp.stack([jnp.where(real, reused + rejected, 0), jnp.where(real, reused, 0)])
    rows = dataclasses.replace(rows, prefix_lens=rows.prefix_lens + reused)
    read = jnp.where(
        real[:, None],
        depths[:, None] + jnp.stack([jnp.ones_like(accepted), accepted + 1], axis=1),
        0,
    )
    return rows, states, read, jnp.sum(counts, axis=1, dtype=jnp.int32)


def _fill_routing(spec: RolloutSpec, rows: Rows, routing: Array, nodes: Array) -> Array:
    """Return `Tokens.routing` [b, C, L, k] of rows that begin, where they have none from `routing`.

    rows: before they begin: tokens that they hold keep the experts that chose them, if known.
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
    spec: RolloutSpec,
    verify_width: int,
    rows: Rows,
    stored: Tokens,
    draft_len: Array,
    functions: tuple[Callable, Callable],
    states: Any,
) -> tuple[Array, Residual | None, Tokens, Any]:
    """Return how many draft tokens the rule accepts, deciding `verify_width` at a time.

    The rule looks at a draft until it rejects a token or is at the draft's end. Then it decides.

    stored: [b, W], the drafts of which `draft_len` [b] tokens count. functions: `demand` and
    `policy_after` of `begin_rows`. Returns the accepted tokens int32 [b], the residual, the columns
    [b, W] that rows get for tokens that are accepted, and the states.
    """
    demand, policy_after = functions
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
        policy = policy_after(states, first, verify_width)
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
        # With its last token a draft needs the state after it.
        after = first + verify_width
        offset = jnp.where(after >= draft_len, draft_len, after - 1)
        states = demand(states, asked | ((first == 0) & ~rows.done), offset, draft_len)
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
    # A step at least: it computes prompts.
    state = jax.lax.while_loop(lambda x: (x[0] == 0) | jnp.any(goes_on(x)), step, state)
    _, num_kept, (reused_tokens, evidence), states = state
    accepted, residual = spec.accept.decide(draft_at(0, slots), num_kept, reused_tokens, evidence)
    return accepted, residual, reused_tokens, states


def _put_after(counts: Array, draft: Array, sampled: Array) -> Array:
    """Put `sampled` [b, 1, ...] after the first `counts` [b] of `draft` [b, W, ...]."""
    here = jnp.arange(draft.shape[1], dtype=jnp.int32)[None, :] == counts[:, None]
    return jnp.where(jnp.expand_dims(here, tuple(range(2, draft.ndim))), sampled, draft)
