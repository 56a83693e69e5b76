"""Tokens that block verification emits, by exact enumeration of whole responses.

Every draft of a small vocabulary is given to the package's jitted functions with every pattern of
accepting and rejecting uniforms, each weighted with its exact probability. Nothing is random, so a
distribution that is emitted exactly differs from π by float32 rounding alone, some 1e-7 a position.
"""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest
from acceptance_reference import (
    accept_block,
    likeliest_tokens,
    log,
    logprobs_at,
    put_scores,
    residual_scores,
    softmax,
)
from rollout_reference import put_rows, responses, total_variation


@dataclasses.dataclass(frozen=True)
class World:
    """Policies on V tokens whose distribution depends on the whole prefix; responses have T slots.

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

    def distributions(self, policy: int) -> dict[tuple[int, ...], np.ndarray]:
        """{prefix: probabilities of the next token}."""
        rng = np.random.default_rng([self.seed, policy])
        probs_by_response = {}
        for length in range(self.slots):
            for prefix in itertools.product(range(self.vocab), repeat=length):
                probs = rng.dirichlet(np.full(self.vocab, self.sharpness))
                lost = rng.random(self.vocab) < self.drop
                lost[np.argmax(probs)] = False
                probs_by_response[prefix] = np.where(lost, 0.0, probs) / probs[~lost].sum()
        return probs_by_response

    def responses(self, distributions, prefix=()) -> dict[tuple[int, ...], float]:
        """Every response that starts with `prefix`, and its probability given that."""
        return responses(distributions.__getitem__, self.slots, (self.eos,), prefix)

    def ended(self, prefix) -> bool:
        return len(prefix) == self.slots or (len(prefix) > 0 and prefix[-1] == self.eos)


WORLDS = {
    "all-stored": World(3, 3, k=3),
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
    new, old = world.distributions(0), world.distributions(1)
    emission = collections.defaultdict(float)
    for response, p in world.responses(old).items():
        emission[response[: world.draft_slots]] += p
    drafts = [*emission, *[()] * (96 - len(emission))]
    shape = (len(drafts), world.slots)
    tokens = np.zeros(shape, np.int32)
    scores, old_scores = np.zeros((*shape, world.vocab)), np.zeros((*shape, world.vocab))
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = draft
        for i in range(min(len(draft) + 1, world.slots)):
            scores[row, i], old_scores[row, i] = log(new[draft[:i]]), log(old[draft[:i]])
    scores, old_scores = scores.astype(np.float32), old_scores.astype(np.float32)
    ids, logprobs = likeliest_tokens(put_scores(old_scores), world.k)
    at = lambda x: np.asarray(logprobs_at(put_scores(x), put_rows(tokens[..., None])))[..., 0]  # noqa: E731
    now_top = np.asarray(logprobs_at(put_scores(scores), ids))
    return Scored(
        drafts,
        np.array([emission.get(d, 0.0) for d in drafts]),
        np.array([len(d) for d in drafts], np.int32),
        scores,
        (np.asarray(ids), np.asarray(logprobs)),
        (
            at(scores),
            at(old_scores),
            now_top,
            np.asarray(logprobs),
            (tokens[..., None] == np.asarray(ids)).any(axis=-1),
        ),
    )


def thresholds(scored: Scored) -> np.ndarray:
    """[D, T]: the uniform of each position up to which it accepts, by bisection of the rule.

    A prefix that ends with position i is asked about alone: uniforms before it accept, if they
    matter at all, and those after it reject.
    """
    shape = scored.arguments[0].shape
    probs_by_response = np.zeros(shape)
    for i in range(shape[1]):
        low, high = np.zeros(shape[0]), np.ones(shape[0])
        for _ in range(30):
            middle = (low + high) / 2
            uniforms = np.full(shape, 1e-30, np.float32)
            uniforms[:, i], uniforms[:, i + 1 :] = middle, np.float32(np.finfo(np.float32).max)
            accepted, tail, _ = accept_block(uniforms, scored.arguments, scored.lens)
            yes = accepted + tail >= i + 1
            low, high = np.where(yes, middle, low), np.where(yes, high, middle)
        probs_by_response[:, i] = low
    return probs_by_response


@functools.cache
def verdicts(world: World):
    """Every decision: [(draft row, kept, tail, log_scale, probability)].

    One row for each draft and each pattern of uniforms below and above the thresholds.
    """
    scored = score(world)
    bounds = thresholds(scored)
    probs_by_response = []
    for pattern in itertools.product([True, False], repeat=world.slots):
        below = np.array(pattern)
        uniforms = np.where(below, bounds / 2, (1 + bounds) / 2).astype(np.float32)
        probs = scored.probs * np.where(below, bounds, 1 - bounds).prod(axis=1)
        verdict = accept_block(uniforms, scored.arguments, scored.lens)
        probs_by_response += zip(itertools.count(), *verdict, probs)
    return probs_by_response


def emitted(world: World) -> dict[tuple[int, ...], float]:
    """Probabilities of whole responses: verified prefix, token after it, the rest from π."""
    scored, new = score(world), world.distributions(0)
    rows, accepted, tail, log_scale, probs = map(np.array, zip(*verdicts(world), strict=True))
    at = np.minimum(accepted, world.slots - 1)
    ids, logprobs = (x[rows, at] for x in scored.top)
    scores = put_scores(scored.scores[rows, at])
    nexts = softmax(residual_scores(scores, *put_rows((ids, logprobs, tail, log_scale))))
    rest = {prefix: world.responses(new, prefix) for prefix in reachable(world)}
    emission = collections.defaultdict(float)
    for row, n, p, following in zip(rows, accepted, probs, nexts, strict=True):
        prefix = scored.drafts[row][:n]
        if p == 0:
            continue
        if world.ended(prefix):
            emission[prefix] += p
            continue
        for token in np.flatnonzero(following):
            for response, q in rest[(*prefix, int(token))].items():
                emission[response] += p * following[token] * q
    return dict(emission)


def reachable(world: World):
    """All prefixes that may be followed by something, and all responses."""
    for length in range(1, world.slots + 1):
        for prefix in itertools.product(range(world.vocab), repeat=length):
            if world.eos not in prefix[:-1]:
                yield prefix


# Float32 rounds probabilities, thresholds and 1 - Σ of the stored probabilities at 6e-8 each.
EXACT = 1e-6


@pytest.mark.parametrize("name", WORLDS)
def test_what_is_emitted_is_the_policy(mesh, name):
    world = WORLDS[name]
    emission = emitted(world)
    assert sum(emission.values()) == pytest.approx(1, abs=1e-6)
    assert total_variation(emission, world.responses(world.distributions(0))) < EXACT
