"""The acceptance rules one position at a time, and the stored log-probs that they read."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from acceptance_reference import (
    count_leading,
    likeliest_tokens,
    log,
    logprobs_at,
    put_scores,
    random_cut,
    ratio,
    residual_by_hand,
    residual_scores,
    softmax,
)
from rollout_reference import put_rows
from scipy import special, stats

# The ratio rule and the random cut, against plain loops


def case(seed=0, rows=300, width=7, impossible=0.0):
    """Uniforms, log-probs, draft log-probs and lengths; some log-probs are -inf."""
    rng = np.random.default_rng(seed)
    uniforms = (1 - rng.random((rows, width))).astype(np.float32)
    logprobs, old = (np.log(rng.uniform(0.3, 1, (rows, width))).astype(np.float32) for _ in "ab")
    logprobs[rng.random((rows, width)) < impossible] = -np.inf
    old[rng.random((rows, width)) < impossible] = -np.inf
    return uniforms, logprobs, old, rng.integers(0, width + 1, rows).astype(np.int32)


@pytest.mark.parametrize("lenience", [0.5, 1.0, math.exp(0.5)])
def test_ratio_against_a_loop(lenience):
    uniforms, logprobs, old, lens = case()
    accept, prefix = np.zeros(uniforms.shape, bool), []
    for row, length in enumerate(lens):
        for i in range(uniforms.shape[1]):
            quotient = lenience * math.exp(logprobs[row, i]) / math.exp(old[row, i])
            accept[row, i] = uniforms[row, i] <= min(1.0, quotient)
        prefix.append(next((i for i in range(length) if not accept[row, i]), length))
    got = np.asarray(ratio(uniforms, logprobs, old, log(lenience)))
    np.testing.assert_array_equal(got, accept)
    accepted = np.asarray(count_leading(got, lens))
    np.testing.assert_array_equal(accepted, prefix)
    assert accepted.dtype == np.int32
    assert {0, 7} <= set(prefix)  # rejected at once, and accepted to the end of seven
    assert any(0 < n < limit for n, limit in zip(prefix, lens, strict=True))


@pytest.mark.parametrize("impossible", [0.0, 0.3])
def test_no_and_full_reuse_ask_nobody(impossible):
    uniforms, logprobs, old, _ = case(1, impossible=impossible)
    uniforms[:5] = 1.0
    assert not np.asarray(ratio(uniforms, logprobs, old, log(0.0))).any()
    assert np.asarray(ratio(uniforms, logprobs, old, log(math.inf))).all()


def test_an_impossible_token_is_rejected():
    _, logprobs, old, _ = case(2, rows=50)
    tiny = np.full((50, 7), 1e-9, np.float32)
    logprobs[:, 4] = -np.inf
    expected = np.broadcast_to(np.arange(7) != 4, (50, 7))
    got = ratio(tiny, logprobs, old, log(math.exp(0.5)))
    np.testing.assert_array_equal(np.asarray(got), expected)
    old[:, 4] = -np.inf  # under full reuse such a token can come to be stored: still rejected
    got = ratio(tiny, logprobs, old, log(math.exp(0.5)))
    np.testing.assert_array_equal(np.asarray(got), expected)


def test_an_unchanged_policy_accepts_everything_at_lenience_one():
    uniforms, logprobs, _, _ = case(3)
    uniforms[::2] = 1.0
    assert np.asarray(ratio(uniforms, logprobs, logprobs, log(1.0))).all()


def test_only_leading_tokens_count():
    accept = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    got = count_leading(accept, np.array([4, 4, 4, 3], np.int32))
    np.testing.assert_array_equal(np.asarray(got), [2, 0, 4, 3])


def test_random_cuts_uniformly_and_never_keeps_all():
    rng = np.random.default_rng(4)
    uniforms = (1 - rng.random(60_000)).astype(np.float32)
    lens = np.repeat(np.array([1, 5, 12], np.int32), 20_000)
    cut = np.asarray(random_cut(uniforms, lens))
    np.testing.assert_array_equal(cut[:20_000], np.zeros(20_000))
    for length, part in ((5, cut[20_000:40_000]), (12, cut[40_000:])):
        counts = np.bincount(part)
        assert len(counts) == length
        assert stats.chisquare(counts).pvalue > 1e-3


def test_random_at_the_ends():
    uniforms = np.array([1.0, 1.0, 1.0, 1e-10], np.float32)
    cut = np.asarray(random_cut(uniforms, np.array([0, 1, 6, 6], np.int32)))
    np.testing.assert_array_equal(cut, [0, 0, 5, 0])
    assert cut.dtype == np.int32


# The stored log-probs


# Small, and with a split vocabulary
MESHES = [(1, 1, 1), (2, 2, 2), (1, 1, 8)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(("lead", "k"), [((8,), 3), ((4, 5), 1), ((8,), 19)], ids=str)
def test_stored_tokens_against_a_sort(make_mesh, shape, lead, k):
    scores = np.random.default_rng(0).normal(0, 2, (*lead, 16)).astype(np.float32)
    scores[0, ..., 5:] = -np.inf  # truncated
    scores[1] = np.round(scores[1]) + 0.0  # ties: the lower id first (and no -0)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    expected = np.take_along_axis(log(softmax(scores)), order, axis=-1)
    with jax.set_mesh(make_mesh(*shape)):
        ids, logprobs = likeliest_tokens(put_scores(scores), k)
        log_z = special.logsumexp(scores.astype(np.float64), axis=-1, keepdims=True)
        log_z = put_rows(log_z.astype(np.float32))
        given = logprobs_at(put_scores(scores), ids, log_z)
    np.testing.assert_array_equal(np.asarray(ids)[..., :16], order)
    np.testing.assert_allclose(np.asarray(logprobs)[..., :16], expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(ids)[..., 16:], -1)
    np.testing.assert_array_equal(np.asarray(logprobs)[..., 16:], -np.inf)
    np.testing.assert_allclose(np.asarray(given), np.asarray(logprobs), atol=1e-6)
    assert ids.dtype == jnp.int32
    assert logprobs.dtype == jnp.float32


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("k", [1, 4, 18])
def test_residual_against_the_formula(make_mesh, shape, k):
    rng = np.random.default_rng(1)
    new, old = rng.dirichlet(np.full(16, 0.7), 16), rng.dirichlet(np.full(16, 0.7), 16)
    new[::4, 3:9] = 0.0  # truncated
    old[::3, ::2] = 0.0
    new, old = (x / x.sum(axis=-1, keepdims=True) for x in (new, old))
    tail, scale = np.arange(16) % 2 == 0, np.repeat([1.0, 0.6], 8)
    with jax.set_mesh(make_mesh(*shape)):
        ids, logprobs = likeliest_tokens(put_scores(log(old)), k)
        got = residual_scores(
            put_scores(log(new) + 3.0), ids, logprobs, *put_rows((tail, log(scale)))
        )
    for row, scores in enumerate(np.asarray(got)):
        listed = np.asarray(ids)[row]
        expected = residual_by_hand(new[row], old[row], listed, tail[row], scale[row])
        np.testing.assert_allclose(softmax(scores), expected, atol=3e-6)


def test_residual_at_its_ends(mesh):
    """P = inf is π to the last bit; so is a residual without any weight."""
    rng = np.random.default_rng(2)
    new = rng.dirichlet(np.ones(6), 4)
    new[1, 4:] = 0.0
    scores = put_scores(log(new))
    ids, logprobs = likeliest_tokens(put_scores(log(rng.dirichlet(np.ones(6), 4))), 2)
    same_ids, same = likeliest_tokens(scores, 2)
    nowhere = put_rows(np.zeros(4, bool))
    zero, infinite, minus = (put_rows(np.full(4, x, np.float32)) for x in (0, np.inf, -np.inf))
    for arguments in (
        (ids, logprobs, nowhere, infinite),
        (ids, logprobs, nowhere, minus),  # P = 0
        (same_ids, same, nowhere, zero),  # equal policies
        (*likeliest_tokens(scores, 6), ~nowhere, zero),  # an accepted tail of nothing
    ):
        got = residual_scores(scores, *arguments)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(scores))
    assert (np.asarray(residual_scores(scores, ids, logprobs, nowhere, zero)) != scores).any()
