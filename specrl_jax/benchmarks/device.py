"""Benchmark `device`: what a GPU or TPU reaches of its own limits, in under ten minutes.

Parts run one after another, and one that fails is a line of the table. A whole training step comes
first: a device counts its peak of memory once for a process. All rollouts are of policies to which
every token is equally likely, so that drafts hold whatever the rounding.
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

from specrl_jax import programs, shapes, train
from specrl_jax.benchmarks import limits, policies
from specrl_jax.benchmarks.policies import Size
from specrl_jax.benchmarks.reports import Report
from specrl_jax.benchmarks.rollout import as_history, make_spec, without_end
from specrl_jax.benchmarks.steps import step_seconds
from specrl_jax.benchmarks.timing import Log, RolloutCase, run_case
from specrl_jax.build import build, init_state
from specrl_jax.models import attention
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import init_cache, round_slots
from specrl_jax.models.transformer import Params, Transformer, rollout_weights
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES
from specrl_jax.rollout.engine.runner import DraftInputs
from specrl_jax.rollout.generate import NoiseKey, generate
from specrl_jax.run_log import RunLog
from specrl_jax.sharding import put
from specrl_jax.state import Run, RunState
from specrl_jax.types import Drafts

# Of a GPU or TPU, where no size is named, and their numbers where no flag gives them.
SIZES = {
    "smollm2": {"rows": 256, "prompt_len": 512, "response_len": 256},
    "qwen3_1p7b": {"prompt_len": 512, "response_len": 256},
}
BANDWIDTH_GOAL = 0.7
PEAK_GOAL = 0.4
DRAFTS_GOAL = 4.0
WIDTH_GOAL = 1.5  # the seconds of the widest step, against those of width 1
ERROR_GOAL = 0.05
LAST_BEGIN = 480.0  # seconds after the start, after which no further part begins
STEP_ROWS = (16, 64, 256)  # rows of the steps that are timed by width
REPEAT_SECONDS = 4.0  # in which a call is timed again and again
_KERNEL_SLOTS = 128  # of the cache of the check of numbers: a size that kernels take
# Which kernel a pass takes, see `attention.USES`.
_USE = {"update": "packed", "extend": "packed", "decode": "cached", "wide step": "cached"}
STEP_TOKENS = 128  # of a response in a training step
# A rule that decides by log-probs, as for SPEC-RL.
RULE = next(rule for rule in ACCEPTANCE_RULES.values() if not rule.samples_anew)
Part = Callable[[], Iterator[dict[str, Any]]]


def measure_device(config, name: str | None, changes: dict[str, int], log: Log) -> Report:
    """Return a line for each figure, with its goal where it has one.

    config: of the training step, whose model, lengths and rows are replaced. name: of a size;
    None: those of `SIZES`, `tiny` on a CPU. changes: of the size's numbers, None for its own.
    """
    on_cpu = jax.default_backend() == "cpu"
    start = time.perf_counter()
    names = [name] if name else ["tiny"] if on_cpu else list(SIZES)
    given = {key: value for key, value in changes.items() if value is not None}
    sizes = {n: policies.choose(n, **({} if on_cpu else SIZES.get(n, {})) | given) for n in names}
    sizes = {n: _chosen_attention(size) for n, size in sizes.items()}
    rows = []
    failed = False
    for part_name, part in _parts(config, sizes).items():
        try:
            if (spent := time.perf_counter() - start) > LAST_BEGIN:
                raise TimeoutError(f"not begun, after {spent:.0f} s; --size runs less")
            for figure in part():
                rows.append(figure)
                log(f"{time.perf_counter() - start:.0f} s: {figure}")
        except Exception as error:  # whatever a device or its compiler raises: the others go on
            failed = True
            first_line = f"{type(error).__name__}: {error}".splitlines()[0]
            rows.append({"figure": part_name, "met": "failed", "note": first_line})
            log(f"{part_name}: {first_line}")
    title = f"device: {'; '.join(f'{n} {size.describe()}' for n, size in sizes.items())}"
    return Report(f"{title}; {time.perf_counter() - start:.0f} s", rows, failed)


def _chosen_attention(size: Size) -> Size:
    """The size with the kernels that a run of its shapes would take."""
    slots = round_slots(size.prompt_len + size.response_len)
    with contextlib.redirect_stdout(sys.stderr):
        kernels = attention.choose_kernels("auto", size.model, slots)
    return dataclasses.replace(size, model=size.model.replace(kernels=kernels))


def _parts(config, sizes: dict[str, Size]) -> dict[str, Part]:
    first = next(iter(sizes))
    parts: dict[str, Part] = {
        f"training step, {first}": functools.partial(_training, first, config, sizes[first]),
        "limits": functools.partial(_limits, sizes[first].model.dtype),
    }
    for name, size in sizes.items():
        kinds = {"numerics": _numerics, "decode": _decode, "steps": _steps, "extend": _extend}
        for kind, part in kinds.items():
            parts[f"{kind}, {name}"] = functools.partial(part, name, size)
    return parts


def _figure(
    name: str, value: float | None, of: str, note: str, goal: float | None = None
) -> dict[str, Any]:
    """A line of the table. goal: the least value that is wished for."""
    row = {"figure": name, "value": value, "of": of}
    if goal is not None:
        row |= {"goal": f">= {goal:g}", "met": "yes" if value >= goal else "no"}
    return row | {"note": note}


def _repeat(call: Callable[[], float]) -> float:
    """The median of 2 to 20 calls, as many as `REPEAT_SECONDS` allow."""
    start = time.perf_counter()
    values = []
    while len(values) < 2 or (len(values) < 20 and time.perf_counter() - start < REPEAT_SECONDS):
        values.append(call())
    return float(np.median(values))


# A whole step ------------------------------------------------------------------------------------


def _training(name: str, config, size: Size) -> Iterator[dict[str, Any]]:
    """Steps without drafts and with those that hold; then the peak of memory against what the
    compiler says."""
    config = _step_config(config, size)
    seconds = {}
    for draft in ("none", "previous"):
        config.rollout.draft = draft
        with contextlib.redirect_stdout(sys.stderr):
            run, params = build(config)
        # No token ends a response, and all are equally likely.
        spec = without_end(run.rollout_spec)
        run = dataclasses.replace(run, rollout_spec=spec)
        state = init_state(run, params | {"final_norm": jnp.zeros_like(params["final_norm"])})
        del params
        held = shapes.device_bytes(state.arrays())
        listed = programs.run_programs(shapes.of_run(run))
        compiled = programs.compile_all(listed)
        needed = max(programs.needed_bytes(x, compiled[x.name], held) for x in listed)
        step = functools.partial(_step_seconds, run, state)
        with run.scorer.pool:
            for _ in range(2):  # the first has no drafts
                step()
            seconds[draft] = _repeat(step)
        note = f"{size.rows} rows of {config.rollout.response_len} tokens"
        yield _figure(f"step, drafts {draft}, {name}", seconds[draft], "s", note)
    times = seconds["none"] / seconds["previous"]
    yield _figure(f"step with drafts, {name}", times, "x plain", "all held")
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    note = f"the compiler says {needed / 1e9:.2f} GB, peak "
    note += f"{peak / 1e9:.2f} GB" if peak else "unknown on this platform"
    yield _figure(f"memory, {name}", peak and peak / needed, "of the compiler's", note)


def _step_seconds(run: Run, state: RunState) -> float:
    return limits.seconds_of(lambda: (train.step(run, state, RunLog(run)), state.train.params))


def _step_config(config, size: Size):
    """The size's layers and rows in `config`, whose tokenizer and task stay: every step an epoch,
    one bucket, and an update of all rows."""
    config = config.copy_and_resolve_references()
    sizes = ("family", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
    prompts = size.rows // config.rollout.group_size
    changes = {f"model.{field}": getattr(size.model, field) for field in (*sizes, "head_dim")}
    changes |= {
        "data.prompts": prompts,
        "rollout.prompts_per_step": prompts,
        "rollout.response_len": min(size.response_len, STEP_TOKENS),
        "rollout.row_buckets": 1,
        "rollout.adaptive": False,
        "updates.mini_batch_size": size.rows,
        "updates.skip_no_signal": False,
        "updates.learning_rate": 1e-9,
        "updates.schedule": "constant",
        "warmup.steps": 0,
        "evaluate.every": 0,
        "train.steps": 1_000,
    }
    config.update_from_flattened_dict(changes)
    return config


# Limits ------------------------------------------------------------------------------------------


def _limits(dtype: str) -> Iterator[dict[str, Any]]:
    yield _figure("bandwidth", limits.copy_rate() / 1e9, "GB/s", "copy of a large array")
    yield _figure("peak", limits.matmul_rate(dtype) / 1e12, "TFLOP/s", f"large product in {dtype}")


# Numbers -----------------------------------------------------------------------------------------


def _numerics(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """The logits of every kind of pass, by the plain attention and by the kernels of a run, in
    bfloat16 and two layers, against the plain one in float32."""
    layers = min(size.model.num_layers, 2)
    model = size.model.replace(num_layers=layers, dtype="bfloat16", kernels=())
    params = policies.random_params(model)
    with jax.default_matmul_precision("highest"):
        exact = _passes(model.replace(dtype="float32"), params)
    kernels = size.model.kernels
    kinds = {"reference": ()} | ({"kernels": kernels} if kernels else {})
    for kind, taken in kinds.items():
        for what, logits in _passes(model.replace(kernels=taken), params).items():
            if kind == "kernels" and _USE[what] not in taken:
                continue
            # The standard deviation over the vocabulary, of the worst token.
            error = np.max(np.std(logits - exact[what], axis=-1)) / np.std(exact[what])
            title = f"numerics, {name}: {what}, {kind}"
            row = _figure(title, float(error), "error", "against float32")
            met = "yes" if error < ERROR_GOAL else "no"
            yield row | {"goal": f"< {ERROR_GOAL:g}", "met": met}


def _passes(model: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Logits [B, T, V] of the update's pass over packed rows, of `extend`'s, of a decode step and
    of one of five tokens, at odd lengths."""
    count = 4
    length = 37
    width = 5
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=(count, length))
    starts = put(np.arange(length - count, length, dtype=np.int32), "batch")

    @jax.jit
    def compute(params: Params, weights: Params, tokens: jax.Array, starts: jax.Array) -> dict:
        policy = Transformer(model, weights)
        # Two copies of a row in a sequence, of which neither sees the other.
        twice = jnp.concatenate([tokens, tokens], axis=1)
        depths = jnp.tile(jnp.arange(length), (count, 2))
        ends = jnp.tile(jnp.repeat(jnp.array([length, 2 * length]), length), (count, 1))
        packed = {"positions_BT": depths, "ends_BT": ends}
        update, _ = Transformer(model, params)(twice, **packed)
        extended, _ = policy(twice, **packed)
        cache = init_cache(model, count, _KERNEL_SLOTS)
        _, cache = policy(tokens, jnp.zeros_like(starts), cache)
        step, cache = policy(tokens[:, :1], starts, cache)
        wide, _ = policy(tokens[:, :width], starts, cache)
        hidden = {"update": update, "extend": extended, "decode": step, "wide step": wide}
        return {name: policy.logits(x) for name, x in hidden.items()}

    tokens = put(tokens.astype(np.int32), "batch", None)
    return jax.device_get(compute(params, rollout_weights(model, params), tokens, starts))


