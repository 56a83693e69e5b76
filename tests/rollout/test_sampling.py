"""Keyed noise and drawing against exact probabilities; truncation against a float64 sort."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from rollout_reference import p_value
from scipy import stats

from specrl_jax.rollout import sampling
from specrl_jax.rollout.sampling import Purpose, SamplingConfig
from specrl_jax.sharding import put

# Every draw is a fixed function of fixed keys, so a p-value here is one number, not a coin.
P_VALUE = 1e-3
PROBS = np.array([0.5, 0.2, 0.15, 0.1, 0.05])

seeds_of = jax.jit(sampling.row_seeds)
uniforms = jax.jit(sampling.uniforms)


@functools.partial(jax.jit, static_argnums=2)
def exponentials(seeds, positions, vocab_size):
    return sampling.exponentials(seeds, positions, jnp.arange(vocab_size)[(None,) * positions.ndim])


truncate = jax.jit(sampling.truncate, static_argnums=1)
sample = jax.jit(sampling.sample, static_argnums=3)


def make_seeds(rows, *, purpose=Purpose.SAMPLE, step=0, ids=None, samples=None, key=5):
    """Seeds of `rows` rows; by default each is another prompt's sample 0."""
    if ids is None:
        ids = np.stack([np.arange(rows) // 7, np.arange(rows)], axis=1)
    samples = np.zeros(rows) if samples is None else samples
    ids, samples = np.asarray(ids, np.uint32), np.asarray(samples, np.int32)
    key = jax.random.key(key)
    return seeds_of(key, int(purpose), jnp.uint32(step), put(ids, "batch", None),
                    put(samples, "batch"))  # fmt: skip


@functools.partial(jax.jit, static_argnums=2)
def _draw_same(seeds, positions, config, logits):
    logits = jnp.broadcast_to(logits[None, :], (seeds.shape[0], logits.shape[0]))
    return sampling.sample(logits, seeds, positions, config)[0]


def draw_same(probs, seeds, positions):
    """One token a row, all rows from the same distribution."""
    logits = jnp.log(jnp.asarray(probs, jnp.float32))
    positions = jnp.broadcast_to(jnp.asarray(positions, jnp.int32), seeds.shape[:1])
    return np.asarray(_draw_same(seeds, positions, SamplingConfig(), logits))


def goodness(tokens, probs) -> float:
    """p-value of the tokens under the distribution."""
    return p_value(np.bincount(tokens, minlength=len(probs)), probs)


def independence(a, b) -> float:
    """p-value of the joint counts of two draws of PROBS under independence, margins known."""
    return goodness(a * len(PROBS) + b, np.outer(PROBS, PROBS).ravel())


# One race; two, over columns of 128, 6 and 1 tokens.
@pytest.mark.parametrize("size", [1_000, 1_280, 1_026, 1_025])
def test_draws_from_a_thousand_tokens_follow_the_distribution(mesh, size):
    probs = 1 / np.arange(1, size + 1)
    probs = np.random.default_rng(0).permutation(probs / probs.sum())
    seeds = make_seeds(20_000, samples=np.arange(20_000) % 8)
    tokens = np.concatenate([draw_same(probs, seeds, position) for position in range(5)])
    assert goodness(tokens, probs) > P_VALUE
    halves = np.array([probs[::2].sum(), probs[1::2].sum()])
    assert goodness(tokens % 2, halves) > P_VALUE


def test_exponentials_are_exponential(mesh):
    noise = np.asarray(exponentials(make_seeds(500), jnp.arange(500), 1000))
    assert np.all(noise > 0)
    assert stats.kstest(noise.ravel()[::3], "expon").pvalue > P_VALUE
    # A race is won by small values: their left tail is right as well.
    assert stats.kstest(noise.min(axis=1) * 1000, "expon").pvalue > P_VALUE
    # Neighbouring tokens, positions and rows are uncorrelated (standard error 1 / sqrt(n)).
    for x, y in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        correlation = np.corrcoef(x.ravel(), y.ravel())[0, 1]
        assert abs(correlation) < 4 / x.size**0.5


def test_uniforms(mesh):
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32)[None, :], (4000, 64))
    seeds = make_seeds(4000, purpose=Purpose.ACCEPT)
    numbers = np.asarray(uniforms(seeds, positions))
    assert numbers.dtype == np.float32
    assert numbers.min() > 0
    assert numbers.max() <= 1
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > P_VALUE
    assert stats.kstest(numbers[:, 0], "uniform").pvalue > P_VALUE
    for x, y in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 4 / x.size**0.5
    assert len(np.unique(numbers)) > 0.98 * numbers.size  # float32 has few values near 1
    alone = np.asarray(uniforms(seeds, positions[:, 5]))
    np.testing.assert_array_equal(alone, numbers[:, 5])


