"""`append` prefills the next turn of rows that stay in their slots of the running batch.

A row whose turn has ended keeps its slot and its keys. `append` computes the environment's answer
and the draft of the next turn, a window of `append_width` tokens at a time, and attends to the
row's own keys. So every token of an episode is computed once. Then the row starts as in `prefill`
(`verify_and_sample`).

    slot            0 1 2 | 3 4 | 5 6 | 7 8        prompt_len = 3
    tokens          a b c | x y | o p | d e        a turn, the answer, a draft
    appended                 y   o p   d e              y was sampled, and has no key yet: start = 1
    states of                 p   d e              give distributions at positions 4, 5, 6
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
from specrl_jax.models.kv_cache import KVCache, cache_slots, copy_rows
from specrl_jax.models.row_slices import read_slots, write_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import count_unfinished
from specrl_jax.rollout.engine.prefill import PrefillCounts
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.engine.verify import RowBlock, verify_and_sample
from specrl_jax.rollout.rows import PADDING, Rows, gather, put_rows
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import axes, on_shards, reshard, take_own_rows
from specrl_jax.types import Drafts


class AppendedBlock(NamedTuple):
    """Rows that continue in their slots together: `Buckets.block_rows` of each shard, int32 [b]."""

    shard_row_ids: np.ndarray | Array  # among the shard's rows of the rollout; -1: none
    shard_slots: np.ndarray | Array  # of the shard's part of the batch; outside it: none
    starts: np.ndarray | Array  # response position of the first token that is appended
    draft_ends: np.ndarray | Array  # response length up to which a row's draft is verified

    def on_mesh(self) -> "AppendedBlock":
        """Return it laid out over the mesh: every shard of the batch has its own rows."""
        return AppendedBlock(*(reshard(x, "batch") for x in self))


def pack_appended(
    buckets: Buckets,
    shard_rows: int,
    row_ids: np.ndarray,
    shard_slots: np.ndarray,
    starts: np.ndarray,
    lens: np.ndarray,
    draft_ends: np.ndarray,
) -> list[AppendedBlock]:
    """Pack the rows that continue into blocks of NumPy arrays; longest additions first.

    shard_rows: rows of the rollout on each shard. row_ids: int [k], among all rows. shard_slots,
    starts, draft_ends: int [k], as in `AppendedBlock`. lens: int32 [k], response tokens of the rows
    now.
    """
    order = np.argsort(starts - np.maximum(lens, draft_ends), kind="stable")
    shard_of_row = row_ids[order] // shard_rows
    own_rows = [order[shard_of_row == shard] for shard in range(buckets.shards)]
    shape = (buckets.shards, buckets.block_rows)
    blocks = []
    for first in range(0, max(map(len, own_rows)), buckets.block_rows):
        block = AppendedBlock(
            shard_row_ids=np.full(shape, -1, np.int32),
            shard_slots=np.full(shape, PADDING, np.int32),
            starts=np.zeros(shape, np.int32),
            draft_ends=np.zeros(shape, np.int32),
        )
        for shard, own in enumerate(own_rows):
            picks = own[first : first + buckets.block_rows]
            here = (shard, slice(0, len(picks)))
            block.shard_row_ids[here] = row_ids[picks] % shard_rows
            block.shard_slots[here] = shard_slots[picks]
            block.starts[here] = starts[picks]
            block.draft_ends[here] = draft_ends[picks]
        blocks.append(AppendedBlock(*(x.reshape(-1) for x in block)))
    return blocks


def append(
    spec: RolloutSpec,
    buckets: Buckets,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    all_rows: Rows,
    drafts: Drafts | None,
    block: AppendedBlock,
) -> tuple[KVCache, Rows, PrefillCounts, Array]:
    """Return the running batch in which the rows of `block` have continued in their slots.

    `append_block` alone runs the model. No shape in it depends on the size of the batch, so that it
    compiles once. Arguments and results: see `prefill`. `cache` and `rows` are donated.
    """
    own = take_block(cache, block.shard_slots)
    own, new_rows, counts = append_block(spec, buckets, weights, own, all_rows, drafts, block)
    cache, rows, unfinished = put_block(cache, rows, own, new_rows, block.shard_slots)
    return cache, rows, counts, unfinished


@jax.jit
def take_block(cache: KVCache, shard_slots: Array) -> KVCache:
    """Return the block's rows of the batch's cache. shard_slots: of `AppendedBlock`."""

    def local(cache: KVCache, shard_slots: Array) -> KVCache:
        return take_own_rows(cache, jnp.minimum(shard_slots, cache[0][0].shape[0] - 1))

    return on_shards(local, cache, reshard(shard_slots, "batch"), like=cache)


@functools.partial(jax.jit, static_argnames="buckets", donate_argnames="own")
def append_block(
    spec: RolloutSpec,
    buckets: Buckets,
    weights: Params,
    own: KVCache,
    all_rows: Rows,
    drafts: Drafts | None,
    block: AppendedBlock,
) -> tuple[KVCache, Rows, PrefillCounts]:
    """Return the block's cache and rows after they continued. own: the block's cache before."""
    model = Transformer(spec.model, weights)
    block = block.on_mesh()
    starts = block.starts
    old_rows = gather(all_rows, block.shard_row_ids)
    texts = _texts(old_rows, drafts, block.shard_row_ids, buckets.cache_slots)
    nodes = on_shards(_nodes_in_slots, texts, like=texts)
    row_block = RowBlock(block.shard_row_ids, block.shard_slots, block.draft_ends, nodes)
    states, compute = _start_block(spec, weights, buckets, own, old_rows, texts, starts)
    new_rows, states, read, decided = verify_and_sample(
        spec, buckets.verify_width, model, compute, states, all_rows, drafts, row_block
    )
    width = states.windows * buckets.append_width
    first = old_rows.prompt_lens + starts
    ends = old_rows.prompt_lens + jnp.maximum(old_rows.lens, block.draft_ends)
    fed_tokens = jnp.where(block.shard_row_ids >= 0, jnp.clip(ends - first, 0, width), 0)
    counts = PrefillCounts(
        computed=width * len(starts),
        filled=jnp.sum(fed_tokens),
        known=jnp.sum(jnp.clip(read[:, 0] - first, 0, fed_tokens)),
        read=jnp.sum(jnp.clip(read[:, 1] - first, 0, fed_tokens)),
        verified=decided[0],
        accepted=decided[1],
    )
    return states.own, new_rows, counts


@functools.partial(jax.jit, donate_argnames=("cache", "rows"))
def put_block(
    cache: KVCache, rows: Rows, own: KVCache, new_rows: Rows, shard_slots: Array
) -> tuple[KVCache, Rows, Array]:
    """Return the batch with the block's cache and rows, and what `count_unfinished` returns."""
    shard_slots = reshard(shard_slots, "batch")
    cache = copy_rows(cache, own, shard_slots)
    rows = put_rows(rows, new_rows, shard_slots)
    return cache, rows, count_unfinished(rows)


