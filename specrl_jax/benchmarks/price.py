"""Benchmark `price`: seconds of a recorded run's steps on another machine.

Takes RUN, which has recorded all its rows (log.rollouts=1), and prices: seconds per decode step,
per prefilled slot and per updated token. Replays each step's rows, with their lengths, accepted
prefixes and wide steps, through the rollout scheduler, with and without drafts. Its counts hold on
any machine. Its seconds are as accurate as the prices:

  cpu   timed now, on this machine, with random weights of the run's shape; updates as in the run
  h100  an H100's copy rate and matrix product, by the shares that decoding and verification reached
        of them (measured 2026-11-26, docs/experiments.md); updates by the share of verification
  v5e   its data sheet, by the same shares: not measured

Several chips split the rows; each reads the weights. Also priced: a step of the papers' size
(1,024 prompts × 8, Qwen3-1.7B, responses scaled to 4,096 tokens), with rows drawn from the run's.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from specrl_jax.benchmarks.device import decode_bytes, forward_flops
from specrl_jax.benchmarks.rollout import SIZES, Log, Report, random_weights
from specrl_jax.evaluation.saved_policy import run_config
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.load import load_shape
from specrl_jax.models.transformer import used_param_count
from specrl_jax.reports.runs import RecordedRun, read_run
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.speculation import StepPlan, time_steps
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.rollout.verification import time_verification
from specrl_jax.sharding import put
from specrl_jax.telemetry.records import read_rollouts
from specrl_jax.text.tokenizer import load_tokenizer
from specrl_jax.training.build import training_spec
from specrl_jax.types import Drafts, Prompts, Tokens

# Bytes a second of a copy, and operations a second of a matrix product.
RATES = {"h100": (2.68e12, 713e12), "v5e": (819e9, 197e12)}
# Shares of them that an H100 reached in a decode step and in verification, by the least number of
# parameters: for SmolLM2 and Qwen3-1.7B. Seconds of a step of width 8 over one of width 1.
REACHED = {0: (0.56, 0.31, 3.6), 10**9: (0.80, 0.60, 2.7)}
# Small kernels of a layer take at least this long in a decode step, however few the rows.
LAYER_SECONDS = 40e-6
PAPERS = {"rows": 8_192, "response_len": 4_096, "rows_at_once": 64}  # at a time, per chip


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices, in seconds, of a rollout's and an update's parts on one machine."""

    step: Callable[[int, float, float], float]  # (rows, width, slots of a row) → a decode step's
    slot: float  # of a prefilled slot
    token: float  # of a token that an update computes


@dataclasses.dataclass(frozen=True)
class StepRows:
    """Rows of one step, int [B]; a group's rows are contiguous."""

    prompt_lens: np.ndarray
    lens: np.ndarray  # of the responses
    prefixes: np.ndarray  # accepted tokens of the draft
    draft_lens: np.ndarray
    sampled: np.ndarray  # tokens that are neither accepted nor drafted: one as the row starts
    width: float = 1.0  # of a decode step, mean

    @property
    def decode_steps(self) -> np.ndarray:
        """Decode steps of each row, int [B]; each samples a token."""
        return np.maximum(self.sampled - 1, 0)

    def without_drafts(self) -> "StepRows":
        """Return the rows as a rollout without drafts decodes them, token by token."""
        zero = np.zeros_like(self.lens)
        return StepRows(self.prompt_lens, self.lens, zero, zero, self.lens)

    def drawn(self, groups: int, group_size: int, scale: float) -> "StepRows":
        """Return `groups` groups drawn from these, with responses `scale` times as long."""
        rng = np.random.default_rng(0)
        own = len(self.lens) // group_size
        picks = rng.integers(own, size=groups)
        rows = (picks[:, None] * group_size + np.arange(group_size)).reshape(-1)
        columns = {
            name: np.ceil(getattr(self, name)[rows] * (1 if name == "prompt_lens" else scale))
            for name in ("prompt_lens", "lens", "prefixes", "draft_lens", "sampled")
        }
        return StepRows(**{k: x.astype(int) for k, x in columns.items()}, width=self.width)


