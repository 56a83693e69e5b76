"""Rows of a rollout that are not running: queues of each shard of the batch, on the host."""

import collections
from collections.abc import Iterable

import numpy as np

from specrl_jax.rollout.engine.requests import Requests
from specrl_jax.sharding import shards

# Tokens that a row holds, and its index.
HeldRow = tuple[int, int]


class Queues:
    """Four kinds, each a list of the shards' queues.

    Fields:
      resumed, preempted: Rows that hold tokens.
      waiting: Groups that hold none.
      next_step: Groups that only use places that would be idle.
    """

    def __init__(self, requests: Requests):
        self._shard_rows, self.shards = requests.shard_rows, shards("batch")
        self.group_size = group = len(requests.done) // len(requests.noise_steps)
        held = requests.held_lens.reshape(-1, group).any(axis=1)
        # Drafts of like length are verified together: a pass is as wide as its longest.
        longest = requests.draft_lens.reshape(-1, group).max(axis=1)
        first = requests.begin_first
        late = np.zeros(len(held)) if first is None else ~first
        groups = np.flatnonzero(~held).tolist()
        groups.sort(key=lambda g: (late[g], -longest[g], g))
        trained = requests.trained(np.arange(len(requests.done)))
        waits = trained[::group]
        self.waiting = self._by_shard((g for g in groups if waits[g]), group)
        self.next_step = self._by_shard((g for g in groups if not waits[g]), group)
        resumed = np.flatnonzero(np.repeat(held, group) & ~requests.done & trained)
        self.resumed = self._held(resumed, requests.held_lens[resumed])
        self.preempted = self._held(resumed[:0], resumed[:0])

    def is_waiting(self) -> bool:
        """Whether train rows that are not done are not running."""
        return any(map(any, (self.resumed, self.waiting, self.preempted)))

    def waiting_rows(self) -> np.ndarray:
        """int [shards]: train rows that are not done and not running."""
        queues = zip(self.resumed, self.waiting, self.preempted)
        return np.array([len(r) + self.group_size * len(w) + len(p) for r, w, p in queues])

    def add_preempted(self, rows: np.ndarray, lens: np.ndarray) -> None:
        """Rows int [n] that hold `lens` tokens each."""
        for queue, own in zip(self.preempted, self._held(rows, lens)):
            queue += own

    def pop_groups(self, queues: list[collections.deque[int]], counts: np.ndarray) -> list:
        """The rows of the first `counts` [shards] groups of queues, by shard."""
        group = self.group_size
        chosen = [[x.popleft() for _ in range(n)] for x, n in zip(queues, counts.tolist())]
        return [[g * group + i for g in groups for i in range(group)] for groups in chosen]

    def places(self, rows: list[list[int]], size: int) -> np.ndarray:
        """int [size]: each shard's rows in its part of a bucket, and -1 after them."""
        index = np.full((self.shards, size // self.shards), -1)
        for part, own in zip(index, rows):
            part[: len(own)] = own
        return index.reshape(-1)

    def _by_shard(self, items: Iterable[int], rows: int = 1) -> list[collections.deque[int]]:
        """items: rows, or groups of `rows` rows, in order."""
        queues = [collections.deque() for _ in range(self.shards)]
        for item in items:
            queues[item * rows // self._shard_rows].append(item)
        return queues

    def _held(self, rows: np.ndarray, lens: np.ndarray) -> list[list[HeldRow]]:
        held = dict(zip(rows.tolist(), lens.tolist()))
        return [[(held[row], row) for row in queue] for queue in self._by_shard(held)]
