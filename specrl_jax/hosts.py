"""Values and decisions that several processes of one run share.

All processes (JAX's multi-controller runtime) run the same programs in the same order, so all must
make the same decisions: array values come through `fetch`; clocks and files are read by the primary
process, which shares them through `broadcast` and `on_primary`. All processes must call each
function, except `is_primary` and `own_part`, in the same order.

With one process nothing is sent, and `fetch` is `jax.device_get`.
"""

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_T = TypeVar("_T")
_LEAST_BYTES = 1 << 10  # per message: messages are padded to a few sizes, so programs are few


def is_primary() -> bool:
    """Return whether this process is the one that writes files and reads clocks."""
    return jax.process_index() == 0


def fetch(tree: Any) -> Any:
    """Return the pytree with NumPy arrays for device arrays, whole in every process."""
    if jax.process_count() > 1:
        leaves, structure = jax.tree.flatten(tree)
        arrays = [(i, x) for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        split = [i for i, x in arrays if not (x.is_fully_addressable or x.is_fully_replicated)]
        if split:
            mesh = leaves[split[0]].sharding.mesh
            gathered = jax.jit(_same, out_shardings=jax.sharding.NamedSharding(mesh, jax.P()))
            for i, leaf in zip(split, gathered([leaves[i] for i in split])):
                leaves[i] = leaf
        tree = jax.tree.unflatten(structure, leaves)
    return jax.device_get(tree)


def _same(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


def place(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Place a host array, equal in all processes, on devices; each process places its part."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    # `device_put` would send the array to the other processes to compare it with theirs.
    array = np.asarray(array)
    array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def gather(value: _T) -> list[_T]:
    """Return the values of all processes, in process order; any Python value that pickles."""
    if jax.process_count() == 1:
        return [value]
    message = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(message))).tolist()
    padded = np.zeros(max(_LEAST_BYTES, 1 << (max(sizes) - 1).bit_length()), np.uint8)
    padded[: len(message)] = message
    messages = multihost_utils.process_allgather(padded)
    return [pickle.loads(x[:n].tobytes()) for x, n in zip(messages, sizes)]


def gather_results(function: Callable[[], Any]) -> list[Any]:
    """Return the function's result in every process; an error in one is raised in all."""
    own: Any
    try:
        own = function()
    except Exception as error:
        own = error
    parts = gather(own)
    for x in parts:
        if isinstance(x, Exception):
            raise x
    return parts


def broadcast(value: _T) -> _T:
    """Return the primary's value; the values of other processes are ignored."""
    return gather(value if is_primary() else None)[0]


def on_primary(function: Callable[..., _T], *args, **options) -> _T:
    """Call a function on the primary alone; return its result in all processes."""
    return broadcast(function(*args, **options) if is_primary() else None)


def own_part(count: int) -> slice:
    """Return this process's share of `count` items, split evenly and in order."""
    index = jax.process_index()
    processes = jax.process_count()
    return slice(count * index // processes, count * (index + 1) // processes)


def check_same(values: Mapping[str, Any], advice: str) -> None:
    """Raise a one-line ValueError that ends with `advice` if a value differs."""
    first, *others = gather(dict(values))
    for process, other in enumerate(others, start=1):
        for name in sorted(first.keys() | other.keys()):
            here = first.get(name)
            there = other.get(name)
            if here != there:
                raise ValueError(
                    f"{name} must be the same in all processes, got {here!r} in process 0 and "
                    f"{there!r} in process {process}; {advice}"
                )