def append_inputs(shapes: RolloutShapes) -> tuple:
    """Return the inputs of `append_block`."""
    own, _, block = _block_shapes(shapes)
    return (
        shapes.spec,
        shapes.buckets,
        shapes.weights,
        own,
        shapes.all_rows,
        shapes.drafts,
        block,
    )


def take_inputs(shapes: RolloutShapes, size: int) -> tuple:
    """Return the inputs of `take_block` for a batch of `size` slots."""
    cache, _ = shapes.batch(size)
    return cache, _block_shapes(shapes)[2].shard_slots


def put_inputs(shapes: RolloutShapes, size: int) -> tuple:
    """Return the inputs of `put_block` for a batch of `size` slots."""
    own, new_rows, block = _block_shapes(shapes)
    return *shapes.batch(size), own, new_rows, block.shard_slots


def _block_shapes(shapes: RolloutShapes) -> tuple[KVCache, Rows, AppendedBlock]:
    """Return cache, rows and numbers of a block."""
    count = shapes.buckets.block_rows * shapes.buckets.shards
    numbers = AppendedBlock(*(np.zeros(count, np.int32),) * 4)
    return *shapes.batch(count), abstract.on_host(numbers)


def _nodes_in_slots(texts: Array) -> Array:
    """Return `RowBlock.nodes` of texts [b, S] whose states lie in the order of their slots."""
    return jnp.arange(texts.size, dtype=jnp.int32).reshape(texts.shape)


