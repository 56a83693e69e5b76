"""Compile a run's programs for accelerators that are not here.

    python launch/compile.py --config=configs/grpo.py:gsm8k --topology=v5e:2x2
    python launch/compile.py --config=configs/grpo.py:qwen3_1p7b --topology=h100:8 --plan

Topologies: v5e:4x4, v5p:2x2x2, v6e:2x2; h100:8, h200:8, a100-40gb:1, a100-80gb:8, l4:1, t4:1,
rtx4090:1 and so on. TPUs need `pip install '.[compile-tpu]'` in the clone's directory, GPUs
'.[compile-cuda]'. docs/scaling.md explains the table.

--plan prints the memory plan alone. --programs=decode,update compiles these alone. --tokens and
--reuse are a response's mean length and the share of it that drafts give, for the estimates of
attention kernels and of a whole step. --json=FILE writes all figures.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import json
from pathlib import Path

from absl import flags

from specrl_jax import cli

_TOPOLOGY = flags.DEFINE_string("topology", None, "CHIP:SHAPE, as in v5e:4x4 or h100:8")
_PLAN = flags.DEFINE_bool("plan", False, "the memory plan alone; compiles nothing")
_PROGRAMS = flags.DEFINE_list("programs", [], "names of the programs to compile; all")
_TOKENS = flags.DEFINE_float("tokens", 0.0, "mean length of a response; 0: rollout.response_len")
_REUSE = flags.DEFINE_float("reuse", 0.67, "share of the tokens that drafts give; SPEC-RL's", 0, 1)
_JSON = flags.DEFINE_string("json", "", "write the figures to this file")
flags.mark_flag_as_required("topology")


def main() -> None:
    from specrl_jax.accelerators import chips

    topology = _TOPOLOGY.value
    config = flags.FLAGS.config
    if _JSON.value and not Path(_JSON.value).absolute().parent.is_dir():
        raise ValueError(f"--json: no directory {Path(_JSON.value).absolute().parent}; make it")
    chip = chips.CHIPS[chips.parse(topology)[0]]
    chips.set_environment(topology)

    import jax  # reads the environment

    from specrl_jax import runtime

    runtime.start(config, devices=chips.devices(topology))
    jax.config.update("jax_enable_compilation_cache", False)  # it would hide what compiling takes
    from specrl_jax.accelerators import abstract_run, plan, programs, report

    run = abstract_run.abstract_run(config)
    mesh = dict(jax.sharding.get_mesh().shape)
    print(f"{topology}, mesh {mesh}: {run.describe()}", flush=True)
    every = programs.programs(run)
    if unknown := [name for name in _PROGRAMS.value if name not in every]:
        raise ValueError(f"--programs must be of {', '.join(every)}, got {unknown[0]}")
    figures = {"topology": topology, "mesh": mesh}
    if _PLAN.value:
        memory = plan.memory_plan(run, every, chip)
        print(memory.to_text())
        figures["plan"] = memory.to_json()
    else:
        rows = []
        tokens = _TOKENS.value or config.rollout.response_len
        # A row holds its prompt and, over its life, half of its response.
        live = min((config.data.prompt_len + tokens / 2) / run.slots, 1.0)
        figures["live"] = live
        for name in _PROGRAMS.value or every:
            rows.append(report.compile_program(name, every[name], chip, mesh, live))
            print(f"{name}: {rows[-1]['seconds_to_compile']:.1f} s", file=sys.stderr, flush=True)
        print(report.to_text(rows, chip))
        print(f"attention kernels over the cache read the {live:.0%} of it that rows fill")
        figures |= {"programs": rows, "step": {}}
        estimates = {"at least": "seconds"}
        if chip.clock and not any("not_readable" in row for row in rows):
            estimates["the compiler's estimate"] = "compiler_seconds"
        for how, key in estimates.items():
            for name, reuse in (("plain", 0.0), ("with drafts", _REUSE.value)):
                seconds = report.step_seconds(run, rows, tokens, reuse, key)
                figures["step"][f"{name}, {how}"] = seconds
        print(report.step_text(figures["step"], tokens, _REUSE.value))
    if _JSON.value:
        Path(_JSON.value).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    cli.define_config()
    cli.run(main)
