"""The jitted parts of a rollout that run the policy: prefill, re-prefill, and decode steps.

A step is the same at every width W. It feeds a row's last token and W - 1 draft tokens from that
token's slot on; the hidden states give W distributions. From left to right each position gets the
draft token, if it is accepted, else a sampled token, which ends the step. A rejected token needs no
cleaning up: it is not counted, and its cache slot is written over later.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3
    tokens          a b c | x y z          draft x y z
    width 3 feeds       c   x y            from slot 2, gives distributions at positions 0, 1, 2
    x accepted, y not, w sampled           lens = 2, last = w: the next step feeds w at slot 4

Verification is a step of the draft's width, plain decoding one of width 1, a draft source's step
one in between. Whether a token is accepted depends on its row and position alone, never on the
width: a draft verified in one pass, in chunks or token by token gives the same tokens. Only rules
that need the whole draft always verify it in one pass.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.kv_cache import (
    KVCache,
    cache_slots,
    gather_slots,
    init_cache,
    repeat_rows,
    resize,
)
from specrl_jax.models.row_slices import read_slots, write_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.acceptance import count_leading
from specrl_jax.rollout.engine.decode_state import DecodeState, verifying
from specrl_jax.rollout.engine.draft_tries import DraftTries
from specrl_jax.rollout.engine.rejection_sampler import Proposal, StepOutput, accept_or_sample
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.sharding import on_shards, reshard, shards, spec, take_own_rows
from specrl_jax.types import Source

_MOST = np.int32(np.iinfo(np.int32).max)
_NONE = np.int32(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopCondition:
    """End of `decode_steps`: int32 scalars, on the host or on the device. If all rows are to end
    (no bound of active rows > 0), it also ends once no draft is left to verify."""

    max_active: Array  # at most so many of the rows to train on are active on each shard
    max_len: Array  # a row that holds so many tokens is at its cache limit, and not active
    max_steps: Array
    # Rows to train on are the first `num_train_rows` of every `shard_rows` rows.
    num_train_rows: Array
    shard_rows: Array = _MOST  # rows of a rollout on each shard of the batch
    refill_at: Array = _NONE  # or [shards]: at most so many of them are active on any of these
    max_left: Array = _NONE  # at most so many of them are active on all shards together

    @classmethod
    def of(cls, *numbers: int, refill_at: np.ndarray | None = None, **others: int):
        """Take numbers on the host: a device array for each would cost it half a millisecond a run.
        refill_at: int [shards]; None: no bound."""
        bounds = np.full(shards("batch"), -1) if refill_at is None else refill_at
        others = {name: np.int32(number) for name, number in others.items()}
        return cls(*map(np.int32, numbers), refill_at=bounds.astype(np.int32), **others)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Counts of what `decode_steps` did, int32."""

    steps: Array
    # [W]: steps of rows that were not verifying, by the number of tokens of the draft source that
    # were accepted, 0 ... W - 1; zeros without a draft source.
    matched: Array
    drafted: Array  # of these tokens, those that were emitted
    verified: Array  # tokens of drafts to verify that the rule decided on
    accepted: Array  # and those that it accepted


@functools.partial(jax.jit, static_argnames="program")
def prefill(program: ProgramSpec, weights: Params, prompts_QP: Array) -> KVCache:
    """KV cache [Q, P] of the prompts, on host or device; for `broadcast_prefill`."""
    prompts_QP = reshard(prompts_QP, "batch", None)
    cache = init_cache(program.model, *prompts_QP.shape)
    return Transformer(program.model, weights)(prompts_QP, cache=cache)[1]


@functools.partial(jax.jit, static_argnames=("slots", "group_size"))
def broadcast_prefill(cache: KVCache, *, slots: int, group_size: int) -> KVCache:
    """Cache [Q * G, slots] for the responses to each row of `cache` [Q, P].

    A program of its own: for a further cache length only this copy is compiled, not the policy.
    """
    return resize(repeat_rows(cache, group_size), slots)