def test_the_ends_of_the_uniforms():
    ends = np.asarray(sampling.to_unit(jnp.array([0, 2**32 - 1], jnp.uint32)))
    assert 0 < ends[0] < 1e-9
    assert ends[1] == 1.0


def test_draws_at_neighbouring_keys_are_independent(mesh):
    """One word of the key changed by one: position, sample, step, purpose, prompt, run."""
    rows = 30_000
    ids = np.stack([np.arange(rows), np.arange(rows) * 3], axis=1)
    base = draw_same(PROBS, make_seeds(rows, ids=ids), 1)
    others = {
        "position": (make_seeds(rows, ids=ids), 2),
        "sample": (make_seeds(rows, ids=ids, samples=np.ones(rows)), 1),
        "step": (make_seeds(rows, ids=ids, step=1), 1),
        "purpose": (make_seeds(rows, ids=ids, purpose=Purpose.EVALUATE), 1),
        "id, high word": (make_seeds(rows, ids=ids + np.array([1, 0])), 1),
        "id, low word": (make_seeds(rows, ids=ids + np.array([0, 1])), 1),
        "run": (make_seeds(rows, ids=ids, key=6), 1),
    }
    for name, (seeds, position) in others.items():
        other = draw_same(PROBS, seeds, position)
        assert independence(base, other) > P_VALUE, name
    assert independence(base, base) < 1e-9  # the test can tell


def test_the_uniform_that_rejects_does_not_choose_the_successor(mesh):
    rows = 30_000
    numbers = np.asarray(uniforms(make_seeds(rows, purpose=Purpose.ACCEPT), jnp.full(rows, 4)))
    tokens = draw_same(PROBS, make_seeds(rows), 4)
    joint = (numbers * 4).astype(int).clip(0, 3) * len(PROBS) + tokens
    assert goodness(joint, np.outer(np.full(4, 0.25), PROBS).ravel()) > P_VALUE


