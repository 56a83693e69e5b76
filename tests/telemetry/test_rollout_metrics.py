"""Measures of a rollout and its rewards, against hand-computed rows and plain counting."""

import math

import numpy as np
import pytest

from specrl_jax.telemetry.rollout_metrics import (
    noise_metrics,
    reward_metrics,
    rollout_metrics,
    turn_metrics,
)

# Four rows of at most five tokens: a draft kept whole, one kept in part and cut off at the end of
# its slots, one refused at once, and no draft. 15 tokens, 5 of them kept.
TOKENS = [[5, 6, 1, 0, 0], [5, 5, 7, 9, 8], [3, 3, 4, 2, 0], [4, 4, 4, 0, 0]]
LENS = [3, 5, 4, 3]
PREFIX_LENS = [3, 2, 0, 0]
DRAFT_LENS = [3, 4, 3, 0]


def measure(
    tokens=TOKENS,
    lens=LENS,
    prefix_lens=PREFIX_LENS,
    *,
    draft_lens=(0, 0, 0, 0),
    previous=([[0] * 5] * 4, [0] * 4),
    environment=(0, 0, 0, 0),
    copied=(0, 0, 0, 0),
):
    tokens, lens, prefix_lens = map(np.array, (tokens, lens, prefix_lens))
    last = tokens[np.arange(len(lens)), lens - 1]
    return rollout_metrics(
        tokens,
        lens,
        prefix_lens,
        (last == 1) | (last == 2),
        draft_lens=np.array(draft_lens),
        previous=tuple(map(np.array, previous)),
        environment=np.array(environment),
        copied=np.array(copied),
        group_size=2,
    )


# A rollout's metrics ------------------------------------------------------------------------


def test_rollout_by_hand():
    # Shared with [5 6 1]: 3 of 3 + 3. [5 5 7 9 8] and [5 9 9]: one 5, one 9: 2 · 2 / 8. [3 3 4 2]
    # and [3 3 4 4]: 3 tokens: 2 · 3 / 8. The last row has no earlier response.
    previous = [[5, 6, 1, 9, 0], [5, 9, 9, 0, 0], [3, 3, 4, 4, 0], [4] * 5], [3, 3, 4, 0]
    assert measure(draft_lens=DRAFT_LENS, previous=previous) == pytest.approx(
        {
            "rollout/tokens_generated": 10,
            "rollout/tokens_reused": 5,
            "rollout/reuse_fraction": 5 / 15,
            "rollout/draft_accept_rate": 5 / 10,
            "rollout/prefix_len_mean": 5 / 4,
            "rollout/full_reuse_ratio": 1 / 4,
            "rollout/response_len_mean": 15 / 4,
            "rollout/response_len_min": 3,
            "rollout/response_len_max": 5,
            "rollout/truncated_fraction": 2 / 4,  # rows 2 and 4 end in 8 and 4
            "rollout/overlap_rouge1": (1 + 0.5 + 0.75) / 3,
            "rollout/unchanged": 1 / 3,  # the first; what comes after its end is no token
            "rollout/distinct": 2,
        }
    )


def test_equal_responses_of_a_group_count_once():
    """Rows of two groups; what follows a response's end is not part of it."""
    tokens = [[5, 1, 0], [5, 1, 7], [5, 5, 1], [5, 5, 1]]
    assert measure(tokens, [2, 2, 3, 2], [0] * 4)["rollout/distinct"] == (1 + 2) / 2


def test_noise_metrics_by_hand():
    kept = np.array([True, False, True, False])
    values = noise_metrics(kept, np.array([1, 0.5, 1, 0], np.float32))
    assert values == {"rollout/reused_noise": 0.5, "reward/fresh_noise": 0.25}
    assert noise_metrics(np.ones(2, bool), np.ones(2)) == {"rollout/reused_noise": 1.0}


def test_what_a_first_pass_lacks_is_absent():
    values = measure(prefix_lens=[0] * 4)
    assert not values.keys() & {"rollout/draft_accept_rate", "rollout/overlap_rouge1"}
    assert values["rollout/reuse_fraction"] == values["rollout/full_reuse_ratio"] == 0
    assert values["rollout/tokens_generated"] == 15


def test_forced_tokens_are_nobodys():
    """15 tokens, 3 of them an environment's; what was kept is kept."""
    values, plain = measure(environment=[2, 0, 1, 0]), measure()
    assert values["rollout/tokens_environment"] == 3
    assert values["rollout/tokens_generated"] == plain["rollout/tokens_generated"] - 3
    assert values["rollout/tokens_reused"] == plain["rollout/tokens_reused"]
    assert values["rollout/reuse_fraction"] == plain["rollout/tokens_reused"] / 12
    # An episode whose own tokens were all kept is reused whole.
    values = measure([[5, 6, 9, 9, 1]] * 4, [5] * 4, [3, 2, 1, 0], environment=[2] * 4)
    assert values["rollout/full_reuse_ratio"] == 1 / 4


def test_copied_tokens_were_another_rows():
    """15 tokens, of which the last row copied 2 and the first, whose own token was kept, 2."""
    values = measure(prefix_lens=[1, 0, 0, 0], copied=[2, 0, 0, 2])
    assert values["rollout/tokens_copied"] == 4
    assert values["rollout/tokens_generated"] == 15 - 4 - 1
    assert values["rollout/response_len_mean"] == 15 / 4
    assert values["rollout/full_reuse_ratio"] == 1 / 4


def test_turns_by_hand():
    """A tool replies to two turns of the first episode; nothing to those of the last one."""
    roles = np.array([["tool", "user", "tool", ""], ["user", "", "", ""], ["", "", "", ""]])
    values = turn_metrics(np.array([4, 2, 1]), roles)
    assert values == pytest.approx({"rollout/turns_mean": 7 / 3, "rollout/tool_calls_mean": 2 / 3})


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
    as_one_group = reward_metrics(rewards, failed, 8)
    assert (as_one_group["reward/solved_all"], as_one_group["reward/solved_none"]) == (0, 0)
