"""Prices of a recorded run: its rows through the scheduler, against real rollouts and by hand."""

import numpy as np
import pytest
import rollout_reference as ref
from scheduler_cases import MAX_LENS, PROMPTS, B, R, make_spec, run_rollout
from small_runs import ROOT, launch, small_config
from test_benchmark import run  # noqa: F401 - a fixture

from specrl_jax import train as loop
from specrl_jax.benchmarks.price import (
    Prices,
    Replay,
    StepRows,
    chip_prices,
)
from specrl_jax.benchmarks.rollout import SIZES

BY_STEP = Prices(lambda rows, width, slots: rows, slot=1e-3, token=0.0)


def rows_of(rollout, drafts=None) -> StepRows:
    rollout = ref.host(rollout)
    lens = rollout.lens
    inside = np.arange(rollout.tokens.ids.shape[1]) < lens[:, None]
    sampled = np.sum(inside & (rollout.tokens.sources == 0), axis=1)
    given = np.zeros(B, int) if drafts is None else np.asarray(drafts.lens)
    return StepRows(np.full(B, 3), lens, rollout.prefix_lens, given, sampled)


@pytest.mark.parametrize("max_rows", [0, 8, 12])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_replay_makes_the_row_steps_of_the_rollout(mesh, max_rows, drafted):
    spec = make_spec(max_rows=max_rows)
    rollout, stats = run_rollout(spec)
    drafts = None
    if drafted:
        drafts = ref.as_drafts(rollout, np.minimum(np.arange(B) % (R + 1), rollout.lens))
        rollout, stats = run_rollout(spec, drafts=drafts)
    rows = rows_of(rollout, drafts)
    replay = Replay.run(rows, spec.buckets(B), spec.group_size, BY_STEP)
    assert replay.row_steps == stats.row_steps
    slots = 3 * len(PROMPTS.lens) + rows.draft_lens.sum()
    assert replay.seconds == pytest.approx(stats.row_steps + 1e-3 * slots)


def test_without_drafts_a_row_takes_a_step_for_each_token_but_the_first(mesh):
    """One bucket: the batch of B rows runs until the longest is done."""
    spec = make_spec(row_buckets=1)
    rows = rows_of(run_rollout(spec)[0]).without_drafts()
    replay = Replay.run(rows, spec.buckets(B), spec.group_size, BY_STEP)
    assert replay.seconds == pytest.approx(B * (MAX_LENS.max() - 1) + 1e-3 * 3 * len(PROMPTS.lens))


def test_rows_of_the_papers_size_by_hand():
    rows = StepRows(*(np.array(x) for x in ([5, 5], [10, 4], [6, 0], [8, 0], [4, 4])))
    drawn = rows.drawn(groups=3, group_size=2, scale=2.5)
    np.testing.assert_array_equal(drawn.lens, [25, 10] * 3)
    np.testing.assert_array_equal(drawn.prompt_lens, [5] * 6)
    np.testing.assert_array_equal(drawn.decode_steps, [9, 9] * 3)


def test_prices_of_a_chip_by_hand():
    """What was measured on an H100 comes out: 6.1 ms for 128 rows of Qwen3-1.7B."""
    model = SIZES["qwen3_1p7b"].model.replace(dtype="bfloat16")
    prices = chip_prices(model, "h100", 1, 640)
    assert prices.step(128, 1.0, 640) == pytest.approx(6.1e-3, rel=0.15)
    assert prices.step(128, 8.0, 640) == pytest.approx(2.7 * prices.step(128, 1.0, 640))
    assert prices.slot == pytest.approx(0.267 / 32_768, rel=0.15)  # of its verification
    assert prices.token == 3 * prices.slot
    assert chip_prices(model, "h100", 8, 640).slot == pytest.approx(prices.slot / 8)
    assert prices.step(1, 1.0, 1) >= 40e-6 * model.num_layers


@pytest.mark.slow
def test_a_recorded_run_is_priced(run, tmp_path, mesh):  # noqa: F811
    changes = {"log.rollouts": 1.0, "rollout.accept": "match", "train.epochs": 2}
    loop.train(small_config(changes), tmp_path / "run")
    for chip, cases in ("h100", 4), ("v5e", 4), ("cpu", 2):
        code, table, text = run("price", str(tmp_path / "run"), f"--chip={chip}")
        assert code == 0
        assert [case["epoch"] for case in table] == [1, 2] * (cases // 2)
        assert all(case["step"] > case["rollout"] > 0 for case in table)
        assert table[0]["rollout_over"] == (1 if chip != "cpu" else pytest.approx(1, rel=0.5))
        assert "the papers' size" in text or chip == "cpu"
    changes["log.rollouts"] = 0.0
    loop.train(small_config(changes), tmp_path / "few")
    done = launch(str(ROOT / "launch" / "benchmark.py"), "price", str(tmp_path / "few"))
    assert done.returncode == 2
    assert "must have recorded all rows of step 1 (log.rollouts=1), got 0 of 32" in done.stderr
