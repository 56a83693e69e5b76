"""Programs of a run: the jitted functions that it calls, with the shapes of their inputs.

The list follows from the configuration. Training compiles it at the start (`compile_run`),
`launch/compile.py` for absent hardware.
"""

import concurrent.futures
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import rich.console

from specrl_jax.abstract import device_bytes
from specrl_jax.agents.turns import append_observations, append_observations_inputs
from specrl_jax.algorithms.corrections import OLD_LOGPROBS
from specrl_jax.algorithms.scoring import (
    critic_values,
    logprobs,
    logprobs_inputs,
    values_inputs,
    with_model,
)
from specrl_jax.algorithms.update import update, update_inputs
from specrl_jax.compile import memory
from specrl_jax.compile.shapes import AbstractRun
from specrl_jax.models.draft_head import copy_draft_head
from specrl_jax.models.transformer import copy_weights
from specrl_jax.rollout.drafts.store import pick_drafts, pick_history, pick_inputs
from specrl_jax.rollout.engine.all_rows import (
    empty_batch,
    init_inputs,
    init_rows,
    read_inputs,
    read_rollout,
)
from specrl_jax.rollout.engine.append import (
    append_block,
    append_inputs,
    put_block,
    put_inputs,
    take_block,
    take_inputs,
)
from specrl_jax.rollout.engine.decode import decode_inputs, decode_steps
from specrl_jax.rollout.engine.prefill import prefill, prefill_inputs
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.rollout.engine.text_states import blank_states
from specrl_jax.rollout.rows import (
    compact,
    compact_layer,
    compact_layer_inputs,
    release,
    release_inputs,
    scatter,
)
from specrl_jax.rollout.sampling import Purpose
from specrl_jax.training.choices import frozen_of
from specrl_jax.training.description import critic_only_steps


class Program(NamedTuple):
    """One program that a run compiles."""

    name: str
    trace: Callable[[], Any]  # gives jax.stages.Traced
    runs_model: bool = False
    # Bytes of a device: inputs that the run keeps anyway, and what lies beside the inputs.
    kept: int = 0
    beside: int = 0
    mesh: jax.sharding.Mesh | None = None  # that it runs on; None: the mesh in use


def run_programs(run: AbstractRun) -> list[Program]:
    """Return the programs of a run, in the order in which they first run."""
    listed = list(_copies(run))
    rollouts = run.of_rollouts()
    with jax.set_mesh(run.rollout_mesh):
        kept = device_bytes(rollouts.kept_weights)
        for program in _programs_of_rollouts(rollouts):
            listed.append(program._replace(beside=program.beside + kept))
    listed += _update_programs(run)
    return listed


def _copies(run: AbstractRun) -> Iterator[Program]:
    policy = run.policy
    yield _program("policy copy", copy_weights, run.model, policy, kept=policy)
    if head := run.state.draft_head:
        vocab = run.update_spec.draft_head.vocab
        yield _program(
            "draft head copy",
            copy_draft_head,
            run.model,
            head.params,
            policy,
            head.counts,
            vocab=vocab,
        )


def _programs_of_rollouts(run: AbstractRun) -> Iterator[Program]:
    """Yield the programs of evaluation, drafts and rollouts."""
    if run.config.evaluate.every:
        yield from _evaluation_programs(run)
    stored = run.stored
    inputs = pick_inputs(stored, run.prompts_per_rollout)
    for age in sorted({1, run.config.rollout.draft_age}):
        yield _program(f"pick drafts of age {age}", pick_drafts, *inputs, age=age, kept=stored)
    if run.spec.draft_history:
        yield _program("pick history", pick_history, *inputs, kept=stored)
    yield from rollout_programs(run.training)


