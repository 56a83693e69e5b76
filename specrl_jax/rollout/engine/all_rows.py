"""All rows of a rollout: their start, the lengths of their drafts, and their end as a `Rollout`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.kv_cache import KVCache, init_cache
from specrl_jax.models.logprobs import CUT_OFF_LOGPROB
from specrl_jax.models.row_slices import read_slots
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.rows import Rows, gather, where_rows
from specrl_jax.rollout.sampling import NoiseKey, Purpose, row_seeds, uniforms
from specrl_jax.sharding import axes, reshard
from specrl_jax.types import Drafts, PartialRows, Prompts, Rollout, Source, TokenColumns


def start_all_rows(
    spec: RolloutSpec, prompts: Prompts, noise: NoiseKey, max_lens: np.ndarray | None = None
) -> Rows:
    """Start rows that hold only their prompts. max_lens: as in `start_arrays`."""
    noise_steps = noise.steps_of(len(prompts.lens), spec.group_size)
    arrays = start_arrays(spec, prompts, noise_steps, max_lens)
    return start_rows(spec, int(noise.purpose), noise.key, *arrays)


def start_arrays(
    spec: RolloutSpec,
    prompts: Prompts,
    noise_steps: np.ndarray,
    max_lens: np.ndarray | None = None,
) -> tuple[np.ndarray, ...]:
    """Return the host arrays for `start_rows`, its arguments from `noise_steps` on.

    noise_steps: int [Q, G], the step whose noise each row uses. max_lens: int32 [B], where
    responses end; None: at R.
    """
    group_size = spec.group_size
    last = np.take_along_axis(prompts.tokens, prompts.lens[:, None] - 1, axis=1)[:, 0]
    if max_lens is None:
        max_lens = np.full(len(last) * group_size, spec.response_slots)
    return (
        noise_steps.reshape(-1).astype(np.uint32),
        np.repeat(prompts.ids, group_size, axis=0),
        np.repeat(prompts.lens.astype(np.int32), group_size),
        max_lens.astype(np.int32),
        np.repeat(last.astype(np.int32), group_size),
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def start_rows(
    spec: RolloutSpec,
    purpose: int,
    key: Array,
    noise_steps: Array,
    ids: Array,
    prompt_lens: Array,
    max_lens: Array,
    last: Array,
) -> Rows:
    """Start rows from host arrays [B], ids [B, 2]. The call puts all of them on the device."""
    group_size = spec.group_size
    noise_steps = reshard(noise_steps, "batch")
    ids = reshard(ids, "batch", None)
    prompt_lens = reshard(prompt_lens, "batch")
    samples = jnp.tile(jnp.arange(group_size, dtype=jnp.int32), len(last) // group_size)
    samples = reshard(samples, "batch")
    empty = Rollout.empty(len(prompt_lens), spec.columns, spec.stored_logprobs)
    last_state = None
    if spec.draft_head is not None:
        shape = (len(prompt_lens), spec.model.embed_dim)
        last_state = jnp.zeros(shape, spec.model.dtype, out_sharding=axes("batch", None))
    return Rows(
        index=reshard(jnp.arange(len(prompt_lens), dtype=jnp.int32), "batch"),
        seeds=row_seeds(key, purpose, noise_steps, ids, samples),
        accept_seeds=row_seeds(key, int(Purpose.ACCEPT), noise_steps, ids, samples),
        prompt_lens=prompt_lens,
        max_lens=reshard(max_lens, "batch"),
        lens=empty.lens,
        turn_starts=empty.lens,
        last=reshard(last, "batch"),
        prefix_lens=empty.lens,
        done=empty.lens > 0,
        tokens=jnp.full_like(empty.tokens, spec.pad_id),
        policy_logprobs=empty.policy_logprobs,
        sampling_logprobs=empty.sampling_logprobs,
        sources=empty.sources,
        top_ids=empty.top_ids,
        top_logprobs=empty.top_logprobs,
        last_state=last_state,
    )


@jax.jit
def write_partial_rows(all_rows: Rows, partial_rows: PartialRows) -> Rows:
    """Return all rows with the tokens and state that they hold already, [B]."""
    rollout = partial_rows.rollout
    have = rollout.lens > 0
    margin = all_rows.tokens.shape[1] - rollout.tokens.shape[1]

    def write(old: Array, new: Array) -> Array:
        wide = jnp.pad(new, ((0, 0), (0, margin), *((0, 0),) * (new.ndim - 2)))
        return where_rows(have, wide, old)

    columns = jax.tree.map(write, TokenColumns.of(all_rows), TokenColumns.of(rollout))
    last = read_slots(columns.tokens, jnp.maximum(rollout.lens - 1, 0), 1)[:, 0]
    return dataclasses.replace(
        all_rows,
        lens=jnp.where(have, rollout.lens, all_rows.lens),
        last=jnp.where(have, last, all_rows.last),
        prefix_lens=jnp.where(have, rollout.prefix_lens, all_rows.prefix_lens),
        done=partial_rows.done,
        sources=write(all_rows.sources, rollout.sources),
        **vars(columns),
    )


@functools.partial(jax.jit, static_argnums=0)
def cut_drafts(spec: RolloutSpec, rows: Rows, lens: Array) -> Array:
    """Return how much of drafts of `lens` [B] tokens the rule verifies, int32 [B]."""
    return spec.accept.cut(uniforms(rows.accept_seeds, jnp.zeros_like(lens)), lens)


@functools.partial(jax.jit, static_argnames=("spec", "size", "slots"))
def empty_batch(
    spec: RolloutSpec, all_rows: Rows, *, size: int, slots: int
) -> tuple[KVCache, Rows]:
    """Return a cache of `size` x `slots`, and `size` rows of padding."""
    none = jnp.full(size, -1, jnp.int32)
    cache = init_cache(spec.model, size, slots, spec.draft_head is not None)
    return cache, gather(all_rows, reshard(none, "batch"))


@functools.partial(jax.jit, static_argnums=0)
def read_rollout(
    spec: RolloutSpec,
    rows: Rows,
    drafts: Drafts | None,
    partial_rows: PartialRows | None,
    step: Array,
) -> Rollout:
    """Return all rows as a rollout of `step`. partial_rows: what rows held before the rollout."""
    slots = spec.response_slots
    positions = jnp.arange(slots)[None, :]
    inside = positions < rows.lens[:, None]
    columns = jax.tree.map(lambda x: x[:, :slots], TokenColumns.of(rows))
    sources = rows.sources[:, :slots]
    policy = jnp.where(inside, columns.policy_logprobs, 0.0)
    sampling = jnp.where(inside, columns.sampling_logprobs, 0.0)
    sampling = jnp.where(jnp.isneginf(sampling), CUT_OFF_LOGPROB, sampling)
    origin_logprobs = policy
    origin_steps = jnp.zeros_like(columns.tokens) + step
    draft_logprobs = sampling
    if drafts is not None and not spec.accept.samples_anew:
        reused = inside & (sources == Source.REUSED)
        origin_logprobs = jnp.where(reused, drafts.origin_logprobs, origin_logprobs)
        origin_steps = jnp.where(reused, drafts.origin_steps, origin_steps)
        draft_logprobs = jnp.where(reused, drafts.sampling_logprobs, draft_logprobs)
    if partial_rows is not None:
        earlier = partial_rows.rollout
        before = positions < earlier.lens[:, None]
        origin_logprobs = jnp.where(before, earlier.origin_logprobs, origin_logprobs)
        origin_steps = jnp.where(before, earlier.origin_steps, origin_steps)
        draft_logprobs = jnp.where(before, earlier.draft_logprobs, draft_logprobs)
    return Rollout(
        tokens=jnp.where(inside, columns.tokens, spec.pad_id),
        lens=rows.lens,
        prefix_lens=rows.prefix_lens,
        policy_logprobs=policy,
        sampling_logprobs=sampling,
        origin_logprobs=jnp.where(inside, origin_logprobs, 0.0),
        origin_steps=origin_steps,
        sources=jnp.where(inside, sources, jnp.int8(Source.SAMPLED)),
        draft_logprobs=jnp.where(inside, draft_logprobs, 0.0),
        top_ids=columns.top_ids,
        top_logprobs=columns.top_logprobs,
    )
