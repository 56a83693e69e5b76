"""The table of step costs: interpolated by hand, measured once, kept on disk."""

import itertools
import json
import math
import threading

import numpy as np
import pytest

from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts, load_or_measure, measure

# The table ------------------------------------------------------------------------------------


def test_interpolation_by_hand():
    table = StepCosts(
        {
            Point(16, 100, 1, False): 10.0,
            Point(16, 200, 1, False): 14.0,
            Point(64, 100, 1, False): 30.0,
            Point(64, 200, 1, False): 34.0,
            Point(16, 100, 9, False): 18.0,
            Point(16, 200, 9, False): 30.0,
            Point(64, 100, 9, False): 70.0,
            Point(64, 200, 9, False): 90.0,
        }
    )
    assert table.seconds(64, 200, 9, False) == 90.0
    assert table.seconds(16, 125, 1, False) == 11.0  # a quarter of the way in slots
    assert table.seconds(16, 100, 3, False) == 12.0  # in widths
    assert table.seconds(28, 100, 1, False) == 15.0  # in rows
    # Slots first: 16 rows 12 and 24, 64 rows 32 and 80; then widths: 18 and 56; then rows: 37.
    assert table.seconds(40, 150, 5, False) == 37.0
    assert table.seconds(16, 300, 1, False) == 18.0  # on along the last line
    assert table.seconds(16, 50, 1, False) == 8.0
    # The last line would fall below 0, but not below what is proportional.
    steep = StepCosts({Point(8, 100, 1, False): 1.0, Point(16, 100, 1, False): 4.0})
    assert steep.seconds(4, 100, 1, False) == 0.5
    assert steep.seconds(32, 100, 1, False) == 10.0


def test_a_table_is_exact_where_measured_even_where_costs_fall():
    measured = {Point(8, 64, w, True): c for w, c in {2: 3.0, 4: 5.0, 8: 4.0}.items()}
    table = StepCosts(measured)
    assert {p: table.seconds(*p) for p in measured} == measured
    assert table.seconds(8, 64, 6, True) == 4.5
    assert table.seconds(8, 64, 16, True) == 4.0  # beyond the last it never falls
    assert table.seconds(8, 64, 1, True) == 2.0
    falling = StepCosts({Point(8, 64, 1, False): 3.0, Point(16, 64, 1, False): 2.0})
    assert falling.seconds(4, 64, 1, False) == 3.0
    assert falling.seconds(32, 64, 1, False) == 2.0


def test_where_costs_rise_along_a_grid_so_do_the_lines():
    rng = np.random.default_rng(0)
    axes = [(4, 12, 60), (40, 64, 128), (1, 2, 8, 16)]
    for _ in range(20):
        grid = rng.exponential(size=[len(a) for a in axes])
        for axis in range(3):
            grid = grid.cumsum(axis)
        points = itertools.product(*axes)
        table = StepCosts({Point(*p, False): c for p, c in zip(points, grid.ravel())})
        low, high = table.seconds(4, 40, 1, False), table.seconds(60, 128, 16, False)
        for _ in range(50):
            point = [int(rng.integers(a[0], a[-1] + 1)) for a in axes]
            seconds = table.seconds(*point, False)
            assert low <= seconds <= high
            for axis in range(3):
                more = [*point]
                more[axis] = int(rng.integers(point[axis], axes[axis][-1] + 1))
                assert table.seconds(*more, False) >= seconds - 1e-12
                # Out of the grid along one axis, at measured places of the others.
                at = [int(rng.choice(a)) for a in axes]
                line = []
                for x in (1, axes[axis][0], axes[axis][-1], 1_000, 5_000):
                    at[axis] = x
                    line.append(table.seconds(*at, False))
                assert line == sorted(line)


def test_costs_are_positive_wherever_asked():
    rng = np.random.default_rng(1)
    for _ in range(200):
        points = {
            Point(*(int(n) for n in rng.integers(1, 200, 3)), bool(rng.integers(2)))
            for _ in range(rng.integers(1, 9))
        }
        table = StepCosts({p: float(rng.exponential()) + 1e-9 for p in points})
        for _ in range(20):
            point = [int(n) for n in rng.integers(1, 1_000, 3)]
            assert table.seconds(*point, bool(rng.integers(2))) > 0


