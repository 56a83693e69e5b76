"""Step costs and draft chances that tests of the cost model share."""

import itertools

import numpy as np

from specrl_jax.rollout.adaptive.speculation import Acceptance, VerifyPlan
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts

# Relative cost of a width-W step: two cores (27M parameters, 8 rows), and a device bound by memory.
CPU = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.3, 16: 3.6, 32: 6.5, 64: 12.9, 128: 23.7}
MEMORY_BOUND = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 1.2, 32: 1.5}
ROWS, SLOTS = (1, 16, 64, 128), (64, 128)


def make_table(relative=CPU):
    """A grid; plain steps of every width (verification), matching ones of the widths above 1."""
    return StepCosts(
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


def make_pass(
    draft_lens=(100,) * 64,
    rows=64,
    verify_width=4,
    row_buckets=(16, 64),
    cache_lengths=((50, 100),),
    **more,
):
    return VerifyPlan(tuple(draft_lens), rows, 99, verify_width, row_buckets, cache_lengths, **more)
