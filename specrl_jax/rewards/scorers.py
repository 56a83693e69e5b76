"""Verifiable rewards: the text of a response → a number.

A reward is a plain function `score(response, answer, task, metadata) -> float`, called with these
names: one of `SCORERS`, or a user's own as `module:function`. A policy's text may make it run
forever, so the sandbox runs it with limits on time and memory. A user's function with
`batched = True` takes lists, `(responses, answers, tasks, metadatas)` of a whole batch, and returns
as many scores. One with a parameter `ended` is told whether the response finished (as a list if it
takes lists): False if the length limit cut it.
"""

import dataclasses
import decimal
import functools
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specrl_jax.inputs import one_line, reward_terms
from specrl_jax.rewards.code import score_code
from specrl_jax.rewards.code_forms import read_tests
from specrl_jax.rewards.marks import WORD, marked_answer, without_unit

# A response that thinks once, then answers.
FORMAT = r"\s*<think>(?!\s*</think>)((?!</?think>).)+</think>(?=\s*\S)((?!</?think>).)+"

MAX_SCORE = 1e15  # of either sign: float32 can represent the sum of a million squares
MAX_MATH_TEXT = 2_000  # characters for math-verify, whose patterns are not linear in length
MAX_MATH_END = 100  # characters after the last word, to be read as a whole
MAX_MATH_DIGITS = 100_000  # decimal digits; a power with more is hostile


def score_exact(response: str, answer: str, task: str, metadata: dict) -> float:
    """1 if the response equals the answer, ignoring blanks at both ends."""
    return float(response.strip() == answer.strip())


def score_math(response: str, answer: str, task: str, metadata: dict) -> float:
    r"""1 if the response's final answer equals `answer` mathematically (math-verify).

    The final answer is the last `<answer>..</answer>`, else the last `\boxed{}` or `#### ..`, else
    what follows the last word, else what math-verify finds at the end of the text (LaTeX, "answer
    is ..", the last number).
    All of it counts: if 3 is the answer, "2 and 3" is wrong, and the reverse. A choice such as
    "(B) 12" is recognized by its letter or by its value.
    """
    marked, text = _math_candidate(response)
    if marked == answer.strip():
        return 1.0
    if marked is not None and _PLAIN_NUMBER.fullmatch(answer.strip()):
        text = without_unit(text)
    from math_verify import verify

    gold_letter, gold_text = _choice(_plain_numbers(answer.strip()))
    letter, value = _choice(text if marked is not None else _end_of(text))
    said = text if marked is not None else response
    if gold_letter and not letter and (chosen := _CHOSEN.findall(said)):
        letter = chosen[-1]
    if gold_letter and letter and not (gold_letter == letter and gold_text and value):
        return float(gold_letter == letter)
    gold = _read_math(gold_text or answer)
    if not gold.parsed:
        raise ValueError(f"reward.name = math cannot read the reference answer {answer[:100]!r}")
    given = _read_math((letter and value) or text, is_whole=marked is not None)
    if gold.count != given.count and (gold.repeats or given.repeats):
        return 0.0  # math-verify reads 1,1 as the set {1}, which it considers equal to 1
    # math-verify's own timeouts are off: they cannot stop a C call. The worker's limit can.
    return float(verify(gold.parsed, given.parsed, timeout_seconds=None))


def score_reasoning_gym(response: str, answer: str, task: str, metadata: dict) -> float:
    """Return the score of reasoning-gym's own scorer for `task`; many give partial credit, 0 to 1.

    The metadata of a loaded problem is the whole item, which includes the item's own metadata.
    """
    return _reasoning_gym_scorer(task)(response, metadata)


def score_format(
    response: str, answer: str, task: str, metadata: dict, format: re.Pattern
) -> float:
    """1 if the whole response matches the pattern of `reward.format`."""
    return float(format.fullmatch(response) is not None)


