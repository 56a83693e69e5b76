"""The cost model: against hand-computed choices, brute force, and simulated rollouts."""

import itertools
import json
import math
import subprocess
import sys
import threading

import numpy as np
import pytest

from specrl_jax.rollout import cost
from specrl_jax.rollout.cost import (
    Acceptance,
    CostModel,
    CostTable,
    Pass,
    Point,
    Visit,
    load_or_measure,
    measure,
)

# Relative cost of a width-W step: two cores (27M parameters, 8 rows), and a device bound by memory.
CPU = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.3, 16: 3.6, 32: 6.5, 64: 12.9, 128: 23.7}
MEMORY_BOUND = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 1.2, 32: 1.5}
ROWS, SLOTS = (1, 16, 64, 128), (64, 128)


def make_table(relative=CPU):
    """A grid; plain steps of every width (verification), matching ones of the widths above 1."""
    return CostTable(
        {
            Point(rows, slots, width, matching): 1e-3 * (2 + 0.3 * rows) * (1 + slots / 200) * c
            for rows, slots, (width, c) in itertools.product(ROWS, SLOTS, relative.items())
            for matching in ((False, True) if width > 1 else (False,))
        }
    )


def make_acceptance(survival, row_steps=1e12):
    """So much evidence that the prior does not count: s_k = survival[k - 1]."""
    shares = [1.0, *survival]
    return Acceptance(
        offered=[row_steps] * len(survival),
        at_risk=[row_steps * s for s in shares[:-1]],
        accepted=[row_steps * s for s in shares[1:]],
    )


# The table ------------------------------------------------------------------------------------


