"""Evaluate a policy: pass@1, avg@k, pass@k, greedy and sampled, with the rollouts of training.

    python launch/evaluate.py --run=RUN [--tasks=TASK,TASK] [--step=best|last|N] [--samples=8]
    python launch/evaluate.py --model=DIR --tasks=problems.jsonl,reasoning_gym:chain_sum

A TASK is held_out (the run's own, the default), FILE.jsonl or FILE.parquet, or sort or
reasoning_gym:NAME with any :OPTION=VALUE. Public benchmarks: see docs/evaluation.md.
--samples=0 evaluates greedily only. --limit=N takes N problems of each task.
--config.FIELD=VALUE changes the configuration, e.g. data.instruction, reward.name, reward.extract.
--json=FILE writes the results. If a task does not fit the policy, the others are still evaluated,
and the exit code is 2.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import functools
from pathlib import Path

from specrl_jax.command_line import cli


def parser() -> cli.Parser:
    parser = cli.policy_parser(__doc__)
    parser.add_argument("--tasks", default="held_out", help="separated by commas; see above")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt (default: 8)")
    parser.add_argument("--temperature", type=float, help="default: the run's evaluate.temperature")
    parser.add_argument("--limit", type=int, default=0, help="problems per task; 0: all")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser


def main() -> None:
    args, rest = parser().parse_known_args()
    cli.refuse([flag for flag in rest if not flag.startswith("--config.")], vars(args))
    if args.samples < 0 or args.limit < 0:
        raise ValueError(f"--samples and --limit must be >= 0, got {args.samples}, {args.limit}")
    cli.check_folder("--json", args.json)
    from specrl_jax.benchmarks.rollout import Report
    from specrl_jax.evaluation import eval_tasks, saved_policy

    names = [name for name in args.tasks.split(",") if name]
    if args.model and eval_tasks.HELD_OUT in names:
        raise ValueError("--tasks must be given with --model, which has no held-out prompts")
    if args.temperature is not None:
        rest.append(f"--config.evaluate.temperature={args.temperature}")
    change = functools.partial(cli.override, arguments=rest)
    defaults = cli.presets()["configs/grpo.py:tiny"]
    policy = saved_policy.open_policy(args.run, args.model, args.step, defaults, change)
    samples = 0 if args.temperature == 0 else args.samples
    temperature = policy.config.evaluate.temperature or policy.config.rollout.temperature
    # An unknown name fails here, before anything is computed.
    tasks = [eval_tasks.load_task(name, policy.config, args.limit, change) for name in names]
    rows = []
    misfits = []
    try:
        for task in tasks:
            try:
                rows += eval_tasks.measure_task(policy, task, samples, temperature)
            except (ValueError, OSError) as error:
                misfits.append(f"{task.name}: {error}")
    finally:  # also after Ctrl-C
        title = f"{policy.name}, step {policy.step}" if args.run else policy.name
        report = Report(f"{title}; ci95: half a 95 % interval, normal over prompts", rows)
        if rows:
            print(report.to_text(), flush=True)
        if args.json and rows:
            report.write_json(args.json)
    if misfits:
        raise ValueError(f"no results for {'; '.join(misfits)}")


if __name__ == "__main__":
    with cli.user_errors():
        main()
