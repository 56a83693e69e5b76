"""The mesh and the one layout table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from specrl_jax import sharding
from specrl_jax.sharding import COMPUTE, STORED, axes, put, take_rows


def test_the_two_layouts():
    assert {axis for axis in STORED if STORED[axis] != COMPUTE[axis]} == {"embed", "vocab"}
    assert axes("embed", "heads", None) == jax.P(None, "tensor", None)
    assert axes("embed", "heads", None, stored=True) == jax.P("fsdp", "tensor", None)
    assert axes("batch", None) == jax.P(("data", "fsdp"), None)
    assert axes("vocab", None, stored=True) == jax.P(("tensor", "fsdp"), None)


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (8, 1, 1), (-1, 2, 2), (1, -1, 2), (2, 2, -1)])
def test_one_size_takes_the_rest(sizes):
    mesh = sharding.make_mesh(*sizes)
    shape = tuple(mesh.shape.values())
    assert mesh.axis_names == ("data", "fsdp", "tensor")
    assert mesh.axis_types == (AxisType.Explicit,) * 3
    assert np.prod(shape) == 8
    assert all(size in (-1, got) for size, got in zip(sizes, shape))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1), "mesh.data must be -1 (the rest) or >= 1, got 0"),
        ((1, -2, 1), "mesh.fsdp must be -1 (the rest) or >= 1, got -2"),
        ((-1, -1, 1), "mesh: data=-1 x fsdp=-1 x tensor=1 does not fit 8 devices; "
                      "only one size may be -1"),
        ((-1, 3, 1), "mesh: data=-1 x fsdp=3 x tensor=1 does not fit 8 devices; "
                     "mesh.fsdp x mesh.tensor must divide 8"),
        ((2, 2, 1), "mesh: data=2 x fsdp=2 x tensor=1 does not fit 8 devices; "
                    "mesh.data x mesh.fsdp x mesh.tensor must be 8, or one of them -1"),
        ((4, 2, 2), "mesh: data=4 x fsdp=2 x tensor=2 does not fit 8 devices; "
                    "mesh.data x mesh.fsdp x mesh.tensor must be 8, or one of them -1"),
    ],
)  # fmt: skip
def test_impossible_meshes_are_one_line(sizes, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        sharding.make_mesh(*sizes)
    assert str(error.value) == message


def test_put_and_reshard_lay_out_by_name(make_mesh):
    rows = np.arange(64, dtype=np.float32).reshape(8, 8)
    with jax.set_mesh(make_mesh(2, 2, 2)):
        split = put(rows, "batch", "mlp")
        whole = sharding.reshard(split, None, None)
        stored = put(rows, "vocab", "embed")
    assert split.sharding.spec == jax.P(("data", "fsdp"), "tensor")
    assert {shard.data.shape for shard in split.addressable_shards} == {(2, 4)}
    assert stored.sharding.spec[0] == "tensor"
    for array in (split, whole, stored):
        np.testing.assert_array_equal(array, rows)
    assert whole.sharding.is_fully_replicated


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (8, 1, 1)])
def test_take_rows_is_fancy_indexing(make_mesh, shape):
    rng = np.random.default_rng(0)
    rows, index = rng.normal(size=(16, 3, 4)).astype(np.float32), rng.permutation(16)[:8]
    with jax.set_mesh(make_mesh(*shape)):
        taken = jax.jit(take_rows)(put(rows, "batch", None, None), jnp.asarray(index))
        assert jax.typeof(taken).sharding.spec == axes("batch", None, None)
    np.testing.assert_array_equal(taken, rows[index])
