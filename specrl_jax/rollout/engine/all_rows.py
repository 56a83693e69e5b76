"""All rows of a rollout: how they start, which drafts they verify, and what is read from them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.kv_cache import KVCache, init_cache
from specrl_jax.rollout.engine.spec import ProgramSpec, RolloutSpec
from specrl_jax.rollout.rows import Rows, gather
from specrl_jax.rollout.sampling import CUT_OFF_LOGPROB, Purpose, row_seeds, uniforms
from specrl_jax.sharding import axes, reshard
from specrl_jax.types import Drafts, PartialRows, Prompts, Rollout, Source


@dataclasses.dataclass(frozen=True)
class Noise:
    """Key of a rollout's noise, beside prompt, sample and position."""

    key: Array  # the run's
    step: int
    purpose: Purpose = Purpose.SAMPLE
    row_steps: np.ndarray | None = None  # int [Q, G], whose noise each row uses; None: `step`'s


def start_all_rows(
    program: ProgramSpec,
    prompts: Prompts,
    noise: Noise,
    steps: np.ndarray,
    max_lens: np.ndarray | None = None,
) -> Rows:
    """Rows that hold only their prompts. steps: int [Q, G], whose noise they use. max_lens: int32
    [B], where responses end; None: at R."""
    inputs = start_inputs(program, prompts, steps, max_lens)
    return start_rows(program, int(noise.purpose), noise.key, *inputs)


def start_inputs(
    program: ProgramSpec,
    prompts: Prompts,
    steps: np.ndarray,
    max_lens: np.ndarray | None = None,
) -> tuple:
    """The host's arrays [B] for `start_rows`, arguments as above."""
    group = program.group_size
    last = np.take_along_axis(prompts.tokens, prompts.lens[:, None] - 1, axis=1)[:, 0]
    samples = np.tile(np.arange(group, dtype=np.int32), len(prompts.lens))
    prompt_lens, last = (np.repeat(x.astype(np.int32), group) for x in (prompts.lens, last))
    ends = np.full(len(samples), program.response_slots) if max_lens is None else max_lens
    keyed = steps.reshape(-1).astype(np.uint32), np.repeat(prompts.ids, group, axis=0)
    numbers = tuple(np.asarray(x, np.int32) for x in (prompt_lens, ends, last))
    return (*keyed, samples), numbers


@functools.partial(jax.jit, static_argnums=(0, 1))
def start_rows(program: ProgramSpec, purpose: int, key: Array, keyed, numbers) -> Rows:
    """Start rows from host arrays [B], ids [B, 2]. The call hands them over: to place each by
    itself takes longer."""
    steps, ids, samples = keyed
    steps, samples, *numbers = (reshard(x, "batch") for x in (steps, samples, *numbers))
    ids = reshard(ids, "batch", None)
    seeds, accept_seeds = (
        row_seeds(key, p, steps, ids, samples) for p in (purpose, int(Purpose.ACCEPT))
    )
    prompt_lens, max_lens, last = numbers
    empty = Rollout.empty(len(prompt_lens), program.columns, program.stored_logprobs)
    last_state = None
    if program.draft_head is not None:
        shape = (len(prompt_lens), program.model.embed_dim)
        last_state = jnp.zeros(shape, program.model.dtype, out_sharding=axes("batch", None))
    return Rows(
        index=reshard(jnp.arange(len(prompt_lens), dtype=jnp.int32), "batch"),
        seeds=seeds,
        accept_seeds=accept_seeds,
        prompt_lens=prompt_lens,
        max_lens=max_lens,
        lens=empty.lens,
        last=last,
        prefix_lens=empty.lens,
        done=empty.lens > 0,
        tokens=jnp.full_like(empty.tokens, program.pad_id),
        policy_logprobs=empty.policy_logprobs,
        sampling_logprobs=empty.sampling_logprobs,
        sources=empty.sources,
        top_ids=empty.top_ids,
        top_logprobs=empty.top_logprobs,
        last_state=last_state,
    )


@functools.partial(jax.jit, static_argnums=0)
def cut_drafts(spec: RolloutSpec, rows: Rows, lens: Array) -> tuple[Array, Array]:
    """Return where drafts of `lens` [B] tokens end, int32 [B] each: without those that are left out
    at random; and as far as the rule looks at them. Where every token is sampled anew, nothing is
    left out."""
    rule = spec.program.accept
    seeds = rows.accept_seeds
    if spec.refresh and not rule.samples_anew:
        # Noise of a position that no response has: it must not sway what is accepted.
        past_end = jnp.full_like(lens, spec.program.response_slots)
        lens = jnp.where(uniforms(seeds, past_end) <= spec.refresh, 0, lens)
    return lens, rule.cut(uniforms(seeds, jnp.zeros_like(lens)), lens)


@functools.partial(jax.jit, static_argnames=("program", "size", "slots"))
def empty_batch(
    program: ProgramSpec, all_rows: Rows, *, size: int, slots: int
) -> tuple[KVCache, Rows]:
    """A cache of `size` x `slots`, and as many places without a row."""
    none = jnp.full(size, -1, jnp.int32)
    cache = init_cache(program.model, size, slots, program.draft_head is not None)
    return cache, gather(all_rows, reshard(none, "batch"))


@functools.partial(jax.jit, static_argnums=0)
def read_rollout(
    program: ProgramSpec,
    rows: Rows,
    drafts: Drafts | None,
    held: PartialRows | None,
    step: Array,
) -> Rollout:
    """All rows as a rollout of this step; held: what they held before it."""
    slots = program.response_slots
    positions = jnp.arange(slots)[None, :]
    inside = positions < rows.lens[:, None]
    sources = jnp.where(inside, rows.sources[:, :slots], jnp.int8(Source.SAMPLED))
    policy = jnp.where(inside, rows.policy_logprobs[:, :slots], 0.0)
    sampling = jnp.where(inside, rows.sampling_logprobs[:, :slots], 0.0)
    sampling = jnp.where(jnp.isneginf(sampling), CUT_OFF_LOGPROB, sampling)
    now = jnp.full_like(rows.tokens[:, :slots], 0) + step
    origin = {"origin_logprobs": policy, "origin_steps": now, "draft_logprobs": sampling}
    if drafts is not None and not program.accept.samples_anew:
        reused = inside & (rows.sources[:, :slots] == Source.REUSED)
        old = (drafts.origin_logprobs, drafts.origin_steps, drafts.sampling_logprobs)
        origin = {n: jnp.where(reused, x, origin[n]) for n, x in zip(origin, old)}
    if held is not None:
        before = positions < held.rollout.lens[:, None]
        origin = {n: jnp.where(before, getattr(held.rollout, n), x) for n, x in origin.items()}
    for name in ("origin_logprobs", "draft_logprobs"):
        origin[name] = jnp.where(inside, origin[name], 0.0)
    tops = {n: getattr(rows, n) for n in ("top_ids", "top_logprobs")}
    return Rollout(
        tokens=jnp.where(inside, rows.tokens[:, :slots], program.pad_id),
        lens=rows.lens,
        prefix_lens=rows.prefix_lens,
        policy_logprobs=policy,
        sampling_logprobs=sampling,
        sources=sources,
        **origin,
        **{n: None if x is None else x[:, :slots] for n, x in tops.items()},
    )
