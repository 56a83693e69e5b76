"""Abstract arrays (shape, dtype, layout): inputs of programs that are compiled ahead of time.

Each program of a run has a function `..._inputs` next to it, which returns these for the program's
arguments, in their order, except for static ones that are named in the call.
"""

import math
from collections.abc import Callable
from typing import Any

import jax

from specrl_jax.sharding import axes, eval_shape


def array(dtype: Any, shape: tuple[int, ...], *dims: str | None) -> jax.ShapeDtypeStruct:
    """Return an array that is laid out on the mesh in use by these logical axes."""
    layout = jax.sharding.NamedSharding(jax.sharding.get_mesh(), axes(*dims))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def result(function: Callable, *args) -> Any:
    """Return shapes, dtypes and layouts of the result of `function(*args)` on the mesh in use."""
    return placed(eval_shape(function, *args))


def placed(tree: Any) -> Any:
    """Return shapes with layouts on the mesh in use: replicated where they have none."""
    mesh = jax.sharding.get_mesh()

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        dims = jax.P(*(None,) * len(x.shape)) if x.sharding is None else x.sharding.spec
        layout = jax.sharding.NamedSharding(mesh, dims)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout, weak_type=x.weak_type)

    return jax.tree.map(place, tree)


def on_host(tree: Any) -> Any:
    """Return shapes without layouts, like those of NumPy arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def device_bytes(tree: Any, mesh: jax.sharding.Mesh | None = None) -> int:
    """Return the bytes that a tree of arrays takes on one device; mesh: arrays on it, None: all."""

    def size(x: Any) -> int:
        return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    leaves = jax.tree.leaves(tree)
    return sum(size(x) for x in leaves if mesh in (None, x.sharding.mesh))
