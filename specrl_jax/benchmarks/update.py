"""Benchmark `update`: the seconds of a step's updates, by how its rows are packed.

Padded rows, rows in a line, and tries are timed with all rows and with those alone whose loss has a
gradient, on the responses that a run recorded, at the first recorded step of every epoch.

The least is what three forward passes over the distinct tokens of the rows with a gradient take at
the rate of a large matrix product.
"""

import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.algorithms.advantages import AdvantageConfig, group_relative
from specrl_jax.algorithms.learner import Learner, init_train_state
from specrl_jax.algorithms.scoring import pack_rows
from specrl_jax.algorithms.update import update
from specrl_jax.benchmarks.limits import forward_flops, matmul_rate
from specrl_jax.benchmarks.recorded import Recorded
from specrl_jax.benchmarks.reports import Report, spread
from specrl_jax.benchmarks.timing import Log
from specrl_jax.models.transformer import Params
from specrl_jax.packing import PACKINGS, pack
from specrl_jax.telemetry.records import read_rollouts, recorded_steps
from specrl_jax.types import Batch

# Packing, and whether rows without signal are left out. The first is the baseline.
CASES = (("rows", False), ("rows", True), ("sequences", True), ("trie", False), ("trie", True))


def measure_update(workdir: Path, repeats: int, log: Log) -> Report:
    """A line for each packing of every epoch; ValueError in one line."""
    run, rows = Recorded.of(workdir), []
    for label, batch in _batches(workdir, run).items():
        rows += _measure(label, run.trainer.learner, run.params, batch, repeats)
        log(f"{label}: measured")
    title = f"update {workdir}: seconds of a step's updates, median (min-max) of {repeats}; "
    return Report(f"{title}over rows: times as fast as padded rows", rows)


def _batches(workdir: Path, run: Recorded) -> dict[str, Batch]:
    """The first recorded step of every epoch."""
    trainer, batches, epochs = run.trainer, {}, set()
    settings = AdvantageConfig.from_config(trainer.config, trainer.trained_group_size)
    for step in recorded_steps(workdir):
        records = read_rollouts(workdir, step)
        if not records or records[0]["epoch"] in epochs:
            continue
        epochs.add(records[0]["epoch"])
        records.sort(key=lambda record: (record["prompt_id"], record["sample"]))
        rewards = jnp.array([record["reward"] for record in records], jnp.float32)
        advantages = np.asarray(group_relative(rewards, settings))
        label = f"epoch {records[0]['epoch']}, step {step}"
        batches[label], _ = run.batch(records, advantages)
    if not batches:
        raise ValueError(f"{workdir}: no recorded rollouts; the run needs log.rollouts = 1.0")
    return batches


def _measure(label: str, learner: Learner, params: Params, batch: Batch, repeats: int) -> list:
    """Every case in turn, round by round."""
    signal, cases = np.asarray(jnp.any(batch.advantages != 0, axis=1)), {}
    for packing, skip in CASES:
        inputs = dataclasses.replace(learner, packing=packing), params, batch, signal | (not skip)
        cases[packing, skip] = functools.partial(_updates, *inputs)
    rounds = [[call() for call in cases.values()] for _ in range(repeats + 1)][1:]
    by_case = dict(zip(cases, zip(*rounds)))
    slow, rows = [seconds for seconds, _ in by_case[CASES[0]]], []
    for (packing, skip), runs in by_case.items():
        row = {"batch": label, "packing": packing, "rows": "with signal" if skip else "all"}
        row |= {"slots": runs[0][1], "seconds": spread(seconds for seconds, _ in runs)}
        rows.append(row | {"over_rows": spread(a / b for a, (b, _) in zip(slow, runs))})
    flops = 3 * forward_flops(learner.model, *_distinct(batch, signal))
    least = flops / matmul_rate(learner.model.dtype)
    return [*rows, {"batch": label, "packing": "least", "seconds": least}]


def _updates(
    learner: Learner, params: Params, batch: Batch, included: np.ndarray
) -> tuple[float, int]:
    """Seconds of one update on all rows, packing included, and the slots that it computes."""
    state = init_train_state(learner, jax.tree.map(jnp.copy, params))
    jax.block_until_ready(state)
    start = time.perf_counter()
    packed = pack_rows(learner, batch, np.arange(len(included)), included)
    jax.block_until_ready(update(learner, state, batch, packed))
    slots = int(packed.count) * packed.sequences.tokens[0].size
    return time.perf_counter() - start, slots


def _distinct(batch: Batch, signal: np.ndarray) -> tuple[int, int]:
    """Distinct tokens of the rows with signal, and half the longest row, which a token sees."""
    lens = np.where(signal, np.asarray(batch.prompt_lens + batch.response_lens), 0)
    tries = pack(np.asarray(batch.tokens), lens, batch.tokens.size, PACKINGS["trie"])
    return len(np.unique(tries.nodes[tries.nodes >= 0])), int(lens.max()) // 2
