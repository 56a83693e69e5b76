"""Choice of the next prompts: one entry of `CURRICULA` for each `curriculum.name`.

Takes encoded prompts and their rewards (`observe`); returns batches of `Prompts`. The choice is a
pure function of the seed and the observed rewards.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specrl_jax.data.prompts import EncodedDataset, digest, words
from specrl_jax.registry import Table
from specrl_jax.types import Prompts, StatePart


class PromptStream(StatePart):
    """Uniform: endless batches of Q distinct prompts, each prompt exactly once an epoch.

    The order of an epoch is a pure function of (seed, epoch). A batch takes the rest of an epoch
    and continues with the next one, whose prompts that it already has come first in the next batch.
    Prompts are drawn in pieces of Q, the last piece of an epoch has the rest: `epoch_index` (from
    0) and `batch_index` (in that epoch) refer to the next piece.

    settings: `config.curriculum`. total_steps: of the run.
    """

    foresees = True  # `peek` knows the next batch
    by_parts = False  # a group is sampled in parts, one after another
    # Attributes saved in a checkpoint.
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
        self.waiting: list[str] = []  # prompt_ids that `take` has skipped
        self._encoded = encoded
        self._size = prompts_per_step
        self._seed = seed
        self._settings = settings
        self._total_steps = total_steps
        self._digests = {"prompts": digest(encoded.ids), "prompts' tokens": digest(encoded.tokens)}
        self._ids = [example.prompt_id for example in encoded.examples]
        self._rows = {prompt_id: row for row, prompt_id in enumerate(self._ids)}

    def start_step(self, step: int) -> None:
        """Record that step `step` of the run starts, from 1."""

    def next(self) -> Prompts:
        """Return the next batch, [Q, P]."""
        return self.take(self._size)

    def take(self, count: int, busy: Sequence[str] = ()) -> Prompts:
        """Return the next `count` prompts: none twice, none whose prompt_id is in `busy`.

        A prompt that is skipped now comes first in a later call. Raises ValueError if the data has
        too few prompts.
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
                f"data.prompts must be >= {count}, the prompts in progress at a time, got "
                f"{len(self._ids)}; or use fewer prompts per step"
            )

    def observe(self, prompts: Prompts, rewards: np.ndarray) -> None:
        """Record the rewards of Q prompts, float [Q, G]."""

    def find(self, prompt_ids: Sequence[str]) -> Prompts:
        """Return the prompts with these ids, in this order."""
        return self._encoded.select([self._rows[prompt_id] for prompt_id in prompt_ids])

    @property
    def given(self) -> int:
        """Prompts handed out since the run started, counting repeats."""
        drawn = self.epoch_index * self.prompts_per_epoch + self.batch_index * self._size
        return drawn - len(self.waiting)

    def peek(self) -> Prompts:
        """Return the result of the next `next` call, without advancing."""
        return copy.copy(self).next()

    def host(self) -> dict[str, Any]:
        """Return what `restore` needs, JSON-able."""
        fixed = {"seed": self._seed, "prompts_per_step": self._size, **self._digests}
        return fixed | {name: copy.copy(getattr(self, name)) for name in self._place}

    def restore(self, host: Mapping[str, Any], arrays: Any = None) -> "PromptStream":
        """Continue from `host`; raises ValueError if seed, batch size or data differ."""
        for name, now in self.host().items():
            if name in self._place:
                setattr(self, name, host[name])
            elif (was := host[name]) != now:
                raise ValueError(
                    f"data must be as in the checkpoint: {name} was {was!r}, is {now!r}; set back "
                    "the data, the tokenizer or the chat template"
                )
        return self


class Chooser(PromptStream):
    """Draws each batch anew, from all prompts that are not busy.

    So there are no epochs: a draft is the prompt's last response, however old.
    """

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


CURRICULA: dict[str, type[PromptStream]] = Table("CURRICULA", {"uniform": PromptStream})


def count_steps(config: Any, prompts: int) -> int:
    """Return the steps of a run on this many prompts.

    Without `train.steps`, the number closest to `train.epochs` passes: epochs · N / Q, rounded.
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

    This way a group can be sampled and stored in parts, each with its own noise. The first part has
    the noise of the whole group.
    """
    if first == 0:
        return prompts
    examples = tuple(dataclasses.replace(e, first_sample=first) for e in prompts.examples)
    digests = [hashlib.blake2b(e.key.encode(), digest_size=8).hexdigest() for e in examples]
    return dataclasses.replace(prompts, ids=words(digests), examples=examples)
