"""Which recipe takes a slot; and that the project works without any one of them."""

import importlib
import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from small_runs import ONE_DEVICE, ROOT, one_line, records, small_config

from specrl_jax import recipes, registry
from specrl_jax.training.learn import pass_stages
from specrl_jax.training.stage import StageResult

NAMES = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def _guest(field: str, asked: bool):
    return types.SimpleNamespace(asked_by=lambda config: field if asked else "")


def _modules(*guests, slot: str = "BATCH_SOURCE"):
    return lambda: [types.SimpleNamespace(**{slot: guest}) for guest in guests]


def test_a_slot_has_what_is_asked_for(monkeypatch):
    off, on = _guest("rollout.partial", False), _guest("rollout.staleness", True)
    config = small_config()
    monkeypatch.setattr(registry, "modules", _modules(off, on))
    assert registry.chosen(config, "BATCH_SOURCE", default=None) is on
    assert registry.chosen(config, "COLLECTOR", default="whole") == "whole"  # nobody takes it
    monkeypatch.setattr(registry, "modules", _modules(off))
    assert registry.chosen(config, "BATCH_SOURCE", default="own") == "own"


def test_two_that_want_a_slot_are_refused(monkeypatch):
    guests = [_guest("rollout.partial", True), _guest("rollout.staleness", True)]
    monkeypatch.setattr(registry, "modules", _modules(*guests))
    config = small_config({"rollout.partial": 2, "rollout.staleness": 1})
    with pytest.raises(ValueError, match="rollout") as error:
        registry.chosen(config, "BATCH_SOURCE", default=None)
    assert one_line(error) == (
        "rollout.partial and rollout.staleness must not be set together, as each is the run's "
        "batch source, got 2 and 1; set one of them back"
    )


def test_a_table_has_the_choices_of_recipes(monkeypatch):
    """What a recipe imports from the core is not its own; a name is used once."""
    table = registry.Table("SIDES", {"left": 1})
    added = types.SimpleNamespace(SIDES={"right": 2}, __name__="recipes.guest")
    monkeypatch.setattr(registry, "modules", lambda: [types.SimpleNamespace(SIDES=table), added])
    assert list(table.items()) == [("left", 1), ("right", 2)]
    assert table.added == {"right": "guest"}
    table["up"] = 3  # as a user adds one
    assert table["up"] == 3
    twice = registry.Table("SIDES", {"right": 1})
    with pytest.raises(ValueError, match="SIDES must have each name once, got 'right' twice"):
        list(twice)


def test_all_that_ask_for_a_slot_have_it(monkeypatch):
    guests = [_guest("updates.token_budget", on) for on in (True, False, True)]
    monkeypatch.setattr(registry, "modules", _modules(*guests, slot="STAGE"))
    assert registry.all_chosen(small_config(), "STAGE") == [guests[0], guests[2]]


def test_each_recipe_has_a_row():
    """With its lines, to the nearest ten or so."""
    table = (ROOT / "specrl_jax" / "recipes" / "README.md").read_text()
    rows = dict(re.findall(r"^\| \[(\w+)\.py\].*\| (\d+) \|$", table, re.MULTILINE))
    lengths = {}
    for name in NAMES:
        path = ROOT / "specrl_jax" / "recipes" / f"{name}.py"
        lengths[name] = len(path.read_text().splitlines())
    assert {name: int(lines) for name, lines in rows.items()} == pytest.approx(lengths, abs=15)


# Words of recipes.
GUESTS = re.compile(
    r"run.?ahead|\bforks?\b|staleness|partial.?(rows|rollout)|treepo|copris|dynamic.?sampling"
    r"|\bscreen|gdpo|\bdpo\b|preference|superrl|shuffle.?r1|outer_pairs|c3po|mopps|e2h"
    r"|easy_to_hard|solution_coef|token_budget|turn_discount|prefix_relative|distill|teacher"
    r"|score.?centering|dppo",
    re.IGNORECASE,
)
CORE = (
    "train.py", "types.py", "settings.py", "training", "rollout", "algorithms", "config",
    "command_line", "agents/settings.py", "data/curriculum.py", "data/settings.py",
    "models/settings.py", "rewards/settings.py",
)  # fmt: skip


