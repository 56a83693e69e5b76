"""One rollout: prompts and drafts in, responses with their log-probs out.

`roll` lays every row on the board, lets the engine bring them to their end, and reads it. What it
leaves to the next rollout, in `carry.py`: rows begun ahead, or rows not finished. `generate` is
the same without either.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.data.prompts import concatenate
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.acceptance import AcceptanceRule, count_leading
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.carry_over import (
    CarryOver,
    PartialRows,
    Resumed,
    RunAhead,
    as_drafts,
    in_front,
    kept,
    place,
    take,
    widen,
)
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine import decode_state as board_rows
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.kv_budget import KVBudget
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.spec import ProgramSpec, RolloutSpec
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.rollout.sampling import CUT_OFF_LOGPROB, Purpose, row_seeds, uniforms
from specrl_jax.sharding import put, reshard
from specrl_jax.types import Drafts, Prompts, Rollout, Source


@dataclasses.dataclass(frozen=True)
class Noise:
    """What keys a rollout's noise, beside prompt, sample and position: the run's key, the step,
    and what the rollout is for."""

    key: Array
    step: int
    purpose: Purpose = Purpose.SAMPLE


@dataclasses.dataclass(frozen=True)
class DraftInputs:
    """What a rollout may draft from.

    previous: earlier responses [B] that the acceptance rule verifies, or None. log_lenience: nats,
    in [-inf, inf]. history: stored responses of the prompts, and of the next step's behind them,
    for the draft source. None for none.
    """

    previous: Drafts | None = None
    log_lenience: float = 0.0
    history: DraftHistory | None = None


@dataclasses.dataclass(frozen=True)
class RolloutResult:
    """A rollout, and what it leaves to the next one.

    groups: int [Q], the places of the rollout's groups among the prompts that it was given. begun:
    int [Q], the step whose noise each of them uses. offered: int32 [B], draft tokens that rows
    were offered when they began. held: int32 [B], tokens that they held when this step began;
    carried_tokens: the same, of all rows in flight. ahead: for the next step, None if there were
    no prompts for it. carried: groups in flight, None unless the rollout is partial. finished: bool
    [B], rows that are done, None for all.
    """

    rollout: Rollout
    stats: Stats
    groups: np.ndarray
    noise_steps: np.ndarray
    draft_lens: np.ndarray
    resumed_lens: np.ndarray
    resumed_tokens: int = 0
    run_ahead: RunAhead | None = None
    resumed: Resumed | None = None
    finished: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """int32 [B], the places of the rollout's rows among those of the prompts."""
        return _rows_of(self.groups, len(self.rollout.lens) // len(self.groups))

    def metrics(self) -> dict[str, float]:
        """Under the names of `metrics.METRICS`."""
        values = self.stats.metrics()
        if self.run_ahead is not None:
            values["rollout/tokens_run_ahead"] = int(
                np.sum(jax.device_get(self.run_ahead.drafts.lens))
            )
        if self.resumed is not None:
            total = int(np.sum(jax.device_get(self.rollout.lens)))
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
    """Responses to Q prompts, G rows for each, side by side.

    max_lens: int32 [Q * G], lengths at which responses end, at most R. speculation: chooses widths;
    without it the widest are used.
    """
    plan, key, step, purpose = spec, noise.key, noise.step, noise.purpose
    caps, cost, history, log_lenience = max_lens, speculation, drafts.history, drafts.log_lenience
    drafts, ahead, carried = drafts.previous, carry_over.next_prompts, carry_over.resumed
    wanted, held = carry_over.stop_after_groups, carry_over.partial_rows
    behind = carry_over.allow_unfinished
    everyone = _everyone(prompts, plan.group_size, step, ahead, carried, held)
    own = len(prompts.lens) * plan.group_size
    # The same shapes at every step of a run, also where fewer groups are left to begin.
    ladder = plan.buckets(
        own if carried is None else wanted * plan.group_size + len(carried.rows.done)
    )
    setup = plan.program_for(ladder)
    board = _board(setup, everyone.prompts, key, int(purpose), everyone.begun, caps)
    if everyone.held is not None:
        board = place(board, everyone.held)
    offered = draft_lens = np.zeros_like(everyone.lens)
    if drafts is not None:
        if held is None:
            drafts = _for_fresh(drafts, everyone, setup.group_size)
        if (plan.refresh or plan.token_age) and not setup.accept.samples_anew:
            drafts = _explored(plan, board.accept_seeds, drafts, np.int32(step))
        offered = np.maximum(jax.device_get(drafts.lens) - everyone.lens, 0)
        if setup.accept.cuts_draft:
            lens = _cut(setup.accept, board.accept_seeds, drafts.lens)
            drafts = dataclasses.replace(drafts, lens=lens)
        draft_lens = np.asarray(jax.device_get(drafts.lens))
        drafts = drafts if draft_lens.any() else None
    engine = Scheduler(
        setup,
        KVBudget(setup.model, ladder, plan.max_rows, plan.cache_bytes),
        weights,
        board,
        everyone.prompts.tokens,
        own=own,
        drafts=drafts,
        draft_lens=draft_lens,
        held=everyone.lens,
        done=everyone.done,
        corpus=_source_state(setup, everyone.prompts, history),
        log_lenience=log_lenience,
        cost=cost,
        first=len(carried.steps) if carried else 0,
        wanted=wanted,
        behind=behind,
    )
    board, stats = engine.run(), engine.stats
    compares = drafts is not None and not engine.steps_judge
    rollout, compared = _read(setup, compares, board, drafts, everyone.held, np.int32(step))
    if compares:
        kept, judged, twice = jax.device_get(compared).tolist()
        stats.drafted_tokens -= twice
        if cost is not None:
            cost.record_drafts(kept - stats.accepted_tokens, judged - stats.verified_tokens)
    found = RolloutResult(
        rollout,
        stats,
        groups=np.arange(len(prompts.lens)),
        noise_steps=everyone.begun[: len(prompts.lens)],
        draft_lens=(offered + everyone.offered)[:own],
        resumed_lens=everyone.lens[:own],
        resumed_tokens=int(everyone.lens.sum()),
        finished=engine.finished[:own] if behind else None,
    )
    if ahead is not None:
        return _without_ahead(found, ahead)
    if carried is not None:
        return _completed(found, prompts, carried, engine.finished, wanted)
    return found


@dataclasses.dataclass(frozen=True)
class _Everyone:
    """Who is rolled out: groups of the step itself, then those ahead.

    begun: int [groups], the steps whose noise they use. held: what own rows have, None for
    nothing; on the host lens, done and offered of it, for all rows.
    """

    prompts: Prompts
    begun: np.ndarray
    held: PartialRows | None
    lens: np.ndarray
    done: np.ndarray
    offered: np.ndarray


def _everyone(
    prompts: Prompts,
    group: int,
    step: int,
    ahead: Prompts | None,
    carried: Resumed | None,
    held: PartialRows | None,
) -> _Everyone:
    begun = np.full(len(prompts.lens), step)
    if ahead is not None:
        prompts = concatenate(prompts, ahead)
        begun = np.append(begun, np.full(len(ahead.lens), step + 1))
    rows, nothing = len(begun) * group, np.zeros(len(begun) * group, np.int32)
    if carried is not None:
        begun[: len(carried.steps)] = carried.steps
        held = in_front(carried.rows, jnp.int32(len(carried.steps) * group), rows=rows)
    if held is None:
        return _Everyone(prompts, begun, None, nothing, nothing > 0, nothing)
    known = jax.device_get((held.rollout.lens, held.done, held.draft_lens))
    return _Everyone(prompts, begun, held, *known)


def _for_fresh(drafts: Drafts, everyone: _Everyone, group: int) -> Drafts:
    """Drafts for all rows, of length 0 where a row's group holds tokens or is run ahead."""
    if len(everyone.lens) > drafts.lens.shape[0]:
        drafts = widen(drafts, rows=len(everyone.lens))
    if not everyone.lens.any():
        return drafts
    begun = everyone.lens.reshape(-1, group).any(axis=1)
    begun = put(np.repeat(begun, group), "batch")
    return dataclasses.replace(drafts, lens=jnp.where(begun, 0, drafts.lens))


def _without_ahead(found: RolloutResult, ahead: Prompts) -> RolloutResult:
    """The rollout's own rows, and those of the next step's prompts as drafts."""
    rows = np.arange(len(found.rollout.lens), dtype=np.int32)
    mine, theirs = np.split(rows, [len(found.resumed_lens)])
    names = tuple(example.prompt_id for example in ahead.examples)
    drafts = as_drafts(take(found.rollout, put(theirs, None)))
    rollout = take(found.rollout, put(mine, None))
    return dataclasses.replace(found, rollout=rollout, run_ahead=RunAhead(drafts, names))


def _completed(
    found: RolloutResult, prompts: Prompts, carried: Resumed, done: np.ndarray, wanted: int
) -> RolloutResult:
    """The first `wanted` groups that are complete; all others are carried on."""
    group = len(done) // len(prompts.lens)
    # What is left of the drafts of rows that rejected nothing so far is lost, not rejected; rows
    # that have not begun will be offered theirs again.
    lens, kept_lens = jax.device_get((found.rollout.lens, found.rollout.prefix_lens))
    judged = np.where(~done & (kept_lens == lens), kept_lens, found.draft_lens)
    complete = np.flatnonzero(done.reshape(-1, group).all(axis=1))[:wanted]
    others = np.setdiff1d(np.arange(len(prompts.lens)), complete)
    mine, theirs = (_rows_of(groups, group) for groups in (complete, others))
    held = PartialRows(found.rollout, put(done, "batch"), put(judged, "batch"))
    rows = len(carried.rows.done)
    return dataclasses.replace(
        found,
        rollout=take(found.rollout, put(mine, None)),
        groups=complete,
        noise_steps=found.noise_steps[complete],
        draft_lens=found.draft_lens[mine],
        resumed_lens=found.resumed_lens[mine],
        resumed=Resumed(
            kept(held, put(theirs, None), jnp.int32(len(theirs)), rows=rows),
            tuple(prompts.examples[g].prompt_id for g in others),
            tuple(found.noise_steps[others].tolist()),
        ),
    )


def _rows_of(groups: np.ndarray, group: int) -> np.ndarray:
    """int32 [groups * G], the rows of groups."""
    return (groups[:, None] * group + np.arange(group)).reshape(-1).astype(np.int32)


def _board(
    setup: ProgramSpec, prompts: Prompts, key, purpose: int, steps: np.ndarray, caps
) -> DecodeState:
    """Rows with only their prompts; steps: int [Q], whose noise they use."""
    group = setup.group_size
    last = np.take_along_axis(prompts.tokens, prompts.lens[:, None] - 1, axis=1)[:, 0]
    samples = np.tile(np.arange(group, dtype=np.int32), len(prompts.lens))
    prompt_lens, last = (np.repeat(x.astype(np.int32), group) for x in (prompts.lens, last))
    given, caps = caps, np.full(len(samples), setup.response_slots)
    if given is not None:
        caps[: len(given)] = given  # those ahead have none
    ids, steps = np.repeat(prompts.ids, group, axis=0), np.repeat(steps, group).astype(np.uint32)
    numbers = (np.asarray(x, np.int32) for x in (prompt_lens, caps, last))
    return _start(setup, purpose, key, steps, ids, samples, *numbers)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(setup: ProgramSpec, purpose: int, key, steps, ids, samples, *numbers) -> DecodeState:
    """`start_rows` of host arrays [B], ids [B, 2]: handed over with the call, as to place each by
    itself takes longer."""
    steps, samples, *numbers = (reshard(x, "batch") for x in (steps, samples, *numbers))
    ids = reshard(ids, "batch", None)
    seeds = (row_seeds(key, p, steps, ids, samples) for p in (purpose, int(Purpose.ACCEPT)))
    return board_rows.start_rows(
        *seeds, *numbers, columns=setup.columns, pad_id=setup.pad_id, stored=setup.stored_logprobs
    )


@functools.partial(jax.jit, static_argnums=0)
def _explored(plan: RolloutSpec, seeds: Array, drafts: Drafts, step: Array) -> Drafts:
    """Drafts without those left out at random, cut at their first token that is too old."""
    lens = drafts.lens
    if plan.token_age:
        lens = count_leading(drafts.origin_steps >= step - plan.token_age, lens)
    if plan.refresh:
        # Noise of a position that no response has: the draft's fate must not sway its judgement.
        behind = jnp.full_like(lens, plan.program.response_slots)
        lens = jnp.where(uniforms(seeds, behind) <= plan.refresh, 0, lens)
    return dataclasses.replace(drafts, lens=lens)


@functools.partial(jax.jit, static_argnums=0)
def _cut(rule: AcceptanceRule, seeds: Array, lens: Array) -> Array:
    return rule.cut(uniforms(seeds, jnp.zeros_like(lens)), lens)


def _source_state(setup: ProgramSpec, prompts: Prompts, history: DraftHistory | None):
    """What makes the draft source's state, None without a source. Without a history it starts from
    nothing stored."""
    if setup.draft_source is None:
        return None
    history = history or DraftHistory.empty(len(prompts.lens), setup.response_slots)
    return functools.partial(setup.draft_source.init, prompts, history, setup.group_size)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(
    setup: ProgramSpec,
    compares: bool,
    board: DecodeState,
    drafts: Drafts | None,
    held: PartialRows | None,
    step: Array,
) -> tuple[Rollout, Array | None]:
    """The board as a rollout. compares: with what steps did not judge of the drafts, and the counts
    of `rows.compare`."""
    counts = None
    if compares:
        old = None if held is None else held.rollout
        prefix_lens, sources, counts = board_rows.compare(board, drafts, old)
        board = dataclasses.replace(board, prefix_lens=prefix_lens, sources=sources)
    slots = setup.response_slots
    positions = jnp.arange(slots)[None, :]
    inside = positions < board.lens[:, None]
    sources = jnp.where(inside, board.sources[:, :slots], jnp.int8(Source.SAMPLED))
    policy = jnp.where(inside, board.policy_logprobs[:, :slots], 0.0)
    now = jnp.full_like(board.tokens[:, :slots], 0) + step
    sampling = jnp.where(inside, board.sampling_logprobs[:, :slots], 0.0)
    sampling = jnp.where(jnp.isneginf(sampling), CUT_OFF_LOGPROB, sampling)
    origin_logprobs, origin_steps, draft_logprobs = policy, now, sampling
    if drafts is not None and not setup.accept.samples_anew:  # a match is drawn now
        reused = inside & (board.sources[:, :slots] == Source.REUSED)
        origin_logprobs = jnp.where(reused, drafts.origin_logprobs, policy)
        origin_steps = jnp.where(reused, drafts.origin_steps, now)
        draft_logprobs = jnp.where(reused, drafts.sampling_logprobs, sampling)
    if held is not None:
        before = positions < held.rollout.lens[:, None]
        origin_logprobs = jnp.where(before, held.rollout.origin_logprobs, origin_logprobs)
        origin_steps = jnp.where(before, held.rollout.origin_steps, origin_steps)
        draft_logprobs = jnp.where(before, held.rollout.draft_logprobs, draft_logprobs)

    def top(matrix: Array | None) -> Array | None:
        return None if matrix is None else matrix[:, :slots]

    rollout = Rollout(
        tokens=jnp.where(inside, board.tokens[:, :slots], setup.pad_id),
        lens=board.lens,
        prefix_lens=board.prefix_lens,
        policy_logprobs=policy,
        sampling_logprobs=sampling,
        origin_logprobs=jnp.where(inside, origin_logprobs, 0.0),
        origin_steps=origin_steps,
        sources=sources,
        draft_logprobs=jnp.where(inside, draft_logprobs, 0.0),
        top_ids=top(board.top_ids),
        top_logprobs=top(board.top_logprobs),
    )
    return rollout, counts
