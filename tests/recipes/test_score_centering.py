"""Score centering against exact sums over a small vocabulary, in float64."""

import dataclasses
import itertools
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import host, make_spec
from scipy import special
from small_runs import assert_same_run, interrupt, line_of, records, small_config
from update_reference import LEARNER, on_mesh, pack

from specrl_jax import train as loop
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.update import update
from specrl_jax.algorithms.update_spec import init_policy_state
from specrl_jax.models import transformer
from specrl_jax.models.transformer import Transformer
from specrl_jax.recipes.score_centering import Centering, centering, emitted_parts, log_ratios
from specrl_jax.rollout.acceptance import Ratio
from specrl_jax.rollout.emitted import logprobs_of_ids, outcomes
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.settings import schema
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.types import Batch, Drafts, Source

V = 6


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


exact = pytest.mark.usefixtures("float64")


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


@exact
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


@exact
@WEIGHTS
def test_equal_advantages_move_nothing(weigh):
    """Without centering they move the policy away from what the sampler prefers less."""
    world = World()
    world.advantages[:] = 2.0
    mean, _ = world.moments(world.gradients(V, weigh), world.q)
    np.testing.assert_allclose(mean, 0, atol=1e-12)
    drift, _ = world.moments(world.gradients(V, weigh, centred=False), world.q)
    assert np.linalg.norm(drift) > 0.05


@exact
@WEIGHTS
def test_a_baseline_has_no_effect_on_the_mean(weigh):
    first, second = World(), World()
    second.advantages += 5.0
    means = [world.moments(world.gradients(V, weigh), world.q)[0] for world in (first, second)]
    np.testing.assert_allclose(*means, atol=1e-12)
    drifts = [x.moments(x.gradients(V, weigh, centred=False), x.q)[0] for x in (first, second)]
    assert np.linalg.norm(drifts[0] - drifts[1]) > 0.05


@exact
def test_untruncated_weights_and_equal_laws_need_no_centering():
    world = World()
    head = world.order[:3]
    log_p, log_q = np.log(world.p[head]), np.log(world.q[head])
    mass = outcomes(log_q) * jnp.exp(log_ratios(log_p, log_q))
    grads = jax.grad(lambda x: centering(x, mass))(jnp.asarray(log_p))
    np.testing.assert_allclose(grads, 0, atol=1e-12)
    grads = jax.grad(lambda x: centering(x, outcomes(log_p)))(jnp.asarray(log_p))
    np.testing.assert_allclose(grads, 0, atol=1e-12)


@exact
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


@exact
def test_the_worked_example():
    value = centering(jnp.log(jnp.array([0.6])), outcomes(jnp.log(jnp.array([0.5]))))
    assert float(value) == pytest.approx(-0.25 * math.log(0.6))


@exact
def test_a_head_that_has_all_the_mass_is_finite():
    """q(z) = 0 = p(z) up to rounding, as with top-k: no outcome besides H."""
    with jax.enable_x64(False):
        log_p = jnp.log(jnp.array([0.1, 0.2, 0.7], jnp.float32))
        log_q = jnp.log(jnp.array([0.3, 0.3, 0.4], jnp.float32))
        slope = jax.grad(lambda x: centering(x, outcomes(log_q)))(log_p)
    p, q = np.exp(log_p), np.exp(log_q)
    scores = np.eye(3) - p
    np.testing.assert_allclose(slope @ scores, q @ scores, atol=1e-6)


@exact
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
    known = np.ones(now.shape[-1] - 1, bool)
    return sum(mass for mass, _ in emitted_parts(now, {"accepted": accepted}, known))


LENIENCES = pytest.mark.parametrize("lenience", [0.5, 1.0, math.exp(0.5), 4.0, math.inf])


@exact
@LENIENCES
def test_the_emitted_law_is_the_enumerated_one(lenience):
    world = World(5)
    order = np.arange(V)
    now, old = np.log(world.q[order]), np.log(special.softmax(world.logits[::-1]))
    law = _law(outcomes(now), outcomes(old), lenience)
    expected = _emit(np.exp(now), np.exp(old), lenience)
    np.testing.assert_allclose(law[:-1], expected, rtol=1e-9)
    assert np.sum(law) == pytest.approx(1)


@exact
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


@exact
def test_a_draft_that_is_the_policys_is_emitted_as_it_is():
    """π_old = π: nothing is rejected for ℓ >= 1, and the law is π for any ℓ."""
    law = outcomes(jnp.log(jnp.array([0.5, 0.2])))
    for lenience in (0.25, 1.0, 3.0):
        np.testing.assert_allclose(_law(law, law, lenience), law, rtol=1e-12)


