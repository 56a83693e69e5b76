"""Every pair of algorithm, drafts, acceptance rule, curriculum and rank, in runs of three steps.

The first two combinations, each of new values in most choices, are not slow.
"""

import itertools
import math

import numpy as np
import pytest
from small_runs import records, saved, small_config

from specrl_jax import train as loop

ALGORITHMS = {
    "grpo": {},
    "ppo": {},
    "dapo": {},
    "dr_grpo": {"algorithm.normalize_std": False, "algorithm.aggregation": "constant"},
    "rloo": {"algorithm.normalize_std": False, "algorithm.leave_one_out": True},
    "gspo": {"algorithm.ratio": "sequence", "algorithm.aggregation": "sequence"},
    "cispo": {"algorithm.objective": "cispo", "algorithm.clip_low": 1.0},
}
CHOICES = {
    "algorithm": tuple(ALGORITHMS),
    "rollout.accept": ("ratio", "block", "match", "random"),
    "rollout.draft": ("none", "previous", "tree", "previous+tree", "tree+head"),
    "curriculum.name": ("uniform", "speed", "mopps", "easy_to_hard"),
    "lora.rank": (0, 4),
}
SMALL = {
    "train.steps": 3, "rollout.prompts_per_step": 2, "rollout.group_size": 4,
    "rollout.row_buckets": 1, "rollout.max_width": 2, "rollout.adaptive": False,
    "rollout.stored_logprobs": 4, "curriculum.screening": 2, "algorithm.max_gen_batches": 4,
    "data.prompts": 26, "data.options.max_numbers": 2, "data.prompt_len": 6,
    "updates.mini_batch_size": 8, "updates.learning_rate": 1e-3,
    "updates.skip_no_signal": False,  # every step has a log-prob gap
    "reward.name": "small_runs:score_first_letter", "reward.extract": "",
}  # fmt: skip


def cover(choices: dict[str, tuple]) -> list[tuple]:
    """Combinations, one value of each choice, in which every pair of values is together once or
    more: always the one that adds most pairs that are missing, the first of equals."""

    def pairs(combination):
        return set(itertools.combinations(enumerate(combination), 2))

    every = list(itertools.product(*choices.values()))
    missing, chosen = set().union(*map(pairs, every)), []
    while missing:
        best = max(every, key=lambda combination: len(pairs(combination) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return chosen


COVER = cover(CHOICES)


@pytest.mark.parametrize(
    "combination",
    [pytest.param(c, marks=[pytest.mark.slow] * (i >= 1)) for i, c in enumerate(COVER)],
    ids=lambda combination: "-".join(map(str, combination)),
)
def test_three_steps(mesh, tmp_path, combination):
    values = dict(zip(CHOICES, combination, strict=True))
    algorithm = values.pop("algorithm")
    changes = SMALL | ALGORITHMS[algorithm] | values
    base = algorithm if algorithm in ("ppo", "dapo") else "grpo"
    loop.train(small_config(changes, algorithm=base), tmp_path)
    steps = records(tmp_path)[1:]
    assert [r["step"] for r in steps] == [1, 2, 3]
    assert all(math.isfinite(value) for r in steps for value in r.values())
    drafted = "previous" in values["rollout.draft"]
    assert any(r["rollout/tokens_reused"] > 0 for r in steps) <= drafted
    assert ("critic/loss" in steps[0]) == (algorithm == "ppo")
    first, last = (
        {n: x for n, x in saved(tmp_path, step).items() if n.startswith("train.policy.params")}
        for step in (0, 3)
    )
    assert any(not np.array_equal(x, last[n]) for n, x in first.items())
    # The rollout's log-probs of what this step's policy wrote are the update's.
    assert steps[0]["policy/rollout_train_logprob_gap"] < 1e-5
