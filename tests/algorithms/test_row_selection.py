"""Rows that updates take: the worked rows, and shares by counting."""

import collections

import numpy as np
import pytest

from specrl_jax.algorithms.row_selection import ROW_SELECTIONS, cut_to_budget


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_all_rows_once(rng):
    assert ROW_SELECTIONS["all"](np.zeros(6), 2, rng).tolist() == list(range(6))


def test_the_outer_pair_stays(rng):
    """The docstring's row, and a second group whose outer pair is (4, 7)."""
    advantages = np.array([0, 3, -1, 1, 2, 0.5, 0.25, -2])
    rows = ROW_SELECTIONS["outer_pairs"](advantages, 4, rng)
    assert len(rows) == 8
    assert set(map(tuple, rows.reshape(-1, 2).tolist())) <= {(1, 2), (4, 7)}
    assert ROW_SELECTIONS["outer_pairs"](advantages[:4], 4, rng).tolist() == [1, 2, 1, 2]


def test_pairs_are_drawn_by_their_advantages(rng):
    """Two groups of eight; their outer pairs weigh 8, 4 and 3, 1."""
    easy = np.array([4, 2, 0.1, 0.1, -0.1, -0.1, -2, -4])
    hard = np.array([1.5, 0.5, 0, 0, 0, 0, -0.5, -1.5])
    count = collections.Counter()
    draws = 2_000
    for _ in range(draws):
        rows = ROW_SELECTIONS["outer_pairs"](np.concatenate([easy, hard]), 8, rng)
        count.update(map(tuple, rows.reshape(-1, 2).tolist()))
    total = 8 * draws
    shares = {(0, 7): 8 / 16, (1, 6): 4 / 16, (8, 15): 3 / 16, (9, 14): 1 / 16}
    assert set(count) == set(shares)
    for pair, share in shares.items():
        error = 4 * np.sqrt(total * share * (1 - share))
        assert count[pair] == pytest.approx(total * share, abs=error)


def test_without_signal_all_pairs_are_alike(rng):
    rows = ROW_SELECTIONS["outer_pairs"](np.zeros(16), 8, rng)
    assert len(rows) == 16
    assert set(rows.tolist()) <= {0, 7, 1, 6, 8, 15, 9, 14}


def test_the_control_draws_a_random_half(rng):
    """Of groups of four one pair each: any two rows, each as often."""
    count = collections.Counter()
    for _ in range(1_000):
        rows = ROW_SELECTIONS["random_pairs"](np.arange(8.0), 4, rng)
        assert len(rows) == 8
        pairs = set(map(tuple, rows.reshape(-1, 2).tolist()))
        assert len({pair[0] // 4 for pair in pairs}) == len(pairs)  # one of a group at most
        count.update(rows.tolist())
    for row in range(8):
        assert count[row] == pytest.approx(1_000, rel=0.15)


def test_a_budget_by_hand():
    class Order:
        def permutation(self, size):
            return np.array([2, 0, 1])

    assert cut_to_budget(np.array([5, 3, 4]), 6, Order()).tolist() == [2, 0, 4]


def test_a_budget_is_met_exactly(rng):
    """All tokens where there are too few; else as many as the budget, of rows from their start."""
    for _ in range(50):
        lens = rng.integers(0, 9, 12)
        budget = int(rng.integers(1, 80))
        cut = cut_to_budget(lens, budget, rng)
        assert cut.sum() == min(budget, lens.sum())
        assert ((cut >= 0) & (cut <= lens)).all()
        assert np.count_nonzero((cut > 0) & (cut < lens)) <= 1


def test_every_row_has_the_same_chance(rng):
    """Two of four rows of equal length."""
    taken = sum(cut_to_budget(np.full(4, 3), 6, rng) > 0 for _ in range(2_000))
    assert taken == pytest.approx(np.full(4, 1_000), abs=4 * np.sqrt(2_000 / 4))
