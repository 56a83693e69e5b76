"""Rollouts ahead of the update: a batch waits for `rollout.staleness` = N updates.

When update t starts, the rollouts of step t + N start with the current weights. So update t learns
from a batch sampled by the weights after update max(0, t - 1 - N): it depends only on N, never on
timing. A run that is extended starts N + 1 steps together, as at its start. Asynchronous RLHF
(arXiv 2410.18252).

With `mesh.rollout_devices` rollouts have their own devices and thread, and run during updates. No
other thread runs programs on these devices. Without them rollouts and updates take turns.

Worked example, N = 1: step 1 starts the rollouts of steps 1 and 2 with the initial weights and
learns from the first batch. Step 2 starts those of step 3 with the weights after update 1, and
learns from the second batch, which is one update old.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specrl_jax import sharding
from specrl_jax.config.fields import Check, Section, Values, When, field
from specrl_jax.config.kinds import integer
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.responses import Turns
from specrl_jax.training.batches import BatchSource, Record
from specrl_jax.training.collect import collect
from specrl_jax.training.collected import Collected
from specrl_jax.training.run import Run
from specrl_jax.training.settings import BESIDE_UPDATES
from specrl_jax.training.state import RunState
from specrl_jax.types import Rollout, StatePart


class RolloutsAhead(BatchSource, StatePart):
    """Batches that wait for their update, the oldest first, and pending rollouts.

    Rollouts run one after another. A checkpoint includes the batches, and is written when no
    rollout is running. At its end the `with` block waits for the running rollout and cancels later
    ones.
    """

    @staticmethod
    def asked_by(config: Any) -> str:
        return "rollout.staleness" if config.rollout.staleness else ""

    @staticmethod
    def rollout_mesh(config: Any) -> jax.sharding.Mesh:
        return sharding.rollout_mesh(config.mesh.rollout_devices, config.mesh.tensor)

    @staticmethod
    def most_ahead(config: Any) -> int:
        return config.rollout.staleness

    @staticmethod
    def describe(run: Run) -> str:
        where = f"on their own mesh, {dict(run.rollout_mesh.shape)}, while updates run"
        if run.rollout_mesh == jax.sharding.get_mesh():
            where = "taking turns with updates, as mesh.rollout_devices is 0: no time is saved"
        return f"rollout: {run.config.rollout.staleness} steps ahead, {where}"

    def __init__(self, run: Run, stream: PromptStream):
        """Make a source that has not started yet; stream: finds the prompts of some ids."""
        config = run.config.rollout
        self._mesh = jax.sharding.get_mesh()
        self._find = stream.find
        self._waiting: collections.deque[Collected] = collections.deque()
        # (the last step whose update made the weights, what waits for the rollouts)
        self._under_way: collections.deque[tuple[int, Callable]] = collections.deque()
        self._executor: concurrent.futures.Executor | None = None  # None: rollouts take turns
        if run.rollout_mesh != self._mesh:
            self._executor = concurrent.futures.ThreadPoolExecutor(
                1, "rollouts", jax.set_mesh, (run.rollout_mesh,)
            )
        self._slots = config.staleness
        self._rows = config.prompts_per_step * run.trained_group_size
        self._spec = run.rollout_spec

    @property
    def ahead(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def next(self, run: Run, state: RunState, record: Record) -> Collected:
        """Start rollouts until N batches are ahead; return the oldest batch.

        Raises the error of its rollouts.
        """
        ahead = min(self._slots, max(run.total_steps - state.step, 0))
        missing = 1 + ahead - self.ahead
        if missing > 0:
            weights = state.rollout_weights(run)
        for _ in range(missing):
            begun = self._begin(collect, run, state.rollout, weights)
            self._under_way.append((state.step - 1, begun))
        if not self._waiting:
            self._receive(record)
        return self._waiting.popleft()

    def on_rollout_mesh(self, function: Callable, *args: Any) -> Any:
        return self._begin(function, *args)()

    def settle(self, record: Record) -> None:
        while self._under_way:
            self._receive(record)

    def _begin(self, function: Callable, *args: Any) -> Callable[[], Any]:
        """Start `function(*args)` after all pending work; return what awaits its result."""
        if self._executor is not None:
            return self._executor.submit(function, *args).result
        result = function(*args)
        return lambda: result

    def _receive(self, record: Record) -> None:
        """Wait for the oldest pending rollouts, and record their responses."""
        trained, result = self._under_way.popleft()
        batch, rollouts = result()
        record(batch, rollouts)
        batch = dataclasses.replace(batch, rollout=sharding.move(batch.rollout, self._mesh))
        if batch.step - 1 > trained:
            metrics = batch.metrics | {"rollout/stale_fraction": 1.0}
            batch = dataclasses.replace(batch, metrics=metrics, stale=True)
        self._waiting.append(batch)

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    # Checkpoints

    def arrays(self) -> list[Rollout]:
        """Return as many rollouts as may wait; the last ones are empty."""
        empty = [
            self._spec.empty_rollout(self._rows) for _ in range(self._slots - len(self._waiting))
        ]
        return [batch.rollout for batch in self._waiting] + empty

    def host(self) -> list[dict[str, Any]]:
        return [_on_host(batch) for batch in self._waiting]

    def restore(self, host: Sequence[Mapping], arrays: Sequence[Rollout]) -> "RolloutsAhead":
        self._waiting.extend(self._batch(values, x) for values, x in zip(host, arrays))
        return self

    def _batch(self, values: Mapping[str, Any], rollout: Rollout) -> Collected:
        arrays = {name: np.array(x, np.float32) for name, x in values["by_function"].items()}
        turns = values["turns"] and Turns(
            np.array(values["turns"][0], np.float32),
            np.array(values["turns"][1], np.int32),
            np.array(values["turns"][2], "U4"),
        )
        return Collected(
            self._find(values["prompts"]),
            rollout,
            np.array(values["rewards"], np.float32),
            **values["scalars"],
            by_function=arrays,
            turns=turns,
            ended=np.array(values["ended"], np.bool_),
        )


BATCH_SOURCE = RolloutsAhead

_SCALARS = ("metrics", "step", "epoch", "stale", "rejected_mass")


def _on_host(batch: Collected) -> dict[str, Any]:
    """Describe a batch without its rollout, in values that JSON preserves."""
    scalars = {name: getattr(batch, name) for name in _SCALARS}
    return {
        "prompts": [example.prompt_id for example in batch.prompts.examples],
        "rewards": batch.rewards.tolist(),
        "ended": batch.ended.tolist(),
        "by_function": {name: x.tolist() for name, x in batch.by_function.items()},
        "turns": batch.turns and [x.tolist() for x in batch.turns],
        "scalars": jax.tree.map(lambda x: np.asarray(x).item(), scalars),
    }


# fmt: off
SECTIONS = (Section("rollout", "", (
    field("staleness", 0, "N: updates that a batch waits for; see mesh.rollout_devices",
          integer(0, 64, "each is a batch that waits")),
)),)
# fmt: on
EFFECTS = {BESIDE_UPDATES: When("rollout.staleness", lambda c: c.rollout.staleness > 0, "1")}


def _rules(config: Values) -> Iterator[Check]:
    staleness = config.rollout.staleness
    by_update = staleness and config.meaning("updates.old_logprobs").by_update
    rule = (
        f"> 0 where rollout.staleness is {staleness} and updates.old_logprobs is "
        f"{config.updates.old_logprobs} (only the weight knows which weights sampled)"
    )
    yield "algorithm.importance_cap", rule, config.algorithm.importance_cap > 0 or not by_update


RULES = (_rules,)
