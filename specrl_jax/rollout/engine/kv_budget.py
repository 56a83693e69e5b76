"""What may be in flight at once: rows, and the bytes of their KV caches also while they are moved.

Where rows join others there are for a moment a rung, those that join, and the rung of both: with C
rows in the last, C + C / 2 + C or C / 2 + C + C at most. Rows that verify drafts may take half as
many slots again, before any others are there: 1.5 C + C. So C rows need 2.5 times their caches.
"""

import dataclasses
import math

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import cache_bytes
from specrl_jax.rollout.engine.buckets import Buckets

_MOVED = 2.5  # bytes while rows are moved, over those of their caches
_VERIFIED = 1.5  # slots of a window in which drafts are verified, over those that rows then share


@dataclasses.dataclass(frozen=True)
class KVBudget:
    """rows: in flight at once, 0 for all. cache_bytes: of KV caches over all devices, 0 for any.

    A rung is given by (rows, slots).
    """

    model: ModelConfig
    ladder: Buckets
    rows: int = 0
    cache_bytes: float = 0.0

    def check(self) -> None:
        """Raise ValueError in one line where not even the fewest rows would fit."""
        ladder, least = self.ladder, self.ladder.admissions[-1]
        slots = ladder.slots(ladder.responses[-1])
        if self.cache_bytes and self._rows_within(slots) < least:
            needed = _MOVED * self.bytes((least, slots)) / 2**30
            raise ValueError(
                f"rollout.max_cache_gib must be 0 or >= {needed:.3g}, for {least} rows of {slots} "
                f"slots while they are moved, got {self.cache_bytes / 2**30:.3g}; "
                "raise it, or rollout.row_buckets for fewer rows"
            )

    def bytes(self, *rungs: tuple[int, int]) -> int:
        """Of the caches of these rungs, over all devices."""
        return sum(cache_bytes(self.model, *rung) for rung in rungs)

    def holds(self, *rungs: tuple[int, int]) -> bool:
        """Whether there is room for all of these rungs at once."""
        return not self.cache_bytes or self.bytes(*rungs) <= self.cache_bytes

    def capacity(self, response: int) -> int:
        """Rows that may be in flight at the window of so many response tokens."""
        most = self.ladder.rows[0]
        if self.rows:
            most = min(most, self.rows)
        if self.cache_bytes:
            most = min(most, self._rows_within(self.ladder.slots(response)))
        least = self.ladder.admissions[-1]  # fewer could never begin
        return max([n for n in self.ladder.rows if least <= n <= most], default=least)

    def refill(self, capacity: int) -> int:
        """Rows that must be free before others are let in: a quarter, so that moves are few."""
        fits = [n for n in self.ladder.admissions if n <= max(capacity // 4, 1)]
        return max(fits, default=self.ladder.admissions[-1])

    def verifies(self, needed: int, shared: int) -> bool:
        """Whether drafts may be verified in `needed` slots by rows that then share `shared`."""
        return not self.cache_bytes or needed <= shared * _VERIFIED

    def _rows_within(self, slots: int) -> int:
        return math.floor(self.cache_bytes / _MOVED / self.bytes((1, slots)))
