"""Decode steps of a rollout.

A step is the same at every width W. It feeds a row's last token, then W - 1 draft tokens from the
draft source or the learned head. The hidden states give W distributions. At each position, from
left to right, a token is sampled with the position's own noise. The first sampled token that
differs from the draft token ends the step. So a draft changes no token: it only saves steps.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3
    tokens          a b c | x y z          draft x y
    width 3 feeds       c   x y            from slot 2, gives distributions at positions 0, 1, 2
    x is sampled, then w                   lens = 2, last = w: the next step feeds w at slot 4
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.row_slices import count_leading, read_slots, write_slots
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.drafts.learned import HeadDrafting
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.fused_sampling import FusedDistributions, distributions
from specrl_jax.rollout.rows import PADDING, Rows, where_rows
from specrl_jax.rollout.sampling import TokenDistributions
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.rollout.stop_strings import NOTHING
from specrl_jax.sharding import axes, reshard, shards
from specrl_jax.types import Source, Tokens

_MOST = np.int32(np.iinfo(np.int32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopCondition:
    """Limits at which `decode_steps` stops, unless only background rows are left; int32."""

    max_steps: Array
    max_unfinished: Array  # most unfinished rows on every shard at which a smaller batch fits
    refill_at: Array  # [shards], most unfinished rows on any one shard at which others start
    max_left: Array  # most unfinished rows over all shards, background rows aside

    @classmethod
    def of(
        cls,
        *,
        max_steps: int = int(_MOST),
        max_unfinished: int = 0,
        refill_at: int | np.ndarray = -1,
        max_left: int = 0,
    ) -> "StopCondition":
        """Return the condition. refill_at: int, or int [shards].

        Its numbers stay on the host: each device array would cost half a millisecond per call.
        """
        bounds = np.broadcast_to(refill_at, shards("batch")).astype(np.int32)
        return cls(
            np.int32(max_steps),
            np.int32(max_unfinished),
            bounds,
            np.int32(max_left),
        )


class Decoding(NamedTuple):
    """State that decode steps of one width change, and their cost so far."""

    cache: KVCache  # of the policy's layers, then of the draft head's
    rows: Rows
    draft_state: Any  # of `spec.draft_source`
    steps: Array  # int32
    by_accepted: Array  # int32 [W], row steps by accepted draft tokens, 0 ... W - 1; 0 if W is 1
    emitted_drafts: Array  # int32, accepted draft tokens that rows received


@functools.partial(
    jax.jit,
    static_argnames="width",
    donate_argnames=("cache", "rows", "draft_state"),
)
def decode_steps(
    spec: RolloutSpec,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    draft_state: Any,
    stop: StopCondition,
    *,
    width: int,
) -> tuple[Decoding, Array]:
    """Run steps of one width until a stop condition holds.

    draft_state: state of `spec.draft_source`. If width > 1 the draft source proposes tokens, and
    the draft head proposes the tokens after them. The cache needs slots for prompt, response and
    the draft tokens of a step.

    Returns the changed state, and the result of `count_unfinished`.
    """

    def keep_going(state: Decoding) -> Array:
        awaited, every = count_unfinished(state.rows).T
        more = (jnp.sum(awaited) > stop.max_left) & (state.steps < stop.max_steps)
        more &= jnp.max(every) > stop.max_unfinished
        return more & jnp.all(every > stop.refill_at)

    zero = jnp.int32(0)
    state = Decoding(cache, rows, draft_state, zero, jnp.zeros(width, jnp.int32), zero)
    step = functools.partial(_step, spec, weights, width)
    state = jax.lax.while_loop(keep_going, step, state)
    return state, count_unfinished(state.rows)


def decode_inputs(shapes: RolloutShapes, size: int, width: int) -> tuple:
    """Return the inputs of `decode_steps` for a batch of `size` slots."""
    cache, rows = shapes.batch(size)
    draft_state = shapes.draft_state if width > 1 else None
    stop = abstract.on_host(StopCondition.of())
    return shapes.spec, shapes.weights, cache, rows, draft_state, stop


def _step(spec: RolloutSpec, weights: Params, width: int, state: Decoding) -> Decoding:
    """Run one step."""
    rows = state.rows
    draft_state = state.draft_state
    by_accepted = state.by_accepted
    emitted_drafts = state.emitted_drafts
    model = Transformer(spec.model, weights)
    cache = state.cache[: spec.model.num_layers]
    head_cache = state.cache[spec.model.num_layers :]
    # A finished row feeds slot 0, so that kernels read few of its slots. A row waiting for its
    # environment keeps its position, and so its keys and values.
    gone = rows.row_ids == PADDING if spec.turns else rows.done
    start = jnp.where(gone, 0, rows.prompt_lens + rows.lens - 1)
    drafted, draft_len = _propose(spec, rows, draft_state, width)
    if spec.draft_head is not None:
        drafting = HeadDrafting(spec.draft_head, model, weights)
        drafted, head_cache = drafting.propose(rows, start, head_cache, drafted, draft_len)
        draft_len = jnp.full_like(draft_len, width - 1)
    draft_len = jnp.minimum(draft_len, rows.max_lens - rows.lens)
    fed = jnp.concatenate([rows.last[:, None], drafted[:, : width - 1]], axis=1)
    hidden, cache = model(fed, start, cache, gives_routing=spec.keeps_routing)
    cache, routing = cache if spec.keeps_routing else (cache, None)
    policy = policy_at(spec, rows, rows.lens, model, hidden)
    sampled = dataclasses.replace(policy.sample(), routing=routing)
    accepted = count_leading(sampled.ids == drafted, draft_len)
    new_rows, emitted = emit(spec, rows, sampled, accepted, Source.DRAFTED)
    if spec.draft_head is not None:
        head_cache = drafting.correct(start, head_cache, hidden, sampled.ids)
        newest = jnp.maximum(emitted - 1, 0)
        last_state = read_slots(hidden, newest, 1)[:, 0]
        last_state = where_rows(rows.done, rows.last_state, last_state)
        new_rows = dataclasses.replace(new_rows, last_state=last_state)
    if width > 1:
        matched = ~rows.done[:, None] & (accepted[:, None] == jnp.arange(width)[None, :])
        by_accepted += jnp.sum(matched, axis=0, dtype=jnp.int32)
        emitted_drafts += jnp.sum(jnp.minimum(accepted, emitted), dtype=jnp.int32)
        if spec.draft_source is not None:
            draft_state = spec.draft_source.observe(draft_state, rows, sampled.ids, emitted)
    cache = (*cache, *head_cache)
    return Decoding(cache, new_rows, draft_state, state.steps + 1, by_accepted, emitted_drafts)


def count_unfinished(rows: Rows) -> Array:
    """Count unfinished rows, int32 [shards, 2] on every device: without the background, and all."""
    marked = jnp.stack([~rows.done & ~rows.background, ~rows.done])
    parts = jnp.reshape(marked, (2, shards("batch"), -1), out_sharding=axes(None, "batch", None))
    return reshard(jnp.sum(parts, axis=2, dtype=jnp.int32), None, None).T


def _propose(spec: RolloutSpec, rows: Rows, draft_state: Any, width: int) -> tuple[Array, Array]:
    """Return the draft source's tokens int32 [b, width], and how many are valid, [b] < width."""
    if width == 1 or spec.draft_source is None:
        nothing = jnp.zeros_like(rows.lens)
        return jnp.broadcast_to(nothing[:, None], (len(nothing), width)), nothing
    tokens, count = spec.draft_source.propose(draft_state, rows, width - 1)
    return jnp.pad(tokens, ((0, 0), (0, 1))), count


