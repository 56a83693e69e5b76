import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.algorithms.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    LossConfig,
    clipped_surrogate,
    clipped_weight,
    k2,
    k3,
    policy_loss,
    policy_metrics,
    sequence_ratio,
    value_loss,
)
from specrl_jax.types import Batch

MAX_LEN = 9
PLAIN = LossConfig(
    objective="clip",
    ratio="token",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=0.0,
    aggregation="token",
    kl_coef=0.0,
    kl_estimator="k3",
    entropy_coef=0.0,
    max_response_len=MAX_LEN,
)
# Every term of the loss at once.
FULL = dataclasses.replace(PLAIN, dual_clip=3.0, kl_coef=0.1, entropy_coef=0.01)


def as_batch(mask, old_logprobs=None, advantages=None, **fields) -> Batch:
    """The part of a batch that losses read; arrays [B, R]; old log-probs are 0 if not given."""
    zeros = np.zeros(mask.shape, np.float32)
    return Batch(
        tokens=zeros.astype(np.int32),
        prompt_lens=np.ones(len(mask), np.int32),
        response_lens=np.sum(mask, axis=1).astype(np.int32),
        old_logprobs=zeros if old_logprobs is None else old_logprobs,
        advantages=zeros if advantages is None else advantages,
        **fields,
    )


def surrogate(ratio, advantage, config=FULL):
    log_ratio = np.log(np.asarray(ratio, np.float32))
    advantages = np.broadcast_to(np.float32(advantage), log_ratio.shape)
    return clipped_surrogate(log_ratio, log_ratio, advantages, config)


def make_batch(seed=0, rows=6, slots=7):
    """(log-probs, entropy, the rest) in float64; ragged rows, one of them empty."""
    generator = np.random.default_rng(seed)
    logprobs = -generator.gamma(1.0, 1.0, (rows, slots))
    old_logprobs = logprobs + generator.normal(scale=0.5, size=logprobs.shape)
    ref_logprobs = logprobs + generator.normal(scale=0.5, size=logprobs.shape)
    entropy = generator.gamma(2.0, 1.0, logprobs.shape)
    advantages = generator.normal(scale=2.0, size=logprobs.shape)
    lens = np.append(generator.integers(1, slots + 1, rows - 1), 0)
    mask = np.arange(slots) < lens[:, None]
    return logprobs, entropy, as_batch(mask, old_logprobs, advantages, ref_logprobs=ref_logprobs)


def as_float32(tree):
    cast = lambda x: x.astype(np.float32) if x.dtype == np.float64 else x  # noqa: E731
    return jax.tree.map(cast, tree)


def take(tree, rows):
    return jax.tree.map(lambda x: x[rows], tree)


def slopes(function, point, width=1e-6):
    """Central differences of a scalar function in float64."""
    result = np.zeros_like(point)
    for place in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[place] += width
        down[place] -= width
        result[place] = (function(up) - function(down)) / (2 * width)
    return result


def reference_loss(logprobs, entropy, batch, config):
    """The loss of FULL, token by token in Python floats."""
    old_logprobs, ref_logprobs = batch.old_logprobs.tolist(), batch.ref_logprobs.tolist()
    logprobs, entropy, advantages = logprobs.tolist(), entropy.tolist(), batch.advantages.tolist()
    rows = []
    for b, response_len in enumerate(batch.response_lens):
        row = []
        for j in range(response_len):
            ratio = math.exp(logprobs[b][j] - old_logprobs[b][j])
            advantage = advantages[b][j]
            loss = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            if advantage < 0:
                loss = min(loss, 3.0 * abs(advantage))
            d = ref_logprobs[b][j] - logprobs[b][j]
            penalty = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[config.kl_estimator]
            row.append(loss + 0.1 * penalty - 0.01 * entropy[b][j])
        rows.append(row)
    if config.aggregation == "token":
        return math.fsum(map(math.fsum, rows)) / sum(map(len, rows))
    return math.fsum(sum(row) / len(row) for row in rows if row) / sum(1 for row in rows if row)


