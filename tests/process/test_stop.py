"""Signals: finished with while steps are made, never lost before."""

import os
import signal
import sys

import pytest

from specrl_jax.process.stop import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request_and_handlers_come_back(capsys, number):
    before = signal.getsignal(number)
    with StopRequest() as stop, stop.finishing_steps():
        assert not stop
        os.kill(os.getpid(), number)
        assert stop
        assert stop.name == number.name
    assert signal.getsignal(number) is before
    assert "finishing this step, then saving" in capsys.readouterr().out


def test_before_the_first_step_and_after_the_last_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.name == "SIGINT"
    assert signal.getsignal(signal.SIGINT) is before
    with StopRequest() as stop:
        with stop.finishing_steps():
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class _Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_ctrl_c_whose_exception_is_dropped_stops_before_the_first_step(monkeypatch):
    """As Python drops it in a finalizer, which the garbage collector may call anywhere."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: dropped.append(error.exc_type))
    with StopRequest() as stop:
        one = _Finalized()
        del one
        assert dropped == [KeyboardInterrupt]
        with pytest.raises(KeyboardInterrupt), stop.finishing_steps():
            pytest.fail("the first step would begin")
