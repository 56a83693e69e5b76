"""One rollout: prompts and drafts in, responses with their log-probs out.

`generate` starts all rows, lets the scheduler bring them to their end, and reads the result.
`carry_over` holds what one rollout leaves to the next.
"""

import dataclasses

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.carry_over import Resumed, RunAhead, as_drafts, without_drafts
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine.all_rows import (
    cut_drafts,
    read_rollout,
    start_all_rows,
    write_partial_rows,
)
from specrl_jax.rollout.engine.runner import Requests, Runner, Stats
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.engine.speculation import Speculation, time_steps
from specrl_jax.rollout.rows import assemble, take
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.sharding import put, shards
from specrl_jax.types import Drafts, PartialRows, Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class RolloutInputs:
    """Prompts of a rollout, their noise, what it takes up from earlier ones, and where it ends."""

    prompts: Prompts  # [Q]
    noise: NoiseKey
    drafts: Drafts | None = None  # [Q * G], for the acceptance rule to verify
    log_lenience: float = 0.0  # log ℓ of the rule in nats, in [-inf, inf]
    # Stored responses for the draft source: of the prompts, then of the next step's prompts.
    history: DraftHistory | None = None
    next_prompts: Prompts | None = None  # [Q'], of step + 1, for run-ahead
    next_noise_steps: np.ndarray | None = None  # int [Q', G], of `next_prompts`; None: step + 1
    resumed: Resumed | None = None  # unfinished groups; their prompts come first in `prompts`
    stop_after_groups: int = 0  # finished groups at which the rollout may end; 0: all
    fillers: int = 0  # prompts, the last ones, that only fill the rollout's shape
    # [Q * G], what rows already hold, from forks. A draft begins with what its row holds.
    partial_rows: PartialRows | None = None


@dataclasses.dataclass(frozen=True)
class RolloutResult:
    """Rollout of Q groups, G rows each, and what it leaves to the next one."""

    rollout: Rollout
    stats: Stats
    groups: np.ndarray  # int [Q], indices of the groups among the given prompts
    noise_steps: np.ndarray  # int [Q, G], the step whose noise each row uses
    draft_lens: np.ndarray  # int32 [Q * G], draft tokens that rows had when they began
    resumed_lens: np.ndarray  # int32 [Q * G], tokens that rows held when this step began
    resumed_tokens: int = 0  # sum of `resumed_lens` over all groups, unfinished ones included
    run_ahead: RunAhead | None = None  # None without prompts of the next step
    resumed: Resumed | None = None  # unfinished groups; None unless the rollout is partial

    @property
    def group_size(self) -> int:
        """G, rows of a prompt."""
        return self.noise_steps.shape[1]

    @property
    def row_ids(self) -> np.ndarray:
        """Return the indices of these rows among the rows of all given prompts, int32 [Q * G]."""
        return _rows_of(self.groups, self.group_size)

    def metrics(self) -> dict[str, float]:
        """Return figures under the names of `metrics.METRICS`."""
        values = self.stats.metrics()
        if self.run_ahead is not None:
            ahead = hosts.fetch(self.run_ahead.drafts.lens)
            values["rollout/tokens_run_ahead"] = int(np.sum(ahead))
        if self.resumed is not None:
            total = int(np.sum(hosts.fetch(self.rollout.lens)))
            values["rollout/tokens_resumed"] = self.resumed_tokens
            values["rollout/stale_fraction"] = int(self.resumed_lens.sum()) / max(total, 1)
        return values


def generate(
    spec: RolloutSpec,
    weights: Params,
    inputs: RolloutInputs,
    *,
    max_lens: np.ndarray | None = None,
    speculation: Speculation | None = None,
) -> RolloutResult:
    """Roll out G responses to each of Q prompts, in consecutive rows.

    max_lens: int32 [Q * G], lengths at which responses end, at most R; only without prompts of the
    next step. speculation: chooses widths of decode steps; None: all have the greatest width.
    """
    inputs = _with_partial_rows(spec, inputs)
    runner = start_runner(spec, weights, inputs, max_lens)
    requests = runner.requests
    all_rows = Scheduler(runner, speculation).run()
    step = np.int32(inputs.noise.step)
    result = RolloutResult(
        read_rollout(spec, all_rows, requests.drafts, inputs.partial_rows, step),
        runner.stats,
        groups=np.arange(len(inputs.prompts.lens)),
        noise_steps=requests.noise_steps,
        draft_lens=requests.draft_lens,
        resumed_lens=requests.partial_lens,
        resumed_tokens=int(requests.partial_lens.sum()),
    )
    if inputs.next_prompts is not None:
        return _without_next_step(result, inputs)
    if inputs.resumed is not None:
        return _without_unfinished(result, inputs, runner.finished)
    return result