@functools.partial(jax.jit, static_argnames=("program", "slots", "width"))
def re_prefill(
    program: ProgramSpec,
    weights: Params,
    prompts_bP: Array,
    rows: DecodeState,
    *,
    slots: int,
    width: int,
) -> KVCache:
    """KV cache [b, slots] of rows that hold up to `width` tokens already, in one pass. prompts: on
    host or device."""
    size, prompt_slots = prompts_bP.shape
    prompts_bP = reshard(prompts_bP, "batch", None)
    start = jnp.zeros(size, jnp.int32, out_sharding=spec("batch"))
    packed = jnp.pad(prompts_bP, ((0, 0), (0, width)))
    packed = write_slots(packed, rows.tokens[:, :width], rows.prompt_lens)
    cache = init_cache(program.model, size, max(slots, prompt_slots + width))
    _, cache = Transformer(program.model, weights)(packed, start, cache)
    return resize(cache, slots)


@functools.partial(
    jax.jit,
    static_argnames=("program", "width", "verify"),
    donate_argnames=("cache", "rows", "draft_state"),
)
def decode_steps(
    program: ProgramSpec,
    weights: Params,
    cache: KVCache,
    rows: DecodeState,
    draft_state: Any,
    stop: StopCondition,
    *,
    width: int,
    verify: bool = False,
) -> tuple[KVCache, DecodeState, Any, StepCounts, Array]:
    """Steps of one width until a stop condition holds.

    draft_state: of `program.draft_source`, which then proposes tokens for rows that are not
    verifying; None: nobody does. verify: a verification pass, where a rule that does not sample
    anew needs one sampled token, after the accepted ones, not one at every position. The cache
    needs slots for the prompt and `stop.max_len` tokens, with a draft state for `width` at least,
    without one for width - 1 more.

    Returns cache, rows, draft state, counts, and what `progress` returns.
    """
    model = Transformer(program.model, weights)
    verify = verify and not program.accept.samples_anew

    def step(state):
        cache, rows, draft_state, steps, counts = state
        active = _active(rows, stop)
        proposal = _propose(program, rows, draft_state, width)
        fed = jnp.concatenate([rows.last[:, None], proposal.tokens[:, : width - 1]], axis=1)
        start = rows.prompt_lens + rows.lens - 1
        most = cache_slots(cache) - width
        if draft_state is not None:
            # Near the end of the cache the step begins earlier, so that it fits, and feeds the
            # row's last tokens again; what it may still emit there is less than its width anyway.
            again = jnp.clip(start - most, 0, width - 1)
            fed = jnp.concatenate([_before(rows, width), fed], axis=1)
            fed = read_slots(fed, width - 1 - again, width)
            draft_len = jnp.minimum(proposal.draft_len, width - again)
            proposal = dataclasses.replace(proposal, draft_len=draft_len)
        # Rows that are done write somewhere inside; the others always have room.
        hidden, cache = model(fed, jnp.clip(start, 0, most), cache)
        if draft_state is not None:
            hidden = read_slots(jnp.pad(hidden, ((0, 0), (0, width - 1), (0, 0))), again, width)
        output = accept_or_sample(program, model, hidden, rows, proposal, verify)
        rows, draft_state, new = _append(
            program, rows, draft_state, output, active, proposal.verifying, stop.max_len
        )
        return cache, rows, draft_state, steps + 1, counts + new

    counts = jnp.zeros(width + 1, jnp.int32)
    begun = rows
    state = (cache, rows, draft_state, jnp.int32(0), counts)
    cache, rows, draft_state, steps, counts = jax.lax.while_loop(
        lambda x: _goes_on(x[1], x[3], stop), step, state
    )
    rows, verified, accepted = _mark_reused(begun, rows)
    counts = StepCounts(steps, counts[:width], counts[width], verified, accepted)
    return cache, rows, draft_state, counts, progress(rows, stop)


def _goes_on(rows: DecodeState, steps: Array, stop: StopCondition) -> Array:
    train_rows = _count_on_shards(_active(rows, stop) & _trained(rows, stop))
    more = (jnp.max(train_rows) > stop.max_active) & (steps < stop.max_steps)
    more &= jnp.all(train_rows > stop.refill_at) & (jnp.sum(train_rows) > stop.max_left)
    if rows.draft is None:
        return more
    # Steps that verify cost a little more, with a draft source more than that.
    # Rows at their cache limit count: the scheduler drops drafts only if no row is verifying.
    bounds = stop.max_active, jnp.max(stop.refill_at), stop.max_left
    return more & ((functools.reduce(jnp.maximum, bounds) > 0) | jnp.any(verifying(rows)))


