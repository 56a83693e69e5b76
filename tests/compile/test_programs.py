"""The programs of a run are known before its first step: nothing compiles later."""

import re

import jax
import pytest
import small_runs

from specrl_jax.compile import programs
from specrl_jax.process import runtime
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.train import train

TWO_DIGITS = {"data.prompts": 60, "data.options.max_numbers": 2, "data.prompt_len": 6}
TURNS = {
    "environment.name": "small_runs:QuickSums", "environment.max_turns": 3,
    "rollout.response_len": 12,
}  # fmt: skip
# Kinds of runs: changes of the small one. Drafts come in step 3 of 6, the second epoch.
KINDS = {
    "no drafts": {
        "rollout.draft": "none", "evaluate.every": 2, "algorithm.solution_coef": 1.0,
    },
    "previous": {"algorithm.importance_cap": 2.0, "rollout.max_rows": 8},
    "block": {"rollout.accept": "block", "algorithm.kl_coef": 0.1},
    "reused noise": {
        "rollout.accept": "match", "rollout.noise_epochs": 3, "evaluate.every": 2,
        "evaluate.samples": 2,
    },
    "tree and head": {
        "rollout.draft": "tree+head", "rollout.head.vocab": 8, "sft.steps": 1,
        "evaluate.every": 2,
    },
    "previous and tree": {"rollout.draft": "previous+tree", "rollout.draft_age": 2},
    "PPO": {"critic.kind": "head", "critic.critic_only_steps": 1, "evaluate.every": 2},
    "DAPO": {"algorithm.dynamic_sampling": True, "reward.overlong_tokens": 2, **TWO_DIGITS},
    "SPEED": {"curriculum.name": "speed", "curriculum.screening": 2, **TWO_DIGITS},
    "turns": TURNS | {"rollout.row_buckets": 2},
    "turns that do not wait": TURNS | {"environment.allow_unfinished": 0.3, "rollout.max_rows": 8},
    "run-ahead": {
        "rollout.run_ahead": True, "rollout.accept": "match", "rollout.draft": "previous+tree",
    },
    "partial": {"rollout.partial": 4},
    "adapters": {
        "lora.rank": 2, "algorithm.kl_coef": 0.01, "updates.old_logprobs": "recompute",
        "sft.steps": 1, "evaluate.every": 2,
    },
}  # fmt: skip
SLOW = ["previous and tree", "turns", "run-ahead", "adapters"]
RESUMED = ["PPO", pytest.param("turns", marks=pytest.mark.slow)]


def late(workdir, first: int = 1) -> dict[int, float]:
    """Programs that were built or read after the first step that this process made."""
    records = small_runs.records(workdir, times=True)
    compiled = {r["step"]: r["compile/built"] + r["compile/read"] for r in records}
    return {step: count for step, count in compiled.items() if step > first and count}


def run(changes, workdir, **more) -> None:
    config = small_runs.small_config(changes, **more)
    runtime.compile_metrics()
    train(config, workdir, hooks=StandardHooks())


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else ()) for x in KINDS]
)
def test_nothing_compiles_after_the_first_step(mesh, tmp_path, kind, capsys):
    run(KINDS[kind], tmp_path, **{"train.steps": 4})
    assert late(tmp_path) == {}
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("programs: ")]
    models = int(line.split(", ")[1].split()[0])
    wide = {"tree", "head"} & {*KINDS[kind].get("rollout.draft", "").split("+")}
    assert models <= (17 if wide else 12)


@pytest.mark.parametrize("kind", RESUMED)
def test_nothing_compiles_after_the_first_step_of_a_resumed_run(mesh, tmp_path, kind):
    """An evaluation comes a step later than the first."""
    changes = KINDS[kind] | {"checkpoint.every": 2, "evaluate.every": 4}
    run(changes, tmp_path, **{"train.steps": 2})
    jax.clear_caches()
    run(changes, tmp_path, **{"train.steps": 5})
    assert late(tmp_path, first=3) == {}


@pytest.mark.parametrize("kind", ["previous", pytest.param("SPEED", marks=pytest.mark.slow)])
def test_nothing_compiles_later_on_eight_devices(make_mesh, tmp_path, kind):
    with jax.set_mesh(make_mesh(2, 2, 2)):
        run(KINDS[kind], tmp_path, **{"train.steps": 4})
    assert late(tmp_path) == {}


@pytest.mark.parametrize(
    ("changes", "largest", "advice"),
    [
        (
            {"rollout.max_rows": 128, "rollout.group_size": 32, "updates.mini_batch_size": 8},
            "prefill",
            "rollout.max_rows, 128 now",
        ),
        (
            {"rollout.max_rows": 32},
            "update",
            r"updates.micro_batch_size \(.*no bound\) or updates.logits_chunk",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(
    mesh, tmp_path, monkeypatch, changes, largest, advice
):
    monkeypatch.setattr(programs.memory, "device_memory", lambda: (1_000.0, "this machine"))
    monkeypatch.setattr(programs.memory, "check", lambda *args, **kwargs: None)
    line = small_runs.line_of(run, changes, tmp_path)
    assert re.fullmatch(f"{largest} needs .* of a device that has .*; lower {advice}", line)
