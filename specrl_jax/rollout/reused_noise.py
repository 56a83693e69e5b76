"""Exact reuse: which noise the samples of a prompt use at each visit.

A token is the argmax of perturbed scores. The noise is keyed by a step, the prompt, the sample and
the position. Each sample reuses its noise for a few visits, so the updated policy re-draws mostly
the same tokens: after the same text P(the next token differs) <= 2 TV / (1 + TV) where one race
decides (Gumbel coupling, arXiv 2408.07978). So most of the sample's previous response is accepted
as a draft. The match rule, which verifies it, changes no token.

In: the prompts of a rollout, later their rewards. Out: the step whose noise each sample uses.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax.types import Prompts, StatePart


class ReusedNoise(StatePart):
    """Record of the step whose noise each sample of each prompt used last, and for how many visits.

    Worked example: a group of 4 samples, 3 visits, refresh 0.25, visited in steps 1, 5, 9:

        step 1    1 1 1 1    all new
        step 5    5 1 1 1    one fresh: the oldest noise, the first sample if several tie
        step 9    5 9 1 1    the next; at the next visit the last two have had their 3 visits

    With a refresh share s, noise is reused for at most 1 / s visits, whatever n is.

    Args:
      visits: n, maximum number of rollouts of a sample on the same noise.
      refresh: share of a group's samples that get fresh noise at each visit, oldest noise first.
      group_size: G, samples of a prompt that are rolled out together.
      needs_signal: give a group whose rewards are all equal fresh noise at its next visit, since
        repeated responses would teach nothing. False with a critic, which learns from every group.
    """

    def __init__(self, visits: int, refresh: float, group_size: int, needs_signal: bool = True):
        self._max_visits = visits
        self._num_fresh = math.ceil(refresh * group_size)
        self._group_size = group_size
        self._needs_signal = needs_signal
        # prompt_id → (steps [G], visits [G]), for prompts whose next noise is not all fresh
        self._used: dict[str, tuple[list[int], list[int]]] = {}

    def noise_steps(self, prompts: Prompts, step: int) -> np.ndarray:
        """Return the step whose noise each sample uses in the rollout of `step`, int [Q, G]."""
        steps = np.full((len(prompts.examples), self._group_size), step)
        for row, example in zip(steps, prompts.examples):
            if example.key in self._used:
                before, visits = map(np.array, self._used[example.key])
                oldest = np.argsort(before, kind="stable")[: self._num_fresh]
                row[:] = np.where(visits < self._max_visits, before, step)
                row[oldest] = step
        return steps

    def observe(self, prompts: Prompts, steps: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        """Record a rollout; return the samples that had the same noise at their previous visit.

        steps: int [Q, G], from `noise_steps`. rewards: float [Q, G]. Returns bool [Q, G].
        """
        kept = np.zeros(steps.shape, bool)
        for row, example in enumerate(prompts.examples):
            visits = np.ones(self._group_size, int)
            if example.key in self._used:
                before, visits_before = map(np.array, self._used.pop(example.key))
                kept[row] = before == steps[row]
                visits += np.where(kept[row], visits_before, 0)
            teaches = np.ptp(rewards[row]) > 0 or not self._needs_signal
            if teaches and self._max_visits > 1:
                self._used[example.key] = (steps[row].tolist(), visits.tolist())
        return kept

    def host(self) -> dict[str, Sequence]:
        return dict(self._used)

    def restore(self, host: Mapping[str, Sequence], arrays: Any = None) -> "ReusedNoise":
        self._used = {name: (list(steps), list(visits)) for name, (steps, visits) in host.items()}
        return self
