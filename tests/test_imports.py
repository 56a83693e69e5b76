"""Holds the import table of the package: rooms import one way, heavy libraries only when used.

A rule names a room by its path below `specrl_jax/`: "losses", "models" (the folder), "rollout".
"""

import ast
import pathlib
import textwrap
from collections.abc import Iterator

import pytest

PACKAGE = "specrl_jax"
ROOT = pathlib.Path(__file__).parent.parent / PACKAGE

# What a room may import of ours; a folder may always import its own files. A room that is not
# named here is bound only by the rules below.
ALLOWED = {
    "types": set(),
    "masked": set(),
    "sharding": set(),
    "tokenizer": set(),
    "sources": set(),
    "rewards": set(),
    "environments": set(),
    "reward_pool": {"rewards", "environments"},
    "losses": {"masked"},
    "advantages": {"masked"},
    "data": {"types", "tokenizer", "sources"},
    "curriculum": {"data", "types"},
    "metrics": {"types"},
    "report": {"types"},
    "checkpoint": {"types"},
    "measure": {"types"},
    "records": {"types"},
    "compare": {"metrics", "records"},
    "models": {"sharding"},
    "policy": {"models", "sharding", "tokenizer"},
    "warmup": {"update", "models", "sharding", "masked", "types", "data", "tokenizer"},
    "runtime": {"sharding", "config"},
}
FORBIDDEN = {
    "rollout": {"rewards", "reward_pool", "environments", "advantages", "losses", "update"}
}
# The four stages of a step, and which of them a room belongs to.
STAGES = {
    "rollout": "rollout",
    "rewards": "rewards",
    "reward_pool": "rewards",
    "environments": "rewards",
    "advantages": "advantages",
    "update": "update",
}
# Only these see more than one stage: run builds the parts of what train steps through; gather,
# rounds and episodes go from prompts to rewards.
SEE_ALL = {"train", "gather", "rounds", "episodes", "evaluate", "run"}
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