# Surrogate ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, False),
        (1.5, 1.0, -1.28, True),
        (0.5, 1.0, -0.5, False),
        (1.5, -1.0, 1.5, False),
        (0.5, -1.0, 0.8, True),
        (9.0, -2.0, 6.0, True),
        (9.0, 2.0, -2.56, True),
        (1.5, 0.0, 0.0, False),
    ],
)
def test_surrogate_by_hand(ratio, advantage, loss, clipped):
    got_loss, got_clipped = surrogate([[ratio]], advantage)
    np.testing.assert_allclose(got_loss, [[loss]], rtol=1e-6)
    assert got_clipped.tolist() == [[clipped]]


def test_dual_clip_zero_is_off():
    loss, clipped = surrogate([[9.0]], -2.0, PLAIN)
    np.testing.assert_allclose(loss, 18.0, rtol=1e-6)
    assert not clipped.item()


def test_clipped_says_where_the_gradient_vanishes():
    ratio = np.array([[0.1, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 50.0]], np.float32)
    for advantage in (-1.5, 1.5):

        def total(log_ratio, advantage=advantage):
            advantages = jnp.full_like(log_ratio, advantage)
            return clipped_surrogate(log_ratio, log_ratio, advantages, FULL)[0].sum()

        gradient = jax.grad(total)(np.log(ratio))
        _, clipped = surrogate(ratio, advantage)
        np.testing.assert_array_equal(np.asarray(gradient) == 0, clipped)
        expected = np.where(clipped, 0, -advantage * ratio)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize("advantage", [-3.0, 3.0])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("log_ratio", [-1e30, -200.0, 200.0, 1e30])
def test_extreme_ratios_stay_finite(log_ratio, dual_clip, advantage):
    def total(log_ratio):
        config = dataclasses.replace(PLAIN, dual_clip=dual_clip)
        advantages = jnp.full_like(log_ratio, advantage)
        loss, _ = clipped_surrogate(log_ratio, log_ratio, advantages, config)
        return loss.sum() + k3(-log_ratio).sum()

    value, gradient = jax.value_and_grad(total)(jnp.full((1, 2), log_ratio))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


# KL -----------------------------------------------------------------------------------------


def test_kl_by_hand():
    log_ratio, log2 = np.log([0.25 / 0.5, 0.5 / 0.25]), math.log(2)
    for estimator, expected in {
        "k1": [log2, -log2],
        "k2": [log2**2 / 2, log2**2 / 2],
        "k3": [0.5 + log2 - 1, 2 - log2 - 1],
    }.items():
        np.testing.assert_allclose(KL_ESTIMATORS[estimator](log_ratio), expected, rtol=1e-5)


def test_kl_estimators_against_the_exact_divergence():
    """Values of k1 and k3 are KL(π ‖ π_ref) in expectation, and so is k2's gradient. k3's
    gradient is that of KL(π_ref ‖ π): by log π(y), it is 1 − π_ref(y) / π(y)."""
    policy, reference = np.array([0.2, 0.3, 0.5]), np.array([0.3, 0.3, 0.4])
    log_ratio = np.log(reference / policy)
    exact = np.sum(policy * np.log(policy / reference))
    for estimator in ("k1", "k3"):
        expectation = policy @ np.asarray(KL_ESTIMATORS[estimator](log_ratio))
        np.testing.assert_allclose(expectation, exact, rtol=1e-5)
    for estimate, slope in ((k2, -log_ratio), (k3, 1 - reference / policy)):
        by_logprob = jax.vmap(jax.grad(lambda x, e=estimate: e(-x)))(-log_ratio)
        np.testing.assert_allclose(by_logprob, slope, rtol=1e-5, atol=1e-7)


# Aggregation --------------------------------------------------------------------------------


