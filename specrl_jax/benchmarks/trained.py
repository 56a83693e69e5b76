"""Scene `trained`: plain against speculative rollouts of a policy that a config trains.

The policy of the config writes drafts, is trained for some GRPO steps more, and rolls out the same
prompts once without drafts and once with them, at several leniences where the config's rule has
one. What reuse could save at best stands beside what it saves.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specrl_jax import train
from specrl_jax.benchmarks import timing as benchmark
from specrl_jax.benchmarks.timing import Case, Goal, Inputs
from specrl_jax.build import Trainer, build
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.models.transformer import param_count, rollout_weights
from specrl_jax.rollout import acceptance
from specrl_jax.rollout.adaptive import measure_steps as timing
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.generate import Noise, RolloutSpec, generate
from specrl_jax.sharding import put
from specrl_jax.state import init_state
from specrl_jax.telemetry.rollout_metrics import rollout_metrics
from specrl_jax.types import Drafts

_LONGEST_DRIFT = 16  # steps; the default is an epoch, as in training, where that is shorter


def measure(
    config,
    *,
    tables: Path,
    log: Callable[[str], None],
    repeats: int = 7,
    lenience: float | None = None,
    drift: int | None = None,
) -> dict[str, Any]:
    """The scene's record, for the mesh in use.

    tables: folder of measured step costs. lenience: instead of the config's, beside 1 and inf.
    drift: GRPO steps between the policy that wrote the drafts and the one that is timed. Raises
    ValueError in one line.
    """
    run, params = build(config)
    inputs, drafts, setting = scene_of(run, params, drift_of(run) if drift is None else drift)
    wanted = config.rollout.lenience if lenience is None else lenience
    cases = _cases(run, inputs, drafts, wanted, tables)
    (times,) = benchmark.time_blocks(inputs, [cases], repeats, log)
    rows = len(drafts.lens)
    cells = []
    for case, runs in zip(cases, times):
        cell = benchmark.describe(case, runs, case.plan.buckets(rows))
        cell["over_plain"] = benchmark.ratios(times[0], runs)
        cell["metrics"] = _metrics(run, case, benchmark.median_run(runs), drafts)
        cells.append(cell)
    for cell in cells:
        cell["best_over_plain"] = _best(cells, cell)
    return {
        "config": jax.tree.map(benchmark.jsonable, config.to_dict()),
        "setting": setting | {"repeats": repeats},
        "cells": cells,
    }


def drift_of(run: Trainer) -> int:
    """GRPO steps between a draft and its judgement: an epoch's, where that is not too long."""
    epoch = len(run.prompts.lens) // run.config.rollout.prompts_per_step
    return min(epoch, _LONGEST_DRIFT)


def scene_of(run: Trainer, params, drift: int) -> tuple[Inputs, Drafts, dict[str, Any]]:
    """Warm the policy up, write drafts with it, train it for `drift` steps more."""
    settings = run.config.rollout
    convert = functools.partial(jax.jit(rollout_weights, static_argnums=0), run.model)
    start = time.perf_counter()
    state = init_state(run, params)
    jax.block_until_ready(state.train)
    warmed_up = time.perf_counter()
    older = convert(state.train.params)
    with run.scorer.pool:
        for _ in range(drift):
            train.step(run, state)
    weights = jax.block_until_ready(convert(state.train.params))
    drifted = time.perf_counter()
    prompts = PromptStream(run.prompts, settings.prompts_per_step, run.config.seed).next()
    written = generate(without_trees(run.rollout_spec), older, prompts, Noise(run.key, 1)).rollout
    fields = [field.name for field in dataclasses.fields(Drafts)]
    drafts = Drafts(**{name: getattr(written, name) for name in fields})
    setting = {
        "policy": f"{param_count(run.model) / 1e6:.2f}M parameters, {run.model.dtype}",
        "rows": len(written.lens),
        "warmup_steps": run.config.warmup.steps,
        "warmup_seconds": warmed_up - start,
        "drift_steps": drift,
        "drift_seconds": drifted - warmed_up,
        "draft_len_mean": float(np.mean(jax.device_get(written.lens))),
    }
    return Inputs(weights, prompts, run.key, drift + 2), drafts, setting


def without_trees(plan: RolloutSpec) -> RolloutSpec:
    """The same rollout one token a step."""
    setup = dataclasses.replace(plan.program, tree=None)
    return dataclasses.replace(plan, program=setup, max_width=1)


