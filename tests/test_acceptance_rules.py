"""The acceptance rules one position at a time, and what they emit by exact enumeration.

Every draft of a small vocabulary is given to the package's jitted functions with every pattern of
accepting and rejecting uniforms, each weighted with its exact probability. Nothing is random, so a
law that is emitted exactly differs from π by float32 rounding alone, some 1e-7 a position.
"""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specrl_jax import config
from specrl_jax.rollout import acceptance
from specrl_jax.sharding import put

OLD = np.array([0.6, 0.3, 0.1])
NEW = np.array([0.2, 0.3, 0.5])
LENIENCES = [0.0, 0.5, 1.0, math.exp(0.5), math.inf]

ratio = jax.jit(acceptance.ratio)
random_cut = jax.jit(acceptance.random_cut)
leading = jax.jit(acceptance.leading)
in_top = jax.jit(acceptance.in_top)
ratio_residual = jax.jit(acceptance.ratio_residual)
block = jax.jit(acceptance.block)
residual_scores = jax.jit(acceptance.residual_scores)
logprobs_at = jax.jit(acceptance.logprobs_at)
top_law = jax.jit(acceptance.top_law, static_argnums=1)


def log(x) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(x, np.float32))


def total_variation(p: dict, q: dict) -> float:
    return 0.5 * sum(abs(p.get(k, 0.0) - q.get(k, 0.0)) for k in p.keys() | q.keys())


def test_the_config_offers_these_rules():
    assert config.CHOICES["rollout.accept"] == tuple(acceptance.RULES)


# The ratio rule and the random cut, against plain loops


def case(seed=0, rows=300, width=7, impossible=0.0):
    """Uniforms, log-probs, draft log-probs and lengths; some log-probs are -inf."""
    rng = np.random.default_rng(seed)
    uniforms = (1 - rng.random((rows, width))).astype(np.float32)
    logprobs, old = (np.log(rng.uniform(0.3, 1, (rows, width))).astype(np.float32) for _ in "ab")
    logprobs[rng.random((rows, width)) < impossible] = -np.inf
    old[rng.random((rows, width)) < impossible] = -np.inf
    return uniforms, logprobs, old, rng.integers(0, width + 1, rows).astype(np.int32)


@pytest.mark.parametrize("lenience", LENIENCES[1:-1])
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
    kept = np.asarray(leading(got, lens))
    np.testing.assert_array_equal(kept, prefix)
    assert kept.dtype == np.int32
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
    got = leading(accept, np.array([4, 4, 4, 3], np.int32))
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


@functools.cache
def accept_probs(lenience: float, count: int = 200_000) -> np.ndarray:
    """Probability that `ratio` accepts each of the three tokens: exact to 1 / count.

    The uniforms are an even grid instead of random numbers.
    """
    grid = ((np.arange(count) + 0.5) / count).astype(np.float32)[:, None]

    def accepted(new: float, old: float) -> float:
        new, old = np.full_like(grid, log(new)), np.full_like(grid, log(old))
        return np.asarray(ratio(grid, new, old, log(lenience))).mean()

    return np.array([accepted(new, old) for new, old in zip(NEW, OLD, strict=True)])


@pytest.mark.parametrize("lenience", LENIENCES)
def test_what_one_position_emits(lenience):
    """b = min(π_old, ℓ π) + d π with d = 1 - Σ min(π_old, ℓ π), from the rule's own decisions."""
    accept = accept_probs(lenience)
    rejected = np.sum(OLD * (1 - accept))
    law = OLD * accept + rejected * NEW
    kept = np.minimum(OLD, lenience * NEW)
    closed = kept + (1 - kept.sum()) * NEW
    np.testing.assert_allclose(law, closed, atol=2e-5)
    by_hand = {0.0: NEW, 0.5: [0.23, 0.345, 0.425], 1.0: [0.28, 0.42, 0.3], math.inf: OLD}
    np.testing.assert_allclose(law, by_hand.get(lenience, law), atol=2e-5)
    assert np.abs(law - NEW).sum() / 2 > 0.07 or lenience == 0  # not π, not even at lenience 1


# The stored law


# Small, and with a split vocabulary
MESHES = [(1, 1, 1), (2, 2, 2), (1, 1, 8)]


