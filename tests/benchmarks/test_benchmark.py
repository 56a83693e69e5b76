"""The benchmark's arithmetic by hand, and the whole command at its smallest."""

import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
import scipy.stats
from small_runs import small_config

from specrl_jax.benchmarks import handwritten_loop as benchmark_floor
from specrl_jax.benchmarks import scenes as benchmark_scenes
from specrl_jax.benchmarks import timing as benchmark
from specrl_jax.benchmarks import trained as benchmark_trained
from specrl_jax.benchmarks.policies import SIZES
from specrl_jax.benchmarks.steps import forward_flops
from specrl_jax.benchmarks.timing import Goal
from specrl_jax.rollout.adaptive.step_costs import Point, StepCosts
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.types import Source

ROOT = pathlib.Path(__file__).parents[2]
SAMPLED, DRAFTED, REUSED = Source.SAMPLED, Source.DRAFTED, Source.REUSED


# Needed steps, ideal, predictions ------------------------------------------------------------


def test_steps_begin_behind_the_tokens_that_ended_one():
    """Row 0 was verified: 2 reused, one drawn by the pass, then a step of 3 tokens and one of 1.
    Row 1 had no draft: steps of 1, 2 and 1 tokens. Row 2 was reused whole."""
    sources = np.array([
        [REUSED, REUSED, SAMPLED, DRAFTED, DRAFTED, SAMPLED, SAMPLED],
        [SAMPLED, DRAFTED, SAMPLED, DRAFTED, SAMPLED, SAMPLED, SAMPLED],
        [REUSED, REUSED, REUSED, SAMPLED, SAMPLED, SAMPLED, SAMPLED],
    ])  # fmt: skip
    run = types.SimpleNamespace(
        stats=Stats(verified_tokens=21), lens=np.array([7, 4, 3]), prefix_lens=np.array([2, 0, 3])
    )
    drafts = types.SimpleNamespace(lens=np.array([5, 0, 3]))
    first = benchmark.first_steps(run, drafts)
    assert first.tolist() == [3, 0, 3]
    starts = benchmark.step_starts(sources, run.lens, first, passes=True)
    assert [np.flatnonzero(row).tolist() for row in starts] == [[3, 6], [0, 1, 3], []]
    # Without passes every reused token was a step.
    run.stats = Stats()
    first = benchmark.first_steps(run, drafts)
    starts = benchmark.step_starts(sources, run.lens, first, passes=False)
    assert [np.flatnonzero(row).tolist() for row in starts] == [
        [0, 1, 2, 3, 6],
        [0, 1, 3],
        [0, 1, 2],
    ]


LADDER = Buckets.build(4, 2, 4, row_buckets=2, cache_lengths=2, max_width=2)
# Rows 4 and 2, windows of 2 and 4 response tokens: 4 and 6 slots.
TABLE = StepCosts({
    Point(4, 4, 1, False): 10.0, Point(4, 6, 1, False): 12.0, Point(4, 4, 2, True): 15.0,
    Point(4, 6, 2, True): 18.0, Point(2, 4, 1, False): 6.0, Point(2, 6, 1, False): 8.0,
    Point(2, 4, 2, True): 11.0, Point(2, 6, 2, True): 30.0,
})  # fmt: skip


def starts_of(*lens: int) -> np.ndarray:
    """Rows that need a step for every one of their tokens."""
    return np.arange(4)[None, :] < np.array(lens)[:, None]


def test_ideal_worked_rows():
    # Four rows of 1, 1, 2, 4 tokens: all at 10, two at 6, then one at 8 and 8 in the deeper window.
    assert benchmark.ideal_seconds(starts_of(1, 1, 2, 4), [1] * 9, LADDER, TABLE) == 10 + 6 + 8 + 8
    # A verified row begins in the deeper window.
    late = np.array([[False, False, False, True], [True, False, False, False]])
    assert benchmark.ideal_seconds(late, [1], LADDER, TABLE) == 8
    # The rollout's widths: 2 at its first step, 1 from then on.
    assert benchmark.ideal_seconds(starts_of(1, 1, 2), [2, 1], LADDER, TABLE) == 15 + 6
    # The cheapest rung that holds the rows, here not the smallest.
    assert benchmark.ideal_seconds(starts_of(0, 3), [2], LADDER, TABLE) == 11 + 11 + 18
    # Six rows in rungs of four: 10 and 6.
    assert benchmark.ideal_seconds(starts_of(*[1] * 6), [1], LADDER, TABLE) == 16
    assert benchmark.ideal_seconds(starts_of(0, 0), [], LADDER, TABLE) == 0


