"""Shapes of a rollout's arrays, from which the shapes of its programs' inputs follow."""

import dataclasses
import functools
from typing import Any

from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.engine.all_rows import abstract_rows, abstract_running_batch
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.types import Drafts


@dataclasses.dataclass(frozen=True)
class RolloutShapes:
    """Shapes of a rollout of `num_rows` rows, of which `awaited` are not background rows."""

    spec: RolloutSpec
    weights: Params
    num_rows: int
    awaited: int
    drafts: Drafts | None  # None: nothing to verify
    draft_state: Any = None  # of the draft source

    @functools.cached_property
    def buckets(self) -> Buckets:
        return self.spec.buckets(self.awaited)

    @functools.cached_property
    def all_rows(self) -> Rows:
        return abstract_rows(self.spec, self.num_rows)

    def batch(self, size: int) -> tuple[KVCache, Rows]:
        """Return the cache and the rows of a batch of `size` slots."""
        return abstract_running_batch(self.spec, self.all_rows, size, self.buckets.cache_slots)
