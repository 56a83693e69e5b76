"""Pairs by hand, draws counted against exact probabilities, and cuts at the budget."""

import itertools
import types

import numpy as np
import pytest

from specrl_jax.algorithms.row_selection import ROW_SELECTIONS, cut_to_budget, draw_pairs

# Of each group: the outer pair, the inner pair, best first.
ADVANTAGES = np.array([-1, 1.5, -0.5, 0, 0.25, 0, 0, -0.25, 0, 0, 0, 0, 3, -1, -1, -1], np.float32)
OUTER = [(1, 0), (4, 7), (8, 11), (12, 15)]
INNER = [(3, 2), (5, 6), (9, 10), (13, 14)]
OUTER_WEIGHTS = [2.5, 0.5, 0.0, 4.0]
INNER_WEIGHTS = [0.5, 0.0, 0.0, 2.0]


def _draw(select: str, advantages=ADVANTAGES, group_size: int = 4, seed: int = 0) -> list[tuple]:
    rows = draw_pairs(
        ROW_SELECTIONS[select], advantages, group_size, np.random.default_rng([0, seed])
    )
    assert rows.shape == advantages.shape
    return [tuple(pair) for pair in rows.reshape(-1, 2).tolist()]


def _probabilities(select: str) -> dict[tuple, float]:
    """Return the chance of each pair to be first, over all ways to keep a pair of each group."""
    chances = dict.fromkeys(OUTER + INNER, 0.0)
    weights = dict(zip(OUTER + INNER, OUTER_WEIGHTS + INNER_WEIGHTS, strict=True))
    ways = [OUTER]
    if select == "random_pairs":
        ways = list(itertools.product(*zip(OUTER, INNER, strict=True)))
    for kept in ways:
        total = sum(weights[pair] for pair in kept)
        for pair in kept:
            chances[pair] += weights[pair] / total / len(ways)
    return chances


@pytest.mark.parametrize("select", ["outer_pairs", "random_pairs"])
def test_pairs_are_drawn_by_their_advantages(select):
    """Within four standard errors; a pair without advantages is never drawn."""
    times = 4_000
    first = [_draw(select, seed=seed)[0] for seed in range(times)]
    chances = _probabilities(select)
    assert sum(chances.values()) == pytest.approx(1)
    assert set(first) <= chances.keys()
    for pair, chance in chances.items():
        error = np.sqrt(chance * (1 - chance) / times)
        assert abs(first.count(pair) / times - chance) <= 4 * error, pair


def test_the_draws_of_a_step_are_independent():
    """Both draws of a step are (12, 15) as often as 4/7 · 4/7 says."""
    pairs = [_draw("outer_pairs", seed=seed)[:2] for seed in range(4_000)]
    both = pairs.count([(12, 15), (12, 15)]) / len(pairs)
    assert abs(both - (4 / 7) ** 2) <= 4 * np.sqrt(both * (1 - both) / len(pairs))


def test_groups_of_eight_keep_the_two_outer_pairs():
    """Best first these rows are 6 1 3 0 4 7 5 2: equal ones stay in their order."""
    advantages = np.array([0.5, 1, -2, 1, 0, -1, 2, -0.5], np.float32)
    drawn = [pair for seed in range(30) for pair in _draw("outer_pairs", advantages, 8, seed)]
    assert set(drawn) == {(6, 2), (1, 5)}


def test_without_any_advantage_all_kept_pairs_are_alike():
    drawn = [pair for seed in range(100) for pair in _draw("outer_pairs", 0 * ADVANTAGES, 4, seed)]
    share = [drawn.count((first, first + 3)) / len(drawn) for first in (0, 4, 8, 12)]
    assert sum(share) == pytest.approx(1)
    np.testing.assert_allclose(share, 0.25, atol=4 * np.sqrt(0.25 * 0.75 / len(drawn)))


def _cut(rows: list[str], budget: int, order: list[int]) -> list[int]:
    """rows: a character a slot, x for a token of the policy, o for one of an environment."""
    mask = np.array([[c == "x" for c in row.ljust(9)] for row in rows])
    rng = types.SimpleNamespace(permutation=lambda n: np.array(order))
    return cut_to_budget(np.array([len(row) for row in rows]), mask, budget, rng).tolist()


@pytest.mark.parametrize(
    ("rows", "budget", "lens"),
    [
        (["xxx", "xx", "xxxx"], 5, [1, 0, 4]),
        (["xxx", "xx", "xxxx"], 4, [0, 0, 4]),
        (["xxx", "xx", "xxxx"], 3, [0, 0, 3]),
        (["xxx", "xx", "xxxx"], 9, [3, 2, 4]),
        (["xxx", "xx", "xxxx"], 99, [3, 2, 4]),
        # An environment's tokens cost nothing, and the last token that is kept is the policy's.
        (["xooxxox", "x", "xxoxoo"], 5, [4, 0, 6]),
        (["xooxxox", "x", "xxoxoo"], 8, [7, 1, 6]),
    ],
)
def test_rows_are_cut_at_the_budget(rows, budget, lens):
    assert _cut(rows, budget, [2, 0, 1]) == lens


def test_any_row_may_come_first():
    """Each of four rows of two tokens is taken alone, as often as the others."""
    mask = np.ones((4, 2), bool)
    lens = np.full(4, 2)
    taken = [
        np.flatnonzero(cut_to_budget(lens, mask, 2, np.random.default_rng([1, seed])))
        for seed in range(2_000)
    ]
    shares = np.bincount(np.concatenate(taken), minlength=4) / 2_000
    assert all(len(rows) == 1 for rows in taken)
    np.testing.assert_allclose(shares, 0.25, atol=4 * np.sqrt(0.25 * 0.75 / 2_000))