def test_prediction_worked_row():
    stats = Stats(visits=[(4, 4, 1, 3), (2, 6, 1, 2), (4, 4, 2, 1)])
    assert benchmark.predicted_seconds(stats, TABLE) == 3 * 10 + 2 * 8 + 15
    assert benchmark.step_widths(stats) == [1, 1, 1, 1, 1, 2]


def make_run(total: float, **changes) -> benchmark.Run:
    seconds = dict.fromkeys(benchmark.PHASES, total) | {"total": total}
    values = {
        "tokens": np.zeros((2, 4), np.int32),
        "lens": np.array([2, 4], np.int32),
        "prefix_lens": np.zeros(2, np.int32),
        "sources": np.zeros((2, 4), np.int8),
        "sampling_logprobs": np.zeros((2, 4), np.float32),
    }
    return benchmark.Run(seconds, changes.pop("stats", Stats()), **values | changes)


def test_a_case_worked_row():
    """Two rows of 2 and 4 tokens, one token a step, all six row steps needed but two."""
    stats = Stats(
        decode_steps=4, row_steps=8, decode_seconds=40.0, visits=[(2, 4, 1, 2), (2, 6, 1, 2)]
    )
    case = benchmark.Case("plain", None, TABLE)
    found = benchmark.describe(case, [make_run(s, stats=stats) for s in (50, 20, 40)], LADDER)
    assert found["seconds"]["total"] == {"median": 40, "min": 20, "max": 50}
    assert found["tokens"] == found["decoded_tokens"] == found["needed_row_steps"] == 6
    assert found["tokens_per_second"] == 6 / 40
    assert found["tokens_per_row_step"] == 6 / 8
    assert found["steps_by_width"] == {"1": 4}
    assert found["steps_by_rows"] == {"2": 4}
    assert found["predicted_decode_seconds"] == found["ideal_decode_seconds"] == 6 + 6 + 8 + 8
    assert found["predicted_over_actual"] == found["ideal_share"] == 28 / 40


def test_ratios_are_taken_within_a_pass():
    slow, fast = [make_run(s) for s in (10, 30, 20)], [make_run(s) for s in (5, 10, 20)]
    expected = {"median": 2, "min": 1, "max": 3, "low": 1, "high": 3}
    assert benchmark.ratios(slow, fast) == expected


@pytest.mark.parametrize("count", [5, 6, 9, 21, 100, 3000])
def test_the_interval_of_a_median_is_as_sure_as_it_says_and_no_wider(count):
    """By scipy's binomial law: k - 1 or fewer of n values on one side, twice."""
    values = np.random.default_rng(0).permutation(count)
    low, high = benchmark.median_interval(values)
    assert low + high == count - 1
    assert low == max(scipy.stats.binom.ppf(0.025, count, 0.5) - 1, 0)
    if count > 5:
        assert 2 * scipy.stats.binom.cdf(low, count, 0.5) <= 0.05
    surer, _ = benchmark.median_interval(values, 0.999)
    assert surer == max(scipy.stats.binom.ppf(0.0005, count, 0.5) - 1, 0)


@pytest.fixture
def named_runs(monkeypatch):
    """Cases whose runs are their names, which have no arrays to share."""
    monkeypatch.setattr(benchmark, "compiled", lambda: 0)
    monkeypatch.setattr(benchmark, "run_case", lambda inputs, case: case.name)
    monkeypatch.setattr(benchmark, "_sharing", lambda run, last: run)


def test_cases_run_in_turn_and_a_run_that_compiled_does_not_count(monkeypatch, named_runs):
    ran, programs = [], iter([0, 0, 0, 1, 1, 1, *[1] * 100])
    monkeypatch.setattr(benchmark, "compiled", lambda: next(programs))
    monkeypatch.setattr(
        benchmark, "run_case", lambda inputs, case: ran.append(case.name) or case.name
    )
    a, b, c = (benchmark.Case(name, None, TABLE) for name in "abc")
    beside = lambda: ran.append("|")  # noqa: E731
    found = benchmark.time_blocks(None, [[a], [b, c], [b]], 2, lambda line: None, beside)
    # Once each; then a without compiling, b again because it compiled, and so on; c before b next.
    assert ran == [*"abc", *"|abbcb", *"|acbb"]
    assert found == [[["a", "a"]], [["b", "b"], ["c", "c"]], [["b", "b"]]]


