"""The rows of a rollout: what is known of each, and how they move between decode batches.

`all_rows` holds every row of the rollout in order. A decode batch holds those that are being
computed, in any order; `index` is each row's place among all rows. Rows are gathered into a batch,
inserted into another, thinned out as they finish, and scattered back; no token visits the host.

Shards of the batch hold equal parts of all rows, in order. A row never leaves its shard: every move
is one within each shard, without communication.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.kv_cache import KVCache, cache_slots, gather_own_rows
from specrl_jax.models.kv_cache import resize as resize_cache
from specrl_jax.rollout.acceptance import AcceptanceRule
from specrl_jax.rollout.sampling import uniforms
from specrl_jax.sharding import on_shards, reshard, shard_number, shards, spec, take_own_rows
from specrl_jax.types import Drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftToVerify:
    """The part of a row's draft that an acceptance rule has yet to verify. Only `lens` changes."""

    tokens: Array  # int32 [b, C]
    # int32 [b]: where the draft ends. A row is *verifying* while it holds fewer tokens. After a
    # rejection the place of the sampled token; among all rows 0 once a batch dropped its drafts.
    lens: Array
    accept_threshold: Array | None = None  # float32 [b, C], log-prob from which on one is accepted
    # Instead of it, for rules that need the distribution π_old:
    logprobs: Array | None = None  # float32 [b, C], of the tokens
    top_ids: Array | None = None  # int32 [b, C, k], its likeliest tokens
    top_logprobs: Array | None = None  # float32 [b, C, k]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """b rows; C = R response columns and a margin that rows which are done write into."""

    index: Array  # int32 [b], place among all rows; one outside them marks a padding row
    seeds: Array  # uint32 [b, 2], of sampling
    accept_seeds: Array  # uint32 [b, 2], of acceptance
    prompt_lens: Array  # int32 [b]
    max_lens: Array  # int32 [b], where a response ends, at most R
    lens: Array  # int32 [b], response tokens
    last: Array  # int32 [b], the token that is not in the cache yet
    prefix_lens: Array  # int32 [b], accepted tokens of drafts to verify; set after the steps
    done: Array  # bool [b]
    tokens: Array  # int32 [b, C]
    policy_logprobs: Array  # float32 [b, C]
    sampling_logprobs: Array  # float32 [b, C]
    sources: Array  # int8 [b, C], SAMPLED from lens on; REUSED is set after the steps
    top_ids: Array | None = None  # int32 [b, C, k], likeliest tokens, where they are stored
    top_logprobs: Array | None = None  # float32 [b, C, k]
    draft: DraftToVerify | None = None  # None once no row has any


def with_drafts(
    all_rows: DecodeState, drafts: Drafts, rule: AcceptanceRule, log_lenience: float = 0.0
) -> DecodeState:
    """All rows with `drafts` [B] for the rule to verify; log_lenience: nats."""
    seeds = all_rows.accept_seeds
    columns = all_rows.tokens.shape[1]
    draft = _to_verify(drafts, seeds, np.float32(log_lenience), rule=rule, columns=columns)
    return dataclasses.replace(all_rows, draft=draft)


@functools.partial(jax.jit, static_argnames=("rule", "columns"))
def _to_verify(
    drafts: Drafts, seeds: Array, log_lenience: Array, *, rule: AcceptanceRule, columns: int
) -> DraftToVerify:
    def widen(x: Array | None) -> Array | None:
        if x is None:
            return None
        margin = columns - x.shape[1]
        return jnp.pad(x, ((0, 0), (0, margin), *((0, 0),) * (x.ndim - 2)))

    draft = DraftToVerify(tokens=widen(drafts.tokens), lens=drafts.lens)
    if rule.samples_anew:
        return draft
    logprobs = drafts.sampling_logprobs
    if rule.needs_distribution:
        top = {name: widen(getattr(drafts, name)) for name in ("top_ids", "top_logprobs")}
        return dataclasses.replace(draft, logprobs=widen(logprobs), **top)
    # Once for all steps: each would take longer by what it computes for a token or two.
    positions = jnp.broadcast_to(jnp.arange(logprobs.shape[1]), logprobs.shape)
    noise = uniforms(seeds, reshard(positions, "batch", None))
    threshold = rule.accept_threshold(noise, logprobs, log_lenience)
    return dataclasses.replace(draft, accept_threshold=widen(threshold))


@jax.jit
def verifying(rows: DecodeState) -> Array:
    """bool [b]: rows whose next token is one of a draft to verify."""
    if rows.draft is None:
        return jnp.zeros_like(rows.done)
    return ~rows.done & (rows.lens < rows.draft.lens)


@jax.jit
def gather(all_rows: DecodeState, places: Array) -> DecodeState:
    """The rows at `places` int32 [b], each among those of its own shard; a place outside them gives
    a padding row."""

    def local(all_rows: DecodeState, places: Array) -> DecodeState:
        size = all_rows.lens.shape[0]
        rows = take_own_rows(all_rows, jnp.clip(places, 0, size - 1))
        return _pad(rows, (places >= 0) & (places < size))

    return on_shards(local, all_rows, reshard(places, "batch"), like=all_rows)


