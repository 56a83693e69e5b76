"""Who may import whom: modules import one way. The linter keeps slow libraries inside functions.

A module is a path below `specrl_jax/`: a file ("algorithms/losses") or a folder ("rollout"). The
rule of a file is that of the longest path that contains it. A new file of `specrl_jax/` needs one.
"""

import ast
import graphlib
import pathlib
import re
from collections.abc import Iterator

import pytest

PACKAGE = "specrl_jax"
ROOT = pathlib.Path(__file__).parent.parent / PACKAGE

PURE = {
    "types", "algorithms/masked", "algorithms/corrections", "algorithms/losses",
    "algorithms/advantages", "algorithms/evidence", "algorithms/terms", "config/fields",
    "registry",
}  # fmt: skip
# What of ours a module may import. A folder may import its own files.
ALLOWED = {
    "__init__": set(),
    "abstract": {"sharding"},
    "hosts": set(),
    "inputs": set(),
    "packing": set(),
    "sharding": {"hosts"},
    "types": {"sharding"},
    "algorithms": {
        "abstract", "config/fields", "hosts", "models", "packing", "registry",
        "sharding", "types",
    },
    "algorithms/masked": PURE,
    "algorithms/corrections": PURE,
    "algorithms/losses": PURE,
    "algorithms/terms": PURE | {"models/config", "models/transformer"},
    "algorithms/advantages": PURE,
    "algorithms/evidence": {"config/fields", "types"},
    "config": set(),
    "data": {
        "agents/environments", "agents/textarena_games", "agents/verifiers_tasks", "inputs",
        "registry", "rewards/scorers", "text", "types",
    },
    "models": {"hosts", "inputs", "registry", "sharding"},
    "process": {
        "command_line", "config", "hosts", "inputs", "registry", "settings", "sharding",
    },
    "process/hardware": set(),
    "training/workdir": {
        "config", "process/checkpoint", "reports", "rewards/failures", "settings", "telemetry",
    },
    "rewards": {"inputs", "sandbox", "types"},
    "sandbox": {"inputs"},
    "rollout/__init__": set(),
    "rollout/emitted": set(),
    "rollout/sampling": {"models", "sharding", "types"},
    "rollout/fused_sampling": {"models", "rollout/sampling", "sharding", "types"},
    "rollout/acceptance": {"registry",
        "models", "rollout/block", "rollout/fused_sampling", "rollout/sampling", "types",
    },
    "rollout/block": {"models", "rollout/sampling"},
    "rollout/rows": {"abstract", "models", "sharding", "types"},
    "rollout/drafts": {
        "abstract", "config/fields", "registry", "rollout/rows", "rollout/stop_strings", "sharding",
        "types",
    },
    "rollout/drafts/learned": {"models", "rollout/rows", "rollout/sampling", "sharding"},
    "rollout/stop_strings": {"sharding"},
    "rollout/reused_noise": {"types"},
    "rollout/requests": {"rollout/drafts", "rollout/sampling", "types"},
    "rollout/spec": {
        "config/fields", "models", "rollout/acceptance", "rollout/drafts", "rollout/engine/buckets",
        "rollout/sampling", "rollout/stop_strings", "sharding", "types",
    },
    "rollout/engine": {
        "abstract", "hosts", "models", "packing", "rollout/acceptance",
        "rollout/block", "rollout/drafts", "rollout/emitted", "rollout/fused_sampling",
        "rollout/requests", "rollout/rows", "rollout/sampling", "rollout/spec",
        "rollout/stop_strings", "sharding", "types",
    },
    "text": {"inputs", "models/gguf"},
    "rollout/generate": {"hosts", "models", "rollout", "types"},
    "rollout/verification": {"hosts", "models", "rollout", "sharding", "types"},
    "agents": {
        "abstract", "hosts", "inputs", "models", "responses", "rewards", "rollout", "sandbox",
        "sharding", "telemetry/metrics", "text", "types",
    },
    "agents/turns": {"abstract", "hosts", "models", "rollout", "sharding", "types"},
    "telemetry": {"inputs", "registry", "types"},
    "evaluation": {
        "config", "data", "inputs", "models", "process", "registry", "rollout", "settings",
        "sharding", "telemetry", "text", "types",
    },
    "training/warmup": {"algorithms", "data", "hosts", "models", "sharding", "text", "types"},
    "training/run_log": {
        "data/prompts", "hosts", "inputs", "process/runtime", "responses", "rewards/failures",
        "telemetry", "training/collected", "training/run", "types",
    },
    "training/collected": {"responses", "types"},
    "training/hooks": {"models/config", "training/run", "training/run_log", "training/state"},
    "training/session": {
        "config", "hosts", "models", "process", "telemetry", "training",
    },
    "train": {
        "hosts", "models", "process/stop", "responses", "rollout", "sharding", "training",
    },
    "registry": {"config", "recipes"},
    "settings": {"algorithms", "config", "registry"},
    "command_line": {"config", "inputs", "registry", "settings"},
}  # fmt: skip
# What a room declares of a configuration: kinds and conditions, and its own tables.
ROOMS = ("agents", "algorithms", "data", "models", "rewards", "rollout", "training")
ALLOWED |= {f"{room}/settings": {"config", "inputs", room} for room in ROOMS}
ALLOWED["settings"] |= {f"{room}/settings" for room in ROOMS}
ALLOWED["algorithms/settings"] |= {"models/transformer", "packing"}
ALLOWED["data/settings"] |= {"text/tokenizer"}
ALLOWED["training/settings"] |= {"telemetry/tracking"}
# The stages of a step, and the only modules that may see more than one of them. They import what
# they need, but none of them is imported from below.
STAGES = {"algorithms", "rewards", "rollout"}
SEE_ALL = {
    "standard_hooks", "responses", "settings", "training", "recipes", "agents", "compile",
    "benchmarks", "reports",
    "evaluation/eval_tasks", "evaluation/play",
}  # fmt: skip


