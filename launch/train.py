"""Train a policy.

    python launch/train.py --config=configs/grpo.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

The same command again resumes the run in DIR (default: runs/CONFIG-PRESET), as --workdir=DIR alone
does. A finished run is left as it is. --config=RUN/config.json runs the configuration of RUN in a
new DIR. With --resume_from=RUN@STEP a new DIR starts with that checkpoint of RUN. Only some fields
may differ from RUN's; an error lists them. --print_config prints every field with its value and
trains nothing; a run writes them to DIR/config.json.

On several hosts the same command runs on each of them, with DIR on a file system that they share.
Slurm's steps are joined by themselves, TPU pods with --coordinator=auto, others by --coordinator,
--num_processes and --process_id. See docs/scaling.md, slurm.sh and tpu_pod.sh.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

from pathlib import Path

from absl import flags

from specrl_jax.command_line import cli
from specrl_jax.process.stop import StopRequest

_WORKDIR = flags.DEFINE_string("workdir", "", "where the run lives; default runs/CONFIG-PRESET")
_RESUME_FROM = flags.DEFINE_string("resume_from", "", "RUN@STEP: checkpoint to start DIR with")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "HOST:PORT of process 0; auto: as the cluster says; default: Slurm's steps"
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 0, "with --coordinator=HOST:PORT; 1: alone", 0
)
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "of this process, from 0", -1)


def main() -> None:
    with StopRequest() as stop:
        from specrl_jax.process import (  # JAX is slow to import; --help must not wait
            distributed,
            runtime,
        )

        with distributed.one_run(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value):
            config = flags.FLAGS.config
            runtime.start(config, given=cli.given_fields())
            from specrl_jax.standard_hooks import StandardHooks  # takes seconds
            from specrl_jax.train import train

            workdir = Path(_WORKDIR.value or Path("runs", cli.config_name()))
            print(f"workdir: {workdir}", flush=True)
            print(f"config: {workdir / 'config.json'}", flush=True)
            train(config, workdir, _RESUME_FROM.value, stop, StandardHooks())


if __name__ == "__main__":
    cli.define_config()
    cli.run(main)
