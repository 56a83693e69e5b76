"""The loop on runs of seconds: what it records, and what every choice of the configuration does."""

import contextlib
import functools
import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest
from small_models import random_params
from small_runs import line_of, records, small_config

from specrl_jax import train as loop
from specrl_jax.models import hf
from specrl_jax.models.config import ModelConfig
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.telemetry.records import read_rollouts, recorded_steps
from specrl_jax.text.tokenizer import CharacterTokenizer
from specrl_jax.training import session

# Issued at every step of every run.
ALWAYS = {
    "reward/mean", "reward/std",
    "rollout/tokens_generated", "rollout/tokens_reused", "rollout/reuse_fraction",
    "rollout/prefix_len_mean", "rollout/full_reuse_ratio", "rollout/response_len_mean",
    "policy/entropy", "policy/clip_fraction", "policy/rollout_train_logprob_gap",
    "compile/built", "compile/read", "time/compile",
    "rollout/response_len_min", "rollout/response_len_max", "policy/approx_kl", "update/tokens",
    "policy/clip_fraction_low", "policy/clip_fraction_high", "data/tokens_generated", "time/total",
    "speed/tokens", "speed/tokens_generated",
    "time/step", "time/rollout", "time/prefill", "time/decode", "time/reward", "time/update",
}  # fmt: skip
WITH_DRAFTS = {"rollout/draft_accept_rate", "rollout/overlap_rouge1"}
REUSE = "rollout/reuse_fraction"


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_mesh):
    """run({"field": value}, steps=4) → the work directory; each configuration is run once.

    A run's output is in output.txt next to its directory.
    """

    @functools.cache
    def do(changes: tuple) -> pathlib.Path:
        workdir = tmp_path_factory.mktemp("run") / "it"
        with (
            open(workdir.with_name("output.txt"), "w") as output,
            contextlib.redirect_stdout(output),
            jax.set_mesh(make_mesh(1, 1, 1)),
        ):
            loop.train(small_config(dict(changes)), workdir)
        return workdir

    return lambda changes=None, **more: do(tuple(sorted(((changes or {}) | more).items())))


def _reuse(workdir) -> list[float]:
    return [record[REUSE] for record in records(workdir)[1:]]


def test_a_sum_is_trained_on_and_its_functions_are_told_apart(tmp_path, make_mesh, capsys):
    functions = ["small_runs:score_first_letter", "exact"]
    changes = {
        "reward.name": "{}*0.75+{}".format(*functions), "reward.extract": "",
        "evaluate.every": 1, "log.print_every": 2, "train.steps": 3,
    }  # fmt: skip
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(changes), tmp_path)
    start, *steps = records(tmp_path)
    means = [(r["reward/mean"], [r[f"reward/{x}"] for x in functions]) for r in steps]
    means += [
        (r["reward/eval"], [r[f"reward/eval/{x}"] for x in functions]) for r in (start, *steps)
    ]
    for total, (first, exact) in means:
        assert total == pytest.approx(0.75 * first + exact, rel=1e-6)
    assert 0 < means[0][1][0] < 1
    out = capsys.readouterr().out
    assert re.findall(r"^step (\d), a prompt: \d[<>]$", out, re.MULTILINE) == ["1", "2"]
    line = r"^  reward (\S+) \(.*_letter (\d), exact (\d)\): ?(.*)"
    shown = re.findall(line, out, re.MULTILINE)
    assert len(shown) == 4
    for reward, first, exact, text in shown:
        assert float(reward) == 0.75 * int(first) + int(exact)
        assert int(first) == text.startswith(("0", "1"))


# The log-prob gap is one of the first mini-batch, which may have no row with a signal.
ALL_ROWS = {"updates.skip_no_signal": False}
# Responses are of three tokens at each place, the update is of all.
EVALUATED = ALL_ROWS | {
    "evaluate.every": 2, "log.rollouts": 1.0, "rollout.top_k": 3, "rollout.temperature": 0.8,
}  # fmt: skip


