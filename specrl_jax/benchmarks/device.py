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

from specrl_jax import train
from specrl_jax.accelerators.abstract_run import abstract_run
from specrl_jax.accelerators.chips import CHIPS
from specrl_jax.accelerators.plan import memory_plan
from specrl_jax.accelerators.programs import programs
from specrl_jax.benchmarks.handwritten_loop import decode as decode_by_hand
from specrl_jax.benchmarks.limits import (
    copy_rate,
    decode_bytes,
    forward_flops,
    matmul_rate,
    seconds_of,
)
from specrl_jax.benchmarks.policies import (
    GROUP,
    Size,
    choose,
    random_params,
    random_prompts,
    random_weights,
)
from specrl_jax.benchmarks.reports import Report
from specrl_jax.benchmarks.rollout import by_prompt, make_spec
from specrl_jax.benchmarks.timing import Log, RolloutCase, run
from specrl_jax.build import build, policy_copy
from specrl_jax.models import attention
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine.decode import prefill
from specrl_jax.rollout.generate import DraftInputs, Noise, generate
from specrl_jax.sharding import platform, put
from specrl_jax.state import init_state
from specrl_jax.types import Drafts

# Of a GPU or TPU, where no size is named, and their numbers where no flag gives them.
SIZES = {
    "smollm2": {"rows": 256, "prompt_len": 512, "response_len": 256},
    "qwen3_1p7b": {"prompt_len": 512, "response_len": 256},
}
BANDWIDTH_GOAL = 0.7
PEAK_GOAL = 0.4
DRAFTS_GOAL = 2.5
ERROR_GOAL = 0.05
LAST_BEGIN = 480.0  # seconds after the start, after which no further part begins
REPEAT_SECONDS = 4.0  # in which a call is timed again and again
_KERNEL_SLOTS = 128  # of the cache of the check of numbers: a size that kernels take
# Which kernel a pass takes, see `attention.USES`.
_USE = {"update": "packed", "prefill": "packed", "decode": "decode", "verification": "verify"}
STEP_TOKENS = 128  # of a response in a training step: verified in one pass
# A rule under which a verification pass decides, as for SPEC-RL.
RULE = next(rule for rule in ACCEPTANCE_RULES.values() if not rule.samples_anew)
Part = Callable[[], Iterator[dict[str, Any]]]


def measure_device(config, name: str | None, changes: dict[str, int], log: Log) -> Report:
    """A line for each figure, with its goal where it has one.

    config: of the training step, whose model, lengths and rows are replaced. name: of a size;
    None: those of `SIZES`, `tiny` on a CPU. changes: of the size's numbers, None for its own.
    """
    on_cpu = jax.default_backend() == "cpu"
    start = time.perf_counter()
    names = [name] if name else ["tiny"] if on_cpu else list(SIZES)
    given = {key: value for key, value in changes.items() if value is not None}
    sizes = {n: choose(n, **({} if on_cpu else SIZES.get(n, {})) | given) for n in names}
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
    slots = size.prompt_len + size.response_len
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
        for part in (_numerics, _decode, _prefill, _verification, _suffix_drafts):
            title = f"{part.__name__[1:].replace('_', ' ')}, {name}"
            parts[title] = functools.partial(part, title, size)
    title = f"hand-written loop, {first}"  # of one size: it has a program of its own
    return parts | {title: functools.partial(_by_hand, title, sizes[first])}


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
    """Steps without drafts and with those that hold; then the peak of memory against the plan."""
    config = _step_config(config, size)
    seconds = {}
    for draft in ("none", "previous"):
        config.rollout.draft = draft
        seconds[draft] = _step_seconds(config)
        note = f"{size.rows} rows of {config.rollout.response_len} tokens"
        yield _figure(f"step, drafts {draft}, {name}", seconds[draft], "s", note)
    yield _figure(
        f"step with drafts, {name}", seconds["none"] / seconds["previous"], "x plain", "all held"
    )
    stats = jax.devices()[0].memory_stats() or {}
    listed = programs(planned := abstract_run(config))
    used = ("prefill", "verify_tries", "verify_rows", "decode", "update")
    listed = {key: program for key, program in listed.items() if key in used}
    needed = memory_plan(planned, listed, CHIPS["h100"]).programs  # they do not depend on the chip
    most = max(needed, key=needed.get)
    peak = stats.get("peak_bytes_in_use")
    note = f"plan {needed[most] / 1e9:.2f} GB ({most}), peak "
    note += f"{peak / 1e9:.2f} GB" if peak else "unknown on this platform"
    yield _figure(f"memory, {name}", peak and peak / needed[most], "of the plan", note)


