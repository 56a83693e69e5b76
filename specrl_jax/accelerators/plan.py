"""The memory plan: what a device of the mesh will hold, before anything is compiled.

Arrays that a run keeps are exact. What programs need beside them is estimated from their traces
(`traced.temporary_bytes`). Padding that a compiler adds to small axes is left out.
"""

import dataclasses
import math
from typing import Any

import jax

from specrl_jax.accelerators.abstract_run import AbstractRun, device_bytes
from specrl_jax.accelerators.chips import Chip
from specrl_jax.accelerators.programs import Program
from specrl_jax.accelerators.traced import temporary_bytes

_GB = 10**9
_ACTIVATIONS = "activations, in an update (estimate)"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device."""

    held: dict[str, int]  # what a run keeps, by name
    programs: dict[str, int]  # everything that is there while each program runs
    rollout: str  # the rollout's program that needs most
    rows: int  # rows in flight
    rows_that_fit: int  # 0: not even a group on every shard
    memory: float  # of the chip

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_text(self) -> str:
        """A line for each part."""
        lines = [("held by a run", ""), *((f"  {n}", _gb(x)) for n, x in self.held.items())]
        lines += [("while it runs, all in all (estimates)", "")]
        lines += [(f"  {n}", f"{_gb(x)}{self._over(x)}") for n, x in self.programs.items()]
        rows = f"{self.rows_that_fit:,}, the config asks for {self.rows:,}"
        lines += [("rows in flight that fit", f"{rows} (largest need: {self.rollout})")]
        title = f"memory plan of one device, which has {self.memory / _GB:.2f} GB"
        return "\n".join([title, *(f"  {name:40} {value}" for name, value in lines)])

    def _over(self, size: int) -> str:
        return "" if size <= self.memory else "  does not fit"


def memory_plan(run: AbstractRun, programs: dict[str, Program], chip: Chip) -> MemoryPlan:
    """Traces every program of the run, which takes seconds."""
    needed = {name: planned_bytes(program, program.trace()) for name, program in programs.items()}
    # Everything that grows with the rows in flight, of the program that needs most for a row.
    fixed = device_bytes([run.state, run.reference, run.stored, run.weights, run.drafts])
    fixed += device_bytes(run.all_rows)
    growing = {
        name: max(needed[name] - fixed, 0) / program.rows
        for name, program in programs.items()
        if program.rows
    }
    rollout = max(growing, key=growing.get)
    least = run.buckets.multiple * run.buckets.group_size
    fitting = max(chip.memory - fixed, 0) / max(growing[rollout], 1)
    return MemoryPlan(
        held=_held(run) | {_ACTIVATIONS: max(needed["update"] - _update_arrays(run, programs), 0)},
        programs=needed,
        rollout=rollout,
        rows=run.running,
        rows_that_fit=math.floor(min(fitting, run.rows) / least) * least,
        memory=chip.memory,
    )


def _update_arrays(run: AbstractRun, programs: dict[str, Program]) -> int:
    """Bytes of an update's arguments and gradients, and of what is held beside."""
    update = programs["update"]
    return update.beside + update.arguments + device_bytes([run.state.params, run.state.critic])


def _held(run: AbstractRun) -> dict[str, int]:
    state = run.state
    parts = {
        "weights, float32": state.params,
        "optimizer": state.opt_state,
        "critic and its optimizer": (state.critic, state.critic_opt_state),
        "reference": run.reference,
        "gradients, in an update": (state.params, state.critic),
        f"rollout's weights, {run.model.dtype}": run.weights,
        f"drafts of {run.num_prompts:,} prompts": run.stored,
        f"rows and drafts of a step, {run.rows:,}": (run.all_rows, run.drafts),
        f"KV cache, {run.running:,} x {run.slots:,} slots": run.cache(run.running, run.slots),
    }
    return {name: size for name, tree in parts.items() if (size := device_bytes(tree))}


def planned_bytes(program: Program, traced: jax.stages.Traced) -> int:
    """All that a device holds while a program runs, by the estimate of its temporaries."""
    donated = tuple(x for x in jax.tree.leaves(traced.args_info) if x.donated)
    return program.beside + program.arguments + temporary_bytes(traced.jaxpr, donated)


def _gb(size: float) -> str:
    return f"{size / _GB:8.3f} GB"
