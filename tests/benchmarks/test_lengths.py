"""What the benchmarks run (lengths, drafts, policies), and what its figures are held against."""

import dataclasses
import functools
import math
import types

import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.benchmarks import lengths as benchmark_lengths
from specrl_jax.benchmarks import steps as benchmark_steps
from specrl_jax.benchmarks import timing as benchmark
from specrl_jax.benchmarks.policies import choose

# Lengths and drafts --------------------------------------------------------------------------


def test_lengths_worked_row():
    """z of 1/8, 3/8, ...: -1.150, -0.319, ...; 4 · 8^(z / 1.150) is 0.5, 2.25, 7.12, 32."""
    assert sorted(benchmark_lengths.long_tailed(4, 32, 4.0).tolist()) == [1, 2, 7, 32]


def test_lengths_are_lognormal():
    lens = np.sort(benchmark_lengths.long_tailed(4096, 8192, 1024.0))
    assert lens[-1] == 8192
    assert np.median(lens) == pytest.approx(1024, rel=1e-3)
    # The quantile at z = 1 is as far above the median as the one at -1 is below, in logarithms;
    # the last of 4096 lies at z = 3.6676.
    for share, z in ((0.841345, 1.0), (0.158655, -1.0), (0.977250, 2.0)):
        expected = 1024 * 8 ** (z / 3.6676)
        assert lens[round(share * 4096)] == pytest.approx(expected, rel=3e-3)


def test_lengths_come_in_random_order():
    first, second = (benchmark_lengths.long_tailed(32, 96, 12.0, seed) for seed in (0, 1))
    assert first.tolist() != second.tolist()
    assert sorted(first) == sorted(second)
    assert first.tolist() != sorted(first)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.5, 1.0])
def test_corruption_replaces_its_share_by_other_tokens(rate):
    tokens = np.random.default_rng(0).integers(0, 7, (100, 400))
    found, replaced = benchmark_lengths.corrupt(tokens, rate, 7, np.random.default_rng(1))
    assert np.array_equal(found != tokens, replaced)
    assert found.min() >= 0
    assert found.max() < 7
    deviation = math.sqrt(rate * (1 - rate) / tokens.size)
    assert abs(replaced.mean() - rate) <= 4 * deviation
    if rate == 1.0:  # each of the six others alike, of 40,000
        shifts = np.bincount(((found - tokens) % 7).ravel(), minlength=7)
        assert shifts[0] == 0
        assert np.sum((shifts[1:] - 40_000 / 6) ** 2 / (40_000 / 6)) < 20.5  # χ², 5 d.o.f., 0.999


def test_drafts_and_tree_read_copies_of_their_own(mesh):
    rng = np.random.default_rng(0)
    plain = types.SimpleNamespace(
        tokens=rng.integers(0, 16, (8, 6)).astype(np.int32),
        lens=np.arange(1, 9, dtype=np.int32).clip(max=6),
        sampling_logprobs=-rng.random((8, 6)).astype(np.float32),
    )
    plan = ref.make_plan(group=4)
    drafts, (tokens, lens) = benchmark_lengths.make_drafts(plain, 0.5, plan, rng)
    replaced = np.asarray(drafts.tokens) != plain.tokens
    logprobs = np.asarray(drafts.sampling_logprobs)
    assert np.all(logprobs[replaced] == 0)
    assert np.array_equal(logprobs[~replaced], plain.sampling_logprobs[~replaced])
    assert np.array_equal(drafts.lens, plain.lens)
    assert tokens.shape == (2, 4, 6)
    assert np.array_equal(lens, plain.lens.reshape(2, 4))
    stored = np.asarray(tokens).reshape(8, 6)
    assert not np.array_equal(stored, drafts.tokens)
    assert 0 < np.mean(stored != plain.tokens) < 1


# Goals ---------------------------------------------------------------------------------------


