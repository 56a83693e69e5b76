"""A configuration file as its reader sees it: presets and fields with their comments.

Also which settings belong to a preset's own task, so that no other task inherits them.
"""

import re
import runpy
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from specrl_jax.config import table

# Field → its value where there is no task yet.
OF_TASK: dict[str, Any] = {
    "data.render": "", "data.instruction": "", "data.answer_pattern": "",
    "data.solution_field": "", "reward.extract": "", "reward.format": "", "reward.threshold": 0.0,
}  # fmt: skip
_OF_REWARD = ("reward.extract", "reward.format", "reward.threshold")
_OF_FILES = {"data.name": "", "data.prompts": 0}  # all rows; the task is named after the file

_SECTION = re.compile(r"\s+(?:(\w+)\.)?(\w+) = (\w+) = ConfigDict\(\)")
_FIELD = re.compile(r"\s+(\w+)\.(\w+) = (.+?)  # (.+)")


class Field(NamedTuple):
    name: str  # "rollout.lenience"
    value: str  # as it is written, "math.exp(0.5)"
    comment: str


def get_config(path: str, preset: str = "") -> ConfigDict:
    """A new configuration of a file, as --config=PATH[:PRESET] gives it."""
    return runpy.run_path(path)["get_config"](*[preset] if preset else [])


def presets(path: str | Path) -> dict[str, str]:
    """The file's presets and the first line of their docstrings; {} where it has no PRESETS."""
    table = runpy.run_path(str(path)).get("PRESETS", {})
    return {name: (preset.__doc__ or "").strip().split("\n")[0] for name, preset in table.items()}


def fields(path: str | Path) -> list[Field]:
    """The fields that the file sets in lines of the form `section.name = value  # comment`."""
    sections = {"config": ""}
    by_name = {}
    for line in Path(path).read_text("utf-8").splitlines():
        if match := _SECTION.match(line):
            parent, name, variable = match.groups()
            sections[variable] = f"{sections.get(parent or 'config', '')}{name}."
        elif (match := _FIELD.match(line)) and match[1] in sections:
            name = sections[match[1]] + match[2]
            value = match[3]
            if value == "ConfigDict()":  # of names that the user gives
                name = f"{name}.NAME"
                value = "VALUE"
            by_name.setdefault(name, Field(name, value, match[4]))
    return list(by_name.values())


def begin_own_task(
    config: ConfigDict, preset: ConfigDict, given: Collection[str]
) -> dict[str, Any]:
    """Reset what `config` inherits from the preset's task, where the task or reward is another.

    given: fields that the user has set, which stay. Returns the values that were reset, by field.
    """
    source_differs = config.data.source != preset.data.source
    if source_differs or config.data.name != preset.data.name:
        values = OF_TASK | (_OF_FILES if source_differs and _has_an_end(config) else {})
    elif config.reward.name != preset.reward.name:
        values = {name: OF_TASK[name] for name in _OF_REWARD}
    else:
        return {}
    reset = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        if name not in given and config[section][field] != value:
            reset[name] = config[section][field]
            config[section][field] = value
    if values.keys() >= OF_TASK.keys():
        options = config.data.options.to_dict()
        kept = {k: v for k, v in options.items() if f"data.options.{k}" in given}
        reset |= {f"data.options.{k}": v for k, v in options.items() if k not in kept}
        with config.unlocked():
            config.data.options = ConfigDict(kept)
    return reset


def _has_an_end(config: ConfigDict) -> bool:
    reader = table("data.readers:READERS").get(config.data.source)  # None: refused later
    return reader is not None and not reader.endless
