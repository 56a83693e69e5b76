"""Moves of rows between all rows and batches, as permutations against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import init_cache
from specrl_jax.rollout.engine import decode_state
from specrl_jax.rollout.engine.decode_state import DecodeState, DraftToVerify
from specrl_jax.rollout.engine.rows import Noise, start_all_rows
from specrl_jax.sharding import put

B, C, K = 8, 5, 2
FILLER = np.iinfo(np.int32).max
SHAPES = pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])


def random_rows(size=B, drafting=True, stored=K, seed=3) -> DecodeState:
    """Rows of random values on the host; `index` is the place."""
    rng = np.random.default_rng(seed)

    def numbers(*shape):
        return rng.integers(0, 99, shape, dtype=np.int32)

    def reals(*shape):
        return rng.normal(size=shape).astype(np.float32)

    top = (numbers(size, C, K), reals(size, C, K)) if stored else (None, None)
    waits = DraftToVerify(numbers(size, C), numbers(size), reals(size, C), None, *top)
    return DecodeState(
        index=np.arange(size, dtype=np.int32),
        seeds=numbers(size, 2).astype(np.uint32),
        accept_seeds=numbers(size, 2).astype(np.uint32),
        **{n: numbers(size) for n in ("prompt_lens", "max_lens", "lens", "last", "prefix_lens")},
        done=np.zeros(size, bool),
        tokens=numbers(size, C),
        policy_logprobs=reals(size, C),
        sampling_logprobs=reals(size, C),
        sources=numbers(size, C).astype(np.int8),
        top_ids=top[0],
        top_logprobs=top[1],
        draft=waits if drafting else None,
    )


def take(rows, order) -> DecodeState:
    """The truth: rows of host arrays, picked by number."""
    return jax.tree.map(lambda x: x[np.asarray(order)], rows)


def check(rows, all_rows, order=None):
    """All fields are those of these of all rows; -1 stands for a filler."""
    rows = ref.host(rows)
    order = np.arange(len(rows.lens)) if order is None else np.asarray(order)
    real = order >= 0
    assert jax.tree.structure(rows) == jax.tree.structure(all_rows)
    jax.tree.map(np.testing.assert_array_equal, take(rows, real), take(all_rows, order[real]))
    assert (rows.index[~real] == FILLER).all()
    assert rows.done[~real].all()


def on_shards(rows, size, shape) -> np.ndarray:
    """The truth of a move: these of all B rows, each in its shard's part of `size` places."""
    shards = shape[0] * shape[1]
    order = np.full((shards, size // shards), -1)
    for shard, part in enumerate(order):
        own = [row for row in rows if row // (B // shards) == shard]
        part[: len(own)] = own
    return order.reshape(-1)


def cache_of(host, places, slots=6):
    """A cache whose every entry is its row's index, and a half."""
    marks = jnp.asarray(np.asarray(places, np.float32) + 0.5)[:, None, None, None]
    return jax.tree.map(lambda x: x + marks, init_cache(ref.ONE_LAYER, len(host.lens), slots))


def check_cache(cache, order, slots, filled):
    real = order >= 0
    for x in ref.by_slot(cache):
        assert x.shape[1:] == (slots, 2, 4)
        marks = order[real].astype(np.float32) + 0.5
        expected = np.broadcast_to(marks[:, None, None, None], (len(marks), filled, 2, 4))
        np.testing.assert_array_equal(x[real, :filled], expected)
        assert not x[:, filled:].any()


def test_rows_begin_with_prompts_only(mesh):
    program = ref.make_spec(group=2, slots=C - 1, stored_logprobs=K).program
    program = dataclasses.replace(program, group_size=2, pad_id=7)
    prompts, max_lens = ref.make_prompts([[5, 6, 9], [8]], 3), np.array([4, 2, 3, 1], np.int32)
    noise, steps = Noise(jax.random.key(0), 0), np.array([3, 4])
    rows = ref.host(start_all_rows(program, prompts, noise, steps, max_lens))
    np.testing.assert_array_equal(rows.index, np.arange(4))
    np.testing.assert_array_equal(rows.prompt_lens, [3, 3, 1, 1])
    np.testing.assert_array_equal(rows.max_lens, max_lens)
    whole = ref.host(start_all_rows(program, prompts, noise, steps))
    np.testing.assert_array_equal(whole.max_lens, [C - 1] * 4)
    np.testing.assert_array_equal(rows.last, [9, 9, 8, 8])
    np.testing.assert_array_equal(rows.tokens, np.full((4, C), 7))
    for name in ("lens", "prefix_lens", "done", "policy_logprobs", "sampling_logprobs", "sources"):
        assert not getattr(rows, name).any()
    assert len(np.unique(np.concatenate([rows.seeds, rows.accept_seeds]), axis=0)) == 8
    assert rows.top_ids.shape == rows.top_logprobs.shape == (4, C, K)
    assert rows.draft is None


@SHAPES
@pytest.mark.parametrize("drafting", [True, False])
def test_gather(make_mesh, shape, drafting):
    """Places count on each shard."""
    all_rows, shards = random_rows(drafting=drafting), shape[0] * shape[1]
    places = np.array([3, -1, 2, B], np.int32)
    first = np.arange(4) // (4 // shards) * (B // shards)
    with jax.set_mesh(make_mesh(*shape)):
        picked = decode_state.gather(ref.put_rows(all_rows), places)
        check(picked, all_rows, np.where((places >= 0) & (places < B), first + places, -1))


@SHAPES
def test_scatter(make_mesh, shape):
    """What a batch changed is written to its places; padding and other rows change nothing."""
    all_rows, change = random_rows(), random_rows(seed=4)
    places = [2, 5, 7]
    batch = dataclasses.replace(
        take(change, [0, 3, 1, 2]), index=np.array([2, FILLER, 5, 7], np.int32)
    )
    with jax.set_mesh(make_mesh(*shape)):
        got = decode_state.scatter(ref.put_rows(batch), ref.put_rows(all_rows))

    def write(old, new):
        old = old.copy()
        old[places] = new[[0, 2, 3]]
        return old

    expected = jax.tree.map(write, all_rows, batch)
    # Of drafts only their ends change, so nothing else of them is written.
    drafting = dataclasses.replace(all_rows.draft, lens=expected.draft.lens)
    check(got, dataclasses.replace(expected, index=all_rows.index, draft=drafting))


@SHAPES
def test_scatter_from_a_batch_without_drafts(make_mesh, shape):
    """The rows that come back have nothing pending; those that were elsewhere still have."""
    all_rows, change = random_rows(), random_rows(drafting=False, seed=4)
    batch = dataclasses.replace(take(change, [0, 1]), index=np.array([0, 4], np.int32))
    with jax.set_mesh(make_mesh(*shape)):
        got = ref.host(decode_state.scatter(ref.put_rows(batch), ref.put_rows(all_rows)))
    lens = all_rows.draft.lens.copy()
    lens[[0, 4]] = 0
    np.testing.assert_array_equal(got.draft.lens, lens)
    np.testing.assert_array_equal(got.draft.tokens, all_rows.draft.tokens)
    np.testing.assert_array_equal(got.tokens[[0, 4]], batch.tokens)
    others = np.setdiff1d(np.arange(B), [0, 4])
    np.testing.assert_array_equal(got.tokens[others], all_rows.tokens[others])


@SHAPES
@pytest.mark.parametrize("drafting", [True, False])
def test_resize(make_mesh, shape, drafting):
    all_rows = random_rows(drafting=drafting)
    chosen = np.array([0, 1, 0, 0, 1, 0, 1, 0], bool)
    with jax.set_mesh(make_mesh(*shape)):
        placed, cache = ref.put_rows(all_rows), cache_of(all_rows, all_rows.index)
        small, rows = decode_state.resize(cache, placed, put(chosen, "batch"), size=4, slots=9)
        order = on_shards([1, 4, 6], 4, shape)
        check(rows, all_rows, order)
        check_cache(small, order, slots=9, filled=6)
        large, rows = decode_state.resize(cache, placed, put(chosen, "batch"), size=12, slots=4)
        order = on_shards([1, 4, 6], 12, shape)
        check(rows, all_rows, order)
        check_cache(large, order, slots=4, filled=4)


@SHAPES
@pytest.mark.parametrize("deeper", [False, True])
def test_insert(make_mesh, shape, deeper):
    """Rows go where others of their shard are done, whatever the length of the cache they come
    from."""
    all_rows = random_rows(12)
    left, right = take(all_rows, [9, 0, 4, 7, 10, 6]), take(all_rows, [3, 11, 2, 5])
    left = dataclasses.replace(left, done=np.array([1, 0, 1, 0, 1, 1], bool))
    chosen, slots = np.array([1, 0, 0, 1], bool), 9 if deeper else 3
    one_shard = shape == (1, 1, 1)
    expected = [3, 0, 5, 7, 10, 6] if one_shard else [3, 0, 4, 7, 5, 6]
    new = np.array([1, 0, one_shard, 0, not one_shard, 0], bool)
    with jax.set_mesh(make_mesh(*shape)):
        cache, rows = decode_state.insert(
            cache_of(left, left.index, 6), ref.put_rows(left),
            cache_of(right, right.index, slots), ref.put_rows(right), put(chosen, "batch"),
        )  # fmt: skip
    got = ref.host(rows)
    np.testing.assert_array_equal(got.index, expected)
    np.testing.assert_array_equal(got.done, left.done & ~new)
    for name in ("tokens", "lens", "policy_logprobs", "seeds"):
        np.testing.assert_array_equal(getattr(got, name), getattr(take(all_rows, expected), name))
    np.testing.assert_array_equal(got.draft.tokens, take(all_rows, expected).draft.tokens)
    for x in ref.by_slot(cache):
        assert x.shape == (6, 6, 2, 4)
        marks = np.array(expected) + 0.5
        np.testing.assert_array_equal(x[:, :3, 0, 0], np.outer(marks, np.ones(3)))
        deep = ~new | deeper  # of the others, slots past their cache's end may hold anything
        np.testing.assert_array_equal(x[deep, 3:, 1, 3], np.outer(marks[deep], np.ones(3)))


@pytest.mark.parametrize("first", [False, True])
def test_a_batch_without_drafts_and_one_with(mesh, first):
    """Rows without anything to verify are inserted as rows whose drafts are empty."""
    rows = [random_rows(4, drafting=has, seed=9 - has) for has in (first, not first)]
    rows[0] = dataclasses.replace(rows[0], done=np.array([0, 1, 0, 1], bool))
    chosen = put(np.array([1, 0, 1, 0], bool), "batch")
    caches = [cache_of(x, x.index) for x in rows]
    placed = ref.put_rows(rows)
    _, joined = decode_state.insert(caches[0], placed[0], caches[1], placed[1], chosen)
    got = ref.host(joined)
    np.testing.assert_array_equal(got.tokens[[1, 3]], rows[1].tokens[[0, 2]])
    of_first, of_other = (
        [0] * 2 if x.draft is None else x.draft.lens[[0, 2]].tolist() for x in rows
    )
    np.testing.assert_array_equal(got.draft.lens[[0, 2]], of_first)
    np.testing.assert_array_equal(got.draft.lens[[1, 3]], of_other)
    assert got.draft.top_ids.shape == (4, C, K)


@SHAPES
def test_mark_padding(make_mesh, shape):
    """Rows marked as padding are never written back."""
    all_rows, change = random_rows(), random_rows(seed=4)
    unwanted = np.array([1, 0, 0, 1, 1, 0, 0, 1], bool)
    with jax.set_mesh(make_mesh(*shape)):
        left = decode_state.mark_padding(ref.put_rows(change), put(unwanted, "batch"))
        rows = ref.host(left)
        np.testing.assert_array_equal(rows.index, np.where(unwanted, FILLER, np.arange(B)))
        np.testing.assert_array_equal(rows.done, unwanted)
        got = ref.host(decode_state.scatter(left, ref.put_rows(all_rows)))
    expected = np.where(unwanted[:, None], all_rows.tokens, change.tokens)
    np.testing.assert_array_equal(got.tokens, expected)
