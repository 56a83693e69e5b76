import struct

import numpy as np
import pytest
from matplotlib.figure import Figure

from specrl_jax.telemetry.report import PLOTS, draw, summary_table, write_plots


def make_records():
    """Three epochs of two steps, after an evaluation before the first."""
    rows = [
        # epoch, reward, eval, generated, reused, accept, prefix, whole, verify, decode, rollout
        (1, 0.30, None, 1000, 0, None, 0.0, 0.0, 0.1, 9.0, 30.0),
        (1, 0.40, 0.45, 1000, 0, None, 0.0, 0.0, 0.1, 2.0, 2.2),
        (2, 0.50, None, 300, 700, 0.7, 7.0, 0.25, 0.3, 1.0, 1.4),
        (2, 0.60, 0.80, 100, 100, 0.9, 8.0, 0.75, 0.3, 0.8, 1.2),
        (3, 0.70, None, 200, 800, 0.8, 8.0, 0.5, 0.3, 0.7, 1.1),
        (3, 0.80, 0.75, 100, 900, 0.9, 9.0, 0.5, 0.3, 0.5, 0.9),
    ]
    names = (
        *("reward/mean", "reward/eval", "rollout/tokens_generated", "rollout/tokens_reused"),
        *("rollout/draft_accept_rate", "rollout/prefix_len_mean", "rollout/full_reuse_ratio"),
        *("time/verify", "time/decode", "time/rollout"),
    )
    records = [{"step": 0, "epoch": 1, "reward/eval": 0.37}]
    for step, (epoch, *values) in enumerate(rows, start=1):
        present = {n: v for n, v in zip(names, values, strict=True) if v is not None}
        fixed = {"time/update": 0.5, "time/prefill": 0.05 * step}
        records.append({"step": step, "epoch": epoch, **fixed, **present})
    return records


def table_rows(text):
    rows = [line.split() for line in text.splitlines()]
    start = next(i for i, row in enumerate(rows) if row[:1] == ["epoch"])
    # Columns of two words ("rollout s") are the last four of the heading.
    return {row[0]: row for row in rows[start + 2 : start + 7]}


def axes_of(name, records):
    ax = Figure().subplots()
    draw(ax, name, records)
    return ax


def lines_of(ax):
    return {
        line.get_label(): np.column_stack(line.get_data()).tolist()
        for line in ax.lines
        if line.get_gid() != "epoch"
    }


# Table --------------------------------------------------------------------------------------


def test_headlines_name_first_best_and_last():
    lines = summary_table(make_records()).splitlines()
    assert lines[0] == (
        "held-out reward: first 0.370 (step 0), best 0.800 (step 4), last 0.750 (step 6)"
    )
    assert lines[1] == (
        "training reward: first 0.300 (step 1), best 0.800 (step 6), last 0.800 (step 6)"
    )


def test_a_row_for_each_epoch_by_hand():
    rows = table_rows(summary_table(make_records()))
    assert rows["1"][1:] == (
        ["0.350", "0.450", "0.0%", "-", "0.0", "0.0%", "2,000", "0", "32.2", "0.2", "11.0", "1.0"]
    )
    # reuse: 800 reused of 1,200 tokens, not the mean of 70 % and 50 %.
    assert rows["2"][1:7] == ["0.550", "0.800", "66.7%", "80.0%", "7.5", "50.0%"]
    assert rows["2"][7:] == ["400", "800", "2.6", "0.6", "1.8", "1.0"]
    assert rows["all"][1:6] == ["0.550", "0.750", "48.1%", "82.5%", "5.3"]
    assert rows["all"][7:9] == ["2,700", "2,500"]


def test_columns_line_up():
    lines = summary_table(make_records()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("epoch"))
    assert len({len(line) for line in lines[start : start + 7]}) == 1


def test_what_a_plain_run_lacks_is_a_dash():
    records = [{"step": 1, "epoch": 1, "reward/mean": 0.5, "time/rollout": float("nan")}]
    row = table_rows(summary_table(records))["1"]
    assert row == ["1", "0.500", *["-"] * 11]


