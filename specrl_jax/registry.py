"""Registry of what recipes add: choices for tables, and classes that fill slots of a run.

No recipe is named here: every file in `specrl_jax/recipes/` is read, then the user's own modules.
"""

import collections
import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from specrl_jax import recipes
from specrl_jax.config import flatten

# Names under which a recipe defines a class that fills a slot of the run.
SLOTS = ("COLLECTOR", "ROLL_OUT", "BATCH_SOURCE", "STAGE", "LOSS_TERM", "FROZEN")

_own: tuple[str, ...] = ()  # names of the user's modules, see `load`
_tables: "list[Table]" = []


class Table(collections.UserDict):
    """Choices of a field by name: the core's, then those that recipes add.

    Recipes are imported when the table is first read.
    """

    def __init__(self, name: str, own: Mapping[str, Any]):
        self._name = name
        self._own = own
        _tables.append(self)

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """Return the choices. Raises a one-line ValueError if two have the same name."""
        choices = dict(self._own)
        for name, (choice, _) in self._added.items():
            if name in choices:
                raise ValueError(f"{self._name} must have each name once, got {name!r} twice")
            choices[name] = choice
        return choices

    @property
    def _added(self) -> dict[str, tuple[Any, ModuleType]]:
        """Return the recipes' choices, each with its recipe; raises as `data` does."""
        found: dict[str, tuple[Any, ModuleType]] = {}
        for module in modules():
            added = getattr(module, self._name, {})
            if isinstance(added, Table):  # imported from the core
                continue
            for name, choice in added.items():
                if name in found:
                    raise ValueError(f"{self._name} must have each name once, got {name!r} twice")
                found[name] = choice, module
        return found

    @property
    def added(self) -> dict[str, str]:
        """Return the names that recipes have added, each with its recipe's file name."""
        return {name: module.__name__.split(".")[-1] for name, (_, module) in self._added.items()}


def declared(name: str) -> list[Any]:
    """Return what the recipes define under a name."""
    return [getattr(module, name) for module in modules() if hasattr(module, name)]


def chosen(config: Any, slot: str, default: Any) -> Any:
    """Return what the configuration selects for a slot, or `default` if it selects nothing.

    Raises a one-line ValueError if it selects two.
    """
    asked = _asked(config, slot)
    if len(asked) > 1:
        fields = dict(flatten(config))
        (_, first), (_, second) = asked[:2]
        raise ValueError(
            f"{first} and {second} must not be set together, as each is the run's "
            f"{slot.lower().replace('_', ' ')}, got {fields[first]!r} and {fields[second]!r}; "
            "set one of them back"
        )
    return asked[0][0] if asked else default


def all_chosen(config: Any, slot: str) -> list[Any]:
    """Return everything that the configuration selects for a slot that takes several."""
    return [recipe for recipe, _ in _asked(config, slot)]


def _asked(config: Any, slot: str) -> list[tuple[Any, str]]:
    taken = [getattr(module, slot) for module in modules() if hasattr(module, slot)]
    return [(recipe, field) for recipe in taken if (field := recipe.asked_by(config))]


def _check_slots(module: ModuleType) -> None:
    """Raise a one-line ValueError if a class fills a slot that does not exist."""
    for name, value in vars(module).items():
        if name.isupper() and hasattr(value, "asked_by") and name not in SLOTS:
            raise ValueError(
                f"{module.__name__}.{name} must have the name of a slot ({', '.join(SLOTS)}), "
                "as it has asked_by; rename it"
            )


def load(names: str) -> None:
    """Load the user's own recipes: modules, separated by commas, as in the field `recipes`.

    A module that is already loaded stays as it is. Raises a one-line ValueError if an import fails.
    """
    global _own
    new = [name for name in names.replace(" ", "").split(",") if name and name not in _own]
    if not new:
        return
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    for name in new:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # anything that the user's module raises on import
            raise ValueError(
                f"recipes must name modules in this directory or installed ones, got {name!r}: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            ) from error
        _check_slots(module)
    _own = (*_own, *new)
    modules.cache_clear()
    for table in _tables:
        vars(table).pop("data", None)


def loaded() -> tuple[str, ...]:
    """Return the names of the user's own recipes."""
    return _own


@functools.cache
def modules() -> list[ModuleType]:
    """Return the recipes."""
    names = sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))
    published = [importlib.import_module(f"{recipes.__name__}.{name}") for name in names]
    return published + [importlib.import_module(name) for name in _own]
