"""Train with several settings and seeds, and compare the runs.

    python launch/sweep.py --config=configs/grpo.py --seeds=3 --sweep=rollout.lenience=1,e^0.5,inf \
        --config.rollout.accept=ratio
    python launch/sweep.py --case="GRPO: configs/grpo.py" --case="PPO: configs/ppo.py" --seeds=3
    python launch/sweep.py --config=configs/lenience_sweep.py --seeds=3     (the file's get_hyper)

Several --sweep make a grid, for each --case if there are any. --config.FIELD=VALUE applies to all
runs. The same command again resumes the sweep. If a run fails, it is listed, the other runs
continue, and the exit code is 1.

WORKDIR gets a work directory per run, the table (sweep.md, sweep.csv, sweep.png), seconds per epoch
(epochs.png), and report.html of all runs. With log.rollouts=1.0, which records all responses, they
show up to which step a case produces the same tokens as the baseline.

--cluster=slurm runs all in parallel through submitit, whose options are flags too:
--cluster.slurm_partition=gpu --cluster.gpus_per_node=1 --cluster.timeout_min=240
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import argparse
import ast
import contextlib
import signal
from pathlib import Path
from typing import Any

from specrl_jax.command_line import cli


def parser() -> cli.Parser:
    """Return the command line, except for --config.FIELD=VALUE and --cluster.OPTION=VALUE."""
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--config", default="", help="configuration file[:preset]")
    add = parser.add_argument
    add("--sweep", action="append", default=[], help="FIELD=VALUE,VALUE,...; e^0.5, inf too")
    add("--case", action="append", default=[], help="NAME: [CONFIG] FIELD=VALUE ...")
    add("--seeds", default="1", help="N (seeds 0 to N-1) or a list like 0,3,5 (default: 1)")
    add("--baseline", default="", help="case that speed-ups are relative to (default: the first)")
    add("--target", type=float, default=0.0, help="held-out reward to reach")
    add("--workdir", type=Path, default=Path("runs", "sweep"))
    add("--cluster", default="", choices=["", "slurm", "local"], help="of submitit")
    return parser


def _seeds(text: str) -> list[int]:
    with contextlib.suppress(ValueError):
        seeds = [int(seed) for seed in text.split(",") if seed]
        if seeds and ("," in text or seeds[0] >= 1):
            return seeds if "," in text else list(range(seeds[0]))
    raise ValueError(f"--seeds must be N >= 1 or a list like 0,1, got {text!r}")


def _cluster_options(flags: list[str]) -> dict[str, Any]:
    options = {}
    for flag in flags:
        name, _, value = flag.removeprefix("--cluster.").partition("=")
        options[name] = value
        with contextlib.suppress(SyntaxError, ValueError):
            options[name] = ast.literal_eval(value)
    return options


def _cases(args: argparse.Namespace) -> list:
    from specrl_jax.config import hyper
    from specrl_jax.reports import sweep

    cases = [sweep.parse_case(text, args.config) for text in args.case]
    if not cases and not args.config:
        raise ValueError("--config=FILE[:PRESET] must be given, or --case with a file")
    sweeps = [sweep.parse_sweep(text) for text in args.sweep]
    fields = [field for part in sweeps for field in part[0]]
    if len(set(fields)) < len(fields):
        raise ValueError(f"--sweep must not name a field twice, got {', '.join(fields)}")
    overrides = hyper.product(sweeps)
    if not args.sweep and not args.case:
        overrides = sweep.config_sweep(args.config)
    if any("seed" in override for override in overrides):
        raise ValueError("seed must not be swept; give --seeds instead")
    return sweep.grid(cases or [sweep.Case("", args.config)], overrides)


def main() -> None:
    args, rest = parser().parse_known_args()
    config_flags = [flag for flag in rest if flag.startswith("--config.")]
    options = [flag for flag in rest if flag.startswith("--cluster.")]
    cli.refuse([x for x in rest if x not in (*config_flags, *options)], vars(args))
    if any(flag.startswith("--config.seed=") for flag in rest):
        raise ValueError("--config.seed must not be given; give --seeds instead")
    seeds = _seeds(args.seeds)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run saves, as on Ctrl-C
    from specrl_jax.reports import sweep  # JAX is slow to import; --help must not wait

    cases = _cases(args)
    runs = sweep.training_runs(cases, seeds, args.workdir, config_flags)
    names = dict.fromkeys(run.case for run in runs)
    baseline = args.baseline or next(iter(names))
    if baseline not in names:
        raise ValueError(f"--baseline must be one of {', '.join(names)}, got {baseline!r}")
    submit = sweep.submitter(args.cluster, _cluster_options(options), args.workdir)
    failed = sweep.train_all(runs, submit)
    print(sweep.write_results(runs, failed, baseline, args.workdir, args.target))
    for workdir, reason in failed.items():
        print(f"failed: {workdir.name}: {reason}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    with cli.user_errors():
        main()
