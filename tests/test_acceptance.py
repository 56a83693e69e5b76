"""The acceptance rules against plain loops, and what SPEC-RL emits by exact enumeration."""

import functools
import math

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, emitted, make_plan, make_prompts, total_variation
from scipy import stats

from specrl_jax.rollout import acceptance
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.sampling import SamplingLaw

OLD = np.array([0.6, 0.3, 0.1])
NEW = np.array([0.2, 0.3, 0.5])
LENIENCES = [0.0, 0.5, 1.0, math.exp(0.5), math.inf]

RULES = {name: jax.jit(rule) for name, rule in acceptance.RULES.items()}


def log(x: float) -> np.float32:
    with np.errstate(divide="ignore"):
        return np.log(np.float32(x))


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
    expected = []
    for row in range(len(lens)):
        n = 0
        while n < lens[row]:
            ratio = lenience * math.exp(logprobs[row, n]) / math.exp(old[row, n])
            if uniforms[row, n] > min(1.0, ratio):
                break
            n += 1
        expected.append(n)
    got = np.asarray(RULES["ratio"](uniforms, logprobs, old, lens, log(lenience)))
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == np.int32
    assert {0, 7} <= set(expected)  # rejected at once, and accepted to the end of seven
    assert any(0 < n < limit for n, limit in zip(expected, lens, strict=True))


@pytest.mark.parametrize("impossible", [0.0, 0.3])
def test_no_and_full_reuse_ask_nobody(impossible):
    uniforms, logprobs, old, lens = case(1, impossible=impossible)
    uniforms[:5] = 1.0
    none = np.asarray(RULES["ratio"](uniforms, logprobs, old, lens, log(0.0)))
    np.testing.assert_array_equal(none, np.zeros(len(lens)))
    full = np.asarray(RULES["ratio"](uniforms, logprobs, old, lens, log(math.inf)))
    np.testing.assert_array_equal(full, lens)
    assert lens.min() == 0
    assert lens.max() == 7


def test_an_impossible_token_is_rejected():
    _, logprobs, old, _ = case(2, rows=50)
    lens, tiny = np.full(50, 7, np.int32), np.full((50, 7), 1e-9, np.float32)
    logprobs[:, 4] = -np.inf
    got = np.asarray(RULES["ratio"](tiny, logprobs, old, lens, log(math.exp(0.5))))
    np.testing.assert_array_equal(got, np.full(50, 4))
    old[:, 4] = -np.inf  # under full reuse such a token can come to be stored: still rejected
    got = np.asarray(RULES["ratio"](tiny, logprobs, old, lens, log(math.exp(0.5))))
    np.testing.assert_array_equal(got, np.full(50, 4))


def test_an_unchanged_policy_accepts_everything_at_lenience_one():
    uniforms, logprobs, _, lens = case(3)
    uniforms[::2] = 1.0
    got = np.asarray(RULES["ratio"](uniforms, logprobs, logprobs, lens, log(1.0)))
    np.testing.assert_array_equal(got, lens)


def test_only_leading_tokens_count():
    accept = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]], bool)
    got = jax.jit(acceptance.leading)(accept, np.array([4, 4, 4, 3], np.int32))
    np.testing.assert_array_equal(np.asarray(got), [2, 0, 4, 3])


def test_random_cuts_uniformly_and_never_keeps_all():
    rng = np.random.default_rng(4)
    uniforms = (1 - rng.random((60_000, 3))).astype(np.float32)
    lens = np.repeat(np.array([1, 5, 12], np.int32), 20_000)
    unused = np.full_like(uniforms, np.nan)
    cut = np.asarray(RULES["random"](uniforms, unused, unused, lens, log(1.0)))
    np.testing.assert_array_equal(cut[:20_000], np.zeros(20_000))
    for length, part in ((5, cut[20_000:40_000]), (12, cut[40_000:])):
        counts = np.bincount(part)
        assert len(counts) == length
        assert stats.chisquare(counts).pvalue > 1e-3


