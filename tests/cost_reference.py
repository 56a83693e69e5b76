"""Step costs and draft chances that tests of speculation share."""

import itertools

import numpy as np

from specrl_jax.rollout.adaptive.speculation import AcceptanceCounts, VerifyPlan
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts
from specrl_jax.rollout.engine.buckets import Buckets

# Relative cost of a width-W step: two cores (27M parameters, 8 rows), and a device bound by memory.
CPU = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.3, 16: 3.6, 32: 6.5, 64: 12.9, 128: 23.7}
MEMORY_BOUND = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 1.2, 32: 1.5}

# Milliseconds of 0.3M parameters on two cores: (rows, slots) of a step, and of a pass of 32 or 128.
STEPS = {
    (16, 152): 0.62, (16, 280): 0.82, (32, 152): 1.11, (32, 280): 2.0,
    (64, 152): 2.53, (64, 280): 4.0, (128, 152): 5.0, (128, 280): 7.58,
}  # fmt: skip
VERIFICATIONS = {
    (16, 56, 32): 11.3, (16, 152, 128): 28.8, (16, 312, 32): 12.2, (16, 408, 128): 46.4,
    (128, 56, 32): 44.2, (128, 152, 128): 284, (128, 312, 32): 89, (128, 408, 128): 507,
}  # fmt: skip


def make_costs(relative=CPU, rows=(1, 16, 64, 128), slots=(64, 128)) -> StepCosts:
    """A grid of plain steps and verifications of every width, and of drafting steps above 1."""
    return StepCosts(
        {
            Point(r, s, width, drafting): 1e-3 * (2 + 0.3 * r) * (1 + s / 200) * factor
            for r, s, (width, factor) in itertools.product(rows, slots, relative.items())
            for drafting in ((False, True) if width > 1 else (False,))
        }
    )


def make_acceptance(survival, row_steps=1e12) -> AcceptanceCounts:
    """So much evidence that the prior does not count: s_k = survival[k - 1]."""
    shares = [row_steps * s for s in (1.0, *survival)]
    return AcceptanceCounts(reached=shares[:-1], accepted=shares[1:])


def draw(rng, chances, row_steps, width) -> np.ndarray:
    """Histogram of accepted tokens; chances[k]: to go on after k (the last one from there on)."""
    histogram, alive = np.zeros(width, int), row_steps
    for k in range(width):
        go_on = rng.binomial(alive, chances[min(k, len(chances) - 1)]) if k < width - 1 else 0
        histogram[k], alive = alive - go_on, go_on
    return histogram


def true_survival(chances, tokens) -> list[float]:
    padded = [*chances, *[chances[-1]] * tokens]
    return list(itertools.accumulate(padded[:tokens], lambda a, b: a * b))


def make_buckets(rows=(16, 64), responses=(100,), max_width=1, prompt_slots=0) -> Buckets:
    rows = tuple(sorted(rows, reverse=True))
    sizes = (rows[0], prompt_slots, responses[-1], len(rows), len(responses))
    buckets = Buckets(*sizes, max_width=max_width)
    # These sizes, also where they do not halve.
    vars(buckets).update(rows=rows, admissions=rows, responses=responses, verify=(4,))
    return buckets


def make_plan(draft_lens=(100,) * 64, rows=64, buckets=None, slots=99, **more):
    buckets = buckets or make_buckets()
    return VerifyPlan(tuple(draft_lens), rows, slots, verify_width, buckets, **more)
