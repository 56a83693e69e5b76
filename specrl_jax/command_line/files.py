"""A configuration file from its reader's view: its configuration and presets.

Also which settings belong to a preset's own task, so that other tasks do not inherit them.
"""

import runpy
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from specrl_jax.config import get
from specrl_jax.settings import schema


def get_config(path: str, preset: str = "") -> ConfigDict:
    """Make a configuration from a file, like --config=PATH[:PRESET]."""
    return runpy.run_path(path)["get_config"](*[preset] if preset else [])


def presets(path: str | Path) -> dict[str, str]:
    """Return the file's presets and their docstrings' first lines; {} if it has no PRESETS."""
    table = runpy.run_path(str(path)).get("PRESETS", {})
    return {name: (preset.__doc__ or "").strip().split("\n")[0] for name, preset in table.items()}


def start_own_task(
    config: ConfigDict, preset: ConfigDict, given: Collection[str]
) -> dict[str, Any]:
    """Reset what `config` inherits from the preset's task if the task or reward differs.

    given: fields set by the user, which stay. Returns the values that were reset, by field.
    """
    other_source = config.data.source != preset.data.source
    other_task = other_source or config.data.name != preset.data.name
    other_reward = config.reward.name != preset.reward.name
    # An unknown source is rejected later.
    fields = schema().fields
    known = config.data.source in fields["data.source"].kind.choices()
    has_an_end = known and not schema().values(config).meaning("data.source").endless
    empty = {}
    for name, row in fields.items():
        if row.task is not None and (other_task or (other_reward and name.startswith("reward."))):
            empty[name] = row.task
        if row.files is not None and other_source and has_an_end:
            empty[name] = row.files
    old = {name: get(config, name) for name in empty if name not in given}
    reset = {name: value for name, value in old.items() if value != empty[name]}
    config.update_from_flattened_dict({name: empty[name] for name in reset})
    if other_task:
        options = config.data.options.to_dict()
        kept = {k: v for k, v in options.items() if f"data.options.{k}" in given}
        reset |= {f"data.options.{k}": v for k, v in options.items() if k not in kept}
        with config.unlocked():
            config.data.options = ConfigDict(kept)
    return reset
