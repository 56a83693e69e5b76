"""Which verification to run, if any: by hand, and in simulated rollouts."""

import dataclasses

import numpy as np
import pytest
from cost_reference import (
    STEPS,
    VERIFICATIONS,
    make_acceptance,
    make_buckets,
    make_costs,
    make_plan,
)

from specrl_jax.rollout.adaptive.speculation import VERIFY_MARGIN, AcceptanceCounts, Speculation
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts


def make_chooser(seconds, rate=1.0, width=4) -> Speculation:
    """Steps of 64 and 16 rows take 32 and 8 s, a verification of 64 rows `seconds`."""
    steps = {Point(16, 100, 1, False): 8.0, Point(64, 100, 1, False): 32.0}
    costs = StepCosts(steps | {Point(64, 99, width, False): seconds})
    return Speculation(
        costs, AcceptanceCounts(previous_verified=1e12, previous_accepted=rate * 1e12)
    )


def worth(plan, rate=1.0, most=1e5, **more) -> float:
    """Seconds that a verification of 64 rows may take, to be chosen."""
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        chosen = make_chooser(middle, rate, plan.verify_width).choose_verification([plan])
        low, high = (middle, high) if chosen else (low, middle)
    return low * VERIFY_MARGIN


def test_what_a_verification_is_worth_by_hand():
    # All of 64 rows accept all of 4 tokens: 4 steps of 32 s.
    assert worth(make_plan((4,) * 64)) == pytest.approx(128, rel=1e-3)
    # One row has more left than the others: 4 of 6 steps were on 64 rows.
    plan = make_plan((4,) * 63 + (6,))
    assert worth(plan) == pytest.approx(4 * 32 + 2 * 8, rel=1e-3)
    # Rows that have no bucket of their own need the next larger one.
    assert worth(make_plan((4,) * 17)) == pytest.approx(128, rel=1e-3)
    # Nothing is accepted.
    assert worth(make_plan((4,) * 64), rate=1e-9) == pytest.approx(0, abs=1e-3)


def test_half_the_rows_on_the_same_bucket_save_nothing():
    """Half of 64 rows accept the token that is left: one step of 64 rows stays one. Of 24 rows 12
    are left, and a step of 8 s is for one of 32 s."""
    assert worth(make_plan((1,) * 64), rate=0.5) == pytest.approx(0, abs=1e-3)
    assert worth(make_plan((1,) * 24), rate=0.5) == pytest.approx(24, rel=1e-3)


def test_rows_that_wait_use_what_is_saved():
    """64 rows that share 64 places with others: 4 tokens of each are 4 steps, accepted or not."""
    busy = make_plan((4,) * 64, others=9999)
    assert worth(busy) == pytest.approx(4 * 32, rel=1e-3)
    # About half of the rows accept a token: half a step.
    busy = make_plan((1,) * 64, others=9999)
    assert worth(busy, rate=0.5) == pytest.approx(16, rel=0.1)


def test_a_verification_is_worth_what_those_behind_it_save():
    """Alone the first of two saves 4 of 8 steps, 128 s. If it costs 150 s, so does not pay, but 48
    of 64 rows are done by then, the second costs little and saves 4 steps of 8 s."""
    steps = {Point(16, 100, 1, False): 8.0, Point(64, 100, 1, False): 32.0}
    passes = {Point(64, 99, 4, False): 135.0, Point(16, 99, 4, False): 1.0}
    chooser = Speculation(StepCosts(steps | passes), make_chooser(1.0).acceptance)
    assert chooser.choose_verification([make_plan((4,) * 48 + (8,) * 16)]) is not None
    assert chooser.choose_verification([make_plan((4,) * 64)]) is None


