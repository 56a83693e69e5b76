"""What is computed together: shapes by hand, and the same results and work for every bound."""

import dataclasses

import jax
import numpy as np
import pytest
from update_reference import LEARNER, ROWS, distance, gradient, host_batch, pack

from specrl_jax import sharding
from specrl_jax.algorithms import scoring
from specrl_jax.algorithms.scoring import packed_shape
from specrl_jax.packing import PACKINGS

TRIE = PACKINGS["trie"]
BOUNDS = (0, 1, 2, 3, 4, 100)


@pytest.mark.parametrize(
    ("shape", "packing", "expected"),
    [
        # 24 rows of 20 slots lie in at most 12 sequences of 40, of which 256 tokens hold 6.
        ((1, 1, 1), "trie", (2, 6, 40)),
        ((1, 1, 1), "sequences", (2, 6, 40)),
        ((1, 1, 1), "rows", (2, 12, 20)),
        # Of two shards each needs 6 of them, of eight 2.
        ((2, 1, 1), "trie", (1, 12, 40)),
        ((4, 2, 1), "trie", (1, 16, 40)),
        ((4, 2, 1), "rows", (1, 24, 20)),
    ],
)
def test_shapes_by_hand(make_mesh, shape, packing, expected):
    """On a CPU, whose chunk is the least one: a bound changes nothing."""
    with jax.set_mesh(make_mesh(*shape)):
        for at_once in BOUNDS:
            assert packed_shape(PACKINGS[packing], 24, 20, at_once) == expected


def test_a_sequence_that_is_longer_than_a_chunk_is_computed_alone(mesh):
    assert packed_shape(TRIE, 16, 200, 0) == (8, 1, 400)


@pytest.mark.parametrize(
    ("shape", "at_once", "expected"),
    [
        # 128 rows of 512 slots lie in at most 64 sequences of 1,024.
        ((1, 1, 1), 0, (8, 8, 1_024)),
        ((1, 1, 1), 100, (8, 8, 1_024)),
        ((1, 1, 1), 7, (22, 3, 1_024)),
        ((1, 1, 1), 1, (64, 1, 1_024)),
        ((4, 2, 1), 0, (1, 64, 1_024)),
        ((4, 2, 1), 100, (2, 48, 1_024)),
        ((4, 2, 1), 1, (8, 8, 1_024)),
    ],
)
def test_an_accelerator_computes_more_at_once_and_heeds_the_bound(
    make_mesh, monkeypatch, shape, at_once, expected
):
    monkeypatch.setitem(sharding.CHUNK_TOKENS, "cpu", sharding.CHUNK_TOKENS_ELSEWHERE)
    with jax.set_mesh(make_mesh(*shape)):
        assert packed_shape(TRIE, 128, 512, at_once) == expected
        # Short rows: 256 tokens a shard at least.
        count, size, length = packed_shape(TRIE, 128, 16, at_once=1)
        assert size * length >= 256 * np.prod(shape) or count == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_bound_changes_neither_results_nor_work(mesh, monkeypatch, packing):
    """Gradients and all sums are those of one chunk; only the last chunk has empty sequences."""
    monkeypatch.setattr(scoring, "LEAST_TOKENS", 1)
    batch = host_batch(reference=True, shared=True)
    included = np.array([1, 0, 1, 1], bool)
    want, want_sums = gradient(LEARNER, batch, included=included, chunk=256)
    sizes = set()
    for bound in BOUNDS:
        update_spec = dataclasses.replace(LEARNER, packing=packing, micro_batch_size=bound)
        packed = pack(batch, update_spec, included=included, chunk=256)
        chunk, slots = packed.sequences.tokens.shape[1:]
        in_use = set(np.asarray(packed.nodes)[included].ravel() // slots) - {-1}
        assert packed.count == -(-len(in_use) // chunk)
        sizes.add(chunk)
        got, sums = gradient(update_spec, batch, included=included, chunk=256)
        assert distance(got, want) <= 2e-6
        for name, value in want_sums.items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert sizes == ({1, 2, 3, 4} if packing == "rows" else {1, 2})


def test_rows_of_the_longest_length_fit(mesh):
    """The worst case of a shape: nothing is shared, and no row is shorter than another."""
    batch = host_batch()
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 12, batch.tokens.shape).astype(np.int32)
    tokens[:, 0] = np.arange(ROWS)
    longest = dataclasses.replace(
        batch,
        tokens=tokens,
        prompt_lens=np.full(ROWS, 4, np.int32),
        response_lens=np.full(ROWS, 5, np.int32),
    )
    for packing in PACKINGS:
        packed = pack(longest, dataclasses.replace(LEARNER, packing=packing))
        assert packed.count == len(packed.sequences.tokens)
        assert np.all(np.asarray(packed.nodes) >= 0)
