"""The documents keep their size; their links and the fields that they name exist."""

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
