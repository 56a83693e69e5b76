"""What may run at once: rows and bytes, by hand. That rollouts keep to it: test_scheduler.py."""

import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import cache_bytes
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.kv_budget import KVBudget

SLOT = cache_bytes(ref.ONE_LAYER, 1, 1)
# Rows 16, 8, 4; prompts of 6 slots and caches for 4 and 8 tokens: 10 and 14 slots.
BUCKETS = Buckets(16, 6, 8, 3, 2, group_size=4)


def budget(rows=0, cache_bytes=0.0) -> KVBudget:
    return KVBudget(ref.ONE_LAYER, BUCKETS, rows, cache_bytes)


def moved(rows, slots) -> float:
    """Bytes of that many rows while they are moved."""
    return 2.5 * rows * slots * SLOT


@pytest.mark.parametrize(
    ("bounds", "short", "long"),
    [
        (budget(), 16, 16),
        (budget(rows=9), 8, 8),
        (budget(cache_bytes=moved(16, 10)), 16, 8),  # 11 rows in the long cache
        (budget(cache_bytes=moved(16, 10) - 1), 8, 8),
        (budget(rows=5, cache_bytes=moved(16, 10)), 4, 4),
    ],
)
def test_capacity_is_the_largest_bucket_within_both_bounds(bounds, short, long):
    assert (bounds.capacity(4), bounds.capacity(8)) == (short, long)


def test_others_are_let_in_a_quarter_at_a_time():
    assert [budget().refill(n) for n in (16, 8, 4)] == [4, 4, 4]
    tall = KVBudget(ref.ONE_LAYER, Buckets(64, 6, 8, 5, 1, group_size=4))
    assert [tall.refill(n) for n in (64, 32, 16)] == [16, 8, 4]


def test_batches_are_held_together_or_not():
    bounds = budget(cache_bytes=24 * SLOT)
    assert bounds.bytes((1, 14), (1, 10)) == 24 * SLOT
    assert bounds.holds((1, 14), (1, 10))
    assert not bounds.holds((1, 14), (1, 11))
    assert budget().holds((10**9, 10**9))


def test_a_pass_may_have_half_as_many_slots_again():
    bounds = budget(cache_bytes=1.0)
    assert bounds.verifies(21, 14)
    assert not bounds.verifies(22, 14)
    assert budget().verifies(22, 14)


def test_a_bound_below_the_fewest_rows_is_one_line():
    budget(cache_bytes=moved(4, 14)).check()
    budget().check()
    with pytest.raises(
        ValueError,
        match=r"^rollout.max_cache_gib must be 0 or >= .* for 4 rows of 14 slots .* got .*; raise",
    ):
        budget(cache_bytes=moved(4, 14) - 1).check()
