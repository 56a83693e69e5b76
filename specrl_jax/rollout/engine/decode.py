"""The decode steps of a rollout.

A step is the same at every width W. It feeds a row's last token and W - 1 tokens of a draft, by the
draft source or the learned head, from that token's slot on; the hidden states give W distributions.
From left to right each position gets a token that is sampled with the position's own noise; the
first that differs from the draft's ends the step. So no draft changes a token, it only saves steps.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3
    tokens          a b c | x y z          draft x y
    width 3 feeds       c   x y            from slot 2, gives distributions at positions 0, 1, 2
    x is sampled, then w                   lens = 2, last = w: the next step feeds w at slot 4
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.kv_cache import KVCache, cache_slots
from specrl_jax.models.row_slices import read_slots, write_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.acceptance import count_leading
from specrl_jax.rollout.drafts.learned import HeadDrafting
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.sampling import likeliest_tokens, logprobs_at, sample, temper, truncate
from specrl_jax.sharding import axes, reshard, shards
from specrl_jax.types import Source

_MOST = np.int32(np.iinfo(np.int32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopCondition:
    """End of `decode_steps`, besides that all rows to train on are done; int32, on the host or on
    the device."""

    max_steps: Array
    max_unfinished: Array  # so few rows are unfinished on every shard: the batch can be smaller
    refill_at: Array  # [shards]: so few are unfinished on one of them: others can begin there
    max_left: Array  # so few rows to train on are unfinished on all shards together
    # Rows to train on are the first `num_train_rows` of every `shard_rows` rows.
    num_train_rows: Array
    shard_rows: Array  # rows of a rollout on each shard of the batch

    @classmethod
    def of(
        cls,
        num_train_rows: int,
        shard_rows: int,
        *,
        max_steps: int = int(_MOST),
        max_unfinished: int = 0,
        refill_at: int | np.ndarray = -1,
        max_left: int = 0,
    ) -> "StopCondition":
        """Take numbers on the host: a device array for each would cost it half a millisecond a run.
        refill_at: int, or int [shards]."""
        bounds = np.broadcast_to(refill_at, shards("batch")).astype(np.int32)
        first = (np.int32(x) for x in (max_steps, max_unfinished))
        last = (np.int32(x) for x in (max_left, num_train_rows, shard_rows))
        return cls(*first, bounds, *last)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Counts of what `decode_steps` did, int32."""

    steps: Array
    # [W]: steps of rows, by the number of draft tokens that were accepted, 0 ... W - 1.
    matched: Array
    drafted: Array  # of these tokens, those that were emitted


@functools.partial(
    jax.jit,
    static_argnames=("program", "width"),
    donate_argnames=("cache", "rows", "draft_state"),
)
def decode_steps(
    program: ProgramSpec,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    draft_state: Any,
    stop: StopCondition,
    *,
    width: int,
) -> tuple[KVCache, Rows, Any, StepCounts, Array]:
    """Steps of one width until a stop condition holds.

    draft_state: of `program.draft_source`, which proposes tokens where width > 1; the draft head
    proposes what it leaves open. The cache needs slots for prompt, response and the candidates of a
    step.

    Returns cache, rows, draft state, counts, and what `progress` returns.
    """
    model = Transformer(program.model, weights)
    layers = program.model.num_layers

    def step(state: tuple) -> tuple:
        cache, rows, draft_state, steps, counts = state
        of_head = cache[layers:]
        cache = cache[:layers]
        # Rows that are done write somewhere inside; the others always have room.
        start = jnp.clip(rows.prompt_lens + rows.lens - 1, 0, cache_slots(cache) - width)
        drafted, draft_len = _propose(program, rows, draft_state, width)
        if program.draft_head is not None:
            drafting = HeadDrafting(program.draft_head, program.sampling, model, weights)
            drafted, of_head = drafting.propose(rows, start, of_head, drafted, draft_len)
            draft_len = jnp.full_like(draft_len, width - 1)
        draft_len = jnp.minimum(draft_len, rows.max_lens - rows.lens)
        fed = jnp.concatenate([rows.last[:, None], drafted[:, : width - 1]], axis=1)
        hidden, cache = model(fed, start, cache)
        output = _sample(program, model, hidden, rows)
        accepted = count_leading(output["tokens"] == drafted, draft_len)
        if program.draft_head is not None:
            of_head = drafting.correct(start, of_head, hidden, output["tokens"])
        rows, draft_state, new = _append(program, rows, draft_state, output, accepted, hidden)
        return (*cache, *of_head), rows, draft_state, steps + 1, counts + new

    def goes_on(state: tuple) -> Array:
        _, rows, _, steps, _ = state
        train, unfinished = progress(rows, stop).T
        more = (jnp.sum(train) > stop.max_left) & (steps < stop.max_steps)
        more &= jnp.max(unfinished) > stop.max_unfinished
        return more & jnp.all(unfinished > stop.refill_at)

    state = (cache, rows, draft_state, jnp.int32(0), jnp.zeros(width + 1, jnp.int32))
    cache, rows, draft_state, steps, counts = jax.lax.while_loop(goes_on, step, state)
    counts = StepCounts(steps, counts[:width], counts[width])
    return cache, rows, draft_state, counts, progress(rows, stop)


