"""Set-up of a process: the mesh of its configuration, the compilation cache."""

import importlib.metadata
import logging
import types

import jax
import jax.numpy as jnp
import pytest
import small_runs
from jax.experimental.compilation_cache import compilation_cache

from specrl_jax.process import runtime
from specrl_jax.sharding import rollout_mesh


@pytest.fixture
def restored():
    """Put the process's mesh and cache folder back after the test."""
    before, folder = jax.sharding.get_mesh(), jax.config.jax_compilation_cache_dir
    yield
    jax.set_mesh(before)
    jax.config.update("jax_compilation_cache_dir", folder)


def test_start_puts_the_mesh_in_use(restored):
    values = {"mesh.data": 2, "mesh.tensor": 2, "mesh.fsdp": -1}
    runtime.start(small_runs.small_config(values))
    assert dict(jax.sharding.get_mesh().shape) == {"data": 2, "fsdp": 2, "tensor": 2}


def test_rollouts_get_the_last_devices(restored):
    values = {"rollout.staleness": 1, "mesh.tensor": 2, "mesh.rollout_devices": 4}
    runtime.start(small_runs.small_config(values))
    mesh = jax.sharding.get_mesh()
    second = rollout_mesh(4, 2)
    assert dict(mesh.shape) == dict(second.shape) == {"data": 2, "fsdp": 1, "tensor": 2}
    assert [x.id for x in (*mesh.devices.flat, *second.devices.flat)] == list(range(8))
    assert rollout_mesh(0, 2) is mesh


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.lenience": -1.0}, r"^rollout.lenience must be >= 0, got -1.0$"),
        (
            {"rollout.staleness": 1, "mesh.rollout_devices": 8},
            r"^mesh.rollout_devices must be <= 7, with 8 devices of 1 processes, got 8$",
        ),
        (
            {"rollout.staleness": 1, "mesh.rollout_devices": 3, "mesh.fsdp": 1, "mesh.tensor": 5},
            r"^mesh.rollout_devices must be a multiple of mesh.tensor = 5 and at most .*got 3$",
        ),
        ({"mesh.fsdp": 3}, r"^mesh: data=-1 x fsdp=3 x tensor=1 does not fit 8 devices"),
        ({}, r"^rollout.prompts_per_step must be divisible by .* = 8 .8 fits., got 4$"),
    ],
)
def test_start_refuses_before_anything_is_set(restored, changes, message):
    before = jax.sharding.get_mesh()
    with pytest.raises(ValueError, match=message):
        runtime.start(small_runs.small_config(changes))
    assert jax.sharding.get_mesh() is before


# Devices ------------------------------------------------------------------------------------------

COMMAND = f"pip install 'jax[cuda]=={jax.__version__}'"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Root of a machine with a GPU, whose user requested no platform and has no plugin."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(jax_platforms=None))
    real = importlib.metadata.version

    def version(name):
        if name.startswith("jax-cuda"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    runtime._say_once.cache_clear()
    return tmp_path


def fail() -> None:
    raise RuntimeError("Unable to load CUDA. Is it installed?\nsecond line")


def log_and_find(platform: str):
    """A `jax.devices` that logs as JAX does where its plugin fails."""

    def devices():
        log = logging.getLogger("jax._src.xla_bridge")
        try:
            fail()
        except RuntimeError:
            log.exception("Jax plugin configuration error")
        log.warning("An NVIDIA GPU may be present on this machine")
        return [types.SimpleNamespace(platform=platform)]

    return devices


def test_an_idle_accelerator_is_one_line(machine, monkeypatch, capsys, caplog):
    monkeypatch.setattr(jax, "devices", log_and_find("cpu"))
    for _ in range(2):
        assert [device.platform for device in runtime.all_devices(machine)] == ["cpu"]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"CPU: JAX's CUDA plugin is not installed; {COMMAND} fixes it" in line
    assert caplog.records == []


def test_a_plugin_that_fails_says_why(machine, monkeypatch, capsys):
    version = importlib.metadata.version("jaxlib")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(jax, "devices", log_and_find("cpu"))
    runtime.all_devices(machine)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"CPU: Unable to load CUDA. Is it installed?; pip install 'jax[cuda]=={version}" in line


@pytest.mark.parametrize(
    ("platforms", "visible"), [("cpu", None), ("cpu,cuda", None), (None, ""), (None, "-1")]
)
def test_a_user_who_wants_the_cpu_is_told_nothing(
    machine, monkeypatch, capsys, caplog, platforms, visible
):
    jax.config.jax_platforms = platforms
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(jax, "devices", log_and_find("cpu"))
    runtime.all_devices(machine)
    assert capsys.readouterr().err == ""
    assert caplog.records == []


def test_a_plugin_of_another_version_that_is_used_is_told(machine, monkeypatch, capsys):
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.1"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name, ""))
    monkeypatch.setattr(jax, "devices", log_and_find("gpu"))
    runtime.all_devices(machine)
    assert capsys.readouterr().err.splitlines() == [
        "warning: jax-cuda12-plugin is 0.10.1, jaxlib 0.10.2, which must be equal; "
        "pip install 'jax[cuda]==0.10.2' fixes it"
    ]


def test_without_an_accelerator_the_log_of_jax_stays(machine, monkeypatch, capsys, caplog):
    monkeypatch.setattr(jax, "devices", log_and_find("cpu"))
    runtime.all_devices(machine / "empty")
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "warning: this machine" not in capsys.readouterr().err


def test_devices_that_do_not_start_are_one_line(machine, monkeypatch):
    monkeypatch.setattr(jax, "devices", fail)
    line = small_runs.line_of(runtime.all_devices, machine)
    reason = "JAX's CUDA plugin is not installed"
    assert line == f"JAX cannot start its devices: {reason}; {COMMAND} may fix it"
    line = small_runs.line_of(runtime.all_devices, machine / "empty")
    assert line == "JAX cannot start its devices: Unable to load CUDA. Is it installed?"


# The compilation cache ----------------------------------------------------------------------------


def test_a_chosen_cache_folder_stays_and_the_default_is_the_users(restored, monkeypatch, tmp_path):
    folder = jax.config.jax_compilation_cache_dir
    runtime.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == folder
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runtime.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "specrl_jax" / "jax")


def test_programs_are_counted_as_built_or_read_from_the_cache(tmp_path, restored):
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    x = jnp.arange(3.0)
    runtime.compile_metrics()  # from here on
    jax.jit(lambda x: x * 3 + 1)(x)
    jax.jit(lambda x: x * 3 + 2)(x)
    built = runtime.compile_metrics()
    assert (built["compile/built"], built["compile/read"]) == (2, 0)
    jax.clear_caches()
    jax.jit(lambda x: x * 3 + 1)(x)
    read = runtime.compile_metrics()
    assert (read["compile/built"], read["compile/read"]) == (0, 1)
    assert min(built["time/compile"], read["time/compile"]) > 0
    compilation_cache.reset_cache()
