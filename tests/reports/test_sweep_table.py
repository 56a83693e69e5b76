"""The table of a sweep: figures by hand on written records."""

import csv

import pytest
from matplotlib.figure import Figure
from recorded_runs import response, write_files

from specrl_jax.reports import sweep_table
from specrl_jax.reports.report_charts import reward_limits
from specrl_jax.reports.runs import Series, epoch_seconds, read_run, seconds, series
from specrl_jax.reports.sweep_table import SweptRun


def write_run(folder, seconds, seed=0, rewards=(0.25, 0.5), tokens=(100, 200), responses=()):
    """A work directory: an epoch for each list of (seconds of a step, whether it compiled)."""
    records, step = [{"step": 0, "epoch": 0, "reward/eval": 0.125}], 0
    for epoch, steps in enumerate(seconds, start=1):
        for value, compiled in steps:
            step += 1
            record = {"step": step, "epoch": epoch, "reward/mean": 0.5, "time/step": value}
            record |= {"time/rollout": value / 2, "time/update": value / 4}
            record |= {"time/compile": value if compiled else 0.0}
            record |= {"rollout/tokens_generated": tokens[epoch - 1], "rollout/row_steps": 10}
            records.append(record)
        records[-1]["reward/eval"] = rewards[epoch - 1]
    lines = [
        response(step, 1, i, [""] * len(row), "s" * len(row), token_ids=row)
        for step, rows in enumerate(responses, start=1)
        for i, row in enumerate(rows)
    ]
    config = {"seed": seed, "log": {"rollouts": 1.0 if responses else 0.02}}
    return read_run(write_files(folder, config, records, lines))


# Without the steps that compile: medians 2 and 4 in the first run's epochs, twice as long there.
SLOW = [[(9.0, True), (2.0, False), (2.0, False)], [(3.0, False), (5.0, False)]]
FAST = [[(9.0, True), (1.0, False), (1.0, False)], [(2.0, False), (2.0, False)]]


@pytest.fixture
def cases(tmp_path):
    """Two seeds of "plain", which takes twice the seconds of "fast"."""
    plain = [write_run(tmp_path / f"p{i}", SLOW, i, (0.1, 0.4 + 0.2 * i)) for i in (0, 1)]
    fast = [write_run(tmp_path / f"f{i}", FAST, i, tokens=(100, 20)) for i in (0, 1)]
    return [Series("plain", plain), Series("fast", fast)]


def test_the_figures_of_a_run(cases):
    run = cases[0].runs[0]
    assert epoch_seconds(run, "step") == {1: 2.0, 2: 4.0}
    assert seconds(run, "rollout") == 3 * 1.0 + 2 * 2.0
    assert sweep_table.until_reward(run, "rollout/tokens_generated", 0.4) == 700
    assert sweep_table.until_reward(run, "rollout/tokens_generated", 0.125) == 0
    assert sweep_table.until_reward(run, "rollout/tokens_generated", 0.5) is None


def test_an_epoch_that_only_compiled_has_no_seconds(tmp_path):
    run = write_run(tmp_path / "a", [[(1.0, True)], [(1.0, False)]])
    assert epoch_seconds(run, "step") == {2: 1.0}
    assert seconds(run, "step") is None


def swept(cases, ends=(), **settings):
    """The runs of all cases; ends: (case, seed, how it ended before its end)."""
    done = [
        SweptRun(case.name, run.config["seed"], settings, sweep_table.DONE, run)
        for case in cases
        for run in case.runs
    ]
    return done + [SweptRun(case, seed, settings, state, None) for case, seed, state in ends]


def _cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]