@exact
def test_log_probs_are_found_by_id_and_others_share_the_rest():
    """Known 0.5 of token 4 and 0.3 of 2. The rest 0.2 is shared as the law 0.4, 0.1 of 7, 9."""
    ids = jnp.array([4, 2, -1])
    known = jnp.log(jnp.array([0.5, 0.3, 0.0]))
    wanted = jnp.array([7, 4, 9, -1])
    law = jnp.log(jnp.array([0.4, 0.5, 0.1, 0.0]))
    got = logprobs_of_ids(ids, known, wanted, law)
    np.testing.assert_allclose(jnp.exp(got), [0.2 * 0.8, 0.5, 0.2 * 0.2, 0], rtol=1e-9)


# The update ----------------------------------------------------------------------------------

MODEL = ref.MODEL.replace(vocab_size=6, num_layers=1)
PROMPT = (4, 1)
LONGEST = 2


@pytest.mark.parametrize(
    ("packing", "chunk", "changes"),
    [
        ("trie", 1, {}),
        ("rows", 64, {"importance_cap": 1.2}),
        ("trie", 64, {"old_logprobs": "rollout", "objective": "dppo", "clip_low": 0.03,
                      "clip_high": 0.03}),
    ],
)  # fmt: skip
def test_equal_advantages_have_no_gradient_in_the_mean(mesh, packing, chunk, changes):
    """All responses of a stale sampler, each as often as it writes it; without the term they have.

    Half of the rows list the sampler's tokens in another order.
    """
    rows = list(itertools.product(range(6), repeat=LONGEST))

    def place(nudge):
        return transformer.place_params(MODEL, ref.host_params(MODEL, nudge))

    def logprobs_of(nudge):
        tokens = jnp.array([PROMPT + tuple(row) for row in rows], jnp.int32)
        model = Transformer(MODEL, place(nudge))
        logits = model.logits(model(jax.sharding.reshard(tokens, jax.P(("data", "fsdp"))))[0])
        return np.asarray(jax.nn.log_softmax(logits / LEARNER.temperature))[:, 1 : 1 + LONGEST]

    law = logprobs_of(0.2)
    tokens = np.array(rows, np.int32)
    sampled = np.take_along_axis(law, tokens[..., None], axis=-1)[..., 0]
    probs = np.exp(sampled.sum(axis=1))
    assert probs.sum() == pytest.approx(1, abs=1e-5)
    ids = np.tile(np.arange(6, dtype=np.int32), (*tokens.shape, 1))
    ids[::2] = ids[::2, :, ::-1]
    batch = Batch(
        tokens=np.concatenate(
            [np.tile(np.array(PROMPT, np.int32), (len(rows), 1)), tokens], axis=1
        ),
        prompt_lens=np.full(len(rows), 2, np.int32),
        response_lens=np.full(len(rows), LONGEST, np.int32),
        old_logprobs=sampled,
        advantages=np.float32(np.tile(probs[:, None], (1, LONGEST))),
        importance_weights=np.ones_like(sampled) if "importance_cap" in changes else None,
        extra={"top_ids": ids, "top_logprobs": np.take_along_axis(law, ids, axis=-1)},
    )

    def gradient(*terms):
        loss = LossConfig(max_response_len=LONGEST, old_logprobs="current", terms=terms)
        loss = dataclasses.replace(loss, **changes)
        spec = dataclasses.replace(
            LEARNER, model=MODEL, loss=loss, packing=packing, logits_chunk=chunk
        )
        placed = on_mesh(batch)
        packed = pack(placed, spec, range(len(rows)))
        state, sums = update(spec, init_policy_state(spec, place(0.0)), placed, packed)
        return state.policy.opt_state, sums

    norm = lambda x: math.sqrt(sum(float(jnp.sum(y**2)) for y in jax.tree.leaves(x)))  # noqa: E731
    plain, _ = gradient()
    centred, sums = gradient(Centering(truncated=False))
    assert norm(centred) < 2e-4 * norm(plain)
    assert norm(plain) > 1e-3
    distance, count = sums["policy/sampler_distance"]
    now = logprobs_of(0.0)
    expected = np.abs(np.exp(now) - np.exp(law)).sum(axis=-1).mean() / 2
    assert distance / count == pytest.approx(expected, rel=1e-3)


# The rollout ---------------------------------------------------------------------------------


