"""What may be running at once: rows, and the bytes of their KV caches, also while they are moved.

Where rows are inserted there are for a moment the running batch, the rows that begin, and the batch
of both: with C rows in the last, C + C / 2 + C or C / 2 + C + C at most. Rows that verify drafts
may take half as many slots again, before any others are running: 1.5 C + C. So C rows need 2.5
times their caches.
"""

import dataclasses
import math

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import cache_bytes
from specrl_jax.rollout.engine.buckets import Buckets

_MOVED = 2.5  # bytes while rows are moved, over those of their caches
_VERIFIED = 1.5  # slots in which drafts are verified, over those that rows then share


@dataclasses.dataclass(frozen=True)
class KVBudget:
    """Bounds of rows and bytes. The shape of a batch is (rows, slots)."""

    model: ModelConfig
    buckets: Buckets
    rows: int = 0  # running at once, 0: all
    cache_bytes: float = 0.0  # of the KV caches over all devices, 0: any

    def check(self) -> None:
        """Raise ValueError in one line where not even the fewest rows would fit."""
        least, slots = self.buckets.admissions[-1], self.buckets.slots(self.buckets.responses[-1])
        if self.cache_bytes and self._rows_within(slots) < least:
            needed = _MOVED * self.bytes((least, slots)) / 2**30
            raise ValueError(
                f"rollout.max_cache_gib must be 0 or >= {needed:.3g}, for {least} rows of {slots} "
                f"slots while they are moved, got {self.cache_bytes / 2**30:.3g}; "
                "raise it, or rollout.row_buckets for fewer rows"
            )

    def bytes(self, *shapes: tuple[int, int]) -> int:
        """Of the caches of these batches, over all devices."""
        return sum(cache_bytes(self.model, *shape) for shape in shapes)

    def holds(self, *shapes: tuple[int, int]) -> bool:
        """Whether there is room for all of these batches at once."""
        return not self.cache_bytes or self.bytes(*shapes) <= self.cache_bytes

    def capacity(self, response: int) -> int:
        """Rows that may run with a cache for `response` tokens."""
        most = self.buckets.rows[0]
        if self.rows:
            most = min(most, self.rows)
        if self.cache_bytes:
            most = min(most, self._rows_within(self.buckets.slots(response)))
        least = self.buckets.admissions[-1]  # fewer could never begin
        return max([n for n in self.buckets.rows if least <= n <= most], default=least)

    def refill(self, capacity: int) -> int:
        """Rows that must be free before others begin: a quarter, so that moves are few."""
        fits = [n for n in self.buckets.admissions if n <= max(capacity // 4, 1)]
        return max(fits, default=self.buckets.admissions[-1])

    def verifies(self, needed: int, shared: int) -> bool:
        """Whether drafts may be verified in `needed` slots by rows that then share `shared`."""
        return not self.cache_bytes or needed <= shared * _VERIFIED

    def _rows_within(self, slots: int) -> int:
        return math.floor(self.cache_bytes / _MOVED / self.bytes((1, slots)))