def test_random_at_the_ends():
    uniforms = np.array([[1.0], [1.0], [1.0], [1e-10]], np.float32)
    lens = np.array([0, 1, 6, 6], np.int32)
    cut = np.asarray(RULES["random"](uniforms, uniforms, uniforms, lens, log(1.0)))
    np.testing.assert_array_equal(cut, [0, 0, 5, 0])


@functools.cache
def accept_probs(lenience: float, count: int = 200_000) -> np.ndarray:
    """Probability that `ratio` accepts each of the three tokens: exact to 1 / count.

    The uniforms are an even grid instead of random numbers.
    """
    grid = ((np.arange(count) + 0.5) / count).astype(np.float32)[:, None]
    ones = np.ones(count, np.int32)

    def accepted(new: float, old: float) -> float:
        new, old = np.full_like(grid, log(new)), np.full_like(grid, log(old))
        return np.asarray(RULES["ratio"](grid, new, old, ones, log(lenience))).mean()

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


@pytest.mark.parametrize("lenience", LENIENCES)
def test_the_enumeration_of_responses_agrees_with_the_closed_form(lenience):
    """`emitted`, the truth of test_generate.py, at one position and at the ends of ℓ."""
    tables = [np.stack([p, p, p]) for p in (NEW, OLD)]
    law = emitted(*tables, lenience, last=0, slots=1, eos=(2,))
    kept = np.minimum(OLD, lenience * NEW)
    closed = kept + (1 - kept.sum()) * NEW
    assert total_variation(law, {(i,): p for i, p in enumerate(closed)}) < 1e-12
    longer = emitted(*tables, lenience, last=0, slots=3, eos=(2,))
    assert sum(longer.values()) == pytest.approx(1.0, abs=1e-12)


# Whole rollouts against exact enumeration, on three tokens of which the last ends the response

OLD_TABLE = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [1 / 3, 1 / 3, 1 / 3]])
NEW_TABLE = np.array([[0.25, 0.35, 0.4], [0.55, 0.3, 0.15], [1 / 3, 1 / 3, 1 / 3]])
SLOTS = 3


def run(plan, weights, prompts, step, **kwargs):
    key = jax.random.key(ref.KEY)
    return generate(plan, weights, prompts, key=key, step=step, **kwargs)[0]


def cut_table(table, law):
    """The law that is sampled from, by sorting."""
    scores = np.log(table) / law.temperature
    out = np.zeros_like(table)
    for row, score in zip(out, scores, strict=True):
        order = np.argsort(-score)[: law.top_k or None]
        probs = np.exp(score[order]) / np.exp(score[order]).sum()
        count = np.sum(np.cumsum(probs) < law.top_p) + 1 if law.top_p < 1 else len(order)
        row[order[:count]] = probs[:count] / probs[:count].sum()
    return out


def monte_carlo(law, log_lenience, steps=1, reuse=True):
    """Rollouts over drafts of the old policy: {first token + response: count}, and the last."""
    model, _, old = ref.table_policy(OLD_TABLE)
    _, _, new = ref.table_policy(NEW_TABLE)
    plan = make_plan(model, law=law, slots=SLOTS, prompt_slots=2, group=512, eos=(2,), row_rungs=1,
                     windows=1)  # fmt: skip
    prompts = make_prompts([[0], [1], [2, 0], [0, 1]] * 8, 2)
    counts = {}
    for step in range(steps):
        drafts = as_drafts(run(plan, old, prompts, 2 * step)) if reuse else None
        rollout = run(plan, new, prompts, 2 * step + 1, drafts=drafts,
                         log_lenience=log_lenience)  # fmt: skip
        lens, tokens = np.asarray(rollout.lens), np.asarray(rollout.tokens)
        firsts = np.repeat([0, 1, 0, 1] * 8, 512)
        for first, n, row in zip(firsts.tolist(), lens.tolist(), tokens.tolist(), strict=True):
            key = (first, *row[:n])
            counts[key] = counts.get(key, 0) + 1
    return counts, rollout, drafts


