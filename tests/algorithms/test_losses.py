import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.algorithms.losses import (
    aggregate,
    clipped_surrogate,
    clipped_weight,
    kl,
    loss_normalizer,
    policy_loss,
    policy_metrics,
    value_loss,
)

SETTINGS = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
}


def surrogate(ratio, advantage, **overrides):
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0} | overrides
    shape = np.shape(ratio)
    return clipped_surrogate(
        np.log(np.asarray(ratio, np.float32)),
        np.zeros(shape, np.float32),
        np.broadcast_to(np.float32(advantage), shape),
        **options,
    )


def make_batch(seed=0, rows=6, slots=7):
    """Log-probs, entropy, old log-probs, advantages, mask, reference log-probs; one empty row."""
    generator = np.random.default_rng(seed)
    logprobs = -generator.gamma(1.0, 1.0, (rows, slots))
    old_logprobs = logprobs + generator.normal(scale=0.5, size=logprobs.shape)
    ref_logprobs = logprobs + generator.normal(scale=0.5, size=logprobs.shape)
    entropy = generator.gamma(2.0, 1.0, logprobs.shape)
    advantages = generator.normal(scale=2.0, size=logprobs.shape)
    lens = np.append(generator.integers(1, slots + 1, rows - 1), 0)
    mask = np.arange(slots) < lens[:, None]
    return logprobs, entropy, old_logprobs, advantages, mask, ref_logprobs


def as_float32(batch):
    return tuple(x if x.dtype == bool else x.astype(np.float32) for x in batch)


def reference_loss(batch, aggregation, estimator):
    """The same loss, token by token in Python floats."""
    logprobs, entropy, old_logprobs, advantages, mask, ref_logprobs = (x.tolist() for x in batch)
    rows = []
    for b, row_mask in enumerate(mask):
        row = []
        for j in range(sum(row_mask)):
            ratio = math.exp(logprobs[b][j] - old_logprobs[b][j])
            advantage = advantages[b][j]
            loss = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            if advantage < 0:
                loss = min(loss, 3.0 * abs(advantage))
            d = ref_logprobs[b][j] - logprobs[b][j]
            penalty = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]
            row.append(loss + 0.1 * penalty - 0.01 * entropy[b][j])
        rows.append(row)
    if aggregation == "token":
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
    loss, clipped = surrogate([[9.0]], -2.0, dual_clip=0.0)
    np.testing.assert_allclose(loss, 18.0, rtol=1e-6)
    assert not clipped.item()


def test_clipped_says_where_the_gradient_vanishes():
    ratio = np.array([[0.1, 0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1, 50.0]], np.float32)
    for advantage in (-1.5, 1.5):

        def total(logprobs, advantage=advantage):
            options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
            zeros = jnp.zeros_like(logprobs)
            return clipped_surrogate(logprobs, zeros, zeros + advantage, **options)[0].sum()

        gradient = jax.grad(total)(np.log(ratio))
        _, clipped = surrogate(ratio, advantage)
        np.testing.assert_array_equal(np.asarray(gradient) == 0, clipped)
        expected = np.where(clipped, 0, -advantage * ratio)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize("advantage", [-3.0, 3.0])
@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
@pytest.mark.parametrize("log_ratio", [-1e30, -200.0, 200.0, 1e30])
def test_extreme_ratios_stay_finite(log_ratio, dual_clip, advantage):
    def total(logprobs):
        options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": dual_clip}
        zeros = jnp.zeros_like(logprobs)
        loss, _ = clipped_surrogate(logprobs, zeros, zeros + advantage, **options)
        return loss.sum() + kl(logprobs, zeros, "k3").sum()

    value, gradient = jax.value_and_grad(total)(jnp.full((1, 2), log_ratio))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


# KL -----------------------------------------------------------------------------------------


def test_kl_by_hand():
    logprobs, ref_logprobs = np.log([[0.5, 0.25]]), np.log([[0.25, 0.5]])
    log2 = math.log(2)
    for estimator, expected in {
        "k1": [log2, -log2],
        "k2": [log2**2 / 2, log2**2 / 2],
        "k3": [0.5 + log2 - 1, 2 - log2 - 1],
    }.items():
        np.testing.assert_allclose(kl(logprobs, ref_logprobs, estimator)[0], expected, rtol=1e-5)


