"""Which programs are timed, how a step's seconds come out, and that tables are kept."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.kv_cache import cache_bytes, cache_slots
from specrl_jax.rollout.adaptive import measure_steps as timing
from specrl_jax.rollout.adaptive import step_costs as cost_table
from specrl_jax.rollout.adaptive.step_costs import Point

ROWS, P, R = 8, 3, 4


def plan_of(**kwargs):
    kwargs = {"row_buckets": 1, "cache_lengths": 1, "tree": ref.TREE, "max_width": 2} | kwargs
    return ref.make_plan(ref.ONE_LAYER, slots=R, prompt_slots=P, group=2, **kwargs)


def points_of(plan):
    ladder = plan.buckets(ROWS)
    return timing.points(plan.program_for(ladder), ladder)


def test_points_by_hand(mesh):
    # Two rungs, two windows (2 and 4 tokens), widths 1 and 2; verification of 4 tokens.
    found = points_of(plan_of(row_buckets=2, cache_lengths=2))
    decode = [
        Point(rows, slots, width, width > 1)
        for rows in (4, 8)
        for slots in (P + 2, P + 4)
        for width in (1, 2)
    ]
    verify = [Point(rows, P + 4, 4, False) for rows in (4, 8)]
    assert found == sorted(decode + verify)
    # Of three windows only the ends; one kind of step without tree drafts. Drafts of up to 2 tokens
    # take one pass, of up to 4 two, the second of which begins behind 2.
    found = points_of(plan_of(cache_lengths=3, tree=None, max_width=1, verify_width=2))
    decode = [Point(8, P + 1, 1, False), Point(8, P + 4, 1, False)]
    assert found == sorted([*decode, Point(8, P + 2, 2, False), Point(8, P + 4 + 2, 2, False)])
    # Nothing that the bound has no room for, but the fewest rows in any case.
    plan = plan_of(row_buckets=2, cache_lengths=1, tree=None, max_width=1)
    ladder, per_slot = plan.buckets(ROWS), cache_bytes(ref.ONE_LAYER, 1, 1)
    found = timing.points(plan.program_for(ladder), ladder, 7 * (P + 4) * per_slot)
    assert {(p.rows, p.width) for p in found} == {(4, 1), (4, 4)}
    found = timing.points(plan.program_for(ladder), ladder, 1.0)
    assert {p.rows for p in found} == {ladder.admissions[-1]}
    # Block verification is not a choice.
    found = points_of(plan_of(accept="block", stored_logprobs=2))
    assert found == [Point(8, P + R, 1, False), Point(8, P + R, 2, True)]


class Clock:
    """Time that passes in visits alone: `start` seconds a call and `step` a step."""

    def __init__(self, start, step):
        self.now, self.start, self.step, self.calls = 0.0, start, step, []

    def perf_counter(self):
        return self.now

    def visit(self, setup, weights, cache, board, corpus, limits, **kwargs):
        self.now += self.start + self.step * int(limits.max_steps)
        known = {"corpus": corpus is not None, **kwargs}
        self.calls.append(
            ((cache[0][0].shape[0], cache_slots(cache)), board.draft is not None, known)
        )
        return (cache, board, corpus, None, limits.max_steps)


def timed(monkeypatch, plan, start, step):
    """(clock, seconds a step by point) with that clock, kept nowhere."""
    clock, ladder = Clock(start, step), plan.buckets(ROWS)
    monkeypatch.setattr(timing.decode, "decode_steps", clock.visit)
    monkeypatch.setattr(timing.time, "perf_counter", clock.perf_counter)
    setup = plan.program_for(ladder)
    found = timing.points(setup, ladder)
    table = cost_table.measure(found, timing._Clock(setup, ladder, None, sources=2), repeats=(1, 1))
    clock.calls = clock.calls[len(clock.calls) // 2 :]
    return clock, {point: table.seconds(*point) for point in found}


def test_a_step_s_seconds_leave_the_call_s_own_out(mesh, monkeypatch):
    clock, found = timed(
        monkeypatch, plan_of(stored_logprobs=2, accept="ratio_residual"), 100.0, 0.5
    )
    verify = {p: s for p, s in found.items() if not p.matching and p.width > 1}
    for point, seconds in found.items():
        # A verification is one call; of a decode loop only a step more is a step more.
        assert seconds == (100.5 if point in verify else 0.5)
    assert len(verify) == 1
    pending = [kwargs for _, pending, kwargs in clock.calls if pending]
    assert pending == [{"corpus": False, "width": R, "wide": True}]
    for shape, _, kwargs in clock.calls:
        assert shape[0] == ROWS
        assert kwargs["corpus"] == (kwargs["width"] == 2)


def test_plain_steps_are_timed_between_other_work(mesh, monkeypatch):
    """Every rung and window at width 1; medians of what was asked for, the first round apart."""
    plan = plan_of(row_buckets=2, cache_lengths=2)
    clock = Clock(100.0, 9.0)
    monkeypatch.setattr(timing.decode, "decode_steps", clock.visit)
    monkeypatch.setattr(timing.time, "perf_counter", clock.perf_counter)
    steps = timing.PlainSteps(plan, None, ROWS)
    for clock.step in (0.5, 4.0, 0.75):
        steps.time()
    found = [row[:4] for row in steps.table().to_json()]
    assert found == [[rows, slots, 1, False] for rows in (4, 8) for slots in (P + 2, P + 4)]
    assert {row[4] for row in steps.table().to_json()} == {0.75}
    assert not any(pending or known["corpus"] for _, pending, known in clock.calls)


def test_noise_that_turns_a_longer_call_shorter(mesh, monkeypatch):
    _, found = timed(monkeypatch, plan_of(tree=None, max_width=1, verify_width=1), 9.0, -0.5)
    # 1 + 8 steps took 4.5 seconds, one took 8.5.
    assert set(found.values()) == {4.5 / (1 + timing.STEPS)}


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)])
def test_programs_are_measured_once_and_kept(make_mesh, tmp_path, monkeypatch, shape):
    plan = plan_of()
    with jax.set_mesh(make_mesh(*shape)):
        weights = ref.policy(model=ref.ONE_LAYER)[1]

        def table(plan=plan, sources=2):
            return timing.cost_table(plan, weights, ROWS, sources=sources, directory=tmp_path)

        found = table().to_json()
        assert [Point(*row[:4]) for row in found] == points_of(plan)
        assert all(0 < row[4] < 60 for row in found)

        def none(*args, **kwargs):
            raise AssertionError("measured again")

        monkeypatch.setattr(timing.decode, "decode_steps", none)
        assert table().to_json() == found
        law = dataclasses.replace(plan.program.sampling, top_k=3)
        others = (
            {"sources": 3},
            {
                "plan": dataclasses.replace(
                    plan, program=dataclasses.replace(plan.program, sampling=law)
                )
            },
        )
        for changes in others:
            with pytest.raises(AssertionError, match="measured again"):
                table(**changes)
        with monkeypatch.context() as patch:
            patch.setattr(timing, "code", lambda: "another version")
            with pytest.raises(AssertionError, match="measured again"):
                table()
    with jax.set_mesh(make_mesh(1, 2, 1)), pytest.raises(AssertionError, match="measured again"):
        table()  # another mesh
    assert len(list(tmp_path.iterdir())) == 1
    assert np.isfinite([row[4] for row in found]).all()
