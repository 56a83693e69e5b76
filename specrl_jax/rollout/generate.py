"""One rollout: prompts and drafts in, responses with their log-probs out.

`generate` starts all rows, lets the scheduler bring them to their end, and reads the result.
`carry_over.py` holds what one rollout leaves to the next.
"""

import dataclasses

import numpy as np

from specrl_jax import hosts
from specrl_jax.data.prompts import concatenate, select
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.carry_over import (
    CarryOver,
    Resumed,
    RunAhead,
    as_drafts,
    assemble,
    restore,
    take,
    without_drafts,
)
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine.all_rows import NoiseKey, cut_drafts, read_rollout, start_all_rows
from specrl_jax.rollout.engine.runner import Requests, Runner, Stats
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.engine.speculation import Speculation, time_steps
from specrl_jax.sharding import put, shards
from specrl_jax.types import Drafts, PartialRows, Prompts, Rollout


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
    def rows(self) -> np.ndarray:
        """Return the indices of these rows among the rows of all given prompts, int32 [Q * G]."""
        return _rows_of(self.groups, self.group_size)

    def metrics(self) -> dict[str, float]:
        """Return figures under the names of `metrics.METRICS`."""
        values = self.stats.metrics()
        if self.run_ahead is not None:
            begun = hosts.fetch(self.run_ahead.drafts.lens)
            values["rollout/tokens_run_ahead"] = int(np.sum(begun))
        if self.resumed is not None:
            total = int(np.sum(hosts.fetch(self.rollout.lens)))
            values["rollout/tokens_resumed"] = self.resumed_tokens
            values["rollout/stale_fraction"] = int(self.resumed_lens.sum()) / max(total, 1)
        return values


def generate(
    spec: RolloutSpec,
    weights: Params,
    prompts: Prompts,
    noise: NoiseKey,
    *,
    carry_over: CarryOver = CarryOver(),
    max_lens: np.ndarray | None = None,
    speculation: Speculation | None = None,
) -> RolloutResult:
    """Roll out G responses to each of Q prompts, in consecutive rows.

    max_lens: int32 [Q * G], lengths at which responses end, at most R; only without prompts of the
    next step. speculation: chooses widths of decode steps; None: all have the greatest width.
    """
    begun = _begun(spec, prompts, carry_over)
    runner = start_runner(spec, weights, prompts, noise, carry_over, begun, max_lens)
    requests = runner.requests
    all_rows = Scheduler(runner, speculation).run()
    result = RolloutResult(
        read_rollout(spec, all_rows, requests.drafts, begun, np.int32(noise.step)),
        runner.stats,
        groups=np.arange(len(prompts.lens)),
        noise_steps=requests.noise_steps,
        draft_lens=requests.draft_lens,
        resumed_lens=requests.begun_lens,
        resumed_tokens=int(requests.begun_lens.sum()),
    )
    if carry_over.next_prompts is not None:
        return _without_next_step(result, prompts, carry_over.next_prompts)
    if carry_over.resumed is not None:
        return _without_unfinished(result, prompts, carry_over, runner.finished)
    return result


def time_decoding(
    spec: RolloutSpec,
    weights: Params,
    prompts: Prompts,
    noise: NoiseKey,
    carry_over: CarryOver,
) -> dict[tuple[int, int], float]:
    """Time a decode step of such a rollout; return seconds by (rows, width)."""
    begun = _begun(spec, prompts, carry_over)
    return time_steps(start_runner(spec, weights, prompts, noise, carry_over, begun))


# --- in -------------------------------------------------------------------------------------------


def _begun(spec: RolloutSpec, prompts: Prompts, carry_over: CarryOver) -> PartialRows | None:
    """Return the tokens and state that rows hold already, [Q * G]; None: they hold nothing."""
    if carry_over.resumed is None:
        return carry_over.partial_rows
    row_ids = np.arange(len(carry_over.resumed.prompt_ids) * spec.group_size)
    return take(carry_over.resumed.rows, row_ids, len(prompts.lens) * spec.group_size)


