"""Attention against float64 NumPy, on meshes and in pieces."""

import functools

import jax
import numpy as np
import pytest

from specrl_jax.models import attention, kv_cache
from specrl_jax.sharding import axes, put

B, T, S, N, K, H = 4, 6, 9, 4, 2, 3
RNG = np.random.default_rng(0)
Q_BTNH = RNG.normal(size=(B, T, N, H)).astype(np.float32)
K_BSKH, V_BSKH = RNG.normal(size=(2, B, S, K, H)).astype(np.float32)
START_B = np.array([0, 3, 1, 2], np.int32)
SLOTS_BT = START_B[:, None] + np.arange(T)
# Where a subtree ends; of slot 0 that is the end of the row, so that every query sees a slot.
ENDS_BT = np.minimum(np.arange(T) + RNG.integers(1, 5, (B, T)), T).astype(np.int32)
ENDS_BT[:, 0] = T
# Positions rise along a row, not by one: a trie's slots lie further apart than its positions.
POSITIONS_BT = np.cumsum(RNG.integers(0, 2, (B, T)), axis=1).astype(np.int32)
WINDOWS = pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (2, 0.0), (3, 1.5)])
PIECES = pytest.mark.parametrize("pieces_of", [512, 4])
LAYOUTS = {  # of a layer of the cache that the reference reads
    "apart": (np.empty((0, 0, 0, 0)),) * 2,
    "heads side by side": (np.empty((0, 0, 16)),) * 2,  # which take 6 of them
}
MESHES = pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])


def _numpy_attention(
    keys: np.ndarray, values: np.ndarray, mask_BTS: np.ndarray, cap: float = 0.0
) -> np.ndarray:
    k_BSNH, v_BSNH = (np.repeat(x.astype(np.float64), N // K, axis=2) for x in (keys, values))
    scores = np.einsum("BTNH,BSNH->BNTS", Q_BTNH.astype(np.float64), k_BSNH)
    scores = cap * np.tanh(scores / cap) if cap else scores
    weights = np.exp(scores) * mask_BTS[:, None]
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("BNTS,BSNH->BTNH", weights, v_BSNH)


def _queries() -> jax.Array:
    return put(Q_BTNH, "batch", None, "heads", None)


def _heads(*arrays: np.ndarray) -> list[jax.Array]:
    return [put(x, "batch", None, "kv_heads", None) for x in arrays]


@PIECES
@MESHES
@WINDOWS
@pytest.mark.parametrize("like", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_of_a_cache_against_float64(
    make_mesh, monkeypatch, shape, pieces_of, like, window, cap
):
    """In every such layout of the cache."""
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", pieces_of)
    with jax.set_mesh(make_mesh(*shape)):
        layer = kv_cache.as_layer(*_heads(K_BSKH, V_BSKH), like=like)
        options = {"window": window, "softcap": cap}
        attend = jax.jit(functools.partial(attention.attend, **options), static_argnums=3)
        out = attend(_queries(), layer, put(START_B, "batch"), K)
        assert jax.typeof(out).sharding.spec == axes("batch", None, "heads", None)
    distance = SLOTS_BT[..., None] - np.arange(S)
    seen = (distance >= 0) & (distance < (window or S))
    want = _numpy_attention(K_BSKH, V_BSKH, seen, cap)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@PIECES
@MESHES
@WINDOWS
def test_packed_sequences_against_float64(make_mesh, monkeypatch, shape, pieces_of, window, cap):
    """The window is an array, as in a scan over layers."""
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", pieces_of)
    keys, values = K_BSKH[:, :T], V_BSKH[:, :T]
    with jax.set_mesh(make_mesh(*shape)):
        inputs = _queries(), *_heads(keys, values), put(ENDS_BT, "batch", None)
        inputs = *inputs, put(POSITIONS_BT, "batch", None)
        attend = functools.partial(attention.attend_packed, softcap=cap)
        limit = None if window is None else np.int32(window)
        out = jax.jit(lambda window, *x: attend(*x, window=window))(limit, *inputs)
        assert jax.typeof(out).sharding.spec == axes("batch", None, "heads", None)
    i, j = np.arange(T)[:, None], np.arange(T)
    seen = (j <= i) & (i < ENDS_BT[:, None, :])
    distance = POSITIONS_BT[:, :, None] - POSITIONS_BT[:, None, :]
    seen &= distance < (window or S)
    want = _numpy_attention(keys, values, seen, cap)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


@MESHES
def test_pieces_skip_keys_that_no_query_sees(make_mesh, monkeypatch, shape):
    """Sequences of 24 tokens in pieces of 4: output and gradients are those of all keys at once,
    where a piece sees 4, 8, 16 or 24 of them."""
    slots, rng = 24, np.random.default_rng(1)
    q, k, v = (rng.normal(size=(B, slots, n, H)).astype(np.float32) for n in (N, K, K))
    i, starts = np.arange(slots), np.array([0, 5, 6, 13, 20])  # of subtrees that see no other
    ends = np.append(starts[1:], slots)[np.searchsorted(starts, i, side="right") - 1]
    ends = np.stack([ends, i + 1, np.full(slots, slots), ends]).astype(np.int32)

    def run(pieces_of: int, ends: jax.Array):
        monkeypatch.setattr(attention, "QUERIES_AT_ONCE", pieces_of)

        def loss(q, k, v):
            return (attention.attend_packed(q, k, v, ends) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)

    with jax.set_mesh(make_mesh(*shape)):
        heads = ("heads", "kv_heads", "kv_heads")
        arrays = [put(x, "batch", None, name, None) for x, name in zip((q, k, v), heads)]
        for end in (ends, ends[[0, 3, 0, 3]]):
            at_once = run(512, put(end, "batch", None))
            in_pieces = run(4, put(end, "batch", None))
            for got, want in zip(jax.tree.leaves(in_pieces), jax.tree.leaves(at_once)):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
