"""What whole rollouts emit: counted through the real programs, against exact enumeration.

The rules themselves, one position at a time, are in test_acceptance_rules.py.
"""

import collections
import math

import numpy as np
import pytest
import rollout_reference as ref
from acceptance_reference import softmax
from rollout_reference import as_drafts, emitted, make_prompts, make_spec, total_variation

from specrl_jax.rollout.sampling import SamplingConfig

# SPEC-RL's rule, on three tokens of which the last ends the response

OLD_TABLE = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [1 / 3, 1 / 3, 1 / 3]])
NEW_TABLE = np.array([[0.25, 0.35, 0.4], [0.55, 0.3, 0.15], [1 / 3, 1 / 3, 1 / 3]])
SLOTS = 3


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
        drafts = as_drafts(ref.run(spec, old, prompts, 2 * step)[0])
        rollout, _ = ref.run(
            spec, new, prompts, 2 * step + 1, drafts=drafts, log_lenience=log_lenience
        )
        firsts = np.repeat([0, 1, 0, 1] * 8, 512).tolist()
        lens = np.asarray(rollout.lens).tolist()
        tokens = np.asarray(rollout.tokens.ids).tolist()
        counts.update((first, *row[:n]) for first, n, row in zip(firsts, lens, tokens, strict=True))
    return counts, rollout


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


@pytest.mark.parametrize("lenience", [0.5, math.exp(0.5)], ids=["half", "exp-half"])
def test_what_the_rollout_emits_is_b_not_the_policy(mesh, lenience):
    expected = exact(SamplingConfig(), lenience)
    counts, _ = monte_carlo(SamplingConfig(), math.log(lenience))
    by_chance = expected_distance(expected, sum(counts.values()))
    assert distance(counts, expected) < 1.5 * by_chance < 0.009
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
    tokens, lens = np.asarray(rollout.tokens.ids), np.asarray(rollout.lens)
    before = np.column_stack([np.repeat([0, 1, 0, 1] * 8, 512), tokens[:, :-1]])
    inside = np.arange(SLOTS)[None, :] < lens[:, None]
    for mine, table in (
        (rollout.tokens.policy_logprobs, policy),
        (rollout.tokens.sampling_logprobs, sampled),
    ):
        expected = table[before, tokens][inside]
        np.testing.assert_allclose(np.asarray(mine)[inside], expected, atol=1e-5)
    assert (
        np.asarray(rollout.tokens.policy_logprobs) < np.asarray(rollout.tokens.sampling_logprobs)
    ).any()
