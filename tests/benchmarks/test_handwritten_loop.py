"""The hand-written loop against the whole forward pass, and against a rollout's tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.benchmarks import handwritten_loop
from specrl_jax.benchmarks.policies import SIZES, random_weights
from specrl_jax.models import kv_cache
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.rollout.sampling import Purpose, row_seeds
from specrl_jax.sharding import put


def logits_by_hand(model: ModelConfig, weights, tokens_BT: np.ndarray) -> np.ndarray:
    """Logits [B, T, V], token by token through the loop's forward step."""
    cache = jax.tree.map(np.asarray, init_cache(model, *tokens_BT.shape))
    step = jax.jit(handwritten_loop.forward, static_argnums=0)
    weights, rows = jax.tree.map(np.asarray, weights), []
    for t in range(tokens_BT.shape[1]):
        position = np.full(len(tokens_BT), t, np.int32)
        logits, cache = step(model, weights, cache, tokens_BT[:, t], position)
        rows.append(np.asarray(logits))
    return np.stack(rows, axis=1)


@pytest.mark.parametrize("tie", [True, False])
def test_it_computes_what_the_model_does(mesh, tie):
    model = ref.MODEL.replace(tie_embeddings=tie, qk_norm=tie)
    params, weights = ref.policy(0.1, model)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (3, 9)).astype(np.int32)
    expected = ref.full_logits(model, params, jnp.asarray(tokens))
    np.testing.assert_allclose(logits_by_hand(model, weights, tokens), expected, atol=2e-5)


@pytest.fixture(params=["cpu", "tpu"])
def layout(monkeypatch, request):
    """The platform whose layout the KV cache has."""
    monkeypatch.setattr(kv_cache, "platform", lambda: request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_it_draws_the_tokens_of_a_rollout(mesh, layout):
    """Prompts of one token need no prefill: the loop feeds them at position 0."""
    model, rows, slots = ref.MODEL, 8, 7
    _, weights = ref.policy(0.1)
    prompts = ref.make_prompts([[5], [9]], 1)
    spec = ref.make_spec(model, slots=slots, prompt_slots=1, group=4, eos=(model.vocab_size,))
    rollout, _ = ref.run(spec, weights, prompts, step=3)
    ids, samples = np.repeat(prompts.ids, 4, axis=0), np.tile(np.arange(4, dtype=np.int32), 2)
    seeds = row_seeds(
        jax.random.key(ref.KEY), int(Purpose.SAMPLE), 3, put(ids, "batch", None),
        put(samples, "batch"),
    )  # fmt: skip
    last = put(np.repeat(prompts.tokens[:, 0], 4), "batch")
    begin = last, put(np.ones(rows, np.int32), "batch"), seeds
    cache = init_cache(model, rows, 1 + slots)
    _, tokens, logprobs = handwritten_loop.decode(model, weights, cache, begin, steps=slots)
    assert np.array_equal(np.asarray(tokens).T, rollout.tokens)
    np.testing.assert_allclose(np.asarray(logprobs).T, rollout.policy_logprobs, atol=2e-5)


def test_random_policies_do_not_repeat_themselves(mesh):
    """With a tied head and plain random weights the last token is the likeliest next one."""
    model = SIZES["tiny"].model.replace(vocab_size=512)
    tokens = np.random.default_rng(0).integers(0, 512, (8, 32)).astype(np.int32)
    logits = logits_by_hand(model, random_weights(model), tokens)
    assert 1.2 < logits.std() < 2.8
    repeats = np.take_along_axis(logits, tokens[:, :, None], axis=2)[..., 0]
    assert abs(repeats.mean()) < 1.0
    assert np.mean(logits.argmax(-1) == tokens) < 0.1
