"""Report on a run's compiled programs: bytes, FLOPs and seconds, as a table and as JSON."""

import math
import re
import time
from collections.abc import Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from specrl_jax.compile.programs import Program, compile_all, needed_bytes, peak_bytes
from specrl_jax.process.chips import Chip

_GB = 10**9
_HEADINGS = ("program", "compile", "arguments", "temps", "peak", "with run", "of chip", "GFLOP")


def compile_program(program: Program, chip: Chip, kept: int) -> dict[str, Any]:
    """Return the results for one program; if it is rejected, "error" and what it would need.

    kept: from `kept_bytes`. Bytes are per device, FLOPs over all devices. A loop of unknown length
    counts once.
    """
    row: dict[str, Any] = {"program": program.name}
    start = time.perf_counter()
    try:
        compiled = compile_all([program])[program.name]
    except Exception as error:  # XLA's own types, by platform
        row["seconds_to_compile"] = time.perf_counter() - start
        row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if used := re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])\b", str(error)):
            row["peak"] = float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1)
        return row
    row["seconds_to_compile"] = time.perf_counter() - start
    memory = compiled.memory_analysis()
    row |= {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "peak": peak_bytes(compiled),
        "needed": needed_bytes(program, compiled, kept),
        "flops": count_flops(program.trace().jaxpr),
    }
    row["of_chip"] = row["needed"] / chip.memory
    return row


def count_flops(jaxpr: Jaxpr | ClosedJaxpr) -> int:
    """Count operations of matrix products over all devices, except those inside kernels."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "pallas_call":
            continue
        if name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            sizes = (eqn.invars[0].aval.shape[axis] for axis in contracted)
            # A multiplication and an addition each.
            total += 2 * math.prod((*eqn.outvars[0].aval.shape, *sizes))
        elif name == "ragged_dot_general":  # each row with its group's weights
            total += 2 * math.prod(eqn.invars[0].aval.shape) * eqn.outvars[0].aval.shape[-1]
        inner = []
        for value in eqn.params.values():
            parts = value if isinstance(value, tuple | list) else (value,)
            inner += [count_flops(x) for x in parts if isinstance(x, Jaxpr | ClosedJaxpr)]
        times = 1
        if name == "scan":
            times = eqn.params["length"]
        elif name == "shard_map":  # shapes inside are per device
            times = math.prod(eqn.params["mesh"].shape.values())
        total += times * (max(inner) if name == "cond" else sum(inner))
    return total


def to_text(rows: list[dict[str, Any]]) -> str:
    """Return a line per program, under a line of headings."""
    lines = [_HEADINGS, *map(_cells, rows)]
    full = [cells for cells in lines if len(cells) == len(_HEADINGS)]
    names = max(len(cells[0]) for cells in lines)
    widths = [max(map(len, column)) for column in zip(*full)]
    text = []
    for cells in lines:
        aligned = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:])]
        text.append("  ".join([cells[0].ljust(names), *aligned]))
    return "\n".join(text)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    head = (row["program"], f"{row['seconds_to_compile']:.1f} s")
    if "error" in row:
        needs = f"does not fit: {row['peak'] / _GB:.1f} GB" if "peak" in row else row["error"]
        return (*head, needs)
    sizes = (row[name] / _GB for name in ("arguments", "temporaries", "peak", "needed"))
    flops = f"{row['flops'] / 1e9:,.1f}"
    return (*head, *(f"{size:.3f}" for size in sizes), f"{row['of_chip']:.0%}", flops)