def test_the_table(cases, tmp_path):
    text = sweep_table.write(swept(cases[::-1]), "plain", tmp_path, target=0.5)
    assert (tmp_path / "sweep.md").read_text() == text + "\n"
    heading, _, plain, fast = _cells(text.partition("\n\n")[0])
    plain, fast = (dict(zip(heading, row)) for row in (plain, fast))
    assert (plain["case"], fast["case"]) == ("plain", "fast")
    assert (plain["generated tokens"], fast["generated tokens"]) == ("700", "340")
    assert (plain["rollout, s"], fast["rollout, s"]) == ("7.0", "3.5")
    assert (plain["step, s"], fast["step, s"]) == ("14.0", "7.0")
    assert fast["rollout speed-up"] == fast["step speed-up"] == "2.00×"
    assert plain["held-out reward"] == "0.500 ± 0.100"  # 0.4 and 0.6
    assert plain["tokens to 0.5"] == "700.0 (1 of 2 runs)"
    by_epoch = _cells(text.rpartition("\n\n")[2])
    assert by_epoch[0] == ["seconds per step", "plain", "fast"]
    assert by_epoch[-1] == ["epoch 2, step", "4.000 (1.00×)", "2.000 (2.00×)"]
    for name in ("sweep.png", "epochs.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "sweep.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [(row["case"], row["seed"]) for row in rows] == [
        ("fast", "0"), ("fast", "1"), ("plain", "0"), ("plain", "1"),
    ]  # fmt: skip
    assert [float(row["held-out reward"]) for row in rows] == pytest.approx([0.5, 0.5, 0.4, 0.6])
    assert [row["state"] for row in rows] == ["done"] * 4
    assert "state" not in heading


def test_runs_that_did_not_come_to_their_end_stay_in_the_table(cases, tmp_path):
    diverged = "diverged at step 3: policy: loss is nan"
    ends = [("fast", 2, diverged), ("hot", 0, diverged), ("hot", 1, "failed: a|b")]
    runs = swept(cases, ends, **{"updates.passes": 2})
    text = sweep_table.write(runs, "plain", tmp_path)
    heading, _, *rows = _cells(text.partition("\n\n")[0].replace(r"\|", "/"))
    plain, fast, hot = (dict(zip(heading, row, strict=True)) for row in rows)
    assert (plain["seeds"], plain["state"]) == ("2", "done")
    assert (fast["seeds"], fast["state"]) == ("2 of 3", f"seed 2 {diverged}")
    assert fast["generated tokens"] == "340"
    assert (hot["seeds"], hot["held-out reward"]) == ("0 of 2", "–")
    assert hot["state"] == f"seed 0 {diverged}; seed 1 failed: a/b"
    assert text.endswith("|   – |")
    with (tmp_path / "sweep.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [(row["case"], row["seed"]) for row in rows[4:]] == [
        ("fast", "2"), ("hot", "0"), ("hot", "1"),
    ]  # fmt: skip
    assert {row["updates.passes"] for row in rows} == {"2"}
    assert (rows[5]["state"], rows[5]["held-out reward"]) == (diverged, "")


def test_a_sweep_without_a_run_that_came_to_its_end(tmp_path):
    runs = swept([], [("hot", 0, "diverged at step 1: policy: loss is nan")])
    text = sweep_table.write(runs, "hot", tmp_path)
    assert "| 0 of 1 |" in text
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.md", "sweep.csv"}
    assert (tmp_path / "sweep.csv").read_text().splitlines()[1].startswith("hot,0,diverged at step")


def test_a_baseline_that_diverged_gives_no_speed_up(cases, tmp_path):
    runs = swept(cases[1:], [("plain", 0, "diverged at step 1: policy: loss is nan")])
    text = sweep_table.write(runs, "plain", tmp_path)
    heading, _, *rows = _cells(text.partition("\n\n")[0])
    assert [dict(zip(heading, row))["step speed-up"] for row in rows] == ["–", "–"]
    assert _cells(text.rpartition("\n\n")[2])[-1] == ["epoch 2, step", "–", "2.000"]


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ((0.8594, 0.8633), (0.8094, 0.9133)),
        ((0.5,), (0.45, 0.55)),
        ((-2.0, 2.0), (-2.2, 2.2)),  # a twentieth of what they span
    ],
)
def test_an_axis_of_rewards(values, limits):
    assert reward_limits(iter(values)) == pytest.approx(limits)


