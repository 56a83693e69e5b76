"""Published systems, one file each. Nothing else names a file here: without it, its system is gone.

A file takes a slot of the run, COLLECTOR, ROLL_OUT or SOURCE, by a class of the slot's name. The
class says which field of the configuration asks for it, "" where none does:

    asked_by(config) -> str

`training.slots` fills the slots; docs/extending.md says what a class has besides.
"""

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from specrl_jax.config import flatten


def chosen(config: Any, slot: str, default: Any) -> Any:
    """Return what the configuration asks for in a slot, or `default` where it asks for nothing.

    Raises ValueError in one line where it asks for two.
    """
    taken = [getattr(module, slot) for module in _modules() if hasattr(module, slot)]
    asked = [(recipe, field) for recipe in taken if (field := recipe.asked_by(config))]
    if len(asked) > 1:
        fields = dict(flatten(config))
        first, second = (field for _, field in asked[:2])
        raise ValueError(
            f"{first} and {second} must not be set together, as each is the run's "
            f"{slot.lower()}, got {fields[first]!r} and {fields[second]!r}; set one of them back"
        )
    return asked[0][0] if asked else default


@functools.cache
def _modules() -> list[ModuleType]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}") for name in names]
