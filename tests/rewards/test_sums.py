"""Sums of weighted rewards, rewards of a whole batch, and the reward `format`."""

import os
import re

import numpy as np
import pytest
import user_scorers
from small_runs import line_of

from specrl_jax.inputs import reward_terms
from specrl_jax.rewards.pool import Rewards
from specrl_jax.rewards.sums import make_pool
from specrl_jax.types import FILLER_TASK

LIMITS = {"timeout": 30.0, "memory_mib": 256, "workers": 1, "extract": "", "threshold": 0.0}


def score(name, responses, answers=None, tasks=None, **options):
    n = len(responses)
    with make_pool(name, **LIMITS | options) as pool:
        pool.warm_up()
        return pool.score(responses, answers or [""] * n, tasks or [""] * n, [{}] * n)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("math", {"math": 1}),
        ("math*0.8+my.rewards:f*-0.2", {"math": 0.8, "my.rewards:f": -0.2}),
        (" math + a:f * 2 ", {"math": 1, "a:f": 2}),
        ("math*.5+a:f*1e-3", {"math": 0.5, "a:f": 0.001}),
        ("", {"": 1}),
    ],
)
def test_terms(name, weights):
    assert reward_terms(name) == weights


NO_TERMS = ["math*", "math*x", "math*nan", "0.8*math", "a:b*0.5*2", "math*1_0", "a:b,c:d*2"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("math+math*2", "math is named twice"),
        *((x, f"a weight follows its function: math*0.8, got {x}") for x in NO_TERMS),
        ("math*1e+3", "a weight follows its function: math*0.8, got math*1e"),
        ("math*1e999", "a weight must be finite"),
        ("math+", "a function has no name"),
    ],
)
def test_a_malformed_sum_is_refused(name, reason):
    line = line_of(reward_terms, name)
    assert line.startswith("reward.name must be FUNCTION, or a sum like math*0.8+format*0.2")
    assert line.endswith(f"got {name!r}: {reason}")


FORMED = "<think>3 + 4</think>\n<answer>7</answer>"
EXTRACT = {"extract": "<answer>(.*?)</answer>"}


def test_a_sum_is_weighted_and_each_function_is_kept_apart():
    """`format` sees the whole response, the others what is extracted."""
    responses = [FORMED, FORMED.replace("7", "8"), "<answer>7</answer>", "7"]
    scores = score("exact*0.7+format*0.2+user_scorers:by_name*0.1", responses, ["7"] * 4, **EXTRACT)
    np.testing.assert_array_equal(scores.by_function["exact"], [1, 0, 1, 0])
    np.testing.assert_array_equal(scores.by_function["format"], [1, 1, 0, 0])
    np.testing.assert_array_equal(scores.by_function["user_scorers:by_name"], [1, 0, 1, 0])
    np.testing.assert_array_equal(scores.rewards, np.array([1, 0.2, 0.8, 0], np.float32))
    assert scores.rewards.dtype == np.float32
    assert not scores.failed.any()
    twice = Rewards.joined([scores, scores])
    np.testing.assert_array_equal(twice.by_function["format"], [1, 1, 0, 0] * 2)


def test_a_threshold_is_of_the_sum_and_a_failure_is_of_the_answer():
    responses = ["aa", "a" * 9, "raise"]
    scores = score("user_scorers:odd*0.5+format", responses, threshold=3.0)
    np.testing.assert_array_equal(scores.rewards, [0, 1, 0])
    np.testing.assert_array_equal(scores.by_function["user_scorers:odd"], [2, 9, 0])
    assert scores.reasons == ("", "", "KeyError: 'no such thing' (in user_scorers:odd)")
    scores = score("user_scorers:odd*-0.5", responses)
    np.testing.assert_array_equal(scores.rewards, [-1, -4.5, 0])


