"""Ask a policy.

    python launch/generate.py --run=RUN "PROMPT" [--step=best|last|N] [--temperature=T]
    python launch/generate.py --model=DIR < PROMPTS      a prompt on every line of standard input

--temperature is the run's evaluate.temperature where it is left out; 0 is greedy.
--config.FIELD=VALUE changes the configuration: --config.seed=1 samples anew,
--config.rollout.response_len=N is the longest response. `transformers serve` and `transformers
chat` talk to a policy that launch/export.py wrote.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import functools

from specrl_jax.config import cli


def parser() -> cli.Parser:
    parser = cli.policy_parser(__doc__)
    parser.add_argument("prompt", nargs="?", help="left out: lines of standard input")
    parser.add_argument("--temperature", type=float, help="0: greedy")
    return parser


def main() -> None:
    args, rest = parser().parse_known_args()
    cli.refuse([flag for flag in rest if not flag.startswith("--config.")], vars(args))
    from specrl_jax.evaluation import saved_policy  # it imports JAX, for which --help need not wait

    defaults = cli.presets()["configs/grpo.py:tiny"]
    if args.temperature is not None:
        rest.append(f"--config.evaluate.temperature={args.temperature}")
    change = functools.partial(cli.override, arguments=rest)
    policy = saved_policy.open_policy(args.run, args.model, args.step, defaults, change)
    weights = policy.weights()
    if args.prompt is not None:
        print(policy.answer(weights, args.prompt, 0))
        return
    for number, line in enumerate(sys.stdin):
        try:
            print(policy.answer(weights, line.rstrip("\n"), number), flush=True)
        except ValueError as error:  # the next line may be better
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    with cli.user_errors():
        main()
