"""Which scenes a rollout benchmark runs, their goals, and the whole as one record and one text."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from specrl_jax.benchmarks import device as benchmark_device
from specrl_jax.benchmarks import lengths as benchmark_lengths
from specrl_jax.benchmarks import rules as benchmark_rules
from specrl_jax.benchmarks import sampling as benchmark_sampling
from specrl_jax.benchmarks import steps as benchmark_steps
from specrl_jax.benchmarks import timing as benchmark
from specrl_jax.benchmarks import trained as benchmark_trained
from specrl_jax.benchmarks.policies import Size
from specrl_jax.benchmarks.timing import Goal

Log = Callable[[str], None]


def rollout(
    name: str, size: Size, scenes: Sequence[str], *, tables: Path, log: Log, **lengths
) -> tuple[dict[str, Any], str]:
    """(record, text) of scenes on a policy of a size.

    tables: folder of measured step costs. lengths: further options of `benchmark_lengths.measure`.
    """
    backend, load = jax.default_backend(), os.getloadavg()[0]
    found: dict[str, Any] = {}
    goals: list[Goal] = []
    texts: list[str] = []
    repeats = 2 * size.repeats + 1  # of single programs, which take less time than rollouts
    for scene in scenes:
        log(f"scene {scene}, size {name}")
        match scene:
            case "lengths":
                found[scene] = benchmark_lengths.measure(
                    name, size, tables=tables, log=log, **lengths
                )
                goals += benchmark_lengths.goals(name, found[scene], backend)
                texts.append(benchmark_lengths.table(found[scene]))
            case "floor":
                found[scene] = benchmark_steps.floor(name, size, repeats)
                goals += benchmark_steps.floor_goals(found[scene])
                texts.append(benchmark_steps.floor_table(found[scene]))
            case "verify":
                found[scene] = benchmark_steps.verify(name, size, repeats)
                goals += benchmark_steps.verify_goals(found[scene], name, backend)
                texts.append(benchmark_steps.verify_table(found[scene]))
            case "device":
                found[scene] = benchmark_device.measure(name, size, repeats)
                goals += benchmark_device.goals(found[scene], backend)
                texts.append(benchmark_device.table(found[scene]))
    record = _record("rollout", load) | {"size": name, "scenes": found}
    record["goals"] = [goal.record() for goal in goals]
    return record, _text(record, [*texts, _goals(goals)])


def trained(config, **options) -> tuple[dict[str, Any], str]:
    """(record, text) of the scene `trained`; options as in `benchmark_trained.measure`."""
    load = os.getloadavg()[0]
    found = benchmark_trained.measure(config, **options)
    goals = benchmark_trained.goals(found, jax.default_backend())
    record = _record("rollout", load) | {"scenes": {"trained": found}}
    record["goals"] = [goal.record() for goal in goals]
    return record, _text(record, [benchmark_trained.table(found), _goals(goals)])


def rules(config, **options) -> tuple[dict[str, Any], str]:
    """(record, text) of the scene `rules`; options as in `benchmark_rules.measure`."""
    load = os.getloadavg()[0]
    found = benchmark_rules.measure(config, **options)
    record = _record("rollout", load) | {"scenes": {"rules": found}}
    return record, _text(record, [benchmark_rules.table(found)])


def sampling(**options) -> tuple[dict[str, Any], str]:
    """(record, text) of ways to draw a token; options as in `benchmark_sampling.measure`."""
    load = os.getloadavg()[0]
    found = benchmark_sampling.measure(**options)
    record = _record("sampling", load) | found
    return record, _text(record, [benchmark_sampling.table(found)])


def _goals(goals: Sequence[Goal]) -> str:
    return "\n".join(["goals", *(goal.line() for goal in goals)] if goals else [])


def _record(kind: str, load: float) -> dict[str, Any]:
    loads = {"load_before": load, "load_after": os.getloadavg()[0]}
    return {"benchmark": kind, "machine": benchmark.machine() | loads}


def _text(record: dict[str, Any], parts: Sequence[str]) -> str:
    return "\n\n".join([benchmark.machine_line(record["machine"]), *filter(None, parts)])
