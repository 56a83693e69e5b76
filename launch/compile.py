"""Compile a run's programs for accelerators that this machine does not have.

    python launch/compile.py --config=configs/grpo.py:gsm8k --topology=v5e:2x2
    python launch/compile.py --config=configs/grpo.py:qwen3_1p7b --topology=h100:8 --programs=decode

Topologies: v5e:4x4, v5p:2x2x2, v6e:2x2; h100:8, h200:8, a100-40gb:1, a100-80gb:8, l4:1, t4:1,
rtx4090:1 and so on. TPUs need `pip install -e '.[compile-tpu]'` in the clone's directory, GPUs
'.[compile-cuda]'. docs/scaling.md explains the table.

--programs=decode,update compiles programs whose names start with these. --json=FILE writes all
results.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip need not have checked it
    sys.exit(f"error: Python must be 3.11 or later, got {sys.version.split()[0]}")

import json
import os
from pathlib import Path

from absl import flags

from specrl_jax.command_line import cli

_TOPOLOGY = flags.DEFINE_string("topology", None, "CHIP:SHAPE, as in v5e:4x4 or h100:8")
_PROGRAMS = flags.DEFINE_list("programs", [], "name prefixes of the programs to compile; all")
_JSON = flags.DEFINE_string("json", "", "write the results to this file")
flags.mark_flag_as_required("topology")


def main() -> None:
    from specrl_jax.process import chips

    topology = _TOPOLOGY.value
    config = flags.FLAGS.config
    file = Path(_JSON.value) if _JSON.value else None
    cli.check_folder("--json", file)
    chip = chips.CHIPS[chips.parse(topology)[0]]
    chips.set_environment(topology)
    if config.mesh.rollout_devices:
        raise ValueError(
            "mesh.rollout_devices must be 0 here, as updates and rollouts are compiled for the "
            f"same devices, got {config.mesh.rollout_devices}"
        )

    import jax

    # It reads its environment on import, which the fields of recipes may have triggered already.
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

    from specrl_jax.abstract import device_bytes
    from specrl_jax.compile import programs
    from specrl_jax.process import runtime

    runtime.start(config, given=cli.given_fields(), devices=chips.devices(topology))
    jax.config.update("jax_enable_compilation_cache", False)  # it would hide compile times
    from specrl_jax.compile import fit, report
    from specrl_jax.compile.from_config import abstract_run

    run = fit.fit_rows(abstract_run(config), chip.taken)
    print(fit.describe(run, chip.taken))
    listed = _chosen(programs.run_programs(run))
    mesh = dict(jax.sharding.get_mesh().shape)
    kept = device_bytes(run.kept)
    print(f"{topology}, mesh {mesh}: {run.describe()}; keeps {kept / 1e9:.3f} GB", flush=True)
    rows = []
    for program in listed:
        rows.append(report.compile_program(program, chip, kept))
        seconds = rows[-1]["seconds_to_compile"]
        print(f"{program.name}: {seconds:.1f} s", file=sys.stderr, flush=True)
    print(report.to_text(rows))
    total = sum(row["seconds_to_compile"] for row in rows)
    print(f"{len(rows)} programs, {total:.1f} s; in GB, of {chip.memory / 1e9:.2f} on a device")
    if file:
        figures = {"topology": topology, "mesh": mesh, "kept": kept, "programs": rows}
        file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _chosen(listed: list) -> list:
    """Return the programs whose names start with one of --programs; all if it is empty."""
    prefixes = _PROGRAMS.value or [""]
    for prefix in prefixes:
        if not any(program.name.startswith(prefix) for program in listed):
            names = ", ".join(program.name for program in listed)
            raise ValueError(f"--programs must start names of {names}, got {prefix}")
    return [program for program in listed if program.name.startswith(tuple(prefixes))]


if __name__ == "__main__":
    cli.define_config()
    cli.run(main)