def test_no_two_keys_share_a_stream(mesh):
    prompts, samples = np.meshgrid(np.arange(400), np.arange(8), indexing="ij")
    ids = np.stack([prompts.ravel() % 20, prompts.ravel() // 20], axis=1)
    every = [
        np.asarray(make_seeds(3200, purpose=p, step=step, ids=ids, samples=samples.ravel()))
        for p in Purpose
        for step in range(3)
    ]
    assert len(np.unique(np.concatenate(every), axis=0)) == 3200 * 9


def test_many_positions_of_a_row_at_once(mesh):
    """[B, T] positions in one call: the draws of T calls, exactly."""
    rng = np.random.default_rng(6)
    logits = rng.normal(size=(40, 5, 30)).astype(np.float32)
    positions = rng.integers(0, 500, (40, 5)).astype(np.int32)
    seeds = make_seeds(40)
    together, *_ = sample(logits, seeds, positions, SamplingConfig())
    noise = np.asarray(exponentials(seeds, positions, 30))
    assert together.shape == (40, 5)
    for t in range(5):
        alone, *_ = sample(logits[:, t], seeds, positions[:, t], SamplingConfig())
        np.testing.assert_array_equal(together[:, t], alone)
        np.testing.assert_array_equal(noise[:, t], exponentials(seeds, positions[:, t], 30))


def reference_truncate(logits, config):
    """(kept, close): a float64 sort per row; close rows have a mass within rounding of top_p."""
    likely, close = np.zeros(logits.shape, bool), np.zeros(len(logits), bool)
    for i, row in enumerate(logits.astype(np.float64)):
        ranked = np.sort(row)[::-1]
        if 0 < config.top_k < len(row):
            row = np.where(row >= ranked[config.top_k - 1], row, -np.inf)
        probs = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        values = np.unique(row)[::-1]  # ties stand or fall together
        mass = np.cumsum([probs[row == v].sum() for v in values])
        close[i] = config.top_p < 1 and np.any(np.abs(mass[:-1] - config.top_p) < 2e-6)
        count = len(values) if config.top_p == 1 else int(np.sum(mass[:-1] < config.top_p)) + 1
        likely[i] = (row >= values[min(count, len(values)) - 1]) & (row > -np.inf)
    return likely, close


CONFIGS = [
    *(SamplingConfig(top_k=k) for k in (1, 2, 7, 29)),
    *(SamplingConfig(top_p=p) for p in (1e-9, 0.3, 0.9, 0.99)),
    *(SamplingConfig(top_k=k, top_p=p) for k, p in ((5, 0.8), (12, 0.5))),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"k{config.top_k}-p{config.top_p}")
def test_truncate_against_a_sort(mesh, config):
    rng = np.random.default_rng(2)
    smooth = rng.normal(size=(200, 30)) * rng.uniform(0.1, 6, (200, 1))
    ties = rng.integers(-3, 3, (200, 30)) * 0.5 + 0.25
    holes = np.where(rng.random((200, 30)) < 0.6, -np.inf, smooth)
    holes[:, 0] = 1.0  # at least one token is possible
    logits = np.concatenate([smooth, ties, holes]).astype(np.float32)
    out = np.asarray(truncate(logits, config))
    likely, close = reference_truncate(logits, config)
    assert close.mean() < 0.02
    sure = ~close
    np.testing.assert_array_equal(np.isfinite(out)[sure], likely[sure])
    np.testing.assert_array_equal(out[likely & sure[:, None]], logits[likely & sure[:, None]])
    assert np.all(np.isfinite(out).any(axis=1))
    assert (likely.sum(axis=1) < np.isfinite(logits).sum(axis=1)).any()  # something was cut


def test_truncate_that_cuts_nothing(mesh):
    logits = np.random.default_rng(3).normal(size=(3, 4, 6)).astype(np.float32)
    for config in (SamplingConfig(), SamplingConfig(top_k=6), SamplingConfig(top_k=100)):
        np.testing.assert_array_equal(np.asarray(truncate(logits, config)), logits)
    wide = np.asarray(truncate(logits, SamplingConfig(top_k=2)))
    np.testing.assert_array_equal(np.isfinite(wide).sum(axis=-1), np.full((3, 4), 2))


def test_an_impossible_token_is_never_drawn(mesh):
    probs = np.array([0.0, 1e-3, 0.0, 0.999, 0.0])
    tokens = draw_same(probs, make_seeds(50_000), 0)
    assert set(np.unique(tokens)) == {1, 3}


def test_greedy_takes_the_best_whatever_the_noise(mesh):
    config = SamplingConfig(temperature=0.0)
    logits = np.random.default_rng(4).normal(size=(100, 9)).astype(np.float32)
    logits[:50, 3] = logits[:50, 7] = 9.0  # a tie goes to the first
    for step in (0, 1):
        seeds = make_seeds(100, step=step)
        tokens = np.asarray(sample(logits, seeds, jnp.zeros(100, jnp.int32), config)[0])
        np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_array_equal(np.asarray(sampling.temper(logits, config)), logits)


# 3,840 tokens are 384 rows, which five devices do not divide.
@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (240, (2, 2, 2)),
        *((3_840, shape) for shape in [(1, 4, 2), (2, 1, 3), (1, 1, 5)]),
    ],
)
def test_the_mesh_changes_no_draw(make_mesh, size, shape):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(64, size)).astype(np.float32) * 2
    config, results = SamplingConfig(0.8, top_k=9, top_p=0.9), []
    for sizes in ((1, 1, 1), shape):
        with jax.set_mesh(make_mesh(*sizes)):
            cut = truncate(put(logits, "batch", "vocab"), config)
            positions = put(np.arange(64, dtype=np.int32), "batch")
            tokens, _, _ = sample(cut, make_seeds(64), positions, config)
            wide = put(np.stack([logits, logits[::-1], -logits], axis=1), "batch", None, "vocab")
            positions = put(np.arange(192, dtype=np.int32).reshape(64, 3), "batch", None)
            many, *scores = sample(wide, make_seeds(64), positions, config)
            results.append([np.asarray(x) for x in (cut, tokens, many, *scores)])
    for alone, other in zip(*(exact for *exact, _, _ in results), strict=True):
        np.testing.assert_array_equal(alone, other)
    for alone, other in zip(*(scores[3:] for scores in results), strict=True):
        np.testing.assert_allclose(alone, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [50, 1_536, 1_025])
def test_log_probs_of_what_is_drawn(mesh, size):
    """Against float64, [B, T] positions, of a truncated distribution too and of the greedy one."""
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(6, 5, size)).astype(np.float32) * 2
    positions = np.arange(30, dtype=np.int32).reshape(6, 5)
    for config in (SamplingConfig(), SamplingConfig(top_k=7), SamplingConfig(temperature=0.0)):
        cut = np.asarray(truncate(logits, config))
        tokens, scores, log_z = sample(cut, make_seeds(6), positions, config)
        expected = scipy.special.log_softmax(cut.astype(np.float64), axis=-1)
        expected = np.take_along_axis(expected, np.asarray(tokens)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)
        expected = scipy.special.logsumexp(cut.astype(np.float64), axis=-1)
        np.testing.assert_allclose(log_z, expected, rtol=1e-6)