def test_what_few_measurements_tell():
    one = StepCosts({Point(8, 64, 4, True): 3.0})
    assert one.seconds(99, 9, 1, False) == 3.0
    # Matching was measured at one width: the plain width 1 gives it a line. A kind with two widths
    # keeps to itself.
    two = {Point(8, 64, 1, False): 2.0, Point(8, 64, 5, True): 6.0}
    assert StepCosts(two).seconds(8, 64, 3, True) == 4.0
    assert StepCosts(two).seconds(8, 64, 5, False) == 6.0
    three = StepCosts(two | {Point(8, 64, 3, False): 2.5})
    assert three.seconds(8, 64, 5, False) == 3.0
    # 8 rows were only measured at width 1 and say nothing of width 5.
    rows = StepCosts({Point(4, 64, 1, False): 1.0} | {Point(8, *p[1:]): c for p, c in two.items()})
    assert rows.seconds(4, 64, 5, True) == 6.0
    assert rows.seconds(6, 64, 1, False) == 1.5


def test_rows_that_were_not_measured_at_wide_passes_leave_them_to_those_that_were():
    """As engines measure: verification (width 64) only at the fewest and the most rows."""
    steps = {Point(r, 99, w, w > 1): r * (w + 9.0) for r in (8, 16, 32) for w in (1, 2, 4)}
    passes = {Point(r, 70, 64, False): r * 30.0 for r in (8, 32)}
    table = StepCosts(steps | passes)
    assert table.seconds(16, 70, 64, False) == 16 * 30.0  # its own line through 2 and 4: 16 · 73
    assert table.seconds(16, 70, 1, False) == 16 * 10.0
    assert table.seconds(16, 70, 22, False) == pytest.approx(16 * (10 + 20 / 3))  # a third of it
    assert table.seconds(16, 70, 3, True) == 16 * 12.0
    # At one number of rows alone it would say nothing of others: their own lines do.
    del steps[8, 99, 1, False], passes[8, 70, 64, False]
    assert StepCosts(steps | passes).seconds(16, 70, 64, False) == 16 * 73.0


def test_a_table_survives_json():
    rng = np.random.default_rng(2)
    table = StepCosts({Point(8, s, 1, s % 2 > 0): rng.exponential() for s in range(1, 99)})
    again = StepCosts.from_json(json.loads(json.dumps(table.to_json())))
    assert again.to_json() == table.to_json()
    for slots in range(1, 150):
        for matching in (False, True):
            assert again.seconds(8, slots, 4, matching) == table.seconds(8, slots, 4, matching)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_table_takes_no_odd_seconds(value):
    with pytest.raises(ValueError, match="must be > 0"):
        StepCosts({Point(8, 64, 1, False): value})


def test_a_table_takes_no_odd_sizes():
    with pytest.raises(ValueError, match="must be > 0"):
        StepCosts({Point(0, 64, 1, False): 1.0})
    with pytest.raises(ValueError, match="at least one"):
        StepCosts({})


# Measuring ------------------------------------------------------------------------------------

POINTS = [Point(8, 64, w, w > 1) for w in (4, 1)] + [Point(4, 64, 1, False)]


class Clock:
    """Steps that cost rows x width, the first call of each ten times that, and then some noise."""

    def __init__(self):
        self.calls = []

    def __call__(self, rows, slots, width, matching):
        point = Point(rows, slots, width, matching)
        self.calls.append(point)
        noise = (10.0, 3.0, 0.0, 0.0, -0.5, 0.2)[self.calls.count(point) - 1]
        return [(1, rows * width * (1 + noise))]


def test_measure_goes_round_and_takes_lower_quartiles():
    clock = Clock()
    table = measure(POINTS, clock, repeats=(5, 5))
    assert clock.calls == sorted(POINTS) * 6
    assert {p: table.seconds(*p) for p in POINTS} == {p: p.rows * p.width for p in POINTS}
    # The first round does not count, whatever it says.
    assert measure(POINTS, Clock(), repeats=(1, 1)).seconds(8, 64, 1, False) == 8 * 4.0
    rising = itertools.count(1)
    found = measure(POINTS[:1], lambda *p: [(1, float(next(rising)))])
    assert found.seconds(*POINTS[0]) == 2.5  # of 2, 3, 4


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 15), (0.9, 9), (4.0, 3)])
def test_cheap_programs_are_measured_more_often(seconds, rounds):
    """Until 8 seconds are spent, but 3 to 15 times beside the round that compiles."""
    calls = []
    measure(POINTS[:1], lambda *p: calls.append(p) or [(1, seconds)])
    assert len(calls) == 1 + rounds


