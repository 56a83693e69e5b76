"""E2H (arXiv 2506.06632): prompts are drawn by a schedule from easy to hard."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from specrl_jax.config.fields import Section, When, field
from specrl_jax.config.kinds import SWITCH, TEXT, choice, integer, within
from specrl_jax.data.curriculum import Chooser
from specrl_jax.data.prompts import EncodedDataset
from specrl_jax.types import Example


class EasyToHard(Chooser):
    """Draws difficulty levels by a schedule from easy to hard.

    The prompts form K levels. With `settings.levels` > 0 the prompts are sorted by difficulty, ties
    by prompt_id, and split into that many levels of equal size; otherwise each difficulty is a
    level. Progress p is the share of the run's steps that are done. For each prompt of a batch a
    level is drawn, level k with probability `SCHEDULES[settings.schedule](p, K, settings)[k]`, then
    one of the level's free prompts. A level without free prompts is not drawn.
    """

    def __init__(self, encoded: EncodedDataset, *args: Any):
        super().__init__(encoded, *args)
        field = self._settings.difficulty
        values = [
            _difficulty(example, int(length), field)
            for example, length in zip(encoded.examples, encoded.lens, strict=True)
        ]
        if levels := self._settings.levels:
            order = sorted(range(len(values)), key=lambda row: (values[row], self._ids[row]))
            self._levels = np.empty(len(values), int)
            self._levels[order] = np.arange(len(values)) * levels // len(values)
        else:
            self._levels = np.unique(values, return_inverse=True)[1]
        self._progress = 0.0

    def start_step(self, step: int) -> None:
        self._progress = min((step - 1) / max(self._total_steps, 1), 1.0)

    def _choose(self, rng: np.random.Generator, free: np.ndarray, count: int) -> np.ndarray:
        size = int(self._levels.max()) + 1
        shares = SCHEDULES[self._settings.schedule](self._progress, size, self._settings)
        # The free prompts by level, in random order within each.
        order = rng.permutation(len(free))
        order = order[np.argsort(self._levels[free[order]], kind="stable")]
        ends = np.searchsorted(self._levels[free[order]], np.arange(size), side="right")
        left = np.diff(ends, prepend=0)
        chosen = []
        for _ in range(count):
            # Levels with share 0 are drawn, uniformly, only if the other levels are empty.
            odds = np.where(left > 0, np.maximum(shares, np.finfo(float).tiny), 0.0)
            level = rng.choice(size, p=odds / odds.sum())
            left[level] -= 1
            ends[level] -= 1
            chosen.append(order[ends[level]])
        return np.array(chosen, int)


def _classic(progress: float, levels: int, settings: Any) -> np.ndarray:
    """Return share 1 for one level: one level after another, for equally many steps."""
    return np.eye(levels)[min(int(progress * levels), levels - 1)]


def _balanced(progress: float, levels: int, settings: Any) -> np.ndarray:
    """Return equal shares at any progress."""
    return np.full(levels, 1 / levels)


def _cosine(progress: float, levels: int, settings: Any) -> np.ndarray:
    """Return the shares of E2H-C: from ∝ K, K − 1, ... 1 to ∝ 1, 2, ... K, by half a cosine."""
    rising = np.arange(1, levels + 1) / (levels * (levels + 1) / 2)
    easy = (1 + np.cos(np.pi * progress)) / 2
    return easy * rising[::-1] + (1 - easy) * rising


def _gaussian(progress: float, levels: int, settings: Any) -> np.ndarray:
    """Return the shares of E2H-G: ∝ exp(−(k − μ)² / 2σ²), μ = p^exponent (K − 1); σ in levels.

    With `settings.floor` each level has a share of at least 2 / K(K + 1), the least of `_cosine`.
    """
    mean = progress**settings.mean_exponent * (levels - 1)
    scores = -np.square(np.arange(levels) - mean) / (2 * settings.sigma**2)
    shares = np.exp(scores - scores.max())
    least = 2 / (levels * (levels + 1)) if settings.floor else 0.0
    return least + (1 - levels * least) * shares / shares.sum()


# By `curriculum.schedule`: the share of each level, float [K], by progress in [0, 1].
SCHEDULES: dict[str, Callable[[float, int, Any], np.ndarray]] = {
    "classic": _classic,
    "balanced": _balanced,
    "cosine": _cosine,
    "gaussian": _gaussian,
}


def _difficulty(example: Example, prompt_len: int, field: str) -> float:
    if field == "prompt_len":
        return prompt_len
    if field == "answer_len":
        return len(example.answer)
    value: Any = example.metadata
    for name in field.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            "curriculum.difficulty must be prompt_len, answer_len or the path of a number in the "
            f"metadata of every problem, got {field!r}, which in {example.prompt_id} is {value!r}"
        )
    return value


CURRICULA = {"easy_to_hard": EasyToHard}
EASY_TO_HARD = When(
    "curriculum.name", lambda c: c.curriculum.name == "easy_to_hard", "easy_to_hard"
)
GAUSSIAN = When("curriculum.schedule", lambda c: c.curriculum.schedule == "gaussian", "gaussian")
# fmt: off
SECTIONS = (Section("curriculum", "", (
    field("difficulty", "answer_len", "easy_to_hard: or prompt_len, or a path in the metadata",
          TEXT),
    field("levels", 4, "easy_to_hard: levels of equal size; 0: one for each difficulty", integer()),
    field("schedule", "gaussian", "easy_to_hard: classic | balanced | cosine | gaussian",
          choice(lambda: SCHEDULES)),
    field("sigma", 0.5, "gaussian: standard deviation, in levels", within(1e-6, 1e6), GAUSSIAN),
    field("mean_exponent", 0.5, "gaussian: the mean moves by progress to this power",
          within(1e-6, 1e6), GAUSSIAN),
    field("floor", True, "gaussian: each of K levels keeps a share of 2 / K(K + 1) or more", SWITCH,
          GAUSSIAN),
), on=EASY_TO_HARD),)
# fmt: on
