"""Score centering against exact sums over a small vocabulary, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from specrl_jax.recipes.score_centering import centering, emitted_parts, log_ratios
from specrl_jax.rollout.acceptance import Ratio, logprobs_of_ids, outcomes

V = 6


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


class World:
    """A policy p, a sampler q and advantages, all at one position."""

    def __init__(self, seed: int = 0, shift: float = 0.7):
        rng = np.random.default_rng(seed)
        self.logits = rng.normal(size=V)
        self.p = special.softmax(self.logits)
        self.q = special.softmax(self.logits + shift * rng.normal(size=V))
        self.advantages = rng.normal(size=V) + 1.0
        self.scores = np.eye(V) - self.p  # row v: the gradient of log p(v) by the logits
        self.order = np.argsort(-self.q)

    def with_tail(self, k: int) -> "World":
        """Return the world whose q is proportional to p outside its k likeliest tokens."""
        head, tail = self.order[:k], self.order[k:]
        self.q[tail] = (1 - self.q[head].sum()) * self.p[tail] / self.p[tail].sum()
        return self

    def gradients(self, k: int, weigh, centred: bool = True) -> np.ndarray:
        """Gradient by the logits of the loss of each sampled token, [V, V]."""
        head = self.order[:k]
        log_q = np.log(self.q)

        def loss(logits, token):
            logprobs = jax.nn.log_softmax(logits)
            ratio = jax.lax.stop_gradient(logprobs[token]) - log_q[token]
            total = -self.advantages[token] * weigh(ratio) * logprobs[token]
            if centred:
                ratios = log_ratios(logprobs[head], log_q[head])
                mass = outcomes(log_q[head]) * weigh(ratios)
                total += self.advantages[token] * centering(logprobs[head], mass)
            return total

        return np.stack([jax.grad(loss)(self.logits, token) for token in range(V)])

    def moments(self, gradients, law) -> tuple[np.ndarray, float]:
        mean = law @ gradients
        return mean, law @ np.sum((gradients - mean) ** 2, axis=1)


def plain(log_ratio):
    return jnp.ones_like(log_ratio)


def truncated(log_ratio):
    return jnp.clip(jnp.exp(log_ratio), 0.8, 1.3)


WEIGHTS = pytest.mark.parametrize("weigh", [plain, truncated])


@WEIGHTS
@pytest.mark.parametrize("k", [V, 3])
def test_mean_and_variance_are_those_of_centred_scores(weigh, k):
    """−A·(w·∇log p(y) − Σ_v q·w·∇log p(v)) for each token y ~ q, by enumeration."""
    world = World().with_tail(k)
    weights = np.asarray(weigh(np.log(world.p / world.q)))
    drift = (world.q * weights) @ world.scores
    expected = -world.advantages[:, None] * (weights[:, None] * world.scores - drift)
    got = world.gradients(k, weigh)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    mean, variance = world.moments(got, world.q)
    uncentred = world.gradients(k, weigh, centred=False)
    uncentred_mean, uncentred_variance = world.moments(uncentred, world.q)
    average = world.q @ world.advantages
    np.testing.assert_allclose(mean, uncentred_mean + average * drift, rtol=1e-9, atol=1e-12)
    assert variance < uncentred_variance


@WEIGHTS
def test_equal_advantages_move_nothing(weigh):
    """Without centering they move the policy away from what the sampler prefers less."""
    world = World()
    world.advantages[:] = 2.0
    mean, _ = world.moments(world.gradients(V, weigh), world.q)
    np.testing.assert_allclose(mean, 0, atol=1e-12)
    drift, _ = world.moments(world.gradients(V, weigh, centred=False), world.q)
    assert np.linalg.norm(drift) > 0.05


@WEIGHTS
def test_a_baseline_has_no_effect_on_the_mean(weigh):
    first, second = World(), World()
    second.advantages += 5.0
    means = [world.moments(world.gradients(V, weigh), world.q)[0] for world in (first, second)]
    np.testing.assert_allclose(*means, atol=1e-12)
    drifts = [x.moments(x.gradients(V, weigh, centred=False), x.q)[0] for x in (first, second)]
    assert np.linalg.norm(drifts[0] - drifts[1]) > 0.05


def test_untruncated_weights_and_equal_laws_need_no_centering():
    world = World()
    head = world.order[:3]
    log_p, log_q = np.log(world.p[head]), np.log(world.q[head])
    mass = outcomes(log_q) * jnp.exp(log_ratios(log_p, log_q))
    grads = jax.grad(lambda x: centering(x, mass))(jnp.asarray(log_p))
    np.testing.assert_allclose(grads, 0, atol=1e-12)
    grads = jax.grad(lambda x: centering(x, outcomes(log_p)))(jnp.asarray(log_p))
    np.testing.assert_allclose(grads, 0, atol=1e-12)


@pytest.mark.parametrize(("low", "high"), [(None, None), (0.0, 2.0), (0.5, 5.0), (0.9, 1.1)])
@pytest.mark.parametrize("k", [1, 4])
def test_coefficients_are_the_published_ones(low, high, k):
    """By the formulas, for a tail that is not proportional."""
    world = World(3)
    head = world.order[:k]
    p, q = world.p[head], world.q[head]
    rho = (1 - q.sum()) / max(1 - p.sum(), 1e-6)
    if low is None:
        weigh, mass, alpha = plain, q, rho
    else:
        weigh = lambda x: jnp.clip(jnp.exp(x), low, high)  # noqa: E731
        mass, alpha = np.clip(p, low * q, high * q), np.clip(1, low * rho, high * rho)
    log_p, log_q = jnp.log(p), jnp.log(q)
    mine = outcomes(log_q) * weigh(log_ratios(log_p, log_q))
    value, slope = jax.value_and_grad(lambda x: centering(x, mine))(log_p)
    np.testing.assert_allclose(slope, mass - alpha * p, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(value, np.sum((mass - alpha * p) * np.log(p)), rtol=1e-9)


def test_the_worked_example():
    value = centering(jnp.log(jnp.array([0.6])), outcomes(jnp.log(jnp.array([0.5]))))
    assert float(value) == pytest.approx(-0.25 * math.log(0.6))


def test_a_head_that_has_all_the_mass_is_finite():
    """q(z) = 0 = p(z) up to rounding, as with top-k: no outcome beside H."""
    with jax.enable_x64(False):
        log_p = jnp.log(jnp.array([0.1, 0.2, 0.7], jnp.float32))
        log_q = jnp.log(jnp.array([0.3, 0.3, 0.4], jnp.float32))
        slope = jax.grad(lambda x: centering(x, outcomes(log_q)))(log_p)
    p, q = np.exp(log_p), np.exp(log_q)
    scores = np.eye(3) - p
    np.testing.assert_allclose(slope @ scores, q @ scores, atol=1e-6)


@WEIGHTS
def test_the_filtered_law_and_the_policy_renormalised_over_it(weigh):
    """Top-k: q has the sampler's S alone, and p is renormalised over S; H is padded beyond S."""
    world = World(1)
    keep = world.order[:3]
    q = world.q[keep] / world.q[keep].sum()
    log_q = np.append(np.log(q), -np.inf)

    def slopes(logits):
        log_p = jax.nn.log_softmax(logits[keep])
        log_p = jnp.append(log_p, -jnp.inf)
        mass = outcomes(log_q) * weigh(log_ratios(log_p, log_q))
        return centering(log_p, mass)

    p = special.softmax(world.logits[keep])
    scores = np.zeros((3, V))
    scores[:, keep] = np.eye(3) - p
    expected = (q * np.asarray(weigh(np.log(p / q)))) @ scores
    np.testing.assert_allclose(jax.grad(slopes)(jnp.asarray(world.logits)), expected, atol=1e-9)


