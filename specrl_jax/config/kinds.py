"""Kinds of fields: which values are valid, in words and as a test."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

MAX_INT = 2**31 - 1
MAX_FLOAT = 3.4e38
# A rule in words, and its test.
Rule = tuple[str, Callable[[Any], bool]]


def flatten(config: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every leaf."""
    for name, value in config.items():
        if isinstance(value, Mapping | ConfigDict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def get(config: ConfigDict, field: str) -> Any:
    """Return the value of a field by its path."""
    return functools.reduce(operator.getitem, field.split("."), config)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Rules for a field's values."""

    rules: tuple[Rule, ...] = ()  # the error names the first that is broken
    names: tuple[str, ...] = ()  # of a choice, besides the keys of `table`
    # What names refer to. It is a function, as what it imports is slow to import.
    table: Callable[[], Mapping[str, Any]] = dict
    open: bool = False  # any text is valid; that in `table` has a meaning

    def choices(self) -> tuple[str, ...]:
        """Return all names of a choice; () for another kind."""
        return () if self.open else (*self.names, *self.table())

    def meaning(self, name: str) -> Any:
        """Return what a name refers to; None for other text."""
        return self.table().get(name) if self.open else self.table()[name]

    def broken(self, value: Any) -> str:
        """Return the rule that a value breaks, in words; "" if it breaks none."""
        if names := self.choices():
            return "" if value in names else f"one of {', '.join(names)}"
        return next((words for words, holds in self.rules if not holds(value)), "")


ANY = Kind()
TEXT = Kind((("text", lambda x: isinstance(x, str)),))
SWITCH = Kind((("True or False", lambda x: isinstance(x, bool)),))
_INTEGER: Rule = ("an integer", lambda x: isinstance(x, int) and not isinstance(x, bool))
_NUMBER: Rule = (
    "a number",
    lambda x: isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x),
)


def one_of(*names: str) -> Kind:
    """Return a choice of names."""
    return Kind(names=names)


def choice(table: Callable[[], Mapping[str, Any]], *more: str) -> Kind:
    """Return a choice of the keys of a table, and of more names."""
    return Kind(names=more, table=table)


def text_or(table: Callable[[], Mapping[str, Any]]) -> Kind:
    """Return a text, for which the keys of a table have a meaning."""
    return Kind(TEXT.rules, table=table, open=True)


def integer(least: int = 0, most: int = MAX_INT, why: str = "int32") -> Kind:
    """Return an integer; why: the reason for its maximum."""
    at_least = (f">= {least}", lambda x: x >= least)
    return Kind((_INTEGER, at_least, (f"<= {most} ({why})", lambda x: x <= most)))


def is_integer(kind: Kind) -> bool:
    """Return whether a field of this kind is an integer."""
    return _INTEGER in kind.rules


def within(low: float, high: float) -> Kind:
    """Return a number from low to high, both included."""
    return number(f"in [{low:g}, {high:g}]", lambda x: low <= x <= high)


def number(words: str, holds: Callable[[float], bool]) -> Kind:
    """Return a number that obeys a rule."""
    return Kind((_NUMBER, (words, holds)))


SHARE = within(0, 1)
FINITE = number("finite", lambda x: -MAX_FLOAT <= x <= MAX_FLOAT)
NOT_NEGATIVE = number(">= 0", lambda x: x >= 0)
WEIGHT = number(">= 0 and finite", lambda x: 0 <= x <= MAX_FLOAT)
BETA = within(0, 0.99999)  # closer to 1, float32 rounds to 1
BELOW_ONE = number("in [0, 1)", lambda x: 0 <= x < 1)
ABOVE_ZERO = number("in (0, 1]", lambda x: 0 < x <= 1)
OFF_OR_ABOVE_ONE = number("0 (off) or in (1, 1e6]", lambda x: x == 0 or 1 < x <= 1e6)
GREEDY_OR_WARM = number("0 (greedy) or in [0.01, 100]", lambda x: x == 0 or 0.01 <= x <= 100)
ONE_OR_TWO = Kind((_INTEGER, ("1 or 2", lambda x: x in (1, 2))))
