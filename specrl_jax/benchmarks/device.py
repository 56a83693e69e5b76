"""Benchmark `device`: how close a GPU or TPU gets to its limits, in under ten minutes.

Parts run one after another; one that fails is a line of the table. First the kernels are compared
with the reference, on this device. All rollouts use policies under which every token is equally
likely, so drafts are accepted regardless of rounding.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax.benchmarks.rollout import (
    GROUP,
    Log,
    Report,
    RolloutCase,
    Size,
    as_history,
    choose,
    make_spec,
    random_prompts,
    random_weights,
    run_case,
    seconds_of,
)
from specrl_jax.compile import programs
from specrl_jax.models import attention
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kernels import choose_kernels
from specrl_jax.models.kv_cache import init_cache, round_slots
from specrl_jax.models.transformer import Params, param_count
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES
from specrl_jax.rollout.engine.all_rows import RowStarts, init_rows
from specrl_jax.rollout.engine.decode import StopCondition, decode_steps
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.sharding import put
from specrl_jax.types import Drafts

# For a GPU or TPU, if no size is named, and their numbers if no flag gives them.
SIZES = {
    "smollm2": {"rows": 256, "prompt_len": 512, "response_len": 256},
    "qwen3_1p7b": {"prompt_len": 512, "response_len": 256},
}
BANDWIDTH_GOAL = 0.7
PEAK_GOAL = 0.4
DRAFTS_GOAL = 4.0
FAR_GOAL = 0.02  # of bfloat16, whose last bit is 0.4 or 0.8 %, from float32
WIDTH_GOAL = 1.5  # seconds of the widest step, relative to width 1
LAST_BEGIN = 480.0  # seconds after the start, after which no further part starts
STEP_ROWS = (16, 64, 256)  # rows of the steps that are timed by width
_TIMED_STEPS = 32  # per timed call
_ROUNDS = 3  # the fastest counts
REPEAT_SECONDS = 4.0  # within which a call is timed repeatedly
# A rule that decides by log-probs, as for SPEC-RL.
RULE = next(rule for rule in ACCEPTANCE_RULES.values() if not rule.samples_every_token).of(1.0)
Part = Callable[[], Iterator[dict[str, Any]]]


def measure_device(name: str | None, changes: dict[str, int | None], log: Log) -> Report:
    """Return a line for each figure, with its goal if it has one.

    name: of a size; None: those of `SIZES`, `tiny` on a CPU. changes: to the size's numbers, None
    for its own.
    """
    on_cpu = jax.default_backend() == "cpu"
    start = time.perf_counter()
    names = [name] if name else ["tiny"] if on_cpu else list(SIZES)
    given = {key: value for key, value in changes.items() if value is not None}
    sizes = {n: choose(n, **({} if on_cpu else SIZES.get(n, {})) | given) for n in names}
    sizes = {n: _with_kernels(size) for n, size in sizes.items()}
    rows = []
    failed = False
    for part_name, part in _parts(sizes).items():
        try:
            if (spent := time.perf_counter() - start) > LAST_BEGIN:
                raise TimeoutError(f"not started, after {spent:.0f} s; --size runs less")
            for figure in part():
                rows.append(figure)
                log(f"{time.perf_counter() - start:.0f} s: {figure}")
        except Exception as error:  # anything a device or its compiler raises: others continue
            failed = True
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"figure": part_name, "met": "failed", "note": first_line})
            log(f"{part_name}: {first_line}")
    title = f"device: {'; '.join(f'{n} {size.describe()}' for n, size in sizes.items())}"
    return Report(f"{title}; {time.perf_counter() - start:.0f} s", rows, failed)


def _with_kernels(size: Size) -> Size:
    """Return the size with the kernels that a run of its shapes would use."""
    slots = round_slots(size.prompt_len + size.response_len)
    with contextlib.redirect_stdout(sys.stderr):
        kernels = choose_kernels("auto", size.model, slots)
    return dataclasses.replace(size, model=size.model.replace(kernels=kernels))


def _parts(sizes: dict[str, Size]) -> dict[str, Part]:
    first = next(iter(sizes.values()))
    parts: dict[str, Part] = {"limits": functools.partial(_limits, first.model.dtype)}
    for name, size in sizes.items():
        parts |= {f"kernels, {name}": functools.partial(_kernels, name, size)}
    for name, size in sizes.items():
        kinds = {"decode": _decode, "steps": _steps, "prefill": _prefill}
        for kind, part in kinds.items():
            parts[f"{kind}, {name}"] = functools.partial(part, name, size)
    return parts


def _figure(
    name: str,
    value: float,
    of: str,
    note: str,
    *,
    least: float | None = None,
    most: float | None = None,
) -> dict[str, Any]:
    """Return a line of the table. least, most: the goal, if there is one."""
    row = {"figure": name, "value": value, "of": of}
    if least is not None:
        row |= {"goal": f">= {least:g}", "met": "yes" if value >= least else "no"}
    if most is not None:
        row |= {"goal": f"<= {most:g}", "met": "yes" if value <= most else "no"}
    return row | {"note": note}


def _repeat(call: Callable[[], float]) -> float:
    """Return the median of 2 to 20 calls, as many as `REPEAT_SECONDS` allow."""
    start = time.perf_counter()
    values = []
    while len(values) < 2 or (len(values) < 20 and time.perf_counter() - start < REPEAT_SECONDS):
        values.append(call())
    return float(np.median(values))


# Kernels -----------------------------------------------------------------------------------------


def _kernels(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """Compare attention by the size's kernels with the reference in float32."""
    model = size.model
    slots = round_slots(size.prompt_len + size.response_len)
    rng = np.random.default_rng(0)
    rows = 4

    def draw(shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    # Each sequence contains tries, one after another: no token is seen from outside its own.
    cuts = np.sort(rng.integers(1, slots, (rows, 8)), axis=1)
    ends = [np.append(cut, slots)[np.searchsorted(cut, np.arange(slots), "right")] for cut in cuts]
    ends = put(np.array(ends, np.int32), "batch", None)
    q = draw((rows, slots, model.num_heads, model.head_dim), model.head_dim**-0.5)
    k, v = draw((2, rows, slots, model.num_kv_heads, model.head_dim))

    def packed(kernels: tuple[str, ...], q: jax.Array, *keys_and_values: jax.Array) -> list:
        attend = functools.partial(attention.attend_packed, ends_BT=ends, kernels=kernels)
        out, pull = jax.vjp(attend, q, *keys_and_values)
        return [out, *pull(jnp.ones_like(out))]

    values = [put(x, "batch", None, "heads", None) for x in (q, k, v)]
    for what, far in zip(("outputs", "of q", "of k", "of v"), _distances(packed, model, values)):
        what = what if what == "outputs" else f"gradients {what}"
        yield _distance(f"packed attention, {what}, {name}", far, "packed" in model.kernels)
    layer = [draw(x.shape) for x in init_cache(model, rows, slots)[0]]
    start = put(rng.integers(0, slots - size.max_width, rows).astype(np.int32), "batch")

    def cached(kernels: tuple[str, ...], q: jax.Array, *layer: jax.Array) -> list:
        return [attention.attend(q, layer, start, model.num_kv_heads, kernels=kernels)]

    for width in (1, size.max_width):
        values = [put(q[:, :width], "batch", None, "heads", None)]
        values += [put(x, "batch", *(None,) * (x.ndim - 1)) for x in layer]
        (far,) = _distances(cached, model, values)
        figure = f"attention over the cache, width {width}, {name}"
        yield _distance(figure, far, "cached" in model.kernels)


def _distances(attend: Callable[..., list], model: ModelConfig, values: list) -> list[float]:
    """Return the largest difference of each result, as a share of its largest value."""
    own = jax.jit(functools.partial(attend, model.kernels))(
        *[x.astype(model.dtype) for x in values]
    )
    with jax.default_matmul_precision("highest"):
        true = jax.jit(functools.partial(attend, ()))(*values)
    pairs = [(np.asarray(a, np.float32), np.asarray(b)) for a, b in zip(own, true)]
    return [float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs]


def _distance(figure: str, far: float, kernel: bool) -> dict[str, Any]:
    note = "by a kernel" if kernel else "by the reference"
    return _figure(figure, far, "of the largest value", note, most=FAR_GOAL)


# Limits ------------------------------------------------------------------------------------------


def _limits(dtype: str) -> Iterator[dict[str, Any]]:
    yield _figure("bandwidth", copy_rate() / 1e9, "GB/s", "copy of a large array")
    yield _figure("peak", matmul_rate(dtype) / 1e12, "TFLOP/s", f"large product in {dtype}")


@functools.cache
def copy_rate() -> float:
    """Return the bytes a second of a copy of a large array."""
    size = 2**24 if jax.default_backend() == "cpu" else 2**31
    values = jnp.ones(size // 4, jnp.float32)
    copy = functools.partial(jax.jit(lambda x: x + 1), values)
    return 2 * size / min(seconds_of(copy) for _ in range(8))


@functools.cache
def matmul_rate(dtype: str) -> float:
    """Return the operations a second of a large matrix product."""
    width = 1_024 if jax.default_backend() == "cpu" else 8_192
    # Random, since constant bits use less power and run at a higher clock.
    matrix = jax.random.normal(jax.random.key(0), (width, width), dtype)
    product = functools.partial(jax.jit(lambda a: a @ a), matrix)
    return 2 * width**3 / min(seconds_of(product) for _ in range(8))


def decode_bytes(model: ModelConfig, rows: int, slots: int) -> int:
    """Return the bytes that a decode step reads: the weights once, and the keys and values of
    `slots` tokens per row. It reads almost nothing of an untied embedding."""
    lookup_only = 0 if model.tie_embeddings else model.vocab_size * model.embed_dim
    weights = param_count(model) - lookup_only
    cache = 2 * model.num_layers * rows * slots * model.num_kv_heads * model.head_dim
    return (weights + cache) * jnp.dtype(model.dtype).itemsize


def forward_flops(model: ModelConfig, tokens: int, slots: int, *, scored: int = -1) -> int:
    """Return the operations on `tokens` that attend to `slots` slots on average; a multiply-add
    counts two. scored: tokens whose logits are computed; -1: all."""
    head = model.vocab_size * model.embed_dim
    layers = param_count(model) - head * (1 if model.tie_embeddings else 2)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * slots
    return 2 * (tokens * (layers + attention) + (tokens if scored < 0 else scored) * head)


# Shares of the limits ----------------------------------------------------------------------------


def _case(size: Size, *, length: int = 0, width: int = 1, **fields: Any) -> RolloutCase:
    """Return a rollout with one bucket and one width, whose rows all end at one length.

    fields: of `Requests`.
    """
    spec = make_spec(size, accept=RULE, one_bucket=True, width=width)
    weights = random_weights(size.model, uniform=True)
    prompts = random_prompts(size, size.rows)
    lens = np.full(size.rows, length or size.response_len, np.int32)
    inputs = Requests(prompts, NoiseKey(jax.random.key(0), 1), max_lens=lens, **fields)
    return functools.partial(generate, spec, weights, inputs)


def _decode(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """Measure steps of width 1, and of the widest, which draft from known responses."""
    live = size.prompt_len + size.response_len // 2
    at_bandwidth = decode_bytes(size.model, size.rows, live) / copy_rate()
    plain = _case(size)
    rollout = run_case(plain).rollout
    history = as_history(rollout.tokens.ids, rollout.lens, GROUP)
    for width in (1, size.max_width):
        case = plain if width == 1 else _case(size, width=width, history=history)
        steps = run_case(case).stats.decode_steps  # compiles
        seconds = _repeat(lambda case=case: run_case(case).step_seconds)
        note = f"{1e3 * seconds:.2f} ms a step, {size.rows} rows of {live} tokens on average"
        least = BANDWIDTH_GOAL if width == 1 else None
        figure = f"decode, width {width}, {name}"
        yield _figure(figure, at_bandwidth / seconds, "of bandwidth", note, least=least)
    times = _repeat(lambda: run_case(plain).seconds / run_case(case).seconds)
    note = f"{size.response_len} tokens in {steps} steps of width {width}"
    yield _figure(f"suffix drafts, {name}", times, "x plain", note, least=DRAFTS_GOAL)


def _steps(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """Measure steps of every width at several numbers of rows."""
    weights = random_weights(size.model, uniform=True)
    live = size.prompt_len + size.response_len // 2
    for rows in STEP_ROWS:
        seconds = step_seconds(dataclasses.replace(size, rows=rows), weights)
        at_bandwidth = decode_bytes(size.model, rows, live) / copy_rate()
        for width, taken in seconds.items():
            times = taken / seconds[1]
            note = f"{1e3 * taken:.2f} ms, {at_bandwidth / taken:.0%} of bandwidth"
            most = WIDTH_GOAL if width == max(seconds) else None
            figure = f"step, width {width}, {rows} rows, {name}"
            yield _figure(figure, times, "x width 1", note, most=most)


def _prefill(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """Measure `prefill` of prompts alone, and with drafts that are all accepted."""
    model = size.model
    rollout = _case(size)().rollout
    verified = _case(size, drafts=Drafts(rollout.tokens, rollout.lens))
    prompts = size.rows // GROUP * size.prompt_len
    drafted = size.rows * size.response_len
    flops = forward_flops(model, prompts, size.prompt_len // 2, scored=size.rows)
    slots = size.prompt_len + size.response_len // 2
    more = forward_flops(model, drafted, slots)
    for what, case, tokens, needed, goal in (
        ("prompts", _case(size, length=1), prompts, flops, None),
        ("verification", verified, prompts + drafted, flops + more, PEAK_GOAL),
    ):
        stats = run_case(case).stats  # compiles
        seconds = _repeat(lambda case=case: run_case(case).stats.prefill_seconds)
        note = f"{seconds:.3f} s, {1e6 * seconds / tokens:.2f} us a token, {tokens:,} tokens"
        if stats.verified_tokens:
            note += f", {stats.accepted_tokens / drafted:.0%} of the drafts accepted"
        share = needed / matmul_rate(model.dtype) / seconds
        yield _figure(f"prefill, {what}, {name}", share, "of peak", note, least=goal)


# Steps by width -----------------------------------------------------------------------------------


def step_seconds(size: Size, weights: Params) -> dict[int, float]:
    """Time a step of width 1, 2, 4, ... up to `size.max_width`; wider ones have tree drafts."""
    spec = make_spec(size, one_bucket=True, width=size.max_width)
    prompts = random_prompts(size, size.rows)
    stored = np.zeros((size.rows, size.response_len), np.int32)
    lens = np.full(size.rows, size.response_len, np.int32)
    history = as_history(stored, lens, GROUP)
    cache = init_cache(size.model, size.rows, spec.buckets(size.rows).cache_slots)
    noise = NoiseKey(jax.random.key(0), 1)

    def rows_half_way() -> Rows:
        starts = RowStarts.of(spec, Requests(prompts, noise))
        rows = init_rows(spec, int(noise.purpose), noise.key, starts)
        return dataclasses.replace(rows, lens=put(lens // 2, "batch"))

    rows = rows_half_way()
    drafts = spec.draft_source.init(prompts, history, GROUP)
    stop = StopCondition.of(
        max_steps=_TIMED_STEPS,
        max_unfinished=-1,
        max_left=-1,
    )
    widths = [2**i for i in range(size.max_width.bit_length())]

    def trace(width: int) -> Any:
        state = drafts if width > 1 else None
        return decode_steps.trace(spec, weights, cache, rows, state, stop, width=width)

    programs.compile_all(
        [programs.Program(str(width), functools.partial(trace, width)) for width in widths]
    )
    seconds = {}
    for width in widths:
        times = []
        for _ in range(_ROUNDS):
            rows = rows_half_way()
            start = time.perf_counter()
            state = drafts if width > 1 else None
            result = decode_steps(spec, weights, cache, rows, state, stop, width=width)
            made, _ = jax.block_until_ready(result)
            times.append(time.perf_counter() - start)
            cache = made.cache
            rows = made.rows
            drafts = drafts if made.draft_state is None else made.draft_state
        seconds[width] = min(times) / _TIMED_STEPS
    return seconds
