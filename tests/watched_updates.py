"""Updates of a run, seen one by one; the fixture `watched` has them."""

from typing import NamedTuple

import jax
import numpy as np
from small_runs import assert_same_run, small_config

from specrl_jax import train
from specrl_jax.training import learn

# Some of these responses are right, some are not, so that some groups have a signal.
SOME_SIGNAL = {"reward.name": "small_runs:score_first_letter", "reward.extract": "", "seed": 3}


class Update(NamedTuple):
    """An update's mini-batch, and what it gave; on the host."""

    row_ids: np.ndarray  # int32 [n]
    mask: np.ndarray  # bool [B, R]
    advantages: np.ndarray  # float32 [B, R]
    nodes: np.ndarray  # int32 [n, R]
    scalars: dict[str, np.ndarray]


def watch_updates(monkeypatch) -> list[Update]:
    """Return the list that each `Update` is appended to."""
    seen = []
    real = learn.update

    def update(update_spec, state, batch, packed, *rest, **options):
        arrays = jax.device_get((packed.row_ids, batch.mask, batch.advantages, packed.nodes))
        state, scalars = real(update_spec, state, batch, packed, *rest, **options)
        seen.append(Update(*arrays, jax.device_get(scalars)))
        return state, scalars

    monkeypatch.setattr(learn, "update", update)
    return seen


def assert_goes_on(changes, whole, parts):
    """A run of two steps is that of two runs of one."""
    train.train(small_config(changes | {"train.steps": 1}), parts)
    train.train(small_config(changes), parts)
    assert_same_run(parts, whole, 2)
