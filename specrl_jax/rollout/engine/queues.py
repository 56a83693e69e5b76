"""Rows of a rollout that are not running: queues of each shard of the batch, on the host."""

import collections
from collections.abc import Iterable

import numpy as np

from specrl_jax.rollout.engine.requests import Requests
from specrl_jax.sharding import shards

# Rows that begin together, whole groups or single rows; a queue for every shard.
ShardQueues = list[collections.deque[list[int]]]


class Queues:
    """Three kinds, each a list of the shards' queues.

    Fields:
      resumed: Rows that hold tokens, each by itself.
      waiting: Groups that hold none.
      next_step: Groups that only use places that would be idle.
    """

    def __init__(self, requests: Requests):
        self._shard_rows = requests.shard_rows
        self._shards = shards("batch")
        group = len(requests.done) // len(requests.noise_steps)
        held = requests.held_lens.reshape(-1, group).any(axis=1)
        # Drafts of like length are verified together: a pass is as wide as its longest.
        longest = requests.draft_lens.reshape(-1, group).max(axis=1)
        first = requests.begin_first
        late = np.zeros(len(held)) if first is None else ~first
        groups = np.flatnonzero(~held).tolist()
        groups.sort(key=lambda g: (late[g], -longest[g], g))
        trained = requests.trained(np.arange(len(requests.done)))
        waits = trained[::group]
        rows = np.arange(len(requests.done)).reshape(-1, group).tolist()
        self.waiting = self._by_shard(rows[g] for g in groups if waits[g])
        self.next_step = self._by_shard(rows[g] for g in groups if not waits[g])
        resumed = np.flatnonzero(np.repeat(held, group) & ~requests.done & trained)
        self.resumed = self._by_shard([row] for row in resumed.tolist())

    def is_waiting(self) -> bool:
        """Return whether train rows that are not done are not running."""
        return any(self.resumed) or any(self.waiting)

    def waiting_rows(self) -> np.ndarray:
        """int [shards]: train rows that are not done and not running."""
        pairs = zip(self.resumed, self.waiting)
        return np.array([sum(map(len, resumed + waiting)) for resumed, waiting in pairs])

    def pop(self, queues: ShardQueues, counts: np.ndarray, size: int) -> np.ndarray:
        """int [size]: the first `counts` [shards] rows of queues, each shard's in its part of a
        bucket, and -1 after them."""
        index = np.full((self._shards, size // self._shards), -1)
        for part, queue, count in zip(index, queues, counts.tolist()):
            begun = 0
            while begun < count:
                rows = queue.popleft()
                part[begun : begun + len(rows)] = rows
                begun += len(rows)
        return index.reshape(-1)

    def _by_shard(self, items: Iterable[list[int]]) -> ShardQueues:
        queues = [collections.deque() for _ in range(self._shards)]
        for rows in items:
            queues[rows[0] // self._shard_rows].append(rows)
        return queues
