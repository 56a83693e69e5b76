"""Checksums: the same on every mesh, another for every changed bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specrl_jax.checksums import checksums


def _by_hand(x: np.ndarray) -> int:
    """The formula in Python's integers."""
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
    arrays, mesh = _arrays(), make_mesh(*shape)
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
