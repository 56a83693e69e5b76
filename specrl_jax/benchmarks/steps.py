"""Seconds of decode steps by their width, on made-up rows half way through their responses."""

import dataclasses
import functools
import time

import jax
import numpy as np

from specrl_jax.benchmarks.policies import GROUP, Size, random_prompts
from specrl_jax.benchmarks.rollout import as_history, make_spec
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.transformer import Params
from specrl_jax.programs import Program, compile_all
from specrl_jax.rollout.engine.all_rows import start_all_rows
from specrl_jax.rollout.engine.decode import StopCondition, decode_steps
from specrl_jax.rollout.generate import NoiseKey
from specrl_jax.rollout.rows import Rows
from specrl_jax.sharding import put

_STEPS = 32  # of a timed call
_ROUNDS = 3  # the fastest counts


def step_seconds(size: Size, weights: Params) -> dict[int, float]:
    """Seconds of a step of width 1, 2, 4, ... up to `size.max_width`; the wider ones draft by
    suffixes.

    weights: of `policies.random_weights`.
    """
    spec = make_spec(size, one_bucket=True, width=size.max_width)
    prompts = random_prompts(size, size.rows)
    stored = np.zeros((size.rows, size.response_len), np.int32)
    lens = np.full(size.rows, size.response_len, np.int32)
    history = as_history(stored, lens, GROUP)
    cache = init_cache(size.model, size.rows, spec.buckets(size.rows).slots)
    noise = NoiseKey(jax.random.key(0), 1)
    visits = np.zeros((len(prompts.lens), GROUP), int)

    def half_way() -> Rows:
        rows = start_all_rows(spec, prompts, noise, visits)
        return dataclasses.replace(rows, lens=put(lens // 2, "batch"))

    rows = half_way()
    drafts = spec.draft_source.init(prompts, history, GROUP)
    stop = StopCondition.of(size.rows, size.rows, max_steps=_STEPS, max_unfinished=-1, max_left=-1)
    widths = [2**i for i in range(size.max_width.bit_length())]

    def arguments(width: int) -> tuple:
        return spec, weights, cache, rows, drafts if width > 1 else None, stop

    traces = {w: functools.partial(decode_steps.trace, *arguments(w), width=w) for w in widths}
    compile_all([Program(str(width), trace) for width, trace in traces.items()])
    seconds = {}
    for width in widths:
        times = []
        for _ in range(_ROUNDS):
            rows = half_way()
            start = time.perf_counter()
            result = decode_steps(*arguments(width), width=width)
            cache, rows, state, *_ = jax.block_until_ready(result)
            times.append(time.perf_counter() - start)
            drafts = drafts if state is None else state
        seconds[width] = min(times) / _STEPS
    return seconds
