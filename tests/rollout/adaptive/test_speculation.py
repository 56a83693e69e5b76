"""Widths and probes: against hand-computed choices, brute force, and simulated rollouts."""

import numpy as np
import pytest
from cost_reference import (
    CPU,
    MEMORY_BOUND,
    SLOTS,
    draw,
    make_acceptance,
    make_table,
    true_survival,
)

from specrl_jax.rollout.adaptive import speculation as cost
from specrl_jax.rollout.adaptive.speculation import Acceptance, Speculation, StepPlan
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts

# Acceptance -----------------------------------------------------------------------------------


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
    table = StepCosts({Point(8, 64, w, w > 1): c for w, c in {1: 10, 4: 15, 8: 23}.items()})
    model = Speculation(table, make_acceptance([0.8, 0.64, 0.51, 0.41, 0.33, 0.26, 0.21]))
    assert model.acceptance.expected_tokens(4) == pytest.approx(2.95)
    assert model.acceptance.expected_tokens(8) == pytest.approx(4.16)
    assert model.choose_width(8, 64, (1, 4, 8)) == 4
    assert model.choose_width(8, 64, (8,)) == 8
    assert model.predicted(8, 64, 4, 10) == 150


def test_ties_go_to_the_smaller_width():
    table = StepCosts({Point(8, 64, w, w > 1): c for w, c in {1: 1.0, 2: 1.5, 4: 2.0}.items()})
    model = Speculation(table, make_acceptance([0.5, 0.25, 0.25], row_steps=2.0**60))
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
        width = Speculation(table, make_acceptance(survival)).choose_width(rows, slots, widths)
        best = max(speeds.values())
        pays = best >= cost.MARGIN * speeds[1]
        assert speeds[width] == pytest.approx(best if pays else speeds[1], rel=1e-9)
        chosen.add(width)
    assert chosen >= {1, 4, 8, 16, 32}


# Probes ---------------------------------------------------------------------------------------


def test_visits_by_hand():
    """Steps of 64 rows: 10 s at width 1, 12 s at 2, 15 s at 4. No draft is ever right."""
    seconds = {1: 10.0, 2: 12.0, 4: 15.0}
    model = Speculation(StepCosts({Point(64, 99, w, w > 1): c for w, c in seconds.items()}))
    # By the prior, width 4 emits 1 + .7 + .49 + .343 = 2.5 tokens: tried, for 4 steps.
    visit = model.plan_steps(64, 99, (2, 4))
    assert visit == StepPlan(64, 99, width=4, base=1, max_steps=4)
    assert model.record_steps(visit, 4, [256, 0, 0, 0]) == 60.0
    assert model.credit == -20.0
    # One half percent of the time is to pay for that, and the next probe's 4 · 2 s: 5,600 s.
    visit = model.plan_steps(64, 99, (2, 4))
    assert visit == StepPlan(64, 99, width=1, base=1, max_steps=560, price=8.0)
    assert model.record_steps(visit, 400) == 4_000.0  # the rung ended
    assert model.credit == 0.0
    visit = model.plan_steps(64, 99, (2, 4))
    assert visit == StepPlan(64, 99, width=1, base=1, max_steps=160, price=8.0)
    model.record_steps(visit, 200)
    assert model.credit == 8.0  # no more than a probe needs
    visit = model.plan_steps(64, 99, (2, 4))
    assert visit == StepPlan(64, 99, width=2, base=1, max_steps=4, price=8.0)
    model.record_steps(visit, 3, np.array([96, 96]))  # half of the drafts were right: it paid
    assert model.credit == 8.0
    assert model.plan_steps(64, 99, (1,)) == StepPlan(64, 99, width=1, base=1, max_steps=0)


def test_a_width_of_which_nothing_is_known_is_not_tried_on_credit():
    seconds = {1: 10.0, 2: 12.0, 4: 15.0}
    table = StepCosts({Point(64, 99, w, w > 1): c for w, c in seconds.items()})
    model = Speculation(table, make_acceptance([0.9]))  # width 4 would emit 1 + .9 + .81 + .73
    assert model.plan_steps(64, 99, (2, 4)) == StepPlan(64, 99, width=4, base=2, max_steps=4)
    model.credit = -1.0
    visit = model.plan_steps(64, 99, (2, 4))
    assert visit == StepPlan(64, 99, width=2, base=2, max_steps=64)
    model.record_steps(visit, 64, [0, 64 * 64])
    assert model.credit == 0.0  # 3.8 s were earned, nothing is saved up
    assert model.plan_steps(64, 99, (2, 4)).width == 4
    # At width 1, a visit lasts until the debt is paid: 200 s bring 1 s.
    model = Speculation(table, credit=-20.0)
    assert model.plan_steps(64, 99, (2, 4)) == StepPlan(64, 99, 1, 1, max_steps=400, price=8.0)


