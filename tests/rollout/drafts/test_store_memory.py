"""The store's arrays in both memories: layouts, bytes, and what may not be shared with jax."""

import jax
import numpy as np
import pytest

from specrl_jax.rollout.drafts.store_memory import DeviceMemory, HostMemory, Stored, StoreShape

N, G, R = 64, 2, 3


def newest(value: int, rows: int) -> Stored:
    """Responses of one prompt each, every number `value`."""
    tokens = np.full((rows * G, R), value, np.int32)
    logprobs = tokens.astype(np.float32)
    return Stored(tokens, tokens[:, 0], tokens[:, 0], logprobs, logprobs, tokens)


def write(memory, slots: list[int], value: int) -> None:
    index = np.asarray(slots, np.int32)
    memory.write(index, np.ones(len(slots), bool), newest(value, len(slots)))


def read(memory, slots: list[int]) -> list[int]:
    """The first token of every prompt's first sample."""
    stored, index = memory.rows(np.asarray(slots, np.int32))
    tokens = np.asarray(stored.tokens)[0]
    return (tokens if index is None else tokens[np.asarray(index)])[:, 0, 0].tolist()


@pytest.fixture
def memory(mesh):
    return HostMemory(StoreShape(N, G, R).abstract())


def test_rows_on_the_device_stay_what_they_were(mesh):
    memory = HostMemory(StoreShape(N, G, 2**14).abstract())
    for array in jax.tree.leaves(memory.arrays):
        array[:] = 5
    slots = np.arange(N, dtype=np.int32)
    rows, _ = memory.rows(slots)  # all of them in order: the arrays' own bytes would do
    # jax keeps NumPy's memory where it is aligned, as that of large arrays mostly is.
    for array in jax.tree.leaves(memory.arrays):
        array[:] = 6
    for array in jax.tree.leaves(rows):
        assert (np.asarray(array) == 5).all()


def test_loaded_arrays_are_copies(memory):
    own = DeviceMemory(StoreShape(N, G, R).abstract())
    write(own, [0, 1], 5)
    memory.load(own.arrays)
    assert read(memory, [0, 1]) == [5, 5]
    write(memory, [0], 6)
    assert read(own, [0, 1]) == [5, 5]
    assert read(memory, [0, 1]) == [6, 5]


def test_where_the_arrays_are(make_mesh):
    with jax.set_mesh(make_mesh(2, 2, 2)):
        # On every mesh a multiple of 64 prompts.
        abstract = StoreShape(65, G, R, history=2, k=4).abstract()
        device, host = DeviceMemory(abstract), HostMemory(abstract)
        total = sum(x.size * 4 for x in jax.tree.leaves(abstract))
        assert abstract.tokens.shape == (2, 128, G, R)
        assert abstract.top_ids.shape == (1, 128, G, R, 4)
        assert device.nbytes() == {"device": total, "host": 0}
        assert host.nbytes() == {"device": 0, "host": total}
        rows, _ = host.rows(np.arange(64, dtype=np.int32))
        assert sum(x.nbytes for x in jax.tree.leaves(rows)) == total // 2
        for array, like, row in zip(*map(jax.tree.leaves, (device.arrays, device.like, rows))):
            split = jax.P(None, ("data", "fsdp"), *(None,) * (array.ndim - 2))
            assert array.sharding.spec == row.sharding.spec == split
            assert array.sharding == like.sharding
            assert (array.shape, array.dtype) == (like.shape, like.dtype)
        for like in jax.tree.leaves(host.like):
            assert like.sharding.memory_kind == "pinned_host"


def test_several_processes_keep_their_drafts_on_devices(mesh, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"rollout\.store must be device with 2 processes"):
        HostMemory(StoreShape(N, G, R).abstract())
