"""C3PO (arXiv 2506.14731, section 3): an update uses as many tokens as fit in a budget.

NumPy, on the host; a generator with the same seed gives every process the same rows.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from specrl_jax import hosts
from specrl_jax.algorithms.losses import TOKEN_MEAN
from specrl_jax.config.fields import NEW_RUN, Check, Section, Values, field
from specrl_jax.config.kinds import integer
from specrl_jax.sharding import put
from specrl_jax.training.stage import Stage, StageResult
from specrl_jax.training.stages import mini_batches, row_rng


def cut_to_budget(
    lens: np.ndarray, mask: np.ndarray, budget: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the lengths int [n] to which an update cuts its rows; 0: a row is left out.

    Rows are taken in random order until they have `budget` tokens. The last one is cut there, the
    rest are left out. All rows stay whole if they have fewer tokens. Worked row: budget 5, rows of
    3, 2 and 4 tokens in the order 2, 0, 1 give 1, 0, 4.

    lens: int [n], slots of the responses.
    mask: bool [n, R], the policy's tokens in them; environment tokens may lie in between.
    budget: tokens of the policy, >= 1.
    """
    counts = np.sum(mask, axis=1)
    order = rng.permutation(len(mask))
    left = np.empty_like(counts)  # of the budget, after the previous rows; may be negative
    left[order] = budget - np.cumsum(counts[order]) + counts[order]
    earlier = np.cumsum(mask, axis=1) - mask
    return np.minimum(lens, np.sum(earlier < left[:, None], axis=1))


class TokenBudget(Stage):
    """Cuts the rows of each mini-batch to a budget of tokens."""

    @staticmethod
    def asked_by(config) -> str:
        return "updates.token_budget" if config.updates.token_budget else ""

    @staticmethod
    def loss_count(config) -> int:
        return config.updates.token_budget

    def __call__(self, run, state, batch, collected) -> StageResult:
        budget = run.config.updates.token_budget
        rng = row_rng(run, state)
        response_lens, mask = hosts.fetch((batch.response_lens, batch.mask))
        lens = np.zeros_like(response_lens)
        tokens = []
        for part in mini_batches(run, np.arange(len(lens))):
            lens[part] = cut_to_budget(response_lens[part], mask[part], budget, rng)
            tokens.append(min(np.sum(mask[part]), budget))
        batch = dataclasses.replace(batch, response_lens=put(lens, "batch"))
        metrics = {
            "update/selected_fraction": np.mean(lens > 0),
            "update/budget_filled": np.mean(tokens) / budget,
        }
        return StageResult(batch, metrics=metrics)


STAGE = TokenBudget
METRICS = {"update/budget_filled": ("tokens that the updates take / updates.token_budget", "1")}
# fmt: off
SECTIONS = (Section("updates", "", (
    field("token_budget", 0, "C3PO: tokens per update, from rows in random order; 0: all rows",
          integer()),
), may_change=NEW_RUN),)
# fmt: on


def _rules(config: Values) -> Iterator[Check]:
    algorithm = config.algorithm
    updates = config.updates
    if not updates.token_budget:
        return
    where = "where updates.token_budget is > 0"
    least = config.rollout.response_len
    rule = f"0 or in [{least}, {least * updates.mini_batch_size}], one to all responses of a "
    fits = least <= updates.token_budget <= least * updates.mini_batch_size
    yield "updates.token_budget", rule + "mini-batch at their longest", fits
    rule = f"0 where algorithm.objective is {algorithm.objective} (its pairs stay whole)"
    yield "updates.token_budget", rule, not config.meaning("algorithm.objective").whole_groups
    rule = f"0 {where} (it may leave the solution out)"
    yield "algorithm.solution_coef", rule, not config.get("algorithm.solution_coef")
    by_token = config.meaning("algorithm.aggregation") is TOKEN_MEAN
    yield "algorithm.aggregation", f"token {where} (the sum is divided by it)", by_token


RULES = (_rules,)