def _cases(run: Trainer, inputs: Inputs, drafts: Drafts, wanted: float, tables: Path) -> list[Case]:
    """Plain, then with all that the config drafts from, at several leniences if there are any."""
    settings, rows = run.config.rollout, len(drafts.lens)
    sources = settings.group_size
    table = functools.partial(
        timing.cost_table,
        weights=inputs.weights, total_rows=rows, sources=sources, directory=tables,
    )  # fmt: skip
    plain = without_trees(run.rollout_spec)
    found = [Case("plain", plain, table(plain))]
    previous = "previous" in settings.draft or settings.draft == "none"
    stored = None
    if run.rollout_spec.program.tree is not None:
        by_prompt = (rows // sources, sources)
        stored = (
            put(np.asarray(drafts.tokens).reshape(*by_prompt, -1), None, None, None),
            put(np.asarray(drafts.lens).reshape(by_prompt), None, None),
        )
    costs = table(run.rollout_spec)
    graded = previous and acceptance.RULES[run.rollout_spec.program.accept].lenience
    for lenience in sorted({1.0, wanted, math.inf}) if graded else [None]:
        name = settings.draft if lenience is None else f"ℓ={lenience:.4g}"
        logged = -math.inf if lenience == 0 else math.log(lenience or 1.0)
        case = Case(
            name, run.rollout_spec, costs, drafts if previous else None, stored, logged,
            Speculation(costs) if settings.adaptive else None,
        )  # fmt: skip
        found.append(case)
    return found


def _metrics(run: Trainer, case: Case, timed: benchmark.Run, drafts: Drafts) -> dict[str, float]:
    written = np.asarray(drafts.tokens), np.asarray(drafts.lens)
    return rollout_metrics(
        timed.tokens,
        timed.lens,
        timed.prefix_lens,
        run.rollout_spec.program.eos_ids,
        draft_lens=None if case.drafts is None else written[1],
        previous=written,
    )


def _best(cells: list[dict[str, Any]], cell: dict[str, Any]) -> float:
    """The speed-up that is ideal for the cell's reuse: drafts verified in passes, and every token
    that is not reused decoded at the price of a token of the plain rollout. At least 1, as drafts
    may be left alone.

    A cell that left its drafts to decode steps is held against the dearest passes of the others:
    one of the drafts as a whole, where there is one.
    """
    plain, verify = cells[0], cell["seconds"]["verify"]["median"]
    if cell["reused_tokens"] and not cell["verified_tokens"]:
        verify = max(other["seconds"]["verify"]["median"] for other in cells)
    token = plain["seconds"]["decode"]["median"] / plain["tokens"]
    rest = (cell["tokens"] - cell["reused_tokens"]) * token
    best = cell["seconds"]["prefill"]["median"] + verify + rest
    return max(plain["seconds"]["total"]["median"] / best, 1.0)


def goals(record: dict[str, Any], backend: str) -> list[Goal]:
    """What the scene's figures are held against: on a CPU, for a policy that was trained here."""
    if backend != "cpu" or record["config"]["model"]["source"]:
        return []
    return [
        Goal(
            f"rollout over the ideal for its reuse, {cell['name']}",
            cell["over_plain"]["median"] / cell["best_over_plain"],
            0.9,
        )
        for cell in record["cells"]
        if cell["reused_tokens"]
    ]


# Text ----------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """The scene as text, a column a case."""
    setting, cells = record["setting"], record["cells"]
    lines = [
        f"trained: {setting['policy']}, {setting['rows']} rows; warm-up "
        f"{setting['warmup_seconds']:.0f} s; drafts from {setting['drift_steps']} GRPO steps ago; "
        f"median of {setting['repeats']}",
        f"{'':36}" + "".join(f"{cell['name']:>14}" for cell in cells),
    ]
    lines += [
        f"{heading:36}" + "".join(f"{_cell(text, cell):>14}" for cell in cells)
        for heading, text in _ROWS
    ]
    return "\n".join(lines)


def _cell(text, cell: dict[str, Any]) -> str:
    try:
        return text(cell)
    except (KeyError, TypeError):  # a figure that this case does not have
        return "-"


def _milliseconds(phase: str) -> Callable[[dict[str, Any]], str]:
    return lambda c: f"{1e3 * c['seconds'][phase]['median']:.1f}"


_ROWS = (
    ("rollout, ms", _milliseconds("total")),
    ("  shortest", lambda c: f"{1e3 * c['seconds']['total']['min']:.1f}"),
    ("  longest", lambda c: f"{1e3 * c['seconds']['total']['max']:.1f}"),
    ("response tokens a second", lambda c: f"{c['tokens_per_second']:.0f}"),
    ("speed-up, verification included", lambda c: f"{c['over_plain']['median']:.2f}x"),
    ("  bounds of its median", lambda c: "{low:.2f}-{high:.2f}".format(**c["over_plain"])),
    ("  ideal for its reuse", lambda c: f"{c['best_over_plain']:.2f}x"),
    ("reused of all tokens", lambda c: f"{c['metrics']['rollout/reuse_fraction']:.1%}"),
    ("accepted of draft tokens", lambda c: f"{c['metrics']['rollout/draft_accept_rate']:.1%}"),
    ("kept prefix, tokens", lambda c: f"{c['metrics']['rollout/prefix_len_mean']:.1f}"),
    ("responses reused whole", lambda c: f"{c['metrics']['rollout/full_reuse_ratio']:.1%}"),
    ("tokens decoded", lambda c: f"{c['decoded_tokens']}"),
    ("row steps computed", lambda c: f"{c['row_steps']}"),
    ("  of them needed", lambda c: f"{c['needed_row_steps']}"),
    ("tokens verified", lambda c: f"{c['verified_tokens']}"),
    ("prefill, ms", _milliseconds("prefill")),
    ("verify, ms", _milliseconds("verify")),
    ("decode, ms", _milliseconds("decode")),
    ("  by measured step costs", lambda c: f"{1e3 * c['predicted_decode_seconds']:.1f}"),
    ("  ideal", lambda c: f"{1e3 * c['ideal_decode_seconds']:.1f}"),
    ("  ideal over actual", lambda c: f"{c['ideal_share']:.2f}"),
)
