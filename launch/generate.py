"""Ask a policy.

    python launch/generate.py --run=RUN "PROMPT" [--step=best|last|N] [--temperature=T]
    python launch/generate.py --model=DIR                 a chat; an empty line begins a new one

The response is printed as it is sampled. --temperature is the run's evaluate.temperature where it
is left out; 0 is greedy. --config.FIELD=VALUE changes the configuration: --config.seed=1 samples
anew, --config.rollout.response_len=N is the longest response.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import argparse
import functools

from specrl_jax.config import cli


def parser() -> argparse.ArgumentParser:
    parser = cli.policy_parser(__doc__)
    parser.add_argument("prompt", nargs="?", help="left out: a chat")
    parser.add_argument("--temperature", type=float, help="0: greedy")
    return parser


def say(responder, prompt) -> str:
    """Print a response as it comes; returns its text."""
    text = responder.respond(prompt, functools.partial(print, end="", flush=True))
    print()
    return text


def chat(responder) -> None:
    """Answer lines of the terminal, or of a pipe, until they end."""
    ask = functools.partial(input, "> " if sys.stdin.isatty() else "")
    messages = ()
    if not responder.keeps_history:
        print("no chat template: every line is a prompt of its own", file=sys.stderr)
    while True:
        try:
            line = ask()
        except EOFError:
            return
        if not line:
            messages = ()
            continue
        messages = (*messages, {"role": "user", "content": line})
        try:
            if not responder.keeps_history:
                say(responder, line)
                continue
            while len(messages) > 1 and not responder.fits(messages):
                messages = messages[2:]
            messages = (*messages, {"role": "assistant", "content": say(responder, messages)})
        except ValueError as error:  # the next line may be better
            messages = messages[:-1]
            print(f"error: {error}", file=sys.stderr)


def main() -> None:
    args, rest = parser().parse_known_args()
    cli.refuse([flag for flag in rest if not flag.startswith("--config.")], vars(args))
    from specrl_jax.evaluation import chat as text
    from specrl_jax.evaluation import saved_policy

    defaults = cli.presets()["configs/grpo.py:tiny"]
    if args.temperature is not None:
        rest.append(f"--config.evaluate.temperature={args.temperature}")
    change = functools.partial(cli.override, arguments=rest)
    policy = saved_policy.open_policy(args.run, args.model, args.step, defaults, change)
    responder = text.Responder(policy, policy.config.evaluate.temperature)
    if args.prompt is None:
        chat(responder)
    else:
        say(responder, args.prompt)


if __name__ == "__main__":
    with cli.user_errors():
        main()
