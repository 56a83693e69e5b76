"""The jitted pieces of a rollout: prefill, verify, decode, and the move between rungs.

One step of any width works the same way: feed a row's last token and what follows it, starting at
that token's slot; the hidden states predict the tokens after it. Verification is such a step of
the draft's width, decoding one of width 1; rejecting is not counting a slot.

    slot            0 1 2 | 3 4 5 6        prompt_len = 3
    tokens          a b c | x y z          draft x y z
    verify feeds      . c   x y            from slot 2, predicts x, y, z
    accepted 2                             lens = 2, last = y: decode feeds y at slot 4
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import KVCache, cache_slots, init_cache, regrid, repeat_rows
from specrl_jax.models.logprobs import map_tokens, token_logprobs
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.acceptance import RULES
from specrl_jax.rollout.sampling import SamplingLaw, draw, temper, truncate, uniforms
from specrl_jax.sharding import spec, take_rows
from specrl_jax.types import Drafts


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a rollout's programs are compiled for; hashable."""

    model: ModelConfig
    law: SamplingLaw
    accept: str
    eos_ids: tuple[int, ...]
    pad_id: int
    response_slots: int
    logits_chunk: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one rung.

    index: int32 [b], each row's place in the batch. seeds: uint32 [b, 2]. prompt_lens, lens: int32
    [b]. last: int32 [b], the token that is not in the cache yet. done: bool [b]. tokens,
    policy_logprobs, sampling_logprobs: [b, R + 1]; rows that are done write into column R.
    """

    index: Array
    seeds: Array
    prompt_lens: Array
    lens: Array
    last: Array
    done: Array
    tokens: Array
    policy_logprobs: Array
    sampling_logprobs: Array


_MATRICES = ("tokens", "policy_logprobs", "sampling_logprobs")


@functools.partial(jax.jit, static_argnames=("setup", "slots", "group_size"))
def prefill(setup: Setup, weights: Params, prompts_QP: Array, *, slots: int, group_size: int):
    """KV cache [Q * G, slots] of the prompts; each prompt is computed once for its group."""
    rows = prompts_QP.shape[0]
    start = jnp.zeros(rows, jnp.int32, out_sharding=spec("batch"))
    cache = init_cache(setup.model, rows, slots)
    _, cache = Transformer(setup.model, weights)(prompts_QP, start, cache)
    return repeat_rows(cache, group_size)


@functools.partial(jax.jit, static_argnames=("setup",))
def start_rows(setup: Setup, seeds: Array, prompt_lens: Array, last: Array) -> Rows:
    """Rows that hold only their prompts."""
    rows = prompt_lens.shape[0]
    lens = jnp.zeros_like(prompt_lens)
    wide = jnp.zeros((rows, setup.response_slots + 1), out_sharding=spec("batch", None))
    index = jax.sharding.reshard(jnp.arange(rows, dtype=jnp.int32), spec("batch"))
    tokens = jnp.full_like(wide, setup.pad_id, dtype=jnp.int32)
    return Rows(index, seeds, prompt_lens, lens, last, lens > 0, tokens, wide, wide)


@functools.partial(jax.jit, static_argnames=("setup", "width"), donate_argnames=("cache", "rows"))
def verify(
    setup: Setup,
    weights: Params,
    cache: KVCache,
    rows: Rows,
    drafts: Drafts,
    accept_seeds: Array,
    log_lenience: Array,
    *,
    width: int,
) -> tuple[KVCache, Rows]:
    """One parallel pass over `width` draft tokens: keep the verified prefix, fill the cache.

    Rows come back rewound to their last kept token; those whose draft was accepted to its
    end-of-sequence (or to the last slot) are done.
    """
    draft = drafts.tokens[:, :width]
    fed = jnp.concatenate([rows.last[:, None], draft[:, :-1]], axis=1)
    model = Transformer(setup.model, weights)
    hidden, cache = model(fed, rows.prompt_lens - 1, cache)
    policy, sampling = map_tokens(
        functools.partial(_both_logprobs, law=setup.law), model, hidden, draft, setup.logits_chunk
    )
    positions = jnp.broadcast_to(
        jnp.arange(width, dtype=jnp.int32)[None, :], draft.shape, out_sharding=spec("batch", None)
    )
    lens = RULES[setup.accept](
        uniforms(accept_seeds, positions),
        sampling,
        drafts.sampling_logprobs[:, :width],
        jnp.minimum(drafts.lens, width),
        log_lenience,
    )
    kept = positions < lens[:, None]
    last_kept = jnp.sum(jnp.where(positions == lens[:, None] - 1, draft, 0), axis=1)
    done = (lens > 0) & (_is_eos(last_kept, setup) | (lens == setup.response_slots))

    def widen(old: Array, new: Array) -> Array:
        return old.at[:, :width].set(jnp.where(kept, new, old[:, :width]))

    return cache, dataclasses.replace(
        rows,
        lens=lens,
        last=jnp.where(lens > 0, last_kept, rows.last),
        done=done,
        tokens=widen(rows.tokens, draft),
        policy_logprobs=widen(rows.policy_logprobs, policy),
        sampling_logprobs=widen(rows.sampling_logprobs, sampling),
    )


@functools.partial(jax.jit, static_argnames=("setup",), donate_argnames=("cache", "rows"))
def decode(
    setup: Setup, weights: Params, cache: KVCache, rows: Rows, stop_rows: Array, stop_len: Array
) -> tuple[KVCache, Rows, Array, Array, Array]:
    """Sample until at most `stop_rows` rows are active or one of them holds `stop_len` tokens.

    Returns cache, rows, and three scalars: active rows, their longest response, steps taken.
    """
    model = Transformer(setup.model, weights)

    def go_on(state: tuple[KVCache, Rows, Array]) -> Array:
        active, longest = _progress(state[1])
        return (active > stop_rows) & (longest < stop_len)

    def step(state: tuple[KVCache, Rows, Array]) -> tuple[KVCache, Rows, Array]:
        cache, rows, steps = state
        start = jnp.maximum(rows.prompt_lens + rows.lens - 1, 0)
        start = jnp.minimum(start, cache_slots(cache) - 1)
        hidden, cache = model(rows.last[:, None], start, cache)
        logits = temper(model.logits(hidden[:, 0]), setup.law)
        return cache, _append(setup, rows, logits), steps + 1

    cache, rows, steps = jax.lax.while_loop(go_on, step, (cache, rows, jnp.int32(0)))
    return cache, rows, *_progress(rows), steps


@functools.partial(jax.jit, static_argnames=("size", "slots"))
def move(
    cache: KVCache, rows: Rows, finished: Rows | None, *, size: int, slots: int
) -> tuple[KVCache, Rows, Rows]:
    """Bring the active rows into a rung of `size` rows and `slots` slots.

    `finished` collects every row in batch order; None before the first move, when `rows` still is
    the whole batch in order. Its `index` and `done` have no meaning.
    """
    finished = rows if finished is None else collect(rows, finished)
    # Active rows first, in order; the rest of the rung is filled up with rows that are done.
    done = jax.sharding.reshard(rows.done, jax.P(None))
    order = jnp.argsort(done, stable=True)[:size]
    picked = {f.name: getattr(rows, f.name) for f in dataclasses.fields(Rows)}
    picked = {k: take_rows(x, order, *(None,) * (x.ndim - 1)) for k, x in picked.items()}
    return regrid(cache, order, slots), Rows(**picked), finished


@jax.jit
def collect(rows: Rows, finished: Rows) -> Rows:
    """Write the rung's rows back to their places in the batch."""
    batch, size = finished.lens.shape[0], rows.lens.shape[0]
    index = jax.sharding.reshard(rows.index, jax.P(None))
    place = jnp.full(batch, -1).at[index].set(jnp.arange(size))
    place = jax.sharding.reshard(place, spec("batch"))

    def write(old: Array, new: Array) -> Array:
        here = (place >= 0).reshape(-1, *(1,) * (old.ndim - 1))
        new = take_rows(new, jnp.maximum(place, 0), *(None,) * (new.ndim - 1))
        return jnp.where(here, new, old)

    return jax.tree.map(write, finished, rows)


