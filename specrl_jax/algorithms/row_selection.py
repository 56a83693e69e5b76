"""Choice of the rows that the updates of a step take, between advantages and packing.

`ROW_SELECTIONS` holds every choice of `config.updates.select`. Functions of NumPy arrays and of a
keyed generator: a resumed run chooses the same rows.
"""

from collections.abc import Callable

import numpy as np


def all_rows(advantages: np.ndarray, group_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return every row once, in order."""
    return np.arange(len(advantages))


def outer_pairs(advantages: np.ndarray, group_size: int, rng: np.random.Generator) -> np.ndarray:
    """Choose pairs of rows with the largest differences, and draw them by their advantages.

    Shuffle-R1 (arXiv 2508.05612, sections 3.2 and 3.3). The rows of a group, sorted by advantage,
    are paired best with worst, second with second last, and so on. The outer half of a group's
    pairs stays. Of all that stay pairs are drawn with replacement, with probability ∝ |a₁| + |a₂|,
    up to the batch's size.

    Worked, one group of four rows with advantages 0 3 −1 1: the pairs are (1, 2) and (3, 0), and
    (1, 2) stays: the rows are 1 2 1 2.

    advantages: float [B], of the rows; those of a group are contiguous. group_size: G, even.

    Returns int [B], rows of the batch.
    """
    groups = advantages.reshape(-1, group_size)
    best_first = np.argsort(-groups, axis=1, kind="stable")
    weights = np.abs(groups)
    return _draw_pairs(best_first, weights, rng)


def random_pairs(advantages: np.ndarray, group_size: int, rng: np.random.Generator) -> np.ndarray:
    """Choose a random half of the pairs, and draw them with equal probability.

    The control of `outer_pairs`: as many rollouts and as many distinct rows. Arguments as there.
    """
    groups = advantages.reshape(-1, group_size)
    order = rng.permuted(np.tile(np.arange(group_size), (len(groups), 1)), axis=1)
    return _draw_pairs(order, np.ones_like(groups), rng)


def _draw_pairs(order: np.ndarray, weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw pairs of rows up to the batch's size, int [B].

    order: int [Q, G], the rows of each group; the first is paired with the last, and so on. The
    first half of the pairs may be drawn. weights: float [Q, G], of rows; all 0: as if all were 1.
    """
    groups, size = order.shape
    kept = max(size // 4, 1)
    first = order[:, :kept]
    second = order[:, ::-1][:, :kept]
    odds = np.take_along_axis(weights, first, axis=1) + np.take_along_axis(weights, second, axis=1)
    odds = odds.reshape(-1).astype(float)
    if not odds.any():
        odds += 1
    start = np.arange(groups)[:, None] * size
    pairs = np.stack([start + first, start + second], axis=-1).reshape(-1, 2)
    drawn = rng.choice(len(pairs), groups * size // 2, p=odds / odds.sum())
    return pairs[drawn].reshape(-1)


# Rows int [B] of a batch from (advantages float [B], group size, generator).
RowSelection = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
ROW_SELECTIONS: dict[str, RowSelection] = {
    "all": all_rows,
    "outer_pairs": outer_pairs,
    "random_pairs": random_pairs,
}


def cut_to_budget(lens: np.ndarray, budget: int, rng: np.random.Generator) -> np.ndarray:
    """Take rows in random order until they hold `budget` tokens; cut the last one (C3PO).

    arXiv 2506.14731, section 4: an update of a constant number of tokens, whatever the lengths.
    Worked: lengths 5 3 4 in the order 2 0 1 and a budget of 6 give 2 0 4.

    lens: int [n], tokens of the rows of one update.

    Returns int [n], the tokens of each row that count.
    """
    order = rng.permutation(len(lens))
    ends = np.cumsum(lens[order])
    starts = ends - lens[order]
    cut = np.zeros_like(lens)
    cut[order] = np.clip(budget - starts, 0, lens[order])
    return cut
