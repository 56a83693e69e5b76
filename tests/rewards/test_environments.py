"""Environments by hand, and in the workers: what one costs it costs its own row."""

import pytest
from small_runs import one_line

from specrl_jax.rewards.environments import (
    MAX_OBSERVATION,
    Calculator,
    Guess,
    Step,
    calculate,
    load_environment,
    play,
)
from specrl_jax.rewards.workers import RewardPool


@pytest.mark.parametrize(
    ("responses", "step"),
    [
        (["3"], Step(">")),
        (["9"], Step("<")),
        (["3", "9", "x"], Step("?")),
        (["3", " 5 "], Step(reward=1.0, done=True)),
        (["-5"], Step("?")),
    ],
)
def test_guessing(responses, step):
    assert play(Guess, responses, "5", "guess", {}) == step


@pytest.mark.parametrize(
    ("responses", "step"),
    [
        (["so [12*(3+4)]"], Step("84")),
        (["[1/0] "], Step("?")),
        (["[2+2]", "4"], Step(reward=1.0, done=True)),
        (["[2+2]", " 5"], Step(reward=0.0, done=True)),
        (["[2+2] is 4"], Step(reward=0.0, done=True)),  # no call: it does not end in one
    ],
)
def test_the_calculator(responses, step):
    assert play(Calculator, responses, "4", "sums", {}) == step


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("-(2 ** 3) // 3", "-3"), ("7 / 2", "3.5"), ("1 / 3", "0.3333333333"),
        ("10 % 4", "2"), ("(-8) ** 0.5", "?"), ("", "?"), ("a", "?"), ("1 if 2 else 3", "?"),
        ("__import__('os')", "?"), ("True + 1", "?"), ("'a' * 3", "?"), ("1e999 - 1e999", "nan"),
        ("(" * 500 + "1" + ")" * 500, "?"),
    ],
)  # fmt: skip
def test_arithmetic_and_nothing_else(expression, value):
    assert calculate(expression) == value


class Talker:
    def reset(self, answer, task, metadata):
        pass

    def step(self, response):
        return Step("a" * (MAX_OBSERVATION + 5))


class TurnReward:
    """Pays 1 at its first turn, 0 at its second, and ends."""

    def reset(self, answer, task, metadata):
        self.turn = 0

    def step(self, response):
        self.turn += 1
        return ("", 0.0, True) if self.turn == 2 else ("?", 1.0, False)


class Gym:
    def reset(self, seed=None, options=None):
        pass

    def step(self, action):
        pass


def test_an_episode_earns_the_sum_of_its_turns():
    assert play(TurnReward, ["a"], "", "", {}) == Step("?", 1.0, done=False)
    assert play(TurnReward, ["a", "b"], "", "", {}) == Step(reward=1.0, done=True)
    episodes = [("a",), ("a", "b")]
    limits = {"timeout": 30.0, "memory_mib": 512, "workers": 1}
    with RewardPool("exact", environment="test_environments:TurnReward", **limits) as pool:
        scores = pool.score(episodes, [""] * 2, [""] * 2, [{}] * 2)
    assert scores.rewards.tolist() == [1, 1]
    assert scores.done.tolist() == [False, True]


def test_an_environment_of_another_library_is_refused():
    with pytest.raises(ValueError, match=r"reset takes \(self, seed=None, .*metadata\)$") as error:
        load_environment("test_environments:Gym")
    one_line(error)


def test_a_users_own_class():
    make = load_environment("test_environments:Talker")
    assert len(play(make, ["x"], "", "", {}).observation) == MAX_OBSERVATION
    for name in ("nothing", "no.module:It", "test_environments:MAX_OBSERVATION", "__main__:It"):
        with pytest.raises(
            ValueError, match=r"^environment\.name must be one of guess, calculator "
        ):
            load_environment(name)


def test_a_slow_or_broken_step_costs_its_own_row():
    """Sums: "8" takes for ever, "9" raises; the others are answered, in their order."""
    episodes = [("1",), ("8",), ("2", "3"), ("9",), ("4", "5"), ("7",)]
    answers = ["0", "0", "5", "0", "2", "7"]
    limits = {"timeout": 5.0, "memory_mib": 512, "workers": 2}
    with RewardPool("exact", environment="small_runs:Sums", **limits) as pool:
        scores = pool.score(episodes, answers, ["sums"] * 6, [{}] * 6)
        again = pool.score(episodes[:1], answers[:1], ["sums"], [{}])
    assert scores.observations == ("1", "", "5", "", "1", "7")
    assert scores.failed.tolist() == [False, True, False, True, False, False]
    assert scores.rewards.tolist() == [0, 0, 1, 0, 0, 1]
    assert scores.done.tolist() == [False, True, True, True, False, True]
    assert "no result within 5 s" in scores.reasons[1]
    assert scores.reasons[3] == "RuntimeError: nine"
    assert again.observations == ("1",)
