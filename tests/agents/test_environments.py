"""Environments by hand."""

import pytest
from small_runs import one_line, play

from specrl_jax.agents.environment_protocol import MAX_OBSERVATION, Step, take_step
from specrl_jax.agents.environments import Calculator, Guess, calculate, load_environment


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
    assert play(Guess, responses, "5") == step[:3]


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
    assert play(Calculator, responses, "4") == step[:3]


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


class Gym:
    def reset(self, seed=None, options=None):
        pass

    def step(self, action):
        pass


def test_an_environment_of_another_library_is_refused():
    with pytest.raises(ValueError, match=r"reset takes \(self, seed=None, .*metadata\)$") as error:
        load_environment("test_environments:Gym")
    one_line(error)


def test_a_users_own_class():
    make = load_environment("test_environments:Talker")
    assert len(take_step(make(), "x").observation) == MAX_OBSERVATION
    for name in ("nothing", "no.module:It", "test_environments:MAX_OBSERVATION", "__main__:It"):
        with pytest.raises(
            ValueError, match=r"^environment\.name must be one of guess, calculator, python "
        ):
            load_environment(name)
