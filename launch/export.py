"""Write a run's policy as a Hugging Face directory.

    python launch/export.py --run=RUN --out=DIR [--step=best|last|N] [--push=HUB_ID]
    python launch/export.py --run=RUN --out=DIR --adapters [--base=MODEL]

DIR gets the weights (safetensors), tokenizer, generation settings and a model card; it must be new
or empty. Adapters (lora.rank > 0) are merged into the weights. With --adapters DIR gets only the
adapters in PEFT's format, for model.source or the model --base, whose weights are compared with
those that the adapters were trained on. --step=best is the checkpoint with the highest held-out
reward. --push uploads DIR, to a new private model if the hub has none of this name; log in with
`hf auth login` first.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

from pathlib import Path

from specrl_jax.command_line import cli


def parser() -> cli.Parser:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="work directory of a run")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--step", default="last", help="best, last (default) or N")
    parser.add_argument("--adapters", action="store_true", help="write only the LoRA adapters")
    parser.add_argument("--base", default="", help="the model that peft adds the adapters to")
    parser.add_argument("--push", default="", help="upload to this model on the hub")
    return parser


def main() -> None:
    args, rest = parser().parse_known_args()
    cli.refuse(rest, vars(args))
    # JAX is slow to import; --help must not wait.
    from specrl_jax.evaluation import export, saved_policy

    export.check_out(args.out)
    if args.base and not args.adapters:
        raise ValueError("--base needs --adapters: without it all weights are written")
    presets = cli.presets()
    policy = saved_policy.open_policy(args.run, "", args.step, presets["configs/grpo.py:tiny"])
    if args.adapters:
        print(export.export_adapters(policy, args.out, args.base))
    else:
        if said := export.export(policy, args.run, args.out, presets):
            print(said)
    print(f"{args.out}: step {policy.step} of {args.run}")
    if args.push:
        print(f"pushed: {export.push(args.out, args.push)}")


if __name__ == "__main__":
    with cli.user_errors():
        main()
