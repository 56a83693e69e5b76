"""Shuffle-R1 (arXiv 2508.05612, section 3): updates use pairs from a group, drawn by advantage.

NumPy, on the host; a generator with the same seed gives every process the same rows.
"""

from collections.abc import Iterator

import numpy as np

from specrl_jax import hosts
from specrl_jax.algorithms.advantages import choose_advantage
from specrl_jax.config.fields import Check, Values
from specrl_jax.training.choices import trained_group_size
from specrl_jax.training.stage import Stage, StageResult
from specrl_jax.training.stages import row_rng


def draw_pairs(advantages: np.ndarray, group_size: int, rng: np.random.Generator) -> np.ndarray:
    """Return row ids int [B], of B / 2 drawn pairs; an id may occur several times.

    A group's rows are paired, the best with the worst, the second best with the second worst, and
    so on. Only the outer half of the pairs, whose advantages differ most, is kept. Of these, pairs
    (i, j) are drawn with replacement, with probability proportional to |Aᵢ| + |Aⱼ|, or uniformly if
    every advantage is 0: the paper's exponent 1. Differs from the authors' code, which draws B / 2
    rows in 8 rounds, each without replacement: with B rows a step keeps its number of updates.
    Drawn rows are not reweighted, so the gradient is not that of all rows.

    Worked row, G = 4: advantages −1, 1.5, −0.5, 0 have the pairs (1, 0) and (3, 2). The outer one
    is (1, 0), with the weight 2.5.

    advantages: float [B], of a response; B = Q·G, the rows of a group are contiguous.
    group_size: G, a multiple of 4.
    """
    groups = advantages.reshape(-1, group_size)
    best_first = np.argsort(-groups, axis=1, kind="stable")
    pairs = np.stack([best_first, best_first[:, ::-1]], axis=2)[:, : group_size // 4]
    starts = group_size * np.arange(len(groups))
    rows = (pairs + starts[:, None, None]).reshape(-1, 2)
    weights = np.sum(np.abs(advantages[rows], dtype=np.float64), axis=1)
    if not np.any(weights):
        weights = np.ones(len(rows))
    drawn = rng.choice(len(rows), size=len(advantages) // 2, p=weights / np.sum(weights))
    return rows[drawn].reshape(-1)


class OuterPairs(Stage):
    """Updates use drawn pairs of rows."""

    @staticmethod
    def asked_by(config) -> str:
        return "updates.select" if config.updates.select == "outer_pairs" else ""

    def __call__(self, run, state, batch, collected) -> StageResult:
        # All tokens of a response have the same advantage, and the first token is the policy's.
        advantages = hosts.fetch(batch.advantages)[:, 0]
        row_ids = draw_pairs(advantages, run.trained_group_size, row_rng(run, state))
        taken = len(np.unique(row_ids)) / len(row_ids)
        return StageResult(batch, row_ids, {"update/selected_fraction": taken})


STAGE = OuterPairs
ROW_SELECTIONS = {"outer_pairs": OuterPairs}


def _rules(config: Values) -> Iterator[Check]:
    if config.updates.select != "outer_pairs":
        return
    algorithm = config.algorithm
    where = f"where updates.select is {config.updates.select}"
    group_size = trained_group_size(config)
    rule = f"all where a step trains on groups of {group_size} (half of a group's pairs are kept)"
    yield "updates.select", rule, group_size % 4 == 0
    rule = f"all where algorithm.objective is {algorithm.objective} (its pairs stay whole)"
    yield "updates.select", rule, not config.meaning("algorithm.objective").whole_groups
    rule = f"none {where} (it compares responses of a group)"
    yield "critic.kind", rule, not choose_advantage(config).needs_critic
    rule = f"0 {where} (a solution has no advantage)"
    yield "algorithm.solution_coef", rule, not config.get("algorithm.solution_coef")
    yield "updates.token_budget", f"0 {where}", not config.get("updates.token_budget")


RULES = (_rules,)
