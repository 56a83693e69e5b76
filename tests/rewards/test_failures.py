"""Reward failures: a warning, a file and, if there is nothing else, the end of a run."""

import json

import pytest
from small_runs import one_line

from specrl_jax.rewards.failures import (
    FILE_NAME,
    MAX_BYTES,
    MAX_FAILED_STEPS,
    MAX_TEXT,
    FailureLog,
    commonest,
)


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def failures(tmp_path, warnings):
    return FailureLog(tmp_path, warnings.append)


def record(failures, step, reasons, text="text"):
    failures.record(step, reasons, ["task"] * len(reasons), lambda i: f"{text}{i}")


def lines(tmp_path):
    path = tmp_path / FILE_NAME
    return [json.loads(x) for x in path.read_bytes().splitlines()] if path.exists() else []


def test_the_first_failures_and_a_rising_share_are_told(failures, warnings, tmp_path):
    key, late = "KeyError: 'x'", "no result within 5 s"
    record(failures, 1, [""] * 8)
    assert (warnings, lines(tmp_path)) == ([], [])
    record(failures, 2, [late, key, "KeyError: 'y'", key, "", "", "", "", "", ""])
    (line,) = warnings
    assert line.startswith(
        "warning: step 2: 4 of 10 answers could not be scored, 3 of them: KeyErr"
    )
    assert line.endswith(f"{key}; see {tmp_path / FILE_NAME}")
    record(failures, 3, [key] * 5 + [""] * 5)  # no twice as many
    assert len(warnings) == 1
    record(failures, 4, [key] * 8 + [""] * 2)
    record(failures, 5, [key] * 9 + [""])
    record(failures, 6, [key] * 10)
    record(failures, 7, [key] * 10)
    assert [line.split(":")[1] for line in warnings] == [" step 2", " step 4", " step 6"]


def test_failures_are_kept_with_their_text_up_to_a_size(failures, tmp_path):
    record(failures, 1, ["", "ValueError: five"])
    want = {"step": 1, "task": "task", "reason": "ValueError: five", "text": "text1"}
    assert lines(tmp_path) == [want]
    for step in range(2, 500):
        record(failures, step, ["", *["E"] * 30], "\x00" * 10_000)  # 6 bytes each in JSON
    size = (tmp_path / FILE_NAME).stat().st_size
    assert MAX_BYTES - 7 * MAX_TEXT < size <= MAX_BYTES
    assert all(len(line["text"]) <= MAX_TEXT for line in lines(tmp_path))
    FailureLog(None, print).record(1, ["E", ""], ["", ""], str)  # another process writes


def test_nothing_but_failures_ends_a_run(failures):
    for step in range(1, 10):  # one scored answer is enough to go on
        record(failures, step, ["E"] * 7 + [""] * (step % MAX_FAILED_STEPS == 0))
    for step in range(10, 9 + MAX_FAILED_STEPS):
        record(failures, step, ["E: e"] * 8)
    with pytest.raises(ValueError, match=r"^step 12: 8 of 8 .*: E: e; all rewards of 3 ") as error:
        record(failures, 12, ["E: e"] * 8)
    one_line(error)


def test_kinds_of_reasons():
    died = [f"the scorer's process died (exit code {code})" for code in (1, 2, 2)]
    assert commonest(["A: a", "A: b", *died]) == f"3 of them: {died[1]}"
