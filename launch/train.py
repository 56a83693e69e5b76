"""Train a policy.

    python launch/train.py --config=configs/grpo.py[:PRESET] [--workdir=DIR] [--config.FIELD=VALUE]

The same command again resumes the run in DIR (default: runs/CONFIG-PRESET); a finished run is left
as it is.
"""

from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "configuration file[:preset]")
_WORKDIR = flags.DEFINE_string("workdir", "", "where the run lives; default runs/CONFIG-PRESET")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    from specrl_jax.runtime import start, user_errors  # after --help and bad flags, it takes seconds

    with user_errors():
        start(_CONFIG.value)
        from specrl_jax.train import train

        workdir = Path(_WORKDIR.value or default_workdir())
        print(f"workdir: {workdir}", flush=True)
        train(_CONFIG.value, workdir)


def default_workdir() -> Path:
    """configs/grpo.py:micro → runs/grpo-micro."""
    path, _, preset = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return Path("runs", f"{Path(path).stem}-{preset or 'tiny'}")


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main)
