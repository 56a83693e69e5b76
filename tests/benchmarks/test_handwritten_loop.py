"""The hand-written loop against a rollout, and what random policies draw."""

import jax
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.benchmarks import handwritten_loop
from specrl_jax.benchmarks.policies import SIZES, random_params
from specrl_jax.models import kv_cache
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.rollout.sampling import Purpose, row_seeds
from specrl_jax.sharding import put


@pytest.fixture
def layout(monkeypatch, request):
    """The platform whose layout the KV cache has."""
    monkeypatch.setattr(kv_cache, "platform", lambda: request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(("layout", "tie"), [("cpu", True), ("tpu", False)], indirect=["layout"])
def test_it_draws_the_tokens_of_a_rollout(mesh, layout, tie):
    """Prompts of one token need no prefill: the loop feeds them at position 0."""
    model = ref.MODEL.replace(tie_embeddings=tie, qk_norm=tie)
    rows, slots, (_, weights) = 8, 7, ref.policy(0.1, model)
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
    logits = ref.full_logits(model, random_params(model), tokens)
    assert 1.2 < logits.std() < 2.8
    repeats = np.take_along_axis(logits, tokens[:, :, None], axis=2)[..., 0]
    assert abs(repeats.mean()) < 1.0
    assert np.mean(logits.argmax(-1) == tokens) < 0.1