# Lenience ------------------------------------------------------------------------------------


def _emit(now, old, lenience):
    """The law of the token at a verified position, by every draft token and both outcomes."""
    law = np.zeros(V)
    for token in range(V):
        keep = min(1.0, lenience * now[token] / old[token])
        law[token] += old[token] * keep
        law += old[token] * (1 - keep) * now
    return law


def _law(now, old, lenience):
    """The law by the rule's own part, [..., k + 1] as its inputs."""
    accepted = Ratio(np.log(lenience)).accepted_probs(now, old)
    return sum(mass for mass, _ in emitted_parts(now, {"accepted": accepted}))


LENIENCES = pytest.mark.parametrize("lenience", [0.5, 1.0, math.exp(0.5), 4.0, math.inf])


@LENIENCES
def test_the_emitted_law_is_the_enumerated_one(lenience):
    world = World(5)
    order = np.arange(V)
    now, old = np.log(world.q[order]), np.log(special.softmax(world.logits[::-1]))
    law = _law(outcomes(now), outcomes(old), lenience)
    expected = _emit(np.exp(now), np.exp(old), lenience)
    np.testing.assert_allclose(law[:-1], expected, rtol=1e-9)
    assert np.sum(law) == pytest.approx(1)


@LENIENCES
@pytest.mark.parametrize("k", [V, 3])
@WEIGHTS
def test_centred_by_the_emitted_law_equal_advantages_move_nothing(lenience, k, weigh):
    """The ratio that is weighed is p / π; the law that is centred by is what the rule emits."""
    world = World(6).with_tail(k)
    rng = np.random.default_rng(9)
    old = special.softmax(np.log(world.q) + rng.normal(size=V))
    head, tail = world.order[:k], world.order[k:]
    old[tail] = (1 - old[head].sum()) * world.q[tail] / world.q[tail].sum()
    law = _emit(world.q, old, lenience)

    def loss(logits, token, by_law):
        logprobs = jax.nn.log_softmax(logits)
        log_q = np.log(world.q)
        base = -weigh(jax.lax.stop_gradient(logprobs[token]) - log_q[token]) * logprobs[token]
        mass = outcomes(log_q[head])
        if by_law:
            mass = _law(mass, outcomes(np.log(old[head])), lenience)
        mass = mass * weigh(log_ratios(logprobs[head], log_q[head]))
        return base + centering(logprobs[head], mass)

    def mean(by_law):
        gradients = [jax.grad(loss)(world.logits, token, by_law) for token in range(V)]
        return law @ np.stack(gradients)

    np.testing.assert_allclose(mean(True), 0, atol=1e-10)
    assert np.linalg.norm(mean(False)) > 0.02


def test_a_draft_that_is_the_policys_is_emitted_as_it_is():
    """π_old = π: nothing is rejected for ℓ >= 1, and the law is π for any ℓ."""
    law = outcomes(jnp.log(jnp.array([0.5, 0.2])))
    for lenience in (0.25, 1.0, 3.0):
        np.testing.assert_allclose(_law(law, law, lenience), law, rtol=1e-12)


def test_log_probs_are_found_by_id_and_others_share_the_rest():
    """Known 0.5 of token 4 and 0.3 of 2. The rest 0.2 is shared as the law 0.4, 0.1 of 7, 9."""
    ids = jnp.array([4, 2, -1])
    known = jnp.log(jnp.array([0.5, 0.3, 0.0]))
    wanted = jnp.array([7, 4, 9, -1])
    law = jnp.log(jnp.array([0.4, 0.5, 0.1, 0.0]))
    got = logprobs_of_ids(ids, known, wanted, law)
    np.testing.assert_allclose(jnp.exp(got), [0.2 * 0.8, 0.5, 0.2 * 0.2, 0], rtol=1e-9)
