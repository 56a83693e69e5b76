"""Measure what rollouts cost, and what speculation saves.

    python launch/benchmark.py rollout [--size=tiny] [--scene=lengths] [--json=FILE]
    python launch/benchmark.py rollout --repeats=200 --until-sure
    python launch/benchmark.py rollout --scene=trained [--preset=tiny] [--config.FIELD=VALUE]
    python launch/benchmark.py sampling [--rows=32] [--vocab=49152] [--json=FILE]

Scenes of rollout, several divided by commas:

    lengths   long-tailed responses: a naive loop, the ladder, drafts that lost 0 to 95 % agreement
    floor     a decode step against a hand-written loop
    verify    a verified token against a decoded one
    device    shares of bandwidth and matmul rate (GPU or TPU)
    trained   plain against speculative rollouts of a preset's policy, trained for some GRPO steps
    rules     how much of that policy's older responses each acceptance rule keeps
    all       all but trained and rules

sampling: what ways to draw a token cost, and how many draws rounding flips.
"""

import argparse
import json
import sys
from pathlib import Path

from specrl_jax import cli

_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "grpo.py"
_SCENES = ("lengths", "floor", "verify", "device", "trained", "rules")
_WITH_PRESET = _SCENES[-2:]
_SIZE_FLAGS = ("rows", "prompt_len", "response_len", "row_rungs", "windows", "max_width", "repeats")


def parser() -> argparse.ArgumentParser:
    """The command line, but for --config.FIELD=VALUE."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = cli.Parser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="benchmark", required=True)
    rollout = commands.add_parser("rollout", allow_abbrev=False)
    rollout.add_argument("--scene", help="see above (default: lengths; trained with --preset)")
    rollout.add_argument("--size", help="tiny | 27m | smollm2 | qwen3_1p7b (default: tiny)")
    rollout.add_argument("--force", action="store_true", help="run a large size on a CPU")
    rollout.add_argument("--rates", help="lengths: shares of draft tokens replaced, as 0,0.25")
    told = "lengths: at most --repeats passes, for each case until it is told from the goal"
    rollout.add_argument("--until-sure", action="store_true", help=told)
    rollout.add_argument("--profile", default="", help="lengths: folder for a trace of a rollout")
    for name in _SIZE_FLAGS:
        rollout.add_argument(_flag(name), type=int, help="instead of the size's own")
    rollout.add_argument("--preset", help="trained: of configs/grpo.py (default: tiny)")
    rollout.add_argument("--lenience", type=float, help="trained: beside 1 and inf; the preset's")
    rollout.add_argument("--drift", type=int, help="trained: GRPO steps since the drafts; an epoch")
    sampling = commands.add_parser("sampling", allow_abbrev=False)
    for name, default in (("rows", 32), ("vocab", 49_152), ("draws", 4_096), ("repeats", 10)):
        sampling.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    for command in (rollout, sampling):
        command.add_argument("--json", type=Path, help="write all figures to this file")
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def scenes_of(args: argparse.Namespace) -> list[str]:
    """Raises ValueError in one line."""
    text = args.scene or ("trained" if args.preset else "lengths")
    if text == "all":
        return [name for name in _SCENES if name not in _WITH_PRESET]
    wanted = text.split(",")
    for name in wanted:
        if name not in _SCENES:
            raise ValueError(f"--scene must be of {', '.join(_SCENES)}, or all, got {name!r}")
    for name in _WITH_PRESET:
        if name in wanted and len(wanted) > 1:
            raise ValueError(f"--scene={name} must go alone, as its policy is a preset's")
    return wanted


def check(args: argparse.Namespace, rest: list[str]) -> None:
    """Raises ValueError in one line."""
    if not is_trained(args):
        cli.refuse(rest, vars(args).keys() - {"benchmark"})
    least = {"repeats": 1, "lenience": 0, "drift": 0, "rows": 1, "vocab": 2, "draws": 1}
    for name, bound in least.items():
        value = getattr(args, name, None)
        if value is not None and not value >= bound:
            raise ValueError(f"--{name} must be >= {bound}, got {value}")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json: no directory {args.json.absolute().parent}; make it first")


def is_trained(args: argparse.Namespace) -> bool:
    return args.benchmark == "rollout" and scenes_of(args)[0] in _WITH_PRESET


def trained(args: argparse.Namespace) -> None:
    """The scenes that have a configuration, and its mesh."""
    from absl import flags

    from specrl_jax import runtime  # imports JAX: seconds that --help need not wait for

    runtime.start(flags.FLAGS.config)
    from specrl_jax.benchmarks import scenes as benchmark_scenes

    if scenes_of(args) == ["rules"]:
        options = {"repeats": args.repeats or 5, "drift": args.drift, "log": _log}
        _report(args, *benchmark_scenes.rules(flags.FLAGS.config, **options))
        return
    options = {"repeats": args.repeats or 7, "lenience": args.lenience, "drift": args.drift}
    options |= {"tables": runtime.cache_folder() / "step_costs", "log": _log}
    _report(args, *benchmark_scenes.trained(flags.FLAGS.config, **options))


def on_one_device(args: argparse.Namespace) -> None:
    """All others, on the first device."""
    import jax

    from specrl_jax import runtime
    from specrl_jax.benchmarks import lengths as benchmark_lengths
    from specrl_jax.benchmarks import scenes as benchmark_scenes
    from specrl_jax.benchmarks.policies import choose
    from specrl_jax.sharding import make_mesh

    runtime.use_compilation_cache()
    jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1]))
    if args.benchmark == "sampling":
        options = {name: getattr(args, name) for name in ("rows", "vocab", "draws", "repeats")}
        _report(args, *benchmark_scenes.sampling(**options))
        return
    changes = {name: getattr(args, name) for name in _SIZE_FLAGS} | {"rates": _rates(args.rates)}
    name = args.size or "tiny"
    size = choose(name, force=args.force, **changes)
    if args.until_sure:
        benchmark_lengths.check_until_sure(size)
    options = {"tables": runtime.cache_folder() / "step_costs", "log": _log}
    options |= {"profile": args.profile, "until_sure": args.until_sure}
    _report(args, *benchmark_scenes.rollout(name, size, _possible(args), **options))


def _possible(args: argparse.Namespace) -> list[str]:
    """The scenes that this device has; one that was named and is not there is an error."""
    import jax

    scenes = scenes_of(args)
    if "device" in scenes and jax.default_backend() == "cpu":
        if args.scene != "all":
            raise ValueError("--scene=device needs a GPU or TPU, this is a CPU")
        scenes.remove("device")
    return scenes


def _rates(text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(rate) for rate in text.split(","))
    except ValueError:
        raise ValueError(f"--rates must be shares as in 0,0.25, got {text!r}") from None


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report(args: argparse.Namespace, record: dict, text: str) -> None:
    print(text)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    with cli.user_errors():
        args, rest = parser().parse_known_args()
        check(args, rest)
        if not is_trained(args):
            on_one_device(args)
            sys.exit()
    cli.define_config()
    sys.argv[1:] = [f"--config={_CONFIG}:{args.preset or 'tiny'}", *rest]
    cli.run(lambda: trained(args))
