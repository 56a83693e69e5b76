"""`append` prefills the next turn of rows that stay in their slots of the running batch.

A row whose turn has ended keeps its slot and its keys. `append` computes the environment's answer
and the draft of the next turn, a window of `append_width` tokens at a time, and attends to the
row's own keys. So every token of an episode is computed once. Then the row starts as in `prefill`
(`start_rows`).

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
from specrl_jax.rollout.engine.verify import RowBlock, start_rows
from specrl_jax.rollout.rows import PADDING, Rows, gather, put_rows
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import axes, on_shards, reshard, take_own_rows
from specrl_jax.types import Drafts


class Appended(NamedTuple):
    """Rows that go on in their slots; int32 arrays of NumPy.

    Each of X shards has its own rows in M blocks; rows with most tokens to append come first.
    """

    blocks: np.ndarray  # [], blocks that hold rows: the first ones
    # [M], windows of `Buckets.append_width` tokens of each block, for the row with most to append
    windows: np.ndarray
    shard_row_ids: np.ndarray  # [X, n], among the shard's rows of the rollout, -1 after them
    shard_slots: np.ndarray  # [X, n], among the slots of the shard's part of the batch
    starts: np.ndarray  # [X, n], response position of the first token that is appended
    draft_ends: np.ndarray  # [X, n], response length up to which a row's draft is verified

    def on_mesh(self) -> "Appended":
        """Return them laid out over the mesh: every shard of the batch has its own."""
        counts = (reshard(self.blocks), reshard(self.windows, None))
        return Appended(*counts, *(reshard(x, "batch", None) for x in self[2:]))


def pack_appended(
    buckets: Buckets,
    shard_rows: int,
    row_ids: np.ndarray,
    shard_slots: np.ndarray,
    starts: np.ndarray,
    lens: np.ndarray,
    draft_ends: np.ndarray,
) -> Appended:
    """Pack the rows that go on.

    shard_rows: rows of the rollout on each shard. row_ids: int [k], among all rows. shard_slots,
    starts, draft_ends: int [k], as in `Appended`. lens: int32 [k], response tokens of the rows now.
    """
    block = buckets.block_rows
    blocks = -(-buckets.sizes[0] // buckets.shards // block)
    shape = (buckets.shards, blocks * block)
    appended = Appended(
        blocks=np.int32(0),
        windows=np.zeros(blocks, np.int32),
        shard_row_ids=np.full(shape, -1, np.int32),
        shard_slots=np.full(shape, PADDING, np.int32),
        starts=np.zeros(shape, np.int32),
        draft_ends=np.zeros(shape, np.int32),
    )
    counts = np.maximum(lens, draft_ends) - starts
    order = np.argsort(-counts, kind="stable")
    for shard in range(buckets.shards):
        own = order[row_ids[order] // shard_rows == shard]
        here = (shard, slice(0, len(own)))
        appended.shard_row_ids[here] = row_ids[own] % shard_rows
        appended.shard_slots[here] = shard_slots[own]
        appended.starts[here] = starts[own]
        appended.draft_ends[here] = draft_ends[own]
        most = -(-counts[own[::block]] // buckets.append_width)
        np.maximum(appended.windows[: len(most)], most, out=appended.windows[: len(most)])
    return appended._replace(blocks=np.int32(np.count_nonzero(appended.windows)))


@functools.partial(jax.jit, static_argnames="buckets", donate_argnames=("cache", "rows"))
def append(
    spec: RolloutSpec,
    buckets: Buckets,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    all_rows: Rows,
    drafts: Drafts | None,
    appended: Appended,
) -> tuple[KVCache, Rows, None, PrefillCounts, Array]:
    """Return the running batch in which the rows of `appended` have gone on in their slots.

    Arguments and results: see `prefill`.
    """
    model = Transformer(spec.model, weights)
    appended = appended.on_mesh()

    def run_block(number: Array, state: tuple) -> tuple:
        cache, rows, counts = state
        block, starts = _take_block(appended, number, buckets)
        old_rows = gather(all_rows, block.shard_row_ids)
        texts = _texts(old_rows, drafts, block.shard_row_ids, buckets.cache_slots)
        own = on_shards(_take_own_slots, cache, block.shard_slots, like=cache)
        states, compute = _start_block(spec, weights, buckets, own, old_rows, texts, starts)
        new_rows, states, read, decided = start_rows(
            spec, buckets.verify_width, model, compute, states, all_rows, drafts, block
        )
        cache = copy_rows(cache, states.own, block.shard_slots)
        rows = put_rows(rows, new_rows, block.shard_slots)
        width = states.windows * buckets.append_width
        first = old_rows.prompt_lens + starts
        ends = old_rows.prompt_lens + jnp.maximum(old_rows.lens, block.draft_ends)
        fed_tokens = jnp.where(block.shard_row_ids >= 0, jnp.clip(ends - first, 0, width), 0)
        new_counts = PrefillCounts(
            computed=width * len(starts),
            filled=jnp.sum(fed_tokens),
            known=jnp.sum(jnp.clip(read[:, 0] - first, 0, fed_tokens)),
            read=jnp.sum(jnp.clip(read[:, 1] - first, 0, fed_tokens)),
            verified=decided[0],
            accepted=decided[1],
        )
        return cache, rows, counts.plus(new_counts)

    none = jnp.int32(0)
    state = (cache, rows, PrefillCounts(*(none,) * 6))
    cache, rows, counts = jax.lax.fori_loop(0, appended.blocks, run_block, state)
    return cache, rows, None, counts, count_unfinished(rows)


def append_inputs(shapes: RolloutShapes, size: int) -> tuple:
    """Return the inputs of `append` for a batch of `size` slots."""
    buckets = shapes.buckets
    cache, rows = shapes.batch(size)
    none = np.zeros(0, np.int32)
    appended = pack_appended(
        buckets, shapes.num_rows // buckets.shards, none, none, none, none, none
    )
    return (
        shapes.spec,
        buckets,
        shapes.weights,
        cache,
        rows,
        shapes.all_rows,
        shapes.drafts,
        abstract.on_host(appended),
    )


def _take_block(appended: Appended, number: Array, buckets: Buckets) -> tuple[RowBlock, Array]:
    """Return the rows of a block, and the first response position to append of each, int32 [b]."""
    size = buckets.block_rows

    def local(number, shard_row_ids, shard_slots, starts, draft_ends) -> tuple[RowBlock, Array]:
        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x[0], number * size, size)

        # The states of a row lie in the order of its slots.
        nodes = jnp.arange(size * buckets.cache_slots, dtype=jnp.int32).reshape(
            size, buckets.cache_slots
        )
        return RowBlock(cut(shard_row_ids), cut(shard_slots), cut(draft_ends), nodes), cut(starts)

    row = axes("batch")
    layouts = RowBlock(row, row, row, axes("batch", None)), row
    take = jax.shard_map(local, out_specs=layouts, check_vma=False)
    return take(
        number, appended.shard_row_ids, appended.shard_slots, appended.starts, appended.draft_ends
    )


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
    """Return a block's states, and the function that appends more windows, see `start_rows`.

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


def _take_own_slots(cache: KVCache, shard_slots: Array) -> KVCache:
    return take_own_rows(cache, jnp.minimum(shard_slots, cache[0][0].shape[0] - 1))


def _texts(rows: Rows, drafts: Drafts | None, shard_row_ids: Array, slots: int) -> Array:
    """Return int32 [b, `slots`]: each row's own tokens, then the rest of its draft."""
    texts = jnp.pad(rows.tokens.ids, ((0, 0), (0, slots)))[:, :slots]
    if drafts is None:
        return texts
    drafted = on_shards(take_own_rows, drafts.tokens.ids, jnp.maximum(shard_row_ids, 0), like=texts)
    drafted = jnp.pad(drafted, ((0, 0), (0, slots)))[:, :slots]
    inside = jnp.arange(slots)[None, :] < rows.lens[:, None]
    return jnp.where(inside, texts, drafted)
