"""Train a policy.

    python launch/train.py --config=configs/grpo.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

The same command again resumes the run in DIR (default: runs/CONFIG-PRESET). A finished run is left
as it is. With --resume_from=RUN@STEP a new DIR begins with that checkpoint of the run in RUN, under
settings that may differ from its own in what the weights' shapes do not depend on.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

from pathlib import Path

from absl import flags

from specrl_jax import cli

_WORKDIR = flags.DEFINE_string("workdir", "", "where the run lives; default runs/CONFIG-PRESET")
_RESUME_FROM = flags.DEFINE_string("resume_from", "", "RUN@STEP: checkpoint to begin DIR with")


def main() -> None:
    from specrl_jax import runtime  # imports JAX, for which --help need not wait

    config = flags.FLAGS.config
    runtime.start(config)
    from specrl_jax.train import train

    workdir = Path(_WORKDIR.value or Path("runs", cli.config_name()))
    print(f"workdir: {workdir}", flush=True)
    train(config, workdir, _RESUME_FROM.value)


if __name__ == "__main__":
    cli.define_config()
    cli.run(main)