def test_rollouts_keep_the_chance_that_a_draft_token_was_accepted(mesh):
    """min(π_old, ℓ π) up to the token after the accepted ones, from both rollouts' own laws."""
    log_lenience = 0.5
    spec = make_spec(accept="ratio", stored_logprobs=16)
    spec = dataclasses.replace(
        spec, accept=Ratio(np.float32(log_lenience)), keeps_accepted=True, eos_ids=(1,)
    )
    prompts = ref.random_prompts()

    def roll_out(nudge, step, drafts=None):
        _, weights = ref.policy(nudge)
        noise = NoiseKey(jax.random.key(ref.KEY), step)
        return generate(spec, weights, Requests(prompts, noise, drafts=drafts)).rollout

    first = roll_out(0.0, 1)
    assert not np.any(host(first.tokens.accepted_probs))
    tokens = first.tokens.only(
        "sampling_logprobs", "origin_logprobs", "origin_steps", "top_ids", "top_logprobs"
    )
    second = host(roll_out(0.3, 2, Drafts(tokens, first.lens)))
    first = host(first)
    rejected = second.prefix_lens < first.lens
    assert rejected.any()
    assert (~rejected).any()
    for row in range(len(second.lens)):
        for place in range(second.lens[row]):
            got = second.tokens.accepted_probs[row, place]
            if place > second.prefix_lens[row] or place >= first.lens[row]:
                assert not got.any()
                continue
            old = np.zeros(16)
            old[first.tokens.top_ids[row, place]] = np.exp(first.tokens.top_logprobs[row, place])
            now = np.exp(second.tokens.top_logprobs[row, place])
            expected = np.minimum(
                old[second.tokens.top_ids[row, place]], math.exp(log_lenience) * now
            )
            np.testing.assert_allclose(got[:-1], expected, rtol=1e-4, atol=1e-6)
            assert got[-1] == pytest.approx(0, abs=1e-5)
            reused = place < second.prefix_lens[row]
            assert (second.tokens.sources[row, place] == Source.REUSED) == reused


# Runs ----------------------------------------------------------------------------------------

LENIENT = {"rollout.accept": "ratio", "rollout.lenience": 1.65, "train.epochs": 3}


@pytest.mark.parametrize(
    "changes",
    [
        LENIENT,
        LENIENT | {"algorithm.importance_cap": 2.0, "rollout.staleness": 1},
        {
            "rollout.accept": "match", "rollout.top_k": 4, "algorithm.keep_sampling_mask": True,
            "updates.packing": "rows", "algorithm.entropy_coef": 0.001,
        },
    ],
)  # fmt: skip
def test_a_run_centres_its_scores(mesh, tmp_path, changes):
    loop.train(small_config({"score_centering.top_k": 6} | changes), tmp_path)
    lines = [x for x in records(tmp_path) if "policy/sampler_distance" in x]
    assert max(x["policy/sampler_distance"] for x in lines) > 0.01


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(mesh, tmp_path, monkeypatch):
    """The chances of drafts wait in checkpoints with their batches."""
    changes = {"rollout.staleness": 1, "checkpoint.every": 2, "score_centering.top_k": 6}
    config = small_config(LENIENT | changes)
    loop.train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", MetricsLog.write)  # put back after interrupt
        interrupt(MetricsLog, "write", 4, signal.SIGTERM)
        loop.train(config, tmp_path / "cut")
    loop.train(config, tmp_path / "cut")
    assert_same_run(tmp_path / "cut", tmp_path / "whole", 6)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"updates.old_logprobs": "recompute"},
         "updates.old_logprobs must be rollout or current where score_centering.top_k is > 0 "
         "(π_old is known only for the sampled token), got 'recompute'"),
        ({"algorithm.ratio": "sequence"},
         "algorithm.ratio must be token where score_centering.top_k is > 0 (a response's ratio is "
         "not one of its tokens'), got 'sequence'"),
        ({"rollout.top_k": 4},
         "algorithm.keep_sampling_mask must be True where score_centering.top_k is > 0 and "
         "rollout.top_k or rollout.top_p cuts tokens off, got False"),
        ({"algorithm.mask.row_low": 0.9},
         "algorithm.mask.row_low must be 0 where score_centering.top_k is > 0 (it is of rows), "
         "got 0.9"),
    ],
)  # fmt: skip
def test_what_is_refused(mesh, changes, line):
    config = small_config({"score_centering.top_k": 6, "rollout.accept": "match"} | changes)
    assert line_of(schema().validate, config) == line
