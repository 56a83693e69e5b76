"""Figures of runs and their summary, by hand."""

import pathlib

import pytest

from specrl_jax.reports.runs import (
    SECONDS_SAY_NOTHING,
    RecordedRun,
    headline,
    series,
    shown_figures,
    speed_up,
    speed_up_over,
    summarize,
)


def make_records():
    """Three epochs of two steps, after an evaluation before the first. Steps 1 and 3 compiled."""
    rows = [
        # epoch, reward, eval, generated, reused, row steps, prefix, whole, prefill, decode, rollout
        (1, 0.30, None, 1000, 0, 500, 0.0, 0.0, 0.1, 9.0, 30.0),
        (1, 0.40, 0.45, 1000, 0, 500, 0.0, 0.0, 0.1, 2.0, 2.2),
        (2, 0.50, None, 300, 700, 200, 7.0, 0.25, 0.3, 1.0, 9.4),
        (2, 0.60, 0.80, 100, 100, 100, 8.0, 0.75, 0.3, 0.8, 1.2),
        (3, 0.70, None, 200, 800, 150, 8.0, 0.5, 0.3, 0.7, 1.1),
        (3, 0.80, 0.75, 100, 900, 50, 9.0, 0.5, 0.3, 0.5, 0.9),
    ]
    names = (
        *("reward/mean", "reward/eval", "rollout/tokens_generated", "rollout/tokens_reused"),
        *("rollout/row_steps", "rollout/prefix_len_mean", "rollout/full_reuse_ratio"),
        *("time/prefill", "time/decode", "time/rollout"),
    )
    records = [{"step": 0, "epoch": 1, "reward/eval": 0.37}]
    for step, (epoch, *values) in enumerate(rows, start=1):
        present = {n: v for n, v in zip(names, values, strict=True) if v is not None}
        present |= {"time/update": 0.5, "time/step": present["time/rollout"] + 1}
        present["time/compile"] = 8.0 if step in (1, 3) else 0.0
        records.append({"step": step, "epoch": epoch, **present})
    return records


def lines_of(records):
    return summarize(RecordedRun(pathlib.Path("run"), {}, records)).splitlines()


def table_rows(lines):
    rows = [line.split() for line in lines]
    return {row[0]: row for row in rows if row and (row[0].isdecimal() or row[0] == "all")}


def test_headlines_name_first_best_and_last():
    lines = lines_of(make_records())
    assert lines[0] == (
        "held-out reward: first 0.370 (step 0), best 0.800 (step 4), last 0.750 (step 6)"
    )
    assert lines[1] == (
        "training reward: first 0.300 (step 1), best 0.800 (step 6), last 0.800 (step 6)"
    )


def test_a_row_for_each_epoch_by_hand():
    """Seconds are those of steps that did not compile."""
    rows = table_rows(lines_of(make_records()))
    assert rows["1"][1:6] == ["0.350", "0.450", "0.0%", "0.0", "0.0%"]
    assert rows["1"][6:9] == ["2,000", "0", "1,000"]
    assert rows["1"][9:] == ["2.20", "0.10", "2.00", "0.50", "3.20"]
    # reuse: 800 reused of 1,200 tokens, not the mean of 70 % and 50 %.
    assert rows["2"][1:6] == ["0.550", "0.800", "66.7%", "7.5", "50.0%"]
    assert rows["2"][6:] == ["400", "800", "300", "1.20", "0.30", "0.80", "0.50", "2.20"]
    assert rows["3"][9:] == ["1.00", "0.30", "0.60", "0.50", "2.00"]
    assert rows["all"][1:5] == ["0.550", "0.750", "48.1%", "5.3"]
    assert rows["all"][6:9] == ["2,700", "2,500", "1,500"]


