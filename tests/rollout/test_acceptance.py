"""What whole rollouts emit: counted through the real programs, against exact enumeration.

The rules themselves, one position at a time, are in test_acceptance_rules.py.
"""

import collections
import math

import numpy as np
import pytest
import rollout_reference as ref
from acceptance_reference import softmax
from rollout_reference import (
    as_drafts,
    emitted,
    make_prompts,
    make_spec,
    total_variation,
)

from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.types import Source

# SPEC-RL's rule, on three tokens of which the last ends the response

OLD_TABLE = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [1 / 3, 1 / 3, 1 / 3]])
NEW_TABLE = np.array([[0.25, 0.35, 0.4], [0.55, 0.3, 0.15], [1 / 3, 1 / 3, 1 / 3]])
SLOTS = 3


def run(spec, weights, prompts, step, **kwargs):
    return ref.run(spec, weights, prompts, step, **kwargs)[0]


def cut_table(table, sampling):
    """The distribution that is sampled from."""
    return softmax(ref.truncate(np.log(table) / sampling.temperature, sampling))


def monte_carlo(sampling, log_lenience, steps=8):
    """Rollouts over drafts of the old policy: {first token + response: count}, and the last."""
    model, _, old = ref.table_policy(OLD_TABLE)
    _, _, new = ref.table_policy(NEW_TABLE)
    spec = make_spec(model, sampling=sampling, slots=SLOTS, prompt_slots=2, group=512, eos=(2,),
                     row_buckets=1)  # fmt: skip
    prompts = make_prompts([[0], [1], [2, 0], [0, 1]] * 8, 2)
    counts = collections.Counter()
    for step in range(steps):
        drafts = as_drafts(run(spec, old, prompts, 2 * step))
        rollout = run(spec, new, prompts, 2 * step + 1, drafts=drafts,
                         log_lenience=log_lenience)  # fmt: skip
        count(counts, np.repeat([0, 1, 0, 1] * 8, 512), rollout)
    return counts, rollout


def count(counts, firsts, rollout):
    """Add a rollout's responses, after the prompts' last tokens."""
    lens, tokens = np.asarray(rollout.lens).tolist(), np.asarray(rollout.tokens).tolist()
    counts.update(
        (first, *row[:n]) for first, n, row in zip(firsts.tolist(), lens, tokens, strict=True)
    )


def exact(sampling, lenience):
    """Probability of each {first token + response} under SPEC-RL's rule."""
    new, old = cut_table(NEW_TABLE, sampling), cut_table(OLD_TABLE, sampling)
    parts = [emitted(new, old, lenience, last, SLOTS, (2,)) for last in (0, 1)]
    return {(x, *k): p / 2 for x in (0, 1) for k, p in parts[x].items() if p > 0}


def p_value(counts, distribution):
    """Of the counts by outcome."""
    assert counts.keys() <= distribution.keys()  # nothing that cannot happen
    observed = np.array([counts.get(outcome, 0) for outcome in distribution])
    return ref.p_value(observed, np.array(list(distribution.values())))


def distance(counts, distribution):
    total = sum(counts.values())
    return total_variation({k: n / total for k, n in counts.items()}, distribution)


def expected_distance(distribution, count):
    """Mean total variation of `count` draws from their own distribution."""
    return sum((p * (1 - p) / (2 * math.pi * count)) ** 0.5 for p in distribution.values())


