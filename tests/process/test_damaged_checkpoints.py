"""Files of a checkpoint that are not as they were written: found, named, never restored."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_runs import assert_same_bits, folders, one_line

from specrl_jax.process.checkpoint import Checkpointer, DamagedCheckpointError, checksums


def _two_steps(folder, mesh) -> tuple[dict, dict]:
    """Saves steps 1 and 2 of a tree; returns both trees."""
    rng = np.random.default_rng(1)
    first = {
        "params": {
            "noise": rng.standard_normal(2**13, np.float32),
            "half": rng.standard_normal((8, 4)).astype(jnp.bfloat16),
        },
        "tokens": rng.integers(0, 99, (4, 2, 8), dtype=np.int32),
        "count": np.int32(7),
    }
    second = jax.tree.map(lambda x: x + 1, first)
    everywhere = NamedSharding(mesh, P())
    keys = {"key": jax.random.key(3)}
    first = jax.device_put(first | keys, everywhere)
    second = jax.device_put(second | keys, everywhere)
    with Checkpointer(folder, keep_last=2) as checkpointer:
        checkpointer.save(1, first, {"position": [1.5]}, metric=0.5)
        checkpointer.save(2, second, {"position": [2.5]}, metric=0.25)
    return first, second


def _refusal(folder, like) -> str:
    """Return the line that refuses the newest step, step 2; nothing is moved."""
    before = folders(folder)
    with (
        Checkpointer(folder, keep_last=2) as checkpointer,
        pytest.raises(DamagedCheckpointError) as error,
    ):
        checkpointer.restore_newest(like)
    assert folders(folder) == before
    line = one_line(error)
    assert line.startswith(f"{folder / '2'} is damaged: ")
    return line


def _files(folder) -> list[pathlib.Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("part", ["arrays", "host", "*"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_checkpoint_is_refused_until_it_is_deleted(tmp_path, mesh, part, damage):
    first, second = _two_steps(tmp_path, mesh)
    files = [p for x in (tmp_path / "2").glob(part) if x.name != "metrics" for p in _files(x)]
    assert files
    for path in files:
        if damage == "truncate":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
    assert _refusal(tmp_path, second).endswith("; delete that folder to go back to step 1")
    shutil.rmtree(tmp_path / "2")
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        step, arrays, host = checkpointer.restore_newest(second)
        assert (step, host) == (1, {"position": [1.5]})
        assert_same_bits(arrays, first)
        assert checkpointer.save(2, second, {})  # the step is computed again
    assert folders(tmp_path) == ["1", "2"]


def test_a_metric_is_read_or_refused(tmp_path, mesh):
    _, second = _two_steps(tmp_path, mesh)
    path = tmp_path / "2" / "metrics" / "metrics"
    path.write_text("{")
    with pytest.raises(OSError, match=f"^checkpoints in {tmp_path} cannot be opened: ") as error:
        Checkpointer(tmp_path)
    one_line(error)
    path.unlink()  # only its rank among the best is lost
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_newest(second)[0] == 2


FLIPS, ZEROED = 60, 30  # seeded damages of one place each


@pytest.mark.parametrize("damage", ["flip", "zero"])
def test_no_damaged_bit_is_restored(tmp_path, mesh, damage):
    """One bit, or a run of 64 bytes, anywhere in the newest step's files.

    Either it changes nothing that is read, as in Orbax's own metadata, or the step is refused.
    """
    _, second = _two_steps(tmp_path / "whole", mesh)
    rng = np.random.default_rng(0)
    found = []
    for trial in range(FLIPS if damage == "flip" else ZEROED):
        folder = tmp_path / f"{trial}"
        shutil.copytree(tmp_path / "whole", folder)
        files = [p for p in _files(folder / "2") if p.stat().st_size]
        sizes = np.array([p.stat().st_size for p in files], float)
        weights = sizes if trial % 2 else np.ones(len(files))  # small files have their share too
        path = files[rng.choice(len(files), p=weights / weights.sum())]
        content = bytearray(path.read_bytes())
        place = int(rng.integers(len(content)))
        if damage == "flip":
            content[place] ^= 1 << int(rng.integers(8))
        else:
            content[place : place + 64] = bytes(len(content[place : place + 64]))
        path.write_bytes(content)
        try:
            with Checkpointer(folder, keep_last=2) as checkpointer:
                step, arrays, host = checkpointer.restore_newest(second)
        except (DamagedCheckpointError, OSError):  # the latter of its metric
            found.append(trial)
            continue
        assert (step, host) == (2, {"position": [2.5]})
        assert_same_bits(arrays, second)
    assert len(found) > (trial + 1) // 3


def test_where_no_step_is_intact_a_new_directory_is_advised(tmp_path, mesh):
    _, like = _two_steps(tmp_path, mesh)
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "2" / "host" / "metadata").write_text("{}")
    assert _refusal(tmp_path, like).endswith("; delete that folder and give a new --workdir")


def _by_hand(x: np.ndarray) -> int:
    """Compute the formula in Python's integers."""
    words = x.reshape(-1).view(f"u{x.dtype.itemsize}").tolist()
    total = 0
    for i, word in enumerate(words):
        h = (word + i * 0x9E3779B9) % 2**32
        h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
        h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
        total += h ^ h >> 16
    return total % 2**32


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.standard_normal((8, 2, 16)).astype(np.float32),
        "half": rng.standard_normal((8, 4)).astype(jnp.bfloat16),
        "flags": rng.random((16, 2)) < 0.5,
        "bytes": rng.integers(-100, 100, (8,)).astype(np.int8),
        "long": rng.integers(0, 99, 2**20 + 3, np.int32),
        "count": np.array(7, np.int32),
        "nothing": np.zeros((0, 3), np.float32),
    }


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (8, 1, 1)])
def test_one_formula_on_every_mesh(make_mesh, shape):
    arrays = _arrays()
    mesh = make_mesh(*shape)
    layouts = {"w": P("fsdp", None, "tensor"), "half": P(("data", "fsdp")), "bytes": P("data")}
    expected = {name: _by_hand(x) for name, x in arrays.items()}
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, layouts.get(name, P())))
        for name, x in arrays.items()
    }
    assert checksums(placed) == expected
    key = jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))
    assert checksums({"key": key}) == {"key": _by_hand(np.asarray(jax.random.key_data(key)))}


def test_every_flipped_bit_and_every_swap_is_seen():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    seen = {checksums({"x": x})["x"]}
    for bit in range(x.size * 32):
        bits = x.view(np.uint32).copy()
        bits.reshape(-1)[bit // 32] ^= np.uint32(1 << bit % 32)
        seen.add(checksums({"x": bits.view(np.float32)})["x"])
    assert len(seen) == 1 + x.size * 32
    assert checksums({"x": x[::-1].copy()})["x"] not in seen
    assert checksums({"x": x.T.copy()})["x"] not in seen
