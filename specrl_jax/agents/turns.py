"""Rollout of episodes: rows that take turns with an environment.

`run` ends once enough rows have ended their turn, and `resume` appends the environment's answers. A
row keeps its slot and its keys meanwhile, so that every token of an episode is computed once. Noise
is keyed by a token's position in the row: the order of turns and answers changes no token.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract, hosts
from specrl_jax.models.row_slices import read_slots, write_slots
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.drafts.edit import turn_drafts
from specrl_jax.rollout.engine.all_rows import read_rollout
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.types import Source


class EpisodeRollout:
    """Episodes in progress, B = Q · G rows; `spec.turns` must be set."""

    def __init__(
        self,
        spec: RolloutSpec,
        weights: Params,
        requests: Requests,
        speculation: Speculation | None = None,
    ):
        """Begin an episode in each row. Arguments: see `generate`. Drafts are whole episodes."""
        self.spec = spec
        self.step = requests.noise.step
        self.draft_episodes = requests.drafts
        if self.draft_episodes is not None:
            first = turn_drafts(self.draft_episodes, None, None, spec.eos_ids, spec.stop)
            requests = dataclasses.replace(requests, drafts=first)
        self.runner = Runner(spec, weights, requests)
        self.scheduler = TurnScheduler(self.runner, speculation)

    def run(self, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run until at most a share, [0, 1), of the running rows are within their turn.

        Returns tokens int32 [B, R], lens int32 [B], and bool [B], rows whose turn has ended.
        """
        rows = self.scheduler.run_turns(share)
        tokens, lens, ended = hosts.fetch((rows.tokens.ids, rows.lens, rows.done))
        return tokens[:, : self.spec.response_slots], lens, ended

    def resume(self, answers: Mapping[int, Sequence[int]], over: np.ndarray) -> None:
        """Append the answers, token ids by row, and continue the answered rows.

        over: bool [B], rows that have no more turns. All other rows that ended their turn wait.
        """
        runner = self.runner
        lens = hosts.fetch(runner.all_rows.lens)
        observed = np.zeros((len(lens), self.spec.response_slots), np.int32)
        counts = np.zeros(len(lens), np.int32)
        for row, ids in answers.items():
            observed[row, : len(ids)] = ids
            counts[row] = len(ids)
        rows = np.array(sorted(answers), int)
        answered = np.isin(np.arange(len(lens)), rows)
        on_device = put(answered, "batch")
        counts_on_device = put(counts, "batch")
        all_rows = append_observations(
            runner.all_rows, put(observed, "batch", None), counts_on_device, on_device
        )
        draft_ends = None
        if self.draft_episodes is not None:
            new = turn_drafts(
                self.draft_episodes, all_rows, all_rows.done, self.spec.eos_ids, self.spec.stop
            )
            draft_ends = jnp.where(on_device, new.lens, runner.drafts.lens)
        runner.take_over(all_rows, lens + counts, answered, draft_ends)
        self.scheduler.resume(rows, lens[rows] - 1, over)

    def result(self) -> RolloutResult:
        """Return the episodes, once all are over."""
        runner = self.runner
        rollout = read_rollout(
            self.spec, runner.all_rows, self.draft_episodes, None, np.int32(self.step)
        )
        over = np.ones(len(runner.lens), np.bool_)
        return RolloutResult(rollout, over, runner.drafted_lens, runner.stats)


