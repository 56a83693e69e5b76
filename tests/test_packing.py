"""Packed tries against the rows themselves: who sees whom, what is shared, what is cut."""

import numpy as np
import pytest

from specrl_jax.packing import PACKINGS, TextSet, pack

# Rows that share beginnings: equal ones, one that is the beginning of another, an empty one.
ROWS = [[7, 1, 2], [7, 1], [7, 3], [7, 1, 2], [8], []]


def _pad(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lens = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), max(lens.max(), 1)), np.int32)
    for row, values in enumerate(rows):
        tokens[row, : len(values)] = values
    return tokens, lens


def _random_rows(seed: int) -> list[list[int]]:
    """Up to 12 rows of up to 8 tokens of 3 kinds: many prefixes are shared."""
    rng = np.random.default_rng(seed)
    lens = rng.integers(0, 9, rng.integers(1, 13))
    return [rng.integers(0, 3, n).tolist() for n in lens]


def test_a_worked_trie():
    """7 → 1 → 2, 7 → 3 and 8: five distinct prefixes of six rows, in one sequence of 6 slots."""
    tokens, lens = _pad(ROWS)
    tries, nodes = pack(tokens, lens, 6, PACKINGS["trie"])
    np.testing.assert_array_equal(tries.tokens, [[7, 1, 2, 3, 8, 0]])
    np.testing.assert_array_equal(tries.depths, [[0, 1, 2, 1, 0, 0]])
    np.testing.assert_array_equal(tries.ends, [[4, 3, 3, 4, 5, 6]])
    np.testing.assert_array_equal(tries.parents, [[0, 0, 1, 0, 4, 5]])
    expected = [[0, 1, 2], [0, 1], [0, 3], [0, 1, 2], [4], []]
    assert [path.tolist() for path in nodes] == expected


def test_a_trie_that_is_too_long_is_cut_between_rows_and_repeats_what_they_share():
    tokens, lens = _pad([[7, 1, 2], [7, 1, 3], [7, 1, 4], [7, 1, 5]])
    tries, _ = pack(tokens, lens, 4, PACKINGS["trie"])
    np.testing.assert_array_equal(tries.tokens, [[7, 1, 2, 3], [7, 1, 4, 5]])
    np.testing.assert_array_equal(tries.ends, [[4, 4, 3, 4], [4, 4, 3, 4]])


@pytest.mark.parametrize("seed", range(40))
def test_a_set_counts_the_slots_of_a_trie(seed):
    """New prefixes add up to the distinct ones; the nearest text shares most, and has its value."""
    rows = [np.array(row, np.int32) for row in _random_rows(seed) if row]
    texts = TextSet()
    before = []
    total = 0
    for number, row in enumerate(rows):
        shared = [next((i for i, (a, b) in enumerate(zip(x, row)) if a != b), min(len(x), len(row)))
                  for x in before]  # fmt: skip
        most, value = texts.nearest(row)
        assert most == max(shared, default=0)
        assert value is None if not most else shared[value] == most
        total += texts.add(row, number)
        before.append(row)
    assert total == len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)})


def test_rows_lie_one_after_the_other_or_one_in_a_sequence():
    tokens, lens = _pad(ROWS)
    in_a_line, _ = pack(tokens, lens, 6, PACKINGS["sequences"])
    np.testing.assert_array_equal(in_a_line.tokens, [[7, 1, 2, 7, 1, 2], [7, 1, 7, 3, 8, 0]])
    np.testing.assert_array_equal(in_a_line.ends, [[3, 3, 3, 6, 6, 6], [2, 2, 4, 4, 5, 6]])
    padded, _ = pack(tokens, lens, 3, PACKINGS["rows"])
    np.testing.assert_array_equal(
        padded.tokens, [[7, 1, 0], [7, 1, 2], [7, 1, 2], [7, 3, 0], [8, 0, 0]]
    )


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", PACKINGS)
def test_a_sequence_for_as_many_rows_as_it_has_room_for_is_enough(name, seed):
    """Rows of at most 8 tokens, in sequences with room for one or two of the longest ones."""
    tokens, lens = _pad(_random_rows(seed))
    packing = PACKINGS[name]
    tries, _ = pack(tokens, lens, packing.rows_per_sequence * tokens.shape[1], packing)
    assert len(tries.tokens) <= -(-len(lens) // packing.rows_per_sequence)


def test_no_rows_need_no_sequences():
    tries, nodes = pack(np.ones((3, 2), np.int32), np.zeros(3, int), 4, PACKINGS["trie"])
    assert tries.tokens.shape == tries.ends.shape == (0, 4)
    assert [len(path) for path in nodes] == [0, 0, 0]


def test_empty_sequences_see_themselves_as_far_as_they_are_computed():
    tokens, lens = _pad(ROWS)
    tries, _ = pack(tokens, lens, 6, PACKINGS["trie"])
    padded = tries.padded(4, computed=2)
    for array, values in zip(padded, tries):
        np.testing.assert_array_equal(array[:1], values)
        assert not array[2:].any()
    np.testing.assert_array_equal(padded.tokens[1], [0] * 6)
    np.testing.assert_array_equal(padded.ends[1], [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(padded.parents[1], [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("name", PACKINGS)
@pytest.mark.parametrize("seed", range(20))
def test_every_token_sees_the_tokens_before_it_in_its_rows_and_no_others(name, seed):
    rows, packing = _random_rows(seed), PACKINGS[name]
    tokens, lens = _pad(rows)
    length = packing.rows_per_sequence * tokens.shape[1]
    tries, places = pack(tokens, lens, length, packing)
    i = np.arange(length)
    for row, values in enumerate(rows):
        nodes = places[row]
        assert len(nodes) == len(values)
        (sequence,) = set(nodes // length) or {0}
        slots = nodes % length
        for depth, slot in enumerate(slots):
            sees = (i <= slot) & (slot < tries.ends[sequence])
            assert set(i[sees]) == set(slots[: depth + 1])
            assert tries.tokens[sequence, slot] == values[depth]
            assert tries.depths[sequence, slot] == depth
            assert tries.parents[sequence, slot] == slots[max(depth - 1, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_every_distinct_prefix_is_there_once_where_the_trie_fits(seed):
    rows = _random_rows(seed)
    tokens, lens = _pad(rows)
    _, nodes = pack(tokens, lens, tokens.size, PACKINGS["trie"])
    prefixes = {tuple(row[: n + 1]) for row in rows for n in range(len(row))}
    assert len(np.unique(np.concatenate(nodes))) == len(prefixes)
