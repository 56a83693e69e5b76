"""Benchmark `buckets`: seconds of a rollout's decode steps by number of row buckets. No model runs.

The scheduler of rollouts decides, for rows whose response lengths are drawn in advance. A step
costs what its bytes and operations take, and a time of its own. Prefill and the moving of rows are
left out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from specrl_jax.benchmarks.rollout import GROUP, SIZES, Log, Report, random_prompts
from specrl_jax.models.transformer import param_count
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.runner import Requests, Runner
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.sharding import MESH_AXES

_COUNTS = range(1, 7)
# Of an H100, as measured (docs/experiments.md): bytes and operations a second, and a step's seconds
# beside them.
_BANDWIDTH = 2.68e12
_PEAK = 7.13e14
_FIXED = 1e-3
# Bytes that a token moves beside keys and values (docs/scaling.md).
_TOKEN_BYTES = {"smollm2": 1.2e6, "qwen3_1p7b": 5e6}
_EMITTED = {1: 1.0, 8: 3.5}  # tokens of a step by its width


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Seconds of a decode step on one device."""

    fixed: float  # whatever the rows are
    weights: float  # of products at least, to read the weights
    product: float  # of products for each slot of the batch, taken or free
    row: float  # beside products for each slot of the batch
    read: float  # for each slot of the cache that an unfinished row has filled

    def seconds(self, steps: int, slots: int, read: int) -> float:
        """Return the seconds of some steps of a batch that read `read` slots of the cache."""
        each = self.fixed + max(self.weights, slots * self.product) + slots * self.row
        return steps * each + read * self.read


@dataclasses.dataclass(frozen=True)
class _Lengths:
    """Response lengths: log-normal."""

    name: str
    prompt_len: int  # tokens
    median: float  # tokens
    sigma: float  # of the logarithm
    longest: int

    def draw(self, rows: int) -> np.ndarray:
        """Return lengths, int [rows]."""
        normal = np.random.default_rng(0).standard_normal(rows)
        lens = np.round(self.median * np.exp(self.sigma * normal))
        return np.clip(lens, 1, self.longest).astype(int)


_PAPER = [_Lengths(f"σ {sigma}", 300, 1_000, sigma, 4_096) for sigma in (0.5, 0.8, 1.2)]
# Words, signs and digits of its solutions, each a token.
_GSM8K = _Lengths("GSM8K", 120, 78, 0.43, 335)


@dataclasses.dataclass(frozen=True)
class _Case:
    """Rows of a rollout on one kind of device."""

    label: str
    cost: StepCost
    lengths: _Lengths
    rows: int  # on all shards
    at_once: int  # on a shard
    shards: int = 1
    emitted: float = 1.0  # tokens that a step gives a row

    def seconds(self, count: int) -> float:
        """Return seconds of the rollout's decode steps with `count` row buckets."""
        lens = np.ceil(self.lengths.draw(self.rows) / self.emitted).astype(int)
        cost = dataclasses.replace(self.cost, read=self.cost.read * self.emitted)
        prompt_len = round(self.lengths.prompt_len / self.emitted)
        at_once = self.at_once * self.shards
        return simulate(cost, lens, prompt_len, at_once, count, self.shards).seconds


def _h100(size: str, width: int = 1, slots: int = 0) -> StepCost:
    """Return the cost on an H100. slots: of a row that are read, filled or not; 0: as filled."""
    model = SIZES[size].model
    count = param_count(model)
    slot = 4 * model.num_layers * model.num_kv_heads * model.head_dim / _BANDWIDTH  # bfloat16
    return StepCost(
        fixed=_FIXED,
        weights=2 * count / _BANDWIDTH,
        product=width * 2 * count / _PEAK,
        row=width * _TOKEN_BYTES[size] / _BANDWIDTH + slots * slot,
        read=0.0 if slots else slot,
    )


def _cases() -> list[_Case]:
    cases = []
    for width, emitted in _EMITTED.items():
        qwen = _h100("qwen3_1p7b", width)
        wide = f", width {width}" if width > 1 else ""
        for lengths in _PAPER:
            label = f"Qwen3-1.7B, 8 x H100, {lengths.name}{wide}"
            for at_once in (128, 256):
                cases.append(_Case(label, qwen, lengths, 8_192, at_once, 8, emitted))
        for name, cost in (("SmolLM2", _h100("smollm2", width)), ("Qwen3-1.7B", qwen)):
            label = f"{name}, H100, GSM8K{wide}"
            cases.append(_Case(label, cost, _GSM8K, 512, 512, emitted=emitted))
    slots = _GSM8K.prompt_len + _GSM8K.longest
    reference = _h100("qwen3_1p7b", slots=slots)
    cases.append(_Case("Qwen3-1.7B, H100, GSM8K, no kernels", reference, _GSM8K, 512, 512))
    # SmolLM2 on two cores: 70.3 ms a step of 8 rows, 159 of 32.
    cpu = StepCost(fixed=40.7e-3, weights=0.0, product=0.0, row=3.7e-3, read=0.0)
    cases.append(_Case("SmolLM2, two cores, GSM8K", cpu, _GSM8K, 64, 64))
    return cases


