"""The programs of a run: the jitted functions that it calls, with their inputs as shapes.

The shapes are those of the largest buckets, the longest cache and the widest passes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax.accelerators.abstract_run import AbstractRun, abstract, array, device_bytes, on_host
from specrl_jax.algorithms.scoring import PackedRows, critic_values, logprobs
from specrl_jax.algorithms.update import update
from specrl_jax.build import policy_copy
from specrl_jax.rollout.drafts.store import Stored, pick_drafts, pick_sources, write_newest
from specrl_jax.rollout.engine import decode, decode_state
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.draft_tries import (
    DraftTries,
    saves_work,
    sequence_counts,
    sequence_slots,
)


class Program(NamedTuple):
    """One program that a run compiles."""

    trace: Callable[[], Any]  # gives jax.stages.Traced
    shape: str  # its size in words
    rows: int  # that it computes or moves; 0: those of the whole step
    arguments: int  # bytes on a device
    beside: int  # bytes that a device holds meanwhile, arguments not counted
    passes: str = ""  # what one pass of its open loop does, where it has one


def programs(run: AbstractRun) -> dict[str, Program]:
    """The programs of a step, by name, in the order in which they run."""
    return _rollout_programs(run) | _update_programs(run)


def _stop() -> StopCondition:
    return StopCondition.of(0, 1, 1, 1)


def _program(
    held: tuple,
    shape: str,
    function: Any,
    *inputs: Any,
    rows: int = 0,
    passes: str = "",
    **options: Any,
) -> Program:
    """Make a program.

    held: the trees that live on the devices meanwhile; inputs among them are not counted.
    """
    arrays = [leaf for leaf in jax.tree.leaves(inputs) if hasattr(leaf, "shape")]
    given = {id(leaf) for leaf in arrays}
    beside = device_bytes([leaf for leaf in jax.tree.leaves(held) if id(leaf) not in given])
    trace = functools.partial(function.trace, *inputs, **options)
    return Program(trace, shape, rows, device_bytes(arrays), beside, passes)


def _rollout_programs(run: AbstractRun) -> dict[str, Program]:
    held = run.state, run.reference, run.stored, run.weights, run.drafts, run.all_rows
    make = functools.partial(_program, held)
    listed = {"policy_copy": make("once a step", policy_copy, run.model, run.state.params)}
    if run.drafts is not None:
        listed["pick_drafts"] = make(f"{run.rows} rows", pick_drafts, *run.picked, age=1)
    if run.program.draft_history:
        listed["pick_sources"] = make(f"{run.rows} rows", pick_sources, *run.picked)
    listed |= _starting_programs(run, make) | _running_programs(run, make)
    rows = run.rollout.lens.shape[0]
    slots = array(np.int32, (rows // run.spec.group_size,), None)
    fresh = array(np.bool_, slots.shape, None)
    inputs = run.stored, slots, fresh, Stored.of(run.rollout, steps=on_host(rows))
    listed["store_drafts"] = make(f"{rows} rows", write_newest, *inputs)
    return listed


def _starting_programs(run: AbstractRun, make: Callable) -> dict[str, Program]:
    """Rows begin: their prompts are prefilled, their drafts are verified."""
    program = run.program
    buckets = run.buckets
    group = run.spec.group_size
    size = run.first
    shared = buckets.slots_for(1)
    make = functools.partial(make, rows=size)
    prompts = on_host(size // group, buckets.prompt_slots)
    cache = abstract(functools.partial(decode.prefill, program), run.weights, prompts)
    listed = {
        "prefill": make(_cells(*prompts.shape), decode.prefill, program, run.weights, prompts),
        "broadcast_prefill": make(
            _cells(size, shared), decode.broadcast_prefill, cache, slots=shared, group_size=group
        ),
    }
    if run.drafts is None:
        return listed
    width = buckets.verify[-1]
    rows = run.batch_rows(size, with_drafts=True)
    if tries := _tries(run, size, width):
        shape = f"{size} rows in {_cells(*tries.shape)}, width {width}"
        inputs = program, run.weights, tries, rows, _stop()
        listed["verify_tries"] = make(shape, decode.verify_trie, *inputs, width=width)
    seen = buckets.verify_slots(width, program.response_slots)
    inputs = program, run.weights, run.cache(size, seen), rows, None, _stop()
    listed["verify_rows"] = make(
        f"{_cells(size, seen)}, width {width}", decode.decode_steps, *inputs, width=width,
        verify=True,
    )  # fmt: skip
    return listed


def _tries(run: AbstractRun, size: int, width: int) -> DraftTries | None:
    """Return as many sequences as the scheduler would still prefer to a pass over the rows."""
    prompt_slots = run.buckets.prompt_slots
    length = sequence_slots(prompt_slots + width)
    limits = (size, width, run.spec.group_size)
    counts = [n for n in sequence_counts(size) if saves_work((n, length), *limits, prompt_slots)]
    if not counts:
        return None
    packed = (on_host(max(counts), length) for _ in range(3))
    return DraftTries(*packed, on_host(size, prompt_slots + width))


def _running_programs(run: AbstractRun, make: Callable) -> dict[str, Program]:
    """Rows decode, and change their bucket."""
    buckets = run.buckets
    size = run.running
    slots = run.slots
    cache = run.cache(size, slots)
    rows = run.batch_rows(size)
    shape = _cells(size, slots)
    make = functools.partial(make, rows=size)
    step = functools.partial(make, passes="step")
    inputs = decode.decode_steps, run.program, run.weights, cache, rows
    listed = {"decode": step(shape, *inputs, None, _stop(), width=1)}
    if run.program.draft_source is not None:
        width = buckets.widths[-1]
        drafting = (run.draft_state, _stop())
        listed["decode_wide"] = step(f"{shape}, width {width}", *inputs, *drafting, width=width)
    kept = array(np.bool_, (size,), "batch")
    if smaller := buckets.rows_below(size):
        options = {"size": smaller, "slots": slots}
        listed["fewer_rows"] = make(
            f"{shape} to {smaller} rows", decode_state.resize, cache, rows, kept, **options
        )
    if len(buckets.responses) > 1:
        short = buckets.slots(buckets.responses[-2])
        options = {"size": size, "slots": slots}
        inputs = run.cache(size, short), rows, kept
        shape_change = f"{_cells(size, short)} to {slots} slots"
        listed["longer_cache"] = make(shape_change, decode_state.resize, *inputs, **options)
    if run.rows > size:
        others = run.cache(run.refill, slots), run.batch_rows(run.refill)
        inputs = cache, rows, *others, array(np.bool_, (run.refill,), "batch")
        moved = f"{run.refill} rows into {shape}"
        listed["insert"] = make(moved, decode_state.insert, *inputs, passes="row of a shard")
    inputs = rows, run.all_rows
    listed["write_back"] = make(f"{size} of {run.rows} rows", decode_state.scatter, *inputs)
    return listed


def _update_programs(run: AbstractRun) -> dict[str, Program]:
    config = run.config
    learner = run.learner
    batch = run.batch
    held = run.state, run.reference, run.stored, run.rollout, batch
    make = functools.partial(_program, held, passes="micro-batch")
    every = run.packed(batch.response_lens.shape[0])
    listed = {}

    def shape(packed: PackedRows) -> str:
        return "{} x {} x {} slots".format(*packed.sequences.tokens.shape)

    if config.algorithm.kl_coef or config.updates.old_logprobs == "recompute":
        params = run.reference or run.state.params
        listed["logprobs"] = make(shape(every), logprobs, learner, params, every)
    if learner.critic:
        listed["critic_values"] = make(shape(every), critic_values, learner, run.state, every)
    inputs = learner, run.state, batch, run.mini_batch
    listed["update"] = make(shape(run.mini_batch), update, *inputs, policy_frozen=False)
    return listed


def _cells(rows: int, slots: int) -> str:
    return f"{rows:,} x {slots:,} slots"