class TurnScheduler(Scheduler):
    """Scheduler of rows that wait for their environment.

    They keep their slots meanwhile, unless other rows need them.
    """

    def __init__(self, runner: Runner, speculation: Speculation | None = None):
        super().__init__(runner, speculation)
        # int [shards], rows within a turn when rows last started or went on
        self.in_turn = np.zeros_like(runner.unfinished_all)

    def _occupied(self) -> np.ndarray:
        return self.in_turn

    def _admit(self) -> bool:
        waiting = np.array([len(queue) for queue in self.queues])
        admitted = super()._admit()
        self.in_turn = self.in_turn + waiting - [len(queue) for queue in self.queues]
        return admitted

    def run_turns(self, share: float) -> Rows:
        """Return all rows once at most a share of the running rows are within their turn.

        share: [0, 1). Rows whose turn has ended keep their slots until `resume`.
        """
        runner = self.runner
        while self._admit():
            pass
        most = int(share * runner.unfinished_awaited.sum())
        while runner.unfinished_awaited.sum() > most:
            plan, stop = self._plan(StopCondition.of(max_left=most))
            self._record(plan, *runner.decode(stop, plan.width))
        runner.write_back()
        return runner.all_rows

    def resume(self, rows: np.ndarray, starts: np.ndarray, over: np.ndarray) -> None:
        """Continue answered rows; one whose slot was given away starts again.

        Every other row whose turn has ended waits for its answer, or is over.

        rows: int [k], the answered ones. starts: int [k], response position of the first token that
        has no key in the row's slot. over: bool [B], rows that have no more turns.
        """
        runner = self.runner
        runner.free(over)
        slots = runner.slots_of_rows()
        here = slots[rows] >= 0
        self.in_turn = runner.unfinished_all + self._by_shard(rows[here])
        if here.any():
            runner.continue_rows(rows[here], slots[rows[here]], starts[here])
        for row in rows[~here][::-1].tolist():
            self.queues[row // runner.shard_rows].insert(0, row)
        unfinished = np.flatnonzero(~over)
        if not any(self.queues) and np.all(slots[unfinished] >= 0):
            self._compact(self._by_shard(unfinished))

    def _by_shard(self, rows: np.ndarray) -> np.ndarray:
        """Count rows int [k] on each shard, int [shards]."""
        return np.bincount(rows // self.runner.shard_rows, minlength=self.buckets.shards)


@functools.partial(jax.jit, donate_argnames="all_rows")
def append_observations(all_rows: Rows, tokens: Array, lens: Array, answered: Array) -> Rows:
    """Append the first `lens` [B] of `tokens` [B, O] to the rows marked in `answered` bool [B].

    No policy drew these tokens. The rows continue with another turn.
    """
    columns = all_rows.tokens.ids.shape[1]
    positions = jnp.arange(columns)[None, :]
    ends = all_rows.lens + jnp.where(answered, lens, 0)
    new = (positions >= all_rows.lens[:, None]) & (positions < ends[:, None])
    wide = jnp.pad(all_rows.tokens.ids, ((0, 0), (0, tokens.shape[1])))
    moved = write_slots(wide, tokens, all_rows.lens)[:, :columns]

    def clear(x: Array) -> Array:
        return jnp.where(jnp.expand_dims(new, tuple(range(2, x.ndim))), jnp.zeros_like(x), x)

    cleared = jax.tree.map(clear, all_rows.tokens)
    written = jnp.where(new, moved, all_rows.tokens.ids)
    sources = jnp.where(new, jnp.int8(Source.ENVIRONMENT), all_rows.tokens.sources)
    last = read_slots(written, jnp.maximum(ends - 1, 0), 1)[:, 0]
    return dataclasses.replace(
        all_rows,
        lens=ends,
        turn_starts=jnp.where(answered, ends, all_rows.turn_starts),
        last=jnp.where(answered, last, all_rows.last),
        done=all_rows.done & ~answered,
        tokens=dataclasses.replace(cleared, ids=written, sources=sources),
    )


def append_observations_inputs(all_rows: Rows, response_slots: int) -> tuple:
    """Return the inputs of `append_observations`."""
    (count,) = all_rows.lens.shape
    tokens = abstract.array(np.int32, (count, response_slots), "batch", None)
    lens = abstract.array(np.int32, (count,), "batch")
    return all_rows, tokens, lens, abstract.array(np.bool_, (count,), "batch")