def test_no_steps(tmp_path):
    for records in ([], [{"step": 0, "epoch": 0, "reward/eval": 0.1}]):
        assert summary_table(records) == "No training step was recorded."
        assert write_plots(records, tmp_path) == []


# Plots --------------------------------------------------------------------------------------


def test_seconds_are_stacked_and_a_compiling_step_is_named():
    ax = axes_of("rollout_seconds", make_records())
    prefill, verify, decode = ax.containers
    heights = [[bar.get_height() for bar in bars] for bars in (prefill, verify, decode)]
    assert heights[0] == [0.05 * step for step in range(1, 7)]
    assert {bar.get_y() for bar in prefill} == {0.0}
    assert [bar.get_y() for bar in verify] == heights[0]
    assert [bar.get_y() for bar in decode] == pytest.approx(np.add(*heights[:2]))
    assert heights[1] == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.3, 0.3])
    assert heights[2] == pytest.approx([9.0, 2.0, 1.0, 0.8, 0.7, 0.5])
    assert [bar.get_center()[0] for bar in decode] == [1, 2, 3, 4, 5, 6]
    assert lines_of(ax)["whole rollout"][0] == [1, 30.0]
    assert 2.2 < ax.get_ylim()[1] < 4
    assert ax.get_xlabel() == "step   (off the scale: step 1: 30.0 s)"
    even = axes_of("rollout_seconds", make_records()[2:])
    assert even.get_xlabel() == "step"
    assert even.get_ylim()[1] > 2.2


def test_lines_by_hand():
    records = make_records()
    rewards = lines_of(axes_of("reward", records))
    assert [y for _, y in rewards["training prompts"]] == [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    assert rewards["held-out prompts"] == [[0, 0.37], [2, 0.45], [4, 0.8], [6, 0.75]]
    prefix = lines_of(axes_of("prefix_len", records))["accepted prefix"]
    assert [y for _, y in prefix] == [0, 0, 7, 8, 8, 9]
    (full_reuse,) = lines_of(axes_of("full_reuse", records)).values()
    assert full_reuse == [[1, 0], [2, 0], [3, 0.25], [4, 0.75], [5, 0.5], [6, 0.5]]
    tokens = lines_of(axes_of("tokens", records))
    assert [y for _, y in tokens["generated"]] == [1000, 1000, 300, 100, 200, 100]
    assert [y for _, y in tokens["reused"]] == [0, 0, 700, 100, 800, 900]


@pytest.mark.parametrize("name", PLOTS)
def test_epochs_are_marked_where_they_begin(name):
    ax = axes_of(name, make_records())
    marks = [line.get_xdata()[0] for line in ax.lines if line.get_gid() == "epoch"]
    assert marks == [0.5, 2.5, 4.5]
    assert [text.get_text() for text in ax.texts] == ["epoch 1", "2", "3"]
    assert ax.get_xlabel().startswith("step")
    assert ax.get_ylabel()
    assert ax.get_title(loc="left")


def test_many_epochs_get_a_line_each_but_few_names():
    records = [{"step": i, "epoch": i, "reward/mean": 0.5} for i in range(1, 41)]
    ax = axes_of("reward", records)
    assert sum(line.get_gid() == "epoch" for line in ax.lines) == 40
    assert [text.get_text() for text in ax.texts][:3] == ["epoch 1", "6", "11"]
    assert len(ax.texts) == 8


def test_files_are_png_images_of_the_stated_size(tmp_path):
    files = write_plots(make_records(), tmp_path)
    assert [file.name for file in files] == ["overview.png", *(f"{name}.png" for name in PLOTS)]
    assert {file.parent for file in files} == {tmp_path / "plots"}
    for file, size in zip(files, [(1210, 1045), *[(910, 468)] * 5], strict=True):
        head = file.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", head[16:]) == size
    assert write_plots([{"step": 1, "epoch": 1, "reward/mean": 0.5}], tmp_path) == files
