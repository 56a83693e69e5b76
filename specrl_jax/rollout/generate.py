"""One rollout: prompts and drafts in, responses with their log-probs out.

`generate` starts all rows, lets the scheduler bring them to their end, and reads the result. What
one rollout leaves to the next is in `carry_over.py`.
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
from specrl_jax.rollout.engine.all_rows import Noise, cut_drafts, read_rollout, start_all_rows
from specrl_jax.rollout.engine.measure import measure_programs
from specrl_jax.rollout.engine.requests import DraftInputs, Requests
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.engine.speculation import Seconds, Speculation
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.rollout.rows import Rows
from specrl_jax.sharding import put, shards
from specrl_jax.types import PartialRows, Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class RolloutResult:
    """A rollout of Q groups, G rows each, and what it leaves to the next one."""

    rollout: Rollout
    stats: Stats
    groups: np.ndarray  # int [Q], their places among the prompts that were given
    noise_steps: np.ndarray  # int [Q, G], the step whose noise each row uses
    draft_lens: np.ndarray  # int32 [Q * G], draft tokens that rows had when they began
    resumed_lens: np.ndarray  # int32 [Q * G], tokens that rows held when this step began
    resumed_tokens: int = 0  # the same in all, groups that are not done included
    run_ahead: RunAhead | None = None  # None without prompts of the next step
    resumed: Resumed | None = None  # groups that are not done; None unless the rollout is partial
    finished: np.ndarray | None = None  # bool [Q * G], rows that are done; None: all

    @property
    def rows(self) -> np.ndarray:
        """int32 [Q * G], the places of the rollout's rows among those of the prompts."""
        return _rows_of(self.groups, len(self.rollout.lens) // len(self.groups))

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
    noise: Noise,
    *,
    drafts: DraftInputs = DraftInputs(),
    max_lens: np.ndarray | None = None,
    speculation: Speculation | None = None,
    carry_over: CarryOver = CarryOver(),
) -> RolloutResult:
    """Responses to Q prompts, G rows in a row for each.

    max_lens: int32 [Q * G], lengths at which responses end, at most R; only without prompts of the
    next step. speculation: chooses widths and verifications; without it the widest are used.
    """
    inputs = (spec, weights, prompts, noise, drafts, carry_over, max_lens)
    runner, held, order, draft_lens = _runner(*inputs)
    requests = runner.requests
    all_rows = Scheduler(runner, speculation).run()
    previous = runner.drafts.previous
    result = RolloutResult(
        read_rollout(spec.program, all_rows, previous, held, np.int32(noise.step)),
        runner.stats,
        groups=np.arange(len(prompts.lens)),
        noise_steps=requests.noise_steps,
        draft_lens=draft_lens,
        resumed_lens=requests.held_lens,
        resumed_tokens=int(requests.held_lens.sum()),
        finished=runner.finished if carry_over.allow_unfinished else None,
    )
    if carry_over.next_prompts is not None:
        return _without_next_step(result, prompts, carry_over.next_prompts, order)
    if carry_over.resumed is not None:
        return _without_unfinished(result, prompts, carry_over, runner.finished)
    return result


def measure(
    spec: RolloutSpec,
    weights: Params,
    prompts: Prompts,
    noise: Noise,
    drafts: DraftInputs,
    carry_over: CarryOver,
) -> Seconds:
    """Time the programs of such a rollout: as if all rows had drafts of all response slots."""
    runner, *_ = _runner(spec, weights, prompts, noise, drafts, carry_over)
    return measure_programs(runner)


# --- in -------------------------------------------------------------------------------------------


def _runner(
    spec: RolloutSpec,
    weights: Params,
    prompts: Prompts,
    noise: Noise,
    drafts: DraftInputs,
    carry_over: CarryOver,
    max_lens: np.ndarray | None = None,
) -> tuple[Runner, PartialRows | None, np.ndarray, np.ndarray]:
    """The rows as they begin, what they hold, their groups as of `_order`, and int32 [B], draft
    tokens that they have."""
    held = _held_rows(spec, prompts, carry_over)
    order = _order(prompts, carry_over.next_prompts)
    requests = _requests(spec, prompts, noise, carry_over, held, order)
    buckets = spec.buckets(requests.num_train_rows)
    drafts = _drafts_for(requests, drafts, carry_over, order)
    all_rows, requests, draft_lens = _start(spec, noise, requests, drafts, held, max_lens)
    runner = Runner(spec.program, buckets, weights, all_rows, requests, drafts)
    return runner, held, order, draft_lens


def _held_rows(spec: RolloutSpec, prompts: Prompts, carry_over: CarryOver) -> PartialRows | None:
    """Return what all rows hold, on the device; None: nothing."""
    resumed = carry_over.resumed
    group = spec.group_size
    if resumed is None:
        return carry_over.partial_rows
    return take(resumed.rows, np.arange(len(resumed.steps) * group), len(prompts.lens) * group)


