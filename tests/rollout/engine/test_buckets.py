"""The ladder of program shapes: by hand, and properties over many sizes."""

import itertools

import pytest

from specrl_jax.rollout.engine.buckets import Buckets

SIZES = list(
    itertools.product((4, 12, 32, 64), (1, 5, 32), (1, 2, 4, 7), (1, 2, 3), (1, 2, 8), (1, 4))
)


def build(rows, responses, row_buckets, windows, multiple, group):
    whole = multiple * group
    rows = -(-rows // whole) * whole  # a batch always divides over the mesh, in whole groups
    ladder = Buckets(rows, 8, responses, row_buckets, windows, multiple=multiple,
                          group_size=group)  # fmt: skip
    return rows, ladder


def test_worked_example():
    """That of the module's docstring."""
    ladder = Buckets(64, 8, 32, 4, 2, multiple=2, group_size=4, max_width=4)
    assert ladder.rows == (64, 32, 16, 8)
    assert ladder.admissions == (64, 32, 16, 8)
    assert ladder.responses == (16, 32)
    assert [ladder.slots(r) for r in ladder.responses] == [8 + 16, 8 + 32]
    assert ladder.verify == (32,)
    assert ladder.widths == (1, 2, 4)
    assert [ladder.rows_for(n) for n in (64, 33, 32, 9, 8, 1)] == [64, 64, 32, 16, 8, 8]
    assert [ladder.rows_below(n) for n in (64, 32, 16, 8)] == [32, 16, 8, 0]
    assert [ladder.response_for(n) for n in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_a_window_holds_the_widest_step():
    ladder = Buckets(4, 8, 6, 1, 3, max_width=4)
    assert ladder.responses == (2, 3, 6)
    assert [ladder.slots(r) for r in ladder.responses] == [8 + 4, 8 + 4, 8 + 6]


def test_admissions_are_whole_groups_that_divide_over_the_mesh():
    # 40 rows, groups of 5, cut in 2: rows are even, admissions multiples of 10.
    ladder = Buckets(40, 8, 6, 4, 1, multiple=2, group_size=5)
    assert ladder.rows == (40, 20, 10, 6)
    assert ladder.admissions == (40, 20, 10)
    # A batch of one group: nothing smaller is admitted, but rows that are left are gathered.
    ladder = Buckets(4, 8, 6, 3, 1, group_size=4)
    assert ladder.rows == (4, 2, 1)
    assert ladder.admissions == (4,)


@pytest.mark.parametrize(
    ("waiting", "room", "admitted"),
    [
        (64, 64, 64),
        (64, 63, 32),  # as many as there is room
        (64, 8, 8),
        (64, 7, 0),  # no room for the smallest
        (20, 64, 32),  # as few as hold all that wait, fillers beside them
        (20, 31, 16),
        (8, 64, 8),
        (1, 64, 8),
    ],
)
def test_how_many_begin_together(waiting, room, admitted):
    ladder = Buckets(64, 8, 32, 4, 2, multiple=2, group_size=4)
    assert ladder.admission(waiting, room) == admitted


@pytest.mark.parametrize(
    ("slots", "chunk", "widths"),
    [
        (256, 0, (64, 128, 192, 256)),
        (256, 128, (32, 64, 96, 128)),
        (128, 256, (32, 64, 96, 128)),  # a chunk is no wider than a response
        (100, 0, (34, 67, 100)),
        (64, 0, (32, 64)),
        (63, 0, (63,)),
        (32, 10, (10,)),
        (1, 0, (1,)),
    ],
)
def test_widths_of_verification(slots, chunk, widths):
    ladder = Buckets(8, 4, slots, 1, 1, verify_width=chunk)
    assert ladder.verify == widths
    for longest in range(1, slots + 1):
        fits = [w for w in widths if w >= longest]
        assert ladder.verify_width_for(longest) == (fits[0] if fits else widths[-1])


@pytest.mark.parametrize(
    ("widest", "widths"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (4, (1, 2, 4)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))],
)
def test_widths_of_a_decode_step(widest, widths):
    ladder = Buckets(8, 4, 16, 1, 1, max_width=widest)
    assert ladder.widths == widths
    assert ladder.slots(16) == 4 + 16


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_rows_divide_over_the_mesh_and_halve(multiple):
    for rows, responses, row_buckets, windows, cut, group in SIZES:
        if cut != multiple:
            continue
        total, ladder = build(rows, responses, row_buckets, windows, multiple, group)
        assert ladder.rows[0] == ladder.admissions[0] == total
        for sizes in (ladder.rows, ladder.admissions):
            assert list(sizes) == sorted(set(sizes), reverse=True)
            assert len(sizes) <= row_buckets
        assert all(r % multiple == 0 for r in ladder.rows)
        assert all(r % (multiple * group) == 0 for r in ladder.admissions)
        for large, small in itertools.pairwise(ladder.rows):
            assert large / 2 <= small < large / 2 + multiple


def test_the_last_window_holds_the_longest_response():
    for size in SIZES:
        responses, windows = size[1], size[3]
        _, ladder = build(*size)
        assert ladder.responses[-1] == responses
        assert list(ladder.responses) == sorted(set(ladder.responses))
        assert ladder.responses[0] >= 1
        assert len(ladder.responses) <= windows
        assert all(b <= 2 * a for a, b in itertools.pairwise(ladder.responses))


def test_a_rung_holds_what_it_is_asked_for_and_no_smaller_one_does():
    for size in SIZES:
        total, ladder = build(*size)
        for active in range(1, total + 1):
            rung = ladder.rows_for(active)
            below = ladder.rows_below(rung)
            assert below < active <= rung  # decoding in a rung stops only where the next one fits
            assert rung in ladder.rows
            assert below == 0 or below in ladder.rows
        for length in range(1, size[1] + 1):
            rung = ladder.response_for(length)
            assert rung >= length
            assert not [r for r in ladder.responses if length <= r < rung]
            assert ladder.slots(rung) == 8 + rung
