"""What drafts owe to training: against log-probs row by row, and in runs with and without it."""

import dataclasses

import numpy as np
import pytest
from small_runs import records, small_config
from test_update import LEARNER, RESPONSE, _host_batch, _params, _placed, _row_scores

from specrl_jax import train as loop
from specrl_jax.selection import Sampled, Selection
from specrl_jax.sharding import put


def test_the_gap_by_hand(mesh):
    """Mean over the tokens that the policy drew itself, teacher-forced, row by row."""
    batch, rng = _host_batch(), np.random.default_rng(5)
    drawn = rng.random((4, RESPONSE)) < 0.6
    expected = []
    for row, (first, n) in enumerate(zip(batch.prompt_lens, batch.response_lens, strict=True)):
        scores, _ = _row_scores(_params(), batch.tokens[row, : first + n], first, 0.8)
        new = np.asarray(scores) - batch.old_logprobs[row, :n]
        expected += new[drawn[row, :n]].tolist()
    one = Sampled.of(_placed(batch), put(drawn, "batch", None))
    shifted = dataclasses.replace(one, logprobs=one.logprobs + 0.25)
    for size in (0, 2, 3):  # 3 does not divide the rows: all at once
        found = Selection(shifted, one, 0, True).gap(LEARNER, _params(), size)
        mean = np.mean(expected)
        assert found["selection/trained"] == pytest.approx(mean, abs=1e-5)
        assert found["selection/held_out"] == pytest.approx(mean - 0.25, abs=1e-5)
        assert found["selection/gap"] == pytest.approx(0.25, abs=1e-5)
    assert Selection(one, one, 3, False).gap(LEARNER, _params(), 0) == {}


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_a_policy_that_stays_owes_nothing(mesh, tmp_path, rate):
    """Evaluations at steps 0, 2 and 4: the first compares with the batch of step 1."""
    changes = {"evaluate.every": 2, "updates.learning_rate": rate, "updates.weight_decay": 0.0}
    loop.train(small_config(changes), tmp_path)
    found = {r["step"]: r for r in records(tmp_path)}
    assert [step for step, r in found.items() if "selection/gap" in r] == [2, 4]
    for step in (2, 4):
        one = found[step]
        gap = one["selection/trained"] - one["selection/held_out"]
        assert one["selection/gap"] == pytest.approx(gap)
        size = max(abs(one["selection/trained"]), abs(one["selection/held_out"]))
        assert size < 1e-5 if rate == 0 else size > 1e-3


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.draft": "tree", "rollout.max_width": 2, "rollout.adaptive": False},
        {"evaluate.temperature": 0.5},
        {"rollout.top_k": 3},
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_absent(mesh, tmp_path, changes):
    loop.train(small_config({"evaluate.every": 2, "train.steps": 2} | changes), tmp_path)
    assert not any("selection/gap" in r for r in records(tmp_path))
