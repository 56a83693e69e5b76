"""Log-probabilities and entropy, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Module
from small_models import MODEL

from specrl_jax.models import logprobs
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Transformer, init_params
from specrl_jax.sharding import axes, put

MESHES = pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
LOGITS = np.random.default_rng(0).normal(0, 4, (4, 3, 8)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(0, 8, (4, 3)).astype(np.int32)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.sum(np.exp(logits - top), axis=-1, keepdims=True))


def _at(scores: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(scores, tokens[..., None], axis=-1)[..., 0]


@MESHES
def test_against_float64(make_mesh, shape):
    log_p = _log_softmax(LOGITS)
    with jax.set_mesh(make_mesh(*shape)):
        logits, tokens = put(LOGITS, "batch", None, "vocab"), put(TOKENS, "batch", None)
        scores = jax.jit(logprobs.token_logprobs)(logits, tokens)
        entropy = jax.jit(logprobs.entropy)(logits)
        picked = jax.jit(logprobs.pick)(logits, tokens)
        assert jax.typeof(scores).sharding.spec == axes("batch", None)
    np.testing.assert_allclose(scores, _at(log_p, TOKENS), rtol=1e-5, atol=1e-6)
    want = -np.sum(np.exp(log_p) * log_p, axis=-1)
    np.testing.assert_allclose(entropy, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(picked, _at(LOGITS, TOKENS))


def test_large_logits_do_not_overflow(mesh):
    logits = jnp.asarray(LOGITS[:, 0] * 1e3)
    scores = logprobs.token_logprobs(logits, jnp.asarray(TOKENS[:, 0]))
    want = _at(_log_softmax(np.asarray(logits)), TOKENS[:, 0])
    np.testing.assert_allclose(scores, want, rtol=1e-5)
    assert np.all(np.isfinite(logprobs.entropy(logits)))


def test_truncated_tokens_are_minus_inf_and_the_others_exact(mesh):
    logits = np.array([[0.0, 1.0, -np.inf, -np.inf]] * 2, np.float32)
    scores = logprobs.token_logprobs(jnp.asarray(logits), jnp.asarray([1, 2], jnp.int32))
    np.testing.assert_allclose(scores[0], -np.log1p(np.exp(-1.0)), rtol=1e-6)
    assert scores[1] == -np.inf


# Of tokens 5, 1 and 7: among two ids, outside of three, and without any.
SUPPORT = np.array([[5, 2, -1], [0, 2, 3], [-1, -1, -1]], np.int32)


@MESHES
def test_log_probs_among_the_tokens_of_a_sampler(make_mesh, shape):
    """Value and gradient of a softmax over the ids alone, in float64; a constant outside."""
    tokens = np.tile(np.array([5, 1, 7], np.int32), (4, 1))
    support = np.tile(SUPPORT, (4, 1, 1))
    log_p = np.full(LOGITS.shape, -np.inf)
    log_p[:, 0, [5, 2]] = _log_softmax(LOGITS[:, 0, [5, 2]])
    want = np.full(tokens.shape, logprobs.CUT_OFF_LOGPROB)
    want[:, 0] = log_p[:, 0, 5]
    slope = np.eye(8)[tokens] - np.exp(log_p)
    slope[:, 1:] = 0

    def total(logits, tokens, support):
        scores = logprobs.token_logprobs(logits, tokens, support)
        return jnp.sum(scores), scores

    with jax.set_mesh(make_mesh(*shape)):
        inputs = put(tokens, "batch", None), put(support, "batch", None, None)
        logits = put(LOGITS, "batch", None, "vocab")
        got, scores = jax.jit(jax.grad(total, has_aux=True))(logits, *inputs)
        assert jax.typeof(scores).sharding.spec == axes("batch", None)
    np.testing.assert_allclose(scores, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got, slope, rtol=1e-5, atol=1e-6)


def _policy(tied: bool) -> tuple[ModelConfig, dict]:
    config = MODEL.replace(tie_embeddings=tied)
    return config, init_params(config, jax.random.key(0))


@MESHES
def test_a_tree_of_inputs_is_cut_alike(make_mesh, shape):
    """Inputs of several kinds and ranks go in step, results of any rank come back joined."""
    rng = np.random.default_rng(4)
    with jax.set_mesh(make_mesh(*shape)):
        config, params = _policy(tied=True)
        policy = Transformer(config.replace(final_softcap=0.5), params)
        hidden = put(rng.normal(size=(4, 7, 8)).astype(np.float32), "batch", None, None)
        tokens = rng.integers(0, 8, (4, 7)).astype(np.int32)
        extra = rng.normal(size=(4, 7, 3)).astype(np.float32)
        inputs = {"tokens": put(tokens, "batch", None), "extra": put(extra, "batch", None, None)}

        def function(logits, inputs):
            scores = logprobs.token_logprobs(logits, inputs["tokens"])
            return {"scores": scores, "pair": (inputs["tokens"], inputs["extra"] * 2)}

        at_once, *chunked = (
            jax.jit(functools.partial(logprobs.map_tokens, function, policy, chunk=chunk))(
                hidden, inputs
            )
            for chunk in (7, 3, 1)
        )
    # Caps of 0.5 on 16 logits bound log-probs.
    assert np.min(at_once["scores"]) > -np.log(16) - 1
    for scored in chunked:
        np.testing.assert_array_equal(scored["pair"][0], tokens)
        np.testing.assert_array_equal(scored["pair"][1], extra * 2)
        np.testing.assert_allclose(scored["scores"], at_once["scores"], rtol=1e-6, atol=1e-6)


def _grads(config: ModelConfig, params: dict, hidden, tokens, weights):
    """Value and gradients of Σ weights · (log p + H), in chunks of 3 of 7 tokens."""

    def function(logits, inputs):
        tokens, weights = inputs
        return weights * (logprobs.token_logprobs(logits, tokens) + logprobs.entropy(logits))

    def total(params, hidden):
        model = Transformer(config, params)
        return jnp.sum(logprobs.map_tokens(function, model, hidden, (tokens, weights), 3))

    return jax.value_and_grad(total, argnums=(0, 1))(params, hidden)


@pytest.mark.parametrize(("tied", "unused"), [(True, ()), (False, ()), (True, ((3, 5), (11, 16)))])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_gradients_in_chunks_against_float64(make_mesh, shape, tied, unused):
    """d log p(y) and dH by their formulas, times the hidden states for the head's gradient. Ids
    that no token has are as if the head had no row for them."""
    rng = np.random.default_rng(5)
    used = [i for i in range(16) if not any(first <= i < stop for first, stop in unused)]
    hidden, weights = rng.normal(size=(8, 7, 8)), rng.normal(size=(8, 7))
    places = rng.integers(0, len(used), (8, 7))
    tokens = np.array(used, np.int32)[places]
    with jax.set_mesh(make_mesh(*shape)):
        config, params = _policy(tied)
        config = config.replace(unused_ids=unused)
        given = (put(x.astype(np.float32), "batch", *(None,) * (x.ndim - 1))
                 for x in (hidden, weights))  # fmt: skip
        hidden_BTD, weights_BT = given
        inputs = hidden_BTD, put(tokens, "batch", None), weights_BT
        _, (grads, hidden_grad) = jax.jit(functools.partial(_grads, config))(params, *inputs)
    name = "embed" if tied else "lm_head"
    assert jax.typeof(grads[name]).sharding.spec == jax.typeof(params[name]).sharding.spec
    head = np.asarray(params[name], np.float64)[used]
    log_p = _log_softmax(np.asarray(hidden, np.float32).astype(np.float64) @ head.T)
    p, weights = np.exp(log_p), weights[..., None]
    entropy = -np.sum(p * log_p, axis=-1, keepdims=True)
    want = weights * (np.eye(len(used))[places] - p - p * (log_p + entropy))
    np.testing.assert_allclose(hidden_grad, want @ head, rtol=1e-5, atol=1e-5)
    want_VD = np.zeros((16, 8))
    want_VD[used] = np.einsum("BTV,BTD->VD", want, hidden)
    np.testing.assert_allclose(grads[name], want_VD, rtol=1e-5, atol=1e-5)


def test_the_loops_over_chunks_send_nothing_over_the_batch(make_mesh):
    """The head is gathered once and its gradient summed once, both outside the loops."""
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        config, params = _policy(tied=True)
        hidden = put(np.zeros((8, 7, 8), np.float32), "batch", None, None)
        tokens, weights = (put(np.zeros((8, 7), t), "batch", None) for t in (np.int32, np.float32))
        compiled = jax.jit(functools.partial(_grads, config)).lower(params, hidden, tokens, weights)
        module = Module(compiled.compile().as_text(), dict(mesh.shape))
    loops = [op for body in module.computations.values() for op in body.values()
             if op.kind == "while"]  # fmt: skip
    assert len(loops) == 2  # forward and backward
    for loop in loops:
        sent = module.collectives(*loop.called("body"))
        assert {dims for _, dims, _ in sent} <= {"tensor"}
    sent = {key[:2]: times for key, (times, _) in module.collectives().items()}
    assert sent.pop(("all-reduce", "tensor")) > 0  # parts of the vocabulary
    assert sum(sent.values()) == 2
    assert sent["all-gather", "fsdp"] == 1
