"""Estimates of a run's largest arrays from its configuration.

They are lower bounds, so what fits is never rejected. `check` runs before anything is allocated: a
system may kill a process that takes too much without a message.
"""

import contextlib
import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax import hosts
from specrl_jax.algorithms.scoring import packed_shape
from specrl_jax.config import flatten
from specrl_jax.inputs import OutOfMemoryError, lack_of_memory
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.draft_head import draft_head_size
from specrl_jax.models.lora import adapter_count
from specrl_jax.models.transformer import param_count
from specrl_jax.packing import PACKINGS
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES
from specrl_jax.rollout.spec import acceptance_rule
from specrl_jax.sharding import shards
from specrl_jax.training.choices import frozen_of

_NAMED = 3  # arrays that an error names
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Part(NamedTuple):
    """Arrays of one kind, over all devices."""

    what: str
    fields: str  # of the config, which determine their size
    bytes: float

    def __str__(self) -> str:
        return f"{self.what}, {self.bytes / 2**30:.3g} GiB ({' x '.join(self.fields.split())})"


def stages(config, model: ModelConfig, prompts: int) -> Iterator[tuple[str, list[Part]]]:
    """Yield each stage of a run, and its simultaneous arrays. prompts: to train on."""
    rollout = config.rollout
    updates = config.updates
    sft = config.sft
    evaluation = config.evaluate
    row_fields = "data.prompt_len rollout.response_len"
    slots = config.data.prompt_len + rollout.response_len
    itemsize = jnp.dtype(model.dtype).itemsize
    kept = _kept(config, model, prompts)
    layers = model.num_layers + DRAFT_SOURCES[rollout.draft].head
    width = model.embed_dim if model.remat else 2 * model.embed_dim + 3 * model.mlp_width

    def decoded(rows: int, fields: str, layers: int) -> list[Part]:
        if 0 < rollout.max_rows < rows:
            rows = rollout.max_rows
            fields = "rollout.max_rows"
        elif not rollout.max_rows:  # as many as fit: at least one row per shard
            rows = min(rows, shards("batch"))
            fields = ""
        cache = 2 * layers * rows * slots * model.num_kv_heads * model.head_dim * itemsize
        logits = Part("logits of a decode step", fields, 4 * rows * model.vocab_size)
        return [Part("KV cache", f"{fields} {row_fields}".strip(), cache), logits]

    def trained(sequences: int, length: int, fields: str) -> list[Part]:
        activations = itemsize * model.num_layers * width * sequences * length
        logits = 4 * sequences * min(updates.logits_chunk, length) * model.vocab_size
        return [
            Part("activations", f"{fields} {row_fields}".strip(), activations),
            Part("logits", f"{fields} updates.logits_chunk".strip(), logits),
        ]

    rows = rollout.prompts_per_step * rollout.group_size
    yield "a rollout", kept + decoded(rows, "rollout.prompts_per_step rollout.group_size", layers)
    shape = functools.partial(
        packed_shape, PACKINGS[updates.packing], updates.mini_batch_size, slots
    )
    _, sequences, length = shape(updates.micro_batch_size)
    bound = "updates.micro_batch_size" if sequences > shape(1)[1] else ""
    yield "an update", kept + trained(sequences, length, bound)
    if model.lora:
        read = Part("weights as read", _model_fields(config), 4 * param_count(model))
        yield "the start", [*kept, read]
    if sft.steps:
        yield "the warm-up", kept[:-1] + trained(sft.batch_size, slots, "sft.batch_size")
    if evaluation.every:
        rows = evaluation.batch_size * evaluation.samples
        fields = "evaluate.batch_size evaluate.samples"
        yield "an evaluation", kept + decoded(rows, fields, model.num_layers)


def _model_fields(config) -> str:
    return "model.source" if config.model.source else "model.num_layers model.embed_dim"


def _kept(config, model: ModelConfig, prompts: int) -> list[Part]:
    """Return the arrays that a run keeps from start to end."""
    rollout = config.rollout
    model_fields = _model_fields(config)
    stored = (rollout.store_prompts or prompts) * rollout.group_size * rollout.response_len
    kept = [Part("weights and optimizer", model_fields, 12 * param_count(model))]
    if model.lora:
        weights = jnp.dtype(model.dtype).itemsize * param_count(model)
        adapters = Part("adapters and optimizer", "lora.rank", 12 * adapter_count(model))
        kept = [Part("weights", model_fields, weights), adapters]
    if recipe := frozen_of(config):
        other = recipe.shape(config, model.vocab_size)
        weights = jnp.dtype(other.dtype).itemsize * param_count(other)
        kept.append(Part("frozen weights", recipe.asked_by(config), weights))
    if DRAFT_SOURCES[rollout.draft].head:
        kept.append(Part("draft head and optimizer", model_fields, 12 * draft_head_size(model)))
    fields = "data.prompts rollout.group_size rollout.response_len"
    generations = rollout.draft_age
    if DRAFT_SOURCES[rollout.draft].make_source and rollout.tree.history > generations:
        generations = rollout.tree.history
        fields = f"rollout.tree.history {fields}"
    size = 4 * generations  # tokens; then log-probs and origins
    if not acceptance_rule(config).samples_every_token:
        size += 12 * rollout.draft_age
    kept.append(Part("stored drafts", fields, size * stored))
    return kept


def check(config, model: ModelConfig, prompts: int) -> None:
    """Raise a one-line ValueError if a stage of the run needs more memory than there is."""
    fields = dict(flatten(config))
    memory, where = device_memory()
    for stage, parts in stages(config, model, prompts):
        total = sum(part.bytes for part in parts)
        most = max(parts, key=lambda part: part.bytes)
        if total > memory:
            field = max(most.fields.split(), key=lambda name: fields[name] or math.inf)  # 0: all
            rule = "smaller" if fields[field] else "> 0"
            raise ValueError(
                f"{field} must be {rule}: {stage} needs about {total / 2**30:.3g} GiB, more than "
                f"the {memory / 2**30:.3g} GiB of {where}, most of it for {most}, "
                f"got {fields[field]!r}"
            )


def device_memory() -> tuple[float, str]:
    """Return the bytes of all devices of the mesh in use, and what has them.

    Every process must call it: the host with the least memory decides.
    """
    devices = jax.sharding.get_mesh().devices.ravel()
    if devices[0].platform == "cpu":
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
        for path in map(Path, _CGROUP_LIMITS):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limits.append(int(path.read_text("utf-8")))
        return min(hosts.gather(min(limits))) * jax.process_count(), "this machine"
    own = next(device for device in devices if device.process_index == jax.process_index())
    limit = (own.memory_stats() or {}).get("bytes_limit", float("inf"))
    return min(hosts.gather(limit)) * len(devices), f"{len(devices)} devices"


@contextlib.contextmanager
def explain_shortage(config, model: ModelConfig, prompts: int) -> Iterator[None]:
    """Turn a failed allocation into an OutOfMemoryError that names the largest arrays."""
    try:
        yield
    except Exception as error:
        if not (asked := lack_of_memory(error)):
            raise
        parts = {part for _, parts in stages(config, model, prompts) for part in parts}
        largest = sorted(parts, key=lambda part: part.bytes, reverse=True)[:_NAMED]
        raise OutOfMemoryError(
            f"out of memory: {asked}; the largest arrays take at least "
            f"{'; '.join(map(str, largest))}; lower one of these fields"
        ) from error
