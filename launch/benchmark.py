"""Measure what speculative rollouts save.

    python launch/benchmark.py rollout [--preset=tiny] [--json=FILE] [--config.FIELD=VALUE]

rollout: plain against speculative rollouts of a preset's policy in one process, drafts from the
same policy a few GRPO steps earlier.
"""

import argparse
import json
import sys
from pathlib import Path

from specrl_jax import cli

_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "grpo.py"


def parser() -> argparse.ArgumentParser:
    """The command line, but for --config.FIELD=VALUE."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="benchmark", required=True)
    rollout = commands.add_parser("rollout", allow_abbrev=False)
    rollout.add_argument("--preset", default="tiny", help="of configs/grpo.py (default: tiny)")
    rollout.add_argument("--json", type=Path, help="write all figures to this file")
    rollout.add_argument(
        "--repeats", type=int, default=7, help="timed rollouts a case (default: 7)"
    )
    rollout.add_argument("--lenience", type=float, help="timed beside 1 and inf; the preset's")
    rollout.add_argument("--drift", type=int, help="GRPO steps between drafts and policy; an epoch")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises ValueError in one line."""
    for name, value, least in (
        ("repeats", args.repeats, 1),
        ("lenience", args.lenience, 0),
        ("drift", args.drift, 0),
    ):
        if value is not None and not value >= least:
            raise ValueError(f"--{name} must be >= {least}, got {value}")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json: no directory {args.json.absolute().parent}; make it first")


def main(args: argparse.Namespace) -> None:
    check(args)
    from absl import flags

    from specrl_jax import runtime  # imports JAX: seconds that --help need not wait for

    runtime.start(flags.FLAGS.config)
    from specrl_jax import benchmark

    options = {"repeats": args.repeats, "lenience": args.lenience, "drift": args.drift}
    record = benchmark.benchmark(flags.FLAGS.config, **options)
    print(benchmark.table(record))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    args, rest = parser().parse_known_args()
    cli.define_config()
    sys.argv[1:] = [f"--config={_CONFIG}:{args.preset}", *rest]
    cli.run(lambda: main(args))