def drawn(folder, monkeypatch, cases) -> dict:
    """The figures of a sweep, by their file's name."""
    figures = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, file: figures.update({file.name: self}))
    sweep_table.write(swept(cases), "plain", folder)
    return figures


def test_one_seed_has_no_error_bars_and_small_differences_look_small(tmp_path, monkeypatch):
    rewards = {"plain": (0.8594, 0.8594), "fast": (0.8594, 0.8633)}
    cases = [Series(x, [write_run(tmp_path / x, SLOW, rewards=rewards[x])]) for x in rewards]
    for case in cases:
        del case.runs[0].records[0]["reward/eval"]
    figures = drawn(tmp_path, monkeypatch, cases)
    table = figures["sweep.png"]
    assert table.axes[-1].get_xlim() == pytest.approx((0.8094, 0.9133))
    assert table.get_supxlabel() == "one seed, no error bars"
    assert [bars.has_xerr for bars in table.axes[-1].containers] == [False, False]
    epochs = figures["epochs.png"]
    assert epochs.axes[-1].get_ylim() == pytest.approx((0.8094, 0.9133))
    assert epochs.legends[0].get_title().get_text() == "one seed, no error bars"


def test_runs_that_hold_nothing_out_have_pictures_too(tmp_path, monkeypatch):
    case = Series("plain", [write_run(tmp_path / "a", SLOW)])
    for record in case.runs[0].records:
        record.pop("reward/eval", None)
    figures = drawn(tmp_path, monkeypatch, [case])
    assert [ax.get_title("left") for ax in figures["sweep.png"].axes][-1] == "Step speed-up"
    assert [*figures["epochs.png"].axes[-1].lines[0].get_xdata()] == []


def test_several_seeds_have_error_bars_within_the_axis(cases, tmp_path, monkeypatch):
    table = drawn(tmp_path, monkeypatch, cases)["sweep.png"]
    assert table.axes[-1].get_xlim() == pytest.approx((0.35, 0.65))  # 0.5 ± 0.1, and 0.5
    assert table.get_supxlabel() == "2 seeds, ± standard error"
    one = Series("fast", cases[1].runs[:1])
    table = drawn(tmp_path, monkeypatch, [cases[0], one])["sweep.png"]
    label = "1 to 2 seeds, ± standard error if there are several"
    assert table.get_supxlabel() == label
    assert [bars.has_xerr for bars in table.axes[-1].containers] == [True, False]


def test_a_baseline_without_runs_gives_no_speed_up(cases, tmp_path):
    text = sweep_table.write(swept(cases[1:]), "plain", tmp_path)
    heading, _, *rows = _cells(text.partition("\n\n")[0])
    assert [dict(zip(heading, row))["step speed-up"] for row in rows] == ["–"]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([[[1, 2], [3]], [[4], [5, 6]]], (None, 6)),
        ([[[1, 2], [3]], [[4], [5, 7]]], (2, 5)),
        ([[[1, 2], [3]], [[4], [5]]], (2, 5)),  # shorter: its end is another token
        ([[[9, 2], [3]], [[4], [5, 6]]], (1, 0)),
        ([[[1, 2], [3], [9]], [[4]]], (None, 4)),  # groups of another size: what both have
    ],
)
def test_where_tokens_part(tmp_path, others, expected):
    one = write_run(tmp_path / "one", [], responses=[[[1, 2], [3]], [[4], [5, 6]]])
    other = write_run(tmp_path / "other", [], responses=others)
    assert sweep_table.first_difference(one.workdir, other.workdir) == expected
    until = "the end" if expected[0] is None else f"step {expected[0]}"
    line = sweep_table.same_tokens([Series("b", [other])], Series("a", [one]))
    assert line == f"b: a's tokens until {until} ({expected[1]} compared)"


def test_a_report_names_cases(tmp_path):
    folders = [tmp_path / f"a={name},seed={seed}" for name in "xy" for seed in (0, 1)]
    runs = [write_run(folder, FAST) for folder in folders]
    for run in runs[2:]:
        run.config["a"] = "y"
    assert [one.name for one in series(runs)] == ["a=x", "a=y"]
