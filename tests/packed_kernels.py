"""Compile the kernels for packed tokens for absent GPUs, and print the resources of each.

    CUDA_PLUGIN_DIR=$PWD/cuda python tests/packed_kernels.py l4:1 h100:1

One line of JSON per chip, head size, type and kernel: the most registers per thread, bytes of
shared memory and bytes of spilled registers, for 2,560 and 10,240 tokens, with and without a window
and a soft cap. docs/scaling.md lists what must be installed.
"""

import collections
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from specrl_jax.process import chips

_SIZES = (64, 128, 256)
_DTYPES = ("bfloat16", "float32")
_TOKENS = (2_560, 10_240)
_LIMITS = ((False, 0.0), (True, 50.0))  # whether there is a window, and the soft cap


def compile_kernels(
    topology: str, tokens: int, size: int, dtype: str, is_local: bool, softcap: float
) -> None:
    """Compile output and gradients of one sequence with two query heads and a key/value head."""
    import jax

    from specrl_jax.models import attention
    from specrl_jax.sharding import make_mesh

    def run(q, k, v, ints):
        def attend(q, k, v):
            limits = {"window": 1 if is_local else None, "softcap": softcap}
            return attention.attend_packed(q, k, v, ints, ints, kernels=("packed",), **limits)

        out, pull_back = jax.vjp(attend, q, k, v)
        return pull_back(out)

    with jax.set_mesh(make_mesh(devices=chips.devices(topology))):
        heads = [jax.ShapeDtypeStruct((1, tokens, n, size), dtype) for n in (2, 1, 1)]
        jax.jit(run).lower(*heads, jax.ShapeDtypeStruct((1, tokens), "int32")).compile()


def read_dump(folder: Path) -> dict[str, dict[str, int]]:
    """Return, by kernel name, the resources reported by NVIDIA's assembler and XLA."""
    thunks = next(folder.glob("*thunk_sequence.txt")).read_text()
    shared = dict(re.findall(r"\] (attend_packed\w*) grid.*shared_memory: (\d+) bytes", thunks))
    figures = {}
    for file in folder.glob("*.ptx"):
        text = file.read_text()
        if not (name := re.search(r"\.entry (attend_packed\w*)", text)):
            continue
        target = re.search(r"\.target (\w+)", text)[1]
        command = ["ptxas", "-v", f"-arch={target}", str(file), "-o", os.devnull]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        figures[name[1]] = {
            "registers": int(re.search(r"Used (\d+) registers", told)[1]),
            "shared": int(shared[name[1]]),
            "spilt": int(re.search(r"(\d+) bytes spill stores", told)[1]),
        }
    return figures


def main(topologies: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        chips.set_environment(topologies[0])
        for topology, size, dtype in itertools.product(topologies, _SIZES, _DTYPES):
            most = collections.defaultdict(collections.Counter)
            for tokens, limits in itertools.product(_TOKENS, _LIMITS):
                compile_kernels(topology, tokens, size, dtype, *limits)
                for kernel, figures in read_dump(folder).items():
                    most[kernel] |= collections.Counter(figures)  # the larger of each
                for file in folder.iterdir():
                    file.unlink()
            for kernel, figures in sorted(most.items()):
                row = {"topology": topology, "size": size, "dtype": dtype, "kernel": kernel}
                row |= {name: figures[name] for name in ("registers", "shared", "spilt")}
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
