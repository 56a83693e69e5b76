"""Dynamic sampling and SPEED: which groups a step trains on, and that none is lost."""

import dataclasses
import multiprocessing
import os
import signal

import jax
import numpy as np
import pytest
from small_runs import interrupt, records, saved, small_config

from specrl_jax import collect as gather
from specrl_jax import group_buffer as rounds
from specrl_jax import sharding
from specrl_jax import train as loop
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.telemetry.records import read_rollouts

Q, G, STEPS = 4, 8, 4
CHANGES = {
    "train.steps": STEPS, "checkpoint.every": 1, "rollout.draft": "none",
    "rollout.adaptive": False, "rollout.row_buckets": 1, "rollout.max_width": 2,
    "data.options.max_numbers": 2, "data.prompts": 80, "data.prompt_len": 6,
    # A random policy's groups differ two times in three.
    "reward.name": "small_runs:score_first_letter", "reward.extract": "",
    "updates.learning_rate": 1e-3,
}  # fmt: skip
N = 2  # responses that screen a prompt
SPEED = {"curriculum.name": "speed", "curriculum.screening": N, "data.prompts": 110}
UNSEEN = {"data.prompts": 400, "data.options.max_numbers": 3}  # no prompt comes twice


@dataclasses.dataclass
class Seen:
    """What a run rolled out, and what it trained on, step by step."""

    rounds: list
    batches: list
    waiting: list


def watch(config, workdir) -> Seen:
    """Train, and note every round and batch on the way."""
    seen, real_round, real = Seen([], [], []), rounds.play_round, gather.gather

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
        for room in (rounds, gather):
            patch.setattr(room, "play_round", one_round)
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
    assert sum(r["rollout/gen_batches"] for r in told) == len(seen.rounds)
    assert max(r["rollout/gen_batches"] for r in told) > 1
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


@pytest.mark.parametrize(
    ("algorithm", "changes", "kept"),
    [
        # Groups wait under speed too.
        pytest.param("dapo", {}, "waiting", marks=pytest.mark.slow),
        ("ppo", {}, "train.critic"),
        ("grpo", SPEED | {"rollout.draft": "previous+tree"}, "screened"),
        pytest.param(
            "grpo",
            {"curriculum.name": "mopps", "rollout.draft": "previous"},
            "store",
            marks=pytest.mark.slow,  # its state alone: test_curriculum.py
        ),
    ],
    ids=["dapo", "ppo", "speed", "mopps"],
)
def test_a_killed_run_goes_on_with_all_that_it_keeps(mesh, tmp_path, algorithm, changes, kept):
    killed, plain, changes = tmp_path / "killed", tmp_path / "plain", CHANGES | changes
    inputs = (killed, algorithm, changes)
    child = multiprocessing.get_context("spawn").Process(target=_killed, args=inputs)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    for workdir in (killed, plain):
        loop.train(small_config(changes, algorithm=algorithm), workdir)
    assert records(killed) == records(plain)
    one, other = saved(killed, STEPS), saved(plain, STEPS)
    assert one.keys() == other.keys()
    assert any(name.startswith(kept) and array.any() for name, array in one.items())
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def _killed(workdir, algorithm, changes):
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # as this process compiles
    interrupt(MetricsLog, "write", 3)
    with jax.set_mesh(sharding.make_mesh(1, 1, 1, jax.devices()[:1])):
        loop.train(small_config(changes, algorithm=algorithm), workdir)


@pytest.fixture(scope="module", params=[True, False], ids=["reused", "for selection alone"])
def speed(request, tmp_path_factory, make_mesh):
    """(what was seen, work directory, responses of a group that are trained on)"""
    reuse = request.param
    changes = CHANGES | SPEED | UNSEEN | {"rollout.draft": "tree"}
    changes["curriculum.reuse_screening"] = reuse
    changes |= {"log.rollouts": 1.0, "updates.mini_batch_size": 16 if reuse else 12}
    workdir = tmp_path_factory.mktemp("speed") / "run"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        return watch(small_config(changes), workdir), workdir, G if reuse else G - N


def _parts(seen):
    """{prompt_id: {first sample: (step, rewards, tokens)}} of all that was rolled out."""
    found = {}
    for step, one in seen.rounds:
        rewards = one.scores.rewards.reshape(-1, N)
        tokens = one.tokens.reshape(len(rewards), N, -1)
        for q, example in enumerate(one.prompts.examples):
            name, _, first = example.prompt_id.partition("+")
            parts = found.setdefault(name, {})
            assert int(first or 0) not in parts
            parts[int(first or 0)] = (step, rewards[q], tokens[q])
    return found


