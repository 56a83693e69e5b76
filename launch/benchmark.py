"""Measure what rollouts cost, and what speculation saves.

    python launch/benchmark.py rollout [--size=27m]      a rollout with every kind of draft
    python launch/benchmark.py step [--size=27m]         a decode step against a hand-written loop
    python launch/benchmark.py device [--size=27m]       shares of what a GPU or TPU can do
    python launch/benchmark.py update [--size=27m]       an update, by how its rows are packed
    python launch/benchmark.py update --run=WORKDIR      the same on responses that a run recorded
    python launch/benchmark.py trained [--config=...]    drafts of a policy that a config trains
    python launch/benchmark.py rules [--config=...]      what each acceptance rule keeps of them
    python launch/benchmark.py selection --run=WORKDIR   what drafts owe to training on them

Sizes: tiny (default), 27m, smollm2, qwen3_1p7b. --config=FILE[:PRESET] is configs/grpo.py:tiny
where it is left out; --config.FIELD=VALUE changes it. --json=FILE writes the figures.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import argparse
import functools
import json
from importlib import import_module
from pathlib import Path

from absl import flags

from specrl_jax import cli

_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "grpo.py"
_NUMBERS = (
    "rows", "prompt_len", "response_len", "repeats", "row_buckets", "cache_lengths", "max_width"
)  # fmt: skip
# Benchmark → its module.
_OF_SIZE = {"rollout": "rollout", "step": "step", "device": "step", "update": "update"}
_OF_CONFIG = {"trained": "trained", "rules": "trained"}
_BENCHMARKS = _OF_SIZE | _OF_CONFIG | {"selection": "selection"}


def parser() -> argparse.ArgumentParser:
    """The command line, but for --config and --config.FIELD=VALUE."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = cli.Parser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name in _BENCHMARKS:
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("--json", type=Path, help="write the figures to this file")
        if name in _OF_SIZE:
            command.add_argument("--size", default="tiny", help="see above (default: tiny)")
            for number in _NUMBERS:
                flag = "--" + number.replace("_", "-")
                command.add_argument(flag, type=int, help="instead of the size's own")
            if name == "update":
                command.add_argument("--run", type=Path, help="a run with log.rollouts = 1.0")
        elif name in _OF_CONFIG:
            command.add_argument("--repeats", type=int, default=5, help="default: 5")
            command.add_argument("--drift", type=int, help="steps since the drafts; an epoch's")
        else:
            command.add_argument("--run", type=Path, required=True, help="its work directory")
            command.add_argument("--step", type=int, help="of the checkpoint; the latest")
    return parser


def measure(args: argparse.Namespace) -> None:
    """Run the benchmark and report its figures."""
    import jax  # seconds that --help need not wait for

    from specrl_jax import runtime
    from specrl_jax.benchmarks.policies import choose
    from specrl_jax.sharding import make_mesh

    log = functools.partial(print, file=sys.stderr, flush=True)
    if args.benchmark in _OF_SIZE:  # on the first device
        runtime.use_compilation_cache()
        jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1]))
        size = choose(args.size, **{name: getattr(args, name) for name in _NUMBERS})
        inputs = args.size, size, log
        if args.benchmark == "update":
            inputs = *inputs, args.run
    elif args.benchmark in _OF_CONFIG:
        runtime.start(flags.FLAGS.config)
        inputs = flags.FLAGS.config, log, args.repeats, args.drift
    else:
        inputs = args.run, args.step
    module = import_module(f"specrl_jax.benchmarks.{_BENCHMARKS[args.benchmark]}")
    report = getattr(module, f"measure_{args.benchmark}")(*inputs)
    print(report.to_text())
    if args.json:
        args.json.write_text(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")


def main(argv: list[str]) -> None:
    with cli.user_errors():
        args, rest = parser().parse_known_args(argv)
        if args.json and not args.json.absolute().parent.is_dir():
            raise ValueError(f"--json: no directory {args.json.absolute().parent}; make it first")
        if args.benchmark not in _OF_CONFIG:
            cli.refuse(rest, vars(args).keys() - {"benchmark"})
            return measure(args)
    cli.define_config()
    named = any(flag.startswith("--config=") for flag in rest)
    sys.argv[1:] = [*([] if named else [f"--config={_CONFIG}:tiny"]), *rest]
    return cli.run(functools.partial(measure, args))


if __name__ == "__main__":
    main(sys.argv[1:])
