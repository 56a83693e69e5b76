"""`extend` lets rows begin. It computes keys, values and states of a row's prompt, own tokens and
draft, which are not in the cache yet.

A row may hold tokens (of an earlier step or turn) and a draft. The host packs the texts of many
rows, every distinct prefix once (`pack_texts`). One program computes the sequences chunk by
chunk, writes keys and values into free slots of the running batch, decides which draft tokens are
accepted, and samples the token after them. `feed` decides in the same way on rows that go on in
their slots.

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.models.draft_head import DraftHead
from specrl_jax.models.kv_cache import KVCache, take_nodes, write_rows
from specrl_jax.models.row_slices import gather_tokens, read_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.packing import PACKINGS, Sequences, pack
from specrl_jax.rollout.acceptance import DraftTokens
from specrl_jax.rollout.block import Residual
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import append, count_unfinished, policy_at
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.fused_sampling import FusedDistributions
from specrl_jax.rollout.rows import PADDING, Rows, gather, put_rows, slot_ranks
from specrl_jax.rollout.sampling import TokenDistributions, uniforms
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import axes, on_shards, reshard, take_own_rows
from specrl_jax.types import Drafts, Source, Tokens


class PackedTexts(NamedTuple):
    """Tokens of rows that begin, packed; int32 arrays of NumPy.

    Each of X shards counts its own sequences and rows. A shard's rows lie in the order of the
    chunks that hold them; the first takes the first free slot of the running batch, and so on.
    """

    sequences: Sequences  # [M, m, T]: M chunks of m sequences
    count: np.ndarray  # [], chunks that hold tokens: the first ones
    blocks: np.ndarray  # [M], blocks of rows in each chunk, on the shard that has most
    first_row: np.ndarray  # [X, M + 1], where each chunk's rows begin in `row_ids`
    row_ids: np.ndarray  # [X, n], among the shard's rows of the rollout
    draft_ends: np.ndarray  # [X, n], response length up to which a row's draft is verified
    nodes: np.ndarray  # [X, n, S], slot of each token among its chunk's m / X · T, then -1

    def on_mesh(self) -> "PackedTexts":
        """Return them laid out over the mesh: every shard of the batch has its own."""
        return PackedTexts(
            sequences=Sequences(*(reshard(x, None, "batch", None) for x in self.sequences)),
            count=reshard(self.count),
            blocks=reshard(self.blocks, None),
            first_row=reshard(self.first_row, "batch", None),
            row_ids=reshard(self.row_ids, "batch", None),
            draft_ends=reshard(self.draft_ends, "batch", None),
            nodes=reshard(self.nodes, "batch", None, None),
        )


def pack_texts(
    buckets: Buckets,
    tokens: np.ndarray,
    lens: np.ndarray,
    row_ids: list[np.ndarray],
    draft_ends: np.ndarray,
) -> PackedTexts:
    """Pack the rows that begin.

    tokens: int32 [k, P + R], right-padded: prompt, own tokens, draft. lens: int [k], of `tokens`.
    row_ids: one int array per shard, as in `PackedTexts`; together k, in the order of `tokens`.
    draft_ends: int32 [k].
    """
    chunks = buckets.chunks
    sequences = buckets.chunk_sequences  # of a shard
    length = buckets.sequence_slots
    block = buckets.block_rows
    most = buckets.sizes[0] // len(row_ids) + block  # so that a block with a row lies inside
    first_row = np.zeros((len(row_ids), chunks + 1), np.int32)
    packed_ids = np.zeros((len(row_ids), most), np.int32)
    packed_ends = np.zeros_like(packed_ids)
    nodes = np.full((len(row_ids), most, tokens.shape[1]), -1, np.int32)
    parts = []
    start = 0
    for shard, own_rows in enumerate(row_ids):
        own = slice(start, start + len(own_rows))
        start = own.stop
        packed, paths = pack(tokens[own], lens[own], length, PACKINGS["trie"])
        parts.append(packed)
        chunk = np.array([path[0] for path in paths], int) // (sequences * length)
        order = np.lexsort((-draft_ends[own], chunk))
        first_row[shard] = np.searchsorted(chunk[order], np.arange(chunks + 1))
        filled = slice(0, len(order))
        packed_ids[shard, filled] = own_rows[order]
        packed_ends[shard, filled] = draft_ends[own][order]
        for position, row in enumerate(order.tolist()):
            path = paths[row] - chunk[row] * sequences * length
            nodes[shard, position, : len(path)] = path
    in_chunks = np.diff(first_row, axis=1)
    count = int(np.flatnonzero(in_chunks.any(axis=0)).max(initial=-1) + 1)
    # The chunks without tokens stay zeros: memory that nobody writes costs next to nothing.
    shape = (chunks, len(row_ids) * sequences, length)
    whole = Sequences(*(np.zeros(shape, np.int32) for _ in Sequences._fields))
    for shard, part in enumerate(parts):
        own = slice(shard * sequences, (shard + 1) * sequences)
        for array, values in zip(whole, part.padded(count * sequences)):
            array[:count, own] = values.reshape(count, sequences, length)
    return PackedTexts(
        sequences=whole,
        count=np.int32(count),
        blocks=(-(-in_chunks // block)).max(axis=0).astype(np.int32),
        first_row=first_row,
        row_ids=packed_ids,
        draft_ends=packed_ends,
        nodes=nodes,
    )


class RowBlock(NamedTuple):
    """Rows of every shard whose drafts are decided together; int32."""

    row_ids: Array  # [b], among the shard's rows of the rollout; -1: none
    batch_slots: Array  # [b], slots of the shard's part of the batch; outside it: none
    draft_ends: Array  # [b]
    nodes: Array  # [b, S], slots of the rows' tokens in the computed sequences, as in `PackedTexts`


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
) -> tuple[KVCache, Rows, Array, Array]:
    """Return the running batch with the rows of `texts` in its free slots.

    all_rows: [B], with the tokens that they hold. drafts: [B], for the acceptance rule to verify; a
    draft begins with what its row holds. None: the run has no drafts.

    Returns the cache, the rows, verified and accepted draft tokens int32 [2], and what
    `decode.count_unfinished` returns.
    """
    # The stacked layers are scanned: this compiles fast, and costs little, as chunks are few.
    model = Transformer(spec.model, weights | {"layers": weights["stacked"]})
    layers = spec.model.num_layers
    texts = texts.on_mesh()
    all_slots = on_shards(_slots_free_first, rows.done, rows.index, like=rows.lens)

    def run_chunk(chunk: Array, state: tuple) -> tuple:
        sequences = jax.tree.map(lambda x: x[chunk], texts.sequences)
        hidden, stacked = model(
            sequences.tokens,
            positions_BT=sequences.depths,
            ends_BT=sequences.ends,
            gives_cache=True,
        )
        head_cache = []
        if spec.draft_head is not None:
            head = DraftHead(spec.model, weights["draft_head"])
            states = gather_tokens(hidden, sequences.parents)
            embedded = model.lookup(sequences.tokens)
            _, own = head(states, embedded, positions_BT=sequences.depths, ends_BT=sequences.ends)
            head_cache = [own]

        def run_block(number: Array, state: tuple) -> tuple:
            cache, rows, counts = state
            block = _take_block(texts, all_slots, chunk, number, buckets.block_rows)
            fresh = [tuple(x[i] for x in stacked) for i in range(layers)]
            cache = write_rows(cache, fresh + head_cache, block.nodes, block.batch_slots)
            new_rows, new_counts = begin_rows(
                spec, buckets.verify_width, model, hidden, all_rows, drafts, block
            )
            rows = put_rows(rows, new_rows, block.batch_slots)
            return cache, rows, counts + new_counts

        return jax.lax.fori_loop(0, texts.blocks[chunk], run_block, state)

    state = (cache, rows, jnp.zeros(2, jnp.int32))
    cache, rows, counts = jax.lax.fori_loop(0, texts.count, run_chunk, state)
    return cache, rows, counts, count_unfinished(rows)


def extend_inputs(shapes: RolloutShapes) -> tuple:
    """Return the inputs of `extend`."""
    spec = shapes.spec
    buckets = shapes.buckets
    cache, rows = shapes.batch(buckets.sizes[0])
    none = np.zeros((0, spec.prompt_slots + spec.response_slots), np.int32)
    no_lens = none[:, 0]
    texts = pack_texts(buckets, none, no_lens, [no_lens] * buckets.shards, no_lens)
    return (
        spec,
        buckets,
        shapes.weights,
        cache,
        rows,
        shapes.all_rows,
        shapes.drafts,
        abstract.on_host(texts),
    )


def _slots_free_first(done: Array, index: Array) -> Array:
    """Return all slots, int32 [b]: empty, then finished, then running."""
    return jnp.argsort(slot_ranks(done, index), stable=True, descending=True)


def _take_block(
    texts: PackedTexts, all_slots: Array, chunk: Array, number: Array, size: int
) -> RowBlock:
    """Return block `number` of a chunk's rows, `size` of each shard.

    all_slots: int32 [b], by `_slots_free_first`.
    """

    def local(chunk, number, all_slots, first_row, row_ids, draft_ends, nodes) -> RowBlock:
        start = first_row[0, chunk] + number * size
        index = start + jnp.arange(size)
        real = index < first_row[0, chunk + 1]
        row_ids = jax.lax.dynamic_slice_in_dim(row_ids[0], start, size)
        nearest = jnp.minimum(index, all_slots.shape[0] - 1)
        batch_slots = all_slots.at[nearest].get(mode="promise_in_bounds")
        return RowBlock(
            jnp.where(real, row_ids, -1),
            jnp.where(real, batch_slots, PADDING),
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
        texts.row_ids,
        texts.draft_ends,
        texts.nodes,
    )


def begin_rows(
    spec: RolloutSpec,
    verify_width: int,
    model: Transformer,
    hidden: Array,
    all_rows: Rows,
    drafts: Drafts | None,
    block: RowBlock,
) -> tuple[Rows, Array]:
    """Begin the block's rows with the accepted tokens of their drafts and one that is sampled.

    hidden: [m, T, D]; `block.nodes` are the rows' slots in it. verify_width: draft tokens of a row
    that are decided together.

    Returns the rows, and draft tokens as `extend` counts them, int32 [2].
    """
    rows = gather(all_rows, block.row_ids)
    depths = rows.prompt_lens + rows.lens - 1  # depth of each row's last known token
    slots = block.nodes.shape[1]
    nodes = jnp.pad(block.nodes, ((0, 0), (0, verify_width)), constant_values=-1)

    def states_at(offset: Array, count: int) -> Array:
        """Return states [b, count, D]; the first gives the distribution of response token
        `rows.lens + offset`."""
        read = read_slots(nodes, jnp.minimum(depths + offset, slots), count)
        return take_nodes(hidden, read)

    def policy_after(offset: Array, count: int) -> TokenDistributions | FusedDistributions:
        """Return the policy in these states."""
        return policy_at(spec, rows, rows.lens + offset, model, states_at(offset, count))

    accepted = jnp.zeros_like(rows.lens)
    draft_len = accepted
    residual = None
    if drafts is not None:
        draft_slots = -(-spec.response_slots // verify_width) * verify_width
        stored = _take_drafts(drafts, block.row_ids, rows.lens, draft_slots)
        draft_len = jnp.where(rows.done, 0, jnp.maximum(block.draft_ends - rows.lens, 0))
        accepted, residual, reused_tokens = _verify(
            spec, verify_width, rows, stored, draft_len, policy_after
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


def _take_drafts(drafts: Drafts, row_ids: Array, lens: Array, slots: int) -> Tokens:
    """Return the drafts [b, `slots`] of rows `row_ids` from token `lens` [b] on, then zeros."""
    stored = drafts.tokens.only("sampling_logprobs", "top_ids", "top_logprobs")
    own = on_shards(take_own_rows, stored, jnp.maximum(row_ids, 0), like=stored)

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
    policy_after: Callable[[Array, int], TokenDistributions | FusedDistributions],
) -> tuple[Array, Residual | None, Tokens]:
    """Return how many draft tokens the rule accepts, deciding `verify_width` at a time.

    The rule looks at a draft until it rejects a token or is at the draft's end. Then it decides.

    stored: [b, W], the drafts of which `draft_len` [b] tokens count. Returns the accepted tokens
    int32 [b], the residual, and the columns [b, W] that rows get for tokens that are accepted.
    """
    slots = stored.ids.shape[1]

    def draft_at(first: Array | int, count: int) -> DraftTokens:
        positions = (rows.lens + first)[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=1
        )
        noise = uniforms(rows.accept_seeds, reshard(positions, "batch", None))
        lens = jnp.clip(draft_len - first, 0, count)
        return DraftTokens(lens, jax.tree.map(cut, stored), noise)

    def look(first: Array) -> tuple:
        return spec.accept.look(draft_at(first, verify_width), policy_after(first, verify_width))

    def goes_on(state: tuple) -> Array:
        first, num_kept, _ = state
        return (num_kept == first) & (first < draft_len)

    def step(state: tuple) -> tuple:
        first, num_kept, looked = state
        new_kept, *new = look(first)
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        looked = jax.tree.map(write, looked, new)
        return first + verify_width, jnp.where(goes_on(state), first + new_kept, num_kept), looked

    def widened(x: jax.ShapeDtypeStruct) -> Array:
        shape = (x.shape[0], slots, *x.shape[2:])
        return jnp.zeros(shape, x.dtype, out_sharding=axes("batch", *(None,) * (len(shape) - 1)))

    _, *shapes = jax.eval_shape(look, jnp.int32(0))
    state = (jnp.int32(0), jnp.zeros_like(draft_len), jax.tree.map(widened, shapes))
    _, num_kept, looked = jax.lax.while_loop(lambda x: jnp.any(goes_on(x)), step, state)
    reused_tokens, evidence = looked
    accepted, residual = spec.accept.decide(draft_at(0, slots), num_kept, reused_tokens, evidence)
    return accepted, residual, reused_tokens


def _put_after(counts: Array, draft: Array, sampled: Array) -> Array:
    """Put `sampled` [b, 1, ...] after the first `counts` [b] of `draft` [b, W, ...]."""
    here = jnp.arange(draft.shape[1], dtype=jnp.int32)[None, :] == counts[:, None]
    return jnp.where(jnp.expand_dims(here, tuple(range(2, draft.ndim))), sampled, draft)