def put_scores(scores):
    return put(scores.astype(np.float32), "batch", *(None,) * (scores.ndim - 2), "vocab")


def put_rows(*arrays):
    """Host arrays [B, ...] → device arrays split over the batch."""
    put_one = lambda x: put(x, "batch", *(None,) * (np.ndim(x) - 1))  # noqa: E731
    return tuple(put_one(x) for x in arrays) if len(arrays) > 1 else put_one(*arrays)


def softmax(scores) -> np.ndarray:
    weights = np.exp(np.asarray(scores, np.float64) - np.max(scores, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize(("lead", "k"), [((8,), 3), ((4, 5), 1), ((8,), 19)], ids=str)
def test_top_law_against_a_sort(make_mesh, shape, lead, k):
    scores = np.random.default_rng(0).normal(0, 2, (*lead, 16)).astype(np.float32)
    scores[0, ..., 5:] = -np.inf  # truncated
    scores[1] = np.round(scores[1]) + 0.0  # ties: the lower id first (and no -0)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    expected = np.take_along_axis(log(softmax(scores)), order, axis=-1)
    with jax.set_mesh(make_mesh(*shape)):
        ids, logprobs = top_law(put_scores(scores), k)
        again = logprobs_at(put_scores(scores), ids)
    np.testing.assert_array_equal(np.asarray(ids)[..., :16], order)
    np.testing.assert_allclose(np.asarray(logprobs)[..., :16], expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(ids)[..., 16:], -1)
    np.testing.assert_array_equal(np.asarray(logprobs)[..., 16:], -np.inf)
    np.testing.assert_allclose(np.asarray(again), np.asarray(logprobs), atol=1e-6)
    assert ids.dtype == jnp.int32
    assert logprobs.dtype == jnp.float32


def test_in_top():
    ids = np.array([[[4, 2], [7, -1]], [[0, 1], [0, 1]]], np.int32)
    got = in_top(np.array([[2, 4], [0, 5]], np.int32), ids)
    np.testing.assert_array_equal(np.asarray(got), [[True, False], [True, False]])


def residual_by_hand(new, old, ids, tail, scale):
    """Law [V] of the next token in float64; π_old is known at `ids` and as a sum elsewhere."""
    ids = [i for i in ids if i >= 0]
    others = [x for x in range(len(new)) if x not in ids]
    weights = np.zeros(len(new))
    if not tail:
        weights[ids] = np.maximum(scale * new[ids] - old[ids], 0)
    if new[others].sum() > 0:
        mass = scale * new[others].sum() - old[others].sum()
        mass = new[others].sum() if tail else max(mass, 0)
        weights[others] = mass * new[others] / new[others].sum()
    return weights / weights.sum() if weights.sum() > 0 else new


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
        ids, logprobs = top_law(put_scores(log(old)), k)
        got = residual_scores(
            put_scores(log(new) + 3.0), ids, logprobs, *put_rows(tail, log(scale))
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
    ids, logprobs = top_law(put_scores(log(rng.dirichlet(np.ones(6), 4))), 2)
    same_ids, same = top_law(scores, 2)
    nowhere = put_rows(np.zeros(4, bool))
    zero, infinite, minus = (put_rows(np.full(4, x, np.float32)) for x in (0, np.inf, -np.inf))
    for arguments in (
        (ids, logprobs, nowhere, infinite),
        (ids, logprobs, nowhere, minus),  # P = 0
        (same_ids, same, nowhere, zero),  # equal laws
        (*top_law(scores, 6), ~nowhere, zero),  # an accepted tail of nothing
    ):
        got = residual_scores(scores, *arguments)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(scores))
    assert (np.asarray(residual_scores(scores, ids, logprobs, nowhere, zero)) != scores).any()


# Whole responses by exact enumeration


@dataclasses.dataclass(frozen=True)
class World:
    """Policies on V tokens whose law depends on the whole prefix; responses have T slots.

    k: stored tokens. eos: ends a response. drop: share of the probabilities that truncation takes
    away. draft_slots: drafts are cut there.
    """

    vocab: int
    slots: int
    k: int
    eos: int | None = None
    drop: float = 0.0
    sharpness: float = 1.0
    draft_slots: int = 9
    seed: int = 0

    def laws(self, policy: int) -> dict[tuple[int, ...], np.ndarray]:
        """{prefix: probabilities of the next token}."""
        rng = np.random.default_rng([self.seed, policy])
        found = {}
        for length in range(self.slots):
            for prefix in itertools.product(range(self.vocab), repeat=length):
                probs = rng.dirichlet(np.full(self.vocab, self.sharpness))
                lost = rng.random(self.vocab) < self.drop
                lost[np.argmax(probs)] = False
                found[prefix] = np.where(lost, 0.0, probs) / probs[~lost].sum()
        return found

    def ended(self, prefix) -> bool:
        return len(prefix) == self.slots or (len(prefix) > 0 and prefix[-1] == self.eos)


WORLDS = {
    "whole-law": World(3, 3, k=3),
    "k-above-v": World(3, 3, k=5, eos=2, seed=26),
    "tail": World(3, 3, k=2, seed=2),
    "tail-eos": World(3, 3, k=2, eos=2, seed=3),
    "one": World(4, 3, k=1, eos=0, seed=20),
    "four": World(4, 3, k=2, eos=3, sharpness=0.4, seed=5),
    "five": World(5, 3, k=3, eos=1, seed=6),
    "truncated": World(4, 3, k=2, eos=3, drop=0.4, seed=23),
    "truncated-whole": World(4, 3, k=4, drop=0.5, seed=28),
    "cut": World(4, 3, k=3, eos=0, draft_slots=2, seed=9),
    "near": World(4, 3, k=3, eos=1, sharpness=200.0, seed=10),
}


def responses(world: World, laws, prefix=()) -> dict[tuple[int, ...], float]:
    """Every response that begins with `prefix`, and its probability given that."""
    if world.ended(prefix):
        return {prefix: 1.0}
    found = {}
    for token, p in enumerate(laws[prefix]):
        if p > 0:
            for response, rest in responses(world, laws, (*prefix, token)).items():
                found[response] = p * rest
    return found


@dataclasses.dataclass
class Scored:
    """Every draft of a world as the engine sees it after its verification pass.

    D rows, filled up with empty drafts of probability 0 so that worlds share compiled programs.
    """

    drafts: list[tuple[int, ...]]
    probs: np.ndarray
    lens: np.ndarray
    scores: np.ndarray  # [D, T, V] of π
    top: tuple[np.ndarray, np.ndarray]  # ids and log-probs [D, T, k] of π_old
    arguments: tuple[np.ndarray, ...]  # what the rules take between uniforms and lens


@functools.cache
def score(world: World) -> Scored:
    new, old = world.laws(0), world.laws(1)
    law = collections.defaultdict(float)
    for response, p in responses(world, old).items():
        law[response[: world.draft_slots]] += p
    drafts = [*law, *[()] * (96 - len(law))]
    shape = (len(drafts), world.slots)
    tokens = np.zeros(shape, np.int32)
    scores, old_scores = np.zeros((*shape, world.vocab)), np.zeros((*shape, world.vocab))
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = draft
        for i in range(min(len(draft) + 1, world.slots)):
            scores[row, i], old_scores[row, i] = log(new[draft[:i]]), log(old[draft[:i]])
    scores, old_scores = scores.astype(np.float32), old_scores.astype(np.float32)
    ids, logprobs = top_law(put_scores(old_scores), world.k)
    at = lambda x: np.asarray(logprobs_at(put_scores(x), put_rows(tokens[..., None])))[..., 0]  # noqa: E731
    now_top = np.asarray(logprobs_at(put_scores(scores), ids))
    return Scored(
        drafts,
        np.array([law.get(d, 0.0) for d in drafts]),
        np.array([len(d) for d in drafts], np.int32),
        scores,
        (np.asarray(ids), np.asarray(logprobs)),
        (
            at(scores),
            at(old_scores),
            now_top,
            np.asarray(logprobs),
            np.asarray(in_top(tokens, ids)),
        ),
    )


def judge_ratio(uniforms, arguments, lens):
    """SPEC-RL at ℓ = 1: (kept, tail, log_scale); the next token from π itself."""
    kept = np.asarray(leading(ratio(uniforms, *arguments[:2], log(1.0)), lens))
    return kept, np.zeros(len(lens), bool), np.full(len(lens), np.inf, np.float32)


def judge_ratio_residual(uniforms, arguments, lens):
    accept, tail = (np.asarray(x) for x in ratio_residual(uniforms, *arguments))
    kept = np.asarray(leading(accept, lens))
    inside = kept < lens
    tail = np.array([inside[i] and tail[i, kept[i]] for i in range(len(lens))])
    return kept, tail, np.where(inside, 0.0, np.inf).astype(np.float32)


def judge_block(uniforms, arguments, lens, log_floor=-np.inf):
    got = block(uniforms, *arguments, lens, None, np.float32(log_floor))
    assert np.asarray(got.ended).all()
    return tuple(np.asarray(x) for x in (got.kept, got.tail, got.log_scale))


JUDGES = {
    "ratio": judge_ratio,
    "ratio_residual": judge_ratio_residual,
    "block": judge_block,
    "block-floor": functools.partial(judge_block, log_floor=math.log(0.7)),
}


def thresholds(judge, scored: Scored) -> np.ndarray:
    """[D, T]: the uniform of each position up to which it accepts, by bisection of the rule.

    A prefix that ends with position i is asked about alone: uniforms before it accept, if they
    matter at all, and those behind it reject.
    """
    shape = scored.arguments[0].shape
    found = np.zeros(shape)
    for i in range(shape[1]):
        low, high = np.zeros(shape[0]), np.ones(shape[0])
        for _ in range(30):
            middle = (low + high) / 2
            uniforms = np.full(shape, 1e-30, np.float32)
            uniforms[:, i], uniforms[:, i + 1 :] = middle, np.float32(np.finfo(np.float32).max)
            kept, tail, _ = judge(uniforms, scored.arguments, scored.lens)
            yes = kept + tail >= i + 1
            low, high = np.where(yes, middle, low), np.where(yes, high, middle)
        found[:, i] = low
    return found


@functools.cache
def verdicts(world: World, rule: str):
    """Every decision of a rule: [(draft row, kept, tail, log_scale, probability)].

    One row for each draft and each pattern of uniforms below and above the thresholds.
    """
    judge, scored = JUDGES[rule], score(world)
    limits = thresholds(judge, scored)
    found = []
    for pattern in itertools.product([True, False], repeat=world.slots):
        below = np.array(pattern)
        uniforms = np.where(below, limits / 2, (1 + limits) / 2).astype(np.float32)
        probs = scored.probs * np.where(below, limits, 1 - limits).prod(axis=1)
        verdict = judge(uniforms, scored.arguments, scored.lens)
        found += zip(itertools.count(), *verdict, probs)
    return found


def emitted(world: World, rule: str) -> dict[tuple[int, ...], float]:
    """Law of whole responses: verified prefix, token behind it, the rest from π."""
    scored, new = score(world), world.laws(0)
    rows, kept, tail, log_scale, probs = map(np.array, zip(*verdicts(world, rule), strict=True))
    at = np.minimum(kept, world.slots - 1)
    ids, logprobs = (x[rows, at] for x in scored.top)
    scores = put_scores(scored.scores[rows, at])
    nexts = softmax(residual_scores(scores, *put_rows(ids, logprobs, tail, log_scale)))
    rest = {prefix: responses(world, new, prefix) for prefix in reachable(world)}
    law = collections.defaultdict(float)
    for row, n, p, following in zip(rows, kept, probs, nexts, strict=True):
        prefix = scored.drafts[row][:n]
        if p == 0:
            continue
        if world.ended(prefix):
            law[prefix] += p
            continue
        for token in np.flatnonzero(following):
            for response, q in rest[(*prefix, int(token))].items():
                law[response] += p * following[token] * q
    return dict(law)


def reachable(world: World):
    """All prefixes that may be followed by something, and all responses."""
    for length in range(1, world.slots + 1):
        for prefix in itertools.product(range(world.vocab), repeat=length):
            if world.eos not in prefix[:-1]:
                yield prefix


# Float32 rounds laws and thresholds at 6e-8 each, and 1 - Σ of the stored probabilities too.
EXACT = 1e-6


@pytest.mark.parametrize("rule", ["ratio_residual", "block", "block-floor"])
@pytest.mark.parametrize("name", WORLDS)
def test_what_is_emitted_is_the_policy(mesh, name, rule):
    world = WORLDS[name]
    law = emitted(world, rule)
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    assert total_variation(law, responses(world, world.laws(0))) < EXACT


@pytest.mark.parametrize("name", WORLDS)
def test_the_plain_ratio_rule_does_not_emit_the_policy(mesh, name):
    """It emits b at the first position, even at lenience 1, and so not π."""
    world = WORLDS[name]
    law = emitted(world, "ratio")
    new, old = world.laws(0)[()], world.laws(1)[()]
    b = np.minimum(old, new) + (1 - np.minimum(old, new).sum()) * new
    first = np.zeros(world.vocab)
    for response, p in law.items():
        first[response[0]] += p
    np.testing.assert_allclose(first, b, atol=1e-6)
    distance = total_variation(law, responses(world, world.laws(0)))
    assert distance > (0.05 if name != "near" else 0.01)


def coarse_prefixes(world: World, row: int):
    """The draft's outcomes up to its tail token (-1), shortest prefix first."""
    scored = score(world)
    draft, listed = scored.drafts[row], scored.arguments[-1][row]
    outcomes = [t if listed[i] else -1 for i, t in enumerate(draft)]
    end = outcomes.index(-1) + 1 if -1 in outcomes else len(outcomes)
    return [tuple(outcomes[: n + 1]) for n in range(end)]


def kept_probs(world: World, rule: str) -> dict[tuple[int, ...], float]:
    """{prefix of coarse outcomes: probability that it is drafted and kept}."""
    found = collections.defaultdict(float)
    for row, kept, tail, _, p in verdicts(world, rule):
        for prefix in coarse_prefixes(world, row)[: kept + tail]:
            found[prefix] += p
    return found


@pytest.mark.parametrize("name", WORLDS)
def test_block_keeps_every_prefix_as_often_as_any_rule_can(mesh, name):
    """P(prefix kept | drafted) = P_i, and that is never less than Π min(1, π / π_old)."""
    world = WORLDS[name]
    whole, single = kept_probs(world, "block"), kept_probs(world, "ratio_residual")
    scored = score(world)
    logprobs, old, now_top, old_top, listed = (x.astype(np.float64) for x in scored.arguments)
    tails = [np.log(np.maximum(1 - np.exp(x).sum(axis=-1), 1e-300)) for x in (now_top, old_top)]
    with np.errstate(invalid="ignore"):  # behind the drafts
        quotient = np.exp(np.where(listed, logprobs - old, tails[0] - tails[1]))
    joint, product = collections.defaultdict(float), collections.defaultdict(float)
    for row, p in enumerate(scored.probs):
        block_p = ratio_p = 1.0
        for i, prefix in enumerate(coarse_prefixes(world, row)):
            block_p = min(1.0, block_p * quotient[row, i])
            ratio_p = ratio_p * min(1.0, quotient[row, i])
            joint[prefix] += p * block_p
            product[prefix] += p * ratio_p
    for prefix in joint:
        assert whole.get(prefix, 0.0) == pytest.approx(joint[prefix], abs=EXACT)
        assert single.get(prefix, 0.0) == pytest.approx(product[prefix], abs=EXACT)
        assert whole.get(prefix, 0.0) >= single.get(prefix, 0.0) - EXACT
    assert sum(whole.values()) > sum(single.values()) + (1e-3 if name != "near" else 1e-4)


# Block verification against a plain loop, in parts, and on long drafts


def random_laws(rows, width, vocab=5, k=3, seed=0, concentration=20.0):
    """Drafts from π_old and what the rules read of them; π lies near it. All on the host."""
    rng = np.random.default_rng(seed)
    old = rng.dirichlet(np.ones(vocab), (rows, width))
    tilt = rng.gamma(concentration, 1 / concentration, old.shape)
    new = old * tilt / (old * tilt).sum(axis=-1, keepdims=True)
    tokens = (rng.random((rows, width, 1)) > old.cumsum(axis=-1)).sum(axis=-1).clip(max=vocab - 1)
    ids = np.argsort(-old, axis=-1)[..., :k]
    take = lambda x, i: np.take_along_axis(x, i, axis=-1)  # noqa: E731
    listed = (tokens[..., None] == ids).any(axis=-1)
    uniforms = (1 - rng.random((rows, width))).astype(np.float32)
    picked = (log(take(x, tokens[..., None])[..., 0]) for x in (new, old))
    return uniforms, (*picked, log(take(new, ids)), log(take(old, ids)), listed)


def block_by_hand(uniforms, arguments, lens, log_floor=-math.inf):
    """kept, tail, log_scale of each row in float64, and the margin of its closest decision."""
    logprobs, old, now_top, old_top = (np.asarray(x, np.float64) for x in arguments[:-1])
    found = []
    for row, length in enumerate(lens):
        laws = []
        for i in range(length):
            now, before = np.exp(now_top[row, i]), np.exp(old_top[row, i])
            laws.append((np.append(now, 1 - now.sum()), np.append(before, 1 - before.sum())))
        p, joint = 1.0, []
        for i in range(length):
            listed = arguments[-1][row, i]
            quotient = laws[i][0][-1] / laws[i][1][-1]
            if listed:
                quotient = math.exp(logprobs[row, i] - old[row, i])
            p = min(1.0, p * quotient)
            joint.append(p)
            if not listed or p <= math.exp(log_floor):
                break
        kept, tail, scale, margin = 0, False, (1.0 if joint else math.inf), math.inf
        for i, p in enumerate(joint, start=1):
            if i == len(joint):
                h = p
            else:
                gain = np.maximum(p * laws[i][0] - laws[i][1], 0).sum()
                h = gain / (gain + 1 - p)
            margin = min(margin, abs(uniforms[row, i - 1] - h))
            if uniforms[row, i - 1] <= h:
                tail = i == len(joint) and not arguments[-1][row, i - 1]
                kept, scale = i - tail, math.inf if i == len(joint) else p
        found.append((kept, tail, math.log(scale), margin))
    return tuple(np.array(x) for x in zip(*found, strict=True))


@pytest.mark.parametrize("log_floor", [-math.inf, math.log(0.5)])
def test_block_against_a_loop(log_floor):
    uniforms, arguments = random_laws(2000, 12)
    lens = np.random.default_rng(5).integers(0, 13, 2000).astype(np.int32)
    kept, tail, log_scale = judge_block(uniforms, arguments, lens, log_floor)
    expected = block_by_hand(uniforms, arguments, lens, log_floor)
    clear = expected[-1] > 1e-5  # float32 decides as float64 does, but where they tie
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(kept[clear], expected[0][clear])
    np.testing.assert_array_equal(tail[clear], expected[1][clear])
    np.testing.assert_allclose(log_scale[clear], expected[2][clear], atol=1e-5)
    assert kept.dtype == np.int32
    assert set(range(12)) <= set(kept)
    assert 0.02 < tail.mean() < 0.9
    assert (np.isinf(log_scale) & ~tail & (lens > 0)).any()
    assert (log_scale[kept == 0] == 0).any()


@pytest.mark.parametrize("width", [1, 3, 5, 12])
@pytest.mark.parametrize("log_floor", [-math.inf, math.log(0.5)])
def test_block_in_parts_is_block_at_once(width, log_floor):
    uniforms, arguments = random_laws(1000, 15, seed=1)
    lens = np.random.default_rng(6).integers(0, 16, 1000).astype(np.int32)
    expected = judge_block(uniforms, arguments, lens, log_floor)
    state, ended = None, []
    for start in range(0, 15, width):
        part = slice(start, start + width)
        state = block(uniforms[:, part], *(x[:, part] for x in arguments), lens, state,
                      np.float32(log_floor))  # fmt: skip
        ended.append(np.asarray(state.ended))
    assert ended[-1].all()
    assert ended[0].any()
    for got, whole in zip((state.kept, state.tail, state.log_scale), expected, strict=True):
        np.testing.assert_allclose(np.asarray(got), whole, atol=1e-6)


def test_nothing_is_kept_behind_an_impossible_token():
    """P stays 0, whatever the laws behind it are."""
    uniforms, arguments = random_laws(200, 8, k=5)
    arguments[0][:, 4] = -np.inf
    lens = np.full(200, 8, np.int32)
    tiny = np.full_like(uniforms, 1e-20)
    kept, tail, log_scale = judge_block(tiny, arguments, lens)
    assert kept.max() == 4
    assert np.isfinite(log_scale).all()
    assert not tail.any()
    arguments[1][:, 4] = -np.inf  # 0 / 0: impossible for both
    assert judge_block(tiny, arguments, lens)[0].max() == 4
    accept, tail = (np.asarray(x) for x in ratio_residual(tiny, *arguments))
    assert not (accept | tail)[:, 4].any()
    assert (accept | tail)[:, :4].all()


@pytest.mark.parametrize("uniform", [1.0, 0.5, 1e-9])
def test_equal_laws_keep_everything(uniform):
    """h = 0 / 0 at every position: the whole draft is kept, up to its tail token."""
    _, (_, old, _, old_top, listed) = random_laws(300, 40, vocab=6, k=5)
    lens = np.random.default_rng(7).integers(0, 41, 300).astype(np.int32)
    uniforms = np.full(old.shape, uniform, np.float32)
    arguments = (old, old, old_top, old_top, listed)
    expected = np.asarray(leading(listed, lens))
    for judge in (judge_block, judge_ratio_residual):
        kept, tail, _ = judge(uniforms, arguments, lens)
        np.testing.assert_array_equal(kept, expected)
        np.testing.assert_array_equal(tail, expected < lens)
    assert np.isposinf(judge_block(uniforms, arguments, lens)[2]).all()
    assert {0, 40} <= set(expected)


def test_laws_equal_up_to_rounding_keep_nearly_everything():
    uniforms, (_, old, _, old_top, listed) = random_laws(100, 2048, vocab=4, k=4)
    rng = np.random.default_rng(8)
    noisy = lambda x: x + rng.normal(0, 1e-6, x.shape).astype(np.float32)  # noqa: E731
    lens = np.full(100, 2048, np.int32)
    kept, _, _ = judge_block(uniforms, (noisy(old), old, noisy(old_top), old_top, listed), lens)
    assert (kept == 2048).mean() >= 0.99


@pytest.mark.parametrize("drift", [-0.01, 0.0, 0.01])
def test_the_joint_ratio_of_thousands_of_tokens(drift):
    """log P against a loop in float64: each step rounds at 2^-24, as often up as down."""
    rng = np.random.default_rng(9)
    steps = (rng.normal(drift, 0.2, (8, 8192))).astype(np.float32)
    steps[0, 5000] = -np.inf
    got = np.asarray(jax.jit(acceptance._joint_ratio)(np.zeros(8, np.float32), steps))
    expected, p = np.zeros(steps.shape), np.zeros(8)
    for i in range(8192):
        p = np.minimum(0.0, p + steps[:, i].astype(np.float64))
        expected[:, i] = p
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    walk = 8192**0.5 * 2.0**-24 * np.abs(expected[finite]).max()
    assert walk < 1e-3
    np.testing.assert_allclose(got[finite], expected[finite], atol=walk)
    assert np.isneginf(got[0, 5000:]).all()


def toy(distance: float, width: int, rows: int, seed: int = 0):
    """Drafts of `width` tokens with TV(π, π_old) = distance at every position: tokens kept.

    Four tokens; π moves half of them up and the other half down, at random in each position.
    Returns the mean kept by `ratio_residual` and by `block`.
    """
    rng = np.random.default_rng(seed)
    signs = rng.permuted(np.broadcast_to([1, 1, -1, -1], (rows, width, 4)), axis=-1)
    new = 0.25 * (1 + 2 * distance * signs)
    tokens = rng.integers(0, 4, (rows, width, 1))
    logprobs = log(np.take_along_axis(new, tokens, axis=-1)[..., 0])
    old = np.full((rows, width), log(0.25))
    arguments = (logprobs, old, log(new), np.full(new.shape, log(0.25)), old < 0)
    uniforms = (1 - rng.random((rows, width))).astype(np.float32)
    lens = np.full(rows, width, np.int32)
    return tuple(judge(uniforms, arguments, lens)[0].mean()
                 for judge in (judge_ratio_residual, judge_block))  # fmt: skip


def test_block_keeps_much_more_of_long_drafts():
    single, whole = toy(0.015, 512, 2000)
    stay = 1 - 0.015
    assert single == pytest.approx(stay * (1 - stay**512) / 0.015, rel=0.06)
    assert whole > 5 * single