def progress(rows: Rows, stop: StopCondition) -> Array:
    """int32 [shards, 2], on every device: rows to train on that are not done, and all rows that are
    not done."""
    to_train = rows.index % stop.shard_rows < stop.num_train_rows  # and some padding, which is done
    marked = jnp.stack([~rows.done & to_train, ~rows.done])
    parts = jnp.reshape(marked, (2, shards("batch"), -1), out_sharding=axes(None, "batch", None))
    return reshard(jnp.sum(parts, axis=2, dtype=jnp.int32), None, None).T


def is_eos(tokens: Array, program: ProgramSpec) -> Array:
    """Return which tokens end a response."""
    return functools.reduce(jnp.logical_or, [tokens == eos for eos in program.eos_ids])


def _propose(program: ProgramSpec, rows: Rows, draft_state: Any, width: int) -> tuple[Array, Array]:
    """Candidates int32 [b, width] of the draft source, and how many of them count, < width."""
    if width == 1 or program.draft_source is None:
        nothing = jnp.zeros_like(rows.lens)
        return jnp.broadcast_to(nothing[:, None], (len(nothing), width)), nothing
    tokens, count = program.draft_source.propose(draft_state, rows, width - 1)
    return jnp.pad(tokens, ((0, 0), (0, 1))), count


def _sample(
    program: ProgramSpec, model: Transformer, hidden: Array, rows: Rows
) -> dict[str, Array]:
    """Sample a token from each of the W distributions; what is kept of them, [b, W]."""
    config = program.sampling
    steps = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
    positions = reshard(rows.lens[:, None] + steps, "batch", None)
    logits = temper(model.logits(hidden), config)
    cut = truncate(logits, config)
    tokens, sampling, log_z = sample(cut, rows.seeds, positions, config)
    policy = sampling
    if config.truncates:
        # Looked up: on a CPU a mask over the vocabulary would cost as much as log-sum-exp does.
        policy = logprobs_at(logits, tokens[..., None])[..., 0]
    output = {"tokens": tokens, "policy_logprobs": policy, "sampling_logprobs": sampling}
    if program.stored_logprobs:
        likeliest = likeliest_tokens(cut, program.stored_logprobs, log_z[..., None])
        output |= dict(zip(("top_ids", "top_logprobs"), likeliest))
    return output


def _append(
    program: ProgramSpec,
    rows: Rows,
    draft_state: Any,
    output: dict[str, Array],
    accepted: Array,
    hidden: Array,
) -> tuple[Rows, Any, Array]:
    """Write a step's tokens after the responses of rows that are not done: `accepted` [b] of the
    draft source, and one more. Returns rows, draft state and int32 [W + 1]: `matched` and `drafted`
    of `StepCounts`."""
    tokens = output["tokens"]
    width = tokens.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    active = ~rows.done
    count = jnp.minimum(accepted + 1, rows.max_lens - rows.lens)
    ends = is_eos(tokens, program) & (steps < count[:, None])
    count = jnp.where(active, jnp.minimum(count, count_leading(~ends, count) + 1), 0)
    lens = rows.lens + count
    column = jnp.where(active, rows.lens, program.response_slots)
    changes = dict(output)
    counts = jnp.zeros(width + 1, jnp.int32)
    if width > 1:  # else sources stay SAMPLED
        drafted = jnp.minimum(accepted, count)
        kinds = jnp.where(steps < drafted[:, None], Source.DRAFTED, Source.SAMPLED)
        changes["sources"] = kinds.astype(jnp.int8)
        matched = active[:, None] & (accepted[:, None] == steps)
        sums = (jnp.sum(x, axis=0, dtype=jnp.int32) for x in (matched, active * drafted))
        counts = jnp.hstack([*sums])
        if program.draft_source is not None:
            draft_state = program.draft_source.observe(draft_state, rows, tokens, count)
    changes = {name: write_slots(getattr(rows, name), new, column) for name, new in changes.items()}
    newest = jnp.maximum(count - 1, 0)
    last = read_slots(tokens, newest, 1)[:, 0]
    if program.draft_head is not None:  # it drafts for no row that is done
        changes["last_state"] = read_slots(hidden, newest, 1)[:, 0]
    ended = jnp.any(ends, axis=1) | (lens == rows.max_lens)
    rows = dataclasses.replace(
        rows,
        lens=lens,
        last=jnp.where(count > 0, last, rows.last),
        done=rows.done | (active & ended),
        **changes,
    )
    return rows, draft_state, counts