@functools.partial(jax.jit, donate_argnames="all_rows")
def scatter(rows: DecodeState, all_rows: DecodeState) -> DecodeState:
    """All rows with a decode batch's rows written to their places, which lie on the same shard;
    padding is left out."""
    return on_shards(_scatter_own, rows, all_rows, like=all_rows)


def _scatter_own(rows: DecodeState, all_rows: DecodeState) -> DecodeState:
    total = all_rows.lens.shape[0]
    size = rows.lens.shape[0]
    index = rows.index - shard_number() * total
    place = jnp.full(total, -1).at[index].set(jnp.arange(size), mode="drop")
    here = place >= 0

    def write(old: Array, new: Array) -> Array:
        return where_rows(here, take_own_rows(new, jnp.maximum(place, 0)), old)

    draft = all_rows.draft
    if draft is not None:
        # A batch that dropped its drafts has nothing left to verify, nor may its rows have later.
        lens = jnp.zeros_like(rows.lens) if rows.draft is None else rows.draft.lens
        draft = dataclasses.replace(draft, lens=write(draft.lens, lens))
    written = jax.tree.map(write, without_drafts(all_rows), without_drafts(rows))
    return dataclasses.replace(written, index=all_rows.index, draft=draft)


def without_drafts(rows: DecodeState) -> DecodeState:
    """Drop the drafts of a batch where nothing is left to verify: its programs are simpler."""
    return dataclasses.replace(rows, draft=None)


@functools.partial(jax.jit, static_argnames=("size", "slots"))
def resize(
    cache: KVCache, rows: DecodeState, keep: Array, *, size: int, slots: int
) -> tuple[KVCache, DecodeState]:
    """The rows marked in `keep` bool [b], in order, in a batch of `size` rows and `slots` slots,
    each on its shard, which must have room for those of its own.

    The rest is padding. Scatter the rows first: those that are not kept are gone.
    """
    places = size // shards("batch")

    def local(cache: KVCache, rows: DecodeState, keep: Array) -> tuple[KVCache, DecodeState]:
        order = jnp.argsort(~keep, stable=True)[:places]
        order = jnp.pad(order, (0, places - order.shape[0]))
        kept = _pad(take_own_rows(rows, order), jnp.arange(places) < jnp.sum(keep))
        return gather_own_rows(cache, order, slots), kept

    return on_shards(local, cache, rows, keep, like=(cache, rows))


@functools.partial(jax.jit, donate_argnames=("cache", "rows"))
def insert(
    cache: KVCache, rows: DecodeState, others: KVCache, other_rows: DecodeState, chosen: Array
) -> tuple[KVCache, DecodeState]:
    """A batch with the rows marked in `chosen` bool [c] of another, in order, in its free places,
    each on its shard.

    Free are the places of rows that are done: scatter the rows first. There must be enough of them;
    the caches may differ in length. The result has drafts to verify if one of the batches has.
    """
    drafts = [x.draft for x in (rows, other_rows) if x.draft is not None]
    if len(drafts) == 1:
        rows, other_rows = (_with_drafts_like(x, drafts[0]) for x in (rows, other_rows))
    batch = cache, rows
    return on_shards(_insert_own, batch, (others, other_rows), chosen, like=batch)


def _insert_own(
    batch: tuple[KVCache, DecodeState], others: tuple[KVCache, DecodeState], chosen: Array
) -> tuple[KVCache, DecodeState]:
    """Row by row, in place: nothing is held twice, and only rows that move are read."""
    order, places = (jnp.argsort(~marked, stable=True) for marked in (chosen, batch[1].done))
    slots = min(cache_slots(batch[0]), cache_slots(others[0]))

    def copy_row(i: Array, batch: tuple[KVCache, DecodeState]) -> tuple[KVCache, DecodeState]:
        cache, rows = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, order[i]), others)
        return jax.tree.map(
            lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, places[i], axis=0),
            batch,
            (resize_cache(cache, slots), rows),
        )

    return jax.lax.fori_loop(0, jnp.sum(chosen), copy_row, batch)


def _with_drafts_like(rows: DecodeState, like: DraftToVerify) -> DecodeState:
    """The rows' own drafts, else nothing to verify in arrays like those of `like`."""
    if rows.draft is not None:
        return rows

    def zeros(x: Array) -> Array:
        axes = spec("batch", *(None,) * (x.ndim - 1))
        return jnp.zeros((rows.lens.shape[0], *x.shape[1:]), x.dtype, out_sharding=axes)

    return dataclasses.replace(rows, draft=jax.tree.map(zeros, like))


@jax.jit
def mark_padding(rows: DecodeState, unwanted: Array) -> DecodeState:
    """Rows marked in `unwanted` bool [b] become padding."""
    return _pad(rows, ~unwanted)


def _pad(rows: DecodeState, real: Array) -> DecodeState:
    """Rows that are not real become padding."""
    return dataclasses.replace(
        rows,
        index=jnp.where(real, rows.index, jnp.iinfo(jnp.int32).max),
        done=rows.done | ~real,
    )


def where_rows(rows: Array, new: Array, old: Array) -> Array:
    """Return [b, ...]: `new` in the rows marked in `rows` bool [b], elsewhere `old`."""
    return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)
