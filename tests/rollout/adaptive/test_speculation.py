"""Acceptance, widths and probes: by hand, by brute force, and in simulated rollouts."""

import json

import numpy as np
import pytest
from cost_reference import (
    CPU,
    MEMORY_BOUND,
    draw,
    make_acceptance,
    make_costs,
    make_plan,
    true_survival,
)

from specrl_jax.rollout.adaptive import speculation
from specrl_jax.rollout.adaptive.speculation import AcceptanceCounts, Speculation, StepPlan
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts

# Acceptance -----------------------------------------------------------------------------------


def test_survival_by_hand():
    acceptance = AcceptanceCounts()
    assert acceptance.survival(3) == [0, 0, 0]
    acceptance.observe([2, 1, 5], width=3)
    assert acceptance.reached == [8, 6]
    assert acceptance.accepted == [6, 5]
    first = 6 / 16
    second = (5 + 8 * first) / 14
    # A token that was never checked has the chance of the token before it.
    assert acceptance.survival(3) == pytest.approx([first, first * second, first * second**2])
    assert acceptance.expected_tokens(3) == pytest.approx(1 + first + first * second)
    assert acceptance.expected_tokens(1) == 1.0
    # A narrower step tells of the first token, and leaves what is known of the second.
    acceptance.observe([4, 4], width=2)
    fade = 0.5 ** (8 / speculation.HALF_LIFE)
    assert acceptance.reached == [8 * fade + 8, 6]
    assert acceptance.accepted == [6 * fade + 4, 5]


def test_the_rate_of_previous_responses_by_hand():
    acceptance = AcceptanceCounts()
    assert acceptance.rate() == pytest.approx(0.99)
    acceptance.observe_previous(90, 100)
    assert acceptance.rate() == pytest.approx((90 + 0.99 * 32) / 132)
    acceptance.observe_previous(0, speculation.VERIFIED_HALF_LIFE)
    assert acceptance.previous_accepted == 45
    assert acceptance.previous_verified == 50 + speculation.VERIFIED_HALF_LIFE


# Widths ---------------------------------------------------------------------------------------


def costs_of(seconds, rows=64, slots=99) -> StepCosts:
    return StepCosts({Point(rows, slots, w, w > 1): s for w, s in seconds.items()})


def test_the_worked_example_of_the_module():
    acceptance = make_acceptance([0.8, 0.64, 0.51, 0.41, 0.33, 0.26, 0.21])
    chooser = Speculation(costs_of({1: 10, 4: 15, 8: 23}), acceptance)
    assert acceptance.expected_tokens(4) == pytest.approx(2.95)
    assert acceptance.expected_tokens(8) == pytest.approx(4.16)
    assert chooser.choose_width(64, 99, (1, 4, 8)) == 4
    assert chooser.choose_width(64, 99, (8,)) == 8
    assert chooser.choose_width(64, 99, (1,)) == 1


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
def test_the_width_is_the_best_by_brute_force(relative):
    rng, costs, chosen = np.random.default_rng(5), make_costs(relative), set()
    for _ in range(200):
        survival = list(np.cumprod(rng.beta(*rng.choice([0.3, 1, 4, 20], 2), size=127)))
        rows, slots = int(rng.choice([1, 16, 64])), int(rng.choice([64, 128]))
        widths = [int(w) for w in rng.choice(sorted(relative), rng.integers(1, 6), replace=False)]
        speeds = {
            w: (1 + sum(survival[: w - 1])) / costs.seconds(rows, slots, w, w > 1)
            for w in {1, *widths}
        }
        width = Speculation(costs, make_acceptance(survival)).choose_width(rows, slots, widths)
        best = max(speeds.values())
        pays = best >= speculation.WIDTH_MARGIN * speeds[1]
        assert speeds[width] == pytest.approx(best if pays else speeds[1], rel=1e-9)
        chosen.add(width)
    assert chosen >= {1, 4, 8, 16, 32}


@pytest.mark.parametrize("seconds", [{}, {1: 10.0}, {4: 10.0}])
def test_steps_are_plain_until_both_kinds_are_measured(seconds):
    chooser = Speculation(costs_of(seconds), make_acceptance([0.9] * 3))
    assert chooser.choose_width(64, 99, (1, 2, 4)) == 1


# Probes ---------------------------------------------------------------------------------------


