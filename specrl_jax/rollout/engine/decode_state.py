"""The rows of a rollout: what is known of each, and how they travel between rungs.

The *board* holds every row of the batch in order; a *rung* holds those that are being computed, in
any order, each with its place on the board (`index`). Rows are picked onto a rung, joined with
others, thinned out as they finish, and written back; no token visits the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.kv_cache import KVCache, cache_slots, gather_rows
from specrl_jax.rollout.acceptance import RULES, leading, least_logprobs
from specrl_jax.rollout.sampling import uniforms
from specrl_jax.sharding import reshard, spec, take_rows
from specrl_jax.types import Drafts, Rollout, Source


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftToVerify:
    """The part of a row's draft that an acceptance rule has yet to judge.

    tokens: int32 [b, C]. lens: int32 [b]; a row is *verifying* while it holds fewer tokens than
    that. Only they change: to the place of the first token that was drawn, or on the board to 0
    where a rung has dropped its drafts. What the rule compares a token's log-prob with is None
    under match. Rules that need the law have logprobs: float32 [b, C], under the law that the token
    was sampled from, and top_ids, top_logprobs: [b, C, k]; the others least: float32 [b, C], from
    which on it is kept.
    """

    tokens: Array
    lens: Array
    logprobs: Array | None = None
    least: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """b rows; C = R response columns and a margin that rows which are done write into.

    index: int32 [b], each row's place on the board; a place outside it marks a filler. seeds,
    accept_seeds: uint32 [b, 2]. prompt_lens, lens: int32 [b]. max_lens: int32 [b], the length at
    which a response ends, at most R. last: int32 [b], the token that is not in the cache yet.
    prefix_lens: int32 [b], tokens kept from pending drafts so far. done: bool [b]. tokens,
    policy_logprobs, sampling_logprobs, sources: [b, C]; sources are SAMPLED from lens on. top_ids,
    top_logprobs: [b, C, k] or None. pending: None once no row has any. prefix_lens and REUSED
    sources are those of the last visit's end.
    """

    index: Array
    seeds: Array
    accept_seeds: Array
    prompt_lens: Array
    max_lens: Array
    lens: Array
    last: Array
    prefix_lens: Array
    done: Array
    tokens: Array
    policy_logprobs: Array
    sampling_logprobs: Array
    sources: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None
    draft: DraftToVerify | None = None


@functools.partial(jax.jit, static_argnames=("columns", "stored", "pad_id"))
def start_rows(
    seeds: Array,
    accept_seeds: Array,
    prompt_lens: Array,
    max_lens: Array,
    last: Array,
    *,
    columns: int,
    pad_id: int,
    stored: int = 0,
) -> DecodeState:
    """A board of rows that hold only their prompts."""
    rows = prompt_lens.shape[0]
    lens = jnp.zeros_like(prompt_lens)
    wide = jnp.zeros((rows, columns), out_sharding=spec("batch", None))
    top = jnp.zeros((rows, columns, stored), out_sharding=spec("batch", None, None))
    return DecodeState(
        index=reshard(jnp.arange(rows, dtype=jnp.int32), "batch"),
        seeds=seeds,
        accept_seeds=accept_seeds,
        prompt_lens=prompt_lens,
        max_lens=max_lens,
        lens=lens,
        last=last,
        prefix_lens=lens,
        done=lens > 0,
        tokens=jnp.full_like(wide, pad_id, dtype=jnp.int32),
        policy_logprobs=wide,
        sampling_logprobs=wide,
        sources=wide.astype(jnp.int8),
        top_ids=top.astype(jnp.int32) if stored else None,
        top_logprobs=top if stored else None,
    )


def with_drafts(
    board: DecodeState, drafts: Drafts, accept: str, log_lenience: float = 0.0
) -> DecodeState:
    """The board with `drafts` [B] to be judged by the rule `accept`; log_lenience: nats."""
    lenience = np.float32(log_lenience)
    pending = _pending(
        drafts, board.accept_seeds, lenience, accept=accept, columns=board.tokens.shape[1]
    )
    return dataclasses.replace(board, draft=pending)


@functools.partial(jax.jit, static_argnames=("accept", "columns"))
def _pending(
    drafts: Drafts, seeds: Array, log_lenience: Array, *, accept: str, columns: int
) -> DraftToVerify:
    def widen(x: Array | None) -> Array | None:
        if x is None:
            return None
        margin = columns - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, margin), *((0, 0),) * (x.ndim - 2)))

    pending = DraftToVerify(tokens=widen(drafts.tokens), lens=drafts.lens)
    if accept == "match":
        return pending
    logprobs = drafts.sampling_logprobs
    if RULES[accept].needs_law:
        law = {name: widen(getattr(drafts, name)) for name in ("top_ids", "top_logprobs")}
        return dataclasses.replace(pending, logprobs=widen(logprobs), **law)
    # Once for all steps: each would take longer by what it computes for a token or two.
    positions = jnp.broadcast_to(jnp.arange(logprobs.shape[1]), logprobs.shape)
    noise = uniforms(seeds, reshard(positions, "batch", None))
    least = least_logprobs(noise, logprobs, log_lenience)
    return dataclasses.replace(pending, least=widen(least))


@jax.jit
def verifying(rows: DecodeState) -> Array:
    """bool [b]: rows whose next token is judged against their pending draft."""
    if rows.draft is None:
        return jnp.zeros_like(rows.done)
    return ~rows.done & (rows.lens < rows.draft.lens)


@jax.jit
def gather(board: DecodeState, places: Array) -> DecodeState:
    """The board's rows at `places` int32 [b], replicated; a place outside it gives a filler."""
    size = board.lens.shape[0]
    rows = _take(board, jnp.clip(places, 0, size - 1))
    return _mark(rows, reshard((places >= 0) & (places < size), "batch"))


