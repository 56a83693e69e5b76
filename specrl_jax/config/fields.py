"""Declarations of fields: a `Section` of rows, each with everything known about a field."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from ml_collections import ConfigDict

from specrl_jax.config.kinds import ANY, Kind, get

# When a field may change.
NEW_RUN = "where a new run starts with another run's checkpoint"
RESUMED = "where a run is resumed, and where a new run starts with another run's checkpoint"


class Values:
    """A configuration in the form that conditions and rules read, with what its names refer to."""

    def __init__(self, config: ConfigDict, kinds: Mapping[str, Kind]):
        self._config = config
        self._kinds = kinds

    def __getattr__(self, section: str) -> Any:
        return getattr(self._config, section)

    def get(self, field: str, default: Any = None) -> Any:
        """Return the value of a field by its path; `default` if no such field is declared."""
        return get(self._config, field) if field in self._kinds else default

    def meaning(self, field: str) -> Any:
        """Return what the name in `field` refers to, in the table of its choices."""
        return self._kinds[field].meaning(get(self._config, field))


# A rule between fields: (field, the rule in words, whether the configuration obeys it).
Check = tuple[str, str, bool]
Rules = Callable[[Values], Iterator[Check]]


def no_rules(config: Values) -> Iterator[Check]:
    """Yield nothing: any configuration is valid."""
    yield from ()


@dataclasses.dataclass(frozen=True, eq=False)
class When:
    """Condition under which a field has an effect."""

    field: str  # whose value decides
    holds: Callable[[Values], bool]
    value: str | None = None  # of `field` that satisfies it; None: its first choice that does


@dataclasses.dataclass(frozen=True)
class Shards:
    """How many rows or prompts a mesh splits among its devices."""

    mesh: str  # "update" or "rollout"
    when: When | None = None  # None: in every run


@dataclasses.dataclass(frozen=True)
class Field:
    """One row: everything known about a field."""

    name: str
    default: Any
    comment: str
    kind: Kind = ANY
    when: tuple[When, ...] = ()  # it matters only if all hold; the error names the first that fails
    neutral: Any = None  # the one value that is allowed when the field has no effect
    may_change: str = ""  # NEW_RUN or RESUMED; "": never, once a run has started
    task: Any = None  # value for "no task chosen"; None: the field does not depend on the task
    files: Any = None  # the same value if the task comes from files or a data set
    shards: Shards | None = None  # it is a size that must fit a mesh


def field(
    name: str, default: Any, comment: str, kind: Kind = ANY, *when: When, **more: Any
) -> Field:
    """Return a row; more: other fields of `Field`."""
    return Field(name, default, comment, kind, when, **more)


@dataclasses.dataclass(frozen=True)
class Section:
    """Fields below one path, like "rollout.tree"; several sections may share a path."""

    path: str  # "": the top
    comment: str
    fields: tuple[Field, ...]
    on: When | None = None  # if it fails, no field has an effect except the one that it names
    may_change: str = ""  # of fields without their own
    free: bool = False  # users add their own fields: these have no rules

    def paths(self) -> dict[str, Field]:
        """Return the fields by their whole paths, each with the section's condition."""
        rows = {f"{self.path}.{row.name}".lstrip("."): row for row in self.fields}
        return {name: self._completed(name, row) for name, row in rows.items()}

    def _completed(self, name: str, row: Field) -> Field:
        decides = self.on is None or self.on.field == name
        when = row.when if decides else (self.on, *row.when)
        return dataclasses.replace(row, when=when, may_change=row.may_change or self.may_change)


Spec = TypeVar("Spec")


def filled(cls: type[Spec], section: Mapping, **more: Any) -> Spec:
    """Return a dataclass `cls` with the section's values for fields of the same names.

    more: values of other fields, and values that override the section's.
    """
    names = [x.name for x in dataclasses.fields(cls) if x.init and x.name in section]
    return cls(**{name: section[name] for name in names} | more)
