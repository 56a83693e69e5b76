"""Widths, probes and timing: by hand, by brute force, in simulated and in real rollouts."""

import dataclasses
import itertools
import json
import types

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import ONE_BUCKET, check_equal, common_prefix, history_of
from scheduler_cases import B, Planned, R, make_spec, run_rollout

from specrl_jax.process.runtime import compile_metrics
from specrl_jax.rollout.drafts.sources import SuffixDrafts
from specrl_jax.rollout.engine import speculation
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.speculation import TIMED_STEPS, Speculation, StepPlan, time_steps
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.types import Source

# Relative cost of a width-W step: two cores (27M parameters, 8 rows), and a device bound by memory.
CPU = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.3, 16: 3.6, 32: 6.5, 64: 12.9, 128: 23.7}
MEMORY_BOUND = {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.1, 16: 1.2, 32: 1.5}


def make_seconds(relative=CPU, rows=(1, 4, 16, 64, 128)) -> dict:
    pairs = itertools.product(rows, relative.items())
    return {(r, width): 1e-3 * (2 + 0.3 * r) * x for r, (width, x) in pairs}


def make_speculation(seconds, survival, row_steps=1e12, **fields) -> Speculation:
    """So much evidence that the prior does not count: s_k = survival[k - 1]."""
    shares = [row_steps * s for s in (1.0, *survival)]
    return Speculation(seconds, shares[:-1], shares[1:], **fields)


def draw(rng, chances, row_steps, width) -> np.ndarray:
    """Histogram of accepted tokens; chances[k]: to continue after k (the last one beyond)."""
    histogram = np.zeros(width, int)
    alive = row_steps
    for k in range(width):
        go_on = rng.binomial(alive, chances[min(k, len(chances) - 1)]) if k < width - 1 else 0
        histogram[k] = alive - go_on
        alive = go_on
    return histogram


def true_survival(chances, tokens) -> list[float]:
    padded = [*chances, *[chances[-1]] * tokens]
    return list(itertools.accumulate(padded[:tokens], lambda a, b: a * b))


# Acceptance -----------------------------------------------------------------------------------


def test_survival_by_hand():
    acceptance = Speculation()
    assert acceptance.survival(3) == [0, 0, 0]
    acceptance.observe([2, 1, 5], width=3)
    assert acceptance.reached == [8, 6]
    assert acceptance.accepted == [6, 5]
    first = 6 / 16
    second = (5 + 8 * first) / 14
    # A token that was never checked has the chance of the token before it.
    assert acceptance.survival(3) == pytest.approx([first, first * second, first * second**2])
    assert acceptance.expected_tokens(3) == pytest.approx(1 + first + first * second)
    assert acceptance.expected_tokens(1) == 1.0
    # A narrower step tells of the first token, and leaves what is known of the second.
    acceptance.observe([4, 4], width=2)
    fade = 0.5 ** (8 / speculation.HALF_LIFE)
    assert acceptance.reached == [8 * fade + 8, 6]
    assert acceptance.accepted == [6 * fade + 4, 5]
    # A plain step tells nothing.
    acceptance.observe([9], width=1)
    assert acceptance.reached == [8 * fade + 8, 6]


# Widths ---------------------------------------------------------------------------------------


def seconds_of(widths, rows=64) -> dict:
    return {(rows, width): seconds for width, seconds in widths.items()}


def test_the_worked_example_of_the_module():
    seconds = seconds_of({1: 10, 4: 15, 8: 23})
    chooser = make_speculation(seconds, [0.8, 0.64, 0.51, 0.41, 0.33, 0.26, 0.21])
    assert chooser.expected_tokens(4) == pytest.approx(2.95)
    assert chooser.expected_tokens(8) == pytest.approx(4.16)
    assert chooser.choose_width(64, (1, 4, 8)) == 4
    assert chooser.choose_width(64, (1,)) == 1
    chooser.seconds = None  # steps are plain until they are known
    assert chooser.choose_width(64, (1, 4, 8)) == 1


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
def test_the_width_is_the_best_by_brute_force(relative):
    rng = np.random.default_rng(5)
    seconds = make_seconds(relative)
    chosen = set()
    for _ in range(200):
        survival = list(np.cumprod(rng.beta(*rng.choice([0.3, 1, 4, 20], 2), size=127)))
        rows = int(rng.choice([1, 16, 64]))
        some = rng.choice(sorted(relative), rng.integers(1, 6), replace=False)
        widths = sorted({1, *some.tolist()})
        speeds = {w: (1 + sum(survival[: w - 1])) / seconds[rows, w] for w in widths}
        width = make_speculation(seconds, survival).choose_width(rows, widths)
        best = max(speeds.values())
        pays = best >= speculation.WIDTH_MARGIN * speeds[1]
        assert speeds[width] == pytest.approx(best if pays else speeds[1], rel=1e-9)
        chosen.add(width)
    assert chosen >= {1, 4, 8, 16, 32}


