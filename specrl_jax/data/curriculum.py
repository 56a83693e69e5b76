"""Choice of the next prompts: one entry of `CURRICULA` for each `curriculum.name`.

Takes encoded prompts and their rewards (`observe`); gives batches of `Prompts`. The choice is a
pure function of the seed and of the observed rewards. `mopps` and `easy_to_hard` draw each batch
anew from all prompts, so they have no epochs: a draft is the prompt's last response, however old.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax.data.prompts import EncodedDataset, digest, words
from specrl_jax.types import Example, Prompts, StatePart


class PromptStream(StatePart):
    """Uniform: endless batches of Q distinct prompts, each prompt exactly once an epoch.

    The order of an epoch is a pure function of (seed, epoch). A batch takes the rest of an epoch
    and goes on with the next one, whose prompts that it already has come first in the next batch.
    Prompts are drawn in pieces of Q, the last piece of an epoch has the rest: `epoch_index` (from
    0) and `batch_index` (in that epoch) are those of the next piece.

    settings: `config.curriculum`. total_steps: of the run.
    """

    foresees = True  # `peek` knows the next batch
    screens = False  # a few responses decide whether the rest of a prompt's group is sampled
    # The attributes that a checkpoint holds.
    _place: tuple[str, ...] = ("epoch_index", "batch_index", "waiting")

    def __init__(
        self,
        encoded: EncodedDataset,
        prompts_per_step: int,
        seed: int,
        settings: Any = None,
        total_steps: int = 0,
    ):
        total = len(encoded.examples)
        if not 1 <= prompts_per_step <= total:
            raise ValueError(
                f"rollout.prompts_per_step must be in [1, {total}], the number of training "
                f"prompts, got {prompts_per_step}"
            )
        self.prompts_per_epoch = total
        self.epoch_index = 0
        self.batch_index = 0
        self.waiting: list[str] = []  # prompt_ids that `take` has passed over
        self._encoded = encoded
        self._size = prompts_per_step
        self._seed = seed
        self._settings = settings
        self._total_steps = total_steps
        self._digests = {"prompts": digest(encoded.ids), "prompts' tokens": digest(encoded.tokens)}
        self._ids = [example.prompt_id for example in encoded.examples]
        self._rows = {prompt_id: row for row, prompt_id in enumerate(self._ids)}

    def begin(self, step: int) -> None:
        """Note that step `step` of the run begins, from 1."""

    def next(self) -> Prompts:
        """Return the next batch, [Q, P]."""
        return self.take(self._size)

    def take(self, count: int, busy: Sequence[str] = ()) -> Prompts:
        """Return the next `count` prompts: none twice, none whose prompt_id is in `busy`.

        A prompt that is passed over now comes first in a later call. Raises ValueError where the
        data has too few prompts.
        """
        taken = []
        out = set(busy)
        self._check_count(count + len(out))
        drawn, self.waiting = self.waiting, []
        while True:
            for prompt_id in drawn:
                if len(taken) == count or prompt_id in out:
                    self.waiting.append(prompt_id)
                else:
                    taken.append(prompt_id)
                    out.add(prompt_id)
            if len(taken) == count:
                return self.find(taken)
            drawn = self._draw()

    def _draw(self) -> list[str]:
        """Return the prompt_ids of the next piece of the epoch."""
        order = np.random.default_rng([self._seed, self.epoch_index]).permutation(len(self._ids))
        batch = order[self.batch_index * self._size :][: self._size]
        self.batch_index += 1
        if self.batch_index * self._size >= len(order):
            self.epoch_index += 1
            self.batch_index = 0
        return [self._ids[row] for row in batch]

    def _check_count(self, count: int) -> None:
        if count > len(self._ids):
            raise ValueError(
                f"data.prompts must be >= {count}, the prompts that are under way at once, got "
                f"{len(self._ids)}; fewer prompts a step would fit"
            )

    def observe(self, prompts: Prompts, rewards: np.ndarray) -> None:
        """Note the rewards of Q prompts, float [Q, G]."""

    def find(self, prompt_ids: Sequence[str]) -> Prompts:
        """Return the prompts of these ids, in this order."""
        return self._encoded.select([self._rows[prompt_id] for prompt_id in prompt_ids])

    @property
    def given(self) -> int:
        """Prompts given out since the run began, with repeats."""
        drawn = self.epoch_index * self.prompts_per_epoch + self.batch_index * self._size
        return drawn - len(self.waiting)

    def peek(self) -> Prompts:
        """Return what `next` will give, without going on."""
        return copy.copy(self).next()

    def host(self) -> dict[str, Any]:
        """Return what `restore` needs, for JSON."""
        fixed = {"seed": self._seed, "prompts_per_step": self._size, **self._digests}
        return fixed | {name: copy.copy(getattr(self, name)) for name in self._place}

    def restore(self, host: Mapping[str, Any], arrays: Any = None) -> "PromptStream":
        """Go on where `host` was taken; raises ValueError where seed, batch size or data differ."""
        for name, now in self.host().items():
            if name in self._place:
                setattr(self, name, host[name])
            elif (was := host[name]) != now:
                raise ValueError(
                    f"data must be as in the checkpoint: {name} was {was!r}, is {now!r}; set back "
                    "the data, the tokenizer or the chat template"
                )
        return self


class Screened(PromptStream):
    """SPEED (arXiv 2506.09016): uniform; the group buffer screens prompts with a few responses."""

    screens = True


class _Chooser(PromptStream):
    """Draws each batch anew, from all prompts that are not busy."""

    foresees = False
    _place = ("draws", "taken")
    draws = taken = 0

    def take(self, count: int, busy: Sequence[str] = ()) -> Prompts:
        """Return `count` prompts: none twice, none whose prompt_id is in `busy`."""
        out = {self._rows[name] for name in busy}
        self._check_count(count + len(out))
        free = np.array([row for row in range(len(self._ids)) if row not in out])
        rng = np.random.default_rng([self._seed, 1, self.draws])
        chosen = free[self._choose(rng, free, count)]
        self.draws += 1
        self.taken += count
        return self._encoded.select(chosen)

    def _choose(self, rng: np.random.Generator, free: np.ndarray, count: int) -> np.ndarray:
        """Return `count` distinct indices into `free`."""
        raise NotImplementedError

    @property
    def given(self) -> int:
        return self.taken


class ByPassRate(_Chooser):
    """MoPPS (arXiv 2507.04632): the prompts whose pass rate is likely near a target.

    Each prompt has a Beta posterior of its pass rate, at first Beta(1, 1). For n prompts,
    `candidates` · n prompts are drawn at random, and a pass rate is sampled for each (Thompson
    sampling). The n candidates whose rates have the least distance are taken, ties in the order of
    the draw: the distance from `target` with `settings.select` = nearest, from the range
    [`low`, `high`] with threshold. After G rewards r, cut to [0, 1],

        α ← λα + (1 − λ) + Σr        β ← λβ + (1 − λ) + Σ(1 − r)

    so that old evidence fades. Worked: λ = 0.5, α = β = 1, rewards 1 1 0 1 give α = 4, β = 2.
    """

    _place = (*_Chooser._place, "posterior")

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.posterior: dict[str, list[float]] = {}  # prompt_id → [α, β], of those with evidence

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


# By `curriculum.select`: the distance of pass rates, float [n], from the wanted ones.
DISTANCES: dict[str, Callable[[np.ndarray, Any], np.ndarray]] = {
    "nearest": lambda rates, settings: np.abs(rates - settings.target),
    "threshold": lambda rates, settings: np.abs(
        rates - np.clip(rates, settings.low, settings.high)
    ),
}


class EasyToHard(_Chooser):
    """E2H (arXiv 2506.06632): levels of difficulty, drawn by a schedule from easy to hard.

    The prompts form K levels. With `settings.levels` > 0 the prompts are sorted by difficulty, ties
    by prompt_id, and cut into that many levels of equal size; else each difficulty is a level.
    Progress p is the share of the run's steps that are done. For each prompt of a batch a level is
    drawn, level k with probability `SCHEDULES[settings.schedule](p, K, settings)[k]`, and then one
    of the level's free prompts. A level without free prompts is not drawn.
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

    def begin(self, step: int) -> None:
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
            # Levels of share 0 are drawn, all alike, only where the other levels are empty.
            odds = np.where(left > 0, np.maximum(shares, np.finfo(float).tiny), 0.0)
            level = rng.choice(size, p=odds / odds.sum())
            left[level] -= 1
            ends[level] -= 1
            chosen.append(order[ends[level]])
        return np.array(chosen, int)


