"""Files of a checkpoint that are not as they were written: found, named, kept, never restored."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_runs import assert_same_bits, folders, one_line

from specrl_jax.checkpoint import Checkpointer, DamagedCheckpointError


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
    first, second = (jax.device_put(tree | keys, everywhere) for tree in (first, second))
    with Checkpointer(folder, keep_last=2) as checkpointer:
        checkpointer.save(1, first, {"position": [1.5]}, metric=0.5)
        checkpointer.save(2, second, {"position": [2.5]}, metric=0.25)
    return first, second


def _restore_newest(folder, like, capsys) -> tuple[int, dict, dict, str]:
    """step, arrays, host, what was printed."""
    with Checkpointer(folder, keep_last=2) as checkpointer:
        return *checkpointer.restore_newest(like), capsys.readouterr().out


def _files(folder) -> list[pathlib.Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("part", ["arrays", "host", "metrics", "*"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_kept_aside(tmp_path, mesh, capsys, part, damage):
    _, second = _two_steps(tmp_path, mesh)
    files = [p for p in (tmp_path / "2").glob(f"{part}/**/*") if p.is_file()]
    assert files
    for path in files:
        if damage == "truncate":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        else:
            path.unlink()
    step, _, host, out = _restore_newest(tmp_path, second, capsys)
    if (part, damage) == ("metrics", "remove"):  # only its rank among the best is lost
        assert (step, out) == (2, "")
        return
    assert (step, host) == (1, {"position": [1.5]})
    assert out.startswith(f"{tmp_path / '2'} is damaged: ")
    assert out.endswith("it is kept as damaged-2\n")
    assert out.count("\n") == 1
    assert folders(tmp_path) == ["1", "damaged-2"]
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        assert checkpointer.latest_step() == 1
        assert checkpointer.save(2, second, {})  # the step is computed again
    assert folders(tmp_path) == ["1", "2", "damaged-2"]


FLIPS, ZEROED = 60, 30  # seeded damages of one place each


@pytest.mark.parametrize("damage", ["flip", "zero"])
def test_no_damaged_bit_is_restored(tmp_path, mesh, capsys, damage):
    """One bit, or a run of 64 bytes, anywhere in the newest step's files.

    Either it changes nothing that is read, as in Orbax's own metadata, or the step before is used.
    """
    saved = dict(zip((1, 2), _two_steps(tmp_path / "whole", mesh), strict=True))
    rng, steps = np.random.default_rng(0), []
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
        step, arrays, host, out = _restore_newest(folder, saved[2], capsys)
        assert_same_bits(arrays, saved[step])
        assert host == {"position": [step + 0.5]}
        assert (step == 2) == (out == "")
        assert (step == 1) == ((folder / "damaged-2").exists())
        steps.append(step)
    print(f"{damage}: {steps.count(1)} found, {steps.count(2)} of no effect")
    assert steps.count(1) > len(steps) // 3


def test_where_no_step_is_intact_nothing_is_moved(tmp_path, mesh):
    _, like = _two_steps(tmp_path, mesh)
    for step in "12":
        (tmp_path / step / "host" / "metadata").write_text("{}")
    with (
        Checkpointer(tmp_path, keep_last=2) as checkpointer,
        pytest.raises(DamagedCheckpointError, match="no older step is intact") as error,
    ):
        checkpointer.restore_newest(like)
    assert one_line(error).startswith(str(tmp_path / "2"))
    assert folders(tmp_path) == ["1", "2"]


def test_what_is_no_checkpoint_in_the_place_of_one_is_refused(tmp_path, mesh):
    _two_steps(tmp_path / "file", mesh)
    shutil.rmtree(tmp_path / "file" / "2")
    shutil.copytree(tmp_path / "file", tmp_path / "empty")
    (tmp_path / "file" / "2").write_text("")
    (tmp_path / "empty" / "2").mkdir()
    (tmp_path / "nothing").write_text("")
    for folder, message in {
        "file": "2 must be a checkpoint's folder, it is a file; move it",
        "empty": "2 must hold a checkpoint, it is empty; put its files back, or delete",
        "nothing": "nothing must be a folder of checkpoints, it is a file; move it",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            Checkpointer(tmp_path / folder)
        assert one_line(error).startswith(str(tmp_path / folder))
    (tmp_path / "empty" / "3").mkdir()
    (tmp_path / "empty" / "1").rename(tmp_path / "empty" / "4")
    with Checkpointer(tmp_path / "empty") as checkpointer:  # removals that were cut short
        assert checkpointer.latest_step() == 4
