"""One rollout: prompts and drafts in, responses with their log-probs out.

    prefill each prompt once → verify the drafts in one pass → decode what is left, rung by rung

Between rungs the host reads two scalars; no token visits it. Finished rows are gathered away, so
the cost follows the rows that are still active, not the slowest of the batch.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Params
from specrl_jax.rollout import decode as steps
from specrl_jax.rollout.decode import Rows, Setup
from specrl_jax.rollout.ladder import Ladder
from specrl_jax.rollout.sampling import Purpose, SamplingLaw, row_seeds
from specrl_jax.sharding import put, shards, spec
from specrl_jax.types import Drafts, Prompts, Rollout


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that stays the same from rollout to rollout.

    row_rungs, windows: sizes of the ladder. max_rows: rows in flight at once (0: all); the batch is
    cut into equal parts of whole groups that do not exceed it.
    """

    setup: Setup
    prompt_slots: int
    group_size: int
    row_rungs: int = 4
    windows: int = 2
    max_rows: int = 0

    @classmethod
    def from_config(
        cls, config, model: ModelConfig, *, eos_ids: tuple[int, ...], pad_id: int
    ) -> "Plan":
        """The training rollout that `config.rollout` asks for."""
        settings = config.rollout
        setup = Setup(
            model=model,
            law=SamplingLaw(settings.temperature, settings.top_k, settings.top_p),
            accept=settings.accept,
            eos_ids=eos_ids,
            pad_id=pad_id,
            response_slots=settings.response_len,
            logits_chunk=settings.logits_chunk,
        )
        return cls(
            setup=setup,
            prompt_slots=config.data.prompt_len,
            group_size=settings.group_size,
            row_rungs=settings.row_rungs,
            windows=settings.windows,
            max_rows=settings.max_rows,
        )

    def for_evaluation(self, samples: int, temperature: float) -> "Plan":
        """The same rollout with `samples` responses a prompt and an untruncated law."""
        setup = dataclasses.replace(self.setup, law=SamplingLaw(temperature))
        return dataclasses.replace(self, setup=setup, group_size=samples)


