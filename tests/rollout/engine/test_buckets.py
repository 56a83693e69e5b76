"""The buckets of program shapes: by hand, and properties over many sizes."""

import itertools

import pytest

from specrl_jax.rollout.engine.buckets import Buckets

SIZES = list(
    itertools.product((4, 12, 32, 64), (1, 5, 32), (1, 2, 4, 7), (1, 2, 3), (1, 2, 8), (1, 4))
)


def build(rows, responses, row_buckets, cache_lengths, multiple, group):
    granule = multiple * group
    rows = -(-rows // granule) * granule  # a batch always divides over the mesh, in whole groups
    buckets = Buckets(rows, 8, responses, row_buckets, cache_lengths, multiple=multiple,
                          group_size=group)  # fmt: skip
    return rows, buckets


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
    buckets = Buckets(8, 4, slots, 1, 1, verify_width=verify_width)
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


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_rows_divide_over_the_mesh_and_halve(multiple):
    for rows, responses, row_buckets, cache_lengths, cut, group in SIZES:
        if cut != multiple:
            continue
        total, buckets = build(rows, responses, row_buckets, cache_lengths, multiple, group)
        assert buckets.rows[0] == buckets.admissions[0] == total
        for sizes in (buckets.rows, buckets.admissions):
            assert list(sizes) == sorted(set(sizes), reverse=True)
            assert len(sizes) <= row_buckets
        assert all(r % multiple == 0 for r in buckets.rows)
        assert all(r % (multiple * group) == 0 for r in buckets.admissions)
        for large, small in itertools.pairwise(buckets.rows):
            assert large / 2 <= small < large / 2 + multiple


def test_the_longest_cache_holds_the_longest_response():
    for size in SIZES:
        responses, cache_lengths = size[1], size[3]
        _, buckets = build(*size)
        assert buckets.responses[-1] == responses
        assert list(buckets.responses) == sorted(set(buckets.responses))
        assert buckets.responses[0] >= 1
        assert len(buckets.responses) <= cache_lengths
        assert all(b <= 2 * a for a, b in itertools.pairwise(buckets.responses))


def test_a_bucket_holds_what_it_is_asked_for_and_no_smaller_one_does():
    for size in SIZES:
        total, buckets = build(*size)
        for active in range(1, total + 1):
            bucket = buckets.rows_for(active)
            below = buckets.rows_below(bucket)
            assert below < active <= bucket  # decoding pauses where the next one fits
            assert bucket in buckets.rows
            assert below == 0 or below in buckets.rows
        for length in range(1, size[1] + 1):
            bucket = buckets.response_for(length)
            assert bucket >= length
            assert not [r for r in buckets.responses if length <= r < bucket]
            assert buckets.slots(bucket) == 8 + bucket