@functools.partial(jax.jit, donate_argnames="board")
def scatter(rows: DecodeState, board: DecodeState) -> DecodeState:
    """The board with the rung's rows written to their places; fillers are left out."""
    batch, size = board.lens.shape[0], rows.lens.shape[0]
    index = reshard(rows.index, None)
    place = jnp.full(batch, -1).at[index].set(jnp.arange(size), mode="drop")
    here = reshard(place, "batch") >= 0

    def write(old: Array, new: Array) -> Array:
        new = take_rows(new, jnp.maximum(place, 0), *(None,) * (new.ndim - 1))
        return jnp.where(here.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    pending = board.draft
    if pending is not None:
        # Where nothing is left to judge on the rung, nor may it be when a row comes back.
        lens = jnp.zeros_like(rows.lens) if rows.draft is None else rows.draft.lens
        pending = dataclasses.replace(pending, lens=write(pending.lens, lens))
    written = jax.tree.map(write, without_drafts(board), without_drafts(rows))
    return dataclasses.replace(written, index=board.index, draft=pending)


def compare(board: DecodeState, drafts: Drafts, held: Rollout | None) -> tuple[Array, Array, Array]:
    """The board's prefix_lens and sources, from what it has of drafts that steps did not judge: the
    leading tokens that are the draft's, behind those that rows held. And int32 [3]: the number of
    these; that with the first token of each row that is not; and how many a tree drafted as well.

    Worked row: of `5 6 7` the draft `5 6 9 1` has 2 tokens, 3 are judged.
    """
    slots = drafts.tokens.shape[1]
    positions = jnp.arange(slots)[None, :]
    begun = jnp.zeros_like(board.lens) if held is None else held.lens
    before, ends = positions < begun[:, None], jnp.minimum(drafts.lens, board.lens)
    run = leading(before | (board.tokens[:, :slots] == drafts.tokens), ends)
    kept, judged = (jnp.maximum(jnp.minimum(n, ends) - begun, 0) for n in (run, run + 1))
    reused = ~before & (positions < (begun + kept)[:, None])
    reused = jnp.pad(reused, ((0, 0), (0, board.tokens.shape[1] - slots)))
    sources = jnp.where(reused, jnp.int8(Source.REUSED), board.sources)
    counted = (kept, judged, reused & (board.sources == Source.DRAFTED))
    counts = jnp.stack([jnp.sum(x, dtype=jnp.int32) for x in counted])
    return kept if held is None else held.prefix_lens + kept, sources, counts


def without_drafts(rows: DecodeState) -> DecodeState:
    """For rungs where nothing is left to judge: their programs are simpler."""
    return dataclasses.replace(rows, draft=None)


@jax.jit
def with_empty_drafts(rows: DecodeState, like: DraftToVerify) -> DecodeState:
    """Nothing to judge, said in the same form as `like`."""
    size = rows.lens.shape[0]

    def zeros(x: Array) -> Array:
        axes = spec("batch", *(None,) * (x.ndim - 1))
        return jnp.zeros((size, *x.shape[1:]), x.dtype, out_sharding=axes)

    return dataclasses.replace(rows, draft=jax.tree.map(zeros, like))


@functools.partial(jax.jit, static_argnames=("size", "slots"))
def resize(
    cache: KVCache, rows: DecodeState, wanted: Array, *, size: int, slots: int
) -> tuple[KVCache, DecodeState]:
    """The rows marked in `wanted` bool [b], in order, on a rung of `size` rows and `slots` slots.

    What is left of the rung is filled up with fillers. Write the rung's rows back first: those
    that are not wanted are gone.
    """
    order, real = _front(reshard(wanted, None), size)
    return gather_rows(cache, order, slots), _mark(_take(rows, order), real)


@functools.partial(jax.jit, donate_argnames=("cache", "rows"))
def insert(
    cache: KVCache, rows: DecodeState, others: KVCache, other_rows: DecodeState, wanted: Array
) -> tuple[KVCache, DecodeState]:
    """A rung with the rows marked in `wanted` bool [c] of another, in order, on its free places.

    Free are the places of rows that are done: write the rung's rows back first. There must be
    enough of them; the other rung's window may be of any depth.
    """
    order, count = jnp.argsort(~reshard(wanted, None), stable=True), jnp.sum(wanted)
    free = reshard(rows.done, None)
    rank = jnp.cumsum(free) - 1
    taken = reshard(free & (rank < count), "batch")
    source = order[jnp.clip(rank, 0, len(order) - 1)]

    def choose(old: Array, new: Array) -> Array:
        return jnp.where(taken.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    news = gather_rows(others, source, cache_slots(cache)), _take(other_rows, source)
    return jax.tree.map(choose, (cache, rows), news)


@jax.jit
def mark_padding(rows: DecodeState, unwanted: Array) -> DecodeState:
    """Rows marked in `unwanted` bool [b] become fillers."""
    return _mark(rows, ~unwanted)


def _front(wanted: Array, size: int) -> tuple[Array, Array]:
    """Indices [size] with the wanted rows in front, and which of them those are."""
    order = jnp.argsort(~wanted, stable=True)[:size]
    order = jnp.pad(order, (0, size - order.shape[0]))
    return order, reshard(jnp.arange(size) < jnp.sum(wanted), "batch")


def _mark(rows: DecodeState, real: Array) -> DecodeState:
    """Rows that are not real become fillers."""
    return dataclasses.replace(
        rows,
        index=jnp.where(real, rows.index, jnp.iinfo(jnp.int32).max),
        done=rows.done | ~real,
    )


def _take(rows: DecodeState, order: Array) -> DecodeState:
    return jax.tree.map(lambda x: take_rows(x, order, *(None,) * (x.ndim - 1)), rows)


# Columns: each row at a place of its own


def cut_columns(matrix: Array, start: Array, width: int) -> Array:
    """[b, W, ...]: columns from each row's own start; starts need start + W <= C."""

    def one(row: Array, at: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(row, at, width, axis=0)

    return jax.vmap(one)(matrix, start)


def column_at(matrix: Array, at: Array) -> Array:
    """[b, ...]: one column of each row."""

    def one(row: Array, at: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(row, at, axis=0, keepdims=False)

    return jax.vmap(one)(matrix, at)


def write_columns(matrix: Array, values: Array, columns: Array) -> Array:
    """[b, C, ...]: the values [b, W, ...] written from each row's own column on."""

    def one(row: Array, value: Array, column: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(row, value, column, axis=0)

    return jax.vmap(one)(matrix, values, columns)