_NAMED = re.compile(rf"({PACKAGE}(?:\.\w+)+)(?::\w+)?")


def _imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported; `from a import b` gives a.b, which may be a
    module. No import is relative: the linter checks that. A text that names one of our modules, as
    "package.module:function", is an import too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and (named := _NAMED.fullmatch(str(node.value))):
            yield node.lineno, named[1]


def _module(files, name: str) -> str:
    """specrl_jax.models.hf.load → models/hf; "" for anything that is not our module."""
    package, *parts = name.split(".")
    paths = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)] if package == PACKAGE else []
    return next((path for path in paths if any(_within(file, [path]) for file in files)), "")


def _within(path: str, modules) -> str:
    """The longest of the modules that contains `path`; "" for none."""
    holds = [module for module in modules if path == module or path.startswith(f"{module}/")]
    return max(holds, key=len, default="")


def violations(files: dict[str, str]) -> list[str]:
    """Every breach of the table by these files, {path: source}, as "file:line: what"."""
    breaches = []
    for file, source in sorted(files.items()):
        module = _within(file, ALLOWED.keys() | SEE_ALL)
        if not module:
            breaches.append(f"{file}: has no rule")
        stages = {_within(file, STAGES)}
        for line, imported in _imports(source):
            other = _module(files, imported)
            stages.add(_within(other, STAGES))
            if other and module in ALLOWED and not _within(other, {module, *ALLOWED[module]}):
                breaches.append(f"{file}:{line}: {module} imports {other}")
            if _within(other, {"recipes"}) and other != "recipes":
                breaches.append(f"{file}:{line}: names a recipe")
        stages -= {""}
        if len(stages) > 1 and module not in SEE_ALL:
            breaches.append(f"{file}: sees {' and '.join(sorted(stages))}")
    return breaches


FILES = {
    path.relative_to(ROOT).with_suffix("").as_posix(): path.read_text()
    for path in ROOT.rglob("*.py")
}


def test_the_package_holds_the_table():
    assert "rollout/spec" in FILES
    assert violations(FILES) == []


def test_no_module_imports_itself_through_others():
    """Not even inside a function: so every file can be read after those that it imports."""
    graph = {
        file: {_module(FILES, name) for _, name in _imports(source)} & FILES.keys() - {file}
        for file, source in FILES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


def _room(file: str) -> str:
    """The folder of a file. What a room declares of a configuration lies below the room. The
    registry asks recipes by no name."""
    return file if file.endswith("/settings") else file.split("/")[0]


def test_no_room_imports_itself_through_others():
    graph: dict[str, set[str]] = {}
    for file, source in FILES.items():
        others = {_module(FILES, name) for _, name in _imports(source)} - {"", "recipes"}
        room = _room(file)
        graph.setdefault(room, set()).update(map(_room, others))
        graph[room].discard(room)
    graphlib.TopologicalSorter(graph).prepare()


def test_every_module_of_the_table_exists():
    modules = {*ALLOWED, *SEE_ALL, *STAGES}.union(*ALLOWED.values())
    assert [x for x in modules if not any(_within(file, [x]) for file in FILES)] == []


@pytest.mark.parametrize(
    ("file", "source", "breaches"),
    [
        ("algorithms/losses", "def f():\n  from specrl_jax.algorithms import update",
         ["algorithms/losses:2: algorithms/losses imports algorithms/update"]),
        ("rollout/spec", "from specrl_jax.rewards.scorers import find_scorer",
         ["rollout/spec:1: rollout/spec imports rewards/scorers",
          "rollout/spec: sees rewards and rollout"]),
        ("sandbox/worker_process", "PREPARE = 'specrl_jax.rewards.loading:prepare'",
         ["sandbox/worker_process:1: sandbox imports rewards/loading"]),
        ("rollout/drafts/sources", "from specrl_jax.rollout.spec import RolloutSpec",
         ["rollout/drafts/sources:1: rollout/drafts imports rollout/spec"]),
        ("train", "from specrl_jax.compile import fit", ["train:1: train imports compile/fit"]),
    ],
)  # fmt: skip
def test_a_breach_is_found(file, source, breaches):
    assert violations(dict.fromkeys(FILES, "") | {file: source}) == breaches


def test_no_module_names_a_recipe():
    sources = dict.fromkeys([*FILES, "recipes/guest"], "")
    for file in ("training/build", "standard_hooks", "recipes/other"):
        breaches = violations(sources | {file: "from specrl_jax.recipes import guest"})
        assert breaches == [f"{file}:1: names a recipe"]