def test_choices_follow_what_is_new():
    """Of a rung that was asked for before: what drafts brought since, and another table."""
    table = StepCosts({Point(64, 99, w, w > 1): c for w, c in {1: 10.0, 4: 15.0}.items()})
    model = Speculation(table, make_acceptance([0.8, 0.64, 0.51]))
    visit = model.plan_steps(64, 99, (1, 4))
    assert visit.width == 4
    model.record_steps(visit, 640, [64 * 640, 0, 0, 0])  # none was right
    assert model.plan_steps(64, 99, (1, 4)).width == 1
    assert not model.widens([(64, 99)], (1, 4))
    model.table = StepCosts({Point(64, 99, w, w > 1): c for w, c in {1: 10.0, 4: 5.0}.items()})
    assert model.plan_steps(64, 99, (1, 4)).width == 4
    assert model.widens([(64, 99)], (1, 4))


def test_a_width_that_seems_best_is_charged_what_its_base_would_have_done_better():
    table = StepCosts({Point(64, 99, w, w > 1): c for w, c in {1: 1.0, 2: 1.2, 8: 2.4}.items()})
    model = Speculation(table)
    model.record_steps(StepPlan(64, 99, width=8, base=2, max_steps=4), 4, [64, 128, 0, 64])
    # Width 8 emitted 1 + 0 + .5 + .75 = 2.25 a row step in 2.4 s, width 2 would have 1.75 in 1.2.
    assert model.credit == pytest.approx(-4 * (2.4 - 1.2 * 2.25 / 1.75))


@pytest.mark.parametrize(("right", "charge"), [(0, 8.0), (96, 8.0), (97, 8.0), (98, 0.0)])
def test_a_probe_is_charged_whole_unless_it_pays(right, charge):
    """Four steps of 64 rows, 12 s instead of 10 each: 1.38 tokens a row step pay, 1.15 for 1."""
    table = StepCosts({Point(64, 99, w, w > 1): c for w, c in {1: 10.0, 2: 12.0}.items()})
    model = Speculation(table, make_acceptance([0.0]), credit=8.0)
    visit = model.plan_steps(64, 99, (2,))
    assert visit == StepPlan(64, 99, width=2, base=1, max_steps=4, price=8.0)
    model.record_steps(visit, 4, [256 - right, right])
    assert model.credit == 8.0 - charge
    model.record_steps(visit, 1, [64, 0])  # cut short
    assert model.credit == 8.0 - charge - 2.0


def test_probes_are_short_but_see_enough_rows():
    plans = [Speculation(make_table()).plan_steps(rows, 64, (4,)) for rows in (1, 16, 64, 128, 999)]
    assert [p.max_steps for p in plans] == [32, 8, 4, 4, 4]
    assert [p.width for p in plans] == [4] * 5


class Simulation:
    """Decodes with drafts of known chances; counts predicted seconds of it and of width 1."""

    def __init__(self, relative=CPU, widths=(2, 4, 8, 16), seed=0):
        self.model = Speculation(make_table(relative))
        self.widths, self.rng = widths, np.random.default_rng(seed)
        self.seconds = self.plain_seconds = 0.0

    def visit(self, chances, rows, slots=64, most=512):
        """One visit, cut to `most` steps; returns it."""
        model = self.model
        visit = model.plan_steps(rows, slots, self.widths)
        steps = min(visit.max_steps or most, most)
        histogram = draw(self.rng, chances, rows * steps, visit.width)
        self.seconds += model.record_steps(visit, steps, histogram if visit.width > 1 else ())
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
    while simulation.plain_seconds < 60_000 * simulation.model.predicted(rows, 64, 1):
        simulation.visit([0.0], rows)
    assert simulation.plain_seconds < simulation.seconds <= 1.0055 * simulation.plain_seconds


def test_nor_do_they_over_rungs_that_change():
    simulation = Simulation()
    for _ in range(3_000):
        for rows in (128, 64, 16, 1):
            most = int(simulation.rng.integers(1, 60))
            slots = int(simulation.rng.choice(SLOTS))
            simulation.visit([0.0], rows, slots, most)
    assert simulation.seconds <= 1.0055 * simulation.plain_seconds


def test_a_probe_that_seems_to_cost_nothing_is_rare():
    """Width 2 by the table a little cheaper than width 1, as noise has it: 4 steps of it, 40 s of
    width 1, are taken to lose 4 s, which 0.5 % of 80 steps earn."""
    table = StepCosts({Point(64, 99, w, w > 1): c for w, c in {1: 10.0, 2: 9.9}.items()})
    model = Speculation(table, make_acceptance([0.0]))
    first = model.plan_steps(64, 99, (2,))
    assert (first.width, first.max_steps) == (1, pytest.approx(80, abs=1))
    assert first.price == pytest.approx(4.0)
    steps = {1: 0, 2: 0}
    while sum(steps.values()) < 84_000:
        visit = model.plan_steps(64, 99, (2,))
        steps[visit.width] += visit.max_steps
        histogram = [64 * visit.max_steps, 0] if visit.width == 2 else ()
        model.record_steps(visit, visit.max_steps, histogram)
        assert model.credit >= 0.0
        assert visit.width == 1 or model.credit == 0.0
    assert 4 / 84 * 0.97 < steps[2] / sum(steps.values()) <= 4 / 84


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
@pytest.mark.parametrize(("rows", "leave", "arrive"), [(16, 14, 14), (128, 6, 8), (1, 33, 60)])
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
