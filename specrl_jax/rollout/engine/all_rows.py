"""All rows of a rollout: their start, their draft lengths, and their conversion to a `Rollout`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.models.kv_cache import KVCache, init_cache
from specrl_jax.models.logprobs import CUT_OFF_LOGPROB
from specrl_jax.models.row_slices import read_slots
from specrl_jax.rollout.emitted import logprobs_of_ids, outcomes
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import Rows, gather, where_rows
from specrl_jax.rollout.sampling import NoiseKey, Purpose, row_seeds, uniforms
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import axes, reshard
from specrl_jax.types import Drafts, Prompts, Rollout, Source, Tokens


class RowStarts(NamedTuple):
    """Initial values of B rows, on the host."""

    noise_steps: np.ndarray  # uint32 [B]
    ids: np.ndarray  # uint32 [B, 2], of the rows' prompts
    prompt_lens: np.ndarray  # int32 [B]
    last: np.ndarray  # int32 [B], the last token of the prompt
    max_lens: np.ndarray  # int32 [B], maximum lengths of the responses
    done: np.ndarray  # bool [B]
    background: np.ndarray  # bool [B]

    @classmethod
    def of(cls, spec: RolloutSpec, requests: Requests) -> "RowStarts":
        prompts = requests.prompts
        group_size = spec.group_size
        noise_steps = requests.noise.steps_of(len(prompts.lens), group_size)
        last = np.take_along_axis(prompts.tokens, prompts.lens[:, None] - 1, axis=1)[:, 0]
        none = np.zeros(noise_steps.size, np.bool_)
        max_lens = requests.max_lens
        if max_lens is None:
            max_lens = np.full(len(none), spec.response_slots)
        return cls(
            noise_steps=noise_steps.reshape(-1).astype(np.uint32),
            ids=np.repeat(prompts.ids, group_size, axis=0),
            prompt_lens=np.repeat(prompts.lens.astype(np.int32), group_size),
            last=np.repeat(last.astype(np.int32), group_size),
            max_lens=max_lens.astype(np.int32),
            done=none if requests.done is None else requests.done,
            background=none if requests.background is None else requests.background,
        )

    @classmethod
    def blank(cls, spec: RolloutSpec, num_rows: int) -> "RowStarts":
        """Return the initial values of rows with blank prompts."""
        prompts = Prompts.blank(num_rows // spec.group_size, spec.prompt_slots)
        return cls.of(spec, Requests(prompts, NoiseKey(None, 0)))


@functools.partial(jax.jit, static_argnames="purpose")
def init_rows(spec: RolloutSpec, purpose: int, key: Array, starts: RowStarts) -> Rows:
    """Start rows with only their prompts. The call puts the host's arrays on the device."""
    group_size = spec.group_size
    ids = reshard(starts.ids, "batch", None)
    noise_steps, prompt_lens, last, max_lens, done, background = (
        reshard(x, "batch")
        for x in (
            starts.noise_steps,
            starts.prompt_lens,
            starts.last,
            starts.max_lens,
            starts.done,
            starts.background,
        )
    )
    samples = jnp.tile(jnp.arange(group_size, dtype=jnp.int32), len(last) // group_size)
    samples = reshard(samples, "batch")
    empty = Rollout.empty(len(last), spec.columns, spec.stored_logprobs, routing=spec.routing)
    tokens = empty.tokens.only(
        *("policy_logprobs", "sampling_logprobs", "sources", "top_ids", "top_logprobs", "routing")
    )
    last_state = None
    if spec.draft_head is not None:
        shape = (len(last), spec.model.embed_dim)
        last_state = jnp.zeros(shape, spec.model.dtype, out_sharding=axes("batch", None))
    return Rows(
        row_ids=reshard(jnp.arange(len(last), dtype=jnp.int32), "batch"),
        seeds=row_seeds(key, purpose, noise_steps, ids, samples),
        accept_seeds=row_seeds(key, int(Purpose.ACCEPT), noise_steps, ids, samples),
        prompt_lens=prompt_lens,
        max_lens=max_lens,
        lens=empty.lens,
        turn_starts=empty.lens,
        last=last,
        prefix_lens=empty.lens,
        done=done,
        background=background,
        tokens=dataclasses.replace(tokens, ids=jnp.full_like(tokens.ids, spec.pad_id)),
        last_state=last_state,
    )


def init_inputs(spec: RolloutSpec, purpose: Purpose, key: Any, num_rows: int) -> tuple:
    """Return the inputs of `init_rows`."""
    return spec, int(purpose), key, abstract.on_host(RowStarts.blank(spec, num_rows))


def abstract_rows(spec: RolloutSpec, num_rows: int) -> Rows:
    """Return the shapes of all rows."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    starts = RowStarts.blank(spec, num_rows)
    return abstract.result(lambda key: init_rows(spec, 0, key, starts), key)


@jax.jit
def write_held(all_rows: Rows, held: Rollout) -> Rows:
    """Return all rows with the tokens that they start with, [B]."""
    have = held.lens > 0
    margin = all_rows.tokens.ids.shape[1] - held.tokens.ids.shape[1]

    def write(old: Array, new: Array) -> Array:
        wide = jnp.pad(new, ((0, 0), (0, margin), *((0, 0),) * (new.ndim - 2)))
        return where_rows(have, wide, old)

    tokens = jax.tree.map(write, all_rows.tokens, held.tokens.like(all_rows.tokens))
    last = read_slots(tokens.ids, jnp.maximum(held.lens - 1, 0), 1)[:, 0]
    return dataclasses.replace(
        all_rows,
        lens=jnp.where(have, held.lens, all_rows.lens),
        last=jnp.where(have, last, all_rows.last),
        prefix_lens=jnp.where(have, held.prefix_lens, all_rows.prefix_lens),
        tokens=tokens,
    )


@jax.jit
def cut_drafts(spec: RolloutSpec, rows: Rows, lens: Array) -> Array:
    """Return how much of drafts of `lens` [B] tokens the rule verifies, int32 [B]."""
    return spec.accept.cut(uniforms(rows.accept_seeds, jnp.zeros_like(lens)), lens)


@functools.partial(jax.jit, static_argnames=("size", "slots"))
def empty_batch(
    spec: RolloutSpec, all_rows: Rows, *, size: int, slots: int
) -> tuple[KVCache, Rows]:
    """Return a cache of `size` x `slots`, and `size` padding rows."""
    none = jnp.full(size, -1, jnp.int32)
    cache = init_cache(spec.model, size, slots, spec.draft_head is not None)
    return cache, gather(all_rows, reshard(none, "batch"))


def abstract_running_batch(
    spec: RolloutSpec, all_rows: Rows, size: int, slots: int
) -> tuple[KVCache, Rows]:
    """Return the shapes of what `empty_batch` returns."""
    empty = functools.partial(empty_batch, size=size, slots=slots)
    return abstract.result(empty, spec, all_rows)


@jax.jit
def read_rollout(
    spec: RolloutSpec,
    rows: Rows,
    drafts: Drafts | None,
    held: Rollout | None,
    step: Array,
) -> Rollout:
    """Return all rows as a rollout of `step`. held: tokens that rows started with."""
    slots = spec.response_slots
    positions = jnp.arange(slots)[None, :]
    inside = positions < rows.lens[:, None]
    tokens = jax.tree.map(lambda x: x[:, :slots], rows.tokens)
    policy = jnp.where(inside, tokens.policy_logprobs, 0.0)
    sampling = jnp.where(inside, tokens.sampling_logprobs, 0.0)
    sampling = jnp.where(jnp.isneginf(sampling), CUT_OFF_LOGPROB, sampling)
    origin_logprobs = policy
    origin_steps = jnp.zeros_like(tokens.ids) + step
    draft_logprobs = sampling
    accepted_probs = None
    if spec.keeps_accepted:
        accepted_probs = _accepted_probs(spec, tokens, drafts, rows)
    if drafts is not None and not spec.accept.samples_every_token:
        reused = inside & (tokens.sources == Source.REUSED)
        origin_logprobs = jnp.where(reused, drafts.tokens.origin_logprobs, origin_logprobs)
        origin_steps = jnp.where(reused, drafts.tokens.origin_steps, origin_steps)
        draft_logprobs = jnp.where(reused, drafts.tokens.sampling_logprobs, draft_logprobs)
    if held is not None:
        before = positions < held.lens[:, None]
        origin_logprobs = jnp.where(before, held.tokens.origin_logprobs, origin_logprobs)
        origin_steps = jnp.where(before, held.tokens.origin_steps, origin_steps)
        draft_logprobs = jnp.where(before, held.tokens.draft_logprobs, draft_logprobs)
        if spec.keeps_accepted:
            earlier = held.tokens.accepted_probs
            accepted_probs = jnp.where(before[..., None], earlier, accepted_probs)
    tokens = dataclasses.replace(
        tokens,
        ids=jnp.where(inside, tokens.ids, spec.pad_id),
        policy_logprobs=policy,
        sampling_logprobs=sampling,
        sources=jnp.where(inside, tokens.sources, jnp.int8(Source.SAMPLED)),
        origin_logprobs=jnp.where(inside, origin_logprobs, 0.0),
        origin_steps=origin_steps,
        draft_logprobs=jnp.where(inside, draft_logprobs, 0.0),
        accepted_probs=accepted_probs,
        routing=jax.tree.map(lambda x: jnp.where(inside[..., None, None], x, 0), tokens.routing),
    )
    return Rollout(tokens, rows.lens, rows.prefix_lens)


def _accepted_probs(spec: RolloutSpec, tokens: Tokens, drafts: Drafts | None, rows: Rows) -> Array:
    """Return `Tokens.accepted_probs` of these rows' tokens [B, R]."""
    now = outcomes(tokens.top_logprobs)
    if drafts is None or spec.accept.accepted_probs is None:
        return jnp.zeros_like(now)
    stored = drafts.tokens
    old = logprobs_of_ids(stored.top_ids, stored.top_logprobs, tokens.top_ids, tokens.top_logprobs)
    positions = jnp.arange(now.shape[1])[None, :]
    lens = spec.accept.cut(uniforms(rows.accept_seeds, jnp.zeros_like(drafts.lens)), drafts.lens)
    # Up to the token after the accepted ones, which replaced a rejected one.
    verified = (positions <= rows.prefix_lens[:, None]) & (positions < lens[:, None])
    accepted = spec.accept.accepted_probs(now, outcomes(old))
    return jnp.where(verified[..., None], accepted, 0.0)


def read_inputs(spec: RolloutSpec, all_rows: Rows, drafts: Drafts | None) -> tuple:
    """Return the inputs of `read_rollout` for rows that started without tokens."""
    return spec, all_rows, drafts, None, jax.ShapeDtypeStruct((), np.int32)


def abstract_rollout(spec: RolloutSpec, num_rows: int) -> Rollout:
    """Return the shapes of a rollout."""
    return abstract.result(read_rollout, *read_inputs(spec, abstract_rows(spec, num_rows), None))