# Tasks of reasoning_gym whose scorers execute the response.
_EXECUTED_TASKS = frozenset({
    "binary_matrix", "codeio", "composite", "countdown", "intermediate_integration", "n_queens",
    "polynomial_multiplication", "puzzle24", "simple_integration", "spiral_matrix",
    "string_insertion",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Scorer:
    """A reward's function, and what it reads and does."""

    score: Callable[..., float] | None  # None: the user's, not loaded
    reads_whole: bool = False  # the response with its thoughts, regardless of reward.extract
    reads_row: bool = False  # columns other than the answer
    compares: bool = False  # with the answer, which must not be blank
    check: Callable[[str, dict], object] | None = None  # raises if it cannot read (answer, row)
    source: str = ""  # the only data.source whose problems it can score
    executes: frozenset[str] | None = frozenset()  # tasks whose responses it executes; None: all
    starts_program: bool = False  # for the response, which must not find the tests in memory
    needs_process: bool = True  # its time is not linear, or it can fail
    takes_format: bool = False  # `reward.format`, compiled


SCORERS = {
    "exact": Scorer(score_exact, compares=True, needs_process=False),
    "math": Scorer(score_math, compares=True),
    "code": Scorer(
        score_code,
        reads_row=True,
        compares=True,
        check=read_tests,
        executes=None,
        starts_program=True,
    ),
    "reasoning_gym": Scorer(score_reasoning_gym, source="reasoning_gym", executes=_EXECUTED_TASKS),
    "format": Scorer(score_format, reads_whole=True, takes_format=True),
}
_USERS = Scorer(None, reads_row=True, executes=None)


def find_scorer(name: str) -> Scorer:
    """Return what is known about a function in `reward.name`, without loading it."""
    return SCORERS.get(name, _USERS)


def scorers_of(name: str) -> list[Scorer]:
    """Return what is known about each function in `reward.name`."""
    return [find_scorer(term) for term in reward_terms(name)]


def reads_answer_part(name: str, extract: str) -> bool:
    """Return whether a function in `reward.name` reads only the answer part of a response.

    A user's function gets all of it, unless `reward.extract` looks for the answer.
    """
    return any(not x.reads_whole and (x.score or extract) for x in scorers_of(name))


def load_scorer(name: str, format: str = "") -> Callable[..., float]:
    """Return the function called `name`; a one-line ValueError if there is none.

    format: `reward.format`.
    """

    def check(scorer: Callable) -> None:
        own = inspect.signature(scorer)
        if is_batched(scorer):
            wanted = {"responses": [], "answers": [], "tasks": [], "metadatas": []}
            end = {"ended": []}
            advice = "with batched = True it must take (responses, answers, tasks, metadatas)"
        else:
            wanted = {"response": "", "answer": "", "task": "", "metadata": {}}
            end = {"ended": True}
            advice = (
                "call it from def score(response, answer, **_), as f(response, answer), or as "
                "f([response], [answer])[0] if it takes lists"
            )
        try:
            own.bind(**wanted, **end if takes_ended(scorer) else {})
        except TypeError:
            raise ValueError(f"it takes {str(own)[:60]}; {advice}") from None

    signature = "module:function(response, answer, task, metadata)"
    functions = {key: scorer.score for key, scorer in SCORERS.items()}
    function = load_by_name("reward.name", functions, name, signature, check)
    if not find_scorer(name).takes_format:
        return function
    with one_line(f"reward.format must be a regular expression, got {format!r}"):
        pattern = re.compile(format or FORMAT, re.DOTALL)
    return functools.partial(function, format=pattern)


def takes_ended(scorer: Callable) -> bool:
    """Return whether a function has a parameter `ended`; **others alone do not count."""
    parameters = inspect.signature(scorer).parameters
    return "ended" in parameters and parameters["ended"].kind in _BY_NAME


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_batched(scorer: Callable) -> bool:
    return bool(getattr(scorer, "batched", False))


def checked(score: float) -> float:
    """Return a score; ValueError if it is not a valid number."""
    if abs(score) <= MAX_SCORE:
        return score
    raise ValueError(f"the score must be within ±{MAX_SCORE:g}, got {score:g}")


def load_by_name(
    field: str, table: Mapping[str, Any], name: str, usage: str, check: Callable[[Any], None]
) -> Any:
    """Return `table[name]`, or what the user's name "module:attribute" refers to.

    field (of the config) and usage (how to write such a name) are for the error.
    check: raises if the attribute is of another kind.
    """
    if name in table:
        return table[name]
    with one_line(
        f"{field} must be one of {', '.join(table)} or {usage} of a module in the current "
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


_PLAIN_NUMBER = re.compile(r"[-+−$]*[\d,]*\.?\d+")
_VALUE = re.compile(r"[\d\\√π]")
_MARKS = " \t\n*$.,;:!?\"'`#"
_LABEL = re.compile(  # (B), B), B. or B: before a value; B alone
    r"(?:\\(?:text|mathrm|mathbf)\w*\s*\{)?\s*(\()?\s*([A-J])\s*(?(1)\)|(?:[).:](?!\d)|(?=\W*$)))"
    r"\s*\}?(?:\\[ ,;:]|[\s.:])*(?!\s*[+*/^=(])"
)
_CHOSEN = re.compile(  # answer is (B); B) at the start
    r"(?:(?i:answer|choice|option)\W+(?:(?i:is|option|choice)\W+){0,3}|^\W*(?=[A-J][).:]))"
    r"([A-J])\b(?!')"
)
_BETWEEN_PARTS = re.compile(  # "and" with the comma before it; not a thousands separator
    r"[,;]?\s*(?:\\text\w*\s*\{\s*)?\b(?:and|or)\b|,(?!\s?\d{3}(?!\d))|;"
)


class _Reading(NamedTuple):
    """Content of an answer."""

    parsed: list  # by math-verify: a value, and its text
    count: int = 1  # parts that the text lists
    repeats: bool = False  # some part occurs twice in that list


def _read_math(text: str, is_whole: bool = True) -> _Reading:
    """Read an answer; is_whole: the text is only the answer, and all of it must count."""
    plain = re.sub(r"\\text\w*\s*\{([^{}]*)\}", r" \1 ", text)
    if not is_whole:
        end = _read_whole(_end_of(text))
        is_value = end.parsed and not isinstance(end.parsed[0], str)
        return end if is_value else _Reading(list(_parse_math(text)))
    if not WORD.search(plain):
        return _read_whole(text)
    values = [part for part in WORD.split(plain) if _VALUE.search(part)]
    if len(values) == 1:
        return _read_whole(_bare(values[0]).rstrip("([ "))
    return _Reading([" ".join(_bare(plain.casefold()).split())])  # words, or several values


def _read_whole(text: str) -> _Reading:
    """Read all of a text without words: `(1, 2)` is a pair, `2 and 3` is a set."""
    if not text:
        return _Reading([])
    parsed = list(_parse_math(rf"\boxed{{{_latex(text)}}}"))
    count = len(_BETWEEN_PARTS.split(text))
    is_set = type(parsed[0]).__name__ == "FiniteSet" if parsed else False
    return _Reading(parsed, count, is_set and count > len(parsed[0].args))


def _bare(text: str) -> str:
    """Return the text without marks at both ends; a point before a digit is kept."""
    return re.sub(r"^(?:\.{2,}|\.(?!\d))", "", text.rstrip(_MARKS).lstrip(_MARKS.replace(".", "")))


def _end_of(text: str) -> str:
    """Return the text after the last word of the last sentence; "" if it is not an answer."""
    line = (text.strip().splitlines() or [""])[-1]
    end = WORD.split(re.split(r"[.!?]\s+", line.rstrip(_MARKS))[-1])[-1]
    end = re.sub(r"^[-•]\s+", "", _bare(end))
    parts = re.split(r"[,;]\s+", end)
    if "=" in parts[-1] and not all(re.match(r"[A-Za-z]\s*=", part) for part in parts):
        end = parts[-1]  # the end of a chain of equations
    is_unit = re.fullmatch(r"[$\d.,/]+\s+\(?(?!and\b|or\b)[A-Za-z].*", end)
    is_answer = re.search(rf"{_VALUE.pattern}|^\W*[A-J]\W*$", end)
    return end if is_answer and not is_unit and len(end) <= MAX_MATH_END else ""


_SIGNS = str.maketrans({
    "°": r"^\circ ", "·": r"\cdot ", "×": r"\times ", "÷": r"\div ", "±": r"\pm ", "−": "-",
    "£": "", "€": "", "¥": "", "≈": "", "~": " ",
    "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∩": r"\cap ", "²": "^2", "³": "^3",
})  # fmt: skip


def _latex(text: str) -> str:
    r"""Return the text with signs and repeating decimals as LaTeX that math-verify reads."""

    def fraction(match: re.Match) -> str:
        whole, once, again = match.groups()
        value = int(whole + once + again) - int(whole + once or 0)
        return rf"\frac{{{value}}}{{{10 ** len(once + again) - 10 ** len(once)}}}"

    text = re.sub(r"√\s*(?:\(([^()]*)\)|(\d+(?:\.\d+)?|[A-Za-z]))", r"\\sqrt{\1\2}", text)
    repeating = r"(?<![\d.])(\d{0,30})\.(\d{0,30})\\(?:overline|bar)\s*\{(\d{1,30})\}"
    text = re.sub(repeating, fraction, text)
    text = re.sub(r"(?<![\w.\\])\.(?=\d)", "0.", text)
    return text.replace("percent", r"\%").translate(_SIGNS)


def _choice(text: str) -> tuple[str, str]:
    r"""Letter and value of `\textbf{(B)}\ 12`, `(B) 12` or `B`; the letter is "" if absent."""
    label = _LABEL.match(text)
    return (label[2], text[label.end() :]) if label else ("", text)


@functools.lru_cache(maxsize=1024)
def _parse_math(text: str) -> tuple:
    """Parse `text` with math-verify. Cached: the responses of a group share their answer."""
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))


def _plain_numbers(text: str) -> str:
    """Write 1e5 as 100000: math-verify reads only the 1."""
    number = r"(?<![\w.])\d{1,30}(?:\.\d{1,30})?[eE][+-]?\d{1,2}(?!\w)"
    return re.sub(number, lambda match: format(decimal.Decimal(match[0]), "f"), text)


def _math_candidate(response: str) -> tuple[str | None, str]:
    """Return (the final answer if it is marked as such, the text for math-verify)."""
    marked = marked_answer(response)
    if marked is not None:
        if len(marked) > MAX_MATH_TEXT:
            return marked, ""
        marked = _plain_numbers(marked)
        return marked, "" if _hostile(marked) else marked  # a hostile answer is wrong
    text = _plain_numbers(_end_with_value(response))
    if _hostile(text):  # the last plain number may be the answer
        numbers = re.findall(r"(?<![\w^*.!{])-?\d{1,100}(?![\w^*!])", text)
        text = (numbers or [""])[-1]
    return None, text


def _end_with_value(text: str) -> str:
    """Return the end of a text, or what leads to its last value if the end has none."""
    last = max(text.rfind(sign) for sign in "0123456789√π")
    is_far = 0 <= last < len(text) - MAX_MATH_TEXT
    return (text[: last + MAX_MATH_END] if is_far else text)[-MAX_MATH_TEXT:]


_POWER = r"\s*(?:\^|\*\*)\s*[{(]*\s*"
_TOWER = re.compile(rf"(?<!\d)(\d{{1,100}}){_POWER}(\d{{1,100}})(?:{_POWER}(\d{{1,100}}))?")


def _hostile(text: str) -> bool:
    """Return True if evaluating `text` may take too long. The timeout stops what this misses."""
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