# Probes ---------------------------------------------------------------------------------------


def test_probes_by_hand():
    """One probe of 8 steps in 400, of the next two widths in turn; the first is immediate."""
    chooser = Speculation(seconds_of({1: 10.0, 2: 12.0, 4: 15.0, 8: 20.0}))
    widths = (1, 2, 4, 8)
    plan = chooser.plan_steps(64, widths)
    assert plan == StepPlan(2, 8, True)
    chooser.record_steps(plan, 8, [512, 0])
    plan = chooser.plan_steps(64, widths)
    assert plan == StepPlan(1, 400, False)
    chooser.record_steps(plan, 350, [0])  # the bucket ended
    plan = chooser.plan_steps(64, widths)
    assert plan == StepPlan(1, 50, False)
    chooser.record_steps(plan, 50, [0])
    plan = chooser.plan_steps(64, widths)
    assert plan == StepPlan(4, 8, True)
    chooser.record_steps(plan, 8, [512, 0, 0, 0])
    assert chooser.plan_steps(64, (1,)) == StepPlan(1, 0, False)


def test_wide_steps_are_reviewed_and_the_next_width_is_probed():
    seconds = seconds_of({1: 10.0, 2: 12.0, 4: 15.0, 8: 23.0})
    chooser = make_speculation(seconds, [0.9, 0.1], steps_since_probe=0)
    assert chooser.plan_steps(64, (1, 2)) == StepPlan(2, speculation.REVIEW_STEPS, False)
    assert chooser.plan_steps(64, (1, 2, 4, 8)).width == 2
    chooser.steps_since_probe = 390
    assert chooser.plan_steps(64, (1, 2, 4, 8)) == StepPlan(2, 10, False)
    chooser.steps_since_probe = 400
    assert chooser.plan_steps(64, (1, 2, 4, 8)) == StepPlan(4, 8, True)


class Simulation:
    """Decodes with drafts of known chances; sums expected seconds, also those of plain steps."""

    def __init__(self, relative=CPU, widths=(1, 2, 4, 8, 16), seed=0):
        self.chooser = Speculation(make_seconds(relative))
        self.widths = widths
        self.rng = np.random.default_rng(seed)
        self.seconds = 0.0
        self.plain_seconds = 0.0

    def decode(self, chances, rows, most=60):
        """Steps of a bucket that lasts `most` steps at most; returns their plan."""
        plan = self.chooser.plan_steps(rows, self.widths)
        steps = min(plan.max_steps or most, most)
        histogram = draw(self.rng, chances, rows * steps, plan.width)
        self.chooser.record_steps(plan, steps, histogram)
        known = self.chooser.seconds
        self.seconds += steps * known[rows, plan.width]
        self.plain_seconds += known[rows, 1] * (histogram @ np.arange(1, plan.width + 1)) / rows
        return plan

    def gain(self, chances, rows, rollouts):
        """Seconds of plain steps over those that were taken."""
        self.seconds = 0.0
        self.plain_seconds = 0.0
        plain = 60 * self.chooser.seconds[rows, 1]
        while self.plain_seconds < rollouts * plain:
            self.decode(chances, rows)
        return self.plain_seconds / self.seconds

    def best_gain(self, chances, rows):
        """Gain of the best width over plain steps, had it been known."""
        known = self.chooser.seconds
        return max(
            (1 + sum(true_survival(chances, w - 1))) * known[rows, 1] / known[rows, w]
            for w in self.widths
        )


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
@pytest.mark.parametrize("widths", [(1, 2, 4, 8), (1, 4, 8, 16, 32)])
@pytest.mark.parametrize("rows", [1, 128])
def test_bad_drafts_switch_themselves_off(relative, widths, rows):
    """The first rollouts lose little, and all later ones next to nothing."""
    simulation = Simulation(relative, widths)
    assert simulation.gain([0.0], rows, 3) > 0.90
    assert simulation.gain([0.0], rows, 300) > 0.97
    plans = [simulation.decode([0.0], rows) for _ in range(50)]
    assert {plan.width for plan in plans if not plan.probe} == {1}


