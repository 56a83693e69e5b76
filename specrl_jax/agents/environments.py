"""Multi-turn environments: they reply to responses until an episode is over.

One of `ENVIRONMENTS`, of the packages in `PACKAGES`, or a user's own class as `module:Class`, with
the protocol `environment_protocol.Environment`. No JAX.
"""

import ast
import inspect
import operator
import re
from collections.abc import Callable

from specrl_jax.agents.environment_protocol import Environment, Step
from specrl_jax.agents.python_tool import PythonTool
from specrl_jax.inputs import require_package
from specrl_jax.rewards.scorers import load_by_name


class Guess:
    """Guess a number: "<" means that it is smaller, ">" larger, "?" that the response is not a
    number.

    The right number ends the episode with reward 1.
    """

    replayable = True

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
    """Reply to a response that ends in "[12*(3+4)]" with "84"; any other is the final answer.

    Reward 1 if the final answer equals the problem's, ignoring blanks at both ends. It supports
    numbers, brackets and + - * / // % **; the reply to anything else is "?".
    """

    replayable = True

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
    """Return the value of an arithmetic expression, "?" if it has none."""
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


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "guess": Guess,
    "calculator": Calculator,
    "python": PythonTool,
}


def _textarena(game: str) -> Callable[[], Environment]:
    require_package("textarena", "agents", f"environment.name=textarena:{game}")
    from specrl_jax.agents.textarena_games import load_game

    return load_game(game)


def _verifiers(name: str) -> Callable[[], Environment]:
    require_package("verifiers", "agents", f"environment.name=verifiers:{name}")
    from specrl_jax.agents.verifiers_tasks import load_taskset

    return load_taskset(name)


# Packages of environments, by the prefix before a colon in environment.name.
PACKAGES: dict[str, Callable[[str], Callable[[], Environment]]] = {
    "textarena": _textarena,
    "verifiers": _verifiers,
}


def load_environment(name: str) -> Callable[[], Environment]:
    """Return the class called `name`; a one-line ValueError if there is none."""
    package, _, environment = name.partition(":")
    if package in PACKAGES and environment:
        return PACKAGES[package](environment)

    def check(environment: Callable[[], Environment]) -> None:
        if not all(callable(getattr(environment, method, None)) for method in ("reset", "step")):
            raise TypeError("it has no reset and step")
        reset = inspect.signature(environment.reset)
        try:
            reset.bind(None, answer="", task="", metadata={})
        except TypeError:
            raise ValueError(
                f"its reset takes {str(reset)[:60]}; it must take (self, answer, task, metadata)"
            ) from None

    usage = f"{':.., '.join(PACKAGES)}:.., module:Class"
    return load_by_name("environment.name", ENVIRONMENTS, name, usage, check)