def test_runs_share_arrays_that_are_equal(monkeypatch):
    """Of three runs the second has the first's arrays; the third drafted, and shares the rest."""
    drafted = np.full((2, 4), DRAFTED, np.int8)
    runs = iter([make_run(9), make_run(3), make_run(2), make_run(1, sources=drafted)])
    monkeypatch.setattr(benchmark, "compiled", lambda: 0)
    monkeypatch.setattr(benchmark, "run_case", lambda inputs, case: next(runs))
    case = benchmark.Case("a", None, TABLE)
    (((first, second, third),),) = benchmark.time_blocks(None, [[case]], 3, lambda line: None)
    assert [run.seconds["total"] for run in (first, second, third)] == [3, 2, 1]
    assert second.sources is first.sources
    assert third.tokens is first.tokens
    assert third.sources is drafted


def test_cases_that_have_had_runs_enough_leave(named_runs):
    a, b, c = (benchmark.Case(name, None, TABLE) for name in "abc")
    enough, lines = [[1], [2, 3]], []

    def leave(block: int, runs: list) -> list[int]:
        return [i for i, of_case in enumerate(runs) if len(of_case) == enough[block][i]]

    blocks = [[a], [b, c]]
    found = benchmark.time_blocks(None, blocks, 9, lines.append, leave=leave)
    assert found == [[["a"]], [["b"] * 2, ["c"] * 3]]
    assert [line.split(", ")[-1] for line in lines[1:]] == [
        f"{n} runs in the next" for n in (2, 1, 0)
    ]


def test_an_interrupt_leaves_the_passes_that_are_over(monkeypatch, named_runs):
    ran: list[str] = []

    def run_case(inputs, case):
        if len(ran) == stop:
            raise KeyboardInterrupt
        ran.append(case.name)
        return case.name

    monkeypatch.setattr(benchmark, "run_case", run_case)
    a, b = (benchmark.Case(name, None, TABLE) for name in "ab")
    stop = 7  # after two runs to compile, two passes, and one run of the third
    assert benchmark.time_blocks(None, [[a, b]], 9, lambda line: None) == [[["a"] * 2, ["b"] * 2]]
    ran, stop = [], 3
    with pytest.raises(KeyboardInterrupt):
        benchmark.time_blocks(None, [[a, b]], 9, lambda line: None)


# Goals ---------------------------------------------------------------------------------------


def test_goals_are_met_at_their_bound():
    assert Goal("x", 0.98, 0.98).met
    assert not Goal("x", 0.979, 0.98).met
    assert Goal("x", 0.3, 0.3, most=True).met
    assert not Goal("x", 0.31, 0.3, most=True).met
    assert Goal("x", 0.31, 0.3, most=True, note="8 rows").line() == (
        "MISSED  x: 0.310 (<= 0.3; 8 rows)"
    )
    assert Goal("x", 1, 0.5).record()["met"]


# Whole scenes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """The command itself, its smallest sizes: (record, text)."""
    path = tmp_path_factory.mktemp("benchmark") / "record.json"
    done = run_command(
        "rollout", "--scene=lengths,floor,verify", "--rows=8", "--prompt-len=3",
        "--response-len=12", "--row-rungs=2", "--windows=1", "--max-width=2", "--rates=0,1",
        "--repeats=1", f"--json={path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def run_command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / "benchmark.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_backend_optimization_level=0",
        },
    )


def test_the_command_measures_every_case(command):
    record, _ = command
    assert record["size"] == "tiny"
    cells = record["scenes"]["lengths"]["cells"]
    kinds = ["previous, match", "previous, ratio", "tree", "previous+tree"]
    expected = [("naive", None), ("ladder", None)]
    expected += [(kind, lost) for lost in (0.0, 1.0) for kind in kinds]
    assert [(cell["name"], cell["lost"]) for cell in cells] == expected
    assert len(record["scenes"]["lengths"]["over_itself"]) == 2  # the ladder's, once a rate
    lens = record["scenes"]["lengths"]["setting"]["lens"]
    assert lens["max"] == 12
    for cell in cells:
        assert cell["tokens"] == round(8 * lens["mean"])
        assert cell["row_steps"] >= cell["needed_row_steps"]
        assert sum(cell["steps_by_width"].values()) == cell["decode_steps"]
        in_passes = cell["reused_tokens"] if cell["verified_tokens"] else 0
        assert cell["decoded_tokens"] + in_passes <= cell["tokens"]