@pytest.mark.parametrize("lenience", [0.5, 1.0, math.exp(0.5)], ids=["half", "one", "exp-half"])
def test_what_the_rollout_emits_is_b_not_the_policy(mesh, lenience):
    expected = exact(SamplingConfig(), lenience)
    counts, _ = monte_carlo(SamplingConfig(), math.log(lenience))
    assert (
        distance(counts, expected) < 1.5 * expected_distance(expected, sum(counts.values())) < 0.009
    )
    assert p_value(counts, expected) > 1e-3
    plain = exact(SamplingConfig(), 0.0)
    assert distance(counts, plain) > 0.04  # it is not π
    assert p_value(counts, plain) < 1e-9


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(0.7, top_k=2), SamplingConfig(0.7, top_p=0.85)],
    ids=["top-k", "top-p"],
)
def test_drafts_are_accepted_by_the_distribution_that_is_sampled_from(mesh, sampling):
    expected = exact(sampling, 1.0)
    counts, rollout = monte_carlo(sampling, 0.0)
    assert p_value(counts, expected) > 1e-3
    untruncated = exact(SamplingConfig(0.7), 1.0)
    assert total_variation(expected, untruncated) > 0.1
    # The update's log-probs keep the temperature and leave the truncation out.
    policy = ref.log_softmax(np.log(NEW_TABLE) / 0.7)
    with np.errstate(divide="ignore"):
        sampled = np.log(cut_table(NEW_TABLE, sampling))
    tokens, lens = np.asarray(rollout.tokens), np.asarray(rollout.lens)
    before = np.column_stack([np.repeat([0, 1, 0, 1] * 8, 512), tokens[:, :-1]])
    inside = np.arange(SLOTS)[None, :] < lens[:, None]
    for mine, table in ((rollout.policy_logprobs, policy), (rollout.sampling_logprobs, sampled)):
        np.testing.assert_allclose(
            np.asarray(mine)[inside], table[before, tokens][inside], atol=1e-5
        )
    assert (np.asarray(rollout.policy_logprobs) < np.asarray(rollout.sampling_logprobs)).any()


# Block verification, on five tokens of which two are stored one by one and the rest as their tail

EOS = 4
_FIRST, _OTHER = np.random.default_rng(21).dirichlet(np.full(5, 1.2), (2, 5)) * 0.8 + 0.04
TABLES = [_FIRST, 0.4 * _FIRST + 0.6 * _OTHER]
TRUNCATED = SamplingConfig(0.8, top_k=4, top_p=0.95)
FIRSTS = [0, 1]


def five_spec(model, sampling=SamplingConfig(), **kwargs):  # noqa: B008
    return make_spec(model, sampling=sampling, slots=SLOTS, prompt_slots=1, group=8, eos=(EOS,),
                     stored_logprobs=2, accept="block", row_buckets=1,
                     **kwargs)  # fmt: skip


def five_prompts(count=2048):
    return make_prompts([[first] for first in FIRSTS] * (count // 2), 1)


def policy_distribution(table, sampling=SamplingConfig()):  # noqa: B008
    cut = cut_table(table, sampling)
    parts = [ref.responses(ref.by_last(cut, first), SLOTS, (EOS,)) for first in FIRSTS]
    return {(x, *k): p / 2 for x in FIRSTS for k, p in parts[x].items()}


def generations(sampling=SamplingConfig(), steps=4):  # noqa: B008
    """Counts of three generations, each over the last one's responses: of tables 0, 1, 0."""
    (model, _, first), (_, _, other) = (ref.table_policy(table) for table in TABLES)
    spec, prompts = five_spec(model, sampling), five_prompts()
    counts, last = [collections.Counter() for _ in range(3)], []
    for step in range(steps):
        drafts = None
        for age, weights in enumerate((first, other, first)):
            rollout = run(spec, weights, prompts, 3 * step + age, drafts=drafts)
            count(counts[age], np.repeat(FIRSTS * 1024, 8), rollout)
            drafts = as_drafts(rollout)
        last.append(ref.host(rollout))
    return counts, last


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(TRUNCATED, id="truncated"),
        pytest.param(SamplingConfig(), marks=pytest.mark.slow, id="plain"),
    ],
)
def test_block_verification_emits_the_policy(mesh, sampling):
    """Whatever policy the drafts are from, and the drafts' own drafts."""
    counts, rollouts = generations(sampling)
    for age, counted in enumerate(counts):
        expected = policy_distribution(TABLES[age % 2], sampling)
        total = sum(counted.values())
        assert p_value(counted, expected) > 1e-3, age
        assert distance(counted, expected) < 1.25 * expected_distance(expected, total)
        assert distance(counted, policy_distribution(TABLES[1 - age % 2], sampling)) > 0.2
    for rollout in rollouts:  # much is kept, much is not, and tails are met
        prefix = rollout.prefix_lens
        assert 0.2 < np.mean(prefix) / np.mean(rollout.lens) < 0.8
        in_top = (rollout.tokens[:, :, None] == rollout.top_ids).any(axis=2)
        inside = np.arange(SLOTS)[None, :] < rollout.lens[:, None]
        assert 0.1 < np.mean(~in_top[inside]) < 0.5
        accepted = np.arange(SLOTS)[None, :] < prefix[:, None]
        np.testing.assert_array_equal(rollout.sources == Source.REUSED, accepted)