def start_runner(
    spec: RolloutSpec,
    weights: Params,
    prompts: Prompts,
    noise: NoiseKey,
    carry_over: CarryOver,
    begun: PartialRows | None = None,
    max_lens: np.ndarray | None = None,
) -> Runner:
    """Return the runner of a rollout, before any row has begun."""
    order = _order(prompts, carry_over.next_prompts)
    requests = _requests(spec, prompts, noise, carry_over, begun, order)
    all_rows = start_all_rows(spec, requests.prompts, noise, requests.noise_steps, max_lens)
    if begun is not None:
        all_rows = restore(all_rows, begun)
    if requests.drafts is not None:
        ends, cut_ends = hosts.fetch(cut_drafts(spec, all_rows, requests.drafts.lens))
        new = np.maximum(ends - requests.begun_lens, 0)
        requests = dataclasses.replace(
            requests, draft_ends=cut_ends, draft_lens=requests.draft_lens + new
        )
    buckets = spec.buckets(requests.num_train_rows)
    return Runner(spec, buckets, weights, all_rows, requests)


def _order(prompts: Prompts, next_prompts: Prompts | None) -> np.ndarray:
    """Return the order of the groups, int [Q]: on each shard first those to train on, then those of
    the next step.

    Raises ValueError if the shards would not have equally many groups.
    """
    groups = [np.arange(len(prompts.lens))]
    if next_prompts is not None:
        groups.append(len(prompts.lens) + np.arange(len(next_prompts.lens)))
    pieces = shards("batch")
    for part in groups:
        if len(part) % pieces:
            raise ValueError(
                f"a rollout's prompts must be divisible by mesh.data x mesh.fsdp = {pieces}, "
                f"got {len(part)}; set rollout.prompts_per_step"
            )
    return np.concatenate([part.reshape(pieces, -1) for part in groups], axis=1).reshape(-1)


def _requests(
    spec: RolloutSpec,
    prompts: Prompts,
    noise: NoiseKey,
    carry_over: CarryOver,
    begun: PartialRows | None,
    order: np.ndarray,
) -> Requests:
    """Return the requests for all rows, in `order`; `draft_ends` are still 0."""
    group = spec.group_size
    num_train_rows = len(prompts.lens) * group
    noise_steps = _noise_steps(spec, prompts, noise, carry_over)[order]
    if carry_over.next_prompts is not None:
        prompts = select(concatenate(prompts, carry_over.next_prompts), order)
    nothing = np.zeros(len(prompts.lens) * group, np.int32)
    begun_lens = nothing
    draft_lens = nothing
    done = nothing > 0
    if begun is not None:
        fetched = hosts.fetch((begun.rollout.lens, begun.draft_lens, begun.done))
        begun_lens, draft_lens, done = fetched
    fills = np.arange(len(prompts.lens)) >= len(prompts.lens) - carry_over.fillers
    num_resumed = len(carry_over.resumed.prompt_ids) if carry_over.resumed else 0
    return Requests(
        prompts,
        noise_steps,
        num_train_rows,
        begun_lens=begun_lens,
        done=done | np.repeat(fills, group),
        draft_ends=nothing,
        draft_lens=draft_lens,
        drafts=_ordered_drafts(carry_over, begun_lens, group, order),
        log_lenience=carry_over.log_lenience,
        history=_ordered_history(carry_over, order),
        begin_first=np.arange(len(noise_steps)) < num_resumed,
        stop_after_groups=carry_over.stop_after_groups + carry_over.fillers,
    )


def _noise_steps(
    spec: RolloutSpec, prompts: Prompts, noise: NoiseKey, carry_over: CarryOver
) -> np.ndarray:
    """Return the step whose noise each row uses, int [Q, G]; prompts of the next step come last."""
    noise_steps = np.full((len(prompts.lens), spec.group_size), noise.step)
    if noise.noise_steps is not None:
        noise_steps = noise.noise_steps.copy()
    if carry_over.resumed is not None and carry_over.resumed.prompt_ids:
        noise_steps[: len(carry_over.resumed.prompt_ids)] = carry_over.resumed.noise_steps
    if carry_over.next_prompts is None:
        return noise_steps
    later = carry_over.next_noise_steps
    if later is None:
        later = np.full((len(carry_over.next_prompts.lens), spec.group_size), noise.step + 1)
    return np.concatenate([noise_steps, later])