def test_columns_and_their_tokens_race_alone(mesh):
    """Equal tokens, 128 rows of 10: the winning column predicts neither the row in it, nor what
    wins at the next position."""
    seeds, position = make_seeds(20_000), jnp.zeros(20_000, jnp.int32)
    tokens, later = (draw_same(np.full(1_280, 1 / 1_280), seeds, position + i) for i in (0, 1))
    (row, column), (later_row, later_column) = np.divmod(tokens, 10), np.divmod(later, 10)
    pairs = [
        (row, column),
        (row % 8, later_column),
        (column, later_row % 8),
        (column, later_column),
    ]
    for (first, second), sizes in zip(pairs, [(128, 10), (8, 10), (10, 8), (10, 10)], strict=True):
        joint = np.bincount(first * sizes[1] + second, minlength=sizes[0] * sizes[1])
        assert stats.chisquare(joint).pvalue > P_VALUE


# Sampled and given tokens, and what is kept of them


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_the_kept_tokens_are_all_that_are_sampled(make_mesh, shape):
    """Five tokens tie for three places: the first ones have them, and all of the mass."""
    logits = np.tile(np.array([1, 0, 1, 1, 1, 0, 1, 0], np.float32), (512, 1, 1))
    config = SamplingConfig(top_k=3)
    with jax.set_mesh(make_mesh(*shape)):
        placed = put(logits, "batch", None, "vocab")
        columns, *_ = _keep(placed, make_seeds(512), put(np.zeros((512, 1), np.int32)), config, 3)
    np.testing.assert_array_equal(columns.top_ids, np.tile([0, 2, 3], (512, 1, 1)))
    np.testing.assert_array_equal(np.unique(columns.ids), [0, 2, 3])
    np.testing.assert_allclose(columns.sampling_logprobs, -np.log(3), rtol=1e-6)
    np.testing.assert_allclose(columns.top_logprobs, -np.log(3), rtol=1e-6)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _keep(logits, seeds, given, config, k):
    positions = jnp.zeros(logits.shape[:-1], jnp.int32)
    policy = sampling.TokenDistributions.of(logits, seeds, positions, config, k)
    residual = policy.sample(lambda cut: jnp.where(jnp.arange(cut.shape[-1]) == 3, cut, -jnp.inf))
    return policy.sample(), policy.score(given), residual


@pytest.mark.parametrize("config", [SamplingConfig(0.7), SamplingConfig(0.7, top_k=5)])
def test_what_is_kept_of_a_token(mesh, config):
    """Log-probs with and without truncation, and the likeliest tokens, in float64."""
    logits = np.random.default_rng(4).normal(0, 1, (16, 3, 9)).astype(np.float32)
    logits[..., 3] += 2  # among the five likeliest
    given = np.argsort(-logits, axis=-1)[..., 1].astype(np.int32)
    placed = put(logits, "batch", None, "vocab")
    kept = _keep(placed, make_seeds(16), put(given, "batch", None), config, 4)
    policy = scipy.special.log_softmax(logits.astype(np.float64) / 0.7, axis=-1)
    order = np.argsort(-logits, axis=-1)
    cut = policy.copy()
    if config.top_k:
        np.put_along_axis(cut, order[..., config.top_k :], -np.inf, axis=-1)
    cut = scipy.special.log_softmax(cut, axis=-1)
    for columns in kept:
        tokens = np.asarray(columns.ids)[..., None]
        for got, table in ((columns.policy_logprobs, policy), (columns.sampling_logprobs, cut)):
            expected = np.take_along_axis(table, tokens, axis=-1)[..., 0]
            np.testing.assert_allclose(got, expected, atol=1e-5)
        np.testing.assert_array_equal(columns.top_ids, order[..., :4])
        likeliest = np.take_along_axis(cut, order[..., :4], axis=-1)
        np.testing.assert_allclose(columns.top_logprobs, likeliest, atol=1e-5)
    sampled, scored, residual = (np.asarray(columns.ids) for columns in kept)
    assert len(np.unique(sampled)) > 3
    np.testing.assert_array_equal(scored, given)
    assert (residual == 3).all()