def _order(prompts: Prompts, next_prompts: Prompts | None) -> np.ndarray:
    """int [Q]: which group is at each place. On each shard of the batch there are first those to
    train on, then those of the next step.

    Raises ValueError where the shards would not have as many groups each.
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
    noise: Noise,
    carry_over: CarryOver,
    held: PartialRows | None,
    order: np.ndarray,
) -> Requests:
    """All rows in their order; none has a draft yet."""
    num_train_rows = len(prompts.lens) * spec.group_size
    noise_steps = _noise_steps(noise.row_steps, noise.step, prompts, spec.group_size)
    resumed_steps = carry_over.resumed.steps if carry_over.resumed else ()
    for group, steps in enumerate(resumed_steps):
        noise_steps[group] = steps
    if carry_over.next_prompts is not None:
        later = (carry_over.next_steps, noise.step + 1, carry_over.next_prompts)
        noise_steps = np.concatenate([noise_steps, _noise_steps(*later, spec.group_size)])[order]
        prompts = select(concatenate(prompts, carry_over.next_prompts), order)
    nothing = np.zeros(len(prompts.lens) * spec.group_size, np.int32)
    held_lens = nothing
    done = nothing > 0
    if held is not None:
        held_lens, done = hosts.fetch((held.rollout.lens, held.done))
    done = done | (
        np.arange(len(done)) // spec.group_size >= len(prompts.lens) - carry_over.fillers
    )
    return Requests(
        prompts,
        noise_steps,
        num_train_rows,
        held_lens,
        done,
        draft_lens=nothing,
        begin_first=np.arange(len(noise_steps)) < len(resumed_steps),
        stop_after_groups=carry_over.stop_after_groups + carry_over.fillers,
        allow_unfinished=carry_over.allow_unfinished,
    )


def _noise_steps(steps: np.ndarray | None, step: int, prompts: Prompts, group: int) -> np.ndarray:
    """int [Q, G]: `steps` where they are given, else `step` everywhere."""
    return np.full((len(prompts.lens), group), step) if steps is None else steps.copy()


def _start(
    spec: RolloutSpec,
    noise: Noise,
    requests: Requests,
    drafts: DraftInputs,
    held: PartialRows | None,
    max_lens: np.ndarray | None,
) -> tuple[Rows, Requests, np.ndarray]:
    """All rows as they begin, requests with the drafts to verify, and int32 [B], draft tokens that
    rows had when they began."""
    steps = requests.noise_steps
    draft_lens = np.zeros_like(requests.draft_lens)
    all_rows = start_all_rows(spec.program, requests.prompts, noise, steps, max_lens)
    if held is not None:
        all_rows = restore(all_rows, held)
        draft_lens = hosts.fetch(held.draft_lens)
    if drafts.previous is not None:
        lens, cut_lens = hosts.fetch(cut_drafts(spec, all_rows, drafts.previous.lens))
        draft_lens = draft_lens + np.maximum(lens - requests.held_lens, 0)
        requests = dataclasses.replace(requests, draft_lens=cut_lens)
    return all_rows, requests, draft_lens


def _drafts_for(
    requests: Requests, drafts: DraftInputs, carry_over: CarryOver, order: np.ndarray
) -> DraftInputs:
    """Drafts of all rows, in their order. Those of `partial_rows` begin with what is held; others
    are left out where a group holds tokens."""
    previous = drafts.previous
    history = drafts.history
    group = len(requests.done) // len(order)
    if carry_over.next_prompts is not None:
        if previous is not None:
            rows = _rows_of(order, group)
            known = np.where(rows < len(previous.lens), 0, -1)
            previous = assemble([previous], np.stack([known, rows], axis=1))
        if history is not None and shards("batch") > 1:
            tokens, lens = history.tokens[order], history.lens[order]
            history = DraftHistory(tokens, lens, history.ages)
    elif previous is not None and carry_over.resumed is not None:
        held = np.repeat(requests.held_lens.reshape(-1, group).any(axis=1), group)
        previous = without_drafts(previous, held)
    return dataclasses.replace(drafts, previous=previous, history=history)


# --- out ------------------------------------------------------------------------------------------


def _without_next_step(
    result: RolloutResult, prompts: Prompts, next_prompts: Prompts, order: np.ndarray
) -> RolloutResult:
    """The train rows; those of the next step's prompts as drafts."""
    places = np.argsort(order)
    num_train = len(prompts.lens)
    group = len(result.draft_lens) // len(order)
    train, next_step = (_rows_of(x, group) for x in np.split(places, [num_train]))
    names = tuple(example.prompt_id for example in next_prompts.examples)
    return dataclasses.replace(
        result,
        rollout=take(result.rollout, train),
        noise_steps=result.noise_steps[places[:num_train]],
        draft_lens=result.draft_lens[train],
        resumed_lens=result.resumed_lens[train],
        run_ahead=RunAhead(as_drafts(take(result.rollout, next_step)), names),
    )


def _without_unfinished(
    result: RolloutResult, prompts: Prompts, carry_over: CarryOver, done: np.ndarray
) -> RolloutResult:
    """The first groups that are done; all others are resumed in the next step."""
    group = len(done) // len(prompts.lens)
    # What is left of the drafts of rows that rejected nothing so far is lost, not rejected; rows
    # that have not begun get theirs again.
    lens, prefix_lens = hosts.fetch((result.rollout.lens, result.rollout.prefix_lens))
    draft_lens = np.where(~done & (prefix_lens == lens), prefix_lens, result.draft_lens)
    finished = np.flatnonzero(done.reshape(-1, group).all(axis=1))[: carry_over.stop_after_groups]
    others = np.setdiff1d(np.arange(len(prompts.lens) - carry_over.fillers), finished)
    train, resumed = (_rows_of(groups, group) for groups in (finished, others))
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
    """int32 [groups * G], the rows of groups."""
    return (groups[:, None] * group + np.arange(group)).reshape(-1).astype(np.int32)
