"""Recipes of docs/extending.md, agents.md and python.md, saved and run as their reader would."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from small_runs import ONE_DEVICE, ROOT

from specrl_jax.telemetry.metrics import read_metrics

TEXT = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("extending", "agents"))
RECIPES = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# The presets with fewer programs to compile, and a short warm-up.
SMALL = """
import runpy

REAL = runpy.run_path({path!r})


def get_config(preset="tiny"):
    config = REAL["get_config"](preset)
    config.model.num_layers = config.rollout.row_buckets = 1
    config.sft.steps = 50
    config.reward.timeout = 60.0
    config.rollout.adaptive = False  # how wide steps are is not up to the clock
    return config
"""


def copy_configs(folder) -> None:
    """Put the configurations into `folder`, with the small presets."""
    shutil.copytree(ROOT / "configs", folder / "configs")
    (folder / "configs" / "grpo.py").write_text(SMALL.format(path=f"{ROOT}/configs/grpo.py"))


def run_recipe(text: str, folder) -> list[dict]:
    """The metrics of the run that the recipe's commands start in `folder`."""
    (folder / "launch").symlink_to(ROOT / "launch")
    copy_configs(folder)
    commands = "set -e\n"
    for language, code in BLOCK.findall(text):
        if language == "python":
            (folder / re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
        else:
            commands += code
    python = f'python() {{ "{sys.executable}" "$@"; }}\n'
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ONE_DEVICE
    subprocess.run(["bash", "-c", python + commands], cwd=folder, env=environment, check=True)
    (run,) = (folder / "runs").iterdir()
    return read_metrics(run)


def test_a_recipe(tmp_path):
    last = run_recipe(RECIPES["A recipe"], tmp_path)[-1]
    assert last["step"] == 2
    assert 0 < last["update/too_long"] < 1


def test_a_task_with_a_reward(tmp_path):
    last = run_recipe(RECIPES["A task with a reward"], tmp_path)[-1]
    assert last["step"] == 6
    assert 0 < last["reward/mean"] < 1
    assert last["reward/failed"] == 0


@pytest.mark.slow
def test_several_rewards(tmp_path):
    last = run_recipe(RECIPES["Several rewards"], tmp_path)[-1]
    exact, form, short = (last[f"reward/{name}"] for name in ("exact", "format", "digits:short"))
    assert last["reward/mean"] == pytest.approx(0.8 * exact + 0.1 * form + 0.1 * short)
    assert 0 < form <= 1
    assert 0 < short < 1
    assert last["reward/failed"] == 0


@pytest.mark.slow
def test_an_environment(tmp_path):
    recipe = RECIPES["An environment"].replace("train.steps=60", "train.steps=2")
    last = run_recipe(recipe, tmp_path)[-1]
    assert last["step"] == 2
    assert last["rollout/turns_mean"] > 1
    assert last["reward/failed"] == 0


@pytest.mark.slow
def test_a_draft_source(tmp_path):
    last = run_recipe(RECIPES["A draft source"], tmp_path)[-1]
    assert last["rollout/tokens_drafted"] > 0


@pytest.mark.slow
def test_an_acceptance_rule(tmp_path):
    last = run_recipe(RECIPES["An acceptance rule"], tmp_path)[-1]
    assert 0 < last["rollout/draft_accept_rate"] < 1
    assert 0.9 < last["policy/importance_mean"] < 1.1


@pytest.mark.slow
def test_an_advantage_with_an_objective(tmp_path):
    last = run_recipe(RECIPES["An advantage and an objective"], tmp_path)[-1]
    assert last["step"] == 6
    assert last["update/grad_norm"] > 0
    assert last["policy/clip_fraction"] == 0


def test_excerpts_are_what_the_recipes_say():
    """Each slot's lines are those of the file that the block names; "..." leaves lines out."""
    blocks = re.findall(
        r"^# (specrl_jax/recipes/\w+\.py)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL
    )
    assert len(blocks) == 7
    for path, code in blocks:
        source = (ROOT / path).read_text()
        missing = [part for part in code.split("...\n") if part.strip("\n") not in source]
        assert not missing, f"{path}: {missing}"


@pytest.mark.slow
def test_a_tracker(tmp_path):
    assert run_recipe(RECIPES["A tracker"], tmp_path)[-1]["step"] == 2
    lines = (tmp_path / "runs" / "csv" / "rewards.csv").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["0", "1", "2"]


@pytest.mark.slow
def test_a_model_family(tmp_path):
    assert run_recipe(RECIPES["A model family"], tmp_path)[-1]["step"] == 2


def run_scripts(names: list[str], folder) -> list[str]:
    """Save the files of docs/python.md in `folder`, run these in order; return what they print."""
    copy_configs(folder)
    page = (ROOT / "docs" / "python.md").read_text().replace("train.steps = 12", "train.steps = 2")
    for _, code in BLOCK.findall(page):
        (folder / re.match(r"# (\w+\.py)\n", code)[1]).write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ONE_DEVICE
    outputs = []
    for name in names:
        done = subprocess.run(
            [sys.executable, name],
            cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        outputs.append(done.stdout.splitlines()[-1])
    return outputs


def test_python_trains_and_generates(tmp_path):
    trained, generated = run_scripts(["sort.py", "ask.py"], tmp_path)
    assert trained.startswith("2 ")
    plain, again = map(int, generated.split()[:2])
    assert plain > again == 0


@pytest.mark.slow
def test_python_with_a_reward_an_environment_and_a_recipe(tmp_path):
    outputs = run_scripts(["largest.py", "open_lock.py", "with_recipe.py"], tmp_path)
    assert float(outputs[1]) > 1
    for run in ("largest", "lock", "best"):
        last = read_metrics(tmp_path / "runs" / run)[-1]
        assert last["step"] == 2
        assert last["reward/failed"] == 0
