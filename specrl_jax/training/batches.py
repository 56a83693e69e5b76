"""Source of the steps' batches."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specrl_jax.data.curriculum import PromptStream
from specrl_jax.responses import Responses
from specrl_jax.training.collect import collect
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.state import RunState

# Records the responses of a batch's rollouts.
Record = Callable[[Collected, Sequence[Responses]], None]


class BatchSource(contextlib.AbstractContextManager):
    """Source of the steps' batches: each one is collected when its step starts.

    A recipe's source may collect earlier, and on its own devices. One with waiting batches is also
    a `StatePart`.
    """

    ahead = 0  # steps whose rollouts have started but whose batch has not been used

    @staticmethod
    def asked_by(config: Any) -> str:
        """Return the config field that selects it; overridden by recipes."""
        return ""

    @staticmethod
    def rollout_mesh(config: Any) -> jax.sharding.Mesh:
        """Make the mesh for rollouts; updates use the mesh in use."""
        return jax.sharding.get_mesh()

    @staticmethod
    def most_ahead(config: Any) -> int:
        """Return how many steps' rollouts may wait for their update."""
        return 0

    @staticmethod
    def describe(run: Run) -> str:
        """Return a line on where batches come from; "" if there is nothing to report."""
        return ""

    def __init__(self, run: Run, stream: PromptStream):
        """Make the source for a new state, with the prompts of `stream`."""

    def next(self, run: Run, state: RunState, record: Record) -> Collected:
        """Return the batch of the step that starts, on the mesh in use."""
        collected, rollouts = collect(run, state.rollout, state.rollout_weights(run))
        record(collected, rollouts)
        return collected

    def on_rollout_mesh(self, function: Callable, *args: Any) -> Any:
        """Return `function(*args)`, called on the mesh of rollouts after all pending work."""
        return function(*args)

    def settle(self, record: Record) -> None:
        """Wait until no rollout is running."""

    def __exit__(self, *_: object) -> None:
        """Stop pending work."""
