"""The hand-written loop, the sampling constructions and the device scene against plain truths."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.benchmarks import device as benchmark_device
from specrl_jax.benchmarks import handwritten_loop as benchmark_floor
from specrl_jax.benchmarks import sampling as benchmark_sampling
from specrl_jax.benchmarks import scenes as benchmark_scenes
from specrl_jax.benchmarks import steps as benchmark_steps
from specrl_jax.benchmarks.policies import SIZES, Size, random_weights
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.sharding import put

# The hand-written loop -----------------------------------------------------------------------


def make_state(rows: int, slots: int) -> benchmark_floor.State:
    seeds = np.random.default_rng(0).integers(0, 2**32, (rows, 2), np.uint32)
    return benchmark_floor.State(
        tokens=put(np.zeros((rows, slots), np.int32), "batch", None),
        logprobs=put(np.zeros((rows, slots), np.float32), "batch", None),
        lens=put(np.zeros(rows, np.int32), "batch"),
        last=put(np.arange(1, rows + 1, dtype=np.int32), "batch"),
        prompt_lens=put(np.ones(rows, np.int32), "batch"),
        seeds=put(seeds, "batch", None),
    )


def forward_with_floor(model: ModelConfig, weights, tokens_BT: np.ndarray) -> np.ndarray:
    """Scores [B, T, V] token by token through the floor's forward step."""
    cache = jax.tree.map(np.asarray, init_cache(model, *tokens_BT.shape))
    step = jax.jit(benchmark_floor._forward, static_argnums=0)
    weights, found = jax.tree.map(np.asarray, weights), []
    for t in range(tokens_BT.shape[1]):
        position = np.full(len(tokens_BT), t, np.int32)
        logits, cache = step(model, weights, cache, tokens_BT[:, t], position)
        found.append(np.asarray(logits))
    return np.stack(found, axis=1)


@pytest.mark.parametrize("tie", [True, False])
def test_the_floor_computes_what_the_model_does(mesh, tie):
    model = ref.MODEL.replace(tie_embeddings=tie, qk_norm=tie)
    params, weights = ref.policy(0.1, model)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (3, 9)).astype(np.int32)
    found = forward_with_floor(model, benchmark_floor.floor_weights(model, weights), tokens)
    expected = ref.full_logits(model, params, jnp.asarray(tokens))
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_floor_decodes_keyed_responses(mesh):
    """Up to the last slot, each token and its log-prob as the whole forward pass has them."""
    params, weights = ref.policy(0.1)
    model, rows, slots = ref.MODEL, 3, 7
    matrices = benchmark_floor.floor_weights(model, weights)
    state = make_state(rows, slots)
    first, seeds = np.asarray(state.last), np.asarray(state.seeds)
    cache = init_cache(model, rows, 1 + slots)
    cache, half = benchmark_floor.decode(model, "race", matrices, cache, state, jnp.int32(3))
    assert np.asarray(half.lens).tolist() == [3] * rows
    cache, done = benchmark_floor.decode(model, "race", matrices, cache, half, jnp.int32(100))
    assert np.asarray(done.lens).tolist() == [slots] * rows
    tokens = np.asarray(done.tokens)
    fed = np.concatenate([first[:, None], tokens[:, :-1]], axis=1)
    logits = ref.full_logits(model, params, jnp.asarray(fed))
    logprobs = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), tokens[:, :, None], axis=2
    )[..., 0]
    np.testing.assert_allclose(done.logprobs, logprobs, atol=2e-5)
    positions = put(np.tile(np.arange(slots, dtype=np.int32), (rows, 1)), "batch", None)
    drawn = benchmark_sampling.race(
        put(np.asarray(logits), "batch", None, None), put(seeds, "batch", None), positions
    )
    assert np.array_equal(drawn, tokens)


def test_random_policies_do_not_repeat_themselves(mesh):
    """With a tied head and plain random weights the last token is the likeliest next one."""
    model = SIZES["tiny"].model.replace(vocab_size=512)
    weights = random_weights(model)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 32)).astype(np.int32)
    rung = benchmark_floor.floor_weights(model, weights)
    logits = forward_with_floor(model, rung, tokens)
    assert 1.2 < logits.std() < 2.8
    repeats = np.take_along_axis(logits, tokens[:, :, None], axis=2)[..., 0]
    assert abs(repeats.mean()) < 1.0
    assert np.mean(logits.argmax(-1) == tokens) < 0.1


# Sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", benchmark_sampling.CONSTRUCTIONS)
def test_constructions_draw_from_the_law(mesh, name):
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    logits = put(np.tile(np.log(probs).astype(np.float32), (rows, 1)), "batch", None)
    seeds = np.random.default_rng(3).integers(0, 2**32, (rows, 2), np.uint32)
    positions = put(np.zeros(rows, np.int32), "batch")
    tokens = jax.jit(benchmark_sampling.CONSTRUCTIONS[name])(
        logits, put(seeds, "batch", None), positions
    )
    counts = np.bincount(np.asarray(tokens), minlength=4)
    assert len(counts) == 4
    assert np.sum((counts - rows * probs) ** 2 / (rows * probs)) < 16.3  # χ², 3 d.o.f., 0.999


def test_perplexity_and_distance_worked_rows():
    scores = np.array([[0.0, 1.0, 3.0, -2.0]])
    scale = benchmark_sampling.scale_for(scores, 2.5)
    assert np.exp(benchmark_sampling._entropy(scale * scores)) == pytest.approx(2.5, rel=1e-6)
    # Laws (1/2, 1/2) and (3/4, 1/4).
    a, b = np.log([[1.0, 1.0]]), np.log([[3.0, 1.0]])
    assert benchmark_sampling._distance(a, b) == pytest.approx(0.25)


def test_sampling_record(mesh):
    record, text = benchmark_scenes.sampling(rows=4, vocab=512, draws=40, repeats=2)
    record = json.loads(json.dumps(record, allow_nan=False))
    assert record["perplexity"] == pytest.approx(benchmark_sampling.PERPLEXITY, rel=1e-3)
    assert set(record["seconds"]) == set(benchmark_sampling.CONSTRUCTIONS)
    names = {*benchmark_sampling.CONSTRUCTIONS, "total variation"}
    for error in map(str, benchmark_sampling.ERRORS):
        assert set(record["flips"][error]) == names
    assert all(name in text for name in names)


# The device --------------------------------------------------------------------------------


SMALL = Size(
    ref.MODEL, rows=8, prompt_len=3, response_len=12, row_rungs=2, windows=1, max_width=2,
    rates=(0.0, 1.0), repeats=1,
)  # fmt: skip


def test_bytes_and_operations_worked_rows():
    """2 layers of width 4: 4 x 8 + 2 x 4 x 4 + 8 x 4 + 3 x 4 x 6 = 168 weights, norms 8 a layer."""
    model = ModelConfig(10, 4, 6, 2, 4, 2, 2, dtype="bfloat16")
    # 2 layers x 3 rows x 5 slots x keys and values x 2 heads x 2 x 2 bytes.
    cache = 2 * 3 * 5 * 2 * 2 * 2 * 2
    weights = 2 * (168 + 8) + 40 + 4
    assert benchmark_device.decode_bytes(model, 3, 5) == 2 * weights + cache
    untied = model.replace(tie_embeddings=False)
    assert benchmark_device.decode_bytes(untied, 3, 5) == 2 * weights + cache
    # 2 operations a weight and token; attention: scores and sums of 5 slots by 4 heads of 2.
    attention = 2 * 2 * 5 * 4 * 2
    tokens = 3 * 7
    flops = benchmark_steps.forward_flops(model, 3, 7, 5, head=False)
    assert flops == tokens * (2 * 2 * 168 + 2 * attention)
    with_head = benchmark_steps.forward_flops(model, 3, 7, 5, head=True)
    assert with_head == flops + tokens * 2 * 40


def test_the_device_scene_runs(mesh, monkeypatch):
    """What a GPU would run, on the CPU."""
    peaks = benchmark_device.measure_peaks(1, copy_bytes=2**16, matmul=64)
    assert all(peak > 0 for peak in peaks.values())
    monkeypatch.setattr(benchmark_device, "measure_peaks", lambda repeats: peaks)
    monkeypatch.setitem(SIZES, "small", SMALL)
    record = benchmark_device.measure("small", SMALL, 1)
    (rung,) = record["rungs"]
    slots = SMALL.prompt_len + SMALL.response_len
    assert rung["bytes"] == benchmark_device.decode_bytes(SMALL.model, SMALL.rows, slots)
    expected = rung["bytes"] / peaks["bytes_per_second"] / rung["seconds"]["decode"]["median"]
    assert rung["shares"]["decode"] == pytest.approx(expected)
    assert len(benchmark_device.table(record).splitlines()) == 3
    assert benchmark_device.goals(record, "cpu") == []
    goals = benchmark_device.goals(record, "gpu")
    assert [(g.bound, g.figure) for g in goals] == [
        (0.6, rung["shares"]["decode"]), (0.4, rung["shares"]["prefill"]),
        (0.4, rung["shares"]["verify"]),
    ]  # fmt: skip