@functools.partial(jax.jit, static_argnames=("program", "width"), donate_argnames="rows")
def verify_trie(
    program: ProgramSpec,
    weights: Params,
    tries: DraftTries,
    rows: DecodeState,
    stop: StopCondition,
    *,
    width: int,
) -> tuple[KVCache, DecodeState, StepCounts, Array]:
    """Prefill and a verification step of `width` tokens in one, for rows that hold nothing: every
    distinct prefix of prompts and drafts is computed once, then spread to the rows.

    No draft is longer than `width`. Returns the rows' cache, as long as `tries.nodes`, rows,
    counts, and what `progress` returns.
    """
    model = Transformer(program.model, weights)
    tokens, depths, ends, nodes = (reshard(x, "batch", None) for x in tries)
    packed = init_cache(program.model, *tokens.shape)
    hidden, packed = model(tokens, cache=packed, positions_BT=depths, ends_BT=ends)
    read = jnp.maximum(read_slots(nodes, rows.prompt_lens - 1, width), 0)
    hidden = on_shards(_at_nodes, hidden, read, like=hidden)
    proposal = _propose(program, rows, None, width)
    active = _active(rows, stop)
    verify = not program.accept.samples_anew  # as in `decode_steps`
    output = accept_or_sample(program, model, hidden, rows, proposal, verify)
    new, _, counts = _append(program, rows, None, output, active, proposal.verifying, stop.max_len)
    new, verified, accepted = _mark_reused(rows, new)
    counts = StepCounts(jnp.int32(1), counts[:width], counts[width], verified, accepted)
    return gather_slots(packed, nodes), new, counts, progress(new, stop)


def _at_nodes(hidden_STD: Array, nodes_bW: Array) -> Array:
    return take_own_rows(jax.lax.collapse(hidden_STD, 0, 2), nodes_bW)


@jax.jit
def progress(rows: DecodeState, stop: StopCondition) -> Array:
    """int32 [shards, 5]: rows to train on that are not done, all rows that are not done, rows
    verifying, the longest response of rows not done, the longest draft left to verify."""
    verifies = verifying(rows)
    drafts_left = jnp.zeros_like(rows.lens) if rows.draft is None else rows.draft.lens - rows.lens
    train = ~rows.done & _trained(rows, stop)
    counts = (train, ~rows.done, verifies)
    longest = jnp.where(~rows.done, rows.lens, 0), jnp.where(verifies, drafts_left, 0)
    numbers = [_count_on_shards(x) for x in counts]
    return jnp.stack([*numbers, *(_on_each_shard(jnp.max, x) for x in longest)], axis=1)


def _count_on_shards(marked: Array) -> Array:
    """int32 [shards]: rows that are marked in bool [b]; on every device."""
    return _on_each_shard(functools.partial(jnp.sum, dtype=jnp.int32), marked)


def _on_each_shard(reduce: Callable, numbers: Array) -> Array:
    """Reduce the numbers [b] of the rows on each shard: [shards], on every device."""
    parts = jnp.reshape(numbers, (shards("batch"), -1), out_sharding=spec("batch", None))
    return reshard(reduce(parts, axis=1), None)


def _trained(rows: DecodeState, stop: StopCondition) -> Array:
    """bool [b]: rows to train on; and some padding, which is done."""
    return rows.index % stop.shard_rows < stop.num_train_rows


def _active(rows: DecodeState, stop: StopCondition) -> Array:
    return ~rows.done & (rows.lens < stop.max_len)


def _before(rows: DecodeState, width: int) -> Array:
    """Read the response tokens before the last: [b, width - 1], zeros first where fewer."""
    padded = jnp.pad(rows.tokens, ((0, 0), (width, 0)))
    return read_slots(padded, rows.lens, width - 1)  # columns have moved by `width`


def _propose(program: ProgramSpec, rows: DecodeState, draft_state: Any, width: int) -> Proposal:
    """Propose from the rows' drafts to verify, elsewhere from the draft source."""
    verifies = verifying(rows)
    tokens = jnp.zeros((rows.lens.shape[0], width), jnp.int32, out_sharding=spec("batch", None))
    draft_len = jnp.zeros_like(rows.lens)
    if draft_state is not None:
        drafted, count = program.draft_source.propose(draft_state, rows, width - 1)
        tokens = jnp.pad(drafted, ((0, 0), (0, 1)))
        draft_len = jnp.minimum(count, rows.max_lens - rows.lens)
    if rows.draft is not None:
        old = read_slots(rows.draft.tokens, rows.lens, width)
        # Rows without draft tokens may have any.
        tokens = old if draft_state is None else jnp.where(verifies[:, None], old, tokens)
        draft_left = jnp.clip(rows.draft.lens - rows.lens, 0, width)
        draft_len = jnp.where(verifies, draft_left, draft_len)
    return Proposal(tokens, draft_len, verifies)


