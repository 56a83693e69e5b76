"""Benchmark `update`: the seconds of a step's updates, by how its rows are packed.

Padded rows, rows in a line, and tries are timed with all rows and with those alone whose loss has a
gradient. With --run, on the responses that a run recorded, at the first recorded step of every
epoch; else on random responses of drawn lengths, whose groups share nothing but their prompt, and
on rows that are all full and share nothing: there packing can only cost.

The least is what three forward passes over the distinct tokens of the rows with a gradient take at
the rate of a large matrix product. "mib_at_once" is what the compiled update of the rows needs
beside its inputs, in one forward-backward pass.
"""

import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specrl_jax.algorithms.advantages import AdvantageConfig, group_relative
from specrl_jax.algorithms.learner import Learner, init_train_state
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.scoring import pack_rows
from specrl_jax.algorithms.update import update
from specrl_jax.benchmarks.limits import forward_flops, matmul_rate
from specrl_jax.benchmarks.policies import GROUP, Size, choose
from specrl_jax.benchmarks.recorded import Recorded, place_rows
from specrl_jax.benchmarks.reports import Report, spread
from specrl_jax.benchmarks.rollout import drawn_lengths
from specrl_jax.benchmarks.timing import Log
from specrl_jax.models.transformer import Params, init_params
from specrl_jax.packing import PACKINGS, pack
from specrl_jax.telemetry.records import read_rollouts, recorded_steps
from specrl_jax.types import Batch

# Packing, and whether rows without signal are left out. The first is the baseline.
CASES = (("rows", False), ("rows", True), ("sequences", True), ("trie", False), ("trie", True))
PROMPT_TIMES = (1, 8, 32)  # times the size's prompt_len, of drawn batches


def measure_update(
    name: str, changes: dict[str, int | None], log: Log, run: Path | None = None
) -> Report:
    """A line for each packing of every batch. name, changes: of a size, see `policies.choose`;
    run: a work directory. Raises ValueError in one line."""
    size = choose(name, **changes)
    learner, params, batches = _recorded(run) if run else _drawn(size)
    rows = []
    for label, batch in batches.items():
        rows += _measure(label, learner, params, batch, size.repeats)
        log(f"{label}: measured")
    what = f"responses of {run}" if run else f"{name}, {size.describe()}, drawn lengths"
    title = f"update: {what}; seconds of a step's updates, median (min-max) of {size.repeats}; "
    return Report(f"{title}over rows: times as fast as padded rows", rows)


def _recorded(workdir: Path) -> tuple[Learner, Params, dict[str, Batch]]:
    """The first recorded step of every epoch."""
    run, batches, epochs = Recorded.of(workdir), {}, set()
    trainer = run.trainer
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
    return trainer.learner, run.params, batches


def _measure(label: str, learner: Learner, params: Params, batch: Batch, repeats: int) -> list:
    """Every case in turn, round by round."""
    signal = np.asarray(jnp.any(batch.advantages != 0, axis=1))
    cases, memory = {}, {}
    for packing, skip in CASES:
        inputs = dataclasses.replace(learner, packing=packing), params, batch, signal | (not skip)
        cases[packing, skip] = functools.partial(_updates, *inputs)
        if (packing, skip) in (CASES[0], CASES[-1]):
            memory[packing, skip] = _memory(*inputs)
    rounds = [[call() for call in cases.values()] for _ in range(repeats + 1)][1:]
    by_case = dict(zip(cases, zip(*rounds)))
    slow, rows = [seconds for seconds, _ in by_case[CASES[0]]], []
    for (packing, skip), runs in by_case.items():
        row = {"batch": label, "packing": packing, "rows": "with signal" if skip else "all"}
        row |= {"slots": runs[0][1], "mib_at_once": memory.get((packing, skip))}
        row["seconds"] = spread(seconds for seconds, _ in runs)
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


def _memory(learner: Learner, params: Params, batch: Batch, included: np.ndarray) -> float:
    """MiB of temporary arrays of the compiled update, where one micro-batch holds all rows."""
    learner = dataclasses.replace(learner, micro_batch_size=0)
    packed = pack_rows(learner, batch, np.arange(len(included)), included)
    state = jax.eval_shape(functools.partial(init_train_state, learner), params)
    program = update.lower(learner, state, batch, packed).compile()
    return program.memory_analysis().temp_size_in_bytes / 2**20


def _distinct(batch: Batch, signal: np.ndarray) -> tuple[int, int]:
    """Distinct tokens of the rows with signal, and half the longest row, which a token sees."""
    lens = np.where(signal, np.asarray(batch.prompt_lens + batch.response_lens), 0)
    _, nodes = pack(np.asarray(batch.tokens), lens, batch.tokens.size, PACKINGS["trie"])
    return len(np.unique(nodes[nodes >= 0])), int(lens.max()) // 2


def _drawn(size: Size) -> tuple[Learner, Params, dict[str, Batch]]:
    """Prompts of three lengths with responses of lognormal lengths; then full, distinct rows."""
    drawn = drawn_lengths(size)
    cases = [
        (f"prompts of {n * size.prompt_len}", n * size.prompt_len, drawn) for n in PROMPT_TIMES
    ]
    cases.append(("distinct and full", 0, np.full(size.rows, size.response_len)))
    rng, batches = np.random.default_rng(0), {}
    for label, shared, lens in cases:
        prompt_len = shared or size.prompt_len
        tokens = rng.integers(
            1, size.model.vocab_size, (size.rows, prompt_len + size.response_len), np.int32
        )
        tokens[:, :shared] = np.repeat(tokens[::GROUP, :shared], GROUP, axis=0)
        prompt_lens, old = np.full(size.rows, prompt_len), np.zeros((size.rows, size.response_len))
        batches[label] = place_rows(tokens, prompt_lens, lens, old, rng.normal(size=size.rows))
    learner = _grpo_learner(size)
    return learner, init_params(learner.model, jax.random.key(0)), batches


def _grpo_learner(size: Size) -> Learner:
    """GRPO with AdamW, four rows at once."""
    loss = LossConfig(clip_high=0.2, max_response_len=size.response_len)
    return Learner(size.model, loss, optax.adamw(1e-6), 1.0, logits_chunk=64, micro_batch_size=4)