def test_the_naive_loop_computes_every_row_to_the_end(command):
    naive, ladder = command[0]["scenes"]["lengths"]["cells"][:2]
    assert naive["row_steps"] == 8 * 12
    assert naive["steps_by_rows"] == {"8": 12}
    assert naive["needed_row_steps"] == ladder["needed_row_steps"] == naive["tokens"]
    assert ladder["row_steps"] < naive["row_steps"]


def test_drafts_that_lost_nothing_are_kept_and_others_are_not(command):
    cells = command[0]["scenes"]["lengths"]["cells"]
    previous = {(c["name"], c["lost"]): c for c in cells if c["name"].startswith("previous, ")}
    for kind in ("previous, match", "previous, ratio"):
        kept, lost = previous[kind, 0.0], previous[kind, 1.0]
        assert kept["reused_tokens"] == kept["tokens"]
        assert lost["reused_tokens"] < lost["tokens"] / 2
    assert previous["previous, match", 1.0]["reused_tokens"] == 0


def test_the_command_prints_cases_and_goals(command):
    record, text = command
    lines = text.splitlines()
    for cell in record["scenes"]["lengths"]["cells"]:
        lost = "-" if cell["lost"] is None else f"{cell['lost']:.0%}"
        seconds = f"{cell['seconds']['total']['median']:.3f}"
        assert [c for c in lines if c.startswith(cell["name"]) and f"{lost} " in c and seconds in c]
    goals = [line for line in lines if line.startswith(("met ", "MISSED "))]
    lengths, floors = record["scenes"]["lengths"], record["scenes"]["floor"]["rungs"]
    pooled = lengths["as_ladder"] is not None  # whether any cell took the ladder's steps: by clocks
    assert len(goals) == len(record["goals"]) == 2 + pooled + len(floors)
    for line, goal in zip(goals, record["goals"]):
        assert line.startswith("met" if goal["met"] else "MISSED")
        assert goal["name"] in line


def test_single_programs_add_up(command):
    scenes = command[0]["scenes"]
    (rung,) = scenes["floor"]["rungs"]
    assert (rung["rows"], rung["slots"]) == (8, 15)
    assert set(rung["step_seconds"]) == {"engine", *benchmark_floor.SAMPLERS}
    (rung,) = scenes["verify"]["rungs"]
    assert (rung["rows"], rung["slots"]) == (8, 3 + 128)
    # Ratios are those of single passes, so that medians need not divide; extremes bound them.
    for rule, cost in rung["verified_over_decoded"].items():
        passes, steps = rung["pass_seconds"][rule], rung["step_seconds"]
        assert cost["min"] >= passes["min"] / steps["max"] / 128
        assert cost["max"] <= passes["max"] / steps["min"] / 128
    # A pass of the same 8 x 128 tokens in products of 128 x 2 x 256 weights, each 2 operations.
    ours, model = scenes["verify"]["rungs"][0], SIZES["tiny"].model
    share = forward_flops(model, 1, 1, ours["slots"], head=True) / (2 * 128 * 2 * 256) / 128
    product, steps, alone = (
        ours[name] for name in ("product_seconds", "step_seconds", "products_over_decoded")
    )
    assert alone["min"] >= share * product["min"] / steps["max"] * (1 - 1e-9)
    assert alone["max"] <= share * product["max"] / steps["min"] * (1 + 1e-9)


@pytest.fixture(scope="module")
def trained(make_mesh, tmp_path_factory):
    """Two passes of a small run one large step after its drafts, read back from JSON."""
    config = small_config({"rollout.draft": "previous", "updates.learning_rate": 0.1})
    with jax.set_mesh(make_mesh(1, 1, 1)):
        record, text = benchmark_scenes.trained(
            config, repeats=2, drift=1, tables=tmp_path_factory.mktemp("tables"),
            log=lambda line: None,
        )  # fmt: skip
    return json.loads(json.dumps(record, allow_nan=False))["scenes"]["trained"], text


