"""Dynamic sampling: which groups a step trains on, under which law, and that none is lost."""

import dataclasses
import multiprocessing
import os
import signal

import jax
import numpy as np
import pytest
from small_runs import interrupt, records, saved, small_config

from specrl_jax import gather, sharding
from specrl_jax import train as loop
from specrl_jax.metrics import MetricsLog

Q, G, STEPS = 4, 8, 4
CHANGES = {
    "train.steps": STEPS, "checkpoint.every": 1, "rollout.draft": "none",
    "data.options.max_numbers": 2, "data.prompts": 80, "data.prompt_len": 6,
    # A random policy's groups differ two times in three.
    "reward.name": "small_runs:score_first_letter", "reward.extract": "",
    "updates.learning_rate": 1e-3,
}  # fmt: skip


@dataclasses.dataclass
class Seen:
    """What a run rolled out, and what it trained on, step by step."""

    rounds: list
    batches: list
    waiting: list


def watch(config, workdir) -> Seen:
    """Train, and note every round and batch on the way."""
    seen, real_round, real = Seen([], [], []), gather._round, gather.gather

    def one_round(run, state, *rest):
        found = real_round(run, state, *rest)
        seen.rounds.append((state.step, found))
        return found

    def batch(run, state):
        found = real(run, state)
        logprobs = jax.device_get(found.rollout.policy_logprobs)
        seen.batches.append((found, logprobs))
        seen.waiting.append(state.waiting.prompt_ids)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_round", one_round)
        patch.setattr(loop, "gather", batch)
        loop.train(config, workdir)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory, make_mesh):
    config = small_config(CHANGES, algorithm="dapo")
    workdir = tmp_path_factory.mktemp("dapo") / "run"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        return watch(config, workdir), workdir


def _groups(rewards) -> np.ndarray:
    return np.asarray(rewards).reshape(-1, G)


def test_every_group_of_a_batch_has_signal_and_each_is_trained_on_once_in_order(seen):
    seen, workdir = seen
    rolled = [
        (found.prompts.examples[q].prompt_id, step, group.tolist())
        for step, found in seen.rounds
        for q, group in enumerate(_groups(found.scores.rewards))
        if np.ptp(group) > 0
    ]
    trained = [
        (example.prompt_id, group.tolist())
        for found, _ in seen.batches
        for example, group in zip(found.prompts.examples, _groups(found.rewards), strict=True)
    ]
    assert len(trained) == STEPS * Q
    assert trained == [(name, group) for name, _, group in rolled[: STEPS * Q]]
    assert [name for name, _, _ in rolled[STEPS * Q :]] == list(seen.waiting[-1])
    assert any(seen.waiting)
    told = records(workdir)[1:]
    assert [r["rollout/groups_waiting"] for r in told] == [len(x) for x in seen.waiting]
    assert sum(r["rollout/rounds"] for r in told) == len(seen.rounds)
    assert max(r["rollout/rounds"] for r in told) > 1
    assert not any(r["rollout/groups_filled"] for r in told)


def test_a_waiting_group_keeps_the_log_probs_of_the_policy_that_sampled_it(seen):
    seen, workdir = seen
    sampled = {}
    for step, found in seen.rounds:
        rollout = jax.device_get(found.outcome.rollout)
        for q, example in enumerate(found.prompts.examples):
            rows = slice(q * G, q * G + G)
            sampled[example.prompt_id, found.tokens[rows].tobytes()] = (
                step,
                rollout.policy_logprobs[rows],
            )
    stale = 0
    for step, ((found, logprobs), record) in enumerate(
        zip(seen.batches, records(workdir)[1:], strict=True), start=1
    ):
        tokens, lens = jax.device_get((found.rollout.tokens, found.rollout.lens))
        old = 0
        for q, example in enumerate(found.prompts.examples):
            rows = slice(q * G, q * G + G)
            origin, expected = sampled[example.prompt_id, tokens[rows].tobytes()]
            np.testing.assert_array_equal(logprobs[rows], expected)
            old += int(lens[rows].sum()) * (origin < step)
        assert record["rollout/stale_fraction"] == old / int(lens.sum())
        stale += old
    assert stale > 0


def test_no_prompt_is_rolled_out_twice_in_a_step(seen):
    seen, _ = seen
    for step in range(1, STEPS + 1):
        names = [e.prompt_id for s, x in seen.rounds if s == step for e in x.prompts.examples]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(("algorithm", "kept"), [("dapo", "waiting"), ("ppo", "train.critic")])
def test_a_killed_run_goes_on_with_all_that_its_algorithm_keeps(mesh, tmp_path, algorithm, kept):
    killed, plain = tmp_path / "killed", tmp_path / "plain"
    child = multiprocessing.get_context("spawn").Process(target=_killed, args=(killed, algorithm))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    for workdir in (killed, plain):
        loop.train(small_config(CHANGES, algorithm=algorithm), workdir)
    assert records(killed) == records(plain)
    one, other = saved(killed, STEPS), saved(plain, STEPS)
    assert one.keys() == other.keys()
    assert any(name.startswith(kept) and array.any() for name, array in one.items())
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def _killed(workdir, algorithm):
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # as this process compiles
    interrupt(MetricsLog, "write", 3)
    with jax.set_mesh(sharding.make_mesh(1, 1, 1, jax.devices()[:1])):
        loop.train(small_config(CHANGES, algorithm=algorithm), workdir)


def test_without_any_signal_the_batch_is_filled_and_nothing_is_learnt(mesh, tmp_path):
    changes = CHANGES | {"reward.extract": "(never)", "algorithm.max_rounds": 2, "train.steps": 1}
    changes["updates.weight_decay"] = 0.0
    config = small_config(changes | {"reward.overlong_tokens": 0}, algorithm="dapo")
    loop.train(config, tmp_path / "run")
    (record,) = records(tmp_path / "run")[1:]
    assert record["rollout/rounds"] == 2
    assert record["rollout/groups_filled"] == Q
    assert record["rollout/groups_waiting"] == 0
    assert record["reward/no_signal"] == 1
    assert record["update/grad_norm"] == 0


def test_length_costs_reward_in_the_update_alone(mesh, tmp_path):
    """reward/mean stays the task's; the penalty is that of the batch's lengths."""
    config = small_config(
        CHANGES | {"train.steps": 1, "reward.overlong_tokens": 6}, algorithm="dapo"
    )
    seen = watch(config, tmp_path / "run")
    (record,) = records(tmp_path / "run")[1:]
    ((found, _),) = seen.batches
    lens = np.asarray(jax.device_get(found.rollout.lens))
    assert record["reward/overlong"] == pytest.approx(np.mean(lens / 6))
    rewards = np.concatenate([x.scores.rewards for _, x in seen.rounds])
    assert record["reward/mean"] == pytest.approx(rewards.mean())