def test_aggregations_by_hand():
    per_token = np.array([[1, 2, 3], [10, np.nan, np.inf], [np.nan] * 3], np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    for name, count, mean in (("token", 4, 4), ("sequence", 2, 6), ("constant", 2, 1)):
        aggregation = AGGREGATIONS[name]
        assert aggregation.count(mask) == count
        assert aggregation.mean(per_token, mask, 8) == mean
        assert aggregation.mean(per_token, np.zeros_like(mask), 8) == 0


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_micro_batches_sum_to_the_mini_batch(aggregation, parts):
    batch = as_float32(make_batch(3))
    config = dataclasses.replace(FULL, aggregation=aggregation)
    differentiate = jax.value_and_grad(policy_loss, argnums=(0, 1), has_aux=True)
    (whole, whole_sums), whole_gradient = differentiate(*batch, config)

    normalizer = AGGREGATIONS[aggregation].count(batch[2].mask)
    total, gradients, sums = 0.0, [], None
    for rows in np.split(np.arange(6), parts):
        (loss, part_sums), gradient = differentiate(*take(batch, rows), config, normalizer)
        total += loss
        gradients.append(gradient)
        sums = part_sums if sums is None else jax.tree.map(jnp.add, sums, part_sums)

    np.testing.assert_allclose(total, whole, rtol=1e-5)
    for i in (0, 1):
        joined = np.concatenate([gradient[i] for gradient in gradients])
        np.testing.assert_allclose(joined, whole_gradient[i], rtol=1e-6)
    metrics, expected = policy_metrics(sums), policy_metrics(whole_sums)
    assert metrics.keys() == expected.keys()
    for name in metrics:
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


# The whole loss -----------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_policy_loss_against_a_loop(aggregation, estimator):
    batch = make_batch(4)
    config = dataclasses.replace(FULL, aggregation=aggregation, kl_estimator=estimator)
    expected = reference_loss(*batch, config)
    with jax.enable_x64(True):
        loss, _ = policy_loss(*batch, config)
        assert loss.dtype == np.float64
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
    loss, _ = jax.jit(policy_loss, static_argnums=3)(*as_float32(batch), config)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_by_finite_differences(aggregation, estimator):
    logprobs, entropy, batch = make_batch(5, rows=3, slots=4)
    config = dataclasses.replace(FULL, aggregation=aggregation, kl_estimator=estimator)
    with jax.enable_x64(True):
        inputs = (logprobs, entropy, batch, config)
        gradients = jax.grad(policy_loss, argnums=(0, 1), has_aux=True)(*inputs)[0]
    expected = (
        slopes(lambda x: reference_loss(x, entropy, batch, config), logprobs),
        slopes(lambda x: reference_loss(logprobs, x, batch, config), entropy),
    )
    for gradient, slope in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_masked_cannot_poison(aggregation, poison):
    batch = as_float32(make_batch(6))
    mask = batch[2].mask
    config = dataclasses.replace(FULL, aggregation=aggregation)

    def spoil(x):
        return np.where(mask, x, np.float32(poison)) if x.dtype == np.float32 else x

    differentiate = jax.value_and_grad(policy_loss, (0, 1), has_aux=True)
    (loss, sums), gradients = differentiate(*jax.tree.map(spoil, batch), config)
    (clean_loss, clean_sums), clean_gradients = differentiate(*batch, config)
    assert loss == clean_loss
    jax.tree.map(np.testing.assert_array_equal, sums, clean_sums)
    jax.tree.map(np.testing.assert_array_equal, gradients, clean_gradients)
    assert not np.asarray(gradients[0])[~np.asarray(mask)].any()


def test_metrics_by_hand():
    """The KL that is reported is k3, whichever is trained on."""
    ratio = np.array([[1.5, 1.0, 9.9], [0.5, 1.0, 1.0]], np.float32)
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    entropy = np.array([[1, 2, 99], [3, 4, 5]], np.float32)
    logprobs = np.log(ratio)
    reference = logprobs - np.float32(math.log(2))
    batch = as_batch(mask, advantages=np.ones_like(ratio), ref_logprobs=reference)
    config = dataclasses.replace(PLAIN, kl_estimator="k1")
    _, sums = policy_loss(logprobs, entropy, batch, config)
    metrics = policy_metrics(sums)
    assert sums["tokens"] == 5
    assert metrics["policy/clip_fraction"] == pytest.approx(1 / 5)
    assert metrics["policy/ratio_mean"] == pytest.approx(5 / 5)
    assert metrics["policy/entropy"] == pytest.approx(3.0)
    assert metrics["policy/kl"] == pytest.approx(0.5 + math.log(2) - 1)
    assert sums["logprob_gap"] == pytest.approx(math.log(1.5) + math.log(2))


def test_without_a_reference_there_is_no_kl():
    logprobs, entropy, batch = as_float32(make_batch(7))
    batch = dataclasses.replace(batch, ref_logprobs=None)
    _, sums = policy_loss(logprobs, entropy, batch, PLAIN)
    assert "policy/kl" not in policy_metrics(sums)
    with pytest.raises(ValueError, match=r"kl_coef must be 0 without reference log-probs, got 0.1"):
        policy_loss(logprobs, entropy, batch, FULL)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_on_an_explicitly_sharded_batch(aggregation):
    devices = len(jax.devices())
    batch = as_float32(make_batch(8, rows=2 * devices))
    config = dataclasses.replace(FULL, aggregation=aggregation)
    differentiate = jax.value_and_grad(policy_loss, has_aux=True)
    expected = differentiate(*batch, config)
    with jax.set_mesh(jax.make_mesh((devices, 1), ("data", "tensor"))):
        sharded = jax.device_put(batch, jax.P("data"))
        got = jax.jit(differentiate, static_argnums=3)(*sharded, config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


# Variants: Dr. GRPO, GSPO, CISPO --------------------------------------------------------------

VARIANTS = {
    "Dr. GRPO": {"aggregation": "constant"},
    "GSPO": {"ratio": "sequence", "aggregation": "sequence"},
    "GSPO over tokens": {"ratio": "sequence"},
    "CISPO": {"objective": "cispo"},
    "CISPO over rows": {"objective": "cispo", "aggregation": "sequence"},
    "CISPO with GSPO's ratio": {"objective": "cispo", "ratio": "sequence"},
}


def variant_loss(logprobs, batch, config, at):
    """The papers' formulas in float64; at: the log-probs where no gradient goes through."""
    total, rows = 0.0, np.sum(batch.response_lens > 0)
    for row, n in enumerate(batch.response_lens):
        if not n:
            continue
        a, old = batch.advantages[row, :n], batch.old_logprobs[row, :n]
        new, fixed = logprobs[row, :n], at[row, :n]
        r, weight = np.exp(new - old), np.exp(fixed - old)
        if config.ratio == "sequence":  # (π(y) / π_old(y))^(1/|y|) at `at`, times π / sg(π)
            weight = np.full(n, np.prod(weight) ** (1 / n))
            r = weight * np.exp(new - fixed)
        if config.objective == "cispo":
            terms = -np.clip(weight, 0.8, 1.28) * a * new
        else:
            terms = -np.minimum(r * a, np.clip(r, 0.8, 1.28) * a)
        total += terms.sum() / {
            "token": batch.response_lens.sum(), "sequence": n * rows, "constant": MAX_LEN * rows
        }[config.aggregation]  # fmt: skip
    return total


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_variants_against_their_papers(variant):
    """Value by an independent formula, gradient by its finite differences, both in float64."""
    logprobs, entropy, batch = make_batch(seed=5)
    config = dataclasses.replace(PLAIN, **variant)
    inputs = as_float32((logprobs, entropy, batch))
    (loss, _), gradient = jax.value_and_grad(policy_loss, has_aux=True)(*inputs, config)
    formula = functools.partial(variant_loss, batch=batch, config=config, at=logprobs)
    np.testing.assert_allclose(loss, formula(logprobs), rtol=1e-5)
    expected = slopes(formula, logprobs)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert np.any(expected != 0)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_micro_batches_of_variants_add_up(variant):
    batch, config = as_float32(make_batch(seed=6)), dataclasses.replace(PLAIN, **variant)
    whole, _ = policy_loss(*batch, config)
    count = AGGREGATIONS[config.aggregation].count(batch[2].mask)
    parts = [
        policy_loss(*take(batch, rows), config, count)[0] for rows in (slice(0, 2), slice(2, 6))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [(1.5, 2.0, 1.2, -2.4, True), (0.1, 2.0, 0.1, -0.2, False), (1.5, -2.0, -1.2, 2.4, True)],
)
def test_cispo_by_hand(ratio, advantage, loss, gradient, clipped):
    """The docstring's row: log π(y) = -0.5, weights in [0, 1.2]."""
    old = np.float32(-0.5 - np.log(ratio))
    config = dataclasses.replace(PLAIN, clip_low=1.0, clip_high=0.2)

    def token_loss(logprob):
        logprobs = logprob[None, None]
        return clipped_weight(logprobs - old, logprobs, jnp.full((1, 1), advantage), config)

    value, was_clipped = token_loss(jnp.float32(-0.5))
    np.testing.assert_allclose(value, [[loss]], rtol=1e-5)
    assert was_clipped.item() is clipped
    slope = jax.grad(lambda x: token_loss(x)[0].sum())(jnp.float32(-0.5))
    np.testing.assert_allclose(slope, gradient, rtol=1e-5)


def test_a_sequence_ratio_is_clipped_for_all_its_tokens():
    """Ratios 2 and 1/2 in one row have mean 1: no token of it is clipped, though each would be."""
    logprobs = np.log(np.array([[2.0, 0.5], [2.0, 2.0]], np.float32))
    batch = as_batch(np.ones((2, 2), bool), advantages=np.ones_like(logprobs))
    config = dataclasses.replace(PLAIN, ratio="sequence", aggregation="sequence")
    loss, sums = policy_loss(logprobs, logprobs, batch, config)
    np.testing.assert_allclose(loss, -(1.0 + 1.28) / 2, rtol=1e-6)
    assert sums["clip_fraction"] == 2


def test_a_sequence_ratio_leaves_each_token_its_own_advantage():
    """`sequence_ratio`'s worked row: s = e^0.3 for both tokens, each times its own advantage."""
    log_ratio = jnp.array([[0.2, 0.4, 7.0]])
    mask, advantages = jnp.array([[True, True, False]]), jnp.array([[1.0, -3.0, 5.0]])

    def losses(log_ratio):
        ratio = jnp.exp(sequence_ratio(log_ratio, mask))
        return jnp.where(mask, -ratio * advantages, 0)

    s = math.exp(0.3)
    np.testing.assert_allclose(losses(log_ratio), [[-s, 3 * s, 0]], rtol=1e-6)
    gradient = jax.grad(lambda x: losses(x).sum())(log_ratio)
    np.testing.assert_allclose(gradient, [[-s, 3 * s, 0]], rtol=1e-6)


def test_with_one_advantage_per_response_the_sequence_ratio_is_gspos():
    """The loss is equal to the bit, the gradient to rounding: arXiv 2507.18071, eq. 5 and 13."""
    logprobs, entropy, batch = as_float32(make_batch(seed=9))
    advantages = np.broadcast_to(batch.advantages[:, :1], batch.advantages.shape)
    batch = dataclasses.replace(batch, advantages=advantages)
    config = dataclasses.replace(PLAIN, ratio="sequence", aggregation="sequence")

    def gspo(logprobs):
        mask, n = batch.mask, jnp.maximum(batch.response_lens, 1)
        log_ratio = jnp.where(mask, logprobs - batch.old_logprobs, 0)
        s = jnp.broadcast_to((jnp.sum(log_ratio, axis=1) / n)[:, None], mask.shape)
        terms, _ = clipped_surrogate(s, s, batch.advantages, PLAIN)
        return AGGREGATIONS["sequence"].mean(terms, mask, 0)

    expected, expected_gradient = jax.value_and_grad(gspo)(logprobs)
    differentiate = jax.value_and_grad(policy_loss, has_aux=True)
    (loss, _), gradient = differentiate(logprobs, entropy, batch, config)
    assert loss == expected
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-8)


def test_weights_multiply_each_tokens_surrogate_and_nothing_else():
    """By hand: ratios 1, so a token's loss is -w A; entropy and KL keep weight 1."""
    logprobs = np.full((1, 3), -1.0, np.float32)
    advantages = np.array([[1.0, -2.0, 5.0]], np.float32)
    weights = np.array([[0.5, 3.0, np.nan]], np.float32)
    mask = np.array([[1, 1, 0]], bool)
    entropy = np.full((1, 3), 0.7, np.float32)
    batch = as_batch(mask, logprobs, advantages, ref_logprobs=logprobs + 0.1, weights=weights)

    def loss(logprobs, config=PLAIN):
        return policy_loss(logprobs, entropy, batch, config)[0]

    np.testing.assert_allclose(loss(logprobs), (-0.5 + 6.0) / 2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(logprobs), [[-0.25, 3.0, 0]], rtol=1e-6)
    config = dataclasses.replace(PLAIN, entropy_coef=0.1, kl_coef=2.0, kl_estimator="k1")
    np.testing.assert_allclose(loss(logprobs, config), (-0.5 + 6.0) / 2 - 0.07 - 0.2, rtol=1e-5)


# The critic's loss --------------------------------------------------------------------------


def value_batch(mask, old, returns) -> Batch:
    return as_batch(mask, values=old, returns=returns)


def plain_value_loss(values, batch, clip):
    """Token by token, in float64."""
    terms = []
    for row, column in np.argwhere(batch.mask):
        v, v_old, r = (x[row, column] for x in (values, batch.values, batch.returns))
        errors = [(v - r) ** 2]
        if clip:
            errors.append((min(max(v, v_old - clip), v_old + clip) - r) ** 2)
        terms.append(max(errors) / 2)
    return sum(terms) / len(terms)


def test_the_critics_loss_by_hand():
    """The docstring's row: V_old = 0, R = 1, c = 0.2."""
    values = np.array([[0.1, 0.5, -0.5, np.nan]], np.float32)
    mask = np.array([[1, 1, 1, 0]], bool)
    batch = value_batch(mask, np.zeros_like(values), np.ones_like(values))
    loss, sums = value_loss(values, batch, 0.2)
    np.testing.assert_allclose(loss, (0.405 + 0.32 + 1.125) / 3, rtol=1e-6)
    assert sums["critic_clipped"] == 1
    gradient = jax.grad(lambda v: value_loss(v, batch, 0.2)[0])(values)
    np.testing.assert_allclose(gradient, [[-0.3, 0, -0.5, 0]], rtol=1e-5)


def test_values_within_the_clip_are_not_counted_as_clipped():
    """V_old + (V − V_old) differs from V by rounding; 1,000 values that move by less than c."""
    rng = np.random.default_rng(11)
    old, moves, returns = rng.normal(0, 1, (3, 10, 100)).astype(np.float32)
    values = old + 0.19 * np.tanh(moves)
    batch = value_batch(np.ones((10, 100), bool), old, returns)
    assert value_loss(values, batch, 0.2)[1]["critic_clipped"] == 0


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_critics_loss_against_the_formula(clip):
    rng = np.random.default_rng(7)
    mask = np.arange(6) < np.array([6, 1, 4])[:, None]
    values, old, returns = rng.normal(0, 0.6, (3, 3, 6))
    batch = value_batch(mask, old, returns)
    inputs = as_float32((values, batch))
    (loss, _), gradient = jax.value_and_grad(value_loss, has_aux=True)(*inputs, clip)
    formula = functools.partial(plain_value_loss, batch=batch, clip=clip)
    np.testing.assert_allclose(loss, formula(values), rtol=1e-5)
    np.testing.assert_allclose(gradient, slopes(formula, values), rtol=1e-4, atol=1e-7)
    parts = [
        value_loss(*take(inputs, rows), clip, mask.sum())[0] for rows in (slice(0, 1), slice(1, 3))
    ]
    np.testing.assert_allclose(sum(parts), loss, rtol=1e-5)
