"""Seconds of the programs, by a clock of the tests' own, and that measuring compiles nothing."""

import types

import jax
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.rollout.carry_over import CarryOver
from specrl_jax.rollout.engine import buckets as bucket_sizes
from specrl_jax.rollout.engine import measure as timing
from specrl_jax.rollout.engine.measure import CHUNKS, STEPS
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.generate import DraftInputs, Noise, generate, measure
from specrl_jax.runtime import compile_metrics

P, R = 3, 4
PROMPTS = ref.make_prompts([[2], [2, 1], [1], [1, 1]] * 4, P)
ROWS = 2 * len(PROMPTS.lens)


def noise() -> Noise:
    return Noise(jax.random.key(0), 1)


def make_spec(accept="match", **changes):
    changes = {"row_buckets": 3, "tree": ref.TREE, "max_width": 4} | changes
    return ref.make_spec(ref.ONE_LAYER, accept=accept, slots=R, prompt_slots=P, group=2, **changes)


def measured(spec, drafts=None):
    weights = ref.policy(model=ref.ONE_LAYER)[1]
    return measure(spec, weights, PROMPTS, noise(), DraftInputs(drafts), CarryOver())


class Clock:
    """Time that passes in programs alone: `call` seconds each, and what their work takes."""

    def __init__(self, monkeypatch, call, chunk, step):
        self.now = 0.0
        self.late = 0.0  # of the next call alone
        self.chunks = set()
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)
        clock = self

        def extend(runner, prefixes):
            clock.chunks.add(int(prefixes.count))
            clock.now += call + chunk * int(prefixes.count) + clock.late
            clock.late = 0.0

        def decode(runner, stop, width):
            assert (int(stop.max_unfinished), int(stop.max_left)) == (-1, -1)  # it takes all steps
            clock.now += call + int(stop.max_steps) * step(runner.size, width)

        monkeypatch.setitem(bucket_sizes.CHUNK_TOKENS, "cpu", 4 * (P + R))  # two sequences
        monkeypatch.setattr(Runner, "extend", extend)
        monkeypatch.setattr(Runner, "decode", decode)


def test_seconds_by_hand(mesh, monkeypatch):
    """A chunk without what its call takes; a step as one of a call; the fastest call counts."""
    clock = Clock(monkeypatch, 0.01, 0.5, lambda rows, width: rows + width / 8)
    clock.late = 99.0
    seconds = measured(make_spec())
    assert clock.chunks == {1, CHUNKS}
    assert seconds.chunk == pytest.approx(0.5)
    expected = {(rows, width): rows + width / 8 + 0.01 / STEPS
                for rows in (32, 16, 8) for width in (1, 2, 4)}  # fmt: skip
    assert seconds.steps == pytest.approx(expected)


def test_a_run_of_one_chunk(mesh, monkeypatch):
    Clock(monkeypatch, 0.01, 0.5, lambda rows, width: 1.0)
    assert measured(make_spec(max_rows=4, row_buckets=1)).chunk == pytest.approx(0.51)


def test_noise_that_turns_the_longer_call_shorter(mesh, monkeypatch):
    Clock(monkeypatch, 5.0, -0.5, lambda rows, width: 1.0)
    assert measured(make_spec()).chunk == 0.0


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("accept", ["match", "ratio"])
def test_what_a_rollout_ran_is_not_compiled_again(make_mesh, shape, accept):
    """Nor does measuring use up what the run holds; all rows have drafts of all slots."""
    spec = make_spec(accept, row_buckets=1)
    compile_metrics()
    with jax.set_mesh(make_mesh(*shape)):
        weights = ref.policy(model=ref.ONE_LAYER)[1]
        drafts = ref.plain_drafts(np.full((ROWS, R), 5), np.full(ROWS, R))
        inputs = {"drafts": DraftInputs(drafts)}
        for width in spec.buckets(ROWS).widths:
            plan = types.SimpleNamespace(width=width, max_steps=0)
            chooser = types.SimpleNamespace(
                plan_steps=lambda *_, plan=plan: plan,
                record_steps=lambda *_: None,
                record_drafts=lambda *_: None,
                verifies=lambda *_, width=width: width == 1,
            )
            generate(spec, weights, PROMPTS, noise(), speculation=chooser, **inputs)
        metrics = compile_metrics()
        assert metrics["compile/built"] + metrics["compile/read"] > 0
        seconds = measured(spec, drafts)
        metrics = compile_metrics()
        assert metrics["compile/built"] + metrics["compile/read"] == 0
        assert set(seconds.steps) == {(ROWS, width) for width in spec.buckets(ROWS).widths}
        assert min(seconds.steps.values()) > 0
        assert seconds.chunk >= 0
        result = generate(
            spec, weights, PROMPTS, noise(), speculation=Speculation(seconds), **inputs
        )
        assert int(np.sum(np.asarray(result.rollout.lens))) >= ROWS
