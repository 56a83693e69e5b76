"""Measures of a rollout and its rewards, against hand-computed rows and plain counting."""

import math
from collections import Counter

import numpy as np
import pytest

from specrl_jax.telemetry.metrics import METRICS
from specrl_jax.telemetry.rollout_metrics import overlap_rouge1, reward_metrics, rollout_metrics

EOS = (1, 2)

# Four rows of at most five tokens: a draft kept whole, one kept in part and cut off at the end of
# its slots, one refused at once, and no draft. 15 tokens, 5 of them kept.
TOKENS = [[5, 6, 1, 0, 0], [5, 5, 7, 9, 8], [3, 3, 4, 2, 0], [4, 4, 4, 0, 0]]
LENS = [3, 5, 4, 3]
PREFIX_LENS = [3, 2, 0, 0]


def make_rollout(tokens=TOKENS, lens=LENS, prefix_lens=PREFIX_LENS):
    return tuple(np.array(x, np.int32) for x in (tokens, lens, prefix_lens))


def make_drafts(tokens, lens):
    return np.array(tokens, np.int32), np.array(lens, np.int32)


# Drafts of 3 + 4 + 3 + 0 tokens.
DRAFTS = make_drafts([[5, 6, 1, 0, 0], [5, 5, 3, 1, 0], [9, 9, 1, 0, 0], [0] * 5], [3, 4, 3, 0])


# A rollout's metrics ------------------------------------------------------------------------


def test_rollout_by_hand():
    # Shared with [5 6 1]: 3 of 3 + 3. [5 5 7 9 8] and [5 9 9]: one 5, one 9: 2 · 2 / 8. [3 3 4 2]
    # and [3 3 4 4]: 3 tokens: 2 · 3 / 8. The last row has no earlier response.
    tokens = [[5, 6, 1, 0, 0], [5, 9, 9, 0, 0], [3, 3, 4, 4, 0], [4] * 5]
    previous = make_drafts(tokens, [3, 3, 4, 0])
    assert rollout_metrics(
        *make_rollout(), EOS, draft_lens=DRAFTS[1], previous=previous
    ) == pytest.approx(
        {
            "rollout/tokens_generated": 10,
            "rollout/tokens_reused": 5,
            "rollout/reuse_fraction": 5 / 15,
            "rollout/draft_accept_rate": 5 / 10,
            "rollout/prefix_len_mean": 5 / 4,
            "rollout/full_reuse_ratio": 1 / 4,
            "rollout/response_len_mean": 15 / 4,
            "rollout/truncated_fraction": 2 / 4,  # rows 2 and 4 end in 8 and 4
            "rollout/overlap_rouge1": (1 + 0.5 + 0.75) / 3,
        }
    )


def test_every_rollout_metric_has_a_value():
    options = {"draft_lens": DRAFTS[1], "previous": DRAFTS, "forced": np.array([2, 0, 0, 0])}
    names = set(rollout_metrics(*make_rollout(), EOS, **options))
    # Costs, and rows and groups that cross steps: `RolloutResult` and `GroupBuffer` give these.
    others = """
        decode_steps row_steps tokens_drafted width_mean width_max wide_fraction verify_work
        tokens_verified preempted cache_gib draft_store_gib draft_store_host_gib programs
        tokens_run_ahead run_ahead_accepted tokens_resumed stale_fraction
        gen_batches groups_waiting groups_filled turns_mean
    """
    costs = {f"rollout/{name}" for name in others.split()}
    assert names | costs == {name for name in METRICS if name.startswith("rollout/")}
    assert not names & costs


@pytest.mark.parametrize("nothing", [None, make_drafts(np.ones((4, 5)), [0, 0, 0, 0])])
def test_what_a_first_pass_lacks_is_absent(nothing):
    rollout = make_rollout(prefix_lens=[0] * 4)
    draft_lens = None if nothing is None else nothing[1]
    values = rollout_metrics(*rollout, EOS, draft_lens=draft_lens, previous=nothing)
    assert not values.keys() & {"rollout/draft_accept_rate", "rollout/overlap_rouge1"}
    assert values["rollout/reuse_fraction"] == values["rollout/full_reuse_ratio"] == 0
    assert values["rollout/tokens_generated"] == 15


def test_earlier_responses_are_compared_with_also_without_drafts():
    values = rollout_metrics(*make_rollout(prefix_lens=[0] * 4), EOS, previous=DRAFTS)
    assert "rollout/draft_accept_rate" not in values
    # 3 + 3 shared; [5 5 7 9 8] and [5 5 3 1]: 2 of 9; [3 3 4 2] and [9 9 1]: none.
    assert values["rollout/overlap_rouge1"] == pytest.approx((1 + 4 / 9 + 0) / 3)


