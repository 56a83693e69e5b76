"""Functions with which a configuration file's `get_hyper(hyper)` builds a sweep.

A sweep is a list of overrides {FIELD: value}; each is a case of launch/sweep.py. The functions are
those of ml_collections' hyper. Values may be text as in a flag ("e^0.5").

    def get_hyper(hyper):
        return hyper.product([
            hyper.sweep("rollout.lenience", ["1", "e^0.5", "inf"]),
            hyper.sweep("rollout.group_size", [4, 8]),
        ])
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

Sweep = list[dict[str, Any]]


def sweep(name: str, values: Iterable[Any]) -> Sweep:
    """Return one field's values."""
    return [{name: value} for value in values]


def fixed(name: str, value: Any, length: int = 1) -> Sweep:
    """Return one field's value, `length` times."""
    return [{name: value}] * length


def product(sweeps: Sequence[Sweep], name: str = "") -> Sweep:
    """Return every combination; the last sweep varies fastest. name: section of all fields."""
    prefix = f"{name}." if name else ""
    return [
        {prefix + field: value for part in parts for field, value in part.items()}
        for parts in itertools.product(*sweeps)
    ]


def zipit(sweeps: Sequence[Sweep]) -> Sweep:
    """Return the first of every sweep together, then the second. Sweeps must have equal lengths."""
    lengths = list(map(len, sweeps))
    if len(set(lengths)) > 1:
        raise ValueError(f"hyper.zipit must get sweeps of one length, got lengths {lengths}")
    return [{k: v for part in parts for k, v in part.items()} for parts in zip(*sweeps)]


def chainit(sweeps: Iterable[Sweep]) -> Sweep:
    """Return one sweep after another."""
    return list(itertools.chain.from_iterable(sweeps))
