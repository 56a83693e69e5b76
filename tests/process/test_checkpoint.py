"""Checkpoints: exact, safe against kills and donation, kept as asked, on any mesh."""

import os
import pathlib
import re
import resource
import signal
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_runs import assert_same_bits, folders, one_line, run_until_killed

from specrl_jax.process.checkpoint import Checkpointer


class Moments(NamedTuple):
    """Stands for an optimizer's state: a class that Orbax does not know."""

    mu: jax.Array
    count: jax.Array
    nothing: None = None


def _values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((8, 16)).astype(np.float32),
        "half": rng.standard_normal((8, 4)).astype(jnp.bfloat16),
        "tokens": rng.integers(0, 99, (4, 2, 8), dtype=np.int32),
    }


SPECS = {"w": P("fsdp", "tensor"), "half": P(("data", "fsdp")), "tokens": P(None, "tensor")}


def _tree(mesh) -> dict:
    put = {n: jax.device_put(v, NamedSharding(mesh, SPECS[n])) for n, v in _values().items()}
    everywhere = NamedSharding(mesh, P())
    return {
        "params": put,
        "opt": (Moments(put["w"] * 2, jax.device_put(np.int32(7), everywhere)), ()),
        "key": jax.device_put(jax.random.key(3), everywhere),
    }


def _small(value: float) -> dict:
    return {"x": jnp.full((4,), value, jnp.float32)}


@pytest.mark.parametrize("restored_on", [(2, 2, 2), (1, 4, 2), (8, 1, 1), (1, 1, 1)])
def test_restore_is_bit_equal_on_any_mesh(tmp_path, make_mesh, restored_on):
    saved = _tree(make_mesh(2, 2, 2))
    host = {"position": 12, "seen": ["a", "b"], "reward": 0.1, "nested": {"none": None}}
    with Checkpointer(tmp_path / "checkpoints", keep_last=1) as checkpointer:
        checkpointer.save(5, saved, host)
    like = _tree(make_mesh(*restored_on))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        arrays, restored_host = checkpointer.restore(5, like)
    assert_same_bits(arrays, saved)
    assert restored_host == host
    for got, expected in zip(jax.tree.leaves(arrays), jax.tree.leaves(like), strict=True):
        assert got.sharding == expected.sharding
        assert got.dtype == expected.dtype


# Orbax writes from copies where shards are replicated, and from the arrays' own memory where not.
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 1), (1, 4, 2)])
def test_donating_the_state_after_save_leaves_the_checkpoint_alone(tmp_path, make_mesh, shape):
    sharding = NamedSharding(make_mesh(*shape), P("fsdp"))
    # 32 MiB of noise: writing them takes longer than the updates below.
    first = np.random.default_rng(0).standard_normal((2**10, 2**13), dtype=np.float32)
    update = jax.jit(lambda tree: {"w": -tree["w"] - 1}, donate_argnums=0)
    # The state is the output of an update, as in training: its memory is the device's own.
    before = jax.block_until_ready(update({"w": jax.device_put(-1 - first, sharding)}))
    expected = np.array(before["w"])
    state = jax.tree.map(jnp.copy, before)
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(3):
            state = jax.block_until_ready(update(state))
        arrays, _ = checkpointer.restore(1, before)
    np.testing.assert_array_equal(np.asarray(arrays["w"]), expected)
    np.testing.assert_array_equal(np.asarray(state["w"]), -1 - expected)


def test_keeps_the_last_and_the_best_and_leaves_a_step_that_is_there(tmp_path):
    metrics = {1: 0.5, 2: 0.9, 3: None, 4: float("nan"), 5: 0.7, 6: 0.9, 7: 0.1, 8: None}
    with Checkpointer(tmp_path, keep_last=2, keep_best=2) as checkpointer:
        for step, metric in metrics.items():
            assert checkpointer.save(step, _small(step), {"step": step}, metric=metric)
        checkpointer.wait()
    assert folders(tmp_path) == ["2", "6", "7", "8"]
    with Checkpointer(tmp_path, keep_last=2, keep_best=2) as checkpointer:
        assert checkpointer.latest_step() == 8
        # The metrics were read back: step 2, the worse of the two best by age, gives way.
        assert checkpointer.save(9, _small(9), {}, metric=1.0)
        assert not checkpointer.save(6, _small(2), {})
        checkpointer.wait()
        arrays, host = checkpointer.restore(6, _small(0))
    assert folders(tmp_path) == ["6", "8", "9"]
    assert host == {"step": 6}
    np.testing.assert_array_equal(np.asarray(arrays["x"]), [6, 6, 6, 6])


