"""Rows that a rollout computes at a time if `rollout.max_rows` is 0: as many as fit on a device.

Bytes follow from the shapes of a run's arrays, plus an estimate of what programs need in addition,
so the number follows from configuration, mesh and memory alone. `programs.compile_run` checks it
against the compiler's report.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specrl_jax.abstract import device_bytes
from specrl_jax.compile import memory
from specrl_jax.compile.shapes import AbstractRun
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import shards
from specrl_jax.training.run import Run

_SPARE = 0.1  # share of the memory for what is not counted, and for gaps between arrays
_COPIES = 2  # of a program's intermediate arrays that are in memory together
_ROWS = 8  # a shard's rows are a multiple of this, so that a few bytes do not matter


class Need(NamedTuple):
    """Bytes of one device during a rollout."""

    beside: int  # arrays independent of the batch, and what `prefill` needs
    row: int  # per row on each shard

    def rows(self, there: float) -> int:
        """Return the rows per shard that fit on a device with this many bytes."""
        rows = max(int(((1 - _SPARE) * there - self.beside) // self.row), 0)
        return rows // _ROWS * _ROWS or rows


def fit_rows_to_memory(run: Run) -> Run:
    """Return the run with the rows that fit the devices of its mesh; print a line about them.

    Raises ValueError as `fit_rows` does.
    """
    shapes = AbstractRun.of(run).of_rollouts()
    with jax.set_mesh(run.rollout_mesh):
        there = memory.device_memory()[0] / run.rollout_mesh.size
        fitted = fit_rows(shapes, there)
        print(describe(fitted, there), flush=True)
    return dataclasses.replace(run, rollout_spec=fitted.spec, eval_spec=fitted.eval_spec)


def fit_rows(run: AbstractRun, there: float) -> AbstractRun:
    """Return the run with the rows that fit, in training and evaluation, unless configured.

    there: bytes of a device. Raises a one-line ValueError if not even one row per shard fits.
    """
    if run.spec.max_rows:
        return run
    most = _max_rows(run.kept, run.training, there)
    spec = dataclasses.replace(run.spec, max_rows=most)
    eval_spec = run.eval_spec
    if run.config.evaluate.every:
        most = _max_rows(run.kept, run.evaluation, there)
        eval_spec = dataclasses.replace(eval_spec, max_rows=most)
    return dataclasses.replace(run, spec=spec, eval_spec=eval_spec)


def fit_evaluation(spec: RolloutSpec, weights: Params, params: Params, rows: int) -> RolloutSpec:
    """Return the spec of a rollout of `rows` rows with as many at a time as fit next to a policy.

    weights: the rollout's copy of `params`. Raises ValueError as `fit_rows` does.
    """
    if spec.max_rows:
        return spec
    there = memory.device_memory()[0] / jax.sharding.get_mesh().size
    shapes = RolloutShapes(spec, weights, rows, rows, None)
    return dataclasses.replace(spec, max_rows=_max_rows(params, shapes, there))


def describe(run: AbstractRun, there: float) -> str:
    """Describe in a line how many rows a rollout computes at a time, and their cache size."""
    shapes = run.training
    at_once = shapes.buckets.sizes[0]
    own = at_once // shards("batch")
    cache, _ = shapes.batch(at_once)
    cache_size = device_bytes(cache) / 2**30
    return (
        f"rollout: {at_once:,} of {run.rows:,} rows at a time, {own:,} on each shard; their cache "
        f"takes {cache_size:.3g} of {there / 2**30:.3g} GiB of a device"
    )


def _max_rows(kept: Any, shapes: RolloutShapes, there: float) -> int:
    need = estimate(kept, shapes)
    rows = need.rows(there)
    if not rows:
        lengths = {
            "data.prompt_len": shapes.spec.prompt_slots,
            "rollout.response_len": shapes.spec.response_slots,
        }
        field = max(lengths, key=lengths.get)
        raise ValueError(
            f"{field} must be smaller: a row of {shapes.buckets.cache_slots:,} slots takes "
            f"{need.row / 2**30:.3g} GiB of a device that has {there / 2**30:.3g} GiB, and all "
            f"other arrays need {need.beside / 2**30:.3g}, got {lengths[field]}"
        )
    return rows * shards("batch")


def estimate(kept: Any, shapes: RolloutShapes) -> Need:
    """Return what a rollout takes of a device; kept: arrays that exist the whole time."""
    pieces = shards("batch")
    copied = {name: x for name, x in shapes.weights.items() if name != "stacked"}
    beside = device_bytes([kept, copied, shapes.all_rows, shapes.drafts, shapes.draft_state])
    row = device_bytes(shapes.batch(pieces))
    return Need(beside + _prefill_bytes(shapes), row + _step_bytes(shapes))


def _prefill_bytes(shapes: RolloutShapes) -> int:
    """Return the bytes that `prefill` needs for a chunk, and it or `append` for a block of rows."""
    model = shapes.spec.model
    buckets = shapes.buckets
    itemsize = jnp.dtype(model.dtype).itemsize
    slot = 2 * itemsize * model.num_layers * model.num_kv_heads * model.head_dim
    slot //= shards("kv_heads")
    sequences = buckets.chunk_sequences
    tokens = sequences * buckets.sequence_slots
    at_once = buckets.window_slots or tokens
    hidden = itemsize * at_once * (model.embed_dim + 3 * model.mlp_width // shards("mlp"))
    scores = 0
    if "packed" not in model.kernels:
        scores = 4 * at_once * buckets.sequence_slots * model.num_heads // shards("heads")
    logits = 4 * buckets.verify_width * model.vocab_size // shards("vocab")
    row = buckets.cache_slots * slot
    if shapes.spec.turns:  # the states of `append`
        row += buckets.cache_slots * itemsize * model.embed_dim
    block = buckets.block_rows * max(logits, row)
    return _COPIES * (tokens * slot + hidden + scores + block)


def _step_bytes(shapes: RolloutShapes) -> int:
    """Return the bytes of a row, on each shard, in a decode step and in prefill."""
    spec = shapes.spec
    model = spec.model
    buckets = shapes.buckets
    logits = 0 if "head" in model.kernels else model.vocab_size // shards("vocab")
    scores = 0
    if "cached" not in model.kernels:
        scores = buckets.cache_slots * model.num_heads // shards("heads")
    # Every device has the packed texts of all shards: four numbers per token, and its slot.
    texts = shards("batch") * 4 * (4 * buckets.sequence_slots + buckets.cache_slots)
    return _COPIES * 4 * spec.max_width * (logits + scores) + texts
