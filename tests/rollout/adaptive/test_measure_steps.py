"""How a program's seconds are measured, and that they are kept on disk."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import cache_slots
from specrl_jax.rollout.adaptive import measure_steps
from specrl_jax.rollout.adaptive.measure_steps import STEPS, StepTimer
from specrl_jax.rollout.adaptive.speculation import Speculation
from specrl_jax.rollout.adaptive.step_costs import Point
from specrl_jax.rollout.generate import DraftInputs, Noise, generate
from specrl_jax.runtime import compile_metrics

ROWS, P, R = 8, 3, 4
PLAIN, MATCHING = Point(ROWS, P + R, 1, False), Point(ROWS, P + R, 2, True)
VERIFICATION = Point(ROWS, P + R, R, False)


def spec_of(**kwargs):
    kwargs = {"row_buckets": 1, "tree": ref.TREE, "max_width": 2} | kwargs
    return ref.make_spec(ref.ONE_LAYER, slots=R, prompt_slots=P, group=2, **kwargs)


def timer_of(directory, sources=0, **kwargs) -> StepTimer:
    spec = spec_of(**kwargs)
    return StepTimer(spec.program_for(spec.buckets(ROWS)), ROWS // 2, sources, directory)


class Clock:
    """Time that passes in decode steps alone: `start` seconds a call and `step` a step."""

    def __init__(self, monkeypatch, start, step):
        self.now, self.start, self.step, self.calls = 0.0, start, step, []
        monkeypatch.setattr(measure_steps.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(measure_steps.decode, "decode_steps", self.decode_steps)

    def decode_steps(self, program, weights, cache, rows, suffixes, limits, **kwargs):
        steps = int(limits.max_steps)
        self.now += self.start + self.step * steps
        shape = (cache[0][0].shape[0], cache_slots(cache))
        self.calls.append((shape, steps, suffixes is not None, rows.draft is not None, kwargs))
        return (cache, rows, suffixes, None, limits.max_steps)


@pytest.mark.parametrize(
    ("point", "seconds", "wide"),
    [(PLAIN, 0.001, False), (MATCHING, 0.001, False), (VERIFICATION, 0.011, True)],
)
def test_a_step_is_measured_without_what_its_call_takes(
    mesh, monkeypatch, tmp_path, point, seconds, wide
):
    """A verification is one call; of a decode loop only a step more is a step more."""
    clock = Clock(monkeypatch, 0.01, 0.001)
    timer = timer_of(tmp_path, accept="ratio")
    assert timer.measure(None, point) == pytest.approx(seconds)
    shapes, steps, drafting, drafted, kwargs = zip(*clock.calls)
    assert set(shapes) == {(point.rows, point.slots)}
    assert set(steps) == ({1} if point.verifies else {1, 1 + STEPS})
    assert set(drafting) == {point.drafting}
    assert set(drafted) == {point.verifies}
    assert all(known == {"width": point.width, "verify": wide} for known in kwargs)
    assert clock.now < 1.0


def test_a_slow_program_is_called_no_more_than_twice(mesh, monkeypatch, tmp_path):
    clock = Clock(monkeypatch, 0.0, 5.0)
    assert timer_of(tmp_path).measure(None, PLAIN) == 5.0
    assert [call[1] for call in clock.calls] == [1, 1]


def test_the_call_that_compiles_is_not_measured(mesh, monkeypatch, tmp_path):
    clock = Clock(monkeypatch, 5.01, 0.001)  # seconds to compile

    def compiled_once(*args, **kwargs):
        result = clock.decode_steps(*args, **kwargs)
        clock.start = 0.01
        return result

    monkeypatch.setattr(measure_steps.decode, "decode_steps", compiled_once)
    assert timer_of(tmp_path).measure(None, PLAIN) == pytest.approx(0.001)


def test_noise_that_turns_a_longer_call_shorter(mesh, monkeypatch, tmp_path):
    Clock(monkeypatch, 0.1, -0.005)
    assert timer_of(tmp_path).measure(None, PLAIN) == pytest.approx((0.1 - 0.045) / (1 + STEPS))


def test_seconds_are_measured_once_and_kept(make_mesh, tmp_path, monkeypatch, caplog):
    Clock(monkeypatch, 0.01, 0.001)
    with jax.set_mesh(make_mesh(1, 1, 1)):
        timer, points = timer_of(tmp_path), (PLAIN, VERIFICATION)
        seconds = [timer(None, point) for point in points]
        Clock(monkeypatch, 0.01, 0.002)
        assert [timer(None, point) for point in points] == seconds
        # Another program, other sources, other code, another mesh, another machine.
        program = dataclasses.replace(timer.program, logits_chunk=3)
        others = [
            dataclasses.replace(timer, program=program),
            dataclasses.replace(timer, sources=3),
        ]
        assert all(other(None, PLAIN) == pytest.approx(0.002) for other in others)
        for name in ("code_digest", "machine"):
            with monkeypatch.context() as patch:
                patch.setattr(measure_steps, name, lambda *_: {"device": "another"})
                assert timer(None, PLAIN) == pytest.approx(0.002)
    with jax.set_mesh(make_mesh(1, 2, 1)):
        assert timer(None, PLAIN) == pytest.approx(0.002)
    assert len(list(tmp_path.iterdir())) == 6
    assert not caplog.records


@pytest.mark.parametrize("text", ["", "[]", '{"seconds": [[1, 2]]}', '{"seconds": 3}', "{"])
def test_a_damaged_file_is_measured_again(mesh, tmp_path, monkeypatch, caplog, text):
    Clock(monkeypatch, 0.01, 0.001)
    timer = timer_of(tmp_path)
    seconds = timer(None, PLAIN)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    assert timer(None, PLAIN) == pytest.approx(seconds)
    assert "measuring again" in caplog.text
    assert json.loads(path.read_text())["seconds"] == [[*PLAIN, pytest.approx(seconds)]]


def test_a_folder_that_cannot_be_written_is_warned_of(mesh, tmp_path, monkeypatch, caplog):
    Clock(monkeypatch, 0.01, 0.001)
    (tmp_path / "file").write_text("")
    assert timer_of(tmp_path / "file")(None, PLAIN) == pytest.approx(0.001)
    assert "cannot keep step costs" in caplog.text


@pytest.fixture
def compiles(caplog):
    """Whether a call compiles decode steps."""

    def call(function, *args) -> bool:
        caplog.clear()
        with jax.log_compiles():
            function(*args)
        return "decode_steps" in caplog.text

    return call


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
@pytest.mark.parametrize("tree", [None, ref.TREE], ids=["plain", "tree"])
def test_no_policy_program_is_compiled_to_measure_what_ran(
    make_mesh, tmp_path, compiles, shape, tree
):
    """After a rollout, the program that it used is measured without compiling it again."""
    spec = spec_of(tree=tree, max_width=2 if tree else 1)
    with jax.set_mesh(make_mesh(*shape)):
        weights = ref.policy(model=ref.ONE_LAYER)[1]
        prompts = ref.make_prompts([[2], [2, 1], [1], [1, 1]], P)
        chooser = Speculation(timer=timer_of(tmp_path, tree=tree, max_width=2 if tree else 1))

        def roll(speculation):
            noise = Noise(jax.random.key(0), 1)
            generate(spec, weights, prompts, noise, speculation=speculation)

        assert compiles(roll, chooser)
        assert not compiles(chooser.measure_used, weights)
        rows = chooser.costs.to_json()
        assert rows
        assert all(0 < row[-1] < 60 for row in rows)
        compile_metrics()
        other = Speculation(timer=chooser.timer)
        roll(other)
        other.measure_used(weights)
        assert other.costs.to_json() == rows
        assert compile_metrics()["time/compile"] == 0


def test_no_program_is_compiled_to_measure_a_pass_over_tries(mesh, tmp_path, caplog):
    spec = spec_of(tree=None, max_width=1, accept="ratio")
    weights, prompts = ref.policy(model=ref.ONE_LAYER)[1], ref.make_prompts([[2]] * 4, P)
    inputs = DraftInputs(ref.plain_drafts(np.full((ROWS, R), 5), np.full(ROWS, R)), np.inf)
    chooser = Speculation(timer=timer_of(tmp_path, tree=None, max_width=1, accept="ratio"))
    noise = Noise(jax.random.key(0), 1)
    stats = generate(spec, weights, prompts, noise, drafts=inputs, speculation=chooser).stats
    assert stats.verify_work == 2 * (P + R)  # all drafts are the same
    with jax.log_compiles():
        chooser.measure_used(weights)
    assert "verify_trie" not in caplog.text
    point = Point(ROWS, P + R, R, False, 1)
    assert point in chooser.costs
    assert Point(ROWS, P + R, 1, False) in chooser.costs  # to compare with


def test_no_program_is_compiled_to_measure_a_smaller_bucket(mesh, tmp_path, compiles):
    """The draft source has a state for all prompts, however few rows are left."""
    spec = spec_of(row_buckets=2)
    weights, prompts = ref.policy(model=ref.ONE_LAYER)[1], ref.make_prompts([[2]] * 4, P)
    ends = np.repeat([1, R], ROWS // 2)
    result = generate(spec, weights, prompts, Noise(jax.random.key(0), 1), max_lens=ends)
    sizes = {rows for rows, *_ in result.stats.decode_runs}
    assert len(sizes) > 1
    for size in sizes:
        timer = timer_of(tmp_path, row_buckets=2)
        assert not compiles(timer.measure, weights, Point(size, P + R, 2, True))
