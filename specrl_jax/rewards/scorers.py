"""Verifiable rewards: the text of a response → a number.

A scorer is a plain function `score(response, answer, task, metadata) -> float`: one of `SCORERS`,
or a user's own by `module:function`. It may run for ever on a policy's text, so `workers` runs it
within limits of time and memory.
"""

import decimal
import functools
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any

from specrl_jax.inputs import one_line

Scorer = Callable[[str, str, str, dict], float]

MAX_MATH_TEXT = 2_000  # characters for math-verify, whose patterns are not linear in length
MAX_MATH_DIGITS = 100_000  # decimal digits; a power with more is hostile


def score_exact(response: str, answer: str, task: str, metadata: dict) -> float:
    """1 if the response equals the answer, blanks at both ends aside."""
    return float(response.strip() == answer.strip())


def score_math(response: str, answer: str, task: str, metadata: dict) -> float:
    r"""1 if the response's final answer equals `answer` mathematically (math-verify).

    The final answer is the last `<answer>..</answer>`, else the last `\boxed{}`, else what
    math-verify finds at the end of the text (LaTeX, "answer is ..", the last number).
    """
    marked, candidate = _math_candidate(response)
    if marked == answer.strip():
        return 1.0
    from math_verify import verify

    gold = _read_math(_plain_numbers(answer.strip()))
    if not gold:
        raise ValueError(f"reward.name = math cannot read the reference answer {answer[:100]!r}")
    # math-verify's own timeouts are off: they cannot stop a C call. The worker's limit can.
    given = _parse_math(candidate) if marked is None else _read_math(candidate)
    if marked is not None and _is_list(candidate, given) != _is_list(answer, gold):
        return 0.0  # math-verify reads 1,1 as the set {1}, which it takes for 1
    return float(verify(list(gold), list(given), timeout_seconds=None))


def score_reasoning_gym(response: str, answer: str, task: str, metadata: dict) -> float:
    """The score of reasoning-gym's own scorer for `task`; many give partial credit, 0 to 1.

    The metadata of a loaded problem is the whole item, with the item's own metadata in it.
    """
    return _reasoning_gym_scorer(task)(response, metadata)


SCORERS: dict[str, Scorer] = {
    "exact": score_exact,
    "math": score_math,
    "reasoning_gym": score_reasoning_gym,
}
# Scorer → tasks of which it executes the response. A user's own scorer may, of every task.
EXECUTES: dict[str, frozenset[str]] = {
    "exact": frozenset(),
    "math": frozenset(),
    "reasoning_gym": frozenset({
        "binary_matrix", "codeio", "composite", "countdown", "intermediate_integration", "n_queens",
        "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
        "string_insertion",
    }),
}  # fmt: skip
# Scorer → the data.source whose problems alone it can score.
OWN_TASKS = {"reasoning_gym": "reasoning_gym"}


def load_scorer(name: str) -> Scorer:
    """The scorer called `name`; ValueError in one line if there is none."""

    def check(scorer: Scorer) -> None:
        inspect.signature(scorer).bind("response", "answer", "task", {})

    signature = "module:function(response, answer, task, metadata)"
    return load_by_name("reward.name", SCORERS, name, signature, check)


def load_by_name(
    field: str, table: Mapping[str, Any], name: str, form: str, check: Callable[[Any], None]
) -> Any:
    """`table[name]`, or what the user's name "module:attribute" stands for.

    field: of the config, and `form`, how to write such a name, are for the error.
    check: raises where the attribute is of another kind.
    """
    if name in table:
        return table[name]
    with one_line(
        f"{field} must be one of {', '.join(table)} or {form} of a module in the current "
        f"directory or on PYTHONPATH, got {name!r}"
    ):
        if name.startswith("__main__"):
            raise ValueError("the workers do not import __main__")
        value = pkgutil.resolve_name(name)
        check(value)
        return value


@functools.cache
def _reasoning_gym_scorer(task: str):
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


@functools.lru_cache(maxsize=1024)
def _parse_math(text: str) -> tuple:
    """What math-verify reads in `text`. Cached: the responses of a group share their answer."""
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))


def _read_math(text: str) -> tuple:
    r"""What a whole answer says: `(1, 2)` is a pair, of which math-verify alone reads only the 2.

    Only one reading counts: otherwise 2 would be right where the answer is (1, 2).
    """
    words = re.search(r"(?<![\\{A-Za-z])[A-Za-z]{3,}(?![A-Za-z(])|\$|\\[(\[]|\\boxed", text)
    return (words and _parse_math(text)) or _parse_math(rf"\boxed{{{text}}}")


def _is_list(text: str, parsed: tuple) -> bool:
    """Whether a whole answer is several values: 1,080 and "10, as we saw" are one."""
    return "," in text and not (parsed and getattr(parsed[0], "is_number", False))


def _plain_numbers(text: str) -> str:
    """With 1e5 as 100000: math-verify reads only the 1."""

    def plain(match: re.Match) -> str:
        return format(decimal.Decimal(match[0]), "f")

    return re.sub(r"(?<![\w.])\d{1,30}(?:\.\d{1,30})?[eE][+-]?\d{1,2}(?!\w)", plain, text)


def _math_candidate(response: str) -> tuple[str | None, str]:
    """(the final answer if it is marked as such, the text for math-verify)."""
    tail = _plain_numbers(response[-MAX_MATH_TEXT:])
    marked = _last_tagged(tail)
    boxed = _last_boxed(tail if marked is None else marked)
    marked = boxed if boxed is not None else marked
    if not _hostile(tail if marked is None else marked):
        return marked, tail if marked is None else marked
    # A hostile marked answer is wrong. In running text the last plain number may be the answer.
    numbers = re.findall(r"(?<![\w^*.!{])-?\d{1,100}(?![\w^*!])", tail) if marked is None else []
    return marked, (numbers or [""])[-1]


def _last_tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def _last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{..}` whose braces balance to its end."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for i in range(start + len(r"\boxed"), len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : i].strip()
    return None


_POWER = r"\s*(?:\^|\*\*)\s*[{(]*\s*"
_TOWER = re.compile(rf"(?<!\d)(\d{{1,100}}){_POWER}(\d{{1,100}})(?:{_POWER}(\d{{1,100}}))?")


def _hostile(text: str) -> bool:
    """Whether evaluating `text` cannot end soon. Incomplete: the timeout stops the rest."""
    if re.search(r"\d[eE][+-]?\d{3}|\d{101}|\d{5}\s*!|!\s*!\s*!|[({\[]{40}", text):
        return True
    for base, power, top in _TOWER.findall(text):
        # 9^9^9: its exponent 9^9 has 9 · log10(9) = 8.6 digits.
        exponent_digits = int(top or 1) * math.log10(max(int(power), 1))
        if exponent_digits > 9 or 10**exponent_digits * math.log10(max(int(base), 1)) > (
            MAX_MATH_DIGITS
        ):
            return True
    return False
