"""Shapes of arrays that are not there."""

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import abstract
from specrl_jax.sharding import put


def test_shapes_are_those_of_the_arrays(make_mesh):
    """A shape that is made, one of a result, and the array itself have one layout."""
    with jax.set_mesh(make_mesh(2, 2, 1)):
        rows = put(np.zeros((8, 3), np.float32), "batch", None)
        shape = abstract.array(np.float32, (8, 3), "batch", None)
        result = abstract.result(lambda x: put(np.zeros((8, 3), np.float32), "batch", None) + x, 1)
        for x in (shape, result):
            assert (x.shape, x.dtype, x.sharding) == (rows.shape, rows.dtype, rows.sharding)
        # A result without a layout is whole on every device.
        whole = abstract.result(lambda: {"step": jnp.int32(0)})["step"]
        assert whole.sharding.is_fully_replicated
        assert abstract.on_host(shape).sharding is None


def test_bytes_of_a_device_by_hand(make_mesh):
    mesh = make_mesh(2, 2, 1)
    with jax.set_mesh(mesh):
        split = abstract.array(np.float32, (8, 3), "batch", None)
        whole = abstract.array(np.int8, (5,), None)
    with jax.set_mesh(make_mesh(1, 1, 1)):
        other = abstract.array(np.int8, (7,), None)
    assert abstract.device_bytes({"split": split, "others": [whole, other]}) == 2 * 3 * 4 + 5 + 7
    assert abstract.device_bytes([split, whole, other], mesh) == 2 * 3 * 4 + 5
