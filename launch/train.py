"""Train a policy.

    python launch/train.py --config=configs/grpo.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

The same command again resumes the run in DIR (default: runs/CONFIG-PRESET), as --workdir=DIR alone
does. A finished run is left as it is. --config=RUN/config.json runs the configuration of RUN in a
new DIR. --resume_from=RUN@STEP starts a new DIR from that checkpoint of RUN. Only some fields may
differ from RUN's; an error lists them. --print_config prints every field with its value and does
not train; a run writes them to DIR/config.json.

On several hosts run the same command on each of them, with DIR on a shared file system. Slurm
steps connect by themselves, TPU pods with --coordinator=auto, others with --coordinator,
--num_processes and --process_id. See docs/scaling.md, slurm.sh and tpu_pod.sh.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

from pathlib import Path

from absl import flags

from specrl_jax.command_line import cli
from specrl_jax.process.stop import StopRequest

_WORKDIR = flags.DEFINE_string("workdir", "", "the run's directory; default: runs/CONFIG-PRESET")
_RESUME_FROM = flags.DEFINE_string("resume_from", "", "RUN@STEP: checkpoint to start DIR from")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "HOST:PORT of process 0; auto: from the cluster; default: Slurm's steps"
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", 0, "with --coordinator=HOST:PORT; 1: this one alone", 0
)
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "this process's number, from 0", -1)


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