def test_the_core_names_no_recipe():
    package = ROOT / "specrl_jax"
    files = [x for name in CORE for x in (package / name, *(package / name).rglob("*.py"))]
    named = {
        f"{file.relative_to(package)}: {word[0]}"
        for file in files
        if file.is_file()
        for word in GUESTS.finditer(file.read_text())
    }
    assert not named


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_project_works_without_it(tmp_path, name):
    """A copy whose file is deleted: a run of two steps, the help and who imports whom."""
    for folder in ("specrl_jax", "configs", "launch", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "specrl_jax" / "recipes" / f"{name}.py").unlink()
    path = os.pathsep.join(map(str, (tmp_path, tmp_path / "tests")))
    env = os.environ | ONE_DEVICE | {"PYTHONPATH": path}

    def run(*command: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    there = run("-c", "import specrl_jax; print(specrl_jax.__file__)")
    assert pathlib.Path(there.strip()).is_relative_to(tmp_path)
    run(
        "launch/train.py", "--config=tests/small_runs.py", "--workdir=run",
        "--config.train.steps=2",
    )  # fmt: skip
    assert [line["step"] for line in records(tmp_path / "run")] == [0, 1, 2]
    help_text = run("launch/train.py", "--help")
    assert "--workdir" in help_text
    declared = getattr(importlib.import_module(f"specrl_jax.recipes.{name}"), "SECTIONS", ())
    fields = {field: row.default for section in declared for field, row in section.paths().items()}
    assert not [field for field in fields if f"--config.{field}=" in help_text]
    for field, value in list(fields.items())[:1]:
        flag = f"--config.{field}={value}"
        line = run("launch/train.py", "--config=tests/small_runs.py", flag, code=2)
        assert line.startswith(f"error: {field} is not a field of the config")
        assert line.count("\n") == 1
    run("-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", "tests/test_imports.py")


@pytest.mark.parametrize(
    ("name", "code", "cause"),
    [
        ("nobody_has_this", "", "ModuleNotFoundError: No module named 'nobody_has_this'"),
        ("broken_recipe", "x = nothing", "NameError: name 'nothing' is not defined"),
    ],
)
def test_a_recipe_that_cannot_be_imported_is_one_line(name, code, cause, tmp_path, monkeypatch):
    if code:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="recipes must name modules") as error:
        registry.load(name)
    assert one_line(error).endswith(f"got {name!r}: {cause}")
    assert registry.loaded() == ()


def test_a_slot_that_does_not_exist_is_refused(tmp_path, monkeypatch):
    code = "class COLECTOR:\n    asked_by = staticmethod(lambda config: '')\n"
    (tmp_path / "misspelt.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    line = r"misspelt\.COLECTOR must have the name of a slot \(COLLECTOR, .*\), as it has asked_by"
    with pytest.raises(ValueError, match=line):
        registry.load("misspelt")
    assert registry.loaded() == ()


def test_two_stages_that_order_rows_are_refused():
    batch = types.SimpleNamespace(tokens=np.zeros((4, 2)))

    def stages(*orders):
        made = [lambda run, state, batch, _, ids=ids: StageResult(batch, ids) for ids in orders]
        return types.SimpleNamespace(stages=made)

    reverse = np.arange(4)[::-1]
    assert pass_stages(stages(None, reverse), None, batch, None).row_ids is reverse
    for orders in ((reverse, reverse), (reverse[:2],)):
        with pytest.raises(ValueError, match="row_ids must be 4 ids of one stage, got ") as error:
            pass_stages(stages(*orders), None, batch, None)
        assert one_line(error).endswith("set response_lens to 0 to leave a row out")
