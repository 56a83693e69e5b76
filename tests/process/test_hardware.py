"""Accelerators by files below a folder, and packages by versions that the tests make up."""

import pytest

from specrl_jax.process import hardware


def make(root, *files, **contents):
    """Files below `root`: empty ones, and of PCI devices the vendor's."""
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for number, vendor in contents.items():
        path = root / "sys/bus/pci/devices" / number / "vendor"
        path.parent.mkdir(parents=True)
        path.write_text(vendor + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "variables", "expected"),
    [
        (("dev/null", "dev/accel/accel0", "dev/nvidia-caps/nvidia-cap1"), {}, ""),
        (("dev/nvidia12",), {}, "cuda"),
        (("dev/nvidiactl",), {}, "cuda"),
        (("dev/dxg",), {}, ""),  # of WSL, for whatever graphics card
        (("dev/dxg", "usr/lib/wsl/lib/nvidia-smi"), {}, "cuda"),
        (("proc/driver/nvidia/gpus/0000:00:04.0/information",), {}, "cuda"),
        (("dev/accel0",), {}, "tpu"),
        (("dev/vfio/0",), {}, ""),  # a device that a virtual machine gets
        ((), {"COLAB_TPU_ADDR": "10.0.0.2:8470"}, "tpu"),
        ((), {"TPU_ACCELERATOR_TYPE": "v5litepod-1"}, "tpu"),
        ((), {"TPU_ACCELERATOR_TYPE": ""}, ""),
        ((), {"NVIDIA_VISIBLE_DEVICES": "all", "TPU_NAME": "mine"}, ""),
    ],
)
def test_what_the_machine_has(tmp_path, files, variables, expected):
    assert hardware.accelerator(make(tmp_path, *files), variables) == expected


@pytest.mark.parametrize(
    ("file", "vendor", "expected"),
    [
        ("dev/vfio/0", "0x1ae0", "tpu"),
        ("dev/vfio/0", "0x8086", ""),
        ("dev/vfio/vfio", "0x1ae0", ""),  # a network card of the same vendor
    ],
)
def test_a_tpu_is_a_device_of_its_vendor_that_is_passed_through(tmp_path, file, vendor, expected):
    assert hardware.accelerator(make(tmp_path, file, one=vendor), {}) == expected


@pytest.fixture
def install(monkeypatch):
    """Set the versions of the installed packages: jax and jaxlib 0.10.2, and those given."""

    def set_versions(**versions):
        there = {"jax": "0.10.2", "jaxlib": "0.10.2"}
        there |= {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(hardware, "_version", lambda name: there.get(name, ""))

    return set_versions


@pytest.mark.parametrize(
    ("extra", "versions", "expected"),
    [
        ("cuda", {}, "JAX's CUDA plugin is not installed"),
        ("cuda", {"libtpu": "0.0.42"}, "JAX's CUDA plugin is not installed"),
        ("cuda", {"jax_cuda12_plugin": "0.7.2"}, "jax-cuda12-plugin is 0.7.2, jaxlib 0.10.2"),
        ("cuda", {"jax_cuda12_plugin": "0.10.2"}, ""),
        ("cuda", {"jax_cuda12_plugin": "0.7.2", "jax_cuda13_plugin": "0.10.2"}, ""),
        ("tpu", {}, "libtpu is not installed"),
        ("tpu", {"libtpu": "0.0.42"}, ""),
    ],
)
def test_whether_the_packages_fit(install, extra, versions, expected):
    install(**versions)
    assert hardware.misfit(extra) == expected


def test_the_warning_names_the_command(install, tmp_path):
    install(jax_cuda12_plugin="0.7.2")
    assert hardware.unused("cuda", "no libraries", make(tmp_path, "dev/nvidia0")) == (
        "warning: this machine has an NVIDIA GPU but JAX computes on the CPU: jax-cuda12-plugin is "
        "0.7.2, jaxlib 0.10.2; pip install 'jax[cuda]==0.10.2' fixes it (JAX_PLATFORMS=cpu: the "
        "CPU is intended)"
    )
    install(jax_cuda12_plugin="0.10.2")
    line = hardware.unused("cuda", "no libraries", tmp_path)
    assert "CPU: no libraries; pip install 'jax[cuda]==0.10.2' fixes it" in line
    install()
    line = hardware.unused("tpu", "")
    assert "a TPU but JAX computes on the CPU: libtpu is not installed; pip install 'jax[" in line


def test_a_container_without_its_gpus_needs_no_package(install, tmp_path):
    install()
    root = make(tmp_path, "proc/driver/nvidia/gpus/0000:00:04.0/information")
    line = hardware.unused("cuda", "", root)
    assert "CPU: /dev has none; start the container with its GPUs" in line
    assert "pip install" not in line