def test_a_metric_among_the_best(tmp_path):
    with Checkpointer(tmp_path, keep_last=2, keep_best=2) as checkpointer:
        assert checkpointer.is_best(-1.0)
        for step, metric in {1: 0.5, 2: None, 3: 0.9, 4: 0.1, 5: None}.items():
            checkpointer.save(step, _small(step), {}, metric=metric)
        assert [checkpointer.is_best(x) for x in (0.49, 0.5, 0.7, 2.0)] == [False, True, True, True]
        assert not checkpointer.is_best(None)
        assert not checkpointer.is_best(float("nan"))
    with Checkpointer(tmp_path, keep_last=2, keep_best=0) as checkpointer:
        assert not checkpointer.is_best(2.0)


def _die_in_the_second_save(folder: pathlib.Path) -> None:
    """Save step 1, and be killed as the first file or folder of step 2 is to get its last name."""
    checkpointer = Checkpointer(folder, keep_last=3)
    state = {"x": jax.random.bits(jax.random.key(0), (2**10,))}
    checkpointer.save(1, state, {"step": 1})
    checkpointer.wait()

    def kill_before_a_rename(event, arguments):
        if event == "os.rename" and str(folder) in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill_before_a_rename)
    checkpointer.save(2, state, {"step": 2})
    checkpointer.wait()


def test_a_save_killed_midway_is_ignored_and_replaced(tmp_path, caplog):
    run_until_killed(_die_in_the_second_save, tmp_path)
    names = folders(tmp_path)
    assert len(names) == 2
    assert "tmp" in names[1]  # it was killed while writing
    x = jax.random.bits(jax.random.key(0), (2**10,))
    with Checkpointer(tmp_path, read_only=True) as reader:
        assert reader.latest_step() == 1
    assert not caplog.records  # of what was asked for
    assert folders(tmp_path) == names  # it may be another job's save in progress
    with Checkpointer(tmp_path, keep_last=3) as checkpointer:
        assert checkpointer.latest_step() == 1
        arrays, host = checkpointer.restore(1, {"x": x})
        assert host == {"step": 1}
        assert bool((arrays["x"] == x).all())
        checkpointer.save(2, {"x": x + 3}, {"step": 2})
        arrays, _ = checkpointer.restore(2, {"x": x})
        assert bool((arrays["x"] == x + 3).all())
    assert folders(tmp_path) == ["1", "2"]


def test_restore_errors_are_one_line(tmp_path):
    with Checkpointer(tmp_path / "c", keep_last=3) as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(ValueError, match=r"no checkpoint of step 4, there are: none"):
            checkpointer.restore(4, _small(0))
        checkpointer.save(1, {"a": {"x": jnp.zeros((4,)), "y": jnp.zeros((2,))}}, {})
        checkpointer.save(2, _small(2), {})
        checkpointer.wait()
        cases = [
            (7, _small(0), "no checkpoint of step 7, there are: 1, 2"),
            (2, {"x": jnp.zeros((5,))}, "x is float32[4], this run needs float32[5]"),
            (2, {"x": jnp.zeros((4,), jnp.int32)}, "x is float32[4], this run needs int32[4]"),
            (1, {"a": {"x": jnp.zeros((4,))}}, "a.y is float32[2], this run needs no array"),
            (2, {"x": jnp.zeros((4,)), "z": jnp.zeros((4,))}, "z is no array, this run needs"),
        ]
        for step, like, expected in cases:
            with pytest.raises(ValueError, match=re.escape(expected)) as error:
                checkpointer.restore(step, like)
            one_line(error)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be opened") as error:
        Checkpointer(tmp_path / "file" / "checkpoints", keep_last=1)
    assert str(tmp_path) in one_line(error)


# Orbax's writing thread also lets the error through, which is raised again where it is waited for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_written_says_so_and_loses_no_earlier_step(tmp_path):
    """A limit on file sizes represents any failure; only a full disk asks for space."""
    noise = np.random.default_rng(0).standard_normal(300_000)  # is not made smaller by compression
    arrays = {"x": jnp.asarray(noise, jnp.float32)}
    with Checkpointer(tmp_path, keep_last=3) as checkpointer:
        checkpointer.save(1, arrays, {"position": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with (
            pytest.raises(OSError, match=r"File too large .* and run the same command") as error,
            Checkpointer(tmp_path, keep_last=3) as checkpointer,
        ):
            checkpointer.save(2, arrays, {"position": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path) in one_line(error)
    assert "room" not in str(error.value).replace(str(tmp_path), "")
    with Checkpointer(tmp_path, keep_last=3) as checkpointer:
        assert checkpointer.latest_step() == 1
        restored, host = checkpointer.restore(1, arrays)
    np.testing.assert_array_equal(restored["x"], arrays["x"])
    assert host == {"position": 1}
