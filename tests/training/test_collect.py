"""What a step collects: DAPO's and SPEED's batches against everything rolled out; kills."""

import dataclasses

import jax
import numpy as np
import pytest
from small_runs import assert_same_run, interrupt, records, run_until_killed, saved, small_config

from specrl_jax import train as loop
from specrl_jax.rollout.drafts.store import DraftStore
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.training import collect

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
SPEED = {
    "updates.skip_no_signal": False, "curriculum.name": "speed", "curriculum.screening": N,
    "data.prompts": 110,
}  # fmt: skip
UNSEEN = {"data.prompts": 400, "data.options.max_numbers": 3}  # no prompt comes twice
RUN_AHEAD = {
    "rollout.run_ahead": True, "rollout.accept": "match", "rollout.draft": "previous+tree",
}  # fmt: skip


@dataclasses.dataclass
class Seen:
    """What a run rolled out, and what it trained on, step by step."""

    rollouts: list  # (step, Responses)
    batches: list  # (Collected, its log-probs), as `update` will free them


def watch(config, workdir) -> Seen:
    """Train, and note every rollout and batch on the way."""
    seen, collect_metrics = Seen([], []), collect.collect_metrics

    def one_batch(run, state, batch, rollouts):
        seen.rollouts.extend((state.step, responses) for responses in rollouts)
        seen.batches.append((batch, jax.device_get(batch.rollout.tokens.policy_logprobs)))
        return collect_metrics(run, state, batch, rollouts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect, "collect_metrics", one_batch)
        loop.train(config, workdir)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory, make_mesh):
    config = small_config(CHANGES | {"reward.overlong_tokens": 6}, algorithm="dapo")
    workdir = tmp_path_factory.mktemp("dapo") / "run"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        return watch(config, workdir), workdir


def test_groups_with_signal_are_trained_on_once_with_the_log_probs_that_sampled_them(seen):
    """Some wait for a later step."""
    seen, workdir = seen
    sampled = {}
    for step, scored in seen.rollouts:
        logprobs = jax.device_get(scored.rollout.tokens.policy_logprobs)
        rewards = scored.rewards.rewards
        for q, example in enumerate(scored.prompts.examples):
            rows = slice(q * G, q * G + G)
            key = example.prompt_id, scored.tokens[rows].tobytes()
            sampled[key] = (step, logprobs[rows], rewards[rows])
    stale = 0
    for step, ((batch, logprobs), record) in enumerate(
        zip(seen.batches, records(workdir)[1:], strict=True), start=1
    ):
        tokens, lens = jax.device_get((batch.rollout.tokens.ids, batch.rollout.lens))
        assert np.ptp(batch.rewards.reshape(Q, G), axis=1).all()
        old = 0
        for q, example in enumerate(batch.prompts.examples):
            rows = slice(q * G, q * G + G)
            key = example.prompt_id, tokens[rows].tobytes()
            origin, expected_logprobs, rewards = sampled.pop(key)  # each is trained on once
            np.testing.assert_array_equal(logprobs[rows], expected_logprobs)
            np.testing.assert_array_equal(batch.rewards[rows], rewards)
            old += int(lens[rows].sum()) * (origin < step)
        assert record["rollout/stale_fraction"] == old / int(lens.sum())
        stale += old
        names = [e.prompt_id for s, x in seen.rollouts if s == step for e in x.prompts.examples]
        assert len(set(names)) == len(names)  # no prompt twice in a step
    assert stale > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "changes", "prefix"),
    [
        ("ppo", {}, "train.critic"),
        ("grpo", SPEED | {"rollout.draft": "previous+tree"}, "collector"),
        ("grpo", {"rollout.partial": 2}, "collector"),
        ("grpo", RUN_AHEAD, "collector"),
    ],
    ids=["ppo", "speed", "partial", "run ahead"],
)
def test_a_killed_run_goes_on_with_all_that_it_keeps(mesh, tmp_path, algorithm, changes, prefix):
    killed, plain, changes = tmp_path / "killed", tmp_path / "plain", CHANGES | changes
    run_until_killed(_killed, killed, algorithm, changes)
    for workdir in (killed, plain):
        loop.train(small_config(changes, algorithm=algorithm), workdir)
    assert_same_run(killed, plain, STEPS)
    arrays = [x for step in (STEPS - 1, STEPS) for x in saved(killed, step).items()]
    assert any(name.startswith(prefix) and array.any() for name, array in arrays)


def _killed(workdir, algorithm, changes):
    interrupt(MetricsLog, "write", 3)
    loop.train(small_config(changes, algorithm=algorithm), workdir)


CHOOSING_ALONE = pytest.param(False, id="to choose prompts alone", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[pytest.param(True, id="reused"), CHOOSING_ALONE])
def speed(request, tmp_path_factory, make_mesh):
    """(what was seen, work directory, responses of a group that are trained on)"""
    reuse = request.param
    changes = CHANGES | SPEED | UNSEEN | {
        "rollout.draft": "tree", "curriculum.reuse_screening": reuse, "log.rollouts": 1.0,
        "updates.mini_batch_size": 16 if reuse else 12,
    }  # fmt: skip
    workdir = tmp_path_factory.mktemp("speed") / "run"
    with jax.set_mesh(make_mesh(1, 1, 1)):
        return watch(small_config(changes), workdir), workdir, G if reuse else G - N