def exact(law, lenience):
    new, old = cut_table(NEW_TABLE, law), cut_table(OLD_TABLE, law)
    parts = [emitted(new, old, lenience, last, SLOTS, (2,)) for last in (0, 1)]
    return {(x, *k): p / 2 for x in (0, 1) for k, p in parts[x].items() if p > 0}


def p_value(counts, law):
    assert counts.keys() <= law.keys()  # nothing that cannot happen
    total = sum(counts.values())
    observed = [counts.get(k, 0) for k in law]
    return stats.chisquare(observed, [p * total for p in law.values()]).pvalue


def distance(counts, law):
    total = sum(counts.values())
    return total_variation({k: n / total for k, n in counts.items()}, law)


def expected_distance(law, count):
    """Mean total variation of `count` draws from their own law."""
    return sum((p * (1 - p) / (2 * math.pi * count)) ** 0.5 for p in law.values())


@pytest.mark.parametrize("lenience", [0.5, 1.0, math.exp(0.5)], ids=["half", "one", "exp-half"])
def test_what_the_rollout_emits_is_b_not_the_policy(mesh, lenience):
    law = exact(SamplingLaw(), lenience)
    counts, _, _ = monte_carlo(SamplingLaw(), math.log(lenience), steps=8)
    assert distance(counts, law) < 1.5 * expected_distance(law, sum(counts.values())) < 0.009
    assert p_value(counts, law) > 1e-3
    plain = exact(SamplingLaw(), 0.0)
    assert distance(counts, plain) > 0.04  # it is not π
    assert p_value(counts, plain) < 1e-9


def test_lenience_zero_emits_the_policy_and_infinity_the_drafts(mesh):
    counts, rollout, _ = monte_carlo(SamplingLaw(), -math.inf)
    law = exact(SamplingLaw(), 0.0)
    assert p_value(counts, law) > 1e-3
    for last in (0, 1):
        for response, p in ref.responses(NEW_TABLE, last, SLOTS, (2,)).items():
            assert law[(last, *response)] == pytest.approx(p / 2)
    plain, other, _ = monte_carlo(SamplingLaw(), 0.0, reuse=False)
    assert plain == counts
    np.testing.assert_array_equal(np.asarray(rollout.tokens), np.asarray(other.tokens))
    counts, rollout, drafts = monte_carlo(SamplingLaw(), math.inf)
    np.testing.assert_array_equal(np.asarray(rollout.tokens), np.asarray(drafts.tokens))
    old = {(x, *k): p / 2 for x in (0, 1)
           for k, p in ref.responses(OLD_TABLE, x, SLOTS, (2,)).items()}  # fmt: skip
    assert p_value(counts, old) > 1e-3
    assert total_variation(old, exact(SamplingLaw(), math.inf)) < 1e-12


@pytest.mark.parametrize(
    "law", [SamplingLaw(0.7, top_k=2), SamplingLaw(0.7, top_p=0.85)], ids=["top-k", "top-p"]
)
def test_drafts_are_accepted_by_the_law_that_is_sampled_from(mesh, law):
    expected = exact(law, 1.0)
    counts, rollout, _ = monte_carlo(law, 0.0, steps=8)
    assert p_value(counts, expected) > 1e-3
    untruncated = exact(SamplingLaw(0.7), 1.0)
    assert total_variation(expected, untruncated) > 0.1
    # The update's log-probs keep the temperature and leave the truncation out.
    policy = ref.log_softmax(np.log(NEW_TABLE) / 0.7)
    with np.errstate(divide="ignore"):
        sampled = np.log(cut_table(NEW_TABLE, law))
    tokens, lens = np.asarray(rollout.tokens), np.asarray(rollout.lens)
    before = np.column_stack([np.repeat([0, 1, 0, 1] * 8, 512), tokens[:, :-1]])
    inside = np.arange(SLOTS)[None, :] < lens[:, None]
    for mine, table in ((rollout.policy_logprobs, policy), (rollout.sampling_logprobs, sampled)):
        np.testing.assert_allclose(
            np.asarray(mine)[inside], table[before, tokens][inside], atol=1e-5
        )
    assert (np.asarray(rollout.policy_logprobs) < np.asarray(rollout.sampling_logprobs)).any()
