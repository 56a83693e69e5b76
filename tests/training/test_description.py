"""Lines at a run's start: settings that leave a part of it without effect, a rate that jumps."""

import re

import pytest
from small_runs import small_config

from specrl_jax import train as loop
from specrl_jax.training.build import build
from specrl_jax.training.description import cautions, policy_updates


def lines(changes, preset="grpo"):
    run, _ = build(small_config({"train.steps": 3} | changes, preset))
    return list(cautions(run.config, run.rollout_spec, run.total_steps))


ONE_TOKEN = " leaves one token at each position, so a group's responses are identical; set it to "


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"rollout.top_k": 1}, [f"rollout.top_k = 1{ONE_TOKEN}0"]),
        ({"rollout.top_k": 2}, []),
        ({"rollout.top_p": 1e-9}, [f"rollout.top_p = 1e-09{ONE_TOKEN}1"]),
        ({"rollout.top_p": 0.05}, [f"rollout.top_p = 0.05{ONE_TOKEN}1"]),  # 16 tokens
        ({"rollout.top_p": 0.2}, []),
    ],
)
def test_one_token_alone(mesh, changes, expected):
    assert lines(changes) == expected


def test_a_ramp_that_takes_the_whole_run(mesh):
    ramp = "updates.lr_warmup_steps"
    count = policy_updates(small_config({}), 3)
    assert lines({ramp: count - 1}) == []
    rate = {"updates.learning_rate": 1e-3}
    for warmup, share in ((count, 1.0), (2 * count, 0.5)):
        (line,) = lines(rate | {ramp: warmup})
        assert line == (
            f"updates.lr_warmup_steps = {warmup} covers all {count} updates of the policy: its "
            f"learning rate ends at {share * 1e-3:.3g} of 0.001; lower it"
        )
    (line,) = lines({"critic.lr_warmup_steps": 99}, "ppo")
    assert line.startswith("critic.lr_warmup_steps = 99 covers all ")


def test_a_longer_run_whose_rate_jumps(mesh, tmp_path, capsys):
    """One line on a longer resume; none on one that continues as planned."""
    changes = {
        "updates.lr_schedule": "linear", "updates.lr_warmup_steps": 0,
        "updates.learning_rate": 1e-3,
        "checkpoint.every": 1, "updates.skip_no_signal": False,
    }  # fmt: skip
    loop.train(small_config(changes | {"train.steps": 4}), tmp_path / "run")
    assert "learning rate" not in capsys.readouterr().out
    per_step = policy_updates(small_config(changes), 4) // 4
    config = small_config(changes | {"train.steps": 8})
    loop.train(config, tmp_path / "run")
    (line,) = re.findall("warning: the learning rate.*", capsys.readouterr().out)
    last = 1e-3 / (4 * per_step)
    assert line == (
        f"warning: the learning rate jumps from {last:.3g} in the last update to 0.0005 in the "
        "next, not to 0 as planned: updates.lr_schedule = linear now spans 8 steps"
    )
    steady = changes | {"updates.lr_schedule": "constant", "train.steps": 1}
    loop.train(small_config(steady), tmp_path / "steady")
    loop.train(small_config(steady | {"train.steps": 2}), tmp_path / "steady")
    assert "warning: the learning rate" not in capsys.readouterr().out