def test_probes_by_hand():
    """One probe of 4 steps in 200, of the next two widths in turn; the first comes at once."""
    chooser = Speculation(costs_of({1: 10.0, 2: 12.0, 4: 15.0}))
    plan = chooser.plan_steps(64, 99, (2, 4, 8))
    assert plan == StepPlan(64, 99, width=2, max_steps=4, probe=True)
    assert chooser.record_steps(plan, 4, [256, 0]) == 48.0
    plan = chooser.plan_steps(64, 99, (2, 4, 8))
    assert plan == StepPlan(64, 99, width=1, max_steps=200)
    assert chooser.record_steps(plan, 150) == 1_500.0  # the bucket ended
    plan = chooser.plan_steps(64, 99, (2, 4, 8))
    assert plan == StepPlan(64, 99, width=1, max_steps=50)
    chooser.record_steps(plan, 50)
    plan = chooser.plan_steps(64, 99, (2, 4, 8))
    assert plan == StepPlan(64, 99, width=4, max_steps=4, probe=True)
    chooser.record_steps(plan, 4, [256, 0, 0, 0])
    assert chooser.plan_steps(64, 99, (1,)) == StepPlan(64, 99, width=1, max_steps=0)


def test_wide_steps_are_reviewed_and_the_next_width_is_probed():
    costs = costs_of({1: 10.0, 2: 12.0, 4: 15.0, 8: 23.0})
    chooser = Speculation(costs, make_acceptance([0.9, 0.1]), steps_since_probe=0)
    assert chooser.plan_steps(64, 99, (1, 2)) == StepPlan(64, 99, 2, speculation.REVIEW_STEPS)
    assert chooser.plan_steps(64, 99, (1, 2, 4, 8)).width == 2
    chooser.steps_since_probe = 190
    assert chooser.plan_steps(64, 99, (1, 2, 4, 8)) == StepPlan(64, 99, 2, 10)
    chooser.steps_since_probe = 200
    assert chooser.plan_steps(64, 99, (1, 2, 4, 8)) == StepPlan(64, 99, 4, 4, probe=True)


def test_probes_are_short_but_see_enough_rows():
    plans = [Speculation().plan_steps(rows, 64, (4,)) for rows in (1, 16, 64, 128, 999)]
    assert [plan.max_steps for plan in plans] == [32, 8, 4, 4, 4]
    assert all(plan.probe for plan in plans)


class Simulation:
    """Decodes with drafts of known chances; sums expected seconds, also those of plain steps."""

    def __init__(self, relative=CPU, widths=(2, 4, 8, 16), seed=0):
        self.chooser = Speculation(make_costs(relative))
        self.widths, self.rng = widths, np.random.default_rng(seed)
        self.seconds = self.plain_seconds = 0.0

    def decode(self, chances, rows, most=60):
        """Steps of a bucket that lasts `most` steps at most; returns their plan."""
        plan = self.chooser.plan_steps(rows, 64, self.widths)
        steps = min(plan.max_steps or most, most)
        histogram = draw(self.rng, chances, rows * steps, plan.width)
        self.seconds += self.chooser.record_steps(plan, steps, histogram)
        plain = self.chooser.costs.seconds(rows, 64, 1, False)
        self.plain_seconds += plain * (histogram @ np.arange(1, plan.width + 1)) / rows
        return plan

    def gain(self, chances, rows, rollouts):
        """Seconds of plain steps over those that were taken."""
        self.seconds = self.plain_seconds = 0.0
        plain = 60 * self.chooser.costs.seconds(rows, 64, 1, False)
        while self.plain_seconds < rollouts * plain:
            self.decode(chances, rows)
        return self.plain_seconds / self.seconds

    def best_gain(self, chances, rows):
        """Of the best width, if it is known."""
        plain = self.chooser.costs.seconds(rows, 64, 1, False)
        return max(
            (1 + sum(true_survival(chances, w - 1)))
            * plain
            / self.chooser.costs.seconds(rows, 64, w, w > 1)
            for w in (1, *self.widths)
        )


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
@pytest.mark.parametrize("widths", [(2, 4, 8), (4, 8, 16, 32)])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_bad_drafts_switch_themselves_off(relative, widths, rows):
    """The first rollouts lose little, and all later ones next to nothing."""
    simulation = Simulation(relative, widths)
    assert simulation.gain([0.0], rows, 3) > 0.90
    assert simulation.gain([0.0], rows, 300) > 0.97
    plans = [simulation.decode([0.0], rows) for _ in range(50)]
    assert {plan.width for plan in plans if not plan.probe} == {1}


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
@pytest.mark.parametrize("chances", [[0.9], [0.98], [0.6, 0.9], [0.9, 0.9, 0.9, 0.1], [0.5]])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_good_drafts_are_decoded_wide(relative, chances, rows):
    simulation = Simulation(relative)
    best = simulation.best_gain(chances, rows)
    assert best > 1.15
    assert simulation.gain(chances, rows, 20) > 1 + 0.6 * (best - 1)
    assert simulation.gain(chances, rows, 200) > 0.93 * best


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_drafts_that_turn_are_found_out(rows):
    """By probes where they turn good; where they turn bad, within a rollout."""
    simulation = Simulation()
    simulation.gain([0.0], rows, 100)
    best = simulation.best_gain([0.9], rows)
    assert simulation.gain([0.9], rows, 150) > 0.7 * best
    assert simulation.gain([0.9], rows, 100) > 0.93 * best
    assert simulation.gain([0.0], rows, 30) > 0.75
    assert simulation.gain([0.0], rows, 300) > 0.97


