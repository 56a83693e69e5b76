"""Train under several settings and several seeds, and put the runs side by side.

    python launch/compare.py --config=configs/grpo.py --vary=rollout.draft=none,previous,tree \
        [--seeds=0,1,2] [--workdir=runs/compare] [--target=0.7] [--config.FIELD=VALUE]

    python launch/compare.py --case="GRPO: configs/grpo.py rollout.draft=none" \
        --case="PPO: configs/ppo.py rollout.draft=none"

--vary takes values of one field, --case any number of fields and a configuration file, --config's
where it names none. The same command again goes on where it was stopped. All figures are in
WORKDIR/compare.json, a plot in compare.png. Tokens are compared on recorded responses:
--config.log.rollouts=1.0 records all.
"""

import argparse
import json
import re
from pathlib import Path

from specrl_jax import cli


def parser() -> argparse.ArgumentParser:
    """The command line, but for --config.FIELD=VALUE."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = cli.Parser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--config", default="", help="configuration file[:preset]")
    parser.add_argument("--vary", default="", help="FIELD=VALUE,VALUE,...")
    parser.add_argument(
        "--case", action="append", default=[], help="NAME: [CONFIG] FIELD=VALUE ..."
    )
    parser.add_argument("--target", type=float, default=0.0, help="held-out reward to reach")
    parser.add_argument("--seeds", default="0", help="divided by commas (default: 0)")
    parser.add_argument("--workdir", type=Path, default=Path("runs", "compare"))
    return parser


def _varied(args: argparse.Namespace) -> tuple[str, list[str]]:
    field, _, values = args.vary.partition("=")
    values = values.split(",")
    if not re.fullmatch(r"\w+(\.\w+)*", field) or not all(values):
        raise ValueError(f"--vary must be FIELD=VALUE,VALUE,..., got {args.vary!r}")
    if field == "seed":
        raise ValueError("--vary must not be seed; give --seeds instead")
    return field, values


def _seeds(args: argparse.Namespace) -> list[int]:
    try:
        return [int(seed) for seed in args.seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be whole numbers as in 0,1, got {args.seeds!r}") from None


def _check_distinct(flag: str, names: list) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"{flag} must not name anything twice, got {names}")


def main() -> None:
    args, rest = parser().parse_known_args()
    cli.refuse([flag for flag in rest if not flag.startswith("--config.")], vars(args))
    if any(flag.startswith("--config.seed=") for flag in rest):
        raise ValueError("--config.seed must not be given; give --seeds instead")
    if bool(args.vary) == bool(args.case):
        raise ValueError("give either --vary or --case")
    from specrl_jax.telemetry import compare

    if args.vary:
        if not args.config:
            raise ValueError("--vary needs --config=FILE[:PRESET]")
        heading, values = _varied(args)
        _check_distinct("--vary", values)
        cases = compare.varied(args.config, heading, values)
    else:
        heading, cases = "", [compare.parse_case(text, args.config) for text in args.case]
        _check_distinct("--case", [case.folder.replace("/", "_") for case in cases])
    seeds = _seeds(args)
    _check_distinct("--seeds", seeds)
    runs = compare.training_runs(cases, seeds, args.workdir, rest)
    compare.train_all(runs)
    figures = compare.compare(runs, args.target)
    (args.workdir / "compare.json").write_text(json.dumps(figures, indent=1) + "\n")
    compare.write_plot(figures, args.workdir / "compare.png")
    print(compare.table(heading, figures), compare.epoch_table(figures), sep="\n\n")


if __name__ == "__main__":
    with cli.user_errors():
        main()
