"""Console lines, their heading, and the progress bar."""

import re
import types

import pytest

from specrl_jax.telemetry import console
from specrl_jax.telemetry.console import Console, format_duration

VALUES = {
    "reward/mean": 0.6123,
    "reward/eval": 0.7,
    "reward/no_signal": 0.625,
    "rollout/reuse_fraction": 0.8312,
    "rollout/prefix_len_mean": 41.24,
    "rollout/row_steps": 12_345,
    "time/rollout": 1.234,
    "time/prefill": 0.2,
    "time/decode": 0.98,
    "time/update": 0.4,
    "time/step": 2.0,
}


def test_lines_are_aligned_under_their_heading(capsys, monkeypatch):
    clock = iter([100.0, 101.0])
    monkeypatch.setattr(console, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    lines = Console(total_steps=96)
    lines.show(1, 1, VALUES)
    lines.show(12, 1, {"reward/mean": 1.0})
    header, first, second = lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "step epoch reward eval nosignal reuse prefix rowsteps rollout prefill decode update left",
        "1/96 1 0.612 0.700 62% 83.1% 41.2 12,345 1.23s 0.20s 0.98s 0.40s 3:10",
        "12/96 1 1.000 - - - - - - - - - 1:24",
    ]
    assert len(header) == len(first) == len(second) <= 100
    assert header.index("prefix") + len("prefix") == first.index("41.2") + len("41.2")


def test_a_run_with_an_environment_shows_its_seconds_and_those_of_the_step(capsys):
    Console(total_steps=96, environment=True).show(1, 1, VALUES | {"time/environment": 12.5})
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[-5:] == ["rollout", "environ", "update", "step", "left"]
    assert line.split()[-5:] == ["1.23s", "12.50s", "0.40s", "2.00s", "3:10"]
    assert len(header) == len(line) <= 100


def test_time_left_counts_this_process_only(capsys, monkeypatch):
    clock = iter([100.0, 103.0, 106.0])
    monkeypatch.setattr(console, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    lines = Console(total_steps=96)
    for step in (50, 51, 52):  # resumed at 50; 44 steps of 3 s are left after step 52
        lines.show(step, 1, {})
    assert capsys.readouterr().out.split()[-1] == "2:12"


def test_what_went_wrong_stands_behind_the_line(capsys):
    lines = Console(total_steps=96)
    lines.show(1, 1, {"reward/failed": 0, "rollout/truncated_fraction": 0.0})
    lines.show(2, 1, {"reward/failed": 3, "rollout/truncated_fraction": 0.125})
    for step in (3, 4):
        lines.show(step, 1, {"rollout/truncated_fraction": 1.0})
    _, first, second, third, warning, fourth = capsys.readouterr().out.splitlines()
    assert first.endswith("-")
    assert second.endswith("  3 answers failed, 12.5% cut")
    assert third.endswith("  100.0% cut")
    assert warning.startswith("warning: step 3: all responses were cut at rollout.response_len, ")
    assert fourth.endswith("  100.0% cut")  # warned of once


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (59.7, "1:00"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(capsys, monkeypatch):
    def shown():
        lines = Console(total_steps=4)
        lines.show(1, 1, {"reward/mean": 0.25, "time/step": 2.0})
        lines.show(2, 1, {})
        lines.close()
        return capsys.readouterr().out

    piped = shown()
    assert "0.250" in piped
    assert "\x1b" not in piped
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)  # rich takes it for a terminal
    on_terminal = shown()
    assert "0.250" in on_terminal
    assert "2/4" in on_terminal
    assert re.search(r"\d:\d\d left", on_terminal)