def _append(
    program: ProgramSpec,
    rows: DecodeState,
    draft_state: Any,
    output: StepOutput,
    active: Array,
    verifies: Array,
    max_len: Array,
) -> tuple[DecodeState, Any, Array]:
    """Write a step's tokens after the responses of active rows. Returns rows, draft state and
    int32 [W + 1]: `matched` and `drafted` of `StepCounts`. `_mark_reused` does what remains."""
    width = output.tokens.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    accepted = output.accepted
    room = jnp.minimum(max_len, rows.max_lens) - rows.lens
    # A row that reaches its cache limit stops there; what was cut off is found again later.
    count = jnp.minimum(jnp.minimum(accepted + 1, width), room)
    ends = _is_eos(output.tokens, program) & (steps < count[:, None])
    before_end = count_leading(~ends, count)
    count = jnp.where(active, jnp.minimum(count, before_end + 1), 0)
    lens = rows.lens + count
    ended = jnp.any(ends, axis=1) | (lens == rows.max_lens)
    column = jnp.where(active, rows.lens, program.response_slots)
    names = ("tokens", "policy_logprobs", "sampling_logprobs")
    changes = {name: getattr(output, name) for name in names}
    counts = jnp.zeros(width + 1, jnp.int32)
    if draft_state is not None:  # else sources stay SAMPLED
        drafted = jnp.minimum(accepted, count)
        kinds = jnp.where(steps < drafted[:, None], Source.DRAFTED, Source.SAMPLED)
        changes["sources"] = kinds.astype(jnp.int8)
        counted = (active & ~verifies)[:, None]
        both = jnp.concatenate([accepted[:, None] == steps, drafted[:, None]], axis=1)
        counts = jnp.sum(jnp.where(counted, both, 0), axis=0, dtype=jnp.int32)
        draft_state = program.draft_source.observe(draft_state, rows, output.tokens, count)
    if output.likeliest is not None:
        changes |= dict(zip(("top_ids", "top_logprobs"), output.likeliest))
    changes = {name: write_slots(getattr(rows, name), new, column) for name, new in changes.items()}
    if rows.draft is not None:
        # Over once a token was sampled, unless it was cut off with what came before.
        over = verifies & (count > accepted)
        draft_lens = jnp.where(over, rows.lens + accepted, rows.draft.lens)
        changes["draft"] = dataclasses.replace(rows.draft, lens=draft_lens)
    last = read_slots(output.tokens, jnp.maximum(count - 1, 0), 1)[:, 0]
    rows = dataclasses.replace(
        rows,
        lens=lens,
        last=jnp.where(count > 0, last, rows.last),
        done=rows.done | (active & ended),
        **changes,
    )
    return rows, draft_state, counts


def _mark_reused(begun: DecodeState, rows: DecodeState) -> tuple[DecodeState, Array, Array]:
    """Rows with the accepted tokens of drafts to verify marked and counted, and how many of these
    tokens were verified and accepted, int32 scalars. begun: the rows before the steps.

    Worked row: it held 2 tokens of a draft of 9, and now holds 7 with a draft that ends at 4. So 3
    draft tokens were verified, 2 accepted, and 3 sampled.
    """
    if rows.draft is None:
        return rows, jnp.int32(0), jnp.int32(0)
    ends = jnp.minimum(rows.draft.lens, rows.lens)
    accepted = jnp.where(verifying(begun), ends - begun.lens, 0)
    rejected = rows.draft.lens < begun.draft.lens
    columns = jnp.arange(rows.sources.shape[1])[None, :]
    inside = (columns >= begun.lens[:, None]) & (columns < (begun.lens + accepted)[:, None])
    rows = dataclasses.replace(
        rows,
        prefix_lens=rows.prefix_lens + accepted,
        sources=jnp.where(inside, jnp.int8(Source.REUSED), rows.sources),
    )
    counts = jnp.sum(jnp.stack([accepted + rejected, accepted]), axis=1, dtype=jnp.int32)
    return rows, counts[0], counts[1]


def _is_eos(tokens: Array, program: ProgramSpec) -> Array:
    return functools.reduce(jnp.logical_or, [tokens == eos for eos in program.eos_ids])