def _ordered_drafts(
    carry_over: CarryOver, begun_lens: np.ndarray, group: int, order: np.ndarray
) -> Drafts | None:
    """Return drafts of all rows, in `order`; resumed groups that hold tokens have none."""
    drafts = carry_over.drafts
    if drafts is None:
        return None
    if carry_over.next_prompts is not None:
        rows = _rows_of(order, group)
        known = np.where(rows < len(drafts.lens), 0, -1)
        return assemble([drafts], np.stack([known, rows], axis=1))
    if carry_over.resumed is not None:
        begun = np.repeat(begun_lens.reshape(-1, group).any(axis=1), group)
        return without_drafts(drafts, begun)
    return drafts


def _ordered_history(carry_over: CarryOver, order: np.ndarray) -> DraftHistory | None:
    """Return the stored responses of all prompts, in `order`."""
    history = carry_over.history
    if history is None or carry_over.next_prompts is None or shards("batch") == 1:
        return history
    tokens, lens = history
    return tokens[order], lens[order]


# --- out ------------------------------------------------------------------------------------------


def _without_next_step(
    result: RolloutResult, prompts: Prompts, next_prompts: Prompts
) -> RolloutResult:
    """Return the result of the rows to train on; rows of the next step become `run_ahead`."""
    num_train = len(prompts.lens)
    group = result.group_size
    positions = np.argsort(_order(prompts, next_prompts))
    trained = positions[:num_train]
    train = _rows_of(trained, group)
    next_step = _rows_of(positions[num_train:], group)
    names = tuple(example.prompt_id for example in next_prompts.examples)
    return dataclasses.replace(
        result,
        rollout=take(result.rollout, train),
        noise_steps=result.noise_steps[trained],
        draft_lens=result.draft_lens[train],
        resumed_lens=result.resumed_lens[train],
        run_ahead=RunAhead(as_drafts(take(result.rollout, next_step)), names),
    )


def _without_unfinished(
    result: RolloutResult, prompts: Prompts, carry_over: CarryOver, done: np.ndarray
) -> RolloutResult:
    """Return the result of the first groups that are done; all others become `resumed`."""
    group = result.group_size
    # An unfinished row that rejected nothing so far loses the rest of its draft: nothing more of it
    # counts as rejected. A row that has not begun gets its draft again.
    lens, prefix_lens = hosts.fetch((result.rollout.lens, result.rollout.prefix_lens))
    draft_lens = np.where(~done & (prefix_lens == lens), prefix_lens, result.draft_lens)
    finished = np.flatnonzero(done.reshape(-1, group).all(axis=1))[: carry_over.stop_after_groups]
    others = np.setdiff1d(np.arange(len(prompts.lens) - carry_over.fillers), finished)
    train = _rows_of(finished, group)
    resumed = _rows_of(others, group)
    rows = PartialRows(result.rollout, put(done, "batch"), put(draft_lens, "batch"))
    size = len(carry_over.resumed.rows.done)
    return dataclasses.replace(
        result,
        rollout=take(result.rollout, train),
        groups=finished,
        noise_steps=result.noise_steps[finished],
        draft_lens=result.draft_lens[train],
        resumed_lens=result.resumed_lens[train],
        resumed=Resumed(
            take(rows, resumed, size),
            tuple(prompts.examples[g].prompt_id for g in others),
            tuple(map(tuple, result.noise_steps[others].tolist())),
        ),
    )


def _rows_of(groups: np.ndarray, group: int) -> np.ndarray:
    """Return the rows of groups int [n], int32 [n * G]."""
    return (groups[:, None] * group + np.arange(group)).reshape(-1).astype(np.int32)
