"""Whole runs with a learned draft head: resumed bit for bit, and without a trace in the policy."""

import numpy as np
import pytest
from small_runs import records, saved, small_config

from specrl_jax import train as loop

HEAD = {
    "rollout.draft": "previous+tree+head", "rollout.head.vocab": 8, "rollout.head.depth": 2,
    "rollout.adaptive": False, "rollout.max_width": 3, "rollout.row_buckets": 1, "sft.steps": 2,
    "updates.learning_rate": 1e-3, "checkpoint.every": 2, "train.epochs": 0, "train.steps": 4,
}  # fmt: skip


def train(workdir, changes):
    loop.train(small_config(changes), workdir)
    return saved(workdir, small_config(changes).train.steps)


@pytest.mark.parametrize("more", [{}, pytest.param({"lora.rank": 2}, marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(mesh, tmp_path, more):
    changes = HEAD | more
    whole = train(tmp_path / "run", changes)
    train(tmp_path / "parts", changes | {"train.steps": 2})
    resumed = train(tmp_path / "parts", changes)
    assert any(name.startswith("train.draft_head.opt_state") for name in whole)
    assert whole["train.draft_head.counts"].sum() > 0
    assert whole.keys() == resumed.keys()
    for name, x in whole.items():
        np.testing.assert_array_equal(resumed[name], x, err_msg=name)
    steps = records(tmp_path / "run")[1:]
    assert all(0 < step["draft_head/overlap"] <= 1 for step in steps)
    assert sum(step["rollout/tokens_drafted"] for step in steps) > 0
