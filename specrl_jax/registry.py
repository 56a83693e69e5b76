"""Registry of what recipes add: choices of tables, and classes that take slots of a run.

No recipe is named here: every file of `specrl_jax/recipes/` is asked, then the user's own modules.
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

# Names under which a recipe has a class that takes a slot of the run.
SLOTS = ("COLLECTOR", "ROLL_OUT", "BATCH_SOURCE", "STAGE", "LOSS_TERM", "FROZEN")

_own: tuple[str, ...] = ()  # names of the user's modules, see `load`
_tables: "list[Table]" = []


class Table(collections.UserDict):
    """Choices of a field by name: those of the core, then those that recipes add.

    Recipes are imported when the table is first read.
    """

    def __init__(self, name: str, own: Mapping[str, Any]):
        self._name = name
        self._own = own
        _tables.append(self)

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """Return the choices. Raises ValueError in one line where two have a name."""
        choices = dict(self._own)
        for name, (choice, _) in self._added.items():
            if name in choices:
                raise ValueError(f"{self._name} must have each name once, got {name!r} twice")
            choices[name] = choice
        return choices

    @property
    def _added(self) -> dict[str, tuple[Any, ModuleType]]:
        """Return the choices of recipes, each with its recipe; raises as `data` does."""
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
        """Return the names that recipes have added, each with the name of its file."""
        return {name: module.__name__.split(".")[-1] for name, (_, module) in self._added.items()}


def declared(name: str) -> list[Any]:
    """Return what the recipes have under a name."""
    return [getattr(module, name) for module in modules() if hasattr(module, name)]


def chosen(config: Any, slot: str, default: Any) -> Any:
    """Return what the configuration asks for in a slot, or `default` where it asks for nothing.

    Raises ValueError in one line where it asks for two.
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
    """Return all that the configuration asks for in a slot that several may take."""
    return [recipe for recipe, _ in _asked(config, slot)]


def _asked(config: Any, slot: str) -> list[tuple[Any, str]]:
    taken = [getattr(module, slot) for module in modules() if hasattr(module, slot)]
    return [(recipe, field) for recipe in taken if (field := recipe.asked_by(config))]


def _check_slots(module: ModuleType) -> None:
    """Raise ValueError in one line where a class takes a slot that does not exist."""
    for name, value in vars(module).items():
        if name.isupper() and hasattr(value, "asked_by") and name not in SLOTS:
            raise ValueError(
                f"{module.__name__}.{name} must have the name of a slot ({', '.join(SLOTS)}), "
                "as it has asked_by; rename it"
            )


def load(names: str) -> None:
    """Add recipes of the user's own: modules, with commas between, as the field `recipes` has them.

    What was read before is read again. Raises ValueError in one line where one cannot be imported.
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
        except Exception as error:  # whatever the user's module does as it is imported
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
