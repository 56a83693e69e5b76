"""Rollout of episodes: rows that take turns with an environment.

`run` ends once enough rows have ended their turn, and `go_on` appends the environment's answers. A
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

from specrl_jax import hosts
from specrl_jax.models.row_slices import read_slots, write_slots
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.carry_over import turn_drafts
from specrl_jax.rollout.engine.all_rows import cut_drafts, read_rollout
from specrl_jax.rollout.engine.runner import Requests
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.generate import RolloutInputs, RolloutResult, start_runner
from specrl_jax.rollout.rows import Rows
from specrl_jax.sharding import put
from specrl_jax.types import Source, TokenColumns


class EpisodeRollout:
    """Episodes in progress, B = Q · G rows; `spec.turns` must be set."""

    def __init__(
        self,
        spec: RolloutSpec,
        weights: Params,
        inputs: RolloutInputs,
        *,
        speculation: Speculation | None = None,
    ):
        """Begin an episode in each row. Arguments: see `generate`. Drafts are whole episodes."""
        self.spec = spec
        self.step = inputs.noise.step
        self.draft_episodes = inputs.drafts
        if self.draft_episodes is not None:
            first = turn_drafts(self.draft_episodes, None, None, spec.eos_ids, spec.stop)
            inputs = dataclasses.replace(inputs, drafts=first)
        self.runner = start_runner(spec, weights, inputs)
        self.scheduler = Scheduler(self.runner, speculation)

    def run(self, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run until at most a share, [0, 1), of the running rows are within their turn.

        Returns tokens int32 [B, R], lens int32 [B], and bool [B], rows whose turn has ended.
        """
        rows = self.scheduler.run_turns(share)
        tokens, lens, ended = hosts.fetch((rows.tokens, rows.lens, rows.done))
        return tokens[:, : self.spec.response_slots], lens, ended

    def go_on(self, answers: Mapping[int, Sequence[int]], over: np.ndarray) -> None:
        """Append the answers, token ids by row, and let the answered rows go on.

        over: bool [B], rows that have no more turns. All other rows that ended their turn wait.
        """
        runner = self.runner
        lens = hosts.fetch(runner.all_rows.lens)
        forced = np.zeros((len(lens), self.spec.response_slots), np.int32)
        counts = np.zeros(len(lens), np.int32)
        for row, ids in answers.items():
            forced[row, : len(ids)] = ids
            counts[row] = len(ids)
        rows = np.array(sorted(answers), int)
        answered = np.isin(np.arange(len(lens)), rows)
        runner.all_rows = append_forced(
            runner.all_rows,
            put(forced, "batch", None),
            put(counts, "batch"),
            put(answered, "batch"),
        )
        requests = dataclasses.replace(runner.requests, partial_lens=lens + counts)
        if self.draft_episodes is not None:
            requests = self._with_drafts(requests, answered)
        self.scheduler.go_on(requests, rows, lens[rows] - 1, over)

    def _with_drafts(self, requests: Requests, answered: np.ndarray) -> Requests:
        """Return the requests; rows `answered` bool [B] get the drafts of their next turn."""
        spec = self.spec
        rows = self.runner.all_rows
        new = turn_drafts(self.draft_episodes, rows, rows.done, spec.eos_ids, spec.stop)
        lens = jnp.where(put(answered, "batch"), new.lens, requests.drafts.lens)
        drafts = dataclasses.replace(requests.drafts, lens=lens)
        ends, cut_ends = hosts.fetch((lens, cut_drafts(spec, rows, lens)))
        more = np.where(answered, np.maximum(ends - requests.partial_lens, 0), 0)
        return dataclasses.replace(
            requests,
            drafts=drafts,
            draft_ends=np.where(answered, cut_ends, requests.draft_ends),
            draft_lens=requests.draft_lens + more,
        )

    def result(self) -> RolloutResult:
        """Return the episodes, once all are over."""
        requests = self.runner.requests
        step = np.int32(self.step)
        return RolloutResult(
            read_rollout(self.spec, self.runner.all_rows, self.draft_episodes, None, step),
            self.runner.stats,
            groups=np.arange(len(requests.prompts.lens)),
            noise_steps=requests.noise_steps,
            draft_lens=requests.draft_lens,
            resumed_lens=np.zeros_like(requests.partial_lens),
        )


@functools.partial(jax.jit, donate_argnames="all_rows")
def append_forced(all_rows: Rows, tokens: Array, lens: Array, answered: Array) -> Rows:
    """Append the first `lens` [B] of `tokens` [B, O] to the rows marked in `answered` bool [B].

    No policy drew these tokens. The rows go on with another turn.
    """
    columns = all_rows.tokens.shape[1]
    positions = jnp.arange(columns)[None, :]
    ends = all_rows.lens + jnp.where(answered, lens, 0)
    new = (positions >= all_rows.lens[:, None]) & (positions < ends[:, None])
    wide = jnp.pad(all_rows.tokens, ((0, 0), (0, tokens.shape[1])))
    moved = write_slots(wide, tokens, all_rows.lens)[:, :columns]

    def clear(x: Array) -> Array:
        return jnp.where(jnp.expand_dims(new, tuple(range(2, x.ndim))), jnp.zeros_like(x), x)

    cleared = jax.tree.map(clear, TokenColumns.of(all_rows))
    written = jnp.where(new, moved, all_rows.tokens)
    last = read_slots(written, jnp.maximum(ends - 1, 0), 1)[:, 0]
    return dataclasses.replace(
        all_rows,
        lens=ends,
        turn_starts=jnp.where(answered, ends, all_rows.turn_starts),
        last=jnp.where(answered, last, all_rows.last),
        done=all_rows.done & ~answered,
        sources=jnp.where(new, jnp.int8(Source.FORCED), all_rows.sources),
        **vars(cleared) | {"tokens": written},
    )
