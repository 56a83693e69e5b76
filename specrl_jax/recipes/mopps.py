"""MoPPS (arXiv 2507.04632): prompts are chosen by a posterior of their pass rate."""

from collections.abc import Callable
from typing import Any

import numpy as np

from specrl_jax.config.fields import Section, When, field
from specrl_jax.config.kinds import SHARE, choice, within
from specrl_jax.data.curriculum import Chooser
from specrl_jax.data.settings import RATES
from specrl_jax.types import Prompts

# By `curriculum.select`: the distance of pass rates, float [n], from the desired ones.
DISTANCES: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "nearest": lambda rates, settings: np.abs(rates - settings.target),
    "threshold": lambda rates, settings: np.abs(
        rates - np.clip(rates, settings.low, settings.high)
    ),
}


class ByPassRate(Chooser):
    """Chooses the prompts whose pass rate is likely near a target.

    Each prompt has a Beta posterior of its pass rate, initially Beta(1, 1). For n prompts,
    `candidates` · n prompts are drawn at random, and a pass rate is sampled for each (Thompson
    sampling). The n candidates with the smallest distance are chosen, ties in the order drawn:
    the distance from `target` with `settings.select` = nearest, from the range [`low`, `high`] with
    threshold. After G rewards r, clipped to [0, 1],

        α ← λα + (1 − λ) + Σr        β ← λβ + (1 − λ) + Σ(1 − r)

    so old evidence fades. Worked: λ = 0.5, α = β = 1, rewards 1 1 0 1 give α = 4, β = 2.
    """

    _place = (*Chooser._place, "posterior")

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.posterior: dict[str, list[float]] = {}  # prompt_id → [α, β], for those with evidence

    def _alpha_beta(self, prompt_id: str) -> list[float]:
        return self.posterior.get(prompt_id, [1.0, 1.0])

    def _choose(self, rng: np.random.Generator, free: np.ndarray, count: int) -> np.ndarray:
        size = min(max(round(self._settings.candidates * count), count), len(free))
        drawn = rng.choice(len(free), size, replace=False)
        rates = rng.beta(*np.array([self._alpha_beta(self._ids[row]) for row in free[drawn]]).T)
        distance = DISTANCES[self._settings.select](rates, self._settings)
        return drawn[np.argsort(distance, kind="stable")[:count]]

    def observe(self, prompts: Prompts, rewards: np.ndarray) -> None:
        rewards = np.clip(rewards, 0, 1).astype(np.float64)
        decay = self._settings.decay
        for example, group in zip(prompts.examples, rewards, strict=True):
            prompt_id = example.prompt_id
            evidence = np.array([group.sum(), (1 - group).sum()])
            faded = decay * np.array(self._alpha_beta(prompt_id)) + (1 - decay)
            self.posterior[prompt_id] = (faded + evidence).tolist()


CURRICULA = {"mopps": ByPassRate}
MOPPS = When("curriculum.name", lambda c: c.curriculum.name == "mopps", "mopps")
NEAREST = When("curriculum.select", lambda c: c.curriculum.select == "nearest", "nearest")
EFFECTS = {RATES: When("curriculum.name", lambda c: MOPPS.holds(c) and not NEAREST.holds(c))}
# fmt: off
SECTIONS = (Section("curriculum", "", (
    field("candidates", 4.0, "mopps: candidates per prompt of the batch", within(1, 1e6)),
    field("select", "nearest", "mopps: nearest (to the target) | threshold (in [low, high])",
          choice(lambda: DISTANCES)),
    field("target", 0.5, "nearest: pass rate to aim at", SHARE, NEAREST),
    field("decay", 0.5, "mopps: weight of earlier evidence when new evidence arrives", SHARE),
), on=MOPPS),)
# fmt: on