def test_interpolation_by_hand():
    table = CostTable(
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
    steep = CostTable({Point(8, 100, 1, False): 1.0, Point(16, 100, 1, False): 4.0})
    assert steep.seconds(4, 100, 1, False) == 0.5
    assert steep.seconds(32, 100, 1, False) == 10.0


def test_a_table_is_exact_where_measured_even_where_costs_fall():
    measured = {Point(8, 64, w, True): c for w, c in {2: 3.0, 4: 5.0, 8: 4.0}.items()}
    table = CostTable(measured)
    assert {p: table.seconds(*p) for p in measured} == measured
    assert table.seconds(8, 64, 6, True) == 4.5
    assert table.seconds(8, 64, 16, True) == 4.0  # beyond the last it never falls
    assert table.seconds(8, 64, 1, True) == 2.0
    falling = CostTable({Point(8, 64, 1, False): 3.0, Point(16, 64, 1, False): 2.0})
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
        table = CostTable({Point(*p, False): c for p, c in zip(points, grid.ravel())})
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
        table = CostTable({p: float(rng.exponential()) + 1e-9 for p in points})
        for _ in range(20):
            point = [int(n) for n in rng.integers(1, 1_000, 3)]
            assert table.seconds(*point, bool(rng.integers(2))) > 0


def test_what_few_measurements_tell():
    one = CostTable({Point(8, 64, 4, True): 3.0})
    assert one.seconds(99, 9, 1, False) == 3.0
    # Matching was measured at one width: the plain width 1 gives it a line. A kind with two widths
    # keeps to itself.
    two = {Point(8, 64, 1, False): 2.0, Point(8, 64, 5, True): 6.0}
    assert CostTable(two).seconds(8, 64, 3, True) == 4.0
    assert CostTable(two).seconds(8, 64, 5, False) == 6.0
    three = CostTable(two | {Point(8, 64, 3, False): 2.5})
    assert three.seconds(8, 64, 5, False) == 3.0
    # 8 rows were only measured at width 1 and say nothing of width 5.
    rows = CostTable({Point(4, 64, 1, False): 1.0} | {Point(8, *p[1:]): c for p, c in two.items()})
    assert rows.seconds(4, 64, 5, True) == 6.0
    assert rows.seconds(6, 64, 1, False) == 1.5


def test_rows_that_were_not_measured_at_wide_passes_leave_them_to_those_that_were():
    """As engines measure: verification (width 64) only at the fewest and the most rows."""
    steps = {Point(r, 99, w, w > 1): r * (w + 9.0) for r in (8, 16, 32) for w in (1, 2, 4)}
    passes = {Point(r, 70, 64, False): r * 30.0 for r in (8, 32)}
    table = CostTable(steps | passes)
    assert table.seconds(16, 70, 64, False) == 16 * 30.0  # its own line through 2 and 4: 16 · 73
    assert table.seconds(16, 70, 1, False) == 16 * 10.0
    assert table.seconds(16, 70, 22, False) == pytest.approx(16 * (10 + 20 / 3))  # a third of it
    assert table.seconds(16, 70, 3, True) == 16 * 12.0
    # At one number of rows alone it would say nothing of others: their own lines do.
    del steps[8, 99, 1, False], passes[8, 70, 64, False]
    assert CostTable(steps | passes).seconds(16, 70, 64, False) == 16 * 73.0


def test_a_table_survives_json():
    rng = np.random.default_rng(2)
    table = CostTable({Point(8, s, 1, s % 2 > 0): rng.exponential() for s in range(1, 99)})
    again = CostTable.from_json(json.loads(json.dumps(table.to_json())))
    assert again.to_json() == table.to_json()
    for slots in range(1, 150):
        for matching in (False, True):
            assert again.seconds(8, slots, 4, matching) == table.seconds(8, slots, 4, matching)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_table_takes_no_odd_seconds(value):
    with pytest.raises(ValueError, match="must be > 0"):
        CostTable({Point(8, 64, 1, False): value})


def test_a_table_takes_no_odd_sizes():
    with pytest.raises(ValueError, match="must be > 0"):
        CostTable({Point(0, 64, 1, False): 1.0})
    with pytest.raises(ValueError, match="at least one"):
        CostTable({})


# Measuring ------------------------------------------------------------------------------------

POINTS = [Point(8, 64, w, w > 1) for w in (4, 1)] + [Point(4, 64, 1, False)]


class Clock:
    """Steps that cost rows x width, the first call of each ten times that, and then some noise."""

    def __init__(self):
        self.calls = []

    def __call__(self, rows, slots, width, matching):
        point = Point(rows, slots, width, matching)
        self.calls.append(point)
        noise = (10.0, 3.0, 0.0, -0.5, 0.0, -0.2)[self.calls.count(point) - 1]
        return [(1, rows * width * (1 + noise))]


def test_measure_goes_round_and_takes_medians():
    clock = Clock()
    table = measure(POINTS, clock, repeats=5)
    assert clock.calls == sorted(POINTS) * 6
    assert {p: table.seconds(*p) for p in POINTS} == {p: p.rows * p.width for p in POINTS}
    # The first round does not count, whatever it says.
    assert measure(POINTS, Clock(), repeats=1).seconds(8, 64, 1, False) == 8 * 4.0
    rising = itertools.count(1)
    found = measure(POINTS[:1], lambda *p: [(1, float(next(rising)))])
    assert found.seconds(*POINTS[0]) == 3.0  # of 2, 3, 4


def test_a_step_is_what_the_longer_call_takes_more():
    """Medians of the calls: 10 and 90 s for 1 and 9 steps, though the differences have others."""
    rounds = iter([(0, 0), (10, 90), (50, 91), (9, 60)])
    found = measure(POINTS[:1], lambda *p: list(zip((1, 9), next(rounds))))
    assert found.seconds(*POINTS[0]) == 80 / 8
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


# Acceptance -----------------------------------------------------------------------------------


def draw(rng, chances, row_steps, width):
    """Histogram of accepted tokens; chances[k]: to go on after k (the last one from there on)."""
    histogram, alive = np.zeros(width, int), row_steps
    for a in range(width):
        go_on = rng.binomial(alive, chances[min(a, len(chances) - 1)]) if a < width - 1 else 0
        histogram[a], alive = alive - go_on, go_on
    assert histogram.sum() == row_steps
    return histogram


def true_survival(chances, tokens):
    padded = [*chances, *[chances[-1]] * tokens]
    return list(itertools.accumulate(padded[:tokens], lambda a, b: a * b))


def test_survival_by_hand():
    acceptance = Acceptance()
    assert acceptance.survival(3) == pytest.approx([0.7, 0.49, 0.343])
    acceptance.observe([2, 1, 5], width=3)
    assert acceptance.offered == [8, 8]
    assert acceptance.at_risk == [8, 6]
    assert acceptance.accepted == [6, 5]
    first = (6 + 8 * 0.7) / 16
    second = first * (5 + 8 * first) / 14  # hope: as before, 0.725, which is more than 0.7
    assert acceptance.survival(2) == pytest.approx([first, second])
    assert acceptance.survival(4)[3] == pytest.approx(second * ((5 + 8 * first) / 14) ** 2)
    assert acceptance.expected_tokens(3) == pytest.approx(1 + first + second)
    assert acceptance.expected_tokens(1) == 1.0
    # A narrower step tells of the first token only, and fades both.
    acceptance.observe([4, 4], width=2)
    fade = 0.5 ** (8 / cost.HALF_LIFE)
    assert acceptance.offered == [8 * fade + 8, 8 * fade]
    assert acceptance.at_risk == [8 * fade + 8, 6 * fade]
    assert acceptance.accepted == [6 * fade + 4, 5 * fade]


def test_acceptance_counts_half_after_a_half_life():
    acceptance = Acceptance()
    acceptance.observe([0, 1_000], width=2)
    acceptance.observe([cost.HALF_LIFE, 0], width=2)
    assert acceptance.accepted == [500]
    assert acceptance.at_risk == [500 + cost.HALF_LIFE]


def test_width_one_and_empty_visits_tell_nothing():
    acceptance = Acceptance()
    acceptance.observe([100], width=1)
    acceptance.observe([], width=1)
    acceptance.observe([0, 0, 0], width=3)
    assert acceptance == Acceptance()


@pytest.mark.parametrize("histogram", [[1, 2, 3], [1, -1]])
def test_an_odd_histogram_is_refused(histogram):
    with pytest.raises(ValueError, match="expected <= 2 counts"):
        Acceptance().observe(histogram, width=2)


@pytest.mark.parametrize("chances", [[0.3], [0.9], [0.4, 0.9, 0.95], [0.9, 0.5, 0.2], [0.05, 0.99]])
def test_survival_converges_under_censoring_by_width(chances):
    rng = np.random.default_rng(3)
    acceptance = Acceptance()
    estimates = []
    for _ in range(3_000):
        width = int(rng.choice([2, 2, 2, 4, 4, 8, 16]))
        acceptance.observe(draw(rng, chances, 256, width), width)
        estimates.append(acceptance.survival(15))
    mean = np.mean(estimates[200:], axis=0)
    # The prior's 8 row steps, of some 1,600 offered, weigh on the last tokens: at most 0.02.
    np.testing.assert_allclose(mean, true_survival(chances, 15), atol=0.02)
    assert np.std(estimates[200:], axis=0).max() < 0.06


def test_beyond_what_was_checked_survival_goes_on_geometrically():
    acceptance = make_acceptance([0.8, 0.72])
    assert acceptance.survival(5) == pytest.approx([0.8, 0.72, 0.648, 0.5832, 0.52488])
    # ... but with hope: after one token in ten, one does not know of the second.
    assert make_acceptance([0.1]).survival(3) == pytest.approx([0.1, 0.07, 0.049])


def test_verified_rate_by_hand():
    acceptance = Acceptance()
    assert acceptance.rate() == pytest.approx(0.99)
    acceptance.observe_verified(90, 100)
    assert acceptance.rate() == pytest.approx((90 + 0.99 * 32) / 132)
    acceptance.observe_verified(0, cost.VERIFIED_HALF_LIFE)
    assert (acceptance.kept, acceptance.verified) == (45, 50 + cost.VERIFIED_HALF_LIFE)
    with pytest.raises(ValueError, match="kept <= judged"):
        acceptance.observe_verified(2, 1)


def test_verified_rate_converges_to_a_tokens_chance():
    """Rows of 40 tokens, kept up to the first of chance 0.1 to be rejected."""
    rng = np.random.default_rng(4)
    acceptance, rates = Acceptance(), []
    for _ in range(500):
        kept = np.minimum(rng.geometric(0.1, size=64) - 1, 40)
        acceptance.observe_verified(kept.sum(), kept.sum() + (kept < 40).sum())
        rates.append(acceptance.rate())
    assert np.mean(rates[50:]) == pytest.approx(0.9, abs=0.003)


# Choices --------------------------------------------------------------------------------------


def test_the_worked_row_of_the_module():
    table = CostTable({Point(8, 64, w, w > 1): c for w, c in {1: 10, 4: 15, 8: 23}.items()})
    model = CostModel(table, make_acceptance([0.8, 0.64, 0.51, 0.41, 0.33, 0.26, 0.21]))
    assert model.acceptance.expected_tokens(4) == pytest.approx(2.95)
    assert model.acceptance.expected_tokens(8) == pytest.approx(4.16)
    assert model.choose_width(8, 64, (1, 4, 8)) == 4
    assert model.choose_width(8, 64, (8,)) == 8
    assert model.predicted(8, 64, 4, 10) == 150


def test_ties_go_to_the_smaller_width():
    table = CostTable({Point(8, 64, w, w > 1): c for w, c in {1: 1.0, 2: 1.5, 4: 2.0}.items()})
    model = CostModel(table, make_acceptance([0.5, 0.25, 0.25], row_steps=2.0**60))
    assert model.acceptance.expected_tokens(2) / 1.5 == 1.0
    assert model.acceptance.expected_tokens(4) / 2.0 == 1.0
    assert model.choose_width(8, 64, (4, 2, 1)) == 1
    assert model.choose_width(8, 64, ()) == 1


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
def test_the_width_is_the_best_by_brute_force(relative):
    rng = np.random.default_rng(5)
    table, chosen = make_table(relative), set()
    for _ in range(500):
        chances = rng.beta(*rng.choice([0.3, 1, 4, 20], 2), size=127)
        survival = list(np.cumprod(chances))
        rows, slots = (int(rng.integers(1, 200)) for _ in range(2))
        widths = [int(w) for w in rng.choice(sorted(relative), rng.integers(1, 6), replace=False)]
        speeds = {}
        for width in {1, *widths}:
            emitted = 1.0
            for k in range(1, width):
                emitted += survival[k - 1]
            speeds[width] = emitted / table.seconds(rows, slots, width, width > 1)
        width = CostModel(table, make_acceptance(survival)).choose_width(rows, slots, widths)
        best = max(speeds.values())
        pays = best >= cost.MARGIN * speeds[1]
        assert speeds[width] == pytest.approx(best if pays else speeds[1], rel=1e-9)
        chosen.add(width)
    assert chosen >= {1, 4, 8, 16, 32}


# Probes ---------------------------------------------------------------------------------------


def test_visits_by_hand():
    """Steps of 64 rows: 10 s at width 1, 12 s at 2, 15 s at 4. No draft is ever right."""
    seconds = {1: 10.0, 2: 12.0, 4: 15.0}
    model = CostModel(CostTable({Point(64, 99, w, w > 1): c for w, c in seconds.items()}))
    # By the prior, width 4 emits 1 + .7 + .49 + .343 = 2.5 tokens: tried, for 256 row steps.
    visit = model.plan_visit(64, 99, (2, 4))
    assert visit == Visit(64, 99, width=4, base=1, max_steps=4)
    assert model.record_visit(visit, 4, [256, 0, 0, 0]) == 60.0
    assert model.credit == -20.0
    # One percent of the time is to pay for that, and the next probe's 4 · 2 s: 2,800 s.
    visit = model.plan_visit(64, 99, (2, 4))
    assert visit == Visit(64, 99, width=1, base=1, max_steps=280, reserve=8.0)
    assert model.record_visit(visit, 200) == 2_000.0  # the rung ended
    assert model.credit == 0.0
    visit = model.plan_visit(64, 99, (2, 4))
    assert visit == Visit(64, 99, width=1, base=1, max_steps=80, reserve=8.0)
    model.record_visit(visit, 100)
    assert model.credit == 8.0  # no more than a probe needs
    visit = model.plan_visit(64, 99, (2, 4))
    assert visit == Visit(64, 99, width=2, base=1, max_steps=4)
    model.record_visit(visit, 3, np.array([96, 96]))  # half of the drafts were right: it paid
    assert model.credit == 8.0
    assert model.plan_visit(64, 99, (1,)) == Visit(64, 99, width=1, base=1, max_steps=0)


def test_a_width_of_which_nothing_is_known_is_not_tried_on_credit():
    seconds = {1: 10.0, 2: 12.0, 4: 15.0}
    table = CostTable({Point(64, 99, w, w > 1): c for w, c in seconds.items()})
    model = CostModel(table, make_acceptance([0.9]))  # width 4 would emit 1 + .9 + .81 + .73
    assert model.plan_visit(64, 99, (2, 4)) == Visit(64, 99, width=4, base=2, max_steps=4)
    model.credit = -1.0
    visit = model.plan_visit(64, 99, (2, 4))
    assert visit == Visit(64, 99, width=2, base=2, max_steps=64)
    model.record_visit(visit, 64, [0, 64 * 64])
    assert model.credit == 0.0  # 7.7 s were earned, nothing is saved up
    assert model.plan_visit(64, 99, (2, 4)).width == 4
    # At width 1, a visit lasts until the debt is paid: 100 s bring 1 s.
    model = CostModel(table, credit=-20.0)
    assert model.plan_visit(64, 99, (2, 4)) == Visit(64, 99, 1, 1, max_steps=200, reserve=8.0)


def test_a_probe_is_charged_what_its_base_would_have_done_better():
    table = CostTable({Point(64, 99, w, w > 1): c for w, c in {1: 1.0, 2: 1.2, 8: 2.4}.items()})
    model = CostModel(table)
    model.record_visit(Visit(64, 99, width=8, base=2, max_steps=4), 4, [64, 128, 0, 64])
    # Width 8 emitted 1 + 0 + .5 + .75 = 2.25 a row step in 2.4 s, width 2 would have 1.75 in 1.2.
    assert model.credit == pytest.approx(-4 * (2.4 - 1.2 * 2.25 / 1.75))


def test_probes_are_short_but_see_enough_rows():
    plans = [CostModel(make_table()).plan_visit(rows, 64, (4,)) for rows in (1, 16, 64, 128, 999)]
    assert [p.max_steps for p in plans] == [32, 16, 4, 4, 4]
    assert [p.width for p in plans] == [4] * 5


class Simulation:
    """Decodes with drafts of known chances; counts predicted seconds of it and of width 1."""

    def __init__(self, relative=CPU, widths=(2, 4, 8, 16), seed=0):
        self.model = CostModel(make_table(relative))
        self.widths, self.rng = widths, np.random.default_rng(seed)
        self.seconds = self.plain_seconds = 0.0

    def visit(self, chances, rows, slots=64, most=512):
        """One visit, cut to `most` steps; returns it."""
        model = self.model
        visit = model.plan_visit(rows, slots, self.widths)
        steps = min(visit.max_steps or most, most)
        histogram = draw(self.rng, chances, rows * steps, visit.width)
        self.seconds += model.record_visit(visit, steps, histogram if visit.width > 1 else ())
        emitted = histogram @ np.arange(1, visit.width + 1) / rows
        self.plain_seconds += model.predicted(rows, slots, 1) * emitted
        return visit


def true_speeds(simulation, chances, rows, slots=64):
    """Tokens a second and row, by width."""
    return {
        w: (1 + sum(true_survival(chances, w - 1))) / simulation.model.predicted(rows, slots, w)
        for w in (1, *simulation.widths)
    }


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
@pytest.mark.parametrize("widths", [(2, 4, 8), (4, 8, 16, 32), (32,)])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_drafts_that_are_never_right_cost_little(relative, widths, rows):
    simulation = Simulation(relative, widths)
    while simulation.plain_seconds < 30_000 * simulation.model.predicted(rows, 64, 1):
        simulation.visit([0.0], rows)
    assert simulation.plain_seconds < simulation.seconds <= 1.011 * simulation.plain_seconds


def test_nor_do_they_over_rungs_that_change():
    simulation = Simulation()
    for _ in range(3_000):
        for rows in (128, 64, 16, 1):
            most = int(simulation.rng.integers(1, 60))
            slots = int(simulation.rng.choice(SLOTS))
            simulation.visit([0.0], rows, slots, most)
    assert simulation.seconds <= 1.011 * simulation.plain_seconds


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
@pytest.mark.parametrize(
    "chances", [[0.05], [0.3], [0.5], [0.7], [0.95], [0.3, 0.9], [0.1, 0.95], [0.9, 0.1], [0.5, 0]]
)
def test_time_stays_near_that_of_the_best_width(relative, chances):
    simulation = Simulation(relative)
    for _ in range(1_500):
        simulation.visit(chances, 64)
    speeds = true_speeds(simulation, chances, 64)
    gain = max(speeds.values()) / speeds[1]
    ideal = simulation.plain_seconds / (gain if gain >= cost.MARGIN else 1.0)
    assert simulation.seconds <= 1.012 * ideal
    assert simulation.seconds <= 1.012 * simulation.plain_seconds


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
@pytest.mark.parametrize("chances", [[0.95], [0.5, 0.9]])
@pytest.mark.parametrize(("rows", "leave", "arrive"), [(16, 6, 8), (128, 6, 8), (1, 30, 60)])
def test_drafts_that_become_good_are_found(relative, chances, rows, leave, arrive):
    """`leave`: visits until width 1 is left, `arrive`: until a width within 5 % of the best.

    A rung of one row sees 32 row steps a probe; in a rollout it shares what larger rungs saw.
    """
    simulation = Simulation(relative, seed=1)
    for _ in range(100):
        visit = simulation.visit([0.0], rows)
    while visit.base != 1:  # before it is known how bad they are, width 2 is worth its 1.02 steps
        visit = simulation.visit([0.0], rows)
    speeds = true_speeds(simulation, chances, rows)
    bases = [simulation.visit(chances, rows).base for _ in range(120)]
    assert next(i for i, base in enumerate(bases) if base > 1) <= leave
    near = [speeds[base] >= 0.95 * max(speeds.values()) for base in bases]
    assert near.index(True) <= arrive
    assert all(near[arrive:])


@pytest.mark.parametrize("rows", [1, 128])
def test_drafts_that_turn_bad_are_left(rows):
    simulation = Simulation()
    for _ in range(50):
        visit = simulation.visit([0.95], rows)
    assert visit.base == 16
    assert visit.max_steps == cost.REVIEW_STEPS
    bases = [simulation.visit([0.0], rows).base for _ in range(300)]
    assert bases.index(1) <= (1 if rows == 128 else 40)  # after some 2,000 row steps


# Verification ---------------------------------------------------------------------------------


def make_pass(left=(100,) * 64, rung_rows=64, chunk=4, rungs=(16, 64), **more):
    return Pass(tuple(left), rung_rows, 99, chunk, rungs, 50, **more)


def make_verifier(pass_seconds, rate, decode_seconds=8.0, **more):
    """A pass that has to save `pass_seconds` to be worth it: MARGIN of what it takes. A step of 16
    rows takes `decode_seconds`, of 64 four times so."""
    widths = {1: 1, 4: 1.5}
    table = CostTable(
        {Point(64, 99, 4, False): pass_seconds / cost.MARGIN, Point(64, 99, 4, True): 1e9}
        | {Point(16, 50, w, w > 1): decode_seconds * c for w, c in widths.items()}
        | {Point(64, 50, w, w > 1): 4 * decode_seconds * c for w, c in widths.items()}
    )
    return CostModel(table, Acceptance(verified=1e12, kept=rate * 1e12, **more))


def test_rows_that_decode_by_hand():
    """Three drafts of 4 tokens and one of 2; two of a chunk may be kept, each with chance 1/2."""
    one = make_pass(left=(4, 4, 4, 2), chunk=2)
    np.testing.assert_array_equal(one.active(), [4, 4, 3, 3])
    # The last token of three is saved by 1/2, the one before by 1/4; and so of the short one's.
    np.testing.assert_array_equal(one.active(0.5), [3.75, 3.5, 2.25, 1.5])
    np.testing.assert_array_equal(one.active(1.0), [3, 3, 0, 0])
    np.testing.assert_array_equal(make_pass(left=(1,), chunk=2).active(0.5), [0.5])
    assert not len(make_pass(left=()).active(0.5))


@pytest.mark.parametrize(("rate", "chunk"), [(0.9, 16), (0.97, 64), (0.3, 8), (0.0, 4), (1.0, 4)])
def test_rows_that_decode_agree_with_drawn_drafts(rate, chunk):
    rng = np.random.default_rng(6)
    left = rng.integers(1, 50, 40)
    draws = 4_000
    first = rng.geometric(1 - rate, (draws, 40)) - 1 if rate < 1 else np.full((draws, 40), 99)
    kept = np.minimum(first, np.minimum(left, chunk))
    expected = [np.mean(np.sum(left - kept > t, axis=1)) for t in range(left.max())]
    found = make_pass(left=left, chunk=chunk).active(rate)
    np.testing.assert_allclose(found, expected, atol=0.25)


def test_steps_are_shared_with_the_rows_beside():
    active = np.array([64.0, 20.0, 3.0, 0.5])
    assert make_pass().shares(active) == {16: 1.5, 64: 2.0}
    # 30 others wait, and 64 rows in all have room: 0, 30 and 30, 30 are in flight beside.
    found = make_pass(beside=30, capacity=64).shares(active)
    assert found == pytest.approx({16: 0.0, 64: 1 + 20 / 50 + 3 / 33 + 0.5 / 31})


def test_one_more_chunk_by_hand():
    # Half of 64 rows keep the one token that is left: a step on 64 rows becomes one of 32, on the
    # same rung. Of 32 rows 16 are left, and a step of 8 s is for one of 32 s.
    assert not make_verifier(1e-9, 0.5).worth_verifying(make_pass(left=(1,) * 64))
    assert make_verifier(23.9, 0.5).worth_verifying(make_pass(left=(1,) * 32))
    assert not make_verifier(24.1, 0.5).worth_verifying(make_pass(left=(1,) * 32))
    # Everything is kept: 4 steps of 32 s, of the 100.
    assert make_verifier(127.9, 1.0).worth_verifying(make_pass())
    assert not make_verifier(128.1, 1.0).worth_verifying(make_pass())
    # Rows that wait use what is saved: 60 tokens of 64 rows that share 64 places with others.
    busy = make_pass(beside=9999, capacity=64)
    assert make_verifier(29.9, 0.5).worth_verifying(busy)
    assert not make_verifier(30.1, 0.5).worth_verifying(busy)
    # Nothing is left, or kept.
    assert not make_verifier(1e-9, 1.0).worth_verifying(make_pass(left=()))
    assert not make_verifier(1e-3, 0.0).worth_verifying(make_pass())


def test_good_tree_drafts_make_verification_worth_less():
    # Width 4 emits 1 + .7 + .49 + .343 tokens a row in 48 s: 4 steps cost 75.8 s, not 128.
    counts = [1e9 * 0.7**k for k in range(4)]
    good = {"offered": [1e9] * 3, "at_risk": counts[:3], "accepted": counts[1:]}
    assert make_verifier(75.7, 1.0, **good).worth_verifying(make_pass(widths=(1, 4)))
    assert not make_verifier(75.9, 1.0, **good).worth_verifying(make_pass(widths=(1, 4)))
    assert make_verifier(75.9, 1.0, **good).worth_verifying(make_pass())
    # Not while they are but hoped for.
    assert make_verifier(127.9, 1.0).worth_verifying(make_pass(widths=(1, 4)))


CHUNK = Pass((24,) * 128, 128, 99, chunk=16, rungs=(16, 64, 128), decode_slots=99)  # 3.6 steps


def rollouts(model, chance, number, rng):
    """Rollouts of 32 tokens that verify one chunk of 24-token drafts if that seems worth it.

    Drafts that are left to decoding are judged there. Returns what was done, and the predicted
    seconds against those without drafts.
    """
    verdicts, seconds = [], 0.0
    for _ in range(number):
        verdict = model.worth_verifying(CHUNK)
        kept = np.minimum(rng.geometric(1 - chance, size=128) - 1, 16)
        judged = kept.sum() + (kept < 16).sum()
        if verdict:
            seconds += model.record_pass(CHUNK, kept.sum(), judged)
        # With all rows alike and many of them the last ends where the mean of the worst does.
        steps = 32 - kept.min() * verdict
        visit = model.plan_visit(128, 99, (1,))
        evidence = {} if verdict else {"kept": kept.sum(), "judged": judged}
        seconds += model.record_visit(visit, steps, **evidence)
        verdicts.append(verdict)
    return verdicts, seconds / (number * model.predicted(128, 99, 1, 32))


def test_responses_that_never_come_back_are_verified_once():
    model, rng = CostModel(make_table()), np.random.default_rng(7)
    verdicts, relative = rollouts(model, 0.0, 500, rng)
    assert verdicts[0]  # the prior hopes
    assert not any(verdicts[1:])
    assert relative < 1.001


def test_responses_that_come_back_are_verified_again():
    """What decoding judges tells when they do, and verification when they do no more."""
    model, rng = CostModel(make_table()), np.random.default_rng(8)
    rollouts(model, 0.0, 200, rng)
    verdicts, _ = rollouts(model, 0.9999, 100, rng)
    first = verdicts.index(True)
    assert first <= 15
    assert all(verdicts[first:])
    verdicts, _ = rollouts(model, 0.0, 100, rng)
    last = verdicts.index(False)
    assert 0 < last <= 30  # 128 judged tokens a pass, against thousands
    assert not any(verdicts[last:])


# State ----------------------------------------------------------------------------------------


def use(model, rng, rounds):
    """Rollouts of changing drafts; every choice, and what was predicted."""
    choices = []
    for i in rounds:
        chances = [[0.0], [0.9], [0.2, 0.9]][(i // 7) % 3]
        rows = int(rng.choice([1, 16, 64, 100]))
        left = rng.integers(1, 90, rows)
        candidate = make_pass(left, rows, 16, (1, 16, 100), widths=(1, 2, 4))
        verdict = model.worth_verifying(candidate)
        judged = int(rng.integers(1, 500)) if verdict else 0
        kept = int(judged * chances[0])
        choices.append((verdict, model.record_pass(candidate, kept, judged)))
        choices.append(model.worth(candidate))
        visit = model.plan_visit(rows, int(rng.integers(40, 150)), (2, 4, 8))
        steps = int(rng.integers(0, 99))
        histogram = draw(rng, chances, rows * steps, visit.width) if visit.width > 1 else ()
        choices.append((visit, model.record_visit(visit, steps, histogram)))
    return choices


@pytest.mark.parametrize("stop", [0, 1, 5, 23, 60])
def test_a_resumed_model_chooses_alike(stop):
    whole, rng = CostModel(make_table()), np.random.default_rng(9)
    expected = use(whole, rng, range(90))
    assert {c.base for c, _ in expected[2::3]} == {1, 2, 4, 8}
    assert {c for c, _ in expected[::3]} == {False, True}

    first, rng = CostModel(make_table()), np.random.default_rng(9)
    choices = use(first, rng, range(stop))
    text = json.dumps(first.state())
    resumed = CostModel.from_state(json.loads(text))
    assert json.dumps(resumed.state()) == text
    assert choices + use(resumed, rng, range(stop, 90)) == expected
    assert resumed.state() == whole.state()


def test_a_state_does_not_change_behind_ones_back():
    model = CostModel(make_table())
    use(model, np.random.default_rng(10), range(20))
    state = model.state()
    text = json.dumps(state)
    other = CostModel.from_state(state)
    use(model, np.random.default_rng(11), range(20))
    use(other, np.random.default_rng(12), range(20))
    assert json.dumps(state) == text
    assert json.dumps(model.state()) != text


def test_a_state_with_unknown_or_missing_parts_is_refused():
    state = CostModel(make_table()).state()
    with pytest.raises(TypeError, match="colour"):
        CostModel.from_state({**state, "colour": 1})
    del state["table"]
    with pytest.raises(KeyError, match="table"):
        CostModel.from_state(state)


def test_planning_changes_nothing():
    model = CostModel(make_table())
    use(model, np.random.default_rng(13), range(30))
    text = json.dumps(model.state())
    plans = [model.plan_visit(rows, 64, (2, 4, 8)) for rows in (1, 64, 128) * 2]
    assert plans[:3] == plans[3:]
    model.worth_verifying(make_pass())
    assert json.dumps(model.state()) == text


def test_choosing_needs_no_jax():
    code = "import sys, specrl_jax.rollout.cost; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