def lengths_record(rows: int = 32, worst: float = 0.9, runs: int = 6):
    ratio = lambda x: {"median": x, "low": x - 0.01, "high": x + 0.02}  # noqa: E731
    cell = lambda name, lost, over, same=False: {  # noqa: E731
        "name": name, "lost": lost, "over_ladder": ratio(over), "over_naive": ratio(2 * over),
        "as_ladder": same, "runs": runs,
    }  # fmt: skip
    ladder = {"name": "ladder", "lost": None, "over_naive": ratio(2.5), "ideal_share": 0.85}
    cells = [
        {"name": "naive", "lost": None},
        ladder,
        cell("tree", 0.0, 2.6),
        cell("tree", 0.5, worst),
    ]
    return {
        "setting": {"rollout": {"rows": rows}},
        "cells": [*cells, cell("previous", 0.5, 0.97), cell("tree", 0.95, 0.8, same=True)],
        "as_ladder": {"cells": 1, "over_ladder": ratio(0.99)},
        "over_itself": [ratio(x) for x in (1.01, 0.975, 1.0)],
    }


def test_goals_of_lengths():
    found = benchmark_lengths.goals("27m", lengths_record(), "cpu")
    # The worst of all cells counts, whatever those of the ladder's steps say together.
    figures = [(0.85, True), (2.5, True), (0.8, False), (0.99, True)]
    assert [(g.figure, g.met) for g in found] == figures
    worst = "tree, 95% lost, 95 % sure of 0.79-0.82; 3 of 4 below"
    assert found[2].note == f"{worst}; the ladder over itself 0.975 to 1.010"
    assert found[3].note == "1 of 4, 95 % sure of 0.98-1.01"
    # Bounds of five passes or fewer are the least and the most, and not so sure.
    found = benchmark_lengths.goals("27m", lengths_record(runs=5), "cpu")
    assert found[3].note == "1 of 4, of 0.98-1.01"
    # The comparison with the naive loop is promised for one size, that with trees for a GPU.
    record = lengths_record(rows=8, worst=1.1) | {"as_ladder": None}
    found = benchmark_lengths.goals("27m", record, "gpu")
    assert [(g.figure, g.met) for g in found] == [(0.85, True), (0.8, False), (2.6, True)]
    assert found[-1].note == "0% lost"


def test_cells_of_the_ladders_steps_tell_together():
    run = lambda total: types.SimpleNamespace(seconds={"total": total})  # noqa: E731
    runs = lambda *totals: [run(total) for total in totals]  # noqa: E731
    cells = [{"as_ladder": same} for same in (True, False, True, False, False, False)]
    ladder, *others = (types.SimpleNamespace() for _ in range(4))
    block = [ladder, *others[:2], ladder, others[2]]
    times = [
        [runs(0.5, 4.0), runs(1.0, 3.0), runs(0.1, 0.1), runs(2.0, 1.0), runs(3.0, 5.0)],
        [runs(1.0, 2.0), runs(7.0, 7.0), runs(7.0, 7.0), runs(1.0, 2.0), runs(7.0, 7.0)],
    ]
    by_rate = [benchmark_lengths._Timed.of(0.5, block, of_block) for of_block in times]
    assert by_rate[0].case is ladder
    assert by_rate[0].ladder == [times[0][0], times[0][3]]
    assert by_rate[0].drafted == list(zip(others, [times[0][1], times[0][2], times[0][4]]))
    np.testing.assert_allclose([timed.ladder_seconds for timed in by_rate], [[1.0, 2.0]] * 2)
    found = benchmark_lengths._as_ladder(cells, by_rate)
    # The ladder's 1 and 2 s over means of 2 and 4 s; the second block has no such cell.
    ratio = {"median": 0.5, "min": 0.5, "max": 0.5, "low": 0.5, "high": 0.5}
    assert found == {"cells": 2, "over_ladder": pytest.approx(ratio)}
    assert benchmark_lengths._as_ladder([{"as_ladder": False}] * 6, by_rate) is None
    # A case that left after the first pass counts there alone: 1 s over a mean of 2 s, 2 s over 5.
    del times[0][1][1:]
    found = benchmark_lengths._as_ladder(cells, by_rate)["over_ladder"]
    assert (found["min"], found["max"]) == pytest.approx((0.4, 0.5))


