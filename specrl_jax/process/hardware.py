"""Accelerators of this machine, and whether JAX's installed packages can use them.

Imports only the standard library: a notebook uses it before anything is installed.
"""

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path("/")
# Files that reveal an NVIDIA GPU. The third is for WSL. The last exists in a container that was
# started without its GPUs, too.
_NVIDIA_FILES = (
    "dev/nvidia[0-9]*",
    "dev/nvidiactl",
    "usr/lib/wsl/lib/nvidia-smi",
    "proc/driver/nvidia/gpus/*",
)
_GOOGLE = "0x1ae0"  # as vendor of a PCI device
# Set on TPU machines. TPU_NAME is left out, as users set it to control one remotely;
# NVIDIA_VISIBLE_DEVICES does not reveal a GPU either: NVIDIA's images set it on every machine.
_TPU_VARIABLES = ("COLAB_TPU_ADDR", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID")
_NAMES = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}
_PACKAGES = {"cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"), "tpu": ("libtpu",)}
_ABSENT = {"cuda": "JAX's CUDA plugin is not installed", "tpu": "libtpu is not installed"}


def accelerator(root: Path = ROOT, variables: Mapping[str, str] = os.environ) -> str:
    """Return the JAX extra that this machine's accelerator needs: cuda, tpu, or "" if it has none.

    root: of the file system. variables: of the environment.
    """
    if any(_exist(root, pattern) for pattern in _NVIDIA_FILES):
        return "cuda"
    if any(variables.get(name) for name in _TPU_VARIABLES) or _exist(root, "dev/accel[0-9]*"):
        return "tpu"
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    passed_through = _exist(root, "dev/vfio/[0-9]*")
    if passed_through and any(x.read_text("utf-8").strip() == _GOOGLE for x in vendors):
        return "tpu"
    return ""


def command(extra: str) -> str:
    """Return the command that installs what an accelerator needs, for the installed jax."""
    return f"pip install 'jax[{extra}]=={_version('jax')}'"


def misfit(extra: str) -> str:
    """Return why the installed packages cannot use an accelerator; "" if they can."""
    versions = {name: found for name in _PACKAGES[extra] if (found := _version(name))}
    if not versions:
        return _ABSENT[extra]
    jaxlib = _version("jaxlib")
    if extra == "cuda" and jaxlib not in versions.values():
        there = " and ".join(f"{name} is {version}" for name, version in versions.items())
        return f"{there}, jaxlib {jaxlib}"
    return ""


def unused(extra: str, said: str, root: Path = ROOT) -> str:
    """Return a one-line warning: JAX ignores the accelerator, why, and what to do.

    said: JAX's own explanation, if it gave one.
    """
    why = misfit(extra) or said or "JAX could not start it"
    mend = f"{command(extra)} fixes it"
    if extra == "cuda" and not any(_exist(root, pattern) for pattern in _NVIDIA_FILES[:3]):
        why = "/dev has none"
        mend = "start the container with its GPUs, as docker run --gpus=all does"
    return (
        f"warning: this machine has {_NAMES[extra]} but JAX computes on the CPU: {why}; {mend} "
        "(JAX_PLATFORMS=cpu: the CPU is intended)"
    )


def _exist(root: Path, pattern: str) -> bool:
    return any(root.glob(pattern))


def _version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
