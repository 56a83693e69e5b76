"""Benchmark `training`: whole steps by kind of draft, from the start of a run.

Every case builds its own run: the policy has the size's layers and random weights, and no token
ends a response. All tokens are equally likely, so previous drafts are accepted regardless of
rounding. It reports the seconds of every stage of a start, of the first step and of later ones. The
peak of memory, which a device counts once per process, is over all cases.
"""

import contextlib
import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import train
from specrl_jax.abstract import device_bytes
from specrl_jax.benchmarks.rollout import Log, Report, Size, choose, seconds_of, without_end
from specrl_jax.compile import memory, programs
from specrl_jax.compile.shapes import AbstractRun
from specrl_jax.training.build import build, init_state
from specrl_jax.training.run import Run
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.state import RunState

# What each case changes. All but the last two verify with a rule that decides by log-probs.
CASES: dict[str, dict[str, Any]] = {
    "none": {"rollout.draft": "none"},
    "previous": {"rollout.draft": "previous", "rollout.accept": "ratio"},
    "tree": {"rollout.draft": "tree"},
    "head": {"rollout.draft": "head"},
    "reused noise": {"rollout.draft": "previous", "rollout.accept": "match"},
}
STEP_TOKENS = 128  # per response, at most
_STEPS = 3  # timed, after the first two: the second of these has a draft
LAST_BEGIN = 300.0  # seconds after the start, after which no further case starts


def measure_training(config, name: str | None, changes: dict[str, int | None], log: Log) -> Report:
    """Return a row for each of `CASES`.

    config: of the run, whose model, lengths and rows are replaced. name: of a size; None: `tiny` on
    a CPU, else `smollm2`. changes: to the size's numbers, None for its own.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = choose(name or ("tiny" if on_cpu else "smollm2"), **changes)
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    needed = 0
    failed = False
    for case, fields in CASES.items():
        try:
            if (spent := time.perf_counter() - start) > LAST_BEGIN:
                raise TimeoutError(f"not started, after {spent:.0f} s")
            row, most = _measure_case(step_config(config, size, fields))
            row["over_plain"] = rows[0].get("step", np.nan) / row["step"] if rows else 1.0
            needed = max(needed, most)
        except Exception as error:  # anything a device or its compiler raises: others continue
            failed = True
            row = {"note": f"{type(error).__name__}: {error}".splitlines()[0]}
        rows.append({"drafts": case} | row)
        log(f"{time.perf_counter() - start:.0f} s: {rows[-1]}")
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    title = f"training: {size.describe()}, {min(size.response_len, STEP_TOKENS)} tokens a response"
    title += f"; memory: the compiler reports {needed / 1e9:.2f} GB, peak "
    title += f"{peak / 1e9:.2f} GB" if peak else "unknown on this platform"
    return Report(title, rows, failed)


def _measure_case(config) -> tuple[dict[str, Any], int]:
    """Return the seconds of a run's start and steps, and the bytes that its programs need."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # it prints which kernels are chosen
        run, state = _start(config)
    built = time.perf_counter()
    listed = programs.run_programs(AbstractRun.of(run))
    compiled = programs.compile_all(listed)
    compiled_at = time.perf_counter()
    kept = device_bytes(state.arrays())
    needed = max(programs.needed_bytes(x, compiled[x.name], kept) for x in listed)

    def step() -> float:
        return seconds_of(lambda: (train.step(run, state, RunLog(run)), state.policy_state.modules))

    with run.responder.pool:
        first = step()
        started = time.perf_counter()
        second = step()
        later = [step() for _ in range(_STEPS)]
    row = {
        "build": built - start,
        "compile": compiled_at - built,
        "first_step": first,
        "start_to_first_step": started - start,
        "second_step": second,
        "step": float(np.median(later)),
    }
    return row, needed


def _start(config) -> tuple[Run, RunState]:
    """Build the run so that no token ends a response and all are equally likely."""
    run, params = build(config, memory.check)
    run = dataclasses.replace(run, rollout_spec=without_end(run.rollout_spec))
    params = params | {"final_norm": jnp.zeros_like(params["final_norm"])}
    return run, init_state(run, params)


def step_config(config, size: Size, fields: dict[str, Any]):
    """Return `config` with the size's layers and rows, and these fields; a step is an epoch and an
    update."""
    config = config.copy_and_resolve_references()
    sizes = ("family", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
    prompts = size.rows // config.rollout.group_size
    changes = {f"model.{field}": getattr(size.model, field) for field in (*sizes, "head_dim")}
    changes |= {
        "model.dtype": size.model.dtype,
        "data.prompts": prompts,
        "rollout.prompts_per_step": prompts,
        "rollout.response_len": min(size.response_len, STEP_TOKENS),
        "rollout.row_buckets": 1,
        "rollout.max_width": size.max_width,
        "rollout.adaptive": False,
        "updates.mini_batch_size": size.rows,
        "updates.skip_no_signal": False,
        "updates.learning_rate": 1e-9,
        "updates.lr_schedule": "constant",
        "sft.steps": 0,
        "evaluate.every": 0,
        "train.steps": 1_000,
    }
    config.update_from_flattened_dict(changes | fields)
    return config