# Measuring and state --------------------------------------------------------------------------


class Timer:
    """In the place of measured programs: seconds are rows."""

    def __init__(self):
        self.points = []

    def __call__(self, weights, point):
        self.points.append(point)
        return float(point.rows)


def test_programs_are_measured_once_they_were_used_and_few_after_a_rollout():
    chooser = Speculation(timer=Timer())
    chooser.measure_used(None)
    assert chooser.timer.points == []
    verification = make_plan(verify_width=32)
    plans = [StepPlan(rows, 99, width, 9) for rows, width in [(64, 1), (64, 2), (32, 1)]]
    chooser.record_verification(verification)
    for plan in plans * 2:
        assert chooser.record_steps(plan, 5) == 0.0  # not known
    chooser.measure_used(None)
    assert chooser.timer.points == [verification.point, plans[0].point]
    assert chooser.record_steps(plans[0], 5) == 320.0
    chooser.measure_used(None)
    assert len(chooser.timer.points) == 2
    for plan in plans:
        chooser.record_steps(plan, 5)
    chooser.measure_used(None)
    assert [row[:-1] for row in chooser.costs.to_json()] == sorted(
        [*plan.point] for plan in [*plans, verification]
    )


def test_few_programs_of_a_kind_are_measured():
    """Seconds of the others follow from a fit."""
    chooser = Speculation(timer=Timer())
    for rows in (64, 32, 16, 8, 4, 2):
        chooser.record_steps(StepPlan(rows, 99, 1, 9), 5)
        chooser.measure_used(None)
    assert [point.rows for point in chooser.timer.points] == [64, 32, 16, 8]
    assert chooser.record_steps(StepPlan(4, 99, 1, 9), 5) == pytest.approx(5 * 4)
    chooser.record_steps(StepPlan(64, 99, 2, 9), 5)
    chooser.measure_used(None)
    assert chooser.timer.points[-1].width == 2


def test_a_plain_step_is_measured_where_every_draft_was_accepted():
    """Else nothing could tell that decoding costs less: drafts would be verified for ever."""
    chooser, plan = Speculation(timer=Timer()), make_plan(verify_width=32)
    assert chooser.choose_verification([plan]) == plan
    chooser.record_verification(plan, accepted=100, verified=100)
    chooser.measure_used(None)
    assert chooser.timer.points == [plan.point, plan.point._replace(width=1)]


def use(chooser, rng, rollouts) -> list:
    """Rollouts of changing drafts; every choice, and its expected seconds."""
    choices = []
    for i in rollouts:
        chances = [[0.0], [0.9], [0.9, 0.9, 0.9, 0.1]][(i // 7) % 3]
        rows = int(rng.choice([16, 64]))
        plan = make_plan(rng.integers(1, 90, rows), rows, 16)
        before = chooser.host()
        choices.append(chooser.choose_verification([plan]))
        chooser.plan_steps(rows, 64, (2, 4, 8))
        assert chooser.host() == before  # choosing and planning change nothing
        if choices[-1]:
            verified = int(rng.integers(1, 500))
            accepted = int(verified * chances[0])
            choices.append(chooser.record_verification(plan, accepted, verified))
        steps = chooser.plan_steps(rows, int(rng.integers(40, 150)), (2, 4, 8))
        number = int(rng.integers(0, 99))
        histogram = draw(rng, chances, rows * number, steps.width)
        choices += [steps, chooser.record_steps(steps, number, histogram)]
        chooser.measure_used(None)
    return choices


@pytest.mark.parametrize("costs", [None, make_costs()], ids=["measured later", "known"])
@pytest.mark.parametrize("stop", [0, 1, 5, 23])
def test_a_resumed_run_chooses_alike(stop, costs):
    straight = Speculation(StepCosts.from_json(costs.to_json()) if costs else StepCosts())
    straight.timer, rng = Timer(), np.random.default_rng(9)
    expected = use(straight, rng, range(60))
    assert {choice.width for choice in expected if isinstance(choice, StepPlan)} >= {1, 2, 4}

    first = Speculation(StepCosts.from_json(costs.to_json()) if costs else StepCosts())
    first.timer, rng = Timer(), np.random.default_rng(9)
    choices = use(first, rng, range(stop))
    text = json.dumps(first.host())
    resumed = Speculation(timer=Timer()).restore(json.loads(text))
    assert json.dumps(resumed.host()) == text
    assert choices + use(resumed, rng, range(stop, 60)) == expected
    assert resumed.host() == straight.host()
