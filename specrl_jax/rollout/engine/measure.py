"""Seconds of the programs whose cost choices depend on, timed once on rows that are made up."""

import dataclasses
import functools
import time
from collections.abc import Callable

import numpy as np

from specrl_jax import hosts
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.speculation import Seconds
from specrl_jax.sharding import put

STEPS = 8  # of a timed call
CHUNKS = 4  # of the longer of two calls of `extend`
ROUNDS = 3  # the fastest counts: a machine is now and then slower than itself, but never faster


def measure_programs(runner: Runner) -> Seconds:
    """Time `extend` and the decode steps, as if all rows had drafts of all response slots. Where
    every token is sampled anew these are rejected early: a chunk costs at least as much."""
    requests = runner.requests
    buckets = runner.buckets
    rows = len(requests.done)
    full = np.full(rows, runner.program.response_slots, np.int32)
    # Rows that share nothing: chunks are full then.
    vocab = runner.program.model.vocab_size
    runner.texts = np.random.default_rng(0).integers(0, vocab, runner.texts.shape, np.int32)
    shards = range(0, rows, requests.shard_rows)
    # As many rows as fill a chunk, and a few chunks: a call costs something by itself.
    packed = []
    for chunks in (1, CHUNKS):
        count = min(2 * chunks * buckets.chunk_sequences, buckets.rows[0] // buckets.multiple)
        packed.append(runner.pack([np.arange(first, first + count) for first in shards], full))
    times = [_fastest(functools.partial(runner.extend, prefixes)) for prefixes in packed]
    more = int(packed[1].count - packed[0].count)
    chunk = max((times[1] - times[0]) / more, 0.0) if more else times[0]
    # Rows half way: kernels read what rows have filled. Those that end within these steps are
    # computed on as rows that are done.
    size = runner.size
    half = {"lens": np.full(size, runner.program.response_slots // 2, np.int32)}
    half |= {"done": np.zeros(size, bool)}
    halfway = {name: put(x, "batch") for name, x in half.items()}
    runner.rows = dataclasses.replace(runner.rows, **halfway)
    never = {"max_unfinished": -1, "max_left": -1}
    stop = runner.stop_condition(max_steps=STEPS, **never)
    seconds = {}
    for size in buckets.rows:
        if size < runner.size:
            runner.compact(size)
        for width in buckets.widths:
            run = _fastest(lambda width=width: runner.decode(stop, width))
            seconds[size, width] = run / STEPS
    return Seconds(chunk, seconds)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls, by the primary's clock."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return hosts.broadcast(min(seconds))