def test_a_reward_that_scores_nothing_is_told_before_anything_compiles(tmp_path, make_mesh):
    config = small_config({"reward.name": "small_runs:never", "reward.extract": ""})
    error = r"^reward.name must score responses; small_runs:never scores neither .* 'column'$"
    with jax.set_mesh(make_mesh(1, 1, 1)), pytest.raises(ValueError, match=error):
        loop.train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_of_nothing_but_failed_rewards_stops_and_says_why(
    tmp_path, make_mesh, capfd, monkeypatch
):
    config = small_config({"reward.name": "small_runs:never", "reward.extract": ""}, steps=9)
    monkeypatch.setattr(session, "try_reward", lambda run: None)  # as if it failed later
    with (
        jax.set_mesh(make_mesh(1, 1, 1)),
        pytest.raises(ValueError, match=r"^step 3: 32 of 32 answers could not be scored, 32 of"),
    ):
        loop.train(config, tmp_path / "run")
    (warning,) = [x for x in capfd.readouterr().out.splitlines() if x.startswith("warning")]
    assert "step 1: 32 of 32 answers could not be scored, 32 of them: KeyError: 'column'" in warning
    failures = (tmp_path / "run" / "reward_failures.jsonl").read_text().splitlines()
    assert len(failures) == 3 * 32
    assert set(json.loads(failures[0])) == {"step", "task", "reason", "text"}
    assert [record["step"] for record in records(tmp_path / "run")][-1] == 2


def test_every_metric_of_every_step_once(run):
    workdir = run(EVALUATED)
    output = workdir.with_name("output.txt").read_text()
    assert "algorithm.keep_sampling_mask=True restricts them" in output
    lines = records(workdir, times=True)
    assert [r["step"] for r in lines] == [0, 1, 2, 3, 4]
    assert [r["epoch"] for r in lines] == [0, 1, 1, 2, 2]
    for record in lines[1:]:
        assert set(record) >= ALWAYS
        assert "policy/kl" not in record
        assert (record.keys() >= WITH_DRAFTS) == (record["step"] > 2)
        assert ("reward/eval" in record) == (record["step"] in (2, 4))
        assert all(math.isfinite(value) for value in record.values())
        tokens = record["rollout/tokens_generated"] + record["rollout/tokens_reused"]
        assert tokens == 32 * record["rollout/response_len_mean"]
        parts = record["time/prefill"] + record["time/decode"]
        assert parts <= record["time/rollout"] <= record["time/step"]
        assert record["policy/rollout_train_logprob_gap"] < 1e-5
    assert lines[1]["policy/entropy"] > math.log(3)  # more than three tokens can carry
    compilation = {"compile/built", "compile/read", "time/compile"}
    assert set(lines[0]) == {"step", "epoch", "reward/eval", "time/eval"} | compilation
    assert [r["data/passes"] for r in lines[1:]] == [0.5, 1.0, 1.5, 2.0]


def test_held_out_responses_are_recorded_like_those_of_the_steps(run):
    workdir = run(EVALUATED)
    rewards = {r["step"]: r["reward/eval"] for r in records(workdir) if "reward/eval" in r}
    assert recorded_steps(workdir) == [1, 2, 3, 4]
    assert recorded_steps(workdir, "eval") == [0, 2, 4]
    for step, reward in rewards.items():
        lines = read_rollouts(workdir, step, "eval")
        assert len({line["prompt_id"] for line in lines}) == 6  # those that fill the batch are not
        assert np.mean([line["reward"] for line in lines]) == pytest.approx(reward)
    trained = {line["prompt_id"] for line in read_rollouts(workdir, 1)}
    assert not trained & {line["prompt_id"] for line in lines}


def test_the_second_epoch_reuses_part_of_the_first_where_there_are_drafts(run):
    """Before it there are none: the same tokens and updates as without drafts, bit for bit."""
    first, second, third, fourth = _reuse(run())
    assert first == second == 0
    assert 0 < third < 1
    assert 0 < fourth < 1
    plain = records(run({"rollout.draft": "none"}))
    drafted = records(run())
    for record in plain[1:3] + drafted[1:3]:
        record.pop("rollout/draft_store_gib")  # without drafts it keeps no log-probs
    assert plain[:3] == drafted[:3]
    assert _reuse(run({"rollout.draft": "none"})) == [0, 0, 0, 0]
    assert plain[3]["rollout/tokens_reused"] == 0
    assert "rollout/draft_accept_rate" not in plain[3]
    assert "rollout/overlap_rouge1" in plain[3]  # it needs a last response, not a draft


