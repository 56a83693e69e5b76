"""Rows of a rollout: the state of each row, and how rows are moved.

`all_rows` contains every row of the rollout in order. The running batch contains the rows being
computed, in any order; `row_ids` maps each to its index in `all_rows`. A row that starts is written
into a free slot of the batch (`engine/prefill.py`). Unfinished rows are compacted into a smaller
batch as others finish. Rows of the batch are scattered back to `all_rows`.

Batch shards have equal parts of all rows, in order. A row never leaves its shard, so moving it
needs no communication.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.models.kv_cache import Layer
from specrl_jax.sharding import (
    on_shards,
    put,
    shard_number,
    shards,
    take_own_rows,
    take_rows,
)
from specrl_jax.types import Tokens

PADDING = np.iinfo(np.int32).max  # row id of an empty slot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """b rows; C = R response columns, then a margin that finished rows write into."""

    row_ids: Array  # int32 [b], among all rows of the rollout; PADDING for an empty slot
    seeds: Array  # uint32 [b, 2], of sampling
    accept_seeds: Array  # uint32 [b, 2], of acceptance
    prompt_lens: Array  # int32 [b]
    max_lens: Array  # int32 [b], maximum tokens of the response, at most R
    lens: Array  # int32 [b], response tokens
    turn_starts: Array  # int32 [b], response tokens before the row's current turn
    last: Array  # int32 [b], the last token, which is not in the cache yet
    prefix_lens: Array  # int32 [b], accepted tokens of drafts
    done: Array  # bool [b]
    background: Array  # bool [b], rows that the rollout does not wait for
    tokens: Tokens  # [b, C], without origins
    # [b, D], the policy's state that chose `last`, in the compute type; with a draft head.
    last_state: Array | None = None


def gather(all_rows: Rows, shard_row_ids: Array) -> Rows:
    """Return these rows [b]; padding for ids outside the shard's rows.

    shard_row_ids: int32 [b], indices among the rows of each id's own shard.
    """

    def local(all_rows: Rows, shard_row_ids: Array) -> Rows:
        size = all_rows.lens.shape[0]
        rows = take_own_rows(all_rows, jnp.clip(shard_row_ids, 0, size - 1))
        return _pad(rows, (shard_row_ids >= 0) & (shard_row_ids < size))

    return on_shards(local, all_rows, shard_row_ids, like=all_rows)


def put_rows(rows: Rows, new: Rows, slots: Array) -> Rows:
    """Put `new` [b] into slots int32 [b] of its shard's part of the batch.

    Rows whose slot is outside the batch are dropped.
    """

    def local(rows: Rows, new: Rows, slots: Array) -> Rows:
        return jax.tree.map(lambda old, x: old.at[slots].set(x, mode="drop"), rows, new)

    return on_shards(local, rows, new, slots, like=rows)


@functools.partial(jax.jit, donate_argnames="all_rows")
def scatter(rows: Rows, all_rows: Rows) -> Rows:
    """Return `all_rows` with the rows of the running batch written over them."""

    def local(rows: Rows, all_rows: Rows) -> Rows:
        total = all_rows.lens.shape[0]
        index = rows.row_ids - shard_number() * total
        slot = jnp.full(total, -1).at[index].set(jnp.arange(rows.lens.shape[0]), mode="drop")
        own = take_own_rows(rows, jnp.maximum(slot, 0))
        written = jax.tree.map(functools.partial(where_rows, slot >= 0), own, all_rows)
        return dataclasses.replace(written, row_ids=all_rows.row_ids)

    return on_shards(local, rows, all_rows, like=all_rows)


def slot_ranks(done: Array, index: Array) -> Array:
    """Return int32 [b]: 0 for unfinished rows, 1 for finished rows, 2 for slots without a row.

    done, index: [b], of `Rows`.
    """
    return done.astype(jnp.int32) + (index == PADDING)


@functools.partial(jax.jit, static_argnames="size")
def compact(rows: Rows, *, size: int) -> Rows:
    """Move rows to a batch of `size` slots, each on its shard: the lowest `slot_ranks`, in order.

    Scatter finished rows first: the smaller batch may have no room for them.
    """
    count = size // shards("batch")

    def local(rows: Rows) -> Rows:
        order = jnp.argsort(slot_ranks(rows.done, rows.row_ids), stable=True)
        return take_own_rows(rows, order[:count])

    return on_shards(local, rows, like=rows)


@functools.partial(jax.jit, static_argnames="size")
def compact_layer(layer: Layer, done: Array, index: Array, *, size: int) -> Layer:
    """Move a cache layer's rows as `compact` moves the rows.

    done, index: [b], of `Rows`.
    """
    count = size // shards("batch")

    def local(layer: Layer, done: Array, index: Array) -> Layer:
        order = jnp.argsort(slot_ranks(done, index), stable=True)
        return take_own_rows(layer, order[:count])

    return on_shards(local, layer, done, index, like=layer)


def compact_layer_inputs(layer: Layer, rows: Rows) -> tuple:
    """Return the inputs of `compact_layer` for a cache layer of these rows."""
    return layer, rows.done, rows.row_ids


@functools.partial(jax.jit, donate_argnames="rows")
def release(rows: Rows, over: Array) -> Rows:
    """Turn rows of the running batch into padding. over: bool [B], which of all rows."""

    def local(rows: Rows, over: Array) -> Rows:
        index = rows.row_ids - shard_number() * len(over)
        inside = (index >= 0) & (index < len(over))
        return _pad(rows, ~(inside & over[jnp.where(inside, index, 0)]))

    return on_shards(local, rows, over, like=rows)


def release_inputs(rows: Rows, all_rows: Rows) -> tuple:
    """Return the inputs of `release`."""
    return rows, abstract.array(np.bool_, all_rows.done.shape, "batch")


def _pad(rows: Rows, real: Array) -> Rows:
    """Turn rows that are not `real` bool [b] into padding."""
    row_ids = jnp.where(real, rows.row_ids, PADDING)
    return dataclasses.replace(rows, row_ids=row_ids, done=rows.done | ~real)


def where_rows(marked: Array, new: Array, old: Array) -> Array:
    """Return [b, ...]: `new` in `marked` rows, bool [b], `old` elsewhere."""
    return jnp.where(marked.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def rows_of(groups: np.ndarray, group_size: int) -> np.ndarray:
    """Return the rows of groups int [n], int32 [n * G]."""
    return (groups[:, None] * group_size + np.arange(group_size)).reshape(-1).astype(np.int32)


def take(tree, row_ids: np.ndarray, num_rows: int | None = None):
    """Return rows `row_ids` int [n] of a pytree of [B, ...], zero-padded to `num_rows` rows."""
    picks = np.full((num_rows or len(row_ids), 2), -1)
    picks[: len(row_ids), 0] = 0
    picks[: len(row_ids), 1] = row_ids
    return assemble([tree], picks)


def assemble(parts: Sequence, picks: np.ndarray):
    """Return a pytree of [n, ...] with rows from several pytrees of [B, ...].

    picks: int [n, 2], (number of the part, row in that part) for each row of the result. Part -1
    gives a row of zeros, without tokens.
    """
    result = None
    for number, part in enumerate(parts):
        here = picks[:, 0] == number
        index = np.where(here, picks[:, 1], 0).astype(np.int32)
        result = _fill(result, part, put(index, None), put(here, "batch"))
    return result


@jax.jit
def _fill(result, part, index: Array, here: Array):
    """Write rows `index` of a part into the rows marked in `here`; result None: zeros elsewhere."""
    taken = take_rows(part, index)
    before = jax.tree.map(jnp.zeros_like, taken) if result is None else result
    return jax.tree.map(lambda new, old: where_rows(here, new, old), taken, before)
