"""One process of a run of two, for test_distributed.py: launch/train.py, and what becomes of it.

    python tests/one_of_two.py WHAT STEP ARGUMENTS

WHAT comes to the process once a step is written: kill or term, which are signals, or an error.
"""

import os
import runpy
import signal
import sys

from specrl_jax.telemetry.metrics import MetricsLog, NoLog

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}


def _when_written(log: type, what: str, step: int) -> None:
    write = log.write

    def call(self, at, *args):
        write(self, at, *args)
        if at == step and what in SIGNALS:
            os.kill(os.getpid(), SIGNALS[what])
        elif at == step:
            raise RuntimeError(what)

    log.write = call


if __name__ == "__main__":
    what, step, *arguments = sys.argv[1:]
    for log in (MetricsLog, NoLog):
        _when_written(log, what, int(step))
    sys.argv = ["launch/train.py", *arguments]
    runpy.run_path("launch/train.py", run_name="__main__")
