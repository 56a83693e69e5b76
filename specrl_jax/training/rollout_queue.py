"""Queue between rollouts and updates: a batch waits for `rollout.staleness` = N updates.

As update t begins, the rollouts of step t + N begin, with the weights as they are. So update t
learns from a batch that the weights after update max(0, t - 1 - N) sampled: N alone decides, never
time. A run that is made longer begins N + 1 steps at once, as at its start. Asynchronous RLHF
(arXiv 2410.18252).

With `mesh.rollout_devices` rollouts have devices and a thread of their own, and run while updates
do. No other thread runs programs on these devices. Without them rollouts and updates take turns.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from specrl_jax.agents.episodes import Turns
from specrl_jax.sharding import move
from specrl_jax.training.collect import TrainBatch
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.state import Run
from specrl_jax.types import Prompts, Rollout, StatePart


class RolloutQueue(StatePart, contextlib.AbstractContextManager):
    """Batches that wait for their update, the oldest first, and rollouts under way.

    Rollouts are made one after another, in the order of `begin`. A checkpoint holds the batches,
    and is written when no rollout is under way. At its end the `with` block waits for the rollout
    that runs and cancels those after it.
    """

    def __init__(self, run: Run, find: Callable[[Sequence[str]], Prompts]):
        """Make an empty queue; find: returns the prompts of some ids."""
        config = run.config.rollout
        self._mesh = jax.sharding.get_mesh()
        self._find = find
        self._waiting: collections.deque[TrainBatch] = collections.deque()
        self._under_way: collections.deque[concurrent.futures.Future] = collections.deque()
        self._executor: concurrent.futures.Executor = _InTurn()
        if run.rollout_mesh != self._mesh:
            self._executor = concurrent.futures.ThreadPoolExecutor(
                1, "rollouts", jax.set_mesh, (run.rollout_mesh,)
            )
        self._slots = config.staleness
        rows = config.prompts_per_step * run.trained_group_size
        self._shape = rows, config.response_len, run.rollout_spec.stored_logprobs

    def __len__(self) -> int:
        """Return the number of begun steps whose batch is not taken yet."""
        return len(self._waiting) + len(self._under_way)

    def begin(self, collect: Callable, *args: Any) -> None:
        """Begin the rollouts of the next step, `collect(*args)`, after all that have begun."""
        self._under_way.append(self._executor.submit(collect, *args))

    def call(self, function: Callable, *args: Any) -> Any:
        """Return `function(*args)`, called on the mesh of rollouts after all that has begun."""
        return self._executor.submit(function, *args).result()

    def take(self, log: RunLog) -> TrainBatch:
        """Return the oldest batch, on the mesh in use; raise the error of its rollouts."""
        if not self._waiting:
            self._receive(log)
        return self._waiting.popleft()

    def receive_all(self, log: RunLog) -> None:
        """Wait until no rollout is under way."""
        while self._under_way:
            self._receive(log)

    def _receive(self, log: RunLog) -> None:
        """Wait for the oldest rollouts under way, and record their responses."""
        batch, rollouts = self._under_way.popleft().result()
        log.begin(batch.step, batch.epoch)
        log.record(rollouts)
        rollout = move(batch.rollout, self._mesh)
        self._waiting.append(dataclasses.replace(batch, rollout=rollout))

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    # Checkpoints

    def arrays(self) -> list[Rollout]:
        """Return as many rollouts as may wait; the last ones are empty."""
        empty = [Rollout.empty(*self._shape) for _ in range(self._slots - len(self._waiting))]
        return [batch.rollout for batch in self._waiting] + empty

    def host(self) -> list[dict[str, Any]]:
        return [_on_host(batch) for batch in self._waiting]

    def restore(self, host: Sequence[Mapping], arrays: Sequence[Rollout]) -> "RolloutQueue":
        self._waiting.extend(self._batch(values, x) for values, x in zip(host, arrays))
        return self

    def _batch(self, values: Mapping[str, Any], rollout: Rollout) -> TrainBatch:
        arrays = {name: np.array(x, np.float32) for name, x in values["by_function"].items()}
        turns = values["turns"] and Turns(
            np.array(values["turns"][0], np.float32),
            np.array(values["turns"][1], np.int32),
            np.array(values["turns"][2], "U4"),
        )
        return TrainBatch(
            self._find(values["prompts"]),
            rollout,
            np.array(values["rewards"], np.float32),
            **values["scalars"],
            by_function=arrays,
            turns=turns,
            ended=np.array(values["ended"], np.bool_),
        )


_SCALARS = ("metrics", "step", "epoch", "rejected_mass")


def _on_host(batch: TrainBatch) -> dict[str, Any]:
    """Describe a batch but for its rollout, in values that JSON keeps."""
    scalars = {name: getattr(batch, name) for name in _SCALARS}
    return {
        "prompts": [example.prompt_id for example in batch.prompts.examples],
        "rewards": batch.rewards.tolist(),
        "ended": batch.ended.tolist(),
        "by_function": {name: x.tolist() for name, x in batch.by_function.items()},
        "turns": batch.turns and [x.tolist() for x in batch.turns],
        "scalars": jax.tree.map(lambda x: np.asarray(x).item(), scalars),
    }


class _InTurn(concurrent.futures.Executor):
    """Executor that calls at once, in the thread that asks."""

    def submit(self, function: Callable, /, *args: Any) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()
        future.set_result(function(*args))
        return future