def test_steps_of_a_deeper_cache_cost_more():
    """4 steps at the end of the first cache length, or as many in the second."""
    steps = {Point(64, slots, 1, False): seconds for slots, seconds in [(60, 1.0), (100, 10.0)]}
    costs = StepCosts(steps | {Point(64, 99, 4, False): 20.0})
    chooser = Speculation(costs, make_chooser(1.0).acceptance)
    buckets = make_buckets((64,), (60, 100))
    chosen = [
        chooser.choose_verification([make_plan((4,) * 64, buckets=buckets, **more)]) is not None
        for more in ({"held": 0}, {"held": 56}, {"held": 60}, {"others_held": 60})
    ]
    assert chosen == [False, False, True, True]


def test_good_suffix_drafts_make_a_verification_worth_less():
    """Width 4 emits 3 tokens a row for 1.5 times the seconds of a plain step."""
    chooser = make_chooser(100.0)
    chooser.costs.add(Point(64, 100, 4, True), 48.0)
    wide, plain = make_buckets(max_width=4), make_buckets()
    chooser.acceptance.reached, chooser.acceptance.accepted = [1e12] * 3, [0.0] * 3
    assert chooser.choose_verification([make_plan((4,) * 64, buckets=wide)])
    good = make_acceptance([0.9, 0.7, 0.4])
    chooser.acceptance.reached, chooser.acceptance.accepted = good.reached, good.accepted
    assert not chooser.choose_verification([make_plan((4,) * 64, buckets=wide)])
    assert chooser.choose_verification([make_plan((4,) * 64, buckets=plain)])


@pytest.mark.parametrize(("narrow", "chosen"), [(39.0, 2), (51.0, 4), (999.0, 4)])
def test_of_several_verifications_the_one_that_saves_most_for_its_seconds(narrow, chosen):
    # Everything is accepted: 4 tokens save 128 s in 100, 2 tokens 64 s.
    chooser = make_chooser(100.0)
    chooser.costs.add(Point(64, 99, 2, False), narrow)
    plans = [make_plan(verify_width=2), make_plan(verify_width=4)]
    assert chooser.choose_verification(plans).verify_width == chosen


@pytest.mark.parametrize(("packed", "sequences"), [(100.0, 0), (99.0, 24), (79.0, 24), (9.0, 24)])
def test_tries_are_verified_where_that_takes_less_than_a_prefill_and_the_rows(packed, sequences):
    """64 rows in 80 s; a prefill of 64 prompts of 4 tokens would take another 20."""
    chooser, buckets = make_chooser(80.0), make_buckets(prompt_slots=4)
    chooser.costs.add(Point(64, 4, 4, False), 20.0)
    rows = make_plan((4,) * 64, buckets=buckets)
    tries = dataclasses.replace(rows, sequences=24)
    chooser.costs.add(tries.point, packed + 0.5)
    assert chooser.choose_verification([rows, tries]).sequences == sequences


def test_tokens_in_tries_cost_what_tokens_of_rows_do_until_they_are_measured():
    costs = StepCosts({Point(64, 99, 4, False): 64 * 4.0})
    assert costs.seconds(64, 99, 4, False, 3) == pytest.approx(3 * 2 * 99)


@pytest.mark.parametrize("known", [[], [Point(64, 100, 1, False)], [Point(64, 99, 4, False)]])
def test_drafts_are_verified_at_once_until_seconds_are_known(known):
    chooser = Speculation(StepCosts(dict.fromkeys(known, 1.0)), AcceptanceCounts(1e9, 0.0))
    plans = [make_plan(verify_width=2), make_plan(verify_width=4)]
    assert chooser.choose_verification(plans) is plans[-1]


BUCKETS = make_buckets((16, 32, 64, 128), (128, 256), prompt_slots=24)


