"""A finished run's own configuration as a configuration file, --config=RUN/config.json."""

from pathlib import Path

from ml_collections import ConfigDict

from specrl_jax import registry
from specrl_jax.config import flatten
from specrl_jax.config.schema import ORIGIN
from specrl_jax.inputs import read_json
from specrl_jax.settings import schema


def get_config(path: str) -> ConfigDict:
    """Return the configuration saved by a run; a one-line ValueError for another file."""
    values = read_json(Path(path))
    values.pop(ORIGIN, None)
    config = ConfigDict(values)
    registry.load(values.get("recipes", ""))
    schema().check_version(dict(flatten(config)), path)
    return config


def origin(path: Path) -> str:
    """Return the RUN@STEP that a run started from; "" if it started anew."""
    return str(read_json(path).get(ORIGIN, ""))
