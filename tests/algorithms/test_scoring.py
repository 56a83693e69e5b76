"""What is computed together: shapes by hand, and the same results and work for every bound."""

import dataclasses

import jax
import numpy as np
import pytest
from update_reference import LEARNER, ROWS, distance, gradient, host_batch, pack

from specrl_jax import sharding
from specrl_jax.algorithms.scoring import packed_shape
from specrl_jax.packing import PACKINGS

TRIE = PACKINGS["trie"]
BOUNDS = (0, 1, 2, 3, 4, 8, 100)


@pytest.mark.parametrize(
    ("shape", "packing", "at_once", "expected"),
    [
        # 24 rows of 20 slots lie in at most 12 sequences of 40, of which 256 tokens hold 6.
        ((1, 1, 1), "trie", 0, (2, 6, 40)),
        ((1, 1, 1), "sequences", 0, (2, 6, 40)),
        ((1, 1, 1), "trie", 100, (2, 6, 40)),
        ((1, 1, 1), "trie", 9, (3, 4, 40)),
        ((1, 1, 1), "trie", 1, (12, 1, 40)),
        ((1, 1, 1), "rows", 0, (2, 12, 20)),
        ((1, 1, 1), "rows", 5, (5, 5, 20)),
        # Two shards need 6 of them each, eight shards 2.
        ((2, 1, 1), "trie", 0, (1, 12, 40)),
        ((2, 1, 1), "trie", 9, (3, 4, 40)),
        ((4, 2, 1), "trie", 0, (1, 16, 40)),
        ((4, 2, 1), "trie", 1, (2, 8, 40)),
        ((4, 2, 1), "rows", 16, (2, 16, 20)),
    ],
)
def test_shapes_by_hand(make_mesh, shape, packing, at_once, expected):
    with jax.set_mesh(make_mesh(*shape)):
        assert packed_shape(PACKINGS[packing], 24, 20, at_once) == expected


def test_a_sequence_that_is_longer_than_a_chunk_is_computed_alone(mesh):
    assert packed_shape(TRIE, 16, 200, 0) == (8, 1, 400)


def test_elsewhere_than_on_a_cpu_more_is_computed_together(mesh, monkeypatch):
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    assert packed_shape(TRIE, 2_048, 5_120, 0) == (1_024, 1, 10_240)
    assert packed_shape(TRIE, 128, 512, 0) == (8, 8, 1_024)
    assert packed_shape(TRIE, 128, 512, 6) == (22, 3, 1_024)


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_bound_changes_neither_results_nor_work(mesh, monkeypatch, packing):
    """Gradients and all sums are those without a bound; no row but the last chunk's is empty."""
    monkeypatch.setitem(sharding.CHUNK_TOKENS, "cpu", 40)  # two sequences
    batch = host_batch(reference=True, shared=True)
    included = np.array([1, 0, 1, 1], bool)
    results = {}
    for bound in BOUNDS:
        update_spec = dataclasses.replace(LEARNER, packing=packing, micro_batch_size=bound)
        packed = pack(batch, update_spec, included=included)
        chunk = packed.sequences.tokens[0].size
        filled = np.unique(np.asarray(packed.nodes) // packed.sequences.tokens.shape[-1])
        used = np.count_nonzero(filled >= 0) * packed.sequences.tokens.shape[-1]
        assert chunk <= 40
        assert 0 <= packed.count * chunk - used < chunk
        results[bound] = gradient(update_spec, batch, included=included)
    want, want_sums = results[0]
    for got, sums in results.values():
        assert distance(got, want) <= 2e-6
        for name, value in want_sums.items():
            np.testing.assert_allclose(sums[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


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
        packed = pack(longest, dataclasses.replace(LEARNER, packing=packing, micro_batch_size=1))
        assert packed.count == len(packed.sequences.tokens)
        assert np.all(np.asarray(packed.nodes) >= 0)