def rollout_seconds(chooser, choose, lens, right):
    """Of a batch whose drafts have `right` tokens right: verifications as they are chosen, then
    steps, each in the smallest bucket and cache that hold what is active."""
    lens_now, begun, slots, seconds = np.zeros_like(lens), 0, 0, 0.0
    verifying, costs = np.full(len(lens), True), chooser.costs
    while verifying.any():
        size, remaining = BUCKETS.rows_for(int(verifying.sum())), lens[verifying] - begun
        plans = [
            make_plan(remaining.tolist(), size, width, BUCKETS, slots or 280 + width, held=begun)
            for width in (32, 64, 96, 128)
            if not slots or 24 + begun + width <= slots
        ]
        if not plans or (plan := choose(plans)) is None:
            break
        slots, end = plan.slots, begun + plan.verify_width
        seconds += costs.seconds(size, slots, plan.verify_width, False)
        # The first that is wrong is drawn anew by the verification itself.
        lens_now = np.where(
            verifying, np.minimum(np.minimum(right, end) + (right < end), lens), lens_now
        )
        begun, verifying = end, verifying & (right >= end) & (lens > end)
    while (active := lens_now < lens).any():
        slots = BUCKETS.slots_for(int(lens_now[active].max()) + 1)
        seconds += costs.seconds(BUCKETS.rows_for(int(active.sum())), slots, 1, False)
        lens_now = lens_now + active
    return seconds


@pytest.mark.parametrize("chance", [0.01, 0.5, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999])
def test_the_choice_is_about_as_good_as_never_and_as_always(chance):
    """128 rows of long-tailed lengths, where costs and chance are known; always means to the
    drafts' end, in the narrowest verifications."""
    steps = {Point(rows, slots, 1, False): ms for (rows, slots), ms in STEPS.items()}
    costs = StepCosts(steps | {Point(*shape, False): ms for shape, ms in VERIFICATIONS.items()})
    chooser = Speculation(
        costs, AcceptanceCounts(previous_verified=1e6, previous_accepted=chance * 1e6)
    )
    rng = np.random.default_rng(15)
    lens = np.exp(rng.normal(3.5, 0.8, 128)).astype(int).clip(1, 256)
    drafts = [rng.geometric(1 - chance, 128) - 1 for _ in range(8)]

    def mean(choose):
        return np.mean([rollout_seconds(chooser, choose, lens, right) for right in drafts])

    never, always = mean(lambda plans: None), mean(lambda plans: plans[0])
    assert mean(chooser.choose_verification) <= 1.05 * min(never, always)


# Simulated runs -------------------------------------------------------------------------------

PLAN = make_plan((24,) * 128, 128, 16, make_buckets((16, 64, 128), (75,), prompt_slots=24))


def run(chooser, chance, rollouts, rng):
    """Rollouts of 32 tokens with drafts of 24, up to 16 of them verified if that seems worth it.

    Drafts that are left to decoding are verified there. Returns what was chosen, and the gain in
    expected seconds over plain rollouts.
    """
    choices, seconds, plain = [], 0.0, 32 * chooser.costs.seconds(128, 99, 1, False)
    for _ in range(rollouts):
        choice = chooser.choose_verification([PLAN]) is not None
        accepted = np.minimum(rng.geometric(1 - chance, size=128) - 1, 16)
        verified = accepted.sum() + (accepted < 16).sum()
        if choice:
            seconds += chooser.record_verification(PLAN, accepted.sum(), verified)
        # All rows are alike: the last ends where the one that accepted least does.
        steps = 32 - accepted.min() * choice
        evidence = {} if choice else {"accepted": accepted.sum(), "verified": verified}
        seconds += chooser.record_steps(chooser.plan_steps(128, 99, (1,)), steps, **evidence)
        choices.append(choice)
    return choices, rollouts * plain / seconds


def test_drafts_that_turn_are_found_out():
    """What decoding verifies tells that they turned good, and verification that they turned bad."""
    chooser, rng = Speculation(make_costs()), np.random.default_rng(8)
    choices, gain = run(chooser, 0.01, 200, rng)
    assert choices == [True] + [False] * 199  # once, by the prior
    assert gain > 0.999
    choices, gain = run(chooser, 0.9999, 100, rng)
    assert choices.index(True) <= 15
    assert all(choices[choices.index(True) :])
    assert gain > 1.1
    choices, _ = run(chooser, 0.01, 100, rng)
    assert choices.index(False) <= 30
    assert not any(choices[choices.index(False) :])
