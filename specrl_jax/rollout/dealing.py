"""Which shard of the batch each group of a rollout lies on: the order of the rows in the engine.

Shards hold equal parts of all rows, in order, and a row never leaves its shard. So groups are dealt
to shards by their expected length before the rollout, and its results are put back in the order of
the prompts. On one shard nothing moves.
"""

import dataclasses
from typing import Any

import numpy as np

from specrl_jax import hosts
from specrl_jax.data.prompts import select
from specrl_jax.rollout.carry_over import take
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine.requests import DraftInputs, Requests
from specrl_jax.sharding import shards
from specrl_jax.types import Drafts


def deal(work: np.ndarray, num_train: int, pieces: int) -> np.ndarray:
    """Order int [Q] of the groups in which `pieces` parts of equal size have like work.

    work: [Q], what each group is expected to take. num_train: groups to train on; every part has as
    many of them, before its others. The longest are dealt first, each to the part with least work.
    """
    parts, load = [[] for _ in range(pieces)], np.zeros(pieces)
    for groups in (np.arange(num_train), np.arange(num_train, len(work))):
        free = np.full(pieces, len(groups) // pieces)
        dealt = [[] for _ in range(pieces)]
        for group in groups[np.argsort(-work[groups], kind="stable")]:
            part = int(np.argmin(np.where(free > 0, load, np.inf)))
            dealt[part].append(int(group))
            free[part] -= 1
            load[part] += work[group]
        for part, own in zip(parts, dealt):
            part += sorted(own)
    return np.concatenate(parts).astype(int)


@dataclasses.dataclass(frozen=True)
class Dealing:
    """Brings what is known of a rollout's groups into the order of the engine, and back."""

    groups: np.ndarray | None  # int [Q], in the order of the engine; None: as they are
    group_size: int = 1

    @classmethod
    def of(cls, requests: Requests, drafts: Drafts | None) -> "Dealing":
        """By the tokens that drafts say are left; like any other where there is none.

        Raises ValueError where shards cannot have as many groups each.
        """
        pieces, count = shards("batch"), len(requests.noise_steps)
        group = len(requests.done) // count
        if count % pieces or requests.num_train_rows % (pieces * group):
            raise ValueError(
                f"a rollout's prompts must be divisible by mesh.data x mesh.fsdp = {pieces}, "
                f"got {requests.num_train_rows // group} of {count}; set rollout.prompts_per_step"
            )
        lens = 0 * requests.held_lens if drafts is None else hosts.fetch(drafts.lens)
        tokens = np.maximum(lens - requests.held_lens, 0).reshape(count, group).sum(axis=1)
        mean = tokens[tokens > 0].mean() if tokens.any() else 1.0
        work = np.where(tokens > 0, tokens, mean) * ~requests.done.reshape(count, group).all(axis=1)
        num_train = requests.num_train_rows // group
        if pieces == 1 or (num_train == count and np.ptp(work) == 0):
            return cls(None, group)
        return cls(deal(work, num_train, pieces), group)

    @property
    def rows(self) -> np.ndarray:
        """int [B], the rows in the order of the engine."""
        return (self.groups[:, None] * self.group_size + np.arange(self.group_size)).reshape(-1)

    def take(self, tree: Any) -> Any:
        """A pytree of device arrays [B, ...] in the order of the engine; None stays."""
        return tree if self.groups is None or tree is None else take(tree, self.rows)

    def put_back(self, tree: Any) -> Any:
        """The same in the order of the prompts."""
        return tree if self.groups is None else take(tree, np.argsort(self.rows))

    def put_rows_back(self, array: np.ndarray) -> np.ndarray:
        """A host array [B] of the engine in the order of the prompts."""
        return array if self.groups is None else array[np.argsort(self.rows)]

    def max_lens(self, lens: np.ndarray | None, slots: int) -> np.ndarray | None:
        """Where responses end, int32 [B], of the first rows; the others at `slots`."""
        if self.groups is None or lens is None:
            return lens
        ends = np.full(len(self.rows), slots, np.int32)
        ends[: len(lens)] = lens
        return ends[self.rows]

    def requests(self, requests: Requests) -> Requests:
        if self.groups is None:
            return requests
        groups, rows = self.groups, self.rows
        return dataclasses.replace(
            requests,
            prompts=select(requests.prompts, groups),
            noise_steps=requests.noise_steps[groups],
            begin_first=requests.begin_first[groups],
            **{n: getattr(requests, n)[rows] for n in ("held_lens", "done", "draft_lens")},
        )

    def draft_inputs(self, drafts: DraftInputs) -> DraftInputs:
        """drafts.previous: of all rows."""
        if self.groups is None:
            return drafts
        history = drafts.history
        if history is not None:
            tokens, lens = (x[self.groups] for x in (history.tokens, history.lens))
            history = DraftHistory(tokens, lens, history.ages)
        return dataclasses.replace(drafts, previous=self.take(drafts.previous), history=history)
