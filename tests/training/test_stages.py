"""Which stages a batch passes, in which order."""

import pytest
from small_runs import small_config

from specrl_jax.training.choices import stages_of

EVERY = {
    "algorithm.kl_coef": 0.1, "algorithm.importance_cap": 2.0, "algorithm.mask.truncated": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["Advantages"]),
        (EVERY, ["Advantages", "WholeResponses", "ImportanceWeights", "Logprobs"]),
        ({"updates.old_logprobs": "recompute"}, ["Advantages", "Logprobs"]),
        ({"rollout.top_k": 2, "algorithm.keep_sampling_mask": True},
         ["SamplingMask", "Advantages"]),
        # Nothing is computed of what a recipe leaves out; its solutions have no log-probs.
        ({"algorithm.kl_coef": 0.1, "updates.token_budget": 20},
         ["Advantages", "TokenBudget", "Logprobs"]),
        ({"algorithm.kl_coef": 0.1, "updates.select": "outer_pairs"},
         ["Advantages", "OuterPairs", "Logprobs"]),
        ({"algorithm.kl_coef": 0.1, "algorithm.solution_coef": 1.0},
         ["Advantages", "Logprobs", "Solutions"]),
    ],
)  # fmt: skip
def test_the_configuration_settles_the_stages(changes, names):
    assert [stage.__name__ for stage in stages_of(small_config(changes))] == names