def rollout_programs(shapes: RolloutShapes, prefix: str = "") -> Iterator[Program]:
    """Yield the programs of a rollout that run the model, or move rows between buckets.

    prefix: of their names.
    """
    buckets = shapes.buckets
    all_rows = shapes.all_rows
    stacked = shapes.weights["stacked"]
    copied = {name: x for name, x in shapes.weights.items() if name != "stacked"}
    others = (all_rows, shapes.drafts)
    # Chunks are computed with the stacked layers, windows with the others.
    used = {"kept": stacked, "beside": shapes.weights["layers"]}
    for number, text_shape in enumerate(buckets.text_shapes):
        yield _program(
            f"{prefix}{'prefill short' if number else 'prefill'}", prefill,
            *prefill_inputs(shapes, text_shape), runs_model=True,
            **({} if buckets.window_slots else used),
        )  # fmt: skip
    if shapes.spec.turns:
        yield _program(
            f"{prefix}append", append_block, *append_inputs(shapes), runs_model=True, kept=stacked,
            beside=shapes.batch(buckets.sizes[0]),
        )  # fmt: skip
    for size in buckets.sizes:
        cache, rows = shapes.batch(size)
        for width in buckets.widths:
            yield _program(
                f"{prefix}decode {size} x {width}", decode_steps,
                *decode_inputs(shapes, size, width), width=width, runs_model=True, beside=others,
            )  # fmt: skip
        if shapes.spec.turns:
            yield _program(
                f"{prefix}take rows {size}", take_block, *take_inputs(shapes, size),
                beside=(copied, others, rows),
            )  # fmt: skip
            yield _program(
                f"{prefix}put rows {size}", put_block, *put_inputs(shapes, size),
                beside=(copied, others),
            )  # fmt: skip
            yield _program(f"{prefix}release {size}", release, *release_inputs(rows, all_rows))
        if smaller := buckets.size_below(size):
            yield _program(f"{prefix}compact to {smaller}", compact, rows, size=smaller)
            yield _program(
                f"{prefix}compact a layer to {smaller}", compact_layer,
                *compact_layer_inputs(cache[0], rows), size=smaller,
                beside=(copied, others, cache[1:]),
            )  # fmt: skip
        yield _program(f"{prefix}write back {size}", scatter, rows, all_rows)


def _evaluation_programs(run: AbstractRun) -> Iterator[Program]:
    """Yield the programs of an evaluation, with the small ones: after a resume it may come late."""
    prefix = "evaluation: "
    shapes = run.evaluation
    spec = shapes.spec
    yield from rollout_programs(shapes, prefix)
    inputs = init_inputs(spec, Purpose.EVALUATE, run.key, shapes.num_rows)
    yield _program(f"{prefix}start", init_rows, *inputs)
    yield _program(
        f"{prefix}empty batch", empty_batch, spec, shapes.all_rows,
        size=shapes.buckets.sizes[0], slots=shapes.buckets.cache_slots,
    )  # fmt: skip
    inputs = read_inputs(spec, shapes.all_rows, shapes.drafts)
    yield _program(f"{prefix}read", read_rollout, *inputs)
    if shapes.buckets.window_slots:
        yield _program(f"{prefix}blank states", blank_states, spec, buckets=shapes.buckets)
    if spec.turns:
        inputs = append_observations_inputs(shapes.all_rows, spec.response_slots)
        yield _program(f"{prefix}append observations", append_observations, *inputs)


def _update_programs(run: AbstractRun) -> Iterator[Program]:
    """Yield the programs of the update, and those of log-probs and values where there are any."""
    settings = run.config
    update_spec = run.update_spec
    kept = (run.state, run.base_params)
    scored = {}
    if OLD_LOGPROBS[settings.updates.old_logprobs].recomputed:
        scored["log-probs"] = run.policy
    routing = run.batch.routing
    same = run.reference_policy is scored.get("log-probs") and routing is None
    if settings.algorithm.kl_coef and not same:
        scored["log-probs of the reference"] = run.reference_policy
    for name, params in scored.items():
        replayed = routing if name == "log-probs" else None
        inputs = logprobs_inputs(update_spec, params, run.batch, replayed)
        yield _program(name, logprobs, *inputs, runs_model=True, kept=params)
    frozen = frozen_of(settings)
    if frozen and frozen.scores_tokens(settings):
        spec = with_model(update_spec, run.frozen_model)
        inputs = logprobs_inputs(spec, run.frozen, run.batch)
        name = "log-probs of weights that are not trained"
        yield _program(name, logprobs, *inputs, runs_model=True, kept=run.frozen)
    if update_spec.critic:
        inputs = values_inputs(update_spec, run.state, run.batch, run.base_params)
        yield _program("values", critic_values, *inputs, runs_model=True, kept=kept)
    num_rows = settings.updates.mini_batch_size
    inputs = update_inputs(update_spec, run.state, run.batch, num_rows, run.base_params, run.frozen)
    kept = (*kept, run.frozen)
    for critic_only in {False, critic_only_steps(settings) > 0}:
        name = "update of the critic" if critic_only else "update"
        yield _program(name, update, *inputs, critic_only=critic_only, runs_model=True, kept=kept)