def _parts(seen):
    """{prompt_id: {first sample: (step, rewards, tokens)}} of everything rolled out."""
    entries = {}
    for step, scored in seen.rollouts:
        rewards = scored.rewards.rewards.reshape(-1, N)
        tokens = scored.tokens.reshape(len(rewards), N, -1)
        for q, example in enumerate(scored.prompts.examples):
            parts = entries.setdefault(example.prompt_id, {})
            assert example.first_sample not in parts
            parts[example.first_sample] = (step, rewards[q], tokens[q])
    return entries


def test_speed_trains_on_whole_groups_or_on_what_did_not_choose_them(speed):
    seen, workdir, trained = speed
    parts, stale = _parts(seen), 0
    assert {len(x.lens) for _, x in seen.rollouts} == {Q * G}
    for step, (batch, _) in enumerate(seen.batches, start=1):
        tokens, lens = jax.device_get((batch.rollout.tokens.ids, batch.rollout.lens))
        names = [e.prompt_id for e in batch.prompts.examples]
        for q, name in enumerate(names):
            rows = slice(q * trained, q * trained + trained)
            assert 0 < parts[name][0][1].mean() < 1
            rewards, expected = (
                np.concatenate([parts[name][first][i] for first in range(0, G, N)]) for i in (1, 2)
            )
            np.testing.assert_array_equal(tokens[rows], expected[G - trained :])
            np.testing.assert_array_equal(batch.rewards[rows], rewards[G - trained :])
            stale += parts[name][0][0] < step
        old = sum(  # only first parts can be of an earlier step
            lens.reshape(Q, trained)[q, : trained - (G - N)].sum()
            for q, name in enumerate(names)
            if parts[name][0][0] < step
        )
        record = records(workdir)[step]
        assert record["rollout/stale_fraction"] == old / lens.sum()
        assert ("policy/rollout_train_logprob_gap" in record) == (old == 0)
        no_signal = np.ptp(batch.rewards.reshape(Q, trained), axis=1) == 0
        assert record["reward/no_signal"] == np.mean(no_signal)
    assert stale > 0
    assert len(seen.batches) == STEPS


def test_speeds_records_number_the_samples_of_a_prompt(speed):
    seen, workdir, _ = speed
    parts = _parts(seen)
    for step in range(1, STEPS + 1):
        lines = read_rollouts(workdir, step)
        written = sorted((line["prompt_id"], line["sample"]) for line in lines)
        expected = sorted(
            (name, first + i)
            for name, entries in parts.items()
            for first, (at, _, _) in entries.items()
            for i in range(N)
            if at == step
        )
        assert written == expected


@pytest.mark.slow
def test_speed_screens_again_with_drafts_of_all_parts(mesh, tmp_path):
    """Every prompt returns; the ratio rule keeps what the same policy would sample again."""
    changes = CHANGES | SPEED | {
        "train.steps": 8, "updates.learning_rate": 0.0, "rollout.draft": "previous+tree",
        "rollout.lenience": 1.0,  # every draft is verified
    }  # fmt: skip
    seen = watch(small_config(changes), tmp_path / "run")
    names = [e.prompt_id for _, x in seen.rollouts for e in x.prompts.examples]
    assert any("+" in name and names.count(name) > 1 for name in names)
    met = set()
    for _, scored in seen.rollouts:
        draft_lens = scored.draft_lens.reshape(-1, N)
        for q, example in enumerate(scored.prompts.examples):
            assert (draft_lens[q] > 0).all() == (example.prompt_id in met)
            met.add(example.prompt_id)
    entries = records(tmp_path / "run")[1:]
    assert max(r.get("rollout/draft_accept_rate", 0) for r in entries) > 0.999


def test_without_any_signal_the_batch_is_filled_and_nothing_is_learnt(mesh, tmp_path):
    changes = CHANGES | {
        "reward.extract": "(never)", "algorithm.max_gen_batches": 2, "train.steps": 1,
        "updates.weight_decay": 0.0, "reward.overlong_tokens": 0,
    }  # fmt: skip
    loop.train(small_config(changes, algorithm="dapo"), tmp_path / "run")
    (record,) = records(tmp_path / "run")[1:]
    assert record["rollout/gen_batches"] == 2
    assert record["rollout/groups_filled"] == Q
    assert record["rollout/groups_waiting"] == 0
    assert record["reward/no_signal"] == 1
    assert record["update/grad_norm"] == 0


def test_length_costs_reward_in_the_update_alone(seen):
    """reward/mean stays the task's; the penalty is that of the batch's lengths."""
    seen, workdir = seen
    record = records(workdir)[1]
    lens = jax.device_get(seen.batches[0][0].rollout.lens)
    assert record["reward/overlong"] == pytest.approx(np.mean(lens / 6))
    rewards = np.concatenate([x.rewards.rewards for step, x in seen.rollouts if step == 1])
    assert record["reward/mean"] == pytest.approx(rewards.mean())


def test_one_read_of_the_store_serves_drafts_and_overlap(mesh, tmp_path, monkeypatch):
    reads, real = [], DraftStore.get

    def get(self, *args, step, **options):
        reads.append(step)
        return real(self, *args, step=step, **options)

    monkeypatch.setattr(DraftStore, "get", get)
    loop.train(small_config({"train.steps": 4, "rollout.adaptive": False}), tmp_path / "run")
    assert reads == [1, 2, 3, 4]
    assert records(tmp_path / "run")[-1]["rollout/overlap_rouge1"] > 0
