"""Pages that MkDocs generates while it builds the site (mkdocs.yml).

README.md and CHANGELOG.md become pages. Presets, fields and metrics are read from the code, and the
docstrings of `MODULES` by mkdocstrings.
"""

import functools
import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Documents outside docs/, as its links name them → the page that shows the same.
LINKS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "specrl_jax/recipes/README.md": "recipes.md",
    "configs/grpo.py": "presets.md",
    "fields.md": "configuration.md",
    "configs/lenience_sweep.py": "presets.md",
    "configs/one_device.py": "presets.md",
    "specrl_jax/telemetry/metrics.py": "metrics.md",
}
CONFIGS = ("grpo", "ppo", "dapo", "multiturn", "tool", "one_device", "lenience_sweep")
# Subject → modules below specrl_jax.
MODULES = {
    "Runs": ("train", "training.evaluate", "evaluation.saved_policy", "telemetry.metrics"),
    "Rollouts": ("rollout.generate", "rollout.acceptance", "rollout.drafts.sources"),
    "Algorithms": ("algorithms.advantages", "algorithms.losses"),
    "Rewards": ("rewards.scorers", "agents.environments", "agents.environment_protocol"),
    "Models": ("models.families", "models.config"),
}


def on_files(files, config):
    """Add the generated pages, and the notebooks as files to download."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, **_):
    """Links between documents of the repository as links between pages of the site."""

    def link(match: re.Match) -> str:
        path = match[1].removeprefix("../").removeprefix("docs/")
        return f"]({LINKS.get(path, path)}"

    # A badge's picture would be loaded from elsewhere: its text is the link.
    markdown = re.sub(r"!\[(\w+)\]\(https:[^)]*\.svg\)", r"\1", markdown)
    return re.sub(r"\]\((?!\w+:|#)([^)#\s]+)", link, markdown)


def recipes_page() -> str:
    """Return the README of the recipes; the site has no files of code to link."""
    text = (ROOT / "specrl_jax" / "recipes" / "README.md").read_text("utf-8")
    return re.sub(r"\[(\w+\.py)\]\(\1\)", r"`\1`", text.replace("](../../docs/", "]("))


# Presets ------------------------------------------------------------------------------------


def presets_page() -> str:
    """Return the docstrings of configs/*.py and of their presets."""
    parts = ["# Presets", "A preset is `--config=configs/FILE.py:NAME`."]
    for name in CONFIGS:
        file = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))
        parts += [f"## configs/{name}.py", inspect.cleandoc(file["__doc__"])]
        for preset, change in file.get("PRESETS", {}).items():
            parts += [f"### {preset}", inspect.cleandoc(change.__doc__)]
    return "\n\n".join(parts)


# Configuration ------------------------------------------------------------------------------


def fields_page() -> str:
    """Return docs/fields.md: every field in a line, those of recipes after the others."""
    from specrl_jax import registry
    from specrl_jax.settings import SECTIONS, schema

    comments = schema().comments()
    core = [line for section in SECTIONS for line in _lines(section, comments)]
    of_recipes: list[str] = []
    for recipe in registry.modules():
        title = inspect.cleandoc(recipe.__doc__).split(".\n")[0].split("\n\n")[0]
        title = " ".join(title.split()).rstrip(".")
        of_recipes += ["", f"# {recipe.__name__.rpartition('.')[2]}.py: {title}"]
        for section in getattr(recipe, "SECTIONS", ()):
            of_recipes += [x for x in _lines(section, comments) if x and not x.startswith("#")]
        if of_recipes[-1].startswith("#"):
            del of_recipes[-2:]  # it has no fields
    intro = (
        "Every field of a run, with its default and what it means. `--config.FIELD=VALUE` sets one."
        " Defaults are the values of the preset `tiny`; *paper* is SPEC-RL's published run. In"
        " brackets: bounds, and a value of another field that gives this one an effect. The page is"
        " made by `python docs/hooks.py`."
    )
    parts = [
        "# Fields",
        intro,
        _code(core),
        "## Recipes",
        "Fields of `specrl_jax/recipes/`, by file.",
    ]
    return "\n\n".join([*parts, _code(of_recipes)]) + "\n"


def _lines(section, comments: dict[str, str]) -> list[str]:
    title = f"# {section.path}: {section.comment}" if section.comment else f"# {section.path}"
    head = ["", title] if section.path else []
    rows = section.paths().items()
    return [
        *head,
        *(f"{name} = {row.default!r}  # {comments[name]}{_limits(name)}" for name, row in rows),
    ]


def _limits(path: str) -> str:
    """Say in brackets the bounds of a field, and what would give it an effect by default."""
    from specrl_jax.settings import schema

    row = schema().fields.get(path)
    if row is None:  # an option of the task
        return ""
    rules = [] if row.kind.choices() else [rule.partition(" (")[0] for rule, _ in row.kind.rules]
    said = [x for x in rules if re.match(r"in |<= \d{1,5}$|0 |1 or", x) and "1e+06" not in x]
    defaults = schema().defaults()
    off = [when for when in row.when if when.field and not schema().holds(when, defaults)]
    said += [f"with {when.field}={schema().remedy(defaults, when)}" for when in off]
    return f" [{'; '.join(said)}]" * bool(said)


def _code(lines: list[str]) -> str:
    return "\n".join(["```text", *lines, "```"]).replace("```text\n\n", "```text\n")


def configuration_page() -> str:
    """Every field with its value, its bounds and its comment, a table for each section."""
    from specrl_jax.config import flatten
    from specrl_jax.settings import schema

    values = dict(flatten(schema().defaults()))
    parts = [
        "# Configuration",
        "The fields of a run, with the values of the preset `tiny`. A flag"
        " `--config.FIELD=VALUE` sets one. *Paper* is SPEC-RL's published run"
        " ([arXiv 2509.23232](https://arxiv.org/abs/2509.23232)). Other presets and files change"
        " some values: see [Presets](presets.md).",
    ]
    sections: dict[str, list[tuple[str, ...]]] = {}
    for field, comment in schema().comments().items():
        section, _, name = field.rpartition(".")
        row = (f"`{name}`{{ #{field} }}", f"`{values[field]!r}`")
        row += (_text(_allowed(field)), _text(comment))
        sections.setdefault(section or "The run", []).append(row)
    for section, rows in sections.items():
        parts += [f"## {section}", _table(("field", "value", "may be", "meaning"), rows)]
    return "\n\n".join(parts)


def _allowed(path: str) -> str:
    """Say the bounds or choices of a field."""
    from specrl_jax.config.kinds import MAX_INT
    from specrl_jax.settings import schema

    if path not in schema().fields:  # an option of the task
        return ""
    kind = schema().fields[path].kind
    rules = [rule for rule, _ in kind.rules if str(MAX_INT) not in rule]
    kinds = {"an integer": "integer", "a number": "number"}
    return ", ".join([*kind.choices(), *(kinds.get(rule, rule) for rule in rules)])


# Metrics ------------------------------------------------------------------------------------


def metrics_page() -> str:
    """`telemetry.metrics.METRICS`, a table for each group."""
    from specrl_jax.telemetry.metrics import METRICS

    parts = [
        "# Metrics",
        "`WORKDIR/metrics.jsonl` has one JSON object a step: `step`, `epoch`, and the metrics below"
        " that have a value in it. `specrl_jax.telemetry.metrics.read_metrics` reads it.",
    ]
    for group in dict.fromkeys(name.partition("/")[0] for name in METRICS):
        rows = [
            (f"`{name}`", _text(meaning), _text(unit))
            for name, (meaning, unit) in METRICS.items()
            if name.startswith(f"{group}/")
        ]
        parts += [f"## {group}", _table(("metric", "meaning", "unit"), rows)]
    return "\n\n".join(parts)


# API ----------------------------------------------------------------------------------------


def api_page() -> str:
    """Return a directive of mkdocstrings for each module of `MODULES`."""
    parts = ["# API", "The modules that [Python](python.md) and [Extending](extending.md) use."]
    for subject, modules in MODULES.items():
        parts += [f"## {subject}", *(f"::: specrl_jax.{module}" for module in modules)]
    return "\n\n".join(parts)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    """Plain text as Markdown that shows it, also in a table."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return re.sub(r"([\\*_`\[\]])", r"\\\1", text)


PAGES: dict[str, Callable[[], str]] = {
    "index.md": functools.partial((ROOT / "README.md").read_text, "utf-8"),
    "changelog.md": functools.partial((ROOT / "CHANGELOG.md").read_text, "utf-8"),
    "presets.md": presets_page,
    "configuration.md": configuration_page,
    "metrics.md": metrics_page,
    "recipes.md": recipes_page,
    "api.md": api_page,
}

if __name__ == "__main__":
    (ROOT / "docs" / "fields.md").write_text(fields_page(), encoding="utf-8")