# Shares of the limits ----------------------------------------------------------------------------


def _case(size: Size, *, length: int = 0, width: int = 1, **options: Any) -> RolloutCase:
    """A rollout whose rows all end at one length, by default the longest, in one bucket, and whose
    decode steps have one width."""
    spec = make_spec(size, accept=RULE, one_bucket=True, width=width)
    weights = policies.random_weights(size.model, uniform=True)
    prompts = policies.random_prompts(size, size.rows)
    lens = np.full(size.rows, length or size.response_len, np.int32)
    noise = NoiseKey(jax.random.key(0), 1)
    return functools.partial(generate, spec, weights, prompts, noise, max_lens=lens, **options)


def _decode(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """Steps of width 1, and of the widest, which draft from responses that are known."""
    live = size.prompt_len + size.response_len // 2
    at_bandwidth = limits.decode_bytes(size.model, size.rows, live) / limits.copy_rate()
    plain = _case(size)
    rollout = run_case(plain).rollout
    drafts = DraftInputs(history=as_history(rollout.tokens, rollout.lens, policies.GROUP))
    for width in (1, size.max_width):
        case = plain if width == 1 else _case(size, width=width, drafts=drafts)
        steps = run_case(case).stats.decode_steps  # compiles
        seconds = _repeat(lambda case=case: run_case(case).step_seconds)
        note = f"{1e3 * seconds:.2f} ms a step, {size.rows} rows of {live} tokens in the mean"
        goal = BANDWIDTH_GOAL if width == 1 else None
        yield _figure(
            f"decode, width {width}, {name}", at_bandwidth / seconds, "of bandwidth", note, goal
        )
    times = _repeat(lambda: run_case(plain).seconds / run_case(case).seconds)
    note = f"{size.response_len} tokens in {steps} steps of width {width}"
    yield _figure(f"suffix drafts, {name}", times, "x plain", note, DRAFTS_GOAL)


def _steps(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """Steps of every width at several numbers of rows."""
    weights = policies.random_weights(size.model, uniform=True)
    live = size.prompt_len + size.response_len // 2
    for rows in STEP_ROWS:
        seconds = step_seconds(dataclasses.replace(size, rows=rows), weights)
        at_bandwidth = limits.decode_bytes(size.model, rows, live) / limits.copy_rate()
        for width, taken in seconds.items():
            times = taken / seconds[1]
            note = f"{1e3 * taken:.2f} ms, {at_bandwidth / taken:.0%} of bandwidth"
            row = _figure(f"step, width {width}, {rows} rows, {name}", times, "x width 1", note)
            if width == max(seconds):
                met = "yes" if times <= WIDTH_GOAL else "no"
                row |= {"goal": f"<= {WIDTH_GOAL:g}", "met": met}
            yield row


def _extend(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """`extend` of prompts alone, and with drafts that all hold."""
    model = size.model
    drafts = DraftInputs(Drafts.of(_case(size)().rollout))
    prompts = size.rows // policies.GROUP * size.prompt_len
    drafted = size.rows * size.response_len
    flops = limits.forward_flops(model, prompts, size.prompt_len // 2, scored=size.rows)
    slots = size.prompt_len + size.response_len // 2
    more = limits.forward_flops(model, drafted, slots)
    for what, case, tokens, needed, goal in (
        ("prompts", _case(size, length=1), prompts, flops, None),
        ("verification", _case(size, drafts=drafts), prompts + drafted, flops + more, PEAK_GOAL),
    ):
        stats = run_case(case).stats  # compiles
        seconds = _repeat(lambda case=case: run_case(case).stats.extend_seconds)
        note = f"{seconds:.3f} s, {1e6 * seconds / tokens:.2f} us a token, {tokens:,} tokens"
        if stats.verified_tokens:
            note += f", {stats.accepted_tokens / drafted:.0%} of the drafts accepted"
        share = needed / limits.matmul_rate(model.dtype) / seconds
        yield _figure(f"extend, {what}, {name}", share, "of peak", note, goal)
