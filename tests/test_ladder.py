"""The ladder of program shapes: its worked example, and properties over many sizes."""

import itertools

import pytest

from specrl_jax.rollout.ladder import Ladder

SIZES = list(itertools.product((1, 3, 8, 20, 64), (1, 5, 32), (1, 2, 4, 7), (1, 2, 3), (1, 2, 8)))


def build(rows, responses, row_rungs, windows, multiple):
    rows = -(-rows // multiple) * multiple  # a batch always divides over the mesh
    return rows, Ladder.build(rows, 8, responses, row_rungs, windows, multiple)


def test_worked_example():
    ladder = Ladder.build(64, 8, 32, row_rungs=4, windows=2, multiple=2)
    assert ladder.rows == (64, 32, 16, 8)
    assert ladder.responses == (16, 32)
    assert [ladder.window(r) for r in ladder.responses] == [24, 40]
    assert [ladder.rows_for(n) for n in (64, 33, 32, 9, 8, 1)] == [64, 64, 32, 16, 8, 8]
    assert [ladder.rows_below(n) for n in (64, 32, 16, 8)] == [32, 16, 8, 0]
    assert [ladder.response_for(n) for n in (1, 16, 17, 32)] == [16, 16, 32, 32]


@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_rows_divide_over_the_mesh_and_halve(multiple):
    for rows, responses, row_rungs, windows, cut in SIZES:
        if cut != multiple:
            continue
        total, ladder = build(rows, responses, row_rungs, windows, multiple)
        assert ladder.rows[0] == total
        assert list(ladder.rows) == sorted(set(ladder.rows), reverse=True)
        assert all(r % multiple == 0 for r in ladder.rows)
        assert len(ladder.rows) <= row_rungs
        for large, small in itertools.pairwise(ladder.rows):
            assert large / 2 <= small < large / 2 + multiple


def test_the_last_window_holds_the_longest_response():
    for rows, responses, row_rungs, windows, multiple in SIZES:
        _, ladder = build(rows, responses, row_rungs, windows, multiple)
        assert ladder.responses[-1] == responses
        assert list(ladder.responses) == sorted(set(ladder.responses))
        assert ladder.responses[0] >= 1
        assert len(ladder.responses) <= windows
        assert all(b <= 2 * a for a, b in itertools.pairwise(ladder.responses))


def test_a_rung_holds_what_it_is_asked_for_and_no_smaller_one_does():
    for rows, responses, row_rungs, windows, multiple in SIZES:
        total, ladder = build(rows, responses, row_rungs, windows, multiple)
        for active in range(1, total + 1):
            rung = ladder.rows_for(active)
            below = ladder.rows_below(rung)
            assert below < active <= rung  # decoding in a rung stops only where the next one fits
            assert rung in ladder.rows
            assert below == 0 or below in ladder.rows
        for length in range(1, responses + 1):
            rung = ladder.response_for(length)
            assert rung >= length
            assert not [r for r in ladder.responses if length <= r < rung]
            assert ladder.window(rung) == 8 + rung