def test_a_step_is_what_the_longer_call_takes_more():
    """Quartiles of the calls, 9.5 and 75 s for 1 and 9 steps, not of their differences."""
    rounds = iter([(0, 0), (10, 90), (50, 91), (9, 60)])
    found = measure(POINTS[:1], lambda *p: list(zip((1, 9), next(rounds))))
    assert found.seconds(*POINTS[0]) == (75 - 9.5) / 8
    rounds = iter([(0, 0), (10, 4.5), (10, 4.5), (10, 4.5)])
    found = measure(POINTS[:1], lambda *p: list(zip((1, 9), next(rounds))))
    assert found.seconds(*POINTS[0]) == 0.5


KEY = {"device": "cpu", "model": {"layers": 2}, "ladder": (8, 4)}


def cached(directory, key=KEY, points=POINTS):
    """The table, and how often a step was timed for it."""
    clock = Clock()
    return load_or_measure(directory, key, points, clock), len(clock.calls)


def test_a_table_is_measured_once(tmp_path, caplog):
    table, calls = cached(tmp_path / "costs")
    assert calls == 4 * len(POINTS)
    again, calls = cached(tmp_path / "costs", points=[*reversed(POINTS), POINTS[0]])
    assert calls == 0
    assert again.to_json() == table.to_json()
    same = {"ladder": [8, 4], "model": {"layers": 2}, "device": "cpu"}
    assert cached(tmp_path / "costs", same)[1] == 0
    assert [p.suffix for p in (tmp_path / "costs").iterdir()] == [".json"]
    assert not caplog.records


def test_another_key_or_other_points_are_measured_anew(tmp_path):
    cached(tmp_path)
    assert cached(tmp_path, {**KEY, "device": "gpu"})[1] > 0
    assert cached(tmp_path, points=POINTS[:2])[1] > 0
    assert len(list(tmp_path.iterdir())) == 3
    assert cached(tmp_path)[1] == 0  # the first one is still there


def test_a_key_that_json_does_not_know_is_refused(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        cached(tmp_path, {"model": object()})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "\x00\xff",
        lambda text: text.replace('"cpu"', '"gpu"'),  # another key under this name
        lambda text: text.replace("32.0", "-32.0"),
        lambda text: text.replace("32.0", "NaN"),
        lambda text: text.replace("32.0", "null"),
        lambda text: json.dumps({**json.loads(text), "seconds": [[8, 64, 4, True, 1.0]]}),
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path, caplog, damage):
    table, _ = cached(tmp_path)
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    path.write_text(damage(text))
    assert path.read_text() != text
    again, calls = cached(tmp_path)
    assert calls == 4 * len(POINTS)
    assert again.to_json() == table.to_json()
    assert "measuring again" in caplog.text
    assert path.read_text() == text  # and mended


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    table, calls = cached(tmp_path / "file" / "costs")
    assert calls == 4 * len(POINTS)
    assert table.seconds(8, 64, 1, False) == 8.0
    assert "cannot keep step costs" in caplog.text


def test_a_file_appears_whole_or_not_at_all(tmp_path, caplog, monkeypatch):
    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.replace", fail)  # the very last thing
    assert cached(tmp_path)[0].seconds(8, 64, 1, False) == 8.0
    assert not list(tmp_path.glob("*.json"))
    assert "no space left" in caplog.text
    monkeypatch.undo()
    assert cached(tmp_path)[1] > 0
    assert cached(tmp_path)[1] == 0


def test_writers_at_the_same_time_do_no_harm(tmp_path, caplog):
    start, tables = threading.Barrier(8), []

    def work():
        start.wait()
        tables.extend(cached(tmp_path)[0].to_json() for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tables) == 160
    assert all(t == tables[0] for t in tables)
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]
    assert not caplog.records  # nobody read half a file
