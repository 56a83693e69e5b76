"""The buckets of program shapes: by hand, and properties over many sizes."""

import itertools

import jax
import pytest
import rollout_reference as ref

from specrl_jax.rollout.engine.buckets import Buckets


def test_worked_example():
    """That of the module's docstring."""
    buckets = Buckets(64, 8, 32, 4, 2, multiple=2, group_size=4, max_width=4)
    assert buckets.rows == (64, 32, 16, 8)
    assert buckets.admissions == (64, 32, 16, 8)
    assert buckets.responses == (16, 32)
    assert [buckets.slots(r) for r in buckets.responses] == [8 + 16, 8 + 32]
    assert buckets.verify == (32,)
    assert buckets.widths == (1, 2, 4)
    assert [buckets.rows_for(n) for n in (64, 33, 32, 9, 8, 1)] == [64, 64, 32, 16, 8, 8]
    assert [buckets.rows_below(n) for n in (64, 32, 16, 8)] == [32, 16, 8, 0]
    assert [buckets.response_for(n) for n in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_a_cache_holds_the_widest_step():
    buckets = Buckets(4, 8, 6, 1, 3, max_width=4)
    assert buckets.responses == (2, 3, 6)
    assert [buckets.slots(r) for r in buckets.responses] == [8 + 4, 8 + 4, 8 + 6]


def test_admissions_are_whole_groups_that_divide_over_the_mesh():
    # 40 rows, groups of 5, cut in 2: rows are even, admissions multiples of 10.
    buckets = Buckets(40, 8, 6, 4, 1, multiple=2, group_size=5)
    assert buckets.rows == (40, 20, 10, 6)
    assert buckets.admissions == (40, 20, 10)
    # A batch of one group: nothing smaller is admitted, but rows that are left are compacted.
    buckets = Buckets(4, 8, 6, 3, 1, group_size=4)
    assert buckets.rows == (4, 2, 1)
    assert buckets.admissions == (4,)


@pytest.mark.parametrize(
    ("waiting", "room", "admitted"),
    [
        (64, 64, 64),
        (64, 63, 32),  # as many as there is room
        (64, 8, 8),
        (64, 7, 0),  # no room for the smallest
        (20, 64, 32),  # as few as hold all that wait, padding beside them
        (20, 31, 16),
        (8, 64, 8),
        (1, 64, 8),
    ],
)
def test_how_many_begin_together(waiting, room, admitted):
    buckets = Buckets(64, 8, 32, 4, 2, multiple=2, group_size=4)
    assert buckets.admission(waiting, room) == admitted


def test_others_are_let_in_a_quarter_at_a_time():
    sizes = [Buckets(n, 6, 8, 5, 1, group_size=4).refill for n in (64, 32, 16, 8, 4)]
    assert sizes == [16, 8, 4, 4, 4]


@pytest.mark.parametrize(
    ("shape", "max_rows", "rows"),
    [((1, 1, 1), 0, 64), ((1, 1, 1), 80, 64), ((1, 1, 1), 11, 8), ((2, 2, 2), 47, 32)],
)
def test_at_most_max_rows_run_in_whole_groups_on_every_shard(make_mesh, shape, max_rows, rows):
    with jax.set_mesh(make_mesh(*shape)):
        assert ref.make_spec(group=4, max_rows=max_rows).buckets(64).rows[0] == rows


@pytest.mark.parametrize(
    ("slots", "verify_width", "widths"),
    [
        (256, 0, (64, 128, 192, 256)),
        (256, 128, (32, 64, 96, 128)),
        (128, 256, (32, 64, 96, 128)),  # no wider than a response
        (100, 0, (34, 67, 100)),
        (64, 0, (32, 64)),
        (63, 0, (63,)),
        (32, 10, (10,)),
        (1, 0, (1,)),
    ],
)
def test_widths_of_verification(slots, verify_width, widths):
    buckets = Buckets(8, 4, slots, 1, 1_width)
    assert buckets.verify == widths
    for longest in range(1, slots + 1):
        fits = [w for w in widths if w >= longest]
        assert buckets.verify_width_for(longest) == (fits[0] if fits else widths[-1])


@pytest.mark.parametrize(
    ("widest", "widths"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_widths_of_a_decode_step(widest, widths):
    buckets = Buckets(8, 4, 16, 1, 1, max_width=widest)
    assert buckets.widths == widths
    assert buckets.slots(16) == 4 + 16


SIZES = itertools.product((4, 12, 32, 64), (1, 5, 32), (1, 2, 4, 7), (1, 2, 3), (1, 2, 8), (1, 4))


def test_properties_over_many_sizes():
    for rows, slots, row_buckets, cache_lengths, multiple, group in SIZES:
        whole = multiple * group
        total = -(-rows // whole) * whole  # a batch divides over the mesh, in whole groups
        buckets = Buckets(total, 8, slots, row_buckets, cache_lengths, multiple, group)
        assert buckets.rows[0] == buckets.admissions[0] == total
        for sizes, granule in ((buckets.rows, multiple), (buckets.admissions, whole)):
            assert list(sizes) == sorted(set(sizes), reverse=True)
            assert len(sizes) <= row_buckets
            assert all(size % granule == 0 for size in sizes)
        for large, small in itertools.pairwise(buckets.rows):
            assert large / 2 <= small < large / 2 + multiple
        assert list(buckets.responses) == sorted(set(buckets.responses))
        assert len(buckets.responses) <= cache_lengths
        assert 1 <= buckets.responses[0] <= buckets.responses[-1] == slots
        assert all(b <= 2 * a for a, b in itertools.pairwise(buckets.responses))
        # A bucket holds what it is asked for, and no smaller one does.
        for active in range(1, total + 1):
            bucket = buckets.rows_for(active)
            assert bucket == min(r for r in buckets.rows if r >= active)
            assert buckets.rows_below(bucket) < active  # decoding pauses where the next one fits
        for length in range(1, slots + 1):
            bucket = buckets.response_for(length)
            assert bucket == min(r for r in buckets.responses if r >= length)
            assert buckets.slots(bucket) == 8 + bucket