def _imports(tree: ast.Module, module: tuple[str, ...]) -> Iterator[tuple[ast.stmt, str]]:
    """Every imported dotted name; `from a import b` gives a.b, as b may be a module.

    `module`: the dotted path of the folder that the file is in, to resolve `from . import x`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                base = [*module[: len(module) - node.level + 1], *base]
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


def _room(path: pathlib.PurePath) -> str:
    """losses.py -> losses; models/hf.py -> models."""
    return path.parts[0].removesuffix(".py")


def _stages(room: str) -> set[str]:
    return {STAGES[room]} if room in STAGES else set()


def violations(root: pathlib.Path) -> list[str]:
    """Every breach of the table in the package at `root`, as "file:line: what"."""
    found = []
    for path in sorted(root.rglob("*.py")):
        file = path.relative_to(root)
        tree = ast.parse(path.read_text(), str(path))
        room, stages = _room(file), _stages(_room(file))
        for statement, name in _imports(tree, (PACKAGE, *file.parent.parts)):
            first, *rest = name.split(".")
            at = f"{file.as_posix()}:{statement.lineno}:"
            if first in LAZY and not _is_lazy(tree, statement):
                found.append(f"{at} {first} is imported at module level")
            if first != PACKAGE or not rest or not _is_ours(root, rest[0]):
                continue
            other = rest[0]
            stages |= _stages(other)
            allowed = ALLOWED.get(room)
            if other != room and (
                (allowed is not None and other not in allowed)
                or other in FORBIDDEN.get(room, set())
            ):
                found.append(f"{at} {room} imports {other}")
        if len(stages) > 1 and room not in SEE_ALL:
            found.append(f"{file.as_posix()}: sees {' and '.join(sorted(stages))}")
    return found


def _is_ours(root: pathlib.Path, name: str) -> bool:
    """A module or folder of the package, not an attribute such as `__version__`."""
    return (root / name).is_dir() or (root / f"{name}.py").exists()


def test_the_package_holds_the_table():
    files = list(ROOT.rglob("*.py"))
    assert len(files) > 5
    assert violations(ROOT) == []


ROOMS = [*ALLOWED, *SEE_ALL, *STAGES, "curriculum", "config"]


@pytest.fixture
def package(tmp_path):
    """A package with the rooms of ours, empty; the function returned writes one file of it."""
    root = tmp_path / PACKAGE
    for folder in ("models", "rollout"):
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").touch()
    for name in {"__init__", *ROOMS} - {"models", "rollout"}:
        (root / f"{name}.py").touch()

    def write(file: str, source: str) -> pathlib.Path:
        (root / file).write_text(textwrap.dedent(source))
        return root

    return write


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("types.py", "from specrl_jax import masked", "types.py:1: types imports masked"),
        ("losses.py", "import specrl_jax.types", "losses.py:1: losses imports types"),
        (
            "losses.py",
            "def f():\n  from specrl_jax import data",
            "losses.py:2: losses imports data",
        ),
        ("checkpoint.py", "from .data import x", "checkpoint.py:1: checkpoint imports data"),
        ("models/hf.py", "from .. import rollout", "models/hf.py:1: models imports rollout"),
        ("models/hf.py", "from ..types import Batch", "models/hf.py:1: models imports types"),
        (
            "rollout/generate.py",
            "from specrl_jax.losses import kl",
            "rollout/generate.py:1: rollout imports losses",
        ),
        (
            "other.py",
            "from specrl_jax import rewards\nfrom specrl_jax.rollout import generate",
            "other.py: sees rewards and rollout",
        ),
        (
            "other.py",
            "from specrl_jax import reward_pool\nfrom specrl_jax import advantages",
            "other.py: sees advantages and rewards",
        ),
        (
            "rewards.py",
            "import specrl_jax.reward_pool",
            "rewards.py:1: rewards imports reward_pool",
        ),
        ("sources.py", "from specrl_jax import types", "sources.py:1: sources imports types"),
        ("measure.py", "from specrl_jax import metrics", "measure.py:1: measure imports metrics"),
        ("warmup.py", "from specrl_jax import losses", "warmup.py:1: warmup imports losses"),
        ("policy.py", "from specrl_jax import types", "policy.py:1: policy imports types"),
        ("runtime.py", "from specrl_jax import models", "runtime.py:1: runtime imports models"),
        ("update.py", "from specrl_jax import rollout", "update.py: sees rollout and update"),
        ("data.py", "import wandb.sdk as w", "data.py:1: wandb is imported at module level"),
        (
            "data.py",
            "class A:\n  from torch import nn",
            "data.py:2: torch is imported at module level",
        ),
        (
            "data.py",
            "try:\n  import gguf\nexcept ImportError:\n  pass",
            "data.py:2: gguf is imported at module level",
        ),
    ],
)
def test_a_breach_is_found(package, file, source, expected):
    assert violations(package(file, source)) == [expected]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("losses.py", "from specrl_jax import masked, __version__"),
        ("models/transformer.py", "from specrl_jax import sharding\nfrom . import kv_cache"),
        ("models/hf.py", "from specrl_jax.models import transformer\nfrom .config import x"),
        ("rollout/generate.py", "from specrl_jax import models, types, tokenizer"),
        ("train.py", "from specrl_jax import rollout, rewards, advantages, update, checkpoint"),
        ("evaluate.py", "from specrl_jax import rollout, rewards"),
        ("other.py", "from specrl_jax import rewards, types"),
        # Both are the stage of rewards.
        ("other.py", "from specrl_jax import rewards, reward_pool"),
        ("reward_pool.py", "from specrl_jax.rewards import load_scorer"),
        ("run.py", "from specrl_jax import reward_pool, rollout, update"),
        ("data.py", "def f():\n  import datasets\nimport wandb_settings"),
        ("data.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import torch"),
        # Our own rooms may be called like a library.
        ("train.py", "from specrl_jax import datasets, rewards"),
    ],
)
def test_what_the_table_allows_is_no_breach(package, file, source):
    assert violations(package(file, source)) == []