def test_the_last_line_is_the_speed_up_against_the_plain_first_epoch():
    """2.2 s against the median of 1.2, 1.1 and 0.9; 3.2 against 2.1. The last epoch's: 1.0, 2.0."""
    assert lines_of(make_records())[-3:] == [
        "Against this run's own first epoch (nothing to draft from, updates packed as later):",
        "row steps 4.0× fewer, generated tokens 5.7× fewer (last epoch: 5.0×, 6.7×)",
        "rollouts 2.0× as fast, verification included; whole steps 1.5× (last epoch: 2.2×, 1.6×)",
    ]
    assert "×" not in lines_of(make_records()[:3])[-1]  # one epoch has nothing to compare


@pytest.mark.parametrize(
    ("changes", "config", "line"),
    [
        ({"reward/mean": 0.0}, {}, "The reward never moved, it is 0.000 at every step"),
        ({"reward/mean": 1.0}, {}, "The reward never moved, it is 1.000 at every step"),
        ({"reward/no_signal": 1.0}, {}, "The responses to a prompt never had different advantages"),
        ({"reward/no_signal": 0.9}, {}, ""),
        # A critic learns from groups whose rewards are equal, as those of one response.
        ({"reward/no_signal": 1.0}, {"critic.kind": "head"}, ""),
    ],
)
def test_a_run_that_learned_nothing_claims_no_speed_up(changes, config, line):
    records = [r | changes if "reward/mean" in r else r for r in make_records()]
    lines = summarize(RecordedRun(pathlib.Path("run"), config, records)).splitlines()
    if not line:
        assert lines[-1].startswith("rollouts 2.0× as fast")
        return
    assert lines[-3] == f"{line}: nothing was learned, and no speed-up is claimed."
    assert lines[-2].startswith("Read responses in report.html: are they cut, ")
    assert "as fast" not in "".join(lines)


@pytest.mark.parametrize(("drafted", "claims"), [(0, False), (5, True)])
def test_a_run_without_drafts_claims_no_speed_up(drafted, claims):
    """Tree drafts reuse nothing: their tokens are sampled."""
    changes = {"rollout/tokens_reused": 0, "rollout/tokens_drafted": drafted}
    lines = lines_of([r | changes for r in make_records()])
    assert ("as fast" in lines[-1]) == claims


def test_what_a_plain_run_lacks_is_a_dash():
    records = [{"step": 1, "epoch": 1, "reward/mean": 0.5, "time/rollout": float("nan")}]
    assert table_rows(lines_of(records))["1"] == ["1", "0.500", *["-"] * 12]


def test_no_steps():
    for records in ([], [{"step": 0, "epoch": 0, "reward/eval": 0.1}]):
        assert lines_of(records) == ["No training step was recorded."]


def test_short_steps_lead_with_row_steps_and_tokens_and_claim_no_speed_up():
    """Reuse cannot be seen in seconds that are those of starting programs."""
    short = [
        {k: x / 100 if k.startswith("time/") else x for k, x in r.items()} for r in make_records()
    ]
    run = RecordedRun(pathlib.Path("run"), {}, short)
    lines = summarize(run).splitlines()
    assert lines[-2] == "row steps 4.0× fewer, generated tokens 5.7× fewer (last epoch: 5.0×, 6.7×)"
    assert lines[-1] == SECONDS_SAY_NOTHING
    assert "as fast" not in "".join(lines)
    (one,) = series([run])
    figures, reckoned = shown_figures([one])
    assert reckoned.startswith(SECONDS_SAY_NOTHING)
    names = [name for name, *_ in headline(one, figures)]
    assert names[-2:] == [
        "row steps, first epoch over later ones",
        "tokens generated, first epoch over later ones",
    ]
    assert [speed_up(run, part) for part in ("rollout", "step")] == [None, None]
    assert speed_up_over(one, "step")(run) is None
    long = RecordedRun(pathlib.Path("run"), {}, make_records())
    figures, reckoned = shown_figures(series([long]))
    assert "whole-step speed-up over its first epoch" in [name for name, *_ in figures]
    assert SECONDS_SAY_NOTHING not in reckoned
