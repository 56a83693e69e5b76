"""Set-up of a process: the mesh of its configuration, the compilation cache."""

import jax
import jax.numpy as jnp
import pytest
import small_runs
from jax.experimental.compilation_cache import compilation_cache

from specrl_jax import runtime


@pytest.fixture
def restored():
    """The mesh and the cache folder of the process, put back after the test."""
    before, folder = jax.sharding.get_mesh(), jax.config.jax_compilation_cache_dir
    yield
    jax.set_mesh(before)
    jax.config.update("jax_compilation_cache_dir", folder)


def test_start_puts_the_mesh_in_use(restored):
    values = {"mesh.data": 2, "mesh.tensor": 2, "mesh.fsdp": -1}
    runtime.start(small_runs.small_config(values))
    assert dict(jax.sharding.get_mesh().shape) == {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.lenience": -1.0}, r"^rollout.lenience must be >= 0, got -1.0$"),
        ({"mesh.fsdp": 3}, r"^mesh: data=-1 x fsdp=3 x tensor=1 does not fit 8 devices"),
        ({}, r"^rollout.prompts_per_step must be divisible by .* = 8 .8 fits., got 4$"),
    ],
)
def test_start_refuses_before_anything_is_set(restored, changes, message):
    before = jax.sharding.get_mesh()
    with pytest.raises(ValueError, match=message):
        runtime.start(small_runs.small_config(changes))
    assert jax.sharding.get_mesh() is before


def test_a_chosen_cache_folder_stays(restored):
    folder = jax.config.jax_compilation_cache_dir
    runtime.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == folder


def test_the_default_cache_folder_is_the_users(restored, monkeypatch, tmp_path):
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