def measure_buckets(log: Log) -> Report:
    """Estimate seconds of decode steps by number of row buckets, and the share of one bucket's."""
    rows = []
    for case in _cases():
        log(f"{case.label}: {case.at_once} rows at once")
        one, *more = [case.seconds(count) for count in _COUNTS]
        row: dict[str, Any] = {"rollout": case.label, "at_once": case.at_once, "1_bucket": one}
        shares = {f"{n}_buckets": x / one for n, x in zip(_COUNTS[1:], more, strict=True)}
        rows.append(row | shares)
    title = "buckets: estimated seconds of a rollout's decode steps; with more buckets their share"
    return Report(title, rows)


def simulate(
    cost: StepCost, lens: np.ndarray, prompt_len: int, at_once: int, count: int, shards: int
) -> "SimulatedRunner":
    """Run the scheduler over rows of given response lengths; return what it has run.

    lens: int [B]. at_once: rows of the batch on all shards. count: of row buckets.
    """
    mesh = AbstractMesh((shards, 1, 1), MESH_AXES, axis_types=(AxisType.Explicit,) * 3)
    nothing = np.zeros(len(lens), np.int32)
    with jax.sharding.use_abstract_mesh(mesh):
        size = SIZES["tiny"]  # of whose model and prompts no decision depends
        buckets = Buckets(size.model, at_once, prompt_len, int(lens.max()), count, shards=shards)
        requests = Requests(
            prompts=random_prompts(size, len(lens)),
            noise_steps=np.zeros((len(lens) // GROUP, GROUP), int),
            num_train_rows=len(lens),
            partial_lens=nothing,
            done=nothing.astype(bool),
            draft_ends=nothing,
            draft_lens=nothing,
        )
        runner = SimulatedRunner(cost, lens, prompt_len, buckets, requests)
        Scheduler(runner).run()
    return runner


class SimulatedRunner:
    """Counts of what a `Runner` would run, for a `Scheduler`."""

    all_rows = None

    def __init__(
        self,
        cost: StepCost,
        lens: np.ndarray,
        prompt_len: int,
        buckets: Buckets,
        requests: Requests,
    ):
        self.cost = cost
        self.lens = lens
        self.prompt_len = prompt_len
        self.buckets = buckets
        self.requests = requests
        self.size = buckets.sizes[0]
        shape = (buckets.shards, self.size // buckets.shards)
        self.left = np.zeros(shape, int)  # tokens that are still to be decoded
        self.filled = np.zeros(shape, int)  # slots that a step reads
        self.decode_runs: list[tuple[int, int, int]] = []  # see `Stats`
        self.seconds = 0.0

    @property
    def unfinished_all(self) -> np.ndarray:
        """int [shards]."""
        return np.sum(self.left > 0, axis=1)

    unfinished_train = unfinished_all
    stop_condition = Runner.stop_condition

    def admit(self, row_ids: Sequence[np.ndarray]) -> None:
        """Let rows begin, each with its first token."""
        for shard, rows in enumerate(row_ids):
            free = np.flatnonzero(self.left[shard] == 0)[: len(rows)]
            self.left[shard, free] = self.lens[rows] - 1
            self.filled[shard, free] = self.prompt_len + 1

    def decode(self, stop: StopCondition, width: int) -> tuple[int, list[int]]:
        # After left[k] steps, longest first, k rows of a shard are unfinished.
        order = -np.sort(-self.left, axis=1)
        own = order.shape[1]
        ends = [order[:, 0].max()]
        if 0 < stop.max_unfinished < own:
            ends.append(order[:, stop.max_unfinished].max())
        ends += [order[shard, n] for shard, n in enumerate(stop.refill_at) if 0 <= n < own]
        steps = int(min(ends))
        active = np.minimum(self.left, steps)
        read = np.sum(active * self.filled + active * (active - 1) // 2, axis=1).max()
        self.seconds += self.cost.seconds(steps, own, read)
        self.filled += active
        self.left -= active
        self.decode_runs.append((self.size, width, steps))
        return steps, [0]

    def compact(self, size: int) -> None:
        order = np.argsort(self.left == 0, axis=1, kind="stable")
        order = order[:, : size // self.buckets.shards]
        self.left = np.take_along_axis(self.left, order, axis=1)
        self.filled = np.take_along_axis(self.filled, order, axis=1)
        self.size = size

    def write_back(self) -> None:
        """Do nothing: no row is read."""
