"""Compiles the programs of a run and says what the compiler made of them: a table, and JSON."""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from specrl_jax.accelerators.abstract_run import AbstractRun
from specrl_jax.accelerators.chips import Chip
from specrl_jax.accelerators.compiled import Cost, Module
from specrl_jax.accelerators.plan import planned_bytes
from specrl_jax.accelerators.programs import Program
from specrl_jax.accelerators.roofline import roofline, step_uses
from specrl_jax.accelerators.traced import Flops, count_flops

_GB = 10**9
_MAX_LINES = 4  # collectives, and loops, of a program in the table
_HEADINGS = (
    "program", "compile", "args", "temps", "peak", "planned", "all", "of chip", "TFLOP", "HBM",
    "seconds", "bound", "compiler",
)  # fmt: skip


def compile_program(
    name: str, program: Program, chip: Chip, mesh: Mapping[str, int], live: float = 1.0
) -> dict[str, Any]:
    """Figures of one program; where it does not fit the chip, "error" and what it would need.

    live: share of the cache's slots that hold tokens: what attention kernels read of it.

    Bytes are those of a device, FLOPs of all devices. "once" is a call without its open loop, and
    "each" one pass of that loop.
    """
    row = {"program": name, "shape": program.shape, "beside": program.beside}
    row |= {"passes": program.passes, "arguments": program.arguments}
    start = time.perf_counter()
    traced = program.trace()
    flops = count_flops(traced.jaxpr, live), count_flops(traced.jaxpr, live, kernels_only=True)
    row["planned"] = planned_bytes(program, traced)
    try:
        compiled = traced.lower().compile()
    except Exception as error:  # XLA's own kinds, by platform
        row["seconds_to_compile"] = time.perf_counter() - start
        return row | _refused(error)
    row["seconds_to_compile"] = time.perf_counter() - start
    memory = compiled.memory_analysis()
    row |= {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }
    sum_of_parts = row["arguments"] + row["results"] + row["temporaries"]
    row["peak"] = max(getattr(memory, "peak_memory_in_bytes", 0), 0) or sum_of_parts
    row["total"] = row["peak"] + program.beside
    try:
        cost = Module(compiled.as_text(), mesh, live).cost()
    except Exception as error:  # libtpu cannot print some programs for v5p
        row["not_readable"] = str(error).splitlines()[0][:200]
        cost = Cost(moved=sum_of_parts, each=Cost(moved=sum_of_parts) if program.passes else None)
    row |= _parts(chip, mesh, flops, cost)
    if "not_readable" in row:
        for part in row.keys() & {"once", "each"}:
            row[part]["compiler_seconds"] = None
    return row


def _refused(error: Exception) -> dict[str, Any]:
    """Read what the compiler says where a program does not fit."""
    text = str(error)
    used = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])\b", text)
    refusal: dict[str, Any] = {"error": " ".join(text.split())[:300]}
    if used:
        refusal["peak"] = float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1)
    return refusal


def _parts(
    chip: Chip, mesh: Mapping[str, int], flops: tuple[Flops, Flops], cost: Cost
) -> dict[str, Any]:
    """Return the figures of each part. flops: of all, and of kernels alone."""
    parts = {"once": ([x.once for x in flops], cost)}
    if cost.each is not None:
        parts["each"] = [x.each for x in flops], cost.each
    else:
        parts["once"] = [x.once + x.each for x in flops], cost
    return {part: _figures(chip, mesh, *numbers) for part, numbers in parts.items()}


def _figures(chip: Chip, mesh: Mapping[str, int], of: list[float], cost: Cost) -> dict[str, Any]:
    flops, of_kernels = of
    seconds = roofline(chip, mesh, flops, cost)
    kernels = max(roofline(chip, mesh, of_kernels, Cost(moved=cost.kernels)).values())
    return {
        "flops": flops,
        "moved": cost.moved,
        "seconds": max(seconds.values()),
        "bound": max(seconds, key=seconds.get),
        "by": seconds,
        "kernel_seconds": kernels,
        # The compiler does not know what kernels take: their bound stands in.
        "compiler_seconds": cost.cycles / chip.clock + kernels if chip.clock else None,
        "collectives": [
            {"kind": kind, "axes": axes, "count": float(count), "bytes": float(size)}
            for (kind, axes), (count, size) in cost.collectives.items()
        ],
        "loops": [
            {"of": source, "passes": passes, "runs": float(runs), "cycles": float(cycles)}
            for (source, passes), (runs, cycles) in cost.loops.items()
        ],
    }


