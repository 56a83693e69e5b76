"""Solutions in place of responses."""

import jax
import numpy as np
import pytest
from small_runs import assert_same_run, line_of, records, saved, small_config

from specrl_jax import train as loop
from specrl_jax.recipes.superrl import Solutions
from specrl_jax.sharding import put
from specrl_jax.training.build import build
from specrl_jax.training.collected import Collected
from specrl_jax.types import Batch, Prompts


def test_the_solution_takes_the_last_place_of_an_unsolved_group(mesh):
    """Here the second of three: the first is solved, the third has no solution that fits."""
    run, _ = build(small_config({"algorithm.solution_coef": 1.0, "updates.mini_batch_size": 8}))
    batch = Batch(
        tokens=np.tile(np.arange(9, dtype=np.int32), (24, 1)),
        prompt_lens=np.repeat(np.array([3, 2, 1], np.int32), 8),
        response_lens=np.full(24, 6, np.int32),
        old_logprobs=np.zeros((24, 6), np.float32),
        advantages=np.ones((24, 6), np.float32),
    )
    on_mesh = jax.tree.map(lambda x: put(x, "batch", *(None,) * (x.ndim - 1)), batch)
    examples = run.prompts.examples[:3]
    stage = Solutions(run.config, run.prompts, run.responder.tokenizer)
    del stage.solutions[examples[2].prompt_id]
    rewards = np.zeros(24, np.float32)
    rewards[5] = 1
    rewards[9] = 0.5  # a part of an answer solves nothing
    collected = Collected(Prompts(None, None, None, examples), None, rewards, {}, 1, 1)
    got, _, values = stage(run, None, on_mesh, collected)
    got = jax.tree.map(np.asarray, got)
    assert values == {"update/solutions": pytest.approx(1 / 3)}
    np.testing.assert_array_equal(np.flatnonzero(got.supervised), [15])
    answer = run.responder.tokenizer.encode(examples[1].answer)
    np.testing.assert_array_equal(got.tokens[15], [0, 1, *answer, 1, *np.zeros(5), 8][:9])
    assert got.response_lens[15] == len(answer) + 1
    assert not np.any(got.advantages[15])
    others = np.arange(24) != 15
    for name in ("tokens", "response_lens", "advantages", "old_logprobs"):
        np.testing.assert_array_equal(
            getattr(got, name)[others], getattr(batch, name)[others], err_msg=name
        )


# Nothing is ever right: a solution is learned for each prompt.
UNSOLVED = {
    "reward.extract": "(x)", "train.steps": 4, "checkpoint.every": 1, "checkpoint.keep_last": 9,
}  # fmt: skip


def test_solutions_are_learned_where_nothing_is_right_and_a_resumed_run_is_the_same(mesh, tmp_path):
    changes = UNSOLVED | {"algorithm.solution_coef": 1.0, "log.rollouts": 1.0}
    loop.train(small_config(changes), tmp_path / "whole")
    steps = records(tmp_path / "whole")[1:]
    assert [r["update/solutions"] for r in steps] == [1] * 4
    assert [r["update/signal_fraction"] for r in steps] == [1 / 8] * 4
    losses = [r["policy/solution_nll"] for r in steps]
    assert losses[3] < losses[0] - 0.2
    loop.train(small_config(changes | {"train.steps": 2}), tmp_path / "parts")
    loop.train(small_config(changes), tmp_path / "parts")
    assert_same_run(tmp_path / "parts", tmp_path / "whole", 4)
    # What the first step drew, stored and wrote down does not know of solutions.
    plain = UNSOLVED | {"train.steps": 1, "log.rollouts": 1.0}
    loop.train(small_config(plain), tmp_path / "plain")
    stores = [
        {n: x for n, x in saved(tmp_path / name, 1).items() if n.startswith("store.")}
        for name in ("plain", "whole")
    ]
    assert stores[0].keys() == stores[1].keys() != set()
    for name, value in stores[0].items():
        np.testing.assert_array_equal(stores[1][name], value)
    written = [tmp_path / name / "rollouts" / "step_1.jsonl" for name in ("plain", "whole")]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_no_solution_that_fits(mesh):
    changes = {"algorithm.solution_coef": 1.0, "rollout.response_len": 1}
    assert line_of(build, small_config(changes)) == (
        "rollout.response_len must fit a solution, got 1: none of the 8 training prompts has one "
        "that fits"
    )