def _program(
    name: str,
    function: Any,
    *inputs: Any,
    runs_model: bool = False,
    kept: Any = (),
    beside: Any = (),
    **options: Any,
) -> Program:
    """Make a program; kept: inputs that the run keeps. beside: arrays beside its inputs."""
    trace = functools.partial(function.trace, *inputs, **options)
    mesh = jax.sharding.get_mesh()
    return Program(name, trace, runs_model, device_bytes(kept), device_bytes(beside), mesh)


def compile_all(
    programs: list[Program], note: Callable[[str], None] = lambda name: None
) -> dict[str, Any]:
    """Compile programs side by side; return jax.stages.Compiled by name.

    note: gets a program's name once it is there. Programs are traced in this thread with their mesh
    in use, by which later calls find them, and only compiled in others.
    """
    lowered = {}
    for program in programs:
        with jax.set_mesh(program.mesh or jax.sharding.get_mesh()):
            lowered[program.name] = program.trace().lower()
    compiled = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(x.compile): name for name, x in lowered.items()}
        for done in concurrent.futures.as_completed(waiting):
            compiled[waiting[done]] = done.result()
            note(waiting[done])
    return compiled


_ROWS = "rollout.max_rows"
# Fields to lower where a program does not fit, by its first word; else `_ROWS`.
FIELDS = {
    "update": "updates.micro_batch_size (accelerators; 0: no bound) or updates.logits_chunk",
    "log-probs": "updates.micro_batch_size (accelerators; 0: no bound) or updates.logits_chunk",
    "values": "updates.micro_batch_size (accelerators; 0: no bound)",
    "evaluation:": f"evaluate.batch_size or {_ROWS}",
}


def compile_run(run: AbstractRun, state: Any) -> None:
    """Compile a run's programs before its first step; print how many, seconds and memory.

    state: the trees of arrays that it keeps. Raises ValueError in one line where a program does not
    fit the device.
    """
    start = time.perf_counter()
    listed = run_programs(run)
    models = sum(program.runs_model for program in listed)
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:  # no progress is seen: minutes without a word would look dead
        print(
            f"compiling {len(listed)} programs, {models} of the model; those of a large model take "
            "minutes the first time",
            flush=True,
        )
    done = []
    with console.status("compiling") as status:

        def note(name: str) -> None:
            done.append(name)
            status.update(f"compiling: {len(done)} of {len(listed)}, {name}")

        compiled = compile_all(listed, note)
    kept = {mesh: device_bytes(state, mesh) for mesh in {x.mesh for x in listed}}
    needs = {x.name: needed_bytes(x, compiled[x.name], kept[x.mesh]) for x in listed}
    largest = max(needs, key=needs.get)
    there = memory.device_memory()[0] / jax.sharding.get_mesh().size
    print(
        f"programs: {len(listed)}, {models} of the model, compiled in "
        f"{time.perf_counter() - start:.0f} s; the largest, {largest}, needs "
        f"{needs[largest] / 2**30:.3g} of {there / 2**30:.3g} GiB",
        flush=True,
    )
    if needs[largest] > there:
        field = FIELDS.get(largest.split()[0], _ROWS)
        if field.endswith(_ROWS):  # it may be 0
            rollout = run.evaluation if largest.startswith("evaluation:") else run.training
            field += f", {rollout.buckets.sizes[0]} now"
        raise ValueError(
            f"{largest} needs {needs[largest] / 2**30:.3g} GiB of a device that has "
            f"{there / 2**30:.3g}; lower {field}"
        )


def peak_bytes(compiled: Any) -> int:
    """Return bytes of a device while a program runs: arguments, results and temporaries."""
    sizes = compiled.memory_analysis()
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return kept + sizes.temp_size_in_bytes + sizes.generated_code_size_in_bytes


def needed_bytes(program: Program, compiled: Any, kept: int) -> int:
    """Return bytes of a device while a program runs; kept: bytes that a run keeps."""
    return peak_bytes(compiled) + kept - program.kept + program.beside