def test_speed_finishes_the_groups_whose_screening_was_mixed_and_no_others(speed):
    """First in first out; both phases in one rollout that always has the same number of rows."""
    seen, workdir, _ = speed
    parts = _parts(seen)
    assert {len(one.lens) for _, one in seen.rounds} == {Q * G}
    mixed = [name for name, found in parts.items() if 0 < found[0][1].mean() < 1]
    begun = [name for name, found in parts.items() if len(found) > 1]
    assert all(sorted(parts[name]) == list(range(0, G, N)) for name in begun)
    assert begun == mixed[: len(begun)]
    order = [e.prompt_id for found, _ in seen.batches for e in found.prompts.examples]
    filled = sum(r["rollout/groups_filled"] for r in records(workdir)[1:])
    assert filled == 0
    assert order == begun
    told = records(workdir)[1:]
    assert sum(r["curriculum/screened"] for r in told) == len(parts)
    assert told[-1]["curriculum/waiting"] == len(mixed) - len(begun)
    kept = sum(
        r["curriculum/kept"] * r["curriculum/screened"] for r in told if "curriculum/kept" in r
    )
    assert kept == pytest.approx(len(mixed))
    both = [  # rollouts that screen and finish
        len({"+" in e.prompt_id for e in one.prompts.examples}) == 2 for _, one in seen.rounds
    ]
    assert any(both)


def test_speed_trains_on_whole_groups_or_on_what_did_not_choose_them(speed):
    seen, workdir, trained = speed
    parts, stale = _parts(seen), 0
    for step, (found, _) in enumerate(seen.batches, start=1):
        tokens = np.asarray(jax.device_get(found.rollout.tokens)).reshape(Q, trained, -1)
        for q, example in enumerate(found.prompts.examples):
            mine = parts[example.prompt_id]
            rewards, expected = (
                np.concatenate([mine[first][i] for first in range(0, G, N)]) for i in (1, 2)
            )
            np.testing.assert_array_equal(tokens[q], expected[G - trained :])
            np.testing.assert_array_equal(
                found.rewards.reshape(Q, trained)[q], rewards[G - trained :]
            )
            stale += mine[0][0] < step
        lens = np.asarray(jax.device_get(found.rollout.lens)).reshape(Q, trained)
        names = [e.prompt_id for e in found.prompts.examples]
        old = sum(  # only first parts can be of an earlier step
            lens[q, : trained - (G - N)].sum()
            for q, name in enumerate(names)
            if parts[name][0][0] < step
        )
        told = records(workdir)[step]
        assert told["rollout/stale_fraction"] == old / lens.sum()
        assert ("policy/rollout_train_logprob_gap" in told) == (old == 0)
        flat = np.ptp(found.rewards.reshape(Q, trained), axis=1) == 0
        assert told["reward/no_signal"] == np.mean(flat)
    assert stale > 0
    assert len(seen.batches) == STEPS


def test_speeds_records_number_the_samples_of_a_prompt(speed):
    seen, workdir, _ = speed
    parts = _parts(seen)
    for step in range(1, STEPS + 1):
        lines = read_rollouts(workdir, step)
        told = sorted((line["prompt_id"], line["sample"]) for line in lines)
        expected = sorted(
            (name, first + i)
            for name, found in parts.items()
            for first, (at, _, _) in found.items()
            for i in range(N)
            if at == step
        )
        assert told == expected


def test_speed_screens_again_with_drafts_of_all_parts(mesh, tmp_path):
    """Every prompt comes again; the ratio rule keeps what the same policy would say again."""
    changes = CHANGES | SPEED | {"train.steps": 8, "updates.learning_rate": 0.0}
    changes |= {"rollout.draft": "previous+tree", "rollout.lenience": 1.0}
    seen = watch(small_config(changes), tmp_path / "run")
    names = [e.prompt_id for _, one in seen.rounds for e in one.prompts.examples]
    again = {name for name in names if names.count(name) > 1}
    assert any("+" in name for name in again)
    met = set()
    for _, one in seen.rounds:
        offered = one.outcome.draft_lens.reshape(-1, N)
        for q, example in enumerate(one.prompts.examples):
            assert (offered[q] > 0).all() == (example.prompt_id in met)
            met.add(example.prompt_id)
    found = records(tmp_path / "run")[1:]
    assert max(r.get("rollout/draft_accept_rate", 0) for r in found) > 0.999


def test_without_any_signal_the_batch_is_filled_and_nothing_is_learnt(mesh, tmp_path):
    changes = CHANGES | {
        "reward.extract": "(never)",
        "algorithm.max_gen_batches": 2,
        "train.steps": 1,
    }
    changes["updates.weight_decay"] = 0.0
    config = small_config(changes | {"reward.overlong_tokens": 0}, algorithm="dapo")
    loop.train(config, tmp_path / "run")
    (record,) = records(tmp_path / "run")[1:]
    assert record["rollout/gen_batches"] == 2
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