@jax.jit
def progress(rows: Rows) -> tuple[Array, Array]:
    """Active rows and their longest response (scalars)."""
    return _progress(rows)


def _progress(rows: Rows) -> tuple[Array, Array]:
    active = ~rows.done
    return jnp.sum(active, dtype=jnp.int32), jnp.max(jnp.where(active, rows.lens, 0))


def _append(setup: Setup, rows: Rows, logits: Array) -> Rows:
    """Draw one token for every active row and write it behind its response."""
    truncated = truncate(logits, setup.law)
    token = draw(truncated, rows.seeds, rows.lens, setup.law)
    policy = token_logprobs(logits, token)
    sampling = token_logprobs(truncated, token) if setup.law.truncates else policy
    token = jnp.where(rows.done, setup.pad_id, token)
    column = jnp.where(rows.done, setup.response_slots, rows.lens)
    lens = jnp.where(rows.done, rows.lens, rows.lens + 1)
    ended = _is_eos(token, setup) | (lens == setup.response_slots)
    return dataclasses.replace(
        rows,
        lens=lens,
        last=jnp.where(rows.done, rows.last, token),
        done=rows.done | ended,
        tokens=_write(rows.tokens, token, column),
        policy_logprobs=_write(rows.policy_logprobs, policy, column),
        sampling_logprobs=_write(rows.sampling_logprobs, sampling, column),
    )


def _write(matrix: Array, values: Array, columns: Array) -> Array:
    def write(row: Array, value: Array, column: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(row, value, column, axis=0)

    return jax.vmap(write)(matrix, values, columns)


def _is_eos(tokens: Array, setup: Setup) -> Array:
    return functools.reduce(jnp.logical_or, [tokens == eos for eos in setup.eos_ids])


def _both_logprobs(logits: Array, tokens: Array, *, law: SamplingLaw) -> tuple[Array, Array]:
    logits = temper(logits, law)
    policy = token_logprobs(logits, tokens)
    if not law.truncates:
        return policy, policy
    return policy, token_logprobs(truncate(logits, law), tokens)
