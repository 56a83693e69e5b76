"""What may be in flight: rows and bytes, by hand. That rollouts stay within: test_engine.py."""

import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import cache_bytes
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.kv_budget import KVBudget

SLOT = cache_bytes(ref.ONE_LAYER, 1, 1)
# Rows 16, 8, 4; prompts of 6 slots and windows of 4 and 8 tokens: 10 and 14 slots.
LADDER = Buckets(16, 6, 8, 3, 2, group_size=4)


def room(rows=0, cache_bytes=0.0) -> KVBudget:
    return KVBudget(ref.ONE_LAYER, LADDER, rows, cache_bytes)


def moved(rows, slots) -> float:
    """Bytes of that many rows while they are moved."""
    return 2.5 * rows * slots * SLOT


@pytest.mark.parametrize(
    ("bounds", "shallow", "deep"),
    [
        (room(), 16, 16),
        (room(rows=9), 8, 8),
        (room(cache_bytes=moved(16, 10)), 16, 8),  # 11 rows at the deep window
        (room(cache_bytes=moved(16, 10) - 1), 8, 8),
        (room(rows=5, cache_bytes=moved(16, 10)), 4, 4),
    ],
)
def test_capacity_is_the_largest_rung_within_both_bounds(bounds, shallow, deep):
    assert (bounds.capacity(4), bounds.capacity(8)) == (shallow, deep)


def test_others_are_let_in_a_quarter_at_a_time():
    assert [room().refill(n) for n in (16, 8, 4)] == [4, 4, 4]
    tall = KVBudget(ref.ONE_LAYER, Buckets(64, 6, 8, 5, 1, group_size=4))
    assert [tall.refill(n) for n in (64, 32, 16)] == [16, 8, 4]


def test_rungs_are_held_together_or_not():
    bounds = room(cache_bytes=24 * SLOT)
    assert bounds.bytes((1, 14), (1, 10)) == 24 * SLOT
    assert bounds.holds((1, 14), (1, 10))
    assert not bounds.holds((1, 14), (1, 11))
    assert room().holds((10**9, 10**9))


def test_a_pass_may_have_half_as_many_slots_again():
    bounds = room(cache_bytes=1.0)
    assert bounds.verifies(21, 14)
    assert not bounds.verifies(22, 14)
    assert room().verifies(22, 14)


def test_a_bound_below_the_fewest_rows_is_one_line():
    room(cache_bytes=moved(4, 14)).check()
    room().check()
    with pytest.raises(
        ValueError,
        match=r"^rollout.max_cache_gib must be 0 or >= .* for 4 rows of 14 slots .* got .*; raise",
    ):
        room(cache_bytes=moved(4, 14) - 1).check()
