"""Who may import whom: rooms import one way, slow libraries are imported where they are used.

A room is a path below `specrl_jax/`: a file ("learn", "algorithms/losses") or a folder ("rollout").
The rule of a file is that of the longest path that holds it. A new file of `specrl_jax/` needs one.
"""

import ast
import pathlib
import textwrap
from collections.abc import Iterator

import pytest

PACKAGE = "specrl_jax"
ROOT = pathlib.Path(__file__).parent.parent / PACKAGE

# What of ours a room may import. A folder may import its own files.
PURE = {"types", "algorithms/masked", "algorithms/losses", "algorithms/advantages"}
ALLOWED = {
    "__init__": set(),
    "types": set(),
    "sharding": set(),
    "config": set(),
    "algorithms/masked": PURE,
    "algorithms/losses": PURE,
    "algorithms/advantages": PURE,
    "algorithms": {"models", "sharding", "types"},
    "data": {"types"},
    "models": {"sharding"},
    "rewards": {"types"},
    "rollout": {"data/prompts", "models", "sharding", "types"},
    "telemetry": {"types"},
    "checkpoint": {"config", "types"},
    "cli": {"config", "runtime", "sharding"},
    "group_buffer": {"data/curriculum", "types"},
    "runtime": {"config", "sharding"},
    "warmup": {"algorithms", "data", "models", "sharding", "types"},
}
# The stages of a step, and the only rooms that may see more than one of them. These rooms import
# what they need, but none of them is imported from below.
STAGES = {"algorithms", "rewards", "rollout"}
SEE_ALL = {"train", "collect", "learn", "evaluate", "state", "build", "episodes", "benchmarks"}
# Slow to import, or needed by few: imported inside the function that uses them.
LAZY = {
    "datasets",
    "gguf",
    "huggingface_hub",
    "math_verify",
    "matplotlib",
    "reasoning_gym",
    "tensorflow_datasets",
    "torch",
    "transformers",
    "wandb",
}


