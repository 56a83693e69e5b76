"""Train a policy.

    python launch/train.py --config=configs/grpo.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

The same command again resumes the run in DIR (default: runs/CONFIG-PRESET). A finished run is left
as it is.
"""

from pathlib import Path

from absl import flags

from specrl_jax import cli

_WORKDIR = flags.DEFINE_string("workdir", "", "where the run lives; default runs/CONFIG-PRESET")


def main() -> None:
    from specrl_jax import runtime  # imports JAX, for which --help need not wait

    config = flags.FLAGS.config
    runtime.start(config)
    from specrl_jax.train import train

    workdir = Path(_WORKDIR.value or Path("runs", cli.config_name()))
    print(f"workdir: {workdir}", flush=True)
    train(config, workdir)


if __name__ == "__main__":
    cli.define_config()
    cli.run(main)