def test_kl_estimators_against_the_exact_divergence():
    policy, reference = np.array([0.2, 0.3, 0.5]), np.array([0.3, 0.3, 0.4])
    exact = np.sum(policy * np.log(policy / reference))
    for estimator in ("k1", "k3"):
        expectation = policy @ np.asarray(kl(np.log(policy), np.log(reference), estimator))
        np.testing.assert_allclose(expectation, exact, rtol=1e-5)
    # k2's gradient, not its value, is the divergence's in expectation: Σ π ∇log π · log(π/π_ref).
    slope = jax.vmap(jax.grad(functools.partial(kl, estimator="k2")))(
        np.log(policy), np.log(reference)
    )
    np.testing.assert_allclose(slope, np.log(policy / reference), rtol=1e-5)


# Aggregation --------------------------------------------------------------------------------


def test_aggregate_by_hand():
    per_token = np.array([[1, 2, 3], [10, np.nan, np.inf], [np.nan] * 3], np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
    assert loss_normalizer(mask, how="token") == 4
    assert loss_normalizer(mask, how="sequence") == 2
    assert aggregate(per_token, mask, how="token") == 4.0
    assert aggregate(per_token, mask, how="sequence") == 6.0
    assert aggregate(per_token, np.zeros_like(mask), how="token") == 0.0
    assert aggregate(per_token, np.zeros_like(mask), how="sequence") == 0.0


@pytest.mark.parametrize("how", ["token", "sequence"])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_micro_batches_sum_to_the_mini_batch(how, parts):
    batch = as_float32(make_batch(3))
    mask = batch[4]
    loss_of = functools.partial(policy_loss, aggregation=how, **SETTINGS)
    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    (whole, whole_sums), whole_gradient = differentiate(*batch)

    normalizer = loss_normalizer(mask, how=how)
    total, gradients, sums = 0.0, [], None
    for part in zip(*(np.split(x, parts) for x in batch), strict=True):
        (loss, part_sums), gradient = differentiate(*part, normalizer=normalizer)
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
    settings = SETTINGS | {"aggregation": aggregation, "kl_estimator": estimator}
    with jax.enable_x64(True):
        loss, _ = policy_loss(*batch, **settings)
        assert loss.dtype == np.float64
        np.testing.assert_allclose(loss, reference_loss(batch, aggregation, estimator), rtol=1e-12)
    loss, _ = jax.jit(functools.partial(policy_loss, **settings))(*as_float32(batch))
    np.testing.assert_allclose(loss, reference_loss(batch, aggregation, estimator), rtol=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_by_finite_differences(aggregation, estimator):
    batch = make_batch(5, rows=3, slots=4)
    width = 1e-6
    with jax.enable_x64(True):
        loss_of = functools.partial(
            policy_loss, aggregation=aggregation, kl_estimator=estimator, **SETTINGS
        )
        gradients = jax.grad(loss_of, argnums=(0, 1), has_aux=True)(*batch)[0]
    for i, gradient in enumerate(gradients):
        for position in np.ndindex(batch[0].shape):
            ends = []
            for sign in (1, -1):
                moved = [x.copy() for x in batch]
                moved[i][position] += sign * width
                ends.append(reference_loss(moved, aggregation, estimator))
            slope = (ends[0] - ends[1]) / (2 * width)
            np.testing.assert_allclose(gradient[position], slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_masked_cannot_poison(aggregation, poison):
    batch = as_float32(make_batch(6))
    mask = batch[4]
    poisoned = tuple(x if x is mask else np.where(mask, x, np.float32(poison)) for x in batch)
    differentiate = jax.value_and_grad(
        functools.partial(policy_loss, aggregation=aggregation, **SETTINGS), (0, 1), has_aux=True
    )
    (loss, sums), gradients = differentiate(*poisoned)
    (clean_loss, clean_sums), clean_gradients = differentiate(*batch)
    assert loss == clean_loss
    jax.tree.map(np.testing.assert_array_equal, sums, clean_sums)
    jax.tree.map(np.testing.assert_array_equal, gradients, clean_gradients)
    assert not np.asarray(gradients[0])[~mask].any()


def test_metrics_by_hand():
    ratio = np.array([[1.5, 1.0, 9.9], [0.5, 1.0, 1.0]], np.float32)
    mask = np.array([[1, 1, 0], [1, 1, 1]], bool)
    entropy = np.array([[1, 2, 99], [3, 4, 5]], np.float32)
    logprobs, zeros = np.log(ratio), np.zeros((2, 3), np.float32)
    _, sums = policy_loss(
        logprobs,
        entropy,
        zeros,
        zeros + 1,
        mask,
        logprobs - np.float32(math.log(2)),
        aggregation="token",
        clip_low=0.2,
        clip_high=0.2,
        kl_estimator="k1",
    )
    metrics = policy_metrics(sums)
    assert sums["tokens"] == 5
    assert metrics["policy/clip_fraction"] == pytest.approx(1 / 5)
    assert metrics["policy/ratio_mean"] == pytest.approx(5 / 5)
    assert metrics["policy/entropy"] == pytest.approx(3.0)
    assert metrics["policy/kl"] == pytest.approx(0.5 + math.log(2) - 1)  # k3, whatever is trained
    assert sums["logprob_gap"] == pytest.approx(math.log(1.5) + math.log(2))


def test_without_a_reference_there_is_no_kl():
    batch = as_float32(make_batch(7))[:5]
    settings = SETTINGS | {"aggregation": "token", "kl_coef": 0.0}
    _, sums = policy_loss(*batch, **settings)
    assert "policy/kl" not in policy_metrics(sums)
    with pytest.raises(ValueError, match=r"kl_coef must be 0 without reference log-probs, got 0.5"):
        policy_loss(*batch, **settings | {"kl_coef": 0.5})


def test_unknown_names_list_the_known_ones():
    zeros, mask = np.zeros((1, 1), np.float32), np.ones((1, 1), bool)
    with pytest.raises(ValueError, match="must be one of k1, k2, k3, got 'k4'"):
        kl(zeros, zeros, "k4")
    with pytest.raises(ValueError, match="must be one of token, sequence, constant, got 'mean'"):
        aggregate(zeros, mask, how="mean")
    with pytest.raises(ValueError, match="must be one of k1, k2, k3, got 'k4'"):
        policy_loss(
            *[zeros] * 4, mask, aggregation="token", kl_estimator="k4", clip_low=0.2, clip_high=0.2
        )


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_on_an_explicitly_sharded_batch(aggregation):
    devices = len(jax.devices())
    batch = as_float32(make_batch(8, rows=2 * devices))
    loss_of = functools.partial(policy_loss, aggregation=aggregation, **SETTINGS)
    expected = jax.value_and_grad(loss_of, has_aux=True)(*batch)
    with jax.set_mesh(jax.make_mesh((devices, 1), ("data", "tensor"))):
        sharded = jax.device_put(batch, jax.P("data"))
        got = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(*sharded)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


# Kin: Dr. GRPO, GSPO, CISPO --------------------------------------------------------------------

LENGTH = 9
KIN = {
    "Dr. GRPO": {"aggregation": "constant"},
    "GSPO": {"ratio": "sequence", "aggregation": "sequence"},
    "GSPO over tokens": {"ratio": "sequence", "aggregation": "token"},
    "CISPO": {"objective": "cispo", "aggregation": "token"},
    "CISPO over rows": {"objective": "cispo", "aggregation": "sequence"},
}


def kin_loss(logprobs, batch, *, at=None, objective="clip", ratio="token", aggregation="token"):
    """The papers' formulas in float64; at: log-probs that a weight without gradient uses."""
    _, _, old, advantages, mask, _ = batch
    total = 0.0
    for row in range(len(mask)):
        n = int(mask[row].sum())
        if not n:
            continue
        a = advantages[row, :n]
        r = np.exp(logprobs[row, :n] - old[row, :n])
        if objective == "cispo":
            fixed = logprobs if at is None else at
            weight = np.clip(np.exp(fixed[row, :n] - old[row, :n]), 0.8, 1.28)
            terms = -weight * a * logprobs[row, :n]
        else:
            if ratio == "sequence":  # (π(y) / π_old(y))^(1/|y|), one of a row
                r = np.full(n, np.prod(r) ** (1 / n))
            terms = -np.minimum(r * a, np.clip(r, 0.8, 1.28) * a)
        share = {"token": mask.sum(), "sequence": n * mask.any(axis=1).sum(),
                 "constant": LENGTH * mask.any(axis=1).sum()}[aggregation]  # fmt: skip
        total += terms.sum() / share
    return total


@pytest.mark.parametrize("kind", KIN.values(), ids=KIN)
def test_kin_against_their_papers(kind):
    """Value by an independent formula, gradient by its finite differences, both in float64."""
    batch = make_batch(seed=5)
    options = {"clip_low": 0.2, "clip_high": 0.28, "length": LENGTH} | kind

    def loss(logprobs):
        return policy_loss(logprobs, *as_float32(batch)[1:5], **options)[0]

    logprobs = batch[0]
    value, gradient = jax.value_and_grad(loss)(logprobs.astype(np.float32))
    np.testing.assert_allclose(value, kin_loss(logprobs, batch, **kind), rtol=1e-5)
    step, expected = 1e-6, np.zeros_like(logprobs)
    for place in np.ndindex(*logprobs.shape):
        up, down = logprobs.copy(), logprobs.copy()
        up[place] += step
        down[place] -= step
        found = [kin_loss(x, batch, at=logprobs, **kind) for x in (up, down)]
        expected[place] = (found[0] - found[1]) / (2 * step)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    assert np.any(expected != 0)


@pytest.mark.parametrize("kind", KIN.values(), ids=KIN)
def test_micro_batches_of_kin_add_up(kind):
    batch = as_float32(make_batch(seed=6))
    options = {"clip_low": 0.2, "clip_high": 0.28, "length": LENGTH} | kind
    whole, _ = policy_loss(*batch[:5], **options)
    count = loss_normalizer(batch[4], how=kind["aggregation"])
    parts = [
        policy_loss(*(x[rows] for x in batch[:5]), normalizer=count, **options)[0]
        for rows in (slice(0, 2), slice(2, 6))
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "cut"),
    [(1.5, 2.0, 1.2, -2.4, True), (0.1, 2.0, 0.1, -0.2, False), (1.5, -2.0, -1.2, 2.4, True)],
)
def test_cispo_by_hand(ratio, advantage, loss, gradient, cut):
    """The docstring's row: log π(y) = -0.5, weights in [0, 1.2]."""
    old = np.float32(-0.5 - np.log(ratio))

    def one(logprob):
        options = {"clip_low": 1.0, "clip_high": 0.2}
        return clipped_weight(logprob[None, None], old[None, None], jnp.full((1, 1), advantage),
                              **options)  # fmt: skip

    got, was_cut = one(jnp.float32(-0.5))
    np.testing.assert_allclose(got, [[loss]], rtol=1e-5)
    assert was_cut.item() is cut
    np.testing.assert_allclose(jax.grad(lambda x: one(x)[0].sum())(jnp.float32(-0.5)), gradient,
                               rtol=1e-5)  # fmt: skip


def test_a_sequence_ratio_is_clipped_for_all_its_tokens():
    """Ratios 2 and 1/2 in one row have mean 1: no token of it is clipped, though each would be."""
    logprobs = np.log(np.array([[2.0, 0.5], [2.0, 2.0]], np.float32))
    zeros, mask = np.zeros_like(logprobs), np.ones_like(logprobs, bool)
    options = {"clip_low": 0.2, "clip_high": 0.28, "ratio": "sequence", "aggregation": "sequence"}
    loss, sums = policy_loss(logprobs, zeros, zeros, zeros + 1, mask, **options)
    np.testing.assert_allclose(loss, -(1.0 + 1.28) / 2, rtol=1e-6)
    assert sums["clip_fraction"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "ppo"}, "objective must be one of clip, cispo, got 'ppo'"),
        ({"ratio": "row"}, "ratio must be one of token, sequence, got 'row'"),
        ({"objective": "cispo", "ratio": "sequence"}, "ratio must be token for objective 'cispo'"),
        ({"aggregation": "constant"}, 'length must be >= 1 for aggregation "constant", got 0'),
    ],
)
def test_kin_that_cannot_be(options, message):
    options = {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"} | options
    with pytest.raises(ValueError, match=message):
        policy_loss(*as_float32(make_batch())[:5], **options)


def test_weights_multiply_each_tokens_surrogate_and_nothing_else():
    """By hand: ratios 1, so a token's loss is -w A; entropy and KL keep weight 1."""
    logprobs = np.full((1, 3), -1.0, np.float32)
    advantages = np.array([[1.0, -2.0, 5.0]], np.float32)
    weights = np.array([[0.5, 3.0, np.nan]], np.float32)
    mask = np.array([[1, 1, 0]], bool)
    options = {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"}

    def loss(logprobs, **more):
        entropy = np.full((1, 3), 0.7, np.float32)
        return policy_loss(logprobs, entropy, np.full((1, 3), -1.0, np.float32), advantages, mask,
                           logprobs + 0.1, weights, **options, **more)[0]  # fmt: skip

    np.testing.assert_allclose(loss(logprobs), (-0.5 + 6.0) / 2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(loss)(logprobs), [[-0.25, 3.0, 0]], rtol=1e-6)
    more = loss(logprobs, entropy_coef=0.1, kl_coef=2.0, kl_estimator="k1")
    np.testing.assert_allclose(more, (-0.5 + 6.0) / 2 - 0.07 - 0.2, rtol=1e-5)


def plain_value_loss(values, old, returns, mask, clip):
    """Token by token, in float64."""
    terms = []
    for row, column in np.argwhere(mask):
        v, v_old, r = values[row, column], old[row, column], returns[row, column]
        errors = [(v - r) ** 2]
        if clip:
            errors.append((min(max(v, v_old - clip), v_old + clip) - r) ** 2)
        terms.append(max(errors) / 2)
    return sum(terms) / len(terms)


def test_the_critics_loss_by_hand():
    """The docstring's row: V_old = 0, R = 1, c = 0.2."""
    values = np.array([[0.1, 0.5, -0.5, np.nan]], np.float32)
    mask = np.array([[1, 1, 1, 0]], bool)
    old, returns = np.zeros_like(values), np.ones_like(values)
    loss, sums = value_loss(values, old, returns, mask, clip=0.2)
    np.testing.assert_allclose(loss, (0.405 + 0.32 + 1.125) / 3, rtol=1e-6)
    assert sums["critic_clipped"] == 1
    gradient = jax.grad(lambda v: value_loss(v, old, returns, mask, clip=0.2)[0])(values)
    np.testing.assert_allclose(gradient, [[-0.3, 0, -0.5, 0]], rtol=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_critics_loss_against_the_formula(clip):
    rng = np.random.default_rng(7)
    mask = np.arange(6) < np.array([6, 1, 4])[:, None]
    values, old, returns = rng.normal(0, 0.6, (3, 3, 6))
    inputs = [x.astype(np.float32) for x in (values, old, returns)]

    def loss(values):
        return value_loss(values, *inputs[1:], mask, clip=clip)[0]

    value, gradient = jax.value_and_grad(loss)(inputs[0])
    np.testing.assert_allclose(value, plain_value_loss(values, old, returns, mask, clip), rtol=1e-5)
    step, expected = 1e-6, np.zeros_like(values)
    for place in np.ndindex(*values.shape):
        found = []
        for sign in (1, -1):
            moved = values.copy()
            moved[place] += sign * step
            found.append(plain_value_loss(moved, old, returns, mask, clip))
        expected[place] = (found[0] - found[1]) / (2 * step)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)
    parts = [
        value_loss(*(x[rows] for x in inputs), mask[rows], clip=clip, normalizer=mask.sum())[0]
        for rows in (slice(0, 1), slice(1, 3))
    ]
    np.testing.assert_allclose(sum(parts), value, rtol=1e-5)
