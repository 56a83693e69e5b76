"""The jitted pieces of a rollout that run the policy: prefill, replay, and the step of any width.

One step works the same way at every width W: feed a row's last token and W - 1 candidates, starting
at that token's slot; the hidden states give the law of W next tokens. From left to right each is
either the candidate, if it is accepted, or drawn; the first that is drawn ends the step, and the
slots behind it are written over later. Rejecting is not counting a slot.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3
    tokens          a b c | x y z          candidates x y z
    width 3 feeds       c   x y            from slot 2, gives the laws of positions 0, 1, 2
    x accepted, y not, w drawn             lens = 2, last = w: the next step feeds w at slot 4

At a window's end a step of tree drafts begins earlier, so that it fits, and feeds the row's own
last tokens again; what it may still emit there is less than its width anyway.

Verification of a draft is such a step of the draft's width, plain decoding one of width 1, tree
drafts one in between. Whether a token is accepted depends on its row and position alone, never on
the width: a draft that is judged in one pass, in chunks, or one token a step gives the same tokens.
The block rule alone depends on where a draft ends, so its drafts are always judged in one pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.kv_cache import KVCache, cache_slots, init_cache, repeat_rows, resize
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout import acceptance
from specrl_jax.rollout.drafts import suffix_match as drafting
from specrl_jax.rollout.drafts.suffix_match import SuffixIndex
from specrl_jax.rollout.engine.decode_state import (
    DecodeState,
    column_at,
    cut_columns,
    verifying,
    write_columns,
)
from specrl_jax.rollout.engine.rejection_sampler import StepOutput, accept_or_sample
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.sharding import reshard, spec
from specrl_jax.types import Source


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopCondition:
    """When a visit of a rung ends (int32 scalars, on the host or on the device).

    At most `max_active` of the first `num_train_rows` rows of the board are active, or after
    `max_steps` steps, or, if all rows are to end (`max_active` <= 0), once no draft is left to
    verify. A row that holds `max_len` tokens is at its cache limit: it waits for a deeper window.
    """

    max_active: Array
    max_len: Array
    max_steps: Array
    num_train_rows: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCounts:
    """What a visit did (int32). steps: a scalar. matched: [W], row steps of rows that are not
    verifying, by the number of tree draft tokens that were right: 0, 1, ... W - 1, all 0 without a
    corpus. drafted: of those, tokens that were emitted. verified, accepted: scalars,
    tokens of drafts to verify."""

    steps: Array
    matched: Array
    drafted: Array
    verified: Array
    accepted: Array


@functools.partial(jax.jit, static_argnames="setup")
def prefill(setup: ProgramSpec, weights: Params, prompts_QP: Array) -> KVCache:
    """KV cache [Q, P] of the prompts, on host or device; for `broadcast_prefill`."""
    prompts_QP = reshard(prompts_QP, "batch", None)
    start = jnp.zeros(prompts_QP.shape[0], jnp.int32, out_sharding=spec("batch"))
    cache = init_cache(setup.model, *prompts_QP.shape)
    return Transformer(setup.model, weights)(prompts_QP, start, cache)[1]


@functools.partial(jax.jit, static_argnames=("slots", "group_size"))
def broadcast_prefill(cache: KVCache, *, slots: int, group_size: int) -> KVCache:
    """Cache [Q * G, slots] for the responses to each row of `cache` [Q, P].

    A program of its own: for every further window only this copy is compiled, not the policy.
    """
    return resize(repeat_rows(cache, group_size), slots)


@functools.partial(jax.jit, static_argnames=("setup", "slots", "width"))
def re_prefill(
    setup: ProgramSpec,
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
    packed = write_columns(packed, rows.tokens[:, :width], rows.prompt_lens)
    cache = init_cache(setup.model, size, max(slots, prompt_slots + width))
    _, cache = Transformer(setup.model, weights)(packed, start, cache)
    return resize(cache, slots)


@functools.partial(
    jax.jit,
    static_argnames=("setup", "width", "wide"),
    donate_argnames=("cache", "rows", "corpus"),
)
def decode_steps(
    setup: ProgramSpec,
    weights: Params,
    cache: KVCache,
    rows: DecodeState,
    corpus: SuffixIndex | None,
    limits: StopCondition,
    *,
    width: int,
    wide: bool = False,
) -> tuple[KVCache, DecodeState, SuffixIndex | None, StepCounts, Array]:
    """Steps of one width until a limit is reached.

    corpus: where candidates of rows that are not verifying come from; what is emitted is recorded
    in it. With None there are none. wide: only the token behind the accepted ones is drawn, not one
    at every position: for verification by other rules than match. The cache needs slots for the
    prompt and `limits.max_len` tokens, with a corpus for `width` at least, without one for
    width - 1 more.

    Returns cache, rows, corpus, the tally and int32 [6]: rows of the board's own that are not
    done, all active rows, parked, verifying, the longest response of rows not done, the longest
    draft left to verify.
    """
    model = Transformer(setup.model, weights)

    def go_on(state) -> Array:
        _, rows, _, steps, _ = state
        own = _active(rows, limits) & (rows.index < limits.num_train_rows)
        more = (jnp.sum(own, dtype=jnp.int32) > limits.max_active) & (steps < limits.max_steps)
        if rows.draft is None:
            return more
        # Steps that judge cost a little more, with residuals or a tree more than that. Parked rows
        # count: the engine drops pending drafts at 0 only.
        return more & ((limits.max_active > 0) | jnp.any(verifying(rows)))

    def step(state):
        cache, rows, corpus, steps, counts = state
        active = _active(rows, limits)
        candidates, offered, judged = _candidates(setup, rows, corpus, width)
        fed = jnp.concatenate([rows.last[:, None], candidates[:, : width - 1]], axis=1)
        start, most = rows.prompt_lens + rows.lens - 1, cache_slots(cache) - width
        if corpus is not None:  # near the window's end tokens are fed again, so that the step fits
            again = jnp.clip(start - most, 0, width - 1)
            fed = jnp.concatenate([_before(rows, width), fed], axis=1)
            fed = cut_columns(fed, width - 1 - again, width)
            offered = jnp.minimum(offered, width - again)
        # Rows that are done write somewhere inside; the others always have room.
        hidden, cache = model(fed, jnp.clip(start, 0, most), cache)
        if corpus is not None:
            hidden = cut_columns(jnp.pad(hidden, ((0, 0), (0, width - 1), (0, 0))), again, width)
        found = accept_or_sample(setup, model, hidden, rows, candidates, offered, judged, wide)
        rows, corpus, new = _append(setup, rows, corpus, found, active, judged, limits.max_len)
        return cache, rows, corpus, steps + 1, counts + new

    counts = jnp.zeros(width + 1, jnp.int32)
    begun, state = rows, (cache, rows, corpus, jnp.int32(0), counts)
    cache, rows, corpus, steps, counts = jax.lax.while_loop(go_on, step, state)
    rows, judged, kept = _credit(begun, rows)
    tally = StepCounts(steps, counts[:width], counts[width], judged, kept)
    return cache, rows, corpus, tally, _progress(rows, limits)


@jax.jit
def progress(rows: DecodeState, limits: StopCondition) -> Array:
    """The last result of `decode_steps`."""
    return _progress(rows, limits)


def _active(rows: DecodeState, limits: StopCondition) -> Array:
    return ~rows.done & (rows.lens < limits.max_len)


def _progress(rows: DecodeState, limits: StopCondition) -> Array:
    active, judged = _active(rows, limits), verifying(rows)
    left = jnp.zeros_like(rows.lens) if rows.draft is None else rows.draft.lens - rows.lens
    counts = (
        ~rows.done & (rows.index < limits.num_train_rows),
        active,
        ~rows.done & ~active,
        judged,
    )
    return jnp.stack(
        [jnp.sum(x, dtype=jnp.int32) for x in counts]
        + [jnp.max(jnp.where(~rows.done, rows.lens, 0)), jnp.max(jnp.where(judged, left, 0))]
    )


def _before(rows: DecodeState, width: int) -> Array:
    """[b, width - 1]: the response tokens before the last; anything where there are none."""

    def cut(row: Array, end: Array) -> Array:
        return jnp.take(row, end - width + jnp.arange(width - 1), mode="clip")

    return jax.vmap(cut)(rows.tokens, rows.lens)


def _candidates(setup: ProgramSpec, rows: DecodeState, corpus: SuffixIndex | None, width: int):
    """Candidates [b, W], how many of them are meant [b], and which rows are verifying [b]."""
    judged = verifying(rows)
    candidates = jnp.zeros((rows.lens.shape[0], width), jnp.int32, out_sharding=spec("batch", None))
    offered = jnp.zeros_like(rows.lens)
    if corpus is not None:
        prompts, sources = _places(setup, rows, corpus)
        drafted, count = drafting.propose(
            corpus, prompts, sources, rows.lens, width - 1, setup.tree
        )
        candidates = jnp.pad(drafted, ((0, 0), (0, 1)))
        offered = jnp.minimum(count, rows.max_lens - rows.lens)
    if rows.draft is not None:
        kept = cut_columns(rows.draft.tokens, rows.lens, width)
        # Rows that are offered nothing may have any candidates.
        candidates = kept if corpus is None else jnp.where(judged[:, None], kept, candidates)
        left = jnp.clip(rows.draft.lens - rows.lens, 0, width)
        offered = jnp.where(judged, left, offered)
    return candidates, offered, judged


def _append(
    setup: ProgramSpec,
    rows: DecodeState,
    corpus: SuffixIndex | None,
    found: StepOutput,
    active: Array,
    judged: Array,
    stop_len: Array,
) -> tuple[DecodeState, SuffixIndex | None, Array]:
    """Write a step's tokens behind the responses of active rows; what was kept of pending drafts
    `_credit` says. And int32 [W + 1]: `matched` and `drafted` of `StepCounts`."""
    width = found.tokens.shape[1]
    steps = jnp.arange(width, dtype=jnp.int32)[None, :]
    accepted = found.accepted
    room = jnp.minimum(stop_len, rows.max_lens) - rows.lens
    # A row that reaches its window's end stops there; what was cut off is found again later.
    count = jnp.minimum(jnp.minimum(accepted + 1, width), room)
    ends = _is_eos(found.tokens, setup) & (steps < count[:, None])
    before_end = acceptance.leading(~ends, count)
    count = jnp.where(active, jnp.minimum(count, before_end + 1), 0)
    lens = rows.lens + count
    ended = jnp.any(ends, axis=1) | (lens == rows.max_lens)
    column = jnp.where(active, rows.lens, setup.response_slots)
    changes = {
        "tokens": found.tokens,
        "policy_logprobs": found.policy,
        "sampling_logprobs": found.sampling,
    }
    counts = jnp.zeros(width + 1, jnp.int32)
    if corpus is not None:  # else sources stay SAMPLED
        drafted = jnp.minimum(accepted, count)
        kinds = jnp.where(steps < drafted[:, None], Source.DRAFTED, Source.SAMPLED)
        changes["sources"] = kinds.astype(jnp.int8)
        told = (active & ~judged)[:, None]
        each = jnp.concatenate([accepted[:, None] == steps, drafted[:, None]], axis=1)
        counts = jnp.sum(jnp.where(told, each, 0), axis=0, dtype=jnp.int32)
        prompts, places = _places(setup, rows, corpus)
        corpus = drafting.append(corpus, prompts, places, rows.lens, found.tokens, count)
    if found.top is not None:
        changes |= {"top_ids": found.top[0], "top_logprobs": found.top[1]}
    changes = {
        name: write_columns(getattr(rows, name), new, column) for name, new in changes.items()
    }
    if rows.draft is not None:
        # Over once a token was drawn, unless it was cut off with what came before.
        over = judged & (count > accepted)
        left = jnp.where(over, rows.lens + accepted, rows.draft.lens)
        changes["draft"] = dataclasses.replace(rows.draft, lens=left)
    last = column_at(found.tokens, jnp.maximum(count - 1, 0))
    rows = dataclasses.replace(
        rows,
        lens=lens,
        last=jnp.where(count > 0, last, rows.last),
        done=rows.done | (active & ended),
        **changes,
    )
    return rows, corpus, counts


def _credit(begun: DecodeState, rows: DecodeState) -> tuple[DecodeState, Array, Array]:
    """Rows after a visit, with the tokens that they kept of pending drafts marked and counted, and
    how many draft tokens were judged and kept, int32 scalars. begun: before it.

    Worked row: it held 2 tokens of a draft of 9, and now holds 7 with a draft that ends at 4. So it
    kept 2, was judged on 3, and drew 3.
    """
    if rows.draft is None:
        return rows, jnp.int32(0), jnp.int32(0)
    ends = jnp.minimum(rows.draft.lens, rows.lens)
    kept = jnp.where(verifying(begun), ends - begun.lens, 0)
    rejected = rows.draft.lens < begun.draft.lens
    columns = jnp.arange(rows.sources.shape[1])[None, :]
    inside = (columns >= begun.lens[:, None]) & (columns < (begun.lens + kept)[:, None])
    rows = dataclasses.replace(
        rows,
        prefix_lens=rows.prefix_lens + kept,
        sources=jnp.where(inside, jnp.int8(Source.REUSED), rows.sources),
    )
    counts = jnp.sum(jnp.stack([kept + rejected, kept]), axis=1, dtype=jnp.int32)
    return rows, counts[0], counts[1]


def _places(setup: ProgramSpec, rows: DecodeState, corpus: SuffixIndex) -> tuple[Array, Array]:
    """Each row's prompt and source in the corpus; fillers get some."""
    prompts, sources = corpus.tokens.shape[:2]
    index = jnp.minimum(rows.index, prompts * setup.group_size - 1)
    return index // setup.group_size, sources - setup.group_size + index % setup.group_size


def _is_eos(tokens: Array, setup: ProgramSpec) -> Array:
    return functools.reduce(jnp.logical_or, [tokens == eos for eos in setup.eos_ids])
