"""Moves of rows between all rows and the running batch, as permutations against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import init_cache
from specrl_jax.rollout.engine.all_rows import empty_batch
from specrl_jax.rollout.rows import (
    PADDING,
    Rows,
    compact,
    compact_layer,
    gather,
    put_rows,
    release,
    scatter,
)
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.sharding import put, shards
from specrl_jax.types import Tokens

B, C, K = 8, 5, 2
SHAPES = pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])


def random_rows(size=B, stored=K, seed=3) -> Rows:
    """Rows of random values on the host; `index` is the row index."""
    rng = np.random.default_rng(seed)

    def numbers(*shape):
        return rng.integers(0, 99, shape, dtype=np.int32)

    def reals(*shape):
        return rng.normal(size=shape).astype(np.float32)

    names = ("prompt_lens", "max_lens", "lens", "turn_starts", "last", "prefix_lens")
    return Rows(
        row_ids=np.arange(size, dtype=np.int32),
        seeds=numbers(size, 2).astype(np.uint32),
        accept_seeds=numbers(size, 2).astype(np.uint32),
        **{name: numbers(size) for name in names},
        done=np.zeros(size, bool),
        background=np.zeros(size, bool),
        tokens=Tokens(
            ids=numbers(size, C),
            policy_logprobs=reals(size, C),
            sampling_logprobs=reals(size, C),
            sources=numbers(size, C).astype(np.int8),
            top_ids=numbers(size, C, K) if stored else None,
            top_logprobs=reals(size, C, K) if stored else None,
        ),
    )


def take(rows, order) -> Rows:
    """The truth: rows of host arrays, picked by number."""
    return jax.tree.map(lambda x: x[np.asarray(order)], rows)


def check(rows, all_rows, order=None):
    """All fields are those of these of all rows; -1 stands for padding."""
    rows = ref.host(rows)
    order = np.arange(len(rows.lens)) if order is None else np.asarray(order)
    real = order >= 0
    assert jax.tree.structure(rows) == jax.tree.structure(all_rows)
    jax.tree.map(np.testing.assert_array_equal, take(rows, real), take(all_rows, order[real]))
    assert (rows.row_ids[~real] == PADDING).all()
    assert rows.done[~real].all()


def test_rows_begin_with_prompts_only(mesh):
    spec = ref.make_spec(group=2, slots=C - 1, stored_logprobs=K)
    spec = dataclasses.replace(spec, pad_id=7)
    prompts = ref.make_prompts([[5, 6, 9], [8]], 3)
    max_lens = np.array([4, 2, 3, 1], np.int32)
    noise = NoiseKey(jax.random.key(0), 0, noise_steps=np.array([[3, 3], [4, 5]]))
    rows = ref.host(ref.start(spec, prompts, noise, max_lens=max_lens))
    np.testing.assert_array_equal(rows.row_ids, np.arange(4))
    np.testing.assert_array_equal(rows.prompt_lens, [3, 3, 1, 1])
    np.testing.assert_array_equal(rows.max_lens, max_lens)
    whole = ref.host(ref.start(spec, prompts, noise))
    np.testing.assert_array_equal(whole.max_lens, [C - 1] * 4)
    np.testing.assert_array_equal(rows.last, [9, 9, 8, 8])
    np.testing.assert_array_equal(rows.tokens.ids, np.full((4, C), 7))
    for name in ("lens", "prefix_lens", "done", "policy_logprobs", "sampling_logprobs", "sources"):
        assert not ref.fields_of(rows)[name].any()
    assert len(np.unique(np.concatenate([rows.seeds, rows.accept_seeds]), axis=0)) == 8
    assert rows.tokens.top_ids.shape == rows.tokens.top_logprobs.shape == (4, C, K)


@SHAPES
def test_an_empty_batch_holds_no_row(make_mesh, shape):
    spec = ref.make_spec(ref.ONE_LAYER)
    with jax.set_mesh(make_mesh(*shape)):
        cache, rows = empty_batch(spec, ref.put_rows(random_rows()), size=4, slots=6)
        check(rows, random_rows(), [-1] * 4)
    assert [x.shape for x in ref.by_slot(cache)] == [(4, 6, 2, 4)] * 2


@SHAPES
@pytest.mark.parametrize("stored", [0, K])
def test_gather(make_mesh, shape, stored):
    """Indices count on each shard."""
    all_rows = random_rows(stored=stored)
    row_ids = np.array([3, -1, 2, B], np.int32)
    with jax.set_mesh(make_mesh(*shape)):
        pieces = shards("batch")
        first = np.arange(4) // (4 // pieces) * (B // pieces)
        picked = gather(ref.put_rows(all_rows), put(row_ids, "batch"))
        check(picked, all_rows, np.where((row_ids >= 0) & (row_ids < B), first + row_ids, -1))


@SHAPES
def test_put_rows(make_mesh, shape):
    """Rows go to row_ids of their own shard; those outside it are left out."""
    rows = random_rows()
    new = random_rows(4, seed=4)
    row_ids = np.array([3, PADDING, 1, 0], np.int32)
    with jax.set_mesh(make_mesh(*shape)):
        pieces = shards("batch")
        got = jax.jit(put_rows)(ref.put_rows(rows), ref.put_rows(new), put(row_ids, "batch"))
    first = np.arange(4) // (4 // pieces) * (B // pieces)
    expected = jax.tree.map(np.copy, rows)
    for row in (0, 2, 3):
        for old, values in zip(jax.tree.leaves(expected), jax.tree.leaves(new), strict=True):
            old[first[row] + row_ids[row]] = values[row]
    check(got, expected)


@SHAPES
def test_scatter(make_mesh, shape):
    """A batch's changes are written to its row_ids; padding and other rows change nothing."""
    all_rows = random_rows()
    row_ids = [2, 5, 7]
    index = np.array([2, PADDING, 5, 7], np.int32)
    batch = dataclasses.replace(take(random_rows(seed=4), [0, 3, 1, 2]), row_ids=index)
    with jax.set_mesh(make_mesh(*shape)):
        got = scatter(ref.put_rows(batch), ref.put_rows(all_rows))

    def write(old, new):
        old = old.copy()
        old[row_ids] = new[[0, 2, 3]]
        return old

    expected = jax.tree.map(write, all_rows, batch)
    check(got, dataclasses.replace(expected, row_ids=all_rows.row_ids))