def policy_at(
    spec: RolloutSpec, rows: Rows, first: Array, model: Transformer, hidden: Array
) -> TokenDistributions | FusedDistributions:
    """Return the policy at response positions from `first` int32 [b] on; hidden: [b, T, D]."""
    positions = first[:, None] + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None, :]
    positions = reshard(positions, "batch", None)
    return distributions(model, hidden, rows.seeds, positions, spec.sampling, spec.stored_logprobs)


def _ends(spec: RolloutSpec, rows: Rows, new: Array) -> Array:
    """Mark the tokens that end a turn, bool [b, T]. new: int32 [b, T], the rows' new tokens."""
    window = spec.stop_window
    if not window:
        return spec.turn_ends(new)
    before = read_slots(jnp.pad(rows.tokens.ids, ((0, 0), (window, 0))), rows.lens, window)
    positions = rows.lens[:, None] + jnp.arange(-window, 0)[None, :]
    before = jnp.where(positions < rows.turn_starts[:, None], NOTHING, before)
    return spec.turn_ends(jnp.concatenate([before, new], axis=1))


def emit(
    spec: RolloutSpec, rows: Rows, new: Tokens, from_draft: Array, kind: Source
) -> tuple[Rows, Array]:
    """Append tokens to unfinished rows, up to the end of a turn or the row's maximum length.

    new: [b, T]; each row gets the first `from_draft` + 1 of its columns. from_draft: int32 [b],
    draft tokens among them. kind: source of the draft tokens. Returns the rows, and how many tokens
    each one got, int32 [b].
    """
    width = new.ids.shape[1]
    offsets = jnp.arange(width, dtype=jnp.int32)[None, :]
    active = ~rows.done
    count = jnp.minimum(from_draft + 1, rows.max_lens - rows.lens)
    ends = _ends(spec, rows, new.ids) & (offsets < count[:, None])
    count = jnp.where(active, jnp.minimum(count, count_leading(~ends, count) + 1), 0)
    lens = rows.lens + count
    column = jnp.where(active, rows.lens, spec.response_slots)

    def write(old: Array, values: Array) -> Array:
        if width > spec.max_width:  # exceeds the margin
            wide = jnp.pad(old, ((0, 0), (0, width), *((0, 0),) * (old.ndim - 2)))
            return write_slots(wide, values, column)[:, : old.shape[1]]
        return write_slots(old, values, column)

    tokens = jax.tree.map(write, rows.tokens.like(new), new)
    sources = rows.tokens.sources
    if width > 1:  # otherwise it stays SAMPLED
        kept = jnp.minimum(from_draft, count)
        kinds = jnp.where(offsets < kept[:, None], kind, Source.SAMPLED)
        sources = write(sources, kinds.astype(jnp.int8))
    last = read_slots(new.ids, jnp.maximum(count - 1, 0), 1)[:, 0]
    ended = jnp.any(ends, axis=1) | (lens == rows.max_lens)
    rows = dataclasses.replace(
        rows,
        lens=lens,
        last=jnp.where(count > 0, last, rows.last),
        done=rows.done | (active & ended),
        tokens=dataclasses.replace(tokens, sources=sources),
    )
    return rows, count
