"""Which rows of a step its updates take: pairs drawn by advantage, or as many as a budget holds.

Takes advantages or masks of a step's rows, gives row ids or lengths. `ROW_SELECTIONS` holds every
choice of `config.updates.select`. NumPy, on the host; a generator with the same seed gives every
process the same rows.
"""

from collections.abc import Callable

import numpy as np

# (groups, pairs of a group, rng) → int [groups, pairs / 2], the pairs that stay; 0 is the outermost
PairFilter = Callable[[int, int, np.random.Generator], np.ndarray]


def keep_outer(groups: int, pairs: int, rng: np.random.Generator) -> np.ndarray:
    """Keep the outer half of the pairs, whose advantages differ most; rng is not used."""
    return np.tile(np.arange(pairs // 2), (groups, 1))


def keep_random(groups: int, pairs: int, rng: np.random.Generator) -> np.ndarray:
    """Keep a random half of the pairs: the control of `keep_outer`."""
    return np.argsort(rng.random((groups, pairs)), axis=1)[:, : pairs // 2]


ROW_SELECTIONS: dict[str, PairFilter | None] = {
    "all": None,  # every row once
    "outer_pairs": keep_outer,
    "random_pairs": keep_random,
}


def draw_pairs(
    keep: PairFilter, advantages: np.ndarray, group_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Return row ids int [B], of B / 2 drawn pairs; an id may occur more than once.

    The rows of a group are paired, the best with the worst, the second best with the second worst,
    and so on. Half of the pairs stay. Of these, pairs (i, j) are drawn with replacement, with a
    probability proportional to |Aᵢ| + |Aⱼ|, or all alike where every advantage is 0. This is
    Shuffle-R1 (arXiv 2508.05612, section 3) with its exponent 1. Differs from the authors' code,
    which draws B / 2 rows in 8 rounds, each without replacement: B rows leave a step its number of
    updates. Drawn rows weigh no less for it, so the gradient is not that of all rows.

    Worked row, G = 4: advantages −1, 1.5, −0.5, 0 have the pairs (1, 0) and (3, 2). The outer one
    is (1, 0), with the weight 2.5.

    advantages: float [B], of a response; B = Q·G, the rows of a group are contiguous.
    group_size: G, a multiple of 4.
    """
    groups = advantages.reshape(-1, group_size)
    best_first = np.argsort(-groups, axis=1, kind="stable")
    pairs = np.stack([best_first, best_first[:, ::-1]], axis=2)[:, : group_size // 2]
    kept = keep(len(groups), group_size // 2, rng)
    pairs = np.take_along_axis(pairs, kept[:, :, None], axis=1)
    starts = group_size * np.arange(len(groups))
    rows = (pairs + starts[:, None, None]).reshape(-1, 2)
    weights = np.sum(np.abs(advantages[rows], dtype=np.float64), axis=1)
    if not np.any(weights):
        weights = np.ones(len(rows))
    drawn = rng.choice(len(rows), size=len(advantages) // 2, p=weights / np.sum(weights))
    return rows[drawn].reshape(-1)


def cut_to_budget(
    lens: np.ndarray, mask: np.ndarray, budget: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the lengths int [n] to which an update cuts its rows; 0: a row is left out.

    Rows are taken in random order until they hold `budget` tokens. The last one is cut there, the
    others are left out. All rows stay whole where they hold fewer tokens. This is C3PO
    (arXiv 2506.14731, section 3). Worked row: budget 5, rows of 3, 2 and 4 tokens in the order
    2, 0, 1 give 1, 0, 4.

    lens: int [n], slots of the responses.
    mask: bool [n, R], the policy's tokens in them; an environment's tokens may lie between.
    budget: tokens of the policy, >= 1.
    """
    counts = np.sum(mask, axis=1)
    order = rng.permutation(len(mask))
    left = np.empty_like(counts)  # of the budget, after the rows before; it may be below 0
    left[order] = budget - np.cumsum(counts[order]) + counts[order]
    earlier = np.cumsum(mask, axis=1) - mask
    return np.minimum(lens, np.sum(earlier < left[:, None], axis=1))
