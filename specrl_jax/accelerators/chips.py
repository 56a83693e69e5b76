"""Accelerators to compile for without having one: what a chip can do, and devices of many.

`devices("v5e:4x4")` gives 16 devices that programs can be compiled for, but not run on. TPUs need
libtpu, GPUs need JAX's CUDA plugin and NVIDIA's assembler; neither needs the hardware.
"""

import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path

from specrl_jax.inputs import one_line

GB, GIB = 10**9, 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, from its maker's data sheet."""

    memory: float  # bytes that programs may use
    bandwidth: float  # of the memory, bytes a second
    flops: float  # bfloat16 operations a second, dense
    link: float  # bytes a second that it sends along one axis of the mesh, both neighbours together
    clock: float = 0.0  # Hz of the compiler's `estimated_cycles`; 0: it gives none
    target: str = ""  # a GPU as XLA wants it described


# CUDA C++ Programming Guide, compute capability 9.0; NVIDIA H100 and H200 data sheets (SXM).
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


def _hopper(name: str, memory: int, bandwidth: int) -> Chip:
    target = _HOPPER.format(name=f"NVIDIA {name}", memory=memory, bandwidth=bandwidth)
    return Chip(memory, bandwidth, 989e12, 450 * GB, target=target)


CHIPS = {
    # Google Cloud's pages of each; XLA keeps 0.25 GiB of a v5e for itself.
    "v5e": Chip(15.75 * GIB, 819 * GB, 197e12, 90 * GB, clock=1.5e9),
    "v5p": Chip(95 * GIB, 2_765 * GB, 459e12, 180 * GB, clock=1.75e9),
    "v6e": Chip(31.25 * GIB, 1_640 * GB, 918e12, 180 * GB, clock=1.75e9),
    "h100": _hopper("H100 80GB HBM3", 80 * GB, 3_350 * GB),
    "h200": _hopper("H200", 141 * GB, 4_800 * GB),
}


def parse(topology: str) -> tuple[str, tuple[int, ...]]:
    """The key of `CHIPS` and the shape: v5e:4x4 → ("v5e", (4, 4)); h100:8 → ("h100", (8,)).

    Raises ValueError in one line.
    """
    name, _, shape = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
        raise ValueError(
            f"--topology must be CHIP:SHAPE as in v5e:4x4, v5p:2x2x2 or h100:8 with a chip of "
            f"{', '.join(CHIPS)}, got {topology!r}"
        )
    if CHIPS[name].target and "x" in shape:
        raise ValueError(f"--topology of GPUs must be their number as in h100:8, got {topology!r}")
    return name, tuple(map(int, shape.split("x")))


def set_environment(topology: str) -> None:
    """What JAX and the compilers read when they start; call it before the first device is asked
    for. Values that are set already stay, XLA_FLAGS are added to.

    Raises ValueError in one line where the compiler is not installed.
    """
    name, _ = parse(topology)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not CHIPS[name].target:
        _require("libtpu", topology, "compile-tpu")
        # Ask no server what hardware there is, and do not warn that none answers.
        for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("TPU_WORKER_HOSTNAMES", "localhost"),
                            ("TPU_ACCELERATOR_TYPE", "v5litepod-1")):  # fmt: skip
            os.environ.setdefault(name, value)
        return
    if folder := os.environ.get("CUDA_PLUGIN_DIR"):  # where they were installed with pip --target
        sys.path.insert(0, folder)
    extra = "compile-cuda"
    _require("jax_plugins.xla_cuda12", topology, extra)
    nvcc = _require("nvidia.cuda_nvcc", topology, extra)
    # Tuning runs candidates on the device, which is not here; without it some products that
    # XLA generates cannot be compiled, so that they are left to cuBLAS.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    flags = f"{flags} --xla_gpu_cuda_data_dir={nvcc}"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # it would note that there is no driver
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ["PATH"] = f"{nvcc / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"


def _require(module: str, topology: str, extra: str) -> Path:
    """The folder of an installed module, which is not imported."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        spec = None
    if spec is None:
        raise ValueError(
            f"--topology={topology} needs {module}, which is not installed: "
            f"pip install '.[{extra}]' in the clone's directory"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def devices(topology: str) -> list:
    """Devices that programs can be compiled for; after `set_environment`."""
    from jax.experimental import topologies

    name, shape = parse(topology)
    with one_line(f"--topology={topology} cannot be had from the installed compiler"):
        if target := CHIPS[name].target:
            options = {"target_config": target, "topology": f"1x1x{shape[0]}"}
            return list(topologies.get_topology_desc("h100", "cuda", **options).devices)
        return list(topologies.get_topology_desc(topology, "tpu").devices)
