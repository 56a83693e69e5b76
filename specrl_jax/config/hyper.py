"""Functions with which `get_hyper(hyper)` of a configuration file builds a sweep.

A sweep is a list of overrides {FIELD: value}; each of them is a case of launch/sweep.py. The
functions have names that users of ml_collections know. Values may be text as in a flag ("e^0.5").

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


def fixed(name: str, value: Any) -> Sweep:
    """Return one field's value."""
    return [{name: value}]


def product(sweeps: Sequence[Sweep]) -> Sweep:
    """Return every combination; the last sweep varies first."""
    return [
        {field: value for part in parts for field, value in part.items()}
        for parts in itertools.product(*sweeps)
    ]


def chainit(sweeps: Iterable[Sweep]) -> Sweep:
    """Return one sweep after another."""
    return list(itertools.chain.from_iterable(sweeps))