def test_forced_tokens_are_nobodys():
    """15 tokens, 3 of them an environment's; what was kept is kept."""
    forced = np.array([2, 0, 1, 0])
    values = rollout_metrics(*make_rollout(), EOS, forced=forced)
    plain = rollout_metrics(*make_rollout(), EOS)
    assert values["rollout/tokens_forced"] == 3
    assert values["rollout/tokens_generated"] == plain["rollout/tokens_generated"] - 3
    assert values["rollout/tokens_reused"] == plain["rollout/tokens_reused"]
    share = plain["rollout/tokens_reused"] / 12
    assert values["rollout/reuse_fraction"] == pytest.approx(share)


def test_an_episode_whose_own_tokens_were_all_kept_is_reused_whole():
    rollout = make_rollout([[5, 6, 9, 9, 1], [5, 6, 9, 9, 1]], [5, 5], [3, 2])
    values = rollout_metrics(*rollout, EOS, forced=np.array([2, 2]))
    assert values["rollout/full_reuse_ratio"] == 1 / 2


def test_only_the_last_token_ends_a_response():
    # Inside the response, in the padding, and where there is no response at all.
    rollout = make_rollout([[1, 5, 5], [5, 5, 1], [5, 5, 1], [1, 1, 1]], [3, 3, 2, 0], [0] * 4)
    assert rollout_metrics(*rollout, (1,))["rollout/truncated_fraction"] == 3 / 4


# Rewards ------------------------------------------------------------------------------------


def test_rewards_by_hand():
    # Groups of two: all right, one right, none right (0.9 is not), all right.
    rewards = np.array([1, 1, 1, 0, 0.9, 0, 1, 1.5], np.float32)
    failed = np.array([False] * 3 + [True] + [False] * 4)
    values = reward_metrics(rewards, failed, 2)
    # The squares: 1 + 1 + 1 + 0.81 + 1 + 2.25 = 7.06.
    mean = 6.4 / 8
    assert values == pytest.approx(
        {
            "reward/mean": mean,
            "reward/std": math.sqrt(7.06 / 8 - mean**2),
            "reward/failed": 1,
            "reward/solved_all": 2 / 4,
            "reward/solved_none": 1 / 4,
            "reward/no_signal": 1 / 4,  # the first
        }
    )
    assert values.keys() | {"reward/eval", "reward/overlong"} == {
        n for n in METRICS if n.startswith("reward/")
    }
    as_one_group = reward_metrics(rewards, failed, 8)
    assert (as_one_group["reward/solved_all"], as_one_group["reward/solved_none"]) == (0, 0)


# Overlap ------------------------------------------------------------------------------------


def rouge1_by_counting(a, b):
    if not b:
        return math.nan
    return 2 * sum((Counter(a) & Counter(b)).values()) / (len(a) + len(b))


def test_overlap_by_hand():
    got = overlap_rouge1(
        np.array([[5, 5, 7, 99], [1, 2, 3, 4], [1, 2, 3, 4], [8, 8, 8, 8], [1, 1, 1, 1]]),
        np.array([3, 4, 4, 0, 4]),
        np.array([[5, 7, 7, 9], [4, 3, 2, 1], [1, 2, 3, 4], [8, 8, 8, 8], [2, 2, 2, 2]]),
        np.array([4, 4, 0, 2, 4]),
    )
    np.testing.assert_allclose(got, [4 / 7, 1.0, np.nan, 0.0, 0.0])


@pytest.mark.parametrize("vocab", [3, 40, 150_000])
def test_overlap_against_counting(vocab):
    generator = np.random.default_rng(vocab)
    tokens_a = generator.integers(0, vocab, (50, 60), dtype=np.int32)
    tokens_b = generator.integers(0, vocab, (50, 45), dtype=np.int32)
    lens_a, lens_b = generator.integers(0, 61, 50), generator.integers(0, 46, 50)
    expected = [
        rouge1_by_counting(a[:m].tolist(), b[:n].tolist())
        for a, m, b, n in zip(tokens_a, lens_a, tokens_b, lens_b, strict=True)
    ]
    got = overlap_rouge1(tokens_a, lens_a, tokens_b, lens_b)
    np.testing.assert_allclose(got, expected)


def test_overlap_of_nothing_is_nan():
    empty = np.zeros((2, 4), np.int32)
    assert np.isnan(overlap_rouge1(empty, np.zeros(2, int), empty, np.zeros(2, int))).all()
