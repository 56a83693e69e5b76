"""When a run calls its hooks, that they change no bit of it, and what the standard ones leave."""

import contextlib
import signal

import pytest
from small_runs import assert_same_run, interrupt, records, small_config

from specrl_jax import train as loop
from specrl_jax.reports import report_page
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.training.hooks import Hooks

SAVED = {"train.steps": 4, "checkpoint.every": 2, "evaluate.every": 2}


class Noted(Hooks):
    """Hooks that note what is called, in order."""

    def __init__(self):
        self.calls = []

    def fitted(self, run):
        self.calls.append("fitted")
        return run

    @contextlib.contextmanager
    def _block(self, name):
        self.calls.append(name)
        try:
            yield
        finally:
            self.calls.append(f"{name} ends")

    def explaining(self, run):
        return self._block("explaining")

    def recording(self, run, log):
        assert log.writes
        return self._block("recording")

    def before_first_step(self, run, state):
        self.calls.append(f"before step {state.step + 1}")

    def after_save(self):
        self.calls.append("saved")

    def at_end(self, run, workdir, finished):
        self.calls.append("finished" if finished else "stopped")


BEGIN = ["fitted", "explaining", "recording"]
END = ["recording ends", "explaining ends"]


def test_hooks_are_called_in_order(mesh, tmp_path):
    """Also of a run that is made longer; those of a finished one hear of no step."""
    for steps, first in ((4, "before step 1"), (6, "before step 5")):
        hooks = Noted()
        loop.train(small_config(SAVED | {"train.steps": steps}), tmp_path, hooks=hooks)
        saves = ["saved"] * (2 if steps == 4 else 1)
        assert hooks.calls == [*BEGIN, first, *saves, *END, "finished"]
    hooks = Noted()
    loop.train(small_config(SAVED | {"train.steps": 6}), tmp_path, hooks=hooks)
    assert hooks.calls == ["fitted", "explaining", "explaining ends"]


def test_blocks_of_a_run_end_however_it_ends(mesh, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(MetricsLog, "write", MetricsLog.write)  # put back after interrupt
    hooks = Noted()
    with monkeypatch.context() as patch:
        patch.setattr(loop, "update_policy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loop.train(small_config(SAVED), tmp_path / "error", hooks=hooks)
    assert hooks.calls == [*BEGIN, "before step 1", *END]
    interrupt(MetricsLog, "write", 3, signal.SIGTERM)
    hooks = Noted()
    loop.train(small_config(SAVED), tmp_path / "stopped", hooks=hooks)
    assert hooks.calls == [*BEGIN, "before step 1", "saved", *END, "stopped"]
    assert "saved at step 3 of 4; run the same command to resume" in capsys.readouterr().out


def test_a_run_without_hooks_is_the_same_run(mesh, tmp_path, capsys):
    config = small_config(SAVED | {"log.report": True})
    loop.train(config, tmp_path / "without")
    out = capsys.readouterr().out
    assert "compiling " not in out
    assert "report: " not in out
    loop.train(config, tmp_path / "with", hooks=StandardHooks())
    out = capsys.readouterr().out
    assert "compiling " in out
    assert f"report: {tmp_path / 'with' / 'report.html'}\nheld-out reward: first" in out
    assert_same_run(tmp_path / "without", tmp_path / "with", 4)
    assert not (tmp_path / "without" / "report.html").exists()


def test_the_report_page_is_there_after_a_save_and_after_an_error(mesh, tmp_path, monkeypatch):
    written = []
    write = report_page.write_report

    def note(workdirs, file):
        written.append(len(records(workdirs[0])) - 1)
        write(workdirs, file)

    monkeypatch.setattr(report_page, "write_report", note)
    evaluate = loop.evaluate_held_out

    def fail(run, state, log):
        if state.step == 4:
            raise ValueError("no evaluation")
        evaluate(run, state, log)

    monkeypatch.setattr(loop, "evaluate_held_out", fail)
    config = small_config(SAVED | {"log.report": True})
    with pytest.raises(ValueError, match="no evaluation"):
        loop.train(config, tmp_path, hooks=StandardHooks())
    assert written == [2, 3]
    assert (tmp_path / "report.html").exists()