def test_the_ladder_alone_is_held_against_steps_of_the_passes(monkeypatch):
    """Its figures are of all runs; those over the naive loop of the passes that this was in."""

    def runs(*seconds: float) -> list:
        return [types.SimpleNamespace(seconds={"total": total}) for total in seconds]

    kinds = dict.fromkeys(("steps_by_width", "steps_by_rows", "verified_tokens"), 0)
    describe = lambda case, runs, ladder: {"table": case.table, "runs": len(runs)} | kinds  # noqa: E731
    monkeypatch.setattr(benchmark, "describe", describe)
    plan = types.SimpleNamespace(ladder=lambda rows: None)
    naive, ladder, tree = (benchmark.Case(name, plan, f"{name}'s") for name in ("n", "l", "t"))
    block = [ladder, tree, ladder]
    by_rate = [benchmark_lengths._Timed.of(0.5, block, [runs(1, 4), runs(2, 2), runs(1, 4)])]
    cells = benchmark_lengths._cells(naive, runs(4), by_rate, 8, "the passes'")
    assert [cell["table"] for cell in cells] == ["n's", "the passes'", "t's"]
    assert [cell["runs"] for cell in cells] == [1, 4, 2]
    assert [cell["over_naive"]["median"] for cell in cells[1:]] == [4, 2]
    assert (cells[2]["over_ladder"]["min"], cells[2]["over_ladder"]["max"]) == (0.5, 2)


def test_cases_leave_once_they_are_told_from_the_goal():
    """Of 11 values all on one side of 0.98 tell; of 20 values one may lie on the other."""

    def runs(*seconds: float) -> list:
        return [types.SimpleNamespace(seconds={"total": total}) for total in seconds]

    naive, ladder, better, worse, near = (types.SimpleNamespace() for _ in range(5))
    blocks = [(None, [naive]), (0.5, [ladder, better, worse, ladder, near])]
    told = functools.partial(benchmark_lengths._told, blocks)

    def block(passes: int, seconds: list[float]) -> list[list]:
        alike = [runs(*[s] * passes) for s in (1.0, 0.5, 1.1, 1.0)]
        return [*alike, runs(*seconds)]

    near_goal = [0.9] + [1.05] * 5 + [0.9] * 5
    assert told(0, [runs(*[3.0] * 10)]) == []
    assert told(0, [runs(*[3.0] * 11)]) == [0]
    assert told(1, block(10, near_goal[:10])) == []
    assert told(1, block(11, near_goal)) == [1, 2]
    assert told(1, block(11, [0.9] * 11)) == [1, 2, 4, 0, 3]
    assert told(1, block(20, [1.05] + [0.9] * 19)) == [1, 2, 4, 0, 3]
    assert told(1, block(20, [1.05] * 4 + [0.9] * 16)) == [1, 2]


def test_goals_of_single_programs():
    ratio = lambda x: {"median": x, "min": x, "max": x}  # noqa: E731
    rung = {
        "rows": 8,
        "verified_over_decoded": {"match": ratio(0.3), "ratio": ratio(0.4)},
        "products_over_decoded": ratio(0.25),
    }
    record = {"rungs": [rung]}
    found = benchmark_steps.verify_goals(record, "27m", "cpu")
    assert [goal.met for goal in found] == [True, False]
    assert [goal.note for goal in found] == ["products alone: 0.250"] * 2
    assert benchmark_steps.verify_goals(record, "tiny", "cpu") == []
    record = {"rungs": [{"rows": 8, "over_floor": ratio(0.951)}]}
    assert [goal.met for goal in benchmark_steps.floor_goals(record)] == [True]


# Policies and sizes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("huge", {}, "--size must be one of tiny, 27m, smollm2, qwen3_1p7b, got 'huge'"),
        ("qwen3_1p7b", {}, "--size=qwen3_1p7b needs a GPU or TPU"),
        ("tiny", {"rows": 12}, "--rows must be a multiple of 8, got 12"),
        ("tiny", {"response_len": 1}, "--response-len must be >= 2, got 1"),
        ("tiny", {"rates": (0.5, 1.5)}, "--rates must be shares in [0, 1]"),
    ],
)
def test_sizes_that_cannot_be(name, changes, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        choose(name, **changes)


def test_sizes_take_what_flags_give():
    size = choose("27m", rows=8, prompt_len=None)
    assert (size.rows, size.prompt_len, size.response_len) == (8, 64, 256)
    assert size.model.dtype == "float32"
    shape = dataclasses.astuple(size.model)[:7]
    assert shape == (16_384, 512, 1_024, 8, 8, 4, 64)
    assert choose("qwen3_1p7b", force=True).model.num_layers == 28
