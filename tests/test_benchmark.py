"""The benchmark's record adds up; nothing here depends on how fast the machine is."""

import json
import math
import os
import pathlib
import runpy
import subprocess
import sys
import types

import numpy as np
import pytest

from specrl_jax import benchmark
from specrl_jax.rollout.generate import Stats

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def record(make_mesh):
    """Two repeats of the preset `micro`, one large step after the drafts, read back from JSON."""
    import jax

    config = runpy.run_path(str(ROOT / "configs" / "grpo.py"))["get_config"]("micro")
    config.warmup.steps, config.updates.learning_rate = 100, 3e-3
    with jax.set_mesh(make_mesh(1, 1, 1)):
        record = benchmark.benchmark(config, repeats=2, drift=1)
    return json.loads(json.dumps(record, allow_nan=False))


def test_all_cases_are_there(record):
    leniences = [case["lenience"] for case in record["cases"]]
    assert leniences == [None, 1.0, pytest.approx(math.exp(0.5)), "inf"]
    assert record["setting"]["rows"] == 16 * 8
    assert record["setting"]["drift_steps"] == 1
    assert record["config"]["updates"]["learning_rate"] == 3e-3


def test_tokens_add_up(record):
    for case in record["cases"]:
        tokens, metrics = case["tokens"], case["metrics"]
        assert tokens["generated"] + tokens["reused"] == tokens["response"]
        assert tokens["generated"] == metrics["rollout/tokens_generated"]
        assert tokens["reused"] / tokens["response"] == pytest.approx(
            metrics["rollout/reuse_fraction"]
        )
        # What the rungs emitted is what was generated, and never more than they had room for.
        visits = case["visits"]
        assert sum(v["tokens"] for v in visits) == tokens["generated"]
        assert sum(v["rows"] * v["steps"] for v in visits) == case["row_steps"]
        assert sum(v["steps"] for v in visits) == case["decode_steps"]
        assert all(0 < v["tokens"] <= v["rows"] * v["steps"] for v in visits)


def test_reuse_grows_with_the_lenience(record):
    plain, *speculative = record["cases"]
    assert plain["tokens"]["reused"] == plain["verified_tokens"] == 0
    reused = [case["tokens"]["reused"] for case in speculative]
    assert 0 < reused[0] < reused[2]
    assert reused == sorted(reused)
    last = speculative[-1]
    assert last["metrics"]["rollout/draft_accept_rate"] == 1
    drafted = record["setting"]["draft_len_mean"] * record["setting"]["rows"]
    assert last["tokens"]["reused"] == pytest.approx(drafted)


def test_speedup_and_ideal_follow_from_their_parts(record):
    plain = record["cases"][0]
    decoded = record["decoded_token_seconds"]
    assert decoded == pytest.approx(
        plain["seconds"]["decode"]["median"] / plain["tokens"]["response"]
    )
    for case in record["cases"]:
        total, prefill, verify, _ = (
            case["seconds"][phase]["median"] for phase in ("total", "prefill", "verify", "decode")
        )
        ideal = prefill + verify + case["tokens"]["generated"] * decoded
        plain_total = plain["seconds"]["total"]["median"]
        assert case["ideal_seconds"] == pytest.approx(ideal)
        assert case["ideal_speedup"] == pytest.approx(plain_total / ideal)
        assert case["speedup"] == pytest.approx(plain_total / total)
        assert case["share_of_ideal"] == pytest.approx(case["speedup"] / case["ideal_speedup"])
        assert case["tokens_per_second"] == pytest.approx(case["tokens"]["response"] / total)
        if case is not plain:
            ratio = verify / case["verified_tokens"] / decoded
            assert case["verified_over_decoded"] == pytest.approx(ratio)
            assert case["verified_tokens"] % record["setting"]["rows"] == 0


def test_the_gap_is_accounted_for(record):
    costs = {(rung["rows"], rung["slots"]): rung for rung in record["rungs"]}
    for case in record["cases"]:
        gap = case["gap"]
        causes = sum(seconds for cause, seconds in gap.items() if cause != "total")
        assert gap["total"] == pytest.approx(causes)
        beyond = case["seconds"]["total"]["median"] - case["ideal_seconds"]
        assert gap["total"] == pytest.approx(beyond, abs=1e-9)
        idle = sum(
            (v["rows"] * v["steps"] - v["tokens"])
            * costs[v["rows"], v["slots"]]["step_seconds"]
            / v["rows"]
            for v in case["visits"]
        )
        assert gap["idle_rows"] == pytest.approx(idle)


def test_the_table_shows_every_case(record):
    lines = benchmark.table(record).splitlines()
    (heading,) = [line for line in lines if line.split() and line.split()[0] == "plain"]
    assert heading.split() == [case["name"] for case in record["cases"]]
    (row,) = [line for line in lines if line.startswith("tokens generated")]
    assert [int(x) for x in row.split()[2:]] == [c["tokens"]["generated"] for c in record["cases"]]
    rungs = lines[-len(record["rungs"]) :]
    listed = [[int(x) for x in line.split()[:2]] for line in rungs]
    assert listed == [[rung["rows"], rung["slots"]] for rung in record["rungs"]]


def test_cost_of_a_rung_worked_row():
    """3 ms for 1 step, 9 ms for 4: 2 ms a step, 1 ms a call."""
    cost = benchmark.rung_cost(8, [[(0.003, 1), (0.009, 4)]] * 2)
    assert cost["step_seconds"] == pytest.approx(0.002)
    assert cost["row_step_seconds"] == pytest.approx(0.00025)
    assert cost["call_seconds"] == pytest.approx(0.001)
    # Where the loop never gets past one step, its call cannot be told from the step.
    assert benchmark.rung_cost(8, [[(0.003, 1), (0.003, 1)]])["step_seconds"] == 0.003


def test_tokens_of_rungs_worked_row():
    """Lengths past the prefix 4, 1, 0, 2 in a rung of 4 for 1 step, one of 2 for 1, one of 1."""
    rollout = types.SimpleNamespace(lens=np.array([5, 1, 3, 4]), prefix_lens=np.array([1, 0, 3, 2]))
    stats = Stats(parts=1, rungs=[(4, 8, 1), (2, 8, 1), (1, 8, 2)])
    assert benchmark.rung_tokens(rollout, stats) == [3, 2, 2]
    # In two parts of two rows: 4 and 1, then 0 and 2.
    stats = Stats(parts=2, rungs=[(2, 8, 1), (1, 8, 3), (1, 8, 2)])
    assert benchmark.rung_tokens(rollout, stats) == [2, 3, 2]
    stats = Stats(parts=1)
    rollout.prefix_lens = rollout.lens
    assert benchmark.rung_tokens(rollout, stats) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats=0"], "--repeats must be >= 1, got 0"),
        (["--lenience=nan"], "--lenience must be >= 0, got nan"),
        (["--preset=large"], "preset must be one of"),
        (["--config.rollout.group=4"], "rollout.group is not a field of the config"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "benchmark.py"), "rollout", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
