"""`extend` lets rows begin: it computes what a row has, and no slot of the running batch holds.

A row has a prompt; it may hold tokens (a resumed row, an earlier turn); it may have a draft. The
host packs these of many rows, every distinct prefix once (`pack_prefixes`). One program computes
the sequences chunk by chunk, writes keys and values into free slots of the running batch, decides
which tokens of the drafts are accepted, and samples the token after them. Rows that go on in their
slots are decided on in the same way (`feed`).

    slot            0 1 2 | 3 4 5 6        prompt_len = 3, no tokens yet
    tokens          a b c | x y z          draft x y z
    states of         c   x y z            give distributions at positions 0, 1, 2, 3
    x accepted, y not, w sampled           lens = 2, last = w: the next step feeds w at slot 4

A row without a draft is one whose draft has no tokens. Shapes follow from the configuration alone:
how many chunks hold tokens, how many rows begin, and how long the longest draft is, are counts of
loops. A rejected token needs no cleaning up: it is not counted, and its slot is written over later.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.draft_head import DraftHead
from specrl_jax.models.kv_cache import KVCache, take_nodes, write_rows
from specrl_jax.models.row_slices import read_slots, take_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.packing import PACKINGS, Sequences, pack
from specrl_jax.rollout.acceptance import DraftTokens, Residual
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import StopCondition, append, policy_at, progress
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.one_pass import OnePass
from specrl_jax.rollout.rows import PADDING, Rows, gather, put_rows, slot_ranks
from specrl_jax.rollout.sampling import TokenDistributions, uniforms
from specrl_jax.sharding import axes, on_shards, reshard, take_own_rows
from specrl_jax.types import Drafts, Source, TokenColumns


class Prefixes(NamedTuple):
    """Tokens of rows that begin, packed; int32 arrays of NumPy.

    Of X shards each counts its own sequences and rows. A shard's rows lie in the order of the
    chunks that hold them; the first takes the first free slot of the running batch, and so on.
    """

    tokens: np.ndarray  # [M, m, T], chunks of sequences, as `packing.Sequences`
    depths: np.ndarray  # [M, m, T]
    ends: np.ndarray  # [M, m, T]
    parents: np.ndarray  # [M, m, T]
    count: np.ndarray  # [], chunks that hold tokens: the first ones
    blocks: np.ndarray  # [M], blocks of rows in each chunk, of the shard that has most
    first_row: np.ndarray  # [X, M + 1], of each chunk
    rows: np.ndarray  # [X, n], row indices among the shard's rows of the rollout
    draft_ends: np.ndarray  # [X, n], response length up to which a row's draft is verified
    nodes: np.ndarray  # [X, n, S], slot of each token in its chunk's [m / X · T], -1 after them

    def on_mesh(self) -> "Prefixes":
        """Return them laid out over the mesh: every shard of the batch has its own."""
        return Prefixes(
            tokens=reshard(self.tokens, None, "batch", None),
            depths=reshard(self.depths, None, "batch", None),
            ends=reshard(self.ends, None, "batch", None),
            parents=reshard(self.parents, None, "batch", None),
            count=reshard(self.count),
            blocks=reshard(self.blocks, None),
            first_row=reshard(self.first_row, "batch", None),
            rows=reshard(self.rows, "batch", None),
            draft_ends=reshard(self.draft_ends, "batch", None),
            nodes=reshard(self.nodes, "batch", None, None),
        )


def pack_prefixes(
    buckets: Buckets,
    tokens: np.ndarray,
    lens: np.ndarray,
    rows: list[np.ndarray],
    draft_ends: np.ndarray,
) -> Prefixes:
    """Pack the rows that begin.

    tokens: int32 [k, P + R], right-padded, of which `lens` count: prompt, own tokens, draft. rows:
    int, of each shard, as in `Prefixes`; together k, in the order of `tokens`. draft_ends: int32
    [k].
    """
    chunks = buckets.chunks
    sequences = buckets.chunk_sequences  # of a shard
    length = buckets.sequence_slots
    block = buckets.block_rows
    most = buckets.rows[0] // len(rows) + block  # so that a block with a row lies inside
    first_row = np.zeros((len(rows), chunks + 1), np.int32)
    index = np.zeros((len(rows), most), np.int32)
    end_lens = np.zeros_like(index)
    nodes = np.full((len(rows), most, tokens.shape[1]), -1, np.int32)
    parts = []
    start = 0
    for shard, own_rows in enumerate(rows):
        own = slice(start, start + len(own_rows))
        start = own.stop
        packed, paths = pack(tokens[own], lens[own], length, PACKINGS["trie"])
        parts.append(packed)
        chunk = np.array([path[0] for path in paths], int) // (sequences * length)
        order = np.lexsort((-draft_ends[own], chunk))
        first_row[shard] = np.searchsorted(chunk[order], np.arange(chunks + 1))
        filled = slice(0, len(order))
        index[shard, filled] = own_rows[order]
        end_lens[shard, filled] = draft_ends[own][order]
        for position, row in enumerate(order.tolist()):
            path = paths[row] - chunk[row] * sequences * length
            nodes[shard, position, : len(path)] = path
    in_chunks = np.diff(first_row, axis=1)
    count = int(np.flatnonzero(in_chunks.any(axis=0)).max(initial=-1) + 1)
    # Zeros after the chunks that hold tokens: memory that nobody writes costs next to nothing.
    shape = (chunks, len(rows) * sequences, length)
    whole = Sequences(*(np.zeros(shape, np.int32) for _ in Sequences._fields))
    for shard, part in enumerate(parts):
        own = slice(shard * sequences, (shard + 1) * sequences)
        for array, values in zip(whole, part.padded(count * sequences)):
            array[:count, own] = values.reshape(count, sequences, length)
    return Prefixes(
        tokens=whole.tokens,
        depths=whole.depths,
        ends=whole.ends,
        parents=whole.parents,
        count=np.int32(count),
        blocks=(-(-in_chunks // block)).max(axis=0).astype(np.int32),
        first_row=first_row,
        rows=index,
        draft_ends=end_lens,
        nodes=nodes,
    )


class RowBlock(NamedTuple):
    """Rows of every shard that are decided together, int32."""

    row_ids: Array  # [b], among the shard's rows of the rollout; -1: none
    batch_slots: Array  # [b], where they begin; outside the batch: none
    draft_ends: Array  # [b]
    nodes: Array  # [b, S]


@functools.partial(jax.jit, static_argnames=("spec", "buckets"), donate_argnames=("cache", "rows"))
def extend(
    spec: RolloutSpec,
    buckets: Buckets,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    all_rows: Rows,
    drafts: Drafts | None,
    log_lenience: Array,
    prefixes: Prefixes,
    stop: StopCondition,
) -> tuple[KVCache, Rows, Array, Array]:
    """Return the running batch with the rows of `prefixes` in free slots of it.

    all_rows: [B], of which some begin, with what they hold. drafts: [B], for the acceptance rule to
    verify; a draft begins with what its row holds. None: the run has none. log_lenience: nats.

    Returns the cache, the rows, int32 [2] tokens of drafts that were verified and those that were
    accepted, and what `decode.progress` returns.
    """
    model = Transformer(spec.model, weights | {"layers": weights["stacked"]})
    layers = spec.model.num_layers
    prefixes = prefixes.on_mesh()
    free = on_shards(_free_slots, rows.done, rows.index, like=rows.lens)

    def run_chunk(chunk: Array, state: tuple) -> tuple:
        tokens = prefixes.tokens[chunk]
        depths = prefixes.depths[chunk]
        ends = prefixes.ends[chunk]
        hidden, stacked = model(tokens, positions_BT=depths, ends_BT=ends, gives_cache=True)
        head_cache = []
        if spec.draft_head is not None:
            head = DraftHead(spec.model, weights["draft_head"])
            states = take_slots(hidden, prefixes.parents[chunk])
            _, own = head(states, model.lookup(tokens), positions_BT=depths, ends_BT=ends)
            head_cache = [own]

        def run_block(number: Array, state: tuple) -> tuple:
            cache, rows, counts = state
            block = _take_block(prefixes, free, chunk, number, buckets.block_rows)
            fresh = [tuple(x[i] for x in stacked) for i in range(layers)]
            cache = write_rows(cache, fresh + head_cache, block.nodes, block.batch_slots)
            begun, new = begin_rows(
                spec, buckets.draft_columns, model, hidden, all_rows, drafts, log_lenience, block
            )
            return cache, put_rows(rows, begun, block.batch_slots), counts + new

        return jax.lax.fori_loop(0, prefixes.blocks[chunk], run_block, state)

    state = (cache, rows, jnp.zeros(2, jnp.int32))
    cache, rows, counts = jax.lax.fori_loop(0, prefixes.count, run_chunk, state)
    return cache, rows, counts, progress(rows, stop)


def _free_slots(done: Array, index: Array) -> Array:
    """int32 [b], all slots: those without a row first, then those of rows that are done."""
    return jnp.argsort(slot_ranks(done, index), stable=True, descending=True)


def _take_block(
    prefixes: Prefixes, free: Array, chunk: Array, number: Array, size: int
) -> RowBlock:
    """Take the rows of block `number` of a chunk, `size` of each shard.

    free: int32 [b], by `_free_slots`.
    """

    def local(chunk, number, free, first_row, row_ids, draft_ends, nodes) -> RowBlock:
        start = first_row[0, chunk] + number * size
        index = start + jnp.arange(size)
        real = index < first_row[0, chunk + 1]
        row_ids = jax.lax.dynamic_slice_in_dim(row_ids[0], start, size)
        slots = free.at[jnp.minimum(index, free.shape[0] - 1)].get(mode="promise_in_bounds")
        return RowBlock(
            jnp.where(real, row_ids, -1),
            jnp.where(real, slots, PADDING),
            jax.lax.dynamic_slice_in_dim(draft_ends[0], start, size),
            jax.lax.dynamic_slice_in_dim(nodes[0], start, size),
        )

    row = axes("batch")
    layouts = RowBlock(row, row, row, axes("batch", None))
    take = jax.shard_map(local, out_specs=layouts, check_vma=False)
    return take(
        chunk,
        number,
        free,
        prefixes.first_row,
        prefixes.rows,
        prefixes.draft_ends,
        prefixes.nodes,
    )


def begin_rows(
    spec: RolloutSpec,
    columns: int,
    model: Transformer,
    hidden: Array,
    all_rows: Rows,
    drafts: Drafts | None,
    log_lenience: Array,
    block: RowBlock,
) -> tuple[Rows, Array]:
    """Begin the block's rows with the accepted tokens of their drafts and one that is sampled.

    hidden: [m, T, D], of which `block.nodes` are the rows' own. Returns the rows and int32 [2], as
    `extend` counts.
    """
    rows = gather(all_rows, block.row_ids)
    depths = rows.prompt_lens + rows.lens - 1  # of the state that decides on the next token
    slots = block.nodes.shape[1]
    nodes = jnp.pad(block.nodes, ((0, 0), (0, columns)), constant_values=-1)

    def states_at(offset: Array, count: int) -> Array:
        """States [b, count, D] from `offset` tokens after the first that decides on."""
        read = read_slots(nodes, jnp.minimum(depths + offset, slots), count)
        return take_nodes(hidden, read)

    def policy_after(offset: Array, count: int) -> TokenDistributions | OnePass:
        """Return the policy in these states."""
        return policy_at(spec, rows, rows.lens + offset, model, states_at(offset, count))

    accepted = jnp.zeros_like(rows.lens)
    draft_len = accepted
    residual = None
    if drafts is not None:
        width = -(-spec.response_slots // columns) * columns
        stored = _take_drafts(drafts, block.row_ids, rows.lens, width)
        draft_len = jnp.where(rows.done, 0, jnp.maximum(block.draft_ends - rows.lens, 0))
        accepted, residual, reused_tokens = _verify(
            spec, columns, rows, stored, draft_len, log_lenience, policy_after
        )
    weigh = None if residual is None else residual.weigh
    new = policy_after(accepted, 1).sample(weigh)
    if drafts is not None:
        new = jax.tree.map(functools.partial(_put_after, accepted), reused_tokens, new)
    real = ~rows.done
    rows, count = append(spec, rows, new, accepted, Source.REUSED)
    if spec.draft_head is not None:
        newest = jnp.maximum(count - 1, 0)
        rows = dataclasses.replace(rows, last_state=states_at(newest, 1)[:, 0])
    reused = jnp.minimum(accepted, count)
    rejected = (accepted < draft_len) & (count > accepted)
    counts = jnp.stack([jnp.where(real, reused + rejected, 0), jnp.where(real, reused, 0)])
    rows = dataclasses.replace(rows, prefix_lens=rows.prefix_lens + reused)
    return rows, jnp.sum(counts, axis=1, dtype=jnp.int32)


def _take_drafts(drafts: Drafts, index: Array, lens: Array, width: int) -> TokenColumns:
    """Take the drafts [b, `width`] of rows `index`, from token `lens` [b] on; zeros after them."""
    stored = TokenColumns(
        drafts.tokens, None, drafts.sampling_logprobs, drafts.top_ids, drafts.top_logprobs
    )
    own = on_shards(take_own_rows, stored, jnp.maximum(index, 0), like=stored)

    def align(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, width), *((0, 0),) * (x.ndim - 2)))
        return read_slots(x, lens, width)

    return jax.tree.map(align, own)


def _verify(
    spec: RolloutSpec,
    columns: int,
    rows: Rows,
    stored: TokenColumns,
    draft_len: Array,
    log_lenience: Array,
    policy_after: Callable[[Array, int], TokenDistributions | OnePass],
) -> tuple[Array, Residual | None, TokenColumns]:
    """Let the rule look at drafts, some columns at a time, until every row has rejected a token or
    is at its draft's end, and decide.

    stored: [b, W], the drafts of which `draft_len` [b] tokens count. Returns the accepted tokens
    int32 [b], the residual, and the columns [b, W] that rows get for tokens that are accepted.
    """
    width = stored.tokens.shape[1]

    def draft_at(first: Array | int, count: int) -> DraftTokens:
        positions = (rows.lens + first)[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=1
        )
        noise = uniforms(rows.accept_seeds, reshard(positions, "batch", None))
        lens = jnp.clip(draft_len - first, 0, count)
        return DraftTokens(lens, jax.tree.map(cut, stored), noise, log_lenience)

    def look(first: Array) -> tuple:
        return spec.accept.look(draft_at(first, columns), policy_after(first, columns))

    def goes_on(state: tuple) -> Array:
        first, accepted, _ = state
        return (accepted == first) & (first < draft_len)

    def step(state: tuple) -> tuple:
        first, accepted, seen = state
        kept, *new = look(first)
        seen = jax.tree.map(
            lambda x, part: jax.lax.dynamic_update_slice_in_dim(x, part, first, axis=1), seen, new
        )
        return first + columns, jnp.where(goes_on(state), first + kept, accepted), seen

    def widened(x: jax.ShapeDtypeStruct) -> Array:
        shape = (x.shape[0], width, *x.shape[2:])
        return jnp.zeros(shape, x.dtype, out_sharding=axes("batch", *(None,) * (len(shape) - 1)))

    _, *shapes = jax.eval_shape(look, jnp.int32(0))
    seen = jax.tree.map(widened, shapes)
    state = (jnp.int32(0), jnp.zeros_like(draft_len), seen)
    _, kept, (now, seen) = jax.lax.while_loop(lambda x: jnp.any(goes_on(x)), step, state)
    accepted, residual = spec.accept.decide(draft_at(0, width), kept, now, seen)
    return accepted, residual, now


def _put_after(counts: Array, draft: Array, sampled: Array) -> Array:
    """Put `sampled` [b, 1, ...] after the first `counts` [b] of `draft` [b, W, ...]."""
    here = jnp.arange(draft.shape[1], dtype=jnp.int32)[None, :] == counts[:, None]
    return jnp.where(jnp.expand_dims(here, tuple(range(2, draft.ndim))), sampled, draft)