@SHAPES
@pytest.mark.parametrize("full", [False, True])
def test_compact(make_mesh, shape, full):
    """Unfinished rows stay in order on their shard, with their cache; then come rows that are done,
    then padding."""
    all_rows = random_rows()
    left = [0, 3, 4, 6] if full else [3, 6]  # on two shards as many on each
    done = ~np.isin(np.arange(B), left)
    none = np.isin(np.arange(B), [1, 2, 5, 7])
    index = np.where(none & done, PADDING, all_rows.row_ids)
    all_rows = dataclasses.replace(all_rows, done=done, row_ids=index.astype(np.int32))
    marks = jnp.arange(B, dtype=jnp.float32)[:, None, None, None] + 0.5
    with jax.set_mesh(make_mesh(*shape)):
        pieces = shards("batch")
        by_rank = [*left, *np.flatnonzero(done & ~none), *np.flatnonzero(done & none)]
        order = []
        for shard in range(pieces):
            own = [row for row in by_rank if row // (B // pieces) == shard]
            order += own[: 4 // pieces]
        cache = jax.tree.map(lambda x: x + marks, init_cache(ref.ONE_LAYER, B, 6))
        rows = ref.put_rows(all_rows)
        cache = [compact_layer(layer, rows.done, rows.row_ids, size=4) for layer in cache]
        rows = compact(rows, size=4)
        check(rows, all_rows, order)
    for x in ref.by_slot(cache):
        assert x.shape == (4, 6, 2, 4)
        expected = np.array(order, np.float32)[:, None, None, None] + 0.5
        np.testing.assert_array_equal(x, np.broadcast_to(expected, x.shape))


@SHAPES
def test_rows_that_are_over_lose_their_slots(make_mesh, shape):
    """Rows are in another order in the batch, which has a slot without a row."""
    all_rows = random_rows()
    order = np.array([2, 0, 3, -1, 7, 5, 4, 6])  # on two shards each its own
    batch = take(all_rows, order)
    index = np.where(order < 0, PADDING, order).astype(np.int32)
    batch = dataclasses.replace(batch, row_ids=index, done=order < 0)
    over = np.isin(np.arange(B), [1, 3, 5, 7])
    with jax.set_mesh(make_mesh(*shape)):
        rows = ref.host(release(ref.put_rows(batch), put(over, "batch")))
    gone = np.array([False, False, True, True, True, True, False, False])
    np.testing.assert_array_equal(rows.row_ids, np.where(gone, PADDING, order))
    np.testing.assert_array_equal(rows.done, gone)
    np.testing.assert_array_equal(rows.tokens.ids, batch.tokens.ids)
