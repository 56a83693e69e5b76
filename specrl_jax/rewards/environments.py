"""Multi-turn environments: what answers a response, until the episode is over; no jax.

An environment is a plain class of the protocol below; `ENVIRONMENTS` lists the built-in ones,
`module:Class` names a user's own. Like scorers, environments meet text that a policy made up, so
they run in `reward_pool`'s workers within limits of time and memory. A worker keeps nothing: an
episode is played again from its start at every turn, which costs little beside the policy, makes
every step a function of the responses alone, and so needs nothing in a checkpoint. Environments
must therefore be deterministic.
"""

import ast
import importlib
import operator
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

MAX_OBSERVATION = 16_000  # characters; what is longer is cut


class Step(NamedTuple):
    """What a response led to: text for the policy to read, or the end with a reward."""

    observation: str = ""
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode. The first prompt is the data's."""

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        """Begin the episode of this problem."""
        ...

    def step(self, response: str) -> Step:
        """The policy's next response, as text. Raising ends the episode with reward 0."""
        ...


class Guess:
    """A number is to be guessed: "<" says that it is smaller, ">" larger, "?" that none was said.

    Reward 1 for the right number, which ends the episode.
    """

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        self._secret = int(answer)

    def step(self, response: str) -> Step:
        text = response.strip()
        if not text.isdecimal():
            return Step("?")
        guess = int(text)
        if guess == self._secret:
            return Step(reward=1.0, done=True)
        return Step("<" if self._secret < guess else ">")


class Calculator:
    """A response that ends in "[12*(3+4)]" is answered by "84"; any other is the final answer.

    Reward 1 if the final answer, blanks aside, is the problem's. Numbers, brackets and + - * / // %
    ** are understood; anything else is answered by "?".
    """

    _CALL = re.compile(r"\[([^\[\]]*)\]\s*$")

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        self._answer = answer.strip()

    def step(self, response: str) -> Step:
        call = self._CALL.search(response)
        if call is None:
            return Step(reward=float(response.strip() == self._answer), done=True)
        return Step(calculate(call[1]))


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression, "?" where it has none."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return f"{value:.10g}" if isinstance(value, float) else str(value)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError):
        return "?"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError("not arithmetic")
    if isinstance(value, complex):
        raise ValueError("not a real number")
    return value


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {"guess": Guess, "calculator": Calculator}


def load_environment(name: str) -> Callable[[], Environment]:
    """The class called `name`; ValueError, in one line, if there is none."""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    known = f"one of {', '.join(ENVIRONMENTS)} or module:Class"
    module, _, attribute = name.partition(":")
    if not module or not attribute or module == "__main__":
        raise ValueError(f"environment.name must be {known} (importable), got {name!r}")
    try:
        found = getattr(importlib.import_module(module), attribute)
        if not all(callable(getattr(found, method, None)) for method in ("reset", "step")):
            raise TypeError("it has no reset and step")
    except Exception as error:
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"environment.name must be {known}, got {name!r}: {line}") from None
    return found


def play(
    make: Callable[[], Environment],
    responses: Sequence[str],
    answer: str,
    task: str,
    metadata: dict,
) -> Step:
    """The step that the last of an episode's responses leads to."""
    environment, step = make(), Step()
    environment.reset(answer, task, metadata)
    for response in responses:
        step = Step(*environment.step(response))
    return step._replace(observation=str(step.observation)[:MAX_OBSERVATION])
