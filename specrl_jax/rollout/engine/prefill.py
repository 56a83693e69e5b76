"""Prefill: computes keys, values and states of a row's prompt, any tokens it already has, and its
draft, then verifies the draft.

A row may already have tokens (from an earlier step or turn) and a draft. The host packs the texts
of many rows, every distinct prefix once (`pack_texts`). One program processes the sequences chunk
by chunk. It decides which draft tokens are accepted, samples the token after them, and writes keys
and values into free slots of the running batch. A chunk is computed whole, or only as far as its
slots are needed (`text_states.py`). `append` decides in the same way for rows that keep their slot.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3, no tokens yet
    tokens          a b c | x y z          draft x y z
    states of         c   x y z            give distributions at positions 0, 1, 2, 3
    x accepted, y not, w sampled           lens = 2, last = w: the next step feeds w at slot 4

A row without a draft has an empty draft. Shapes follow from the configuration alone: the number of
chunks with tokens, of rows that start, and of tokens of the longest draft are loop counts. A
rejected token needs no cleanup: it is not counted, and a later token takes its slot.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.models.draft_head import DraftHead
from specrl_jax.models.kv_cache import KVCache, Layer, write_rows
from specrl_jax.models.row_slices import gather_tokens
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.packing import Sequences
from specrl_jax.rollout.engine.buckets import Buckets, TextShape
from specrl_jax.rollout.engine.decode import count_unfinished
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.engine.text_states import (
    TextStates,
    blank_states,
    compute_slots,
    copy_to_next_chunk,
)
from specrl_jax.rollout.engine.texts import PackedTexts, TextPaths, Texts, pack_shape
from specrl_jax.rollout.engine.verify import RowBlock, verify_and_sample
from specrl_jax.rollout.rows import PADDING, Rows, put_rows, slot_ranks
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import axes, on_shards
from specrl_jax.types import Drafts


class PrefillCounts(NamedTuple):
    """Counts of what `prefill` or `append` has computed and decided; int32 []."""

    computed: Array  # slots
    filled: Array  # slots with a token
    known: Array  # slots of prompts and of tokens that rows already had
    read: Array  # these, and slots of accepted draft tokens
    verified: Array  # draft tokens that the rule decided on
    accepted: Array  # draft tokens

    def plus(self, other: "PrefillCounts") -> "PrefillCounts":
        return jax.tree.map(jnp.add, self, other)


@functools.partial(jax.jit, static_argnames="buckets", donate_argnames=("cache", "rows"))
def prefill(
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

    all_rows: [B], with the tokens they already have. drafts: [B], for the acceptance rule to
    verify; a draft starts with its row's own tokens. None: the run has no drafts.

    Returns the cache, the rows, the states to pass to the next call as `texts.before`, counts, and
    the result of `decode.count_unfinished`.
    """
    texts = texts.on_mesh()
    all_slots = on_shards(_slots_free_first, rows.done, rows.row_ids, like=rows.lens)
    model = Transformer(spec.model, weights)

    def run_chunk(chunk: Array, state: tuple) -> tuple:
        cache, rows, before, counts = state
        sequences = jax.tree.map(lambda x: x[chunk], texts.sequences)
        states, compute = _start_chunk(
            spec, buckets, weights, sequences, before, texts.copied, chunk
        )
        copied = states.known
        take_block = functools.partial(_take_block, texts, all_slots, buckets.block_rows, chunk)

        def start_block(number: Array, state: tuple) -> tuple:
            rows, states, marks, decided = state
            block = take_block(number)
            new_rows, states, read, new_decided = verify_and_sample(
                spec, buckets.verify_width, model, compute, states, all_rows, drafts, block
            )
            marks = on_shards(_mark, marks, block.nodes, block.shard_row_ids, read, like=marks)
            rows = put_rows(rows, new_rows, block.shard_slots)
            return rows, states, marks, decided + new_decided

        shape = (*sequences.tokens.shape, 3)
        marks = jnp.zeros(shape, jnp.bool_, out_sharding=axes("batch", None, None))
        state = (rows, states, marks, jnp.zeros(2, jnp.int32))
        blocks = texts.blocks[chunk]
        rows, states, marks, decided = jax.lax.fori_loop(0, blocks, start_block, state)
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


def _start_chunk(
    spec: RolloutSpec,
    buckets: Buckets,
    weights: Params,
    sequences: Sequences,
    before: TextStates | None,
    copied: Array | None,
    chunk: Array,
) -> tuple[TextStates, Callable]:
    """Return a chunk's states and what computes more of them, see `verify_and_sample`."""
    if buckets.window_slots:
        model = Transformer(spec.model, weights)
        compute = functools.partial(compute_slots, model, sequences, buckets.window_slots)
        return copy_to_next_chunk(before, copied[chunk]), compute
    # The stacked layers are scanned: this compiles fast and costs little, as chunks are few.
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
    """Mark the slots of rows' tokens: all, known and read ones; bool [m, T, 3].

    nodes: int32 [b, S]. shard_row_ids: int32 [b]. read: int32 [b, 2], known and read tokens.
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
    """Return the counts of a chunk. copied: bool [m, T], slots copied instead of computed.

    marks: from `_mark`. decided: int32 [2], verified and accepted draft tokens.
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


def prefill_inputs(shapes: RolloutShapes, text_shape: TextShape) -> tuple:
    """Return the inputs of `prefill` for packed texts of this shape."""
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