class AppendedStates(NamedTuple):
    """Results of a block's rows in their slots."""

    own: KVCache  # of the block's rows
    hidden: Array  # [b, S, D]
    windows: Array  # int32 [], windows that were appended
    routing: Array | None  # [b, S, L, k], as in `Tokens.routing`; None: not kept


def _start_block(
    spec: RolloutSpec,
    weights: Params,
    buckets: Buckets,
    own: KVCache,
    rows: Rows,
    texts: Array,
    starts: Array,
) -> tuple[AppendedStates, Callable]:
    """Return a block's states, and the function that appends more windows, see `verify_and_sample`.

    Nobody reads the slots that a window writes after a row's last token. texts: int32 [b, S], of
    the responses. starts: int32 [b].
    """
    model = Transformer(spec.model, weights)
    layers = spec.model.num_layers
    width = buckets.append_width
    slots = cache_slots(own)
    first = rows.prompt_lens + starts
    shape = (len(starts), slots, spec.model.embed_dim)
    hidden = jnp.zeros(shape, spec.model.dtype, out_sharding=axes("batch", None, None))
    routing = None
    if spec.keeps_routing:
        shape = (*shape[:2], *spec.routing.shape)
        layout = axes("batch", None, None, None)
        routing = jnp.zeros(shape, spec.routing.dtype, out_sharding=layout)
    head = None
    if spec.draft_head is not None:
        head = DraftHead(spec.model, weights["draft_head"])
        hidden = write_slots(hidden, rows.last_state[:, None], first - 1)

    def append_window(states: AppendedStates) -> AppendedStates:
        start = jnp.minimum(first + states.windows * width, slots - width)
        tokens = read_slots(texts, start - rows.prompt_lens, width)
        new, policy_cache = model(
            tokens, start, states.own[:layers], gives_routing=spec.keeps_routing
        )
        routing = None
        if spec.keeps_routing:
            policy_cache, chosen = policy_cache
            routing = write_slots(states.routing, chosen, start)
        head_cache = states.own[layers:]
        hidden = write_slots(states.hidden, new, start)
        if head is not None:
            before = read_slots(hidden, start - 1, width)
            _, layer = head(before, model.lookup(tokens), start, *head_cache)
            head_cache = (layer,)
        own = (*policy_cache, *head_cache)
        return AppendedStates(own, hidden, states.windows + 1, routing)

    def compute(states: AppendedStates, nodes: Array, required: Array) -> AppendedStates:
        positions = jnp.arange(slots)[None, :]
        ends = jnp.max(jnp.where(required & (nodes >= 0), positions + 1, 0), axis=1)
        windows = jnp.max(-(-(ends - first) // width))
        return jax.lax.while_loop(lambda states: states.windows < windows, append_window, states)

    return AppendedStates(own, hidden, jnp.int32(0), routing), compute


def _texts(rows: Rows, drafts: Drafts | None, shard_row_ids: Array, slots: int) -> Array:
    """Return int32 [b, `slots`]: each row's own tokens, then the rest of its draft."""
    texts = jnp.pad(rows.tokens.ids, ((0, 0), (0, slots)))[:, :slots]
    if drafts is None:
        return texts
    drafted = on_shards(take_own_rows, drafts.tokens.ids, jnp.maximum(shard_row_ids, 0), like=texts)
    drafted = jnp.pad(drafted, ((0, 0), (0, slots)))[:, :slots]
    inside = jnp.arange(slots)[None, :] < rows.lens[:, None]
    return jnp.where(inside, texts, drafted)