def step_seconds(
    run: AbstractRun, rows: list[dict[str, Any]], tokens: float, reuse: float, key: str
) -> dict[str, float]:
    """Seconds of each program in a whole step, and their sum; see `step_uses`. key: "seconds" at
    least, or "compiler_seconds"."""
    uses = step_uses(run, tokens, reuse)
    seconds = {}
    for row in rows:
        calls, passes = uses.get(row["program"], (0, 0))
        if "once" in row and (calls or passes):
            parts = ("once", calls), ("each", passes)
            seconds[row["program"]] = sum(row[part][key] * n for part, n in parts if part in row)
    return seconds | {"all": sum(seconds.values())}


def step_text(steps: Mapping[str, Mapping[str, float]], tokens: float, reuse: float) -> str:
    """List the seconds of whole steps, and of their largest programs."""
    lines = [f"seconds of a whole step, responses of {tokens:,.0f} tokens, drafts give {reuse:.0%}"]
    for name, seconds in steps.items():
        parts = sorted((x for x in seconds.items() if x[0] != "all"), key=lambda x: -x[1])
        largest = ", ".join(f"{program} {value:.2g}" for program, value in parts[:5])
        lines.append(f"  {name:36} {seconds['all']:10.3g}: {largest}")
    return "\n".join(lines)


# Text ----------------------------------------------------------------------------------------


def to_text(rows: list[dict[str, Any]], chip: Chip) -> str:
    """A line for each program and for each pass of an open loop, and what they do beneath."""
    cells = [(_HEADINGS, [])]
    for row in rows:
        head = (row["program"], f"{row['seconds_to_compile']:.1f} s")
        if "error" in row:
            fits = f"does not fit: {row['peak'] / _GB:.1f} GB" if "peak" in row else "refused"
            cells.append(((*head, fits), [row["shape"], row["error"]]))
            continue
        sizes = (row[n] / _GB for n in ("arguments", "temporaries", "peak", "planned", "total"))
        share = f"{row['total'] / chip.memory:.0%}"
        memory = (*(f"{size:.3f}" for size in sizes), share)
        cells.append(
            ((*head, *memory, *_speed(row["once"])), [row["shape"], *_beneath(row["once"])])
        )
        if "each" in row:
            name = f"  each {row['passes'] or 'pass'}"
            line = (name, *("",) * 7, *_speed(row["each"]))
            cells.append((line, _beneath(row["each"])))
    full = [line for line, _ in cells if len(line) == len(_HEADINGS)]
    widths = [max(map(len, column)) for column in zip(*full)]
    lines = []
    for line, beneath in cells:
        aligned = [cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:])]
        lines.append("  ".join([line[0].ljust(widths[0]), *aligned, line[-1]]).rstrip())
        lines += [f"      {text}" for text in beneath]
    return "\n".join(lines)


def _speed(part: Mapping[str, Any]) -> tuple[str, ...]:
    compiler = part["compiler_seconds"]
    return (
        f"{part['flops'] / 1e12:.3g}",
        f"{part['moved'] / _GB:.3f}",
        f"{part['seconds']:.2g}",
        part["bound"],
        "-" if compiler is None else f"{compiler:.2g}",
    )


def _beneath(part: Mapping[str, Any]) -> list[str]:
    def largest(name: str, key: str, text: Callable[[dict], str]) -> list[str]:
        items = sorted(part[name], key=lambda x: -x[key])
        rest = [f"and {len(items) - _MAX_LINES} more"] if len(items) > _MAX_LINES else []
        return [*map(text, items[:_MAX_LINES]), *rest]

    def collective(x: dict) -> str:
        return f"{x['count']:,.0f} {x['kind']} over {x['axes']}, {x['bytes'] / 1e6:,.1f} MB"

    def loop(x: dict) -> str:
        passes = "an open loop" if x["passes"] is None else f"a loop of {x['passes']:,} passes"
        return f"{x['runs']:,.0f} x {passes}: {x['of']}"

    return [*largest("collectives", "bytes", collective), *largest("loops", "cycles", loop)]