def time_decoding(
    spec: RolloutSpec, weights: Params, inputs: RolloutInputs
) -> dict[tuple[int, int], float]:
    """Time a decode step of such a rollout; return seconds by (rows, width)."""
    return time_steps(start_runner(spec, weights, _with_partial_rows(spec, inputs)))


# --- in -------------------------------------------------------------------------------------------


def _with_partial_rows(spec: RolloutSpec, inputs: RolloutInputs) -> RolloutInputs:
    """Return the inputs with the rows of resumed groups among `partial_rows`."""
    if inputs.resumed is None:
        return inputs
    row_ids = np.arange(len(inputs.resumed.prompt_ids) * spec.group_size)
    rows = take(inputs.resumed.rows, row_ids, len(inputs.prompts.lens) * spec.group_size)
    return dataclasses.replace(inputs, partial_rows=rows)


def start_runner(
    spec: RolloutSpec,
    weights: Params,
    inputs: RolloutInputs,
    max_lens: np.ndarray | None = None,
) -> Runner:
    """Return the runner of a rollout, before any row has begun."""
    requests = _requests(spec, inputs)
    noise = dataclasses.replace(inputs.noise, noise_steps=requests.noise_steps)
    all_rows = start_all_rows(spec, requests.prompts, noise, max_lens)
    if inputs.partial_rows is not None:
        all_rows = write_partial_rows(all_rows, inputs.partial_rows)
    if requests.drafts is not None:
        lens = requests.drafts.lens
        ends, cut_ends = hosts.fetch((lens, cut_drafts(spec, all_rows, lens)))
        new = np.maximum(ends - requests.partial_lens, 0)
        requests = dataclasses.replace(
            requests, draft_ends=cut_ends, draft_lens=requests.draft_lens + new
        )
    buckets = spec.buckets(requests.num_train_rows)
    return Runner(spec, buckets, weights, all_rows, requests)


def _order(inputs: RolloutInputs) -> np.ndarray:
    """Return the order of the groups, int [Q + Q']: on each shard first those to train on, then the
    Q' of the next step.

    Raises ValueError if the shards would not have equally many groups.
    """
    num_train = len(inputs.prompts.lens)
    groups = [np.arange(num_train)]
    if inputs.next_prompts is not None:
        groups.append(num_train + np.arange(len(inputs.next_prompts.lens)))
    pieces = shards("batch")
    for part in groups:
        if len(part) % pieces:
            raise ValueError(
                f"a rollout's prompts must be divisible by mesh.data x mesh.fsdp = {pieces}, "
                f"got {len(part)}; set rollout.prompts_per_step"
            )
    return np.concatenate([part.reshape(pieces, -1) for part in groups], axis=1).reshape(-1)


def _requests(spec: RolloutSpec, inputs: RolloutInputs) -> Requests:
    """Return the requests for all rows, in the order of `_order`; `draft_ends` are still 0."""
    order = _order(inputs)
    group_size = spec.group_size
    prompts = inputs.prompts
    num_train_rows = len(prompts.lens) * group_size
    noise_steps = _noise_steps(inputs, group_size)[order]
    if inputs.next_prompts is not None:
        prompts = Prompts.concatenate(prompts, inputs.next_prompts).select(order)
    nothing = np.zeros(len(prompts.lens) * group_size, np.int32)
    partial_lens = nothing
    draft_lens = nothing
    done = nothing > 0
    if inputs.partial_rows is not None:
        rows = inputs.partial_rows
        fetched = hosts.fetch((rows.rollout.lens, rows.draft_lens, rows.done))
        partial_lens, draft_lens, done = fetched
    fills = np.arange(len(prompts.lens)) >= len(prompts.lens) - inputs.fillers
    num_resumed = len(inputs.resumed.prompt_ids) if inputs.resumed else 0
    return Requests(
        prompts,
        noise_steps,
        num_train_rows,
        partial_lens=partial_lens,
        done=done | np.repeat(fills, group_size),
        draft_ends=nothing,
        draft_lens=draft_lens,
        drafts=_ordered_drafts(inputs, partial_lens, group_size, order),
        log_lenience=inputs.log_lenience,
        history=_ordered_history(inputs, order),
        begin_first=np.arange(len(noise_steps)) < num_resumed,
        stop_after_done=inputs.stop_after_groups + inputs.fillers,
    )


