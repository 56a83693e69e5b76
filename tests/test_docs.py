"""Names in the documents exist, and the site of them builds."""

import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from small_runs import ONE_DEVICE, ROOT, preset

from specrl_jax.command_line import cli
from specrl_jax.config import flatten
from specrl_jax.reports import sweep
from specrl_jax.settings import schema
from specrl_jax.training.workdir import may_change

SCHEMA = schema()

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_field_that_is_named_exists(path):
    config = runpy.run_path(str(ROOT / "configs" / "grpo.py"))["get_config"]("tiny")
    fields = dict(flatten(config))
    sections = "|".join(sorted({name.partition(".")[0] for name in fields} - {"seed"}))
    text = path.read_text()
    named = set(re.findall(r"--config\.([a-z_][\w.]*)=", text))
    named |= set(re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*| = [^`]*)?`", text))
    left_out = (".py", ".json", ".jsonl")  # and what users name themselves
    own = (*SCHEMA.options, *re.findall(r'Section\("(\w+)"', text))
    named = {x for x in named if not x.endswith(left_out) and not x.startswith(own)}
    assert named <= fields.keys() | {name.rpartition(".")[0] for name in fields}


def _defined() -> set[str]:
    """What is defined in the package: NAME, MODULE.NAME, CLASS.NAME."""
    names = set()
    for path in (ROOT / "specrl_jax").rglob("*.py"):
        tree = ast.parse(path.read_text())
        parents = [(path.stem, tree), *((x.name, x) for x in tree.body if hasattr(x, "bases"))]
        for parent, node in parents:
            inside = {x.name for x in node.body if hasattr(x, "name")}
            assigned = [x.targets for x in node.body if isinstance(x, ast.Assign)]
            assigned += [[x.target] for x in node.body if isinstance(x, ast.AnnAssign)]
            inside |= {x.id for targets in assigned for x in targets if hasattr(x, "id")}
            names |= inside | {f"{parent}.{name}" for name in inside}
    return names


def test_a_step_in_code_names_what_exists():
    """Each line: a name, the file that defines it, and what it returns."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    calls = re.search(r"^## The calls of one step\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
    lines = re.findall(r"^ *(\w+(?:\.\w+)?)  +([\w/]+\.py)(.*)$", calls, re.MULTILINE)
    blocks = "".join(code for _, code in BLOCK.findall(calls))
    assert len(lines) == len(blocks.splitlines()) > 40
    for name, file, _ in lines:
        tree = ast.parse((ROOT / "specrl_jax" / file).read_text())
        of_classes = {
            f"{node.name}.{x.name}"
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            for x in node.body
            if isinstance(x, ast.FunctionDef)
        }
        stem = file.rpartition("/")[2].removesuffix(".py")
        top = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert name in of_classes | top | {f"{stem}.{x}" for x in top}, (name, file)


def test_a_step_in_code_names_types_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = r"^## The types that a token passes through\n\n(.*?)\n\n"
    table = re.search(section, text, re.MULTILINE | re.DOTALL)[1].splitlines()[2:]
    assert len(table) == 10
    named = {name for row in table for name in re.findall(r"`([^`]+)`", row)}
    assert named <= _defined()


def commands(path) -> list[list[str]]:
    """The commands of a document's shell blocks, as words."""
    blocks = [code for language, code in BLOCK.findall(path.read_text()) if language == "bash"]
    lines = "\n".join(blocks).replace("\\\n", " ").replace("&&", "\n").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.filterwarnings("ignore:the load_module.. method:DeprecationWarning")  # absl's
@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_programs_exist_and_training_commands_are_accepted(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(path):
        if words[0] == "python" and words[1].startswith("launch/"):
            assert (ROOT / words[1]).exists()
        own_recipe = any(word.startswith("--config.recipes=") for word in words)
        if words[:2] == ["python", "launch/train.py"] and not own_recipe:  # test_extending runs it
            fields = [word for word in words[2:] if word.startswith("--config")]
            given = [word.removeprefix("--config.").partition("=")[0] for word in fields[1:]]
            SCHEMA.validate(cli.read_config(fields), given)
        if words[:2] == ["python", "launch/sweep.py"]:
            program = runpy.run_path("launch/sweep.py")
            args, rest = program["parser"]().parse_known_args(words[2:])
            shared = [word for word in rest if word.startswith("--config.")]
            assert sweep.training_runs(program["_cases"](args), [0], args.workdir, shared)


def test_the_readmes_reward():
    names = {}
    (code,) = (c for kind, c in BLOCK.findall((ROOT / "README.md").read_text()) if kind == "python")
    exec(code, names)
    for right, texts in ((1, ["7 + 5 = 12.", "12", "It is 12 apples."]), (0, ["112", "12 or 13"])):
        for text in texts:
            assert names["score"](response=text, answer="12", task="", metadata={}) == right


def test_the_tutorials_task(tmp_path):
    (code,) = (c for kind, c in BLOCK.findall(TUTORIAL) if kind == "python")
    (tmp_path / "sums.py").write_text(code)
    subprocess.run([sys.executable, "sums.py"], cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    score = runpy.run_path(str(tmp_path / "sums.py"))["score"]
    assert {"question": "What is 7 + 5?", "answer": "12"} in rows
    assert score("7 + 5 = 12.", "12", "sums", {}) == 1
    assert score("7 + 5 = 13", "12", "sums", {}) == score("", "12", "sums", {}) == 0


@pytest.mark.slow
@pytest.mark.smollm2
def test_the_tutorial_from_the_first_to_the_last_command(tmp_path, monkeypatch):
    """Unchanged, except for fewer steps."""
    for folder in ("launch", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (code,) = (c for kind, c in BLOCK.findall(TUTORIAL) if kind == "python")
    (tmp_path / "sums.py").write_text(code)
    environment = os.environ | ONE_DEVICE | {"PYTHONPATH": str(ROOT)}
    for words in commands(ROOT / "docs" / "tutorial.md"):
        if words[0] == "python":
            trains = words[1] in ("launch/train.py", "launch/sweep.py")
            few = ["--config.train.steps=2"] * trains
            short = ["--samples=1", "--limit=4"] * (words[1] == "launch/evaluate.py")
            kept = [word for word in words[1:] if not word.startswith("--config.train.epochs=")]
            command = [sys.executable, *kept, *few, *short]
            subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "runs" / "sums" / "report.html").exists()
    assert (tmp_path / "runs" / "lenience" / "report.html").exists()
    assert (tmp_path / "policy" / "config.json").exists()


@pytest.mark.parametrize("file", ["grpo", "ppo", "dapo", "multiturn", "tool"])
def test_a_preset_says_its_command_and_what_to_expect(file):
    path = f"configs/{file}.py"
    module = runpy.run_path(str(ROOT / path))
    texts = {path: module["__doc__"]} if file != "grpo" else {}
    for name, change in module.get("PRESETS", {}).items():
        texts[path if name == "tiny" else f"{path}:{name}"] = change.__doc__
    for command, text in texts.items():
        assert f"python launch/train.py --config={command}" in text
        for words in ("xpect", "easured"):
            assert words in text, command


def test_every_field_is_a_line_of_its_page():
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    page = (ROOT / "docs" / "fields.md").read_text()
    assert page == hooks["fields_page"](), "run python docs/hooks.py"
    for name, row in SCHEMA.fields.items():
        assert f"\n{name} = {row.default!r}  # {row.comment}" in page
        assert row.comment


def test_the_generated_pages_have_every_field_and_metric():
    pages = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["PAGES"]
    configuration, metrics = pages["configuration.md"](), pages["metrics.md"]()
    for field, _ in flatten(preset("tiny")):
        assert f"{{ #{field} }}" in configuration
    row = "| `lenience`{ #rollout.lenience } | `1.0` | number, >= 0 | ℓ >= 0 of ratio: "
    assert row in configuration.replace("&lt;", "<")
    assert "| `reward/mean` | mean reward of the step's responses | reward |" in metrics


def test_the_site_builds_and_loads_nothing(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"--site-dir={tmp_path}"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link|iframe)[^>]* (?:src|href)=\"?([^\" >]+)", page.read_text()
        )
        assert not [address for address in loaded if re.match(r"(https?:)?//", address)]


def test_what_may_change_after_a_stop_is_what_the_code_lets_change():
    guide = (ROOT / "docs" / "guide.md").read_text()
    listed = re.search(r"`train`, .*?`evaluate\.\{.*?\}`", guide, re.DOTALL)
    fields = set()
    for section, names in re.findall(r"`([a-z_.]+)(?:\{([a-z_,]+)\})?`", listed[0]):
        fields |= {section + field for field in names.split(",")}
    assert fields == set(may_change())
