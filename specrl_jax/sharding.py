"""Mesh, and the table that maps logical axes to mesh axes.

Every array of the package names its axes by the keys of this table. Weights have two layouts.
`STORED` (master weights, optimizer state) is also split over "fsdp". `COMPUTE` is split over
"tensor" alone: the rollout copies the weights to it once a step, the update layer by layer.
"""

import contextvars
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from specrl_jax import hosts

MESH_AXES = ("data", "fsdp", "tensor")

COMPUTE = {
    "batch": ("data", "fsdp"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "embed": None,
    None: None,
}
# Tokens that a shard computes per chunk: enough to be limited by arithmetic, few enough that the
# last chunk is not mostly padding.
CHUNK_TOKENS = {"cpu": 256}
CHUNK_TOKENS_ELSEWHERE = 8_192
# The embedding table is split by rows only. With split columns the backward pass of the lookup
# would gather the whole table.
STORED = COMPUTE | {"embed": "fsdp", "vocab": ("tensor", "fsdp")}


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> jax.sharding.Mesh:
    """Make the mesh ("data", "fsdp", "tensor") with explicit axes; one size may be -1 (the rest).

    Raises ValueError if the product of the sizes is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor), strict=True))
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"mesh.{name} must be -1 (the rest) or >= 1, got {size}")
    try:
        shape = np.empty(len(devices)).reshape(data, fsdp, tensor).shape
    except ValueError:
        given = " x ".join(f"{name}={size}" for name, size in sizes.items())
        fixed = " x ".join(f"mesh.{name}" for name, size in sizes.items() if size != -1)
        rules = (
            f"{fixed} must be {len(devices)}, or one of them -1",
            f"{fixed} must divide {len(devices)}",
        )
        rest = list(sizes.values()).count(-1)
        advice = rules[rest] if rest < 2 else "only one size may be -1"
        raise ValueError(f"mesh: {given} does not fit {len(devices)} devices; {advice}") from None
    return jax.make_mesh(shape, MESH_AXES, (AxisType.Explicit,) * 3, devices=devices)


def rollout_mesh(count: int, tensor: int) -> jax.sharding.Mesh:
    """Make a mesh of `count` further devices for rollouts; 0: return the mesh in use.

    Its "data" axis is what "tensor" leaves. Raises ValueError if fewer devices are left.
    """
    mesh = jax.sharding.get_mesh()
    if not count:
        return mesh
    used = {device.id for device in mesh.devices.flat}
    free = [device for device in jax.devices() if device.id not in used]
    if count > len(free) or count % tensor:
        raise ValueError(
            f"mesh.rollout_devices must be a multiple of mesh.tensor = {tensor} and at most the "
            f"{len(free)} devices besides the mesh of updates, got {count}"
        )
    return make_mesh(-1, 1, tensor, free[:count])


def move(tree, mesh: jax.sharding.Mesh):
    """Copy arrays to a mesh in their current layout; no copy if they are already on it."""

    def copy(array: jax.Array) -> jax.Array:
        if array.sharding.mesh == mesh:
            return array
        return jax.device_put(array, NamedSharding(mesh, jax.typeof(array).sharding.spec))

    return jax.tree.map(copy, tree)


def platform() -> str:
    """Return the platform of the mesh in use, or the process: cpu, gpu or tpu; also in traces."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def axes(*dims: str | None, stored: bool = False) -> PartitionSpec:
    """Return the partition of an array with these logical axes; None: an axis that is not split."""
    table = STORED if stored else COMPUTE
    return PartitionSpec(*(table[axis] for axis in dims))


def shards(axis: str, stored: bool = False) -> int:
    """Return the number of pieces that a logical axis is cut into on the mesh in use."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[name] for name in mesh_axes(axis, stored))


def chunk_tokens() -> int:
    """Return how many tokens a shard computes per chunk. A longer sequence is its own chunk."""
    return CHUNK_TOKENS.get(platform(), CHUNK_TOKENS_ELSEWHERE)


def mesh_axes(axis: str, stored: bool) -> tuple[str, ...]:
    """Return the mesh axes that a logical axis is split over."""
    names = (STORED if stored else COMPUTE)[axis] or ()
    return (names,) if isinstance(names, str) else names


_shapes_only = contextvars.ContextVar("shapes_only", default=False)


def eval_shape(function: Callable, *args):
    """Call `jax.eval_shape` with a function that may also `put` arrays: nothing is allocated."""
    token = _shapes_only.set(True)
    try:
        return jax.eval_shape(function, *args)
    finally:
        _shapes_only.reset(token)


def put(array, *dims: str | None) -> jax.Array:
    """Place a host array, equal in all processes, on the mesh with these logical axes."""
    if _shapes_only.get():
        return reshard(jnp.asarray(array), *dims)
    return put_as(np.asarray(array), axes(*dims))


def put_as(array: np.ndarray, layout: PartitionSpec) -> jax.Array:
    """Place a host array, equal in all processes, on the mesh in this layout."""
    return hosts.place(array, NamedSharding(jax.sharding.get_mesh(), layout))


def reshard(array: jax.Array, *dims: str | None) -> jax.Array:
    """Move an array to the compute layout `axes`; a no-op if it has that layout already."""
    return jax.sharding.reshard(array, axes(*dims))


def take_rows(tree, index: jax.Array):
    """Take `array[index]` of a pytree's arrays, of which only the first (batch) axis is split."""

    def take(array: jax.Array) -> jax.Array:
        out = axes("batch", *(None,) * (array.ndim - 1))
        return array.at[index].get(out_sharding=out, mode="promise_in_bounds")

    return jax.tree.map(take, tree)


def on_shards(function: Callable, *trees, like):
    """Call `function(*trees)` on every shard of the batch, with its own rows: no communication.

    trees: pytrees of arrays. like: a pytree of arrays with the layout of the results.
    """
    layouts = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, like)
    return jax.shard_map(function, out_specs=layouts, check_vma=False)(*trees)


def shard_number() -> jax.Array:
    """Return the number of this batch shard, inside `on_shards`."""
    return jax.lax.axis_index(COMPUTE["batch"])


def take_own_rows(tree, index: jax.Array):
    """Take `array[index]` of every array in a pytree, inside `on_shards`: the shard's own rows."""
    return jax.tree.map(lambda x: x.at[index].get(mode="promise_in_bounds"), tree)


def reshape(array: jax.Array, shape: tuple[int, ...], *dims: str | None) -> jax.Array:
    """Reshape an array; the result has these logical axes, which XLA chooses in `auto_axes`.

    A plain reshape drops the split of an axis of size 1.
    """
    explicit = jax.sharding.get_abstract_mesh().are_all_axes_explicit
    return jnp.reshape(array, shape, out_sharding=axes(*dims) if explicit else None)