def _imports(tree: ast.Module, folder: tuple[str, ...]) -> Iterator[tuple[ast.stmt, str]]:
    """Every imported dotted name; `from a import b` gives a.b, as b may be a module.

    folder: the dotted path of the file's folder, to resolve `from . import x`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = [*folder[: len(folder) - node.level + 1], *base]
            yield from ((node, ".".join([*base, alias.name])) for alias in node.names)


def _is_lazy(tree: ast.Module, statement: ast.stmt) -> bool:
    """Inside a function, or only for type checkers."""
    lazy = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(
        statement in ast.walk(node)
        for node in ast.walk(tree)
        if isinstance(node, lazy)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    )


def _module(root: pathlib.Path, name: str) -> str:
    """specrl_jax.models.hf.load → models/hf; "" for what is no module of ours, as `__version__`."""
    package, *parts = name.split(".")
    while package == PACKAGE and parts:
        path = "/".join(parts)
        if (root / path).is_dir() or (root / f"{path}.py").exists():
            return path
        parts.pop()
    return ""


def _within(path: str, rooms) -> str:
    """The longest of the rooms that holds `path`; "" for none."""
    holds = [room for room in rooms if path == room or path.startswith(f"{room}/")]
    return max(holds, key=len, default="")


def violations(root: pathlib.Path) -> list[str]:
    """Every breach of the table in the package at `root`, as "file:line: what"."""
    found = []
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        name = file.with_suffix("").as_posix()
        room = _within(name, ALLOWED.keys() | SEE_ALL)
        if not room:
            found.append(f"{file.as_posix()}: has no rule")
            continue
        tree, stages = ast.parse(path.read_text(), str(path)), {_within(name, STAGES)} - {""}
        for statement, imported in _imports(tree, (PACKAGE, *file.parent.parts)):
            at = f"{file.as_posix()}:{statement.lineno}:"
            library = imported.split(".")[0]
            if library in LAZY and not _is_lazy(tree, statement):
                found.append(f"{at} {library} is imported at module level")
            other = _module(root, imported)
            stages |= {_within(other, STAGES)} - {""}
            if other and room in ALLOWED and not _within(other, {room, *ALLOWED[room]}):
                found.append(f"{at} {room} imports {other}")
        if len(stages) > 1 and room not in SEE_ALL:
            found.append(f"{file.as_posix()}: sees {' and '.join(sorted(stages))}")
    return found


def test_the_package_holds_the_table():
    assert len(list(ROOT.rglob("*.py"))) > 5
    assert violations(ROOT) == []


def test_every_room_of_the_table_exists():
    for room in {*ALLOWED, *SEE_ALL, *STAGES}.union(*ALLOWED.values()):
        assert (ROOT / room).is_dir() or (ROOT / f"{room}.py").exists(), room


@pytest.fixture
def package(tmp_path):
    """A package with some rooms of ours, empty; the function returned writes one file of it."""
    root = tmp_path / PACKAGE
    files = ["types", "sharding", "train", "state", "warmup", "runtime", "group_buffer"]
    files += ["algorithms/losses", "algorithms/masked", "algorithms/update", "data/prompts"]
    files += ["models/hf", "models/config", "rewards/workers", "rollout/generate"]
    files += ["rollout/engine/spec", "telemetry/metrics", "telemetry/records", "evaluate"]
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"{name}.py").touch()

    def write(file: str, source: str) -> pathlib.Path:
        (root / file).write_text(textwrap.dedent(source))
        return root

    return write


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("types.py", "from specrl_jax import sharding", "types.py:1: types imports sharding"),
        (
            "algorithms/losses.py",
            "def f():\n  from specrl_jax.algorithms import update",
            "algorithms/losses.py:2: algorithms/losses imports algorithms/update",
        ),
        ("models/hf.py", "from .. import data", "models/hf.py:1: models imports data"),
        ("models/hf.py", "from ..types import Batch", "models/hf.py:1: models imports types"),
        (
            "telemetry/metrics.py",
            "import specrl_jax.data.prompts",
            "telemetry/metrics.py:1: telemetry imports data/prompts",
        ),
        ("runtime.py", "from specrl_jax import models", "runtime.py:1: runtime imports models"),
        (
            "group_buffer.py",
            "from specrl_jax.data.prompts import select",
            "group_buffer.py:1: group_buffer imports data/prompts",
        ),
        (
            "data/prompts.py",
            "from specrl_jax.state import TrainerState",
            "data/prompts.py:1: data imports state",
        ),
        ("new.py", "", "new.py: has no rule"),
        (
            "data/prompts.py",
            "import wandb.sdk as w",
            "data/prompts.py:1: wandb is imported at module level",
        ),
        (
            "data/prompts.py",
            "class A:\n  from torch import nn",
            "data/prompts.py:2: torch is imported at module level",
        ),
        (
            "data/prompts.py",
            "try:\n  import gguf\nexcept ImportError:\n  pass",
            "data/prompts.py:2: gguf is imported at module level",
        ),
    ],
)
def test_a_breach_is_found(package, file, source, expected):
    assert violations(package(file, source)) == [expected]


def test_a_stage_that_sees_another_breaks_two_rules(package):
    root = package("rollout/engine/spec.py", "from specrl_jax.rewards.workers import Scores")
    assert violations(root) == [
        "rollout/engine/spec.py:1: rollout imports rewards/workers",
        "rollout/engine/spec.py: sees rewards and rollout",
    ]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("algorithms/losses.py", "from specrl_jax.algorithms import masked\nimport specrl_jax"),
        ("algorithms/update.py", "from specrl_jax.algorithms import losses\nfrom .. import models"),
        ("models/hf.py", "from specrl_jax import sharding, __version__\nfrom . import config"),
        ("rollout/generate.py", "from specrl_jax import models, types\nfrom .engine import spec"),
        ("rollout/engine/spec.py", "from ..generate import x"),
        ("train.py", "from specrl_jax import rollout, rewards, algorithms, state"),
        ("warmup.py", "from specrl_jax.algorithms.update import update"),
        ("data/prompts.py", "def f():\n  import datasets\nimport wandb_settings"),
        ("data/prompts.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import torch"),
        # Our own modules may be called like a library.
        ("train.py", "from specrl_jax import datasets, rewards"),
    ],
)
def test_what_the_table_allows_is_no_breach(package, file, source):
    assert violations(package(file, source)) == []