class Replay:
    """Stands in for a `Runner`: rows with known lengths, and seconds from a price list."""

    all_rows = None

    def __init__(self, rows: StepRows, buckets: Buckets, group_size: int, prices: Prices):
        count = len(rows.lens)
        self.rows = rows
        self.buckets = buckets
        self.prices = prices
        self.spec = SimpleNamespace(group_size=group_size, response_slots=buckets.response_slots)
        self.requests = SimpleNamespace(enough_groups=0, first=None)
        self.size = buckets.sizes[0]
        self.shard_rows = count
        self.lens = np.zeros(count, int)
        self.verify_ends = rows.draft_lens
        self.background = np.zeros(count, bool)
        self.finished = np.zeros(count, bool)
        self.unfinished_awaited = self.unfinished_all = np.zeros(1, int)
        self.slots = 0.0  # number prefilled
        self.decode_seconds = 0.0
        self.row_steps = 0
        self._left = np.zeros(count, int)  # decode steps left of the rows in the batch
        self._known: set[int] = set()  # groups whose prompt is computed

    @classmethod
    def run(cls, *inputs: Any) -> "Replay":
        """Return the replay at its end. Arguments: see `__init__`."""
        replay = cls(*inputs)
        Scheduler(replay, OneWidth()).run()
        return replay

    @property
    def seconds(self) -> float:
        """Seconds of the rollout."""
        return self.decode_seconds + self.slots * self.prices.slot

    def admit(self, row_ids: list[np.ndarray]) -> None:
        (new,) = row_ids
        groups = set((new // self.spec.group_size).tolist()) - self._known
        self._known |= groups
        first = np.array(sorted(groups), int) * self.spec.group_size
        slots = self.rows.prompt_lens[first].sum() + self.rows.draft_lens[new].sum()
        self.slots += slots
        self._left[new] = self.rows.decode_steps[new]
        self._count()

    def decode(self, stop: StopCondition, width: int) -> tuple[int, list[int]]:
        steps = 0
        least = max(stop.max_unfinished, int(np.max(stop.refill_at)), stop.max_left)
        while steps < stop.max_steps and self.unfinished_all[0] > least:
            running = np.flatnonzero(self._left > 0)
            made = min(int(self._left[running].min()), int(stop.max_steps) - steps)
            slots = self.rows.prompt_lens + self.rows.prefixes + self.rows.decode_steps - self._left
            cost = self.prices.step(self.size, self.rows.width, float(slots[running].mean()))
            self.decode_seconds += made * cost
            self.row_steps += made * self.size
            self._left[running] -= made
            steps += made
            self._count()
        return steps, [0]

    def compact(self, size: int) -> None:
        self.size = size

    def write_back(self) -> None:
        """Nothing to do: rows have no tokens."""

    def _count(self) -> None:
        self.unfinished_awaited = self.unfinished_all = np.array([np.count_nonzero(self._left)])


class OneWidth:
    """A `Speculation` that counts all steps at the mean width."""

    def plan_steps(self, rows: int, widths: Any) -> StepPlan:
        return StepPlan(1, 0, False)

    def record_steps(self, *_: Any) -> None:
        """Do nothing: no choice depends on them."""


# What was recorded ----------------------------------------------------------------------------


def recorded_rows(run: RecordedRun, encode: Callable[[str], list[int]]) -> dict[int, StepRows]:
    """Return the rows of each training step. Raises ValueError if some were not recorded."""
    before: dict[tuple[str, int], int] = {}
    steps = {}
    lens_of = functools.cache(lambda prompt: len(encode(prompt)))
    for record in run.steps:
        lines = read_rollouts(run.workdir, record["step"])
        rows = run.config["rollout.prompts_per_step"] * run.config["rollout.group_size"]
        if len(lines) != rows:
            raise ValueError(
                f"{run.workdir} must have recorded all rows of step {record['step']} "
                f"(log.rollouts=1), got {len(lines)} of {rows}"
            )
        keys = [(line["prompt_id"], line["sample"]) for line in lines]
        lens = np.array([len(line["token_ids"]) for line in lines])
        prefixes = np.array([line["prefix_len"] for line in lines])
        drafts = np.array([before.get(key, 0) for key in keys]) * (prefixes.sum() > 0)
        sampled = np.array([line["sources"].count("s") for line in lines])
        steps[record["step"]] = StepRows(
            np.array([lens_of(line["prompt"]) for line in lines]),
            lens,
            prefixes,
            np.maximum(drafts, prefixes),
            sampled,
            record.get("rollout/width_mean", 1.0),
        )
        before |= dict(zip(keys, lens.tolist()))
    return steps


# Prices ---------------------------------------------------------------------------------------


def chip_prices(model: ModelConfig, chip: str, chips: int, slots: int) -> Prices:
    """Return the prices of a chip, from its rates and the shares of them that were reached.

    slots: mean slots of a row.
    """
    bandwidth, peak = RATES[chip]
    decoding, computing, wide = REACHED[max(n for n in REACHED if n <= used_param_count(model))]
    operations = forward_flops(model, 1, slots) / (computing * peak * chips)

    def step(rows: int, width: float, slots: float) -> float:
        seconds = decode_bytes(model, -(-rows // chips), round(slots)) / (decoding * bandwidth)
        seconds = max(seconds, LAYER_SECONDS * model.num_layers)
        return seconds * (1 + (width - 1) / 7 * (wide - 1))

    return Prices(step, operations, (2 if model.lora else 3) * operations)


def timed_prices(config: Any, model: ModelConfig, rows: int, run: RecordedRun) -> Prices:
    """Return this machine's prices: of rollouts as timed now, of updates as in the run."""
    spec = training_spec(config, model, eos_ids=(model.vocab_size,), pad_id=0)
    groups = rows // spec.group_size
    prompts = Prompts.blank(groups, spec.prompt_slots)
    prompts = dataclasses.replace(
        prompts, ids=np.stack([np.zeros(groups), np.arange(groups)], axis=1).astype(np.uint32)
    )
    ids = put(np.zeros((rows, spec.response_slots), np.int32), "batch", None)
    drafts = Drafts(Tokens(ids), put(np.zeros(rows, np.int32), "batch"))
    requests = Requests(prompts, NoiseKey(jax.random.key(0), 1), drafts)
    weights = random_weights(model)
    spec = dataclasses.replace(spec, draft_source=None, draft_head=None, max_width=1)
    seconds = time_steps(spec, weights, requests)
    slot, _ = time_verification(spec, weights, requests)
    trained = [r for r in run.steps if r.get("update/tokens") and not r.get("compile/built")]
    token = np.median([r["time/update"] / r["update/tokens"] for r in trained or run.steps])
    return Prices(lambda rows, width, slots: seconds[rows, 1] * width, slot, float(token))


# The benchmark --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A size of steps, and its prices."""

    name: str
    buckets: Buckets
    prices: Prices
    # Recorded rows → rows of this size.
    drawn: Callable[[StepRows], StepRows] = lambda rows: rows
    # Slots that a rollout without drafts prefills, as counted in the run: if nothing behind a
    # rejection is computed, counts give the slots. None: prompts once, and whole drafts.
    plain_slots: float | None = None


def measure_price(workdir: Path, chip: str, chips: int, log: Log) -> Report:
    """Return priced seconds per step by epoch, compared with the same rows without drafts."""
    run = read_run(workdir)
    config = run_config(workdir)
    tokenizer = load_tokenizer(config)
    steps = recorded_rows(run, tokenizer.encode)
    log(f"{len(steps)} steps read")
    model = load_shape(config, tokenizer.vocab_size, tokenizer.unused_ids)
    settings = config.rollout
    rows = settings.prompts_per_step * settings.group_size
    shape = config.data.prompt_len, settings.response_len, settings.row_buckets
    buckets = Buckets(model, min(settings.max_rows or rows, rows), *shape)
    if chip == "cpu":
        plain = [r for r in run.steps if not r["rollout/tokens_verified"]]
        slots = float(np.mean([r["rollout/tokens_prefilled"] for r in plain]))
        prices = timed_prices(config, model, rows, run)
        cases = [Case("this run", buckets, prices, plain_slots=slots)]
    else:
        model = model.replace(dtype="bfloat16")
        prices = chip_prices(model, chip, chips, (shape[0] + shape[1]) // 2)
        cases = [Case("this run", buckets, prices), _papers(chip, chips, config)]
    table = [
        {"rows": case.name, "epoch": epoch} | _price(case, records, steps, settings.group_size)
        for case in cases
        for epoch, records in run.epochs.items()
    ]
    title = f"price {workdir}: mean seconds per step on {chips} x {chip}; plain: without drafts"
    return Report(title, table)


def _papers(chip: str, chips: int, config: Any) -> Case:
    """Return the case of the papers' size."""
    model = SIZES["qwen3_1p7b"].model.replace(dtype="bfloat16")
    longest = PAPERS["response_len"]
    at_once = PAPERS["rows_at_once"] * chips
    buckets = Buckets(model, at_once, config.data.prompt_len, longest, config.rollout.row_buckets)
    group_size = config.rollout.group_size
    drawn = functools.partial(
        StepRows.drawn,
        groups=PAPERS["rows"] // group_size,
        group_size=group_size,
        scale=longest / config.rollout.response_len,
    )
    return Case("the papers' size", buckets, chip_prices(model, chip, chips, longest // 4), drawn)


def _price(
    case: Case,
    records: Sequence[Mapping[str, float]],
    recorded: Mapping[int, StepRows],
    group_size: int,
) -> dict[str, float]:
    """Return the mean figures of an epoch's steps."""
    figures: list[dict[str, float]] = []
    for record in records:
        rows = case.drawn(recorded[record["step"]])
        times = rows.lens.sum() / recorded[record["step"]].lens.sum()
        update = record.get("update/tokens", 0) * times * case.prices.token
        plain = Replay.run(rows.without_drafts(), case.buckets, group_size, case.prices)
        drafted = Replay.run(rows, case.buckets, group_size, case.prices)
        if case.plain_slots is not None:
            plain.slots = case.plain_slots
            drafted.slots = record["rollout/tokens_prefilled"]
        figures.append(
            {
                "reused": rows.prefixes.sum() / rows.lens.sum(),
                "rollout_plain": plain.seconds,
                "rollout": drafted.seconds,
                "update": update,
                "step_plain": plain.seconds + update,
                "step": drafted.seconds + update,
            }
        )
        if case.plain_slots is not None:
            figures[-1]["measured_rollout"] = record["time/rollout"]
    means = {name: float(np.mean([x[name] for x in figures])) for name in figures[0]}
    return means | {
        "rollout_over": means["rollout_plain"] / means["rollout"],
        "step_over": means["step_plain"] / means["step"],
    }