def _step_config(config, size: Size):
    """The size's layers and rows in `config`, whose tokenizer and task stay: every step an epoch,
    one bucket, and an update of all rows."""
    config = config.copy_and_resolve_references()
    sizes = ("family", "embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads")
    for field in (*sizes, "head_dim"):
        config.model[field] = getattr(size.model, field)
    settings = config.rollout
    updates = config.updates
    settings.prompts_per_step = config.data.prompts = size.rows // settings.group_size
    settings.response_len = min(size.response_len, STEP_TOKENS)
    settings.row_buckets = 1
    settings.adaptive = False
    updates.mini_batch_size = size.rows
    updates.skip_no_signal = False
    updates.learning_rate = 1e-9
    updates.schedule = "constant"
    config.warmup.steps = config.evaluate.every = 0
    config.train.steps = 1_000
    return config


def _step_seconds(config) -> float:
    with contextlib.redirect_stdout(sys.stderr):
        trainer, params = build(config)
    # No token ends a response, and all are equally likely.
    program = trainer.rollout_spec.program
    program = dataclasses.replace(program, eos_ids=(trainer.model.vocab_size,))
    spec = dataclasses.replace(trainer.rollout_spec, program=program)
    trainer = dataclasses.replace(trainer, rollout_spec=spec)
    state = init_state(trainer, params | {"final_norm": jnp.zeros_like(params["final_norm"])})
    del params

    def step() -> float:
        return seconds_of(lambda: (train.step(trainer, state), state.train.params))

    with trainer.scorer.pool:
        for _ in range(2):  # they compile, and the first has no drafts
            step()
        return _repeat(step)


# Limits ------------------------------------------------------------------------------------------


def _limits(dtype: str) -> Iterator[dict[str, Any]]:
    yield _figure("bandwidth", copy_rate() / 1e9, "GB/s", "copy of a large array")
    yield _figure("peak", matmul_rate(dtype) / 1e12, "TFLOP/s", f"large product in {dtype}")


# Numbers -----------------------------------------------------------------------------------------


def _numerics(title: str, size: Size) -> Iterator[dict[str, Any]]:
    """The logits of every kind of pass by every kind of attention there is, in bfloat16 and two
    layers, against the plain one in float32."""
    layers = min(size.model.num_layers, 2)
    model = size.model.replace(num_layers=layers, dtype="bfloat16", kernels=())
    params = random_params(model)
    with jax.default_matmul_precision("highest"):
        exact = _passes(model.replace(dtype="float32"), params)
    kinds = {"reference": model, "kernels": _with_kernels(model, _KERNEL_SLOTS)}
    for kind, model_of_kind in kinds.items():
        if kind == "kernels" and model_of_kind == model:
            continue  # there are none here, or none that takes this model
        for name, logits in _passes(model_of_kind, params).items():
            if kind == "kernels" and _USE[name] not in model_of_kind.kernels:
                continue
            # The standard deviation over the vocabulary, of the worst token.
            error = np.max(np.std(logits - exact[name], axis=-1)) / np.std(exact[name])
            row = _figure(f"{title}: {name}, {kind}", float(error), "error", "against float32")
            met = "yes" if error < ERROR_GOAL else "no"
            yield row | {"goal": f"< {ERROR_GOAL:g}", "met": met}


def _with_kernels(model: ModelConfig, slots: int) -> ModelConfig:
    """The model with every kernel of the platform that takes it and caches of so many slots."""
    kernels = attention.kernel_module(platform())
    if kernels is None:
        return model
    uses = [use for use in attention.USES if not kernels.refusal(use, model, slots)]
    return model.replace(kernels=tuple(uses))


def _passes(model: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """Logits [B, T, V] of the update's pass over packed rows, of prefill, of a decode step and of
    one of five tokens, at odd lengths."""
    count = 4
    length = 37
    width = 5
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=(count, length))
    starts = put(np.arange(length - count, length, dtype=np.int32), "batch")

    @jax.jit
    def compute(params: Params, weights: Params, tokens: jax.Array, starts: jax.Array) -> dict:
        update = Transformer(model, params)
        policy = Transformer(model, weights)
        # Two copies of a row in a sequence, of which neither sees the other.
        twice = jnp.concatenate([tokens, tokens], axis=1)
        depths = jnp.tile(jnp.arange(length), (count, 2))
        ends = jnp.tile(jnp.repeat(jnp.array([length, 2 * length]), length), (count, 1))
        packed, _ = update(twice, positions_BT=depths, ends_BT=ends)
        prompts, _ = policy(tokens, cache=init_cache(model, count, length))
        zeros = jnp.zeros_like(starts)
        _, cache = policy(tokens, zeros, init_cache(model, count, _KERNEL_SLOTS))
        step, cache = policy(tokens[:, :1], starts, cache)
        wide, _ = policy(tokens[:, :width], starts, cache)
        hidden = {"update": packed, "prefill": prompts, "decode": step, "verification": wide}
        return {name: policy.logits(x) for name, x in hidden.items()}

    tokens = put(tokens.astype(np.int32), "batch", None)
    return jax.device_get(compute(params, policy_copy(model, params), tokens, starts))


