"""Prompt a policy, or let it play an episode of its environment.

    python launch/generate.py --run=RUN "PROMPT" [--step=best|last|N] [--temperature=T]
    python launch/generate.py --model=DIR < PROMPTS      one prompt per line of standard input
    python launch/generate.py --run=RUN "PROMPT" --answer=ANSWER       with environment.name

With an environment each turn is shown with its role as it ends, and finally the reward. ANSWER is
passed to the environment's `reset`; a line of standard input may have its own, after a tab.
--temperature defaults to the run's evaluate.temperature; 0 is greedy.
--config.FIELD=VALUE changes the configuration: --config.seed=1 gives other samples,
--config.rollout.response_len=N sets the longest response. `transformers serve` and `transformers
chat` can serve a policy that launch/export.py wrote.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import functools
from collections.abc import Callable

from specrl_jax.command_line import cli


def parser() -> cli.Parser:
    parser = cli.policy_parser(__doc__)
    parser.add_argument("prompt", nargs="?", help="default: lines of standard input")
    parser.add_argument("--answer", help="the problem's answer, for an environment")
    parser.add_argument("--temperature", type=float, help="0: greedy")
    return parser


def main() -> None:
    args, rest = parser().parse_known_args()
    cli.refuse([flag for flag in rest if not flag.startswith("--config.")], vars(args))
    from specrl_jax.evaluation import saved_policy  # JAX is slow to import; --help must not wait

    defaults = cli.presets()["configs/grpo.py:tiny"]
    if args.temperature is not None:
        rest.append(f"--config.evaluate.temperature={args.temperature}")
    change = functools.partial(cli.override, arguments=rest)
    policy = saved_policy.open_policy(args.run, args.model, args.step, defaults, change)
    weights = policy.weights()
    if not policy.config.environment.name:
        if args.answer is not None:
            rule = "left out without an environment (or set --config.environment.name)"
            raise ValueError(f"--answer must be {rule}, got {args.answer!r}")
        answer = functools.partial(policy.answer, weights)
        respond(args.prompt, lambda line, number: print(answer(line, number), flush=True))
        return
    from specrl_jax.evaluation.play import play
    from specrl_jax.training.build import make_responder

    responder = make_responder(policy.config, policy.tokenizer)

    def play_line(line: str, number: int) -> None:
        prompt, tab, own = line.partition("\t")
        play(policy, weights, responder, prompt, own if tab else args.answer or "", number)

    with responder.pool:
        respond(args.prompt, play_line)


def respond(prompt: str | None, answer: Callable[[str, int], None]) -> None:
    """Answer the prompt, or each line of standard input."""
    if prompt is not None:
        answer(prompt, 0)
        return
    for number, line in enumerate(sys.stdin):
        try:
            answer(line.rstrip("\n"), number)
        except ValueError as error:  # the next line may be valid
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    with cli.user_errors():
        main()
