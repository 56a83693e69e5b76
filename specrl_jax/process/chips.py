"""Accelerators to compile for without having one: a chip's memory, and virtual devices.

`devices("v5e:4x4")` returns 16 devices that programs can be compiled for, but not run on. TPUs need
libtpu, GPUs need JAX's CUDA plugin and NVIDIA's assembler; neither needs the hardware.
"""

import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path

from specrl_jax.inputs import one_line

GB = 10**9
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, from its maker's data sheet."""

    memory: float  # bytes that programs may use
    target: str = ""  # XLA's description of a GPU; "": a TPU
    kinds: tuple[str, ...] = ()  # JAX's names for it
    flops: float = 0.0  # a second, of dense products in bfloat16, or in float16 if it lacks that

    @property
    def taken(self) -> float:
        """Bytes that JAX allocates at start: all of a TPU, a configurable part of a GPU."""
        part = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75") if self.target else 1
        return float(part) * self.memory


# Compute capability → operations per clock, threads and bytes of shared memory per multiprocessor,
# and maximum shared memory per block (CUDA C++ Programming Guide, compute capabilities).
_CAPABILITIES = {
    (7, 5): (64, 1024, 65_536, 65_536),
    (8, 0): (64, 2048, 167_936, 166_912),
    (8, 9): (128, 1536, 102_400, 101_376),
    (9, 0): (128, 2048, 233_472, 232_448),
}
_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {ghz}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {threads}
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {block_shared}
  shared_memory_per_core: {shared} l2_cache_size: {l2}
  memory_bandwidth: {bandwidth} device_memory_size: {memory}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "NVIDIA {name}"
"""


def _gpu(
    name: str,
    capability: tuple[int, int],
    cores: int,
    ghz: float,
    l2_mib: int,
    memory: float,
    bandwidth: float,
    teraflops: float,
    *kinds: str,
) -> Chip:
    """cores: multiprocessors. ghz: boost clock. bandwidth: of the memory, bytes a second."""
    fpus, threads, shared, block_shared = _CAPABILITIES[capability]
    major, minor = capability
    target = _TARGET.format(
        name=name, major=major, minor=minor, cores=cores, ghz=ghz, fpus=fpus, threads=threads,
        shared=shared, block_shared=block_shared, l2=l2_mib * 2**20, bandwidth=int(bandwidth),
        memory=int(memory),
    )  # fmt: skip
    return Chip(memory, target, kinds, teraflops * 1e12)


CHIPS = {
    # From Google Cloud's pages; XLA reserves 0.25 GiB of a v5e.
    "v5e": Chip(15.75 * GIB, kinds=("TPU v5 lite", "TPU v5e"), flops=197e12),
    "v5p": Chip(95 * GIB, kinds=("TPU v5", "TPU v5p"), flops=459e12),
    "v6e": Chip(31.25 * GIB, kinds=("TPU v6 lite", "TPU v6e"), flops=918e12),
    # NVIDIA's data sheets.
    "h100": _gpu(
        "H100 80GB HBM3", (9, 0), 132, 1.98, 50, 80 * GB, 3_350 * GB,
        989, "NVIDIA H100 80GB HBM3",
    ),
    "h200": _gpu("H200", (9, 0), 132, 1.98, 50, 141 * GB, 4_800 * GB, 989, "NVIDIA H200"),
    "a100-40gb": _gpu(
        "A100-SXM4-40GB", (8, 0), 108, 1.41, 40, 40 * GB, 1_555 * GB,
        312, "NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB",
    ),
    "a100-80gb": _gpu(
        "A100-SXM4-80GB", (8, 0), 108, 1.41, 40, 80 * GB, 2_039 * GB,
        312, "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe",
    ),
    # ECC uses part of the memory: what CUDA reports, in GiB.
    "l4": _gpu("L4", (8, 9), 58, 2.04, 48, 22 * GIB, 300 * GB, 121, "NVIDIA L4"),
    "t4": _gpu("T4", (7, 5), 40, 1.59, 4, 14.5 * GIB, 320 * GB, 65, "Tesla T4"),
    "rtx4090": _gpu(
        "GeForce RTX 4090", (8, 9), 128, 2.52, 72, 24 * GB, 1_008 * GB,
        165, "NVIDIA GeForce RTX 4090",
    ),
}  # fmt: skip


def peak_flops(device_kind: str) -> float:
    """Return a device's peak FLOPs a second, by JAX's name for it; 0 if unknown.

    Names must match exactly: a part of a chip has its own name.
    """
    return next((chip.flops for chip in CHIPS.values() if device_kind in chip.kinds), 0.0)


def parse(topology: str) -> tuple[str, tuple[int, ...]]:
    """Return the key of `CHIPS` and the shape: v5e:4x4 → ("v5e", (4, 4)); h100:8 → ("h100", (8,)).

    Raises a one-line ValueError.
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
    """Set the environment of JAX and the compilers, before the first device is requested.

    Existing values are kept, XLA_FLAGS are extended. Raises a one-line ValueError if the compiler
    is not installed.
    """
    name, _ = parse(topology)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if not CHIPS[name].target:
        _require("libtpu", topology, "compile-tpu")
        # Do not query any server for hardware, nor warn that none responds.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
        return
    if folder := os.environ.get("CUDA_PLUGIN_DIR"):  # installed with pip --target
        sys.path.insert(0, folder)
    extra = "compile-cuda"
    _require("jax_plugins.xla_cuda12", topology, extra)
    nvcc = _require("nvidia.cuda_nvcc", topology, extra)
    # Autotuning runs candidates on the device, which is absent; without it some products that XLA
    # generates cannot be compiled, so they are left to cuBLAS.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    flags = f"{flags} --xla_gpu_cuda_data_dir={nvcc}"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # else it reports that there is no driver
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    os.environ["PATH"] = f"{nvcc / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"


def _require(module: str, topology: str, extra: str) -> Path:
    """Return the folder of an installed module without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        spec = None
    if spec is None:
        raise ValueError(
            f"--topology={topology} needs {module}, which is not installed: "
            f"pip install -e '.[{extra}]' in the clone's directory"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def devices(topology: str) -> list:
    """Return devices that programs can be compiled for; after `set_environment`."""
    from jax.experimental import topologies

    name, shape = parse(topology)
    with one_line(f"--topology={topology} is not supported by the installed compiler"):
        if target := CHIPS[name].target:
            options = {"target_config": target, "topology": f"1x1x{shape[0]}"}
            return list(topologies.get_topology_desc("h100", "cuda", **options).devices)
        return list(topologies.get_topology_desc(topology, "tpu").devices)