def test_trained_cases(trained):
    record, text = trained
    plain, *drafted = record["cells"]
    assert [cell["name"] for cell in record["cells"]] == ["plain", "ℓ=1", "ℓ=inf"]
    assert record["setting"]["drift_steps"] == 1
    assert record["config"]["updates"]["learning_rate"] == 0.1
    assert plain["reused_tokens"] == plain["verified_tokens"] == 0
    assert 0 < drafted[0]["reused_tokens"] < drafted[1]["reused_tokens"]
    written = record["setting"]["draft_len_mean"] * record["setting"]["rows"]
    assert drafted[1]["reused_tokens"] == pytest.approx(written)
    assert drafted[1]["metrics"]["rollout/draft_accept_rate"] == 1
    heading = next(line for line in text.splitlines() if line.split()[:1] == ["plain"])
    assert heading.split() == [cell["name"] for cell in record["cells"]]


def test_trained_speedups_follow_from_their_parts(trained):
    cells = trained[0]["cells"]
    token = cells[0]["seconds"]["decode"]["median"] / cells[0]["tokens"]
    dearest = max(cell["seconds"]["verify"]["median"] for cell in cells)
    for cell in cells:
        verify = cell["seconds"]["verify"]["median"]
        if cell["reused_tokens"] and not cell["verified_tokens"]:
            verify = dearest
        parts = cell["seconds"]["prefill"]["median"] + verify
        decoded = cell["tokens"] - cell["reused_tokens"]
        best = cells[0]["seconds"]["total"]["median"] / (parts + decoded * token)
        # At least 1: whoever has drafts may leave them alone.
        assert cell["best_over_plain"] == pytest.approx(max(best, 1.0))
    goals = benchmark_trained.goals(trained[0], "cpu")
    shares = [c["over_plain"]["median"] / c["best_over_plain"] for c in cells[1:]]
    assert [(goal.figure, goal.bound) for goal in goals] == [(share, 0.9) for share in shares]
    assert "goals\n" in trained[1]
    assert benchmark_trained.goals(trained[0], "gpu") == []


def test_rules_keep_what_they_promise(make_mesh):
    """Lenience keeps more, and block verification more than token by token, of the same drafts."""
    config = small_config({"updates.learning_rate": 0.1, "rollout.stored_logprobs": 8})
    with jax.set_mesh(make_mesh(1, 1, 1)):
        record, text = benchmark_scenes.rules(config, repeats=4, drift=1, log=lambda line: None)
    found = json.loads(json.dumps(record, allow_nan=False))["scenes"]["rules"]
    lenient, strict, residual, block, match = (row["kept"] for row in found["rules"])
    assert lenient > strict > match > 0
    assert block > residual > match
    for row, line in zip(found["rules"], text.splitlines()[-5:], strict=True):
        assert line.startswith(row["rule"])
        assert f"{row['kept']:.2f}" in line
        assert row["least"] <= row["kept"] <= row["most"]
        of_draft = row["kept"] / found["setting"]["draft_len_mean"]
        assert row["kept_of_draft"] == pytest.approx(of_draft)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout", "--repeats=0"], "--repeats must be >= 1, got 0"),
        (["rollout", "--lenience=nan"], "--lenience must be >= 0, got nan"),
        (["rollout", "--preset=large"], "preset must be one of"),
        (
            ["rollout", "--scene=trained", "--config.rollout.group=4"],
            "rollout.group is not a field of the config",
        ),
        (["rollout", "--scene=width"], "--scene must be of lengths, floor"),
        (["rollout", "--scene=floor,trained"], "--scene=trained must go alone"),
        (["rollout", "--scene=rules,floor"], "--scene=rules must go alone"),
        (["rollout", "--scene=device"], "--scene=device needs a GPU or TPU"),
        (["rollout", "--size=huge"], "--size must be one of"),
        (["rollout", "--rates=few"], "--rates must be shares as in 0,0.25, got 'few'"),
        (["rollout", "--json=/nowhere/x.json"], "--json: no directory /nowhere"),
        (["rollout", "--until-sure"], "--until-sure needs --repeats >= 11: fewer passes tell"),
        (["rollout", "--wide=4"], "unknown arguments: --wide=4\n"),
        (
            ["rollout", "--until-shure"],
            "unknown arguments: --until-shure, did you mean --until-sure?",
        ),
        (["speed"], "invalid choice: 'speed'"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    done = run_command(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
