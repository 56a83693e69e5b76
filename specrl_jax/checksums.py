"""Checksums of arrays: of their bits, not of how these lie on devices or in files.

Any changed element changes its array's checksum; any other damage is missed once in 4e9 times.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by bytes of an element


def checksums(arrays: Mapping[str, Array]) -> dict[str, int]:
    """A number below 2³² for each array, the same on every mesh."""
    # One at a time: many programs at once on virtual devices of a CPU may wait for ever.
    sums = {name: jax.block_until_ready(_checksum(x)) for name, x in arrays.items()}
    return {name: int(x) for name, x in hosts.fetch(sums).items()}


def checksum(tree: Any) -> int:
    """One number below 2³² for all arrays of a pytree and their paths."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    sums = checksums({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    return zlib.crc32(json.dumps(sums).encode())


@jax.jit
def _checksum(x: Array) -> Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == bool:
        x = x.astype(np.uint8)
    words = jax.lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize]).astype(np.uint32)
    stride = 1
    for axis in reversed(range(x.ndim)):
        sizes = [1] * x.ndim
        sizes[axis] = x.shape[axis]
        index = jnp.arange(x.shape[axis], dtype=np.uint32).reshape(sizes)
        # By the golden ratio, so that shifted data has another sum.
        words = words + index * np.uint32(stride * 0x9E3779B9 % 2**32)
        stride *= x.shape[axis]
    return jnp.sum(_mixed(words), dtype=np.uint32)


def _mixed(words: Array) -> Array:
    """MurmurHash3's finalizer: one to one, so that no single change can go unseen."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))