# Shares of the limits ----------------------------------------------------------------------------


def _case(size: Size, **changes: Any) -> RolloutCase:
    """A rollout whose rows all end at the longest length, in one bucket.

    changes: see `make_spec`.
    """
    spec = make_spec(size, accept=RULE, one_bucket=True, **changes)
    inputs = random_weights(size.model, uniform=True), random_prompts(size, size.rows)
    lens = np.full(size.rows, size.response_len, np.int32)
    return functools.partial(generate, spec, *inputs, Noise(jax.random.key(0), 1), max_lens=lens)


def _decode(title: str, size: Size) -> Iterator[dict[str, Any]]:
    case = _case(size)
    live = size.prompt_len + size.response_len // 2
    run(case)  # compiles
    seconds = _repeat(lambda: run(case).step_seconds)
    share = decode_bytes(size.model, size.rows, live) / copy_rate() / seconds
    note = f"{1e3 * seconds:.2f} ms a step, {size.rows} rows of {live} tokens in the mean"
    yield _figure(title, share, "of bandwidth", note, BANDWIDTH_GOAL)


def _prefill(title: str, size: Size) -> Iterator[dict[str, Any]]:
    spec, weights, prompts, _ = _case(size).args
    program = spec.program_for(spec.buckets(size.rows))
    model = size.model

    def call() -> jax.Array:
        return prefill(program, weights, prompts.tokens)

    seconds_of(call)  # compiles
    seconds = _repeat(lambda: seconds_of(call))
    tokens = prompts.tokens.size
    flops = forward_flops(model, tokens, size.prompt_len // 2, scored=0)
    note = f"{1e3 * seconds:.1f} ms, {tokens:,} tokens"
    yield _figure(title, flops / matmul_rate(model.dtype) / seconds, "of peak", note)


def _verification(title: str, size: Size) -> Iterator[dict[str, Any]]:
    case = _case(size)
    model = size.model
    case.keywords["drafts"] = DraftInputs(Drafts.of(case().rollout))
    stats = run(case).stats
    seconds = _repeat(lambda: run(case).stats.verify_seconds)
    scored = size.rows * size.response_len
    # In one pass with the prompts, or after their prefill.
    tokens = scored + (0 if stats.prefill_seconds else case.args[2].tokens.size)
    slots = size.prompt_len + size.response_len // 2
    flops = forward_flops(model, tokens, slots, scored=scored)
    share = flops / matmul_rate(model.dtype) / seconds
    accepted = stats.accepted_tokens / scored
    note = f"{seconds:.3f} s, {scored:,} draft tokens, {accepted:.0%} accepted"
    yield _figure(title, share, "of peak", note, PEAK_GOAL)


def _suffix_drafts(title: str, size: Size) -> Iterator[dict[str, Any]]:
    plain = _case(size)
    tree = _case(size, tree=True)
    rollout = run(plain).rollout
    stored = by_prompt(rollout.tokens, rollout.lens, GROUP)
    tree.keywords["drafts"] = DraftInputs(history=DraftHistory.from_store(*stored, GROUP))
    stats = run(tree).stats
    speedup = _repeat(lambda: run(plain).seconds / run(tree).seconds)
    note = f"{size.response_len} tokens in {stats.decode_steps} steps of up to {size.max_width}"
    yield _figure(title, speedup, "x plain", note, DRAFTS_GOAL)


def _by_hand(title: str, size: Size) -> Iterator[dict[str, Any]]:
    """A decode step of a rollout against one of plain `jnp` code, on a cache of zeros."""
    case = _case(size)
    rows = size.rows
    plain = size.model.replace(kernels=())
    seeds = np.random.default_rng(rows).integers(0, 2**32, (rows, 2), np.uint32)
    ones = np.ones(rows, np.int32)
    lens = np.full(rows, size.prompt_len, np.int32)
    begin = put(ones, "batch"), put(lens, "batch"), put(seeds, "batch", None)

    def by_hand() -> float:
        cache = init_cache(plain, rows, size.prompt_len + size.response_len)
        inputs = jax.block_until_ready((cache, begin))
        call = functools.partial(decode_by_hand, plain, case.args[1], *inputs)
        return seconds_of(lambda: call(steps=size.response_len)) / size.response_len

    by_hand(), run(case)  # they compile
    share = _repeat(lambda: by_hand() / run(case).step_seconds)
    yield _figure(title, share, "of a step", "seconds of its step")
