"""The small rollouts that the scheduler's tests share: one layer, prompts of 6 slots, 8 tokens."""

import numpy as np
import rollout_reference as ref

from specrl_jax.rollout.engine.speculation import StepPlan

B, P, R = 32, 6, 8
NEVER = (99,)  # an end of sequence outside the vocabulary: only max_lens end a response
PROMPTS = ref.random_prompts()
MAX_LENS = np.random.default_rng(1).integers(1, R + 1, B).astype(np.int32)


def make_spec(width=1, **kwargs):
    return ref.match_spec(width, **{"eos": NEVER, "stored_logprobs": 3} | kwargs)


def run_rollout(spec, max_lens=MAX_LENS, prompts=PROMPTS, **kwargs):
    weights = ref.policy(0.0, ref.ONE_LAYER)[1]
    return ref.run(spec, weights, prompts, 1, max_lens=max_lens, **kwargs)


class Planned:
    """In the place of a `Speculation`: plan(widths, steps so far) is (width, most steps)."""

    def __init__(self, plan):
        self.plan = plan
        self.steps = 0

    def plan_steps(self, rows, widths):
        return StepPlan(*self.plan(widths, self.steps), False)

    def record_steps(self, plan, steps, histogram):
        assert len(histogram) == plan.width
        self.steps += steps
