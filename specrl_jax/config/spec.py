"""Specs of programs, frozen dataclasses, from the sections that declare their fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

Spec = TypeVar("Spec")


def filled(cls: type[Spec], section: Mapping, **more: Any) -> Spec:
    """Return a `cls` with the values that a section has under the names of its fields.

    more: values of other fields, and values that go before the section's.
    """
    names = [x.name for x in dataclasses.fields(cls) if x.init and x.name in section]
    return cls(**{name: section[name] for name in names} | more)