@pytest.mark.parametrize("relative", [CPU, MEMORY_BOUND])
@pytest.mark.parametrize("chances", [[0.98], [0.6, 0.9], [0.9, 0.9, 0.9, 0.1], [0.5]])
@pytest.mark.parametrize("rows", [4, 128])
def test_good_drafts_are_decoded_wide(relative, chances, rows):
    simulation = Simulation(relative)
    best = simulation.best_gain(chances, rows)
    assert best > 1.15
    assert simulation.gain(chances, rows, 20) > 1 + 0.6 * (best - 1)
    assert simulation.gain(chances, rows, 200) > 0.93 * best


@pytest.mark.parametrize("rows", [4, 128])
def test_a_source_that_turns_is_found_out(rows):
    """By probes where it turns good; where it turns bad, within a rollout."""
    simulation = Simulation()
    simulation.gain([0.0], rows, 100)
    best = simulation.best_gain([0.9], rows)
    assert simulation.gain([0.9], rows, 150) > 0.7 * best
    assert simulation.gain([0.9], rows, 100) > 0.93 * best
    assert simulation.gain([0.0], rows, 30) > 0.75
    assert simulation.gain([0.0], rows, 300) > 0.97


# State ----------------------------------------------------------------------------------------


def use(chooser, rng, rollouts) -> list:
    """Rollouts of changing drafts; every choice."""
    choices = []
    for i in rollouts:
        chances = [[0.0], [0.9], [0.9, 0.9, 0.9, 0.1]][(i // 7) % 3]
        rows = int(rng.choice([16, 64]))
        before = chooser.host()
        steps = chooser.plan_steps(rows, (1, 4, 8))
        assert chooser.host() == before  # planning changes nothing
        number = int(rng.integers(0, 99))
        chooser.record_steps(steps, number, draw(rng, chances, rows * number, steps.width))
        choices.append(steps)
    return choices


@pytest.mark.parametrize(("stop", "known"), [(0, True), (1, False), (5, True), (23, True)])
def test_a_resumed_run_chooses_alike(stop, known):
    seconds = make_seconds(rows=(16, 32, 64)) if known else None
    straight = Speculation(seconds)
    rng = np.random.default_rng(9)
    expected = use(straight, rng, range(60))
    assert {choice.width for choice in expected} >= {1, 4}

    first = Speculation(seconds)
    rng = np.random.default_rng(9)
    choices = use(first, rng, range(stop))
    text = json.dumps(first.host())
    resumed = Speculation().restore(json.loads(text))
    assert json.dumps(resumed.host()) == text
    assert choices + use(resumed, rng, range(stop, 60)) == expected
    assert resumed.host() == straight.host()


# Timing ---------------------------------------------------------------------------------------


@pytest.fixture
def timed(mesh):
    """(spec, inputs) with tree drafts; all rows have earlier responses."""
    spec = ref.make_spec(
        ref.ONE_LAYER, accept="match", slots=4, prompt_slots=3, group=2, row_buckets=3,
        tree=ref.TREE, max_width=4,
    )  # fmt: skip
    prompts = ref.make_prompts([[2], [2, 1], [1], [1, 1]] * 4, 3)
    drafts = ref.plain_drafts(np.full((32, 4), 5), np.full(32, 4))
    return spec, Requests(prompts, NoiseKey(jax.random.key(0), 1), drafts)


def test_seconds_by_hand(timed, monkeypatch):
    """Of a step, as one of a call, by a clock that moves in programs alone; the fastest counts."""
    spec, inputs = timed
    clock = types.SimpleNamespace(now=0.0, late=99.0)

    def decode(runner, stop, width):
        assert (int(stop.max_unfinished), int(stop.max_left)) == (-1, -1)  # it takes all steps
        clock.now += 0.01 + int(stop.max_steps) * (runner.size + width / 8) + clock.late
        clock.late = 0.0

    monkeypatch.setattr(speculation.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(Runner, "decode", decode)
    weights = ref.policy(model=ref.ONE_LAYER)[1]
    seconds = time_steps(spec, weights, inputs)
    expected = {(rows, width): rows + width / 8 + 0.01 / TIMED_STEPS
                for rows in (32, 16, 8) for width in (1, 2, 4)}  # fmt: skip
    assert seconds == pytest.approx(expected)


def test_what_a_rollout_ran_is_not_compiled_again(timed):
    """Nor does timing consume the run's state."""
    spec, inputs = timed
    spec = dataclasses.replace(spec, row_buckets=1)
    weights = ref.policy(model=ref.ONE_LAYER)[1]
    compile_metrics()
    for width in spec.buckets(32).widths:
        chooser = Planned(lambda *_, width=width: (width, 0))
        generate(spec, weights, inputs, speculation=chooser)
    metrics = compile_metrics()
    assert metrics["compile/built"] + metrics["compile/read"] > 0
    seconds = time_steps(spec, weights, inputs)
    metrics = compile_metrics()
    assert metrics["compile/built"] + metrics["compile/read"] == 0
    assert set(seconds) == {(32, width) for width in (1, 2, 4)}
    assert min(seconds.values()) > 0
    result = generate(spec, weights, inputs, speculation=Speculation(seconds))
    assert int(np.sum(np.asarray(result.rollout.lens))) >= 32


# In rollouts: no choice changes a token -------------------------------------------------------


def hopeful(wide) -> Speculation:
    """One that expects suffix drafts to be right, and has just probed. wide: seconds of steps of
    width 2 and 4; of 1: one."""
    steps = {(B, 1): 1.0, (B, 2): wide[0], (B, 4): wide[1]}
    return Speculation(steps, [10.0] * 3, [9.0] * 3, steps_since_probe=0)


@pytest.mark.parametrize("pays", [False, True])
def test_wide_steps_are_taken_where_they_pay(mesh, rollouts, monkeypatch, pays):
    """The draft source's state is made for the first step that reads it."""
    made = []
    init = SuffixDrafts.init
    monkeypatch.setattr(SuffixDrafts, "init", lambda *args: made.append(args) or init(*args))
    chooser = hopeful((1.01, 1.02) if pays else (10.0, 20.0))
    spec = make_spec(4, **ONE_BUCKET)
    history = history_of(spec, rollouts.endless.tokens.ids, rollouts.endless.lens)
    rollout, stats = run_rollout(spec, history=history, speculation=chooser)
    check_equal(rollout, rollouts.plain, but=("sources",))
    assert {width for *_, width, _ in stats.decode_runs} == {4 if pays else 1}
    assert len(made) == pays
    assert stats.drafted_tokens == np.sum(np.asarray(rollout.tokens.sources) == Source.DRAFTED)
    assert (stats.drafted_tokens > 0) == pays
    if pays:
        assert stats.decode_steps <= R / 2  # the plain responses are known
        # Rows that are done do not count.
        assert 0 < chooser.reached[0] < stats.row_steps


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_no_choice_changes_a_token(make_mesh, rollouts, shape):
    """Widths and steps are chosen at random."""
    plain, endless, old = rollouts
    kept = common_prefix(old.tokens.ids, old.lens, plain.tokens.ids, plain.lens)
    rejected = (kept < old.lens) & (kept < plain.lens)  # of a row's draft one token at most
    widths = set()
    with jax.set_mesh(make_mesh(*shape)):
        spec = make_spec(4, max_rows=16)
        for seed in range(4):
            rng = np.random.default_rng(seed)
            whims = Planned(lambda widths, _: (int(rng.choice(widths)), int(rng.integers(0, 4))))  # noqa: B023
            history = history_of(spec, endless.tokens.ids, endless.lens)
            drafts = ref.put_rows(old)
            rollout, stats = run_rollout(spec, drafts=drafts, history=history, speculation=whims)
            check_equal(rollout, plain, but=("sources", "prefix_lens"))
            np.testing.assert_array_equal(rollout.prefix_lens, kept)
            sources = np.asarray(rollout.tokens.sources)
            assert stats.drafted_tokens == np.sum(sources == Source.DRAFTED)
            assert stats.accepted_tokens == np.sum(sources == Source.REUSED) == kept.sum() > 0
            assert stats.verified_tokens == kept.sum() + rejected.sum() > stats.accepted_tokens
            widths |= {width for *_, width, _ in stats.decode_runs}
    assert widths == {1, 2, 4}