def _classic(progress: float, levels: int, settings: Any) -> np.ndarray:
    """Return the share 1 for one level: one level after another, for equally many steps."""
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


CURRICULA: dict[str, type[PromptStream]] = {
    "uniform": PromptStream,
    "speed": Screened,
    "mopps": ByPassRate,
    "easy_to_hard": EasyToHard,
}


def count_steps(config: Any, prompts: int) -> int:
    """Return the steps of a run on this many prompts.

    Without `train.steps` as many as come nearest to `train.epochs` passes: epochs · N / Q, rounded.
    """
    size = config.rollout.prompts_per_step
    rounded = (2 * config.train.epochs * prompts + size) // (2 * size)
    return config.train.steps or max(rounded, 1)


def make_stream(config: Any, encoded: EncodedDataset, total_steps: int = 0) -> PromptStream:
    """Return the stream of prompts that `config.curriculum` names; total_steps: of the run."""
    stream = CURRICULA[config.curriculum.name]
    size = config.rollout.prompts_per_step
    return stream(encoded, size, config.seed, config.curriculum, total_steps)


def part_of(prompts: Prompts, first: int) -> Prompts:
    """Return the same prompts for their responses from number `first` on.

    So a group can be sampled and stored in parts, each with noise of its own. The first part has
    the noise of the whole.
    """
    if first == 0:
        return prompts
    examples = tuple(dataclasses.replace(e, first_sample=first) for e in prompts.examples)
    digests = [hashlib.blake2b(e.key.encode(), digest_size=8).hexdigest() for e in examples]
    return dataclasses.replace(prompts, ids=words(digests), examples=examples)