def _noise_steps(inputs: RolloutInputs, group_size: int) -> np.ndarray:
    """Return the step whose noise each row uses, int [Q + Q', G]."""
    noise_steps = inputs.noise.steps_of(len(inputs.prompts.lens), group_size).copy()
    if inputs.resumed is not None and inputs.resumed.prompt_ids:
        noise_steps[: len(inputs.resumed.prompt_ids)] = inputs.resumed.noise_steps
    if inputs.next_prompts is None:
        return noise_steps
    later = inputs.next_noise_steps
    if later is None:
        later = np.full((len(inputs.next_prompts.lens), group_size), inputs.noise.step + 1)
    return np.concatenate([noise_steps, later])


def _ordered_drafts(
    inputs: RolloutInputs, partial_lens: np.ndarray, group_size: int, order: np.ndarray
) -> Drafts | None:
    """Return drafts of all rows, in `order`; resumed groups that hold tokens have none."""
    drafts = inputs.drafts
    if drafts is None:
        return None
    if inputs.next_prompts is not None:
        row_ids = _rows_of(order, group_size)
        known = np.where(row_ids < len(drafts.lens), 0, -1)
        return assemble([drafts], np.stack([known, row_ids], axis=1))
    if inputs.resumed is not None:
        is_resumed = np.repeat(partial_lens.reshape(-1, group_size).any(axis=1), group_size)
        return without_drafts(drafts, is_resumed)
    return drafts


def _ordered_history(inputs: RolloutInputs, order: np.ndarray) -> DraftHistory | None:
    """Return the stored responses of all prompts, in `order`."""
    history = inputs.history
    if history is None or inputs.next_prompts is None or shards("batch") == 1:
        return history
    tokens, lens = history
    return tokens[order], lens[order]


# --- out ------------------------------------------------------------------------------------------


def _take_groups(result: RolloutResult, groups: np.ndarray) -> RolloutResult:
    """Return the rows of these groups, int [n], by their order in the rollout; `groups` stays."""
    row_ids = _rows_of(groups, result.group_size)
    return dataclasses.replace(
        result,
        rollout=take(result.rollout, row_ids),
        noise_steps=result.noise_steps[groups],
        draft_lens=result.draft_lens[row_ids],
        resumed_lens=result.resumed_lens[row_ids],
    )


def _without_next_step(result: RolloutResult, inputs: RolloutInputs) -> RolloutResult:
    """Return the result of the rows to train on; rows of the next step become `run_ahead`."""
    num_train = len(inputs.prompts.lens)
    positions = np.argsort(_order(inputs))
    next_step = _rows_of(positions[num_train:], result.group_size)
    names = tuple(example.prompt_id for example in inputs.next_prompts.examples)
    run_ahead = RunAhead(as_drafts(take(result.rollout, next_step)), names)
    trained = _take_groups(result, positions[:num_train])
    return dataclasses.replace(trained, run_ahead=run_ahead)


def _without_unfinished(
    result: RolloutResult, inputs: RolloutInputs, done: np.ndarray
) -> RolloutResult:
    """Return the result of the first groups that are done; all others become `resumed`.

    done: bool [Q * G].
    """
    group_size = result.group_size
    # An unfinished row that rejected nothing so far loses the rest of its draft: nothing more of it
    # counts as rejected. A row that has not begun gets its draft again.
    lens, prefix_lens = hosts.fetch((result.rollout.lens, result.rollout.prefix_lens))
    draft_lens = np.where(~done & (prefix_lens == lens), prefix_lens, result.draft_lens)
    group_done = done.reshape(-1, group_size).all(axis=1)
    finished = np.flatnonzero(group_done)[: inputs.stop_after_groups]
    others = np.setdiff1d(np.arange(len(group_done) - inputs.fillers), finished)
    rows = PartialRows(result.rollout, put(done, "batch"), put(draft_lens, "batch"))
    resumed = Resumed(
        take(rows, _rows_of(others, group_size), len(inputs.resumed.rows.done)),
        tuple(inputs.prompts.examples[group].prompt_id for group in others),
        tuple(map(tuple, result.noise_steps[others].tolist())),
    )
    trained = _take_groups(result, finished)
    return dataclasses.replace(trained, groups=finished, resumed=resumed)


def _rows_of(groups: np.ndarray, group_size: int) -> np.ndarray:
    """Return the rows of groups int [n], int32 [n * G]."""
    return (groups[:, None] * group_size + np.arange(group_size)).reshape(-1).astype(np.int32)