@dataclasses.dataclass
class Stats:
    """What a rollout cost. Seconds are wall-clock and include waiting for the device.

    row_steps: rows x decode steps actually computed, the work behind `decode_seconds`.
    verified_tokens: rows x width of the verification passes. parts: equal pieces that the batch
    was cut into. rungs: (rows, slots, steps) in the order they were visited, part by part.
    """

    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    row_steps: int = 0
    verified_tokens: int = 0
    parts: int = 0
    rungs: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Under the names of `metrics.METRICS`."""
        return {
            "time/prefill": self.prefill_seconds,
            "time/verify": self.verify_seconds,
            "time/decode": self.decode_seconds,
            "rollout/decode_steps": self.decode_steps,
            "rollout/row_steps": self.row_steps,
        }


def generate(
    plan: Plan,
    weights: Params,
    prompts: Prompts,
    *,
    key: Array,
    step: int,
    purpose: Purpose = Purpose.SAMPLE,
    drafts: Drafts | None = None,
    log_lenience: float = 0.0,
) -> tuple[Rollout, Stats]:
    """Responses [Q * G] to Q prompts, in the prompts' order, G in a row for each.

    key: the run's key. step: which rollout this is; with the prompt's id, the sample and the
    position it keys all noise. drafts: [Q * G] or None. log_lenience: nats, in [-inf, inf].
    """
    stats = Stats()
    size = _prompts_in_flight(plan, len(prompts.lens))
    parts = []
    for i in range(0, len(prompts.lens), size):
        part = Prompts(
            prompts.tokens[i : i + size],
            prompts.lens[i : i + size],
            prompts.ids[i : i + size],
            prompts.examples[i : i + size],
        )
        rows = slice(i * plan.group_size, (i + size) * plan.group_size)
        whole = size == len(prompts.lens)
        part_drafts = drafts if drafts is None or whole else _slice(drafts, rows.start, rows.stop)
        parts.append(
            _generate_part(
                plan, weights, part, part_drafts, key, step, purpose, log_lenience, stats
            )
        )
    return (parts[0] if len(parts) == 1 else _concatenate(parts)), stats


def _generate_part(plan, weights, prompts, drafts, key, step, purpose, log_lenience, stats):
    setup, group = plan.setup, plan.group_size
    stats.parts += 1
    rows_total = len(prompts.lens) * group
    ladder = Ladder.build(
        rows_total,
        plan.prompt_slots,
        setup.response_slots,
        plan.row_rungs,
        plan.windows,
        shards("batch"),
    )
    width = _draft_width(drafts, ladder)
    slots = ladder.window(width or ladder.responses[0])
    rows, accept_seeds = _start(plan, prompts, key, step, purpose)

    with _Timer(stats, "prefill_seconds"):
        cache = steps.prefill(
            setup, weights, put(prompts.tokens, "batch", None), slots=slots, group_size=group
        )
        jax.block_until_ready(cache)
    if width:
        with _Timer(stats, "verify_seconds"):
            cache, rows = steps.verify(
                setup,
                weights,
                cache,
                rows,
                drafts,
                accept_seeds,
                jnp.float32(log_lenience),
                width=width,
            )
            jax.block_until_ready(rows.lens)
        stats.verified_tokens += rows_total * width
        prefix_lens = jnp.copy(rows.lens)
    else:
        prefix_lens = rows.lens * 0
    with _Timer(stats, "decode_seconds"):
        rows = _decode_ladder(setup, ladder, weights, cache, rows, slots, stats)
        jax.block_until_ready(rows.lens)
    return _assemble(setup, rows, prefix_lens, drafts, step)


def _decode_ladder(setup, ladder, weights, cache, rows: Rows, slots: int, stats: Stats) -> Rows:
    """Decode until every row is done; returns all rows in batch order."""
    finished = None
    size = rows.lens.shape[0]
    active, longest = map(int, jax.device_get(steps.progress(rows)))
    while active:
        response = ladder.response_for(min(longest + 1, setup.response_slots))
        rung = ladder.rows_for(active), ladder.window(response)
        if rung != (size, slots):
            cache, rows, finished = steps.move(cache, rows, finished, size=rung[0], slots=rung[1])
            size, slots = rung
        cache, rows, *scalars = steps.decode(
            setup, weights, cache, rows, jnp.int32(ladder.rows_below(size)), jnp.int32(response)
        )
        active, longest, taken = map(int, jax.device_get(scalars))
        stats.rungs.append((*rung, taken))
        stats.decode_steps += taken
        stats.row_steps += taken * size
    return rows if finished is None else steps.collect(rows, finished)


def _start(plan: Plan, prompts: Prompts, key, step, purpose) -> tuple[Rows, Array]:
    """Rows with only their prompts, and the seeds of the acceptance uniforms."""
    group = plan.group_size
    last = np.take_along_axis(prompts.tokens, prompts.lens[:, None] - 1, axis=1)[:, 0]
    samples = np.tile(np.arange(group, dtype=np.int32), len(prompts.lens))
    per_row = [np.repeat(x, group, axis=0) for x in (prompts.lens.astype(np.int32), last)]
    ids = put(np.repeat(prompts.ids, group, axis=0), "batch", None)
    samples = put(samples, "batch")
    sample_seeds = _seeds(key, int(purpose), jnp.uint32(step), ids, samples)
    accept_seeds = _seeds(key, int(Purpose.ACCEPT), jnp.uint32(step), ids, samples)
    rows = steps.start_rows(plan.setup, sample_seeds, *(put(x, "batch") for x in per_row))
    return rows, accept_seeds


_seeds = jax.jit(row_seeds)


def _draft_width(drafts: Drafts | None, ladder: Ladder) -> int:
    """Width of the verification pass: the rung that holds the longest draft, 0 without drafts."""
    longest = 0 if drafts is None else int(jax.device_get(jnp.max(drafts.lens)))
    return ladder.response_for(longest) if longest else 0


def _prompts_in_flight(plan: Plan, prompts: int) -> int:
    """The largest equal part of the batch that stays within max_rows and divides over the mesh."""
    if not plan.max_rows:
        return prompts
    fits = [
        n
        for n in range(1, prompts + 1)
        if prompts % n == 0 and n % shards("batch") == 0 and n * plan.group_size <= plan.max_rows
    ]
    if not fits:
        raise ValueError(
            f"rollout.max_rows={plan.max_rows} must hold at least {shards('batch')} groups of "
            f"{plan.group_size} rows, got room for {plan.max_rows // plan.group_size}; raise it"
        )
    return max(fits)


@functools.partial(jax.jit, static_argnums=0)
def _assemble(setup: Setup, rows: Rows, prefix_lens: Array, drafts: Drafts | None, step: Array):
    slots = setup.response_slots
    positions = jnp.arange(slots)[None, :]
    inside = positions < rows.lens[:, None]
    reused = positions < prefix_lens[:, None]
    policy = jnp.where(inside, rows.policy_logprobs[:, :slots], 0.0)
    now = jnp.full_like(rows.tokens[:, :slots], 0) + step
    origin_logprobs, origin_steps = policy, now
    if drafts is not None:
        origin_logprobs = jnp.where(reused, drafts.origin_logprobs, policy)
        origin_steps = jnp.where(reused, drafts.origin_steps, now)
    return Rollout(
        tokens=jnp.where(inside, rows.tokens[:, :slots], setup.pad_id),
        lens=rows.lens,
        prefix_lens=prefix_lens,
        policy_logprobs=policy,
        sampling_logprobs=jnp.where(inside, rows.sampling_logprobs[:, :slots], 0.0),
        origin_logprobs=jnp.where(inside, origin_logprobs, 0.0),
        origin_steps=origin_steps,
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _slice(drafts: Drafts, start: int, stop: int) -> Drafts:
    index = jnp.arange(start, stop)

    def take(x: Array) -> Array:
        return x.at[index].get(out_sharding=spec("batch", *(None,) * (x.ndim - 1)))

    return jax.tree.map(take, drafts)


@jax.jit
def _concatenate(parts: list[Rollout]) -> Rollout:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


class _Timer:
    """Adds the seconds of a `with` block to a field of the stats."""

    def __init__(self, stats: Stats, field: str):
        self.stats, self.field = stats, field

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_) -> None:
        seconds = getattr(self.stats, self.field) + time.perf_counter() - self.start
        setattr(self.stats, self.field, seconds)