def test_a_batch_is_scored_at_once_in_this_process():
    user_scorers._judged.clear()
    tasks = ["", "", FILLER_TASK, ""]
    scores = score("user_scorers:judge*2+exact", ["aaaa", "a", "aaaaaaaa", "aa"], tasks=tasks)
    np.testing.assert_array_equal(scores.rewards, [2, 0.5, 0, 1])
    np.testing.assert_array_equal(scores.by_function["user_scorers:judge"], [1, 0.25, 0, 0.5])
    assert user_scorers._judged == [(3, os.getpid())]
    alone = score("user_scorers:judge", ["aaaa", "a"], threshold=0.5)
    np.testing.assert_array_equal(alone.rewards, [1, 0])
    nothing = score("user_scorers:judge", [])
    assert nothing.rewards.shape == nothing.failed.shape == (0,)


def test_what_a_function_of_a_batch_does_wrong_is_one_line():
    for response, reason in {
        "raise": "ConnectionError: no answer from the server",
        "few": "it returned 1",
    }.items():
        line = line_of(score, "exact+user_scorers:careless", [response, "x", "y"])
        rule = "must return 3 numbers for as many responses"
        assert line == f"reward.name = user_scorers:careless {rule}: {reason}"
    scores = score("exact+user_scorers:careless", ["x", "nan"])
    np.testing.assert_array_equal(scores.rewards, [1, 0])
    wrong = "the score must be within ±1e+15, got nan (in user_scorers:careless)"
    assert scores.reasons == ("", wrong)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("exact+exactly", {}, "reward.name must be one of .* or module:function.*'exactly'"),
        ("user_scorers:singles", {}, r"it takes \(response, .*; with batched = True it must take"),
        ("format", {"format": "("}, r"reward.format must be a regular expression, got '\('"),
        ("format", {"extract": "(a)"}, 'reward.extract must be "" where reward.name is format'),
        ("user_scorers:judge", {"extract": "(a)"}, 'reward.extract must be "" where'),
    ],
)
def test_mistakes_are_found_at_construction_in_one_line(name, options, message):
    assert re.search(message, line_of(make_pool, name, **LIMITS | options))


def test_format_matches_the_whole_response():
    responses = [
        FORMED,
        "  <think>a\nb</think> so 7",
        "<think>a</think>",
        "<think></think> 7",
        "<think> \n</think> 7",
        "<think>a</think></think>",
        "<think>a</think><think>",
        "<think>a<think>b</think> 7",
        "<think>a</think> 7 <think>b</think> 8",
        "so <think>a</think> 7",
        "<think>a 7",
        "7",
    ]
    np.testing.assert_array_equal(score("format", responses).rewards, [1, 1] + [0] * 10)
    texts = ["a\nb", "a\nb.", "(a" * 50 + "b"]
    scores = score("format", texts, format=r"a.b|((a|\(a)+)+", timeout=5.0)
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0])
    assert scores.reasons[2] == "no result within 5 s of CPU time"


def test_a_function_that_names_ended_is_told_whether_a_response_came_to_its_end():
    name = "user_scorers:ends+user_scorers:others_alone*2+user_scorers:judge_of_ends*4+exact*8"
    problems = (["1"] * 3, ["", "", FILLER_TASK], [{}] * 3)
    with make_pool(name, **LIMITS) as pool:
        told = pool.score(["1"] * 3, *problems, None, [True, False, True])
        untold = pool.score(["1"] * 3, *problems)
    assert told.rewards.tolist() == [15, 10, 11]
    assert untold.rewards.tolist() == [15, 15, 11]
    with make_pool("user_scorers:ends", **LIMITS | {"extract": "(1)"}) as pool:
        told = pool.score(["1", "1"], *(x[:2] for x in problems), None, [True, False])
    assert told.rewards.tolist() == [1, 0]
    assert "user_scorers:ends_by_position" in line_of(
        make_pool, "user_scorers:ends_by_position", **LIMITS
    )
