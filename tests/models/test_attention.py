"""Attention against float64 NumPy, on meshes and in pieces."""

import jax
import numpy as np
import pytest

from specrl_jax.models import attention
from specrl_jax.sharding import put, spec

B, T, S, N, K, H = 4, 6, 7, 4, 2, 3
RNG = np.random.default_rng(0)
Q_BTNH = RNG.normal(size=(B, T, N, H)).astype(np.float32)
K_BSKH, V_BSKH = RNG.normal(size=(2, B, S, K, H)).astype(np.float32)
SLOTS_BT = np.sort(RNG.integers(0, S, (B, T)), axis=1).astype(np.int32)
# Where a subtree ends; slot 0's is the whole row, so that every query sees a slot.
ENDS_BS = np.minimum(np.arange(S) + RNG.integers(1, 5, (B, S)), S).astype(np.int32)
ENDS_BS[:, 0] = S
MASK_BTS = (np.arange(S) <= SLOTS_BT[..., None]) & (SLOTS_BT[..., None] < ENDS_BS[:, None])


def _numpy_attention() -> np.ndarray:
    k_BSNH, v_BSNH = (np.repeat(x.astype(np.float64), N // K, axis=2) for x in (K_BSKH, V_BSKH))
    scores = np.einsum("BTNH,BSNH->BNTS", Q_BTNH.astype(np.float64), k_BSNH)
    weights = np.exp(scores) * MASK_BTS[:, None]
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("BNTS,BSNH->BTNH", weights, v_BSNH)


def _inputs():
    return (
        put(Q_BTNH, "batch", None, "heads", None),
        put(K_BSKH.transpose(0, 2, 3, 1), "batch", "kv_heads", None, None),
        put(V_BSKH.transpose(0, 2, 1, 3), "batch", "kv_heads", None, None),
        attention.Visible(put(SLOTS_BT, "batch", None), put(ENDS_BS, "batch", None)),
    )


@pytest.mark.parametrize("pieces_of", [512, 4])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_against_float64(make_mesh, monkeypatch, shape, pieces_of):
    monkeypatch.setattr(attention, "QUERIES_AT_ONCE", pieces_of)
    with jax.set_mesh(make_mesh(*shape)):
        out = jax.jit(lambda *inputs: attention.attention(*inputs))(*_inputs())
        assert jax.typeof(out).sharding.spec == spec("batch", None, "heads", None)
    np.testing.assert_allclose(out, _numpy_attention(), rtol=1e-5, atol=1e-6)


def test_gradients_in_pieces_equal_those_at_once(mesh, monkeypatch):
    *arrays, visible = _inputs()

    def grads(pieces_of: int):
        monkeypatch.setattr(attention, "QUERIES_AT_ONCE", pieces_of)
        return jax.grad(
            lambda q, k, v: (attention.attention(q, k, v, visible) ** 2).sum(), argnums=(0, 1, 2)
        )(*arrays)

    for in_pieces, at_once in zip(grads(4), grads(512), strict=True):
        np.testing.assert_allclose(in_pieces, at_once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_pieces_skip_keys_that_no_query_sees(make_mesh, monkeypatch, shape):
    """Sequences of 24 tokens in pieces of 4: output and gradients are those of all keys at once,
    where a piece sees 4, 8, 16 or 24 of them, and without branches."""
    slots, rng = 24, np.random.default_rng(1)
    q, k, v = (rng.normal(size=(B, slots, n, H)).astype(np.float32) for n in (N, K, K))
    i, starts = np.arange(slots), np.array([0, 5, 6, 13, 20])  # of subtrees that see no other
    ends = np.append(starts[1:], slots)[np.searchsorted(starts, i, side="right") - 1]
    ends = np.stack([ends, i + 1, np.full(slots, slots), ends]).astype(np.int32)

    def run(pieces_of: int, ends: jax.Array | None):
        monkeypatch.setattr(attention, "QUERIES_AT_ONCE", pieces_of)

        def loss(q, k, v):
            keys, values = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
            visible = attention.Visible(None, ends)
            return (attention.attention(q, keys, values, visible) ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*arrays)

    with jax.set_mesh(make_mesh(*shape)):
        heads = ("heads", "kv_heads", "kv_heads")
        arrays = [put(x, "batch", None, name, None) for x, name in zip((q, k, v), heads)]
        for end in (put(ends, "batch", None), put(ends[[0, 3, 0, 3]], "batch", None), None):
            at_once = run(512, end)
            in_pieces = run(4, end)
            for got, want in zip(jax.tree.leaves(in_pieces), jax.tree.leaves(at_once)):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
