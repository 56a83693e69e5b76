"""Rewards → updates: mini-batches in order, and a policy that waits for its critic."""

import numpy as np
import pytest
from small_runs import records, saved, small_config

from specrl_jax import learn
from specrl_jax import train as loop


def test_updates_visit_the_mini_batches_in_order(mesh, tmp_path, monkeypatch):
    """Two passes over rows 0..31 in mini-batches of 16."""
    seen, real = [], learn.update

    def update(update_spec, state, batch, packed, **options):
        seen.append(np.asarray(packed.rows))
        return real(update_spec, state, batch, packed, **options)

    monkeypatch.setattr(learn, "update", update)
    changes = {"updates.passes": 2, "updates.micro_batch_size": 8, "train.steps": 1}
    loop.train(small_config(changes), tmp_path / "run")
    rows = np.arange(32).reshape(2, 16)
    np.testing.assert_array_equal(seen, [rows[0], rows[1], rows[0], rows[1]])
    (record,) = records(tmp_path / "run")[1:]
    assert record["update/lr"] == pytest.approx(0.02)


# Some of these responses are right, some are not, so that some groups have a signal.
SOME_SIGNAL = {"reward.name": "small_runs:score_first_letter", "reward.extract": "", "seed": 3}


def test_rows_without_signal_change_nothing_but_the_work(mesh, tmp_path):
    """The same weights after a run of two steps, with these rows and without them."""
    policies, computed = {}, {}
    for skip in (False, True):
        changes = SOME_SIGNAL | {"updates.skip_no_signal": skip, "train.steps": 2}
        run = tmp_path / str(skip)
        loop.train(small_config(changes), run)
        steps = records(run)[1:]
        signal = [record["update/signal_fraction"] for record in steps]
        assert all(0 < x < 1 for x in signal) if skip else signal == [1, 1]
        computed[skip] = sum(record["update/computed_fraction"] for record in steps)
        policies[skip] = {n: x for n, x in saved(run, 2).items() if n.startswith("train.params.")}
    assert 0 < computed[True] < computed[False]
    for name, value in policies[False].items():
        np.testing.assert_allclose(policies[True][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm.kl_coef": 0.1}, {"algorithm.entropy_coef": 0.1}], ids=str
)
def test_a_step_without_any_signal(mesh, tmp_path, changes):
    """All rewards are 0. What else has a gradient, a KL or an entropy bonus, is still learned."""
    changes = {"reward.extract": "(x)", "train.steps": 1} | changes
    loop.train(small_config(changes), tmp_path / "run")
    (record,) = records(tmp_path / "run")[1:]
    assert record["update/signal_fraction"] == (1 if len(changes) > 2 else 0)
    assert ("policy/entropy" in record) == (len(changes) > 2)
    assert record["policy/loss"] == 0 or len(changes) > 2


@pytest.mark.parametrize("kind", [pytest.param("head", marks=pytest.mark.slow), "network"])
def test_the_critic_learns_first_and_leaves_nothing_in_the_policys_optimizer(mesh, tmp_path, kind):
    """In the two warm-up steps the policy and its moments stay as they are, to the bit."""
    changes = {
        "critic.kind": kind, "critic.warmup_steps": 2, "checkpoint.every": 1,
        "checkpoint.keep_last": 9, "updates.schedule_warmup": 2,
    }  # fmt: skip
    loop.train(small_config(changes, algorithm="ppo"), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    assert steps[0]["critic/value_mean"] == 0
    assert steps[1]["critic/value_mean"] != 0
    assert all(r["critic/loss"] > 0 and r["critic/grad_norm"] > 0 for r in steps)
    # Two updates a step: the schedule begins with the first step that is not frozen.
    np.testing.assert_allclose([r["update/lr"] for r in steps], [0, 0, 0.02, 0.02], rtol=1e-6)
    arrays = [saved(tmp_path / "run", step) for step in (0, 2, 4)]
    policies, moments, critics = (
        [{n: x for n, x in step.items() if n.startswith(prefix)} for step in arrays]
        for prefix in ("train.params.", "train.opt_state.", "train.critic.")
    )
    for parts in (policies, moments):
        assert all(np.array_equal(x, parts[1][n]) for n, x in parts[0].items())
        assert not all(np.array_equal(x, parts[2][n]) for n, x in parts[0].items())
    assert not any(x.any() for x in moments[1].values())
    assert not any(np.array_equal(x, critics[1][n]) for n, x in critics[0].items())
    assert ("train.critic.decoder.embed" in critics[0]) == (kind == "network")


@pytest.mark.slow
def test_a_critic_needs_no_group(mesh, tmp_path):
    changes = {"rollout.group_size": 1, "rollout.prompts_per_step": 8}
    changes |= {"updates.mini_batch_size": 8, "updates.micro_batch_size": 4, "train.steps": 2}
    changes |= {"reward.name": "small_runs:score_first_letter", "reward.extract": ""}
    changes["seed"] = 3  # some of these responses are right, some are not
    loop.train(small_config(changes, algorithm="ppo"), tmp_path / "run")
    steps = records(tmp_path / "run")[1:]
    assert [r["data/prompts_seen"] for r in steps] == [8, 16]
    assert all(r["critic/loss"] > 0 and r["update/grad_norm"] > 0 for r in steps)
