"""The documents keep their size; their links and the fields that they name exist."""

import ast
import re
import runpy

import pytest
from small_runs import ROOT

from specrl_jax.config import flatten

DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMITS = {"README.md": 900, "docs/architecture.md": 2000, "docs/experiments.md": 2500}


@pytest.mark.parametrize(("name", "limit"), LIMITS.items())
def test_a_document_keeps_its_size(name, limit):
    assert len((ROOT / name).read_text().split()) < limit


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_to_a_file_and_heading(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        document = (path.parent / file).resolve() if file else path
        assert document.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
            assert heading in {_anchor(text) for text in headings}, target


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_field_that_is_named_exists(path):
    config = runpy.run_path(str(ROOT / "configs" / "grpo.py"))["get_config"]("tiny")
    fields = dict(flatten(config))
    sections = "|".join(sorted({name.partition(".")[0] for name in fields} - {"seed"}))
    text = path.read_text()
    named = set(re.findall(r"--config\.([a-z_][\w.]*)=", text))
    named |= set(re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:=[^`]*| = [^`]*)?`", text))
    assert {name for name in named if not name.endswith((".py", ".jsonl"))} <= {
        *fields,
        *_parents(fields),
    }


def _parents(fields) -> set[str]:
    return {name.rpartition(".")[0] for name in fields}


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


def test_the_walk_names_what_exists():
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = re.search(r"^## The walk of one batch\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
    named = {re.sub(r"\(\)$|\[.*\]$", "", name) for name in re.findall(r"`([^`]+)`", walk)}
    files = {name for name in named if name.endswith((".py", ".jsonl"))}
    assert len(named) > 40
    assert files == {"launch/train.py", "metrics.jsonl"}
    assert named - files <= _defined()