def test_lenience_0_reuses_nothing_and_inf_everything(run):
    assert _reuse(run({"rollout.lenience": 0.0})) == [0, 0, 0, 0]
    whole = {"rollout.lenience": math.inf} | ALL_ROWS
    full = records(run(whole))
    for record in full[3:]:
        assert record["rollout/draft_accept_rate"] == 1
        assert record["rollout/overlap_rouge1"] == 1
    assert _reuse(run(whole)) == [0, 0, 1, 1]
    assert [r["rollout/full_reuse_ratio"] for r in full[1:]] == [0, 0, 1, 1]
    assert [r["rollout/tokens_generated"] for r in full[3:]] == [0, 0]
    # Kept tokens are scored under the policy that kept them, not the one that sampled them.
    assert all(r["policy/rollout_train_logprob_gap"] < 1e-5 for r in full[1:])


def test_delayed_reuse_waits_an_epoch_longer(run):
    reuse = _reuse(run({"rollout.draft_age": 2, "train.epochs": 3}))
    assert reuse[:4] == [0, 0, 0, 0]
    assert all(0 < fraction <= 1 for fraction in reuse[4:])


def test_the_kl_to_the_reference_starts_at_0(run):
    """One update a step: the first is made before the policy has left the reference."""
    steps = records(run({"algorithm.kl_coef": 0.5, "updates.mini_batch_size": 32}))[1:]
    kl = [record["policy/kl"] for record in steps]
    assert abs(kl[0]) < 1e-7
    assert all(value > 1e-5 for value in kl[1:])
    assert steps[0]["policy/clip_fraction"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.max_rows": 1},
         r"^rollout.max_rows must be 0 or >= mesh.data x mesh.fsdp = 2, got 1; raise it$"),
        ({"sft.batch_size": 10**9, "sft.steps": 1},
         r"^sft.batch_size must be smaller: the warm-up needs about [^\n]*, got 1000000000$"),
    ],
    ids=["rows", "activations of the warm-up"],
)  # fmt: skip
def test_what_cannot_fit_is_told_before_anything_is_done(make_mesh, tmp_path, changes, message):
    with jax.set_mesh(make_mesh(2, 1, 1)), pytest.raises(ValueError, match=message):
        loop.train(small_config(changes), tmp_path / "run", hooks=StandardHooks())
    assert not list((tmp_path / "run").glob("*.jsonl"))


def test_ids_that_no_token_has_are_never_sampled(tmp_path, make_mesh):
    """The vocabulary of a model is padded, and the padding is likelier than all tokens."""
    tokenizer = CharacterTokenizer("0123456789 <>;")
    shape = ModelConfig(
        vocab_size=32, embed_dim=16, mlp_dim=16, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=4, tie_embeddings=False,
    )  # fmt: skip
    params = random_params(shape, 0.3)
    params["lm_head"][tokenizer.vocab_size :] *= 100
    hf.save(tmp_path / "model", shape, params)
    tokenizer.save(tmp_path / "model")
    changes = {
        "model.source": str(tmp_path / "model"), "tokenizer.source": "", "train.steps": 3,
        "rollout.accept": "block", "updates.logits_chunk": 4, "log.rollouts": 1.0,
        "updates.learning_rate": 0.0,  # the policy stays
    }  # fmt: skip
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loop.train(small_config(changes | ALL_ROWS), tmp_path / "run")
    lines = [x for step in (1, 2, 3) for x in read_rollouts(tmp_path / "run", step)]
    ids = np.concatenate([line["token_ids"] for line in lines])
    assert ids.max() < tokenizer.vocab_size
    steps = records(tmp_path / "run")[1:]
    assert all(x["policy/rollout_train_logprob_gap"] < 1e-5 for x in steps)
    assert all(x["policy/entropy"] <= math.log(tokenizer.vocab_size) for x in steps)
    assert steps[-1][REUSE] > 0


@pytest.mark.parametrize(
    ("name", "is_file", "rule"),
    [
        ("", True, "a folder, but is a file"),
        ("rollouts", True, "a folder, but is a file"),
        ("checkpoints", True, "a folder, but is a file"),
        ("config.json", False, "a file, but is a folder"),
        ("reward_failures.jsonl", False, "a file, but is a folder"),
    ],
)
def test_what_is_in_the_way_is_told_before_anything_is_loaded(tmp_path, name, is_file, rule):
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    if is_file:
        path.write_text("")
    else:
        path.mkdir()
    line = line_of(loop.train, small_config(), tmp_path / "run")
    assert line == f"{path} must be {rule}; move it"
