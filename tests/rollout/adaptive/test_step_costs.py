"""Seconds of programs: exact where measured, a fit of few terms elsewhere."""

import itertools
import json
import math

import numpy as np
import pytest
from cost_reference import STEPS, VERIFICATIONS

from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts

MEASURED = {Point(rows, slots, 1, False): ms for (rows, slots), ms in STEPS.items()}
MEASURED |= {Point(*shape, False): ms for shape, ms in VERIFICATIONS.items()}


def formula(rows, slots, width, drafting=False) -> float:
    return 3.0 + 0.5 * rows + 0.01 * rows * slots + 0.2 * rows * width + 1e-4 * rows * width * slots


def test_costs_are_exact_where_measured():
    costs = StepCosts(MEASURED)
    assert {point: costs.seconds(*point) for point in MEASURED} == MEASURED


def test_costs_that_follow_the_formula_are_found_everywhere():
    grid = itertools.product((8, 64), (50, 300), (1, 4))
    costs = StepCosts({Point(*shape, shape[2] > 1): formula(*shape) for shape in grid})
    for shape in [(1, 40, 1), (16, 100, 2), (32, 200, 8), (128, 512, 16)]:
        assert costs.seconds(*shape, shape[2] > 1) == pytest.approx(formula(*shape), rel=1e-6)


@pytest.mark.parametrize("verifies", [False, True])
def test_a_measured_machine_is_met_within_a_fourth(verifies):
    """In the mean, where half of the programs were measured."""
    like = {point: ms for point, ms in MEASURED.items() if point.verifies == verifies}
    points = list(like)
    costs = StepCosts({points[i]: like[points[i]] for i in (0, 3, 5, 6)})
    errors = [abs(math.log(costs.seconds(*point) / ms)) for point, ms in like.items()]
    assert np.mean(errors) < math.log(1.25)


def test_one_verification_tells_what_a_token_costs():
    costs = StepCosts({Point(8, 64, 32, False): 3.0})
    assert costs.seconds(4, 99, 16, False) == pytest.approx(0.75)


def test_one_measurement_of_steps_holds_for_all_of_its_kind():
    costs = StepCosts({Point(8, 64, 4, True): 3.0})
    assert costs.seconds(99, 9, 8, True) == pytest.approx(3.0)
    assert costs.knows(2, True)
    assert not costs.knows(1, False)
    assert not costs.knows(4, False)


def test_costs_are_positive_and_do_not_depend_on_the_order_of_measuring():
    rng = np.random.default_rng(1)
    for _ in range(50):
        points = [
            Point(*(int(n) for n in rng.integers(1, 200, 3)), bool(rng.integers(2)))
            for _ in range(rng.integers(1, 9))
        ]
        measured = {point: float(rng.exponential()) + 1e-9 for point in points}
        costs, other = StepCosts(measured), StepCosts(dict(reversed(measured.items())))
        for point in points:
            more = [3 * n + 1 for n in point[:3]]
            assert costs.seconds(*more, point.drafting) > 0
            assert costs.seconds(*more, point.drafting) == other.seconds(*more, point.drafting)


def test_a_new_measurement_changes_the_fit():
    costs = StepCosts({Point(8, 64, 1, False): 1.0})
    assert costs.seconds(64, 64, 1, False) == pytest.approx(1.0)
    costs.add(Point(16, 64, 1, False), 2.0)
    assert costs.seconds(64, 64, 1, False) == pytest.approx(8.0)


def test_costs_survive_json():
    costs = StepCosts(MEASURED)
    again = StepCosts.from_json(json.loads(json.dumps(costs.to_json())))
    assert again.to_json() == costs.to_json()
    assert again.seconds(40, 99, 1, False) == costs.seconds(40, 99, 1, False)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_odd_seconds_and_sizes_are_refused(seconds):
    with pytest.raises(ValueError, match="must be > 0"):
        StepCosts({Point(8, 64, 1, False): seconds})
    with pytest.raises(ValueError, match="must be > 0"):
        StepCosts({Point(0, 64, 1, False): 1.0})
