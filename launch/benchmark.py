"""Measure what rollouts cost, and what speculation saves.

    python launch/benchmark.py rollout [--size=27m]      a rollout with drafts of earlier responses
    python launch/benchmark.py device [--size=27m]       how close a GPU or TPU gets to its limits
    python launch/benchmark.py training [--size=27m]     whole steps, by kind of draft
    python launch/benchmark.py rules [--config=...]      how much of the drafts each rule accepts
    python launch/benchmark.py heads [--config=...]      how much of a learned head's drafts
    python launch/benchmark.py host                      the host's share of a step
    python launch/benchmark.py price RUN --chip=h100     a recorded run's seconds on another machine

Sizes: tiny, 27m, smollm2, qwen3_1p7b. tiny by default; on a GPU or TPU smollm2 for `training`, and
smollm2 and qwen3_1p7b for `device`.
--config=FILE[:PRESET] defaults to configs/grpo.py:tiny; --config.FIELD=VALUE changes it.
--json=FILE writes the results.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import argparse
import functools
import runpy
from importlib import import_module
from pathlib import Path

from absl import flags

from specrl_jax.command_line import cli

_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "grpo.py"
_NUMBERS = ("rows", "prompt_len", "response_len", "repeats", "row_buckets", "max_width")
_OF_SIZE = ("rollout", "device", "training")
_OF_CONFIG = ("rules", "heads")
_BENCHMARKS = (*_OF_SIZE, *_OF_CONFIG, "host", "price")
# The preset of configs/grpo.py that a benchmark starts from.
_PRESETS = {"training": "tiny", "host": "qwen3_1p7b"}


def parser() -> cli.Parser:
    """Return the command line, except for --config and --config.FIELD=VALUE."""
    parser = cli.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in _BENCHMARKS:
        command = commands.add_parser(name)
        command.add_argument("--json", type=Path, help="write the results to this file")
        if name in _OF_SIZE:
            command.add_argument("--size", help="see above")
            for number in _NUMBERS:
                flag = "--" + number.replace("_", "-")
                command.add_argument(flag, type=int, help="overrides the size's own")
        if name == "price":
            command.add_argument("run", type=Path, help="work directory with log.rollouts=1")
            command.add_argument("--chip", choices=("cpu", "h100", "v5e"), default="h100")
            command.add_argument("--chips", type=int, default=1, help="default: 1")
        if name in _OF_CONFIG:
            command.add_argument("--repeats", type=int, default=5, help="default: 5")
        if name == "rules":
            command.add_argument("--drift", type=int, help="age of the drafts; default: an epoch")
        if name == "heads":
            command.add_argument("--drift", type=int, default=16, help="steps to make; default: 16")
    return parser


def measure(args: argparse.Namespace) -> None:
    """Run the benchmark and report its results; exit with 1 if a part of it failed."""
    log = functools.partial(print, file=sys.stderr, flush=True)
    module = import_module(f"specrl_jax.benchmarks.{args.benchmark}")  # takes seconds
    run = getattr(module, f"measure_{args.benchmark}")
    from specrl_jax.process import runtime

    if args.benchmark in _OF_CONFIG:
        config = flags.FLAGS.config
        runtime.start(config)
        report = run(config, log, args.repeats, args.drift)
    else:
        import jax

        from specrl_jax.sharding import make_mesh

        runtime.use_compilation_cache()
        jax.set_mesh(make_mesh(1, 1, 1, runtime.all_devices()[:1]))
        if preset := _PRESETS.get(args.benchmark):
            run = functools.partial(run, runpy.run_path(str(_CONFIG))["get_config"](preset))
        if args.benchmark in _OF_SIZE:
            numbers = {name: getattr(args, name) for name in _NUMBERS}
            run = functools.partial(run, args.size, numbers)
        if args.benchmark == "price":
            run = functools.partial(run, args.run, args.chip, args.chips)
        report = run(log)
    print(report.to_text())
    if args.json:
        report.write_json(args.json)
    if report.failed:
        sys.exit(1)


def main(argv: list[str]) -> None:
    with cli.user_errors():
        args, rest = parser().parse_known_args(argv)
        cli.check_folder("--json", args.json)
        if args.benchmark not in _OF_CONFIG:
            cli.refuse(rest, vars(args).keys() - {"benchmark"})
            return measure(args)
    cli.define_config()
    named = any(flag.startswith("--config=") for flag in rest)
    sys.argv[1:] = [*([] if named else [f"--config={_CONFIG}:tiny"]), *rest]
    return cli.run(functools.partial(measure, args))


if __name__ == "__main__":
    main(sys.argv[1:])
