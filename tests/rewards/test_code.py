"""The reward `code`: right and wrong code, and tricks that would fake a pass."""

import re

import numpy as np
import pytest
from code_answers import ANY, LIMITS, REPORT, RIGHT
from worker_pools import score

from specrl_jax.rewards.pool import RewardPool


@pytest.fixture(scope="module")
def pool():
    with RewardPool("code", **LIMITS) as pool:
        yield pool


def scores_of(responses, tests):
    with RewardPool("code", **LIMITS) as pool:
        return score(pool, responses, tests)


ADD = "assert add(1, 2) == 3\nassert abs(add(2, 2) - 4) < 1e-6\nassert math.isclose(add(1, 1), 2)\n"
LOOP = "assert all(map(lambda x: add(x, 1) == x + 1, [1, 2]))"
STACK = """
def test_order():
    assert pop_last([1, (2, 3)]) == (2, 3)

def test_empty():
    try:
        pop_last([])
    except IndexError as error:
        assert str(error) == "empty"
    else:
        assert False
"""
RIGHT_STACK = """
class EmptyError(IndexError):
    pass
class Stack:
    def __init__(self, items):
        self.items = list(items)
    def pop(self):
        if not self.items:
            raise EmptyError("empty")
        return self.items.pop()
def pop_last(items):
    return Stack(items).pop()
"""
IN_PLACE = """
numbers = [3, 1, 2]
assert order(numbers) is None and numbers == [1, 2, 3]
assert list(firsts(3)) == [0, 1, 2]
assert count("abca") == {"a": 2, "b": 1, "c": 1}
"""
RIGHT_IN_PLACE = """
from collections import Counter
def order(numbers): numbers.sort()
def firsts(n): yield from range(n)
count = Counter
"""


def test_code_that_passes_its_tests():
    rows = [
        (RIGHT, ADD, 1),
        (f"So:\n```python\n{RIGHT}```\nThat is it.", ADD, 1),
        (f"```\nadd = 5\n```\nBetter:\n```py\n{RIGHT}", ADD, 1),  # cut before the fence's end
        (RIGHT.replace("+", "-"), ADD, 0),
        ("def add(a, b):\n    import no_such_module", ADD, 0),
        (RIGHT.replace("    return", "    x = bytearray(400 << 20)\n    return"), ADD, 1),
        (RIGHT.replace("    return", "    x = bytearray(520 << 20)\n    return"), ADD, 0),
        ("add = ", ADD, 0),
        ("", ADD, 0),
        (f"print('hello')\nimport numpy as np\n{RIGHT.replace('a +', 'np.int64(a) +')}", ADD, 1),
        (RIGHT_STACK, STACK, 1),
        (RIGHT_STACK.replace("empty", "none"), STACK, 0),
        (RIGHT_IN_PLACE, IN_PLACE, 1),
        (RIGHT_IN_PLACE.replace("numbers.sort()", "sorted(numbers)"), IN_PLACE, 0),
    ]
    responses, tests, right = zip(*rows)
    scores = scores_of(responses, tests)
    assert scores.reasons == ("",) * len(rows)
    np.testing.assert_array_equal(scores.rewards, right)


DATA = """
import enum, functools, itertools
from collections import Counter, OrderedDict, defaultdict
import numpy as np
def counts(text): return Counter(text)
def ordered(keys): return OrderedDict.fromkeys(keys)
def matrix(): return np.eye(2)
def pairs(a, b): return zip(a, b)
def keys(x): return x.keys()
def numbers(): return itertools.count()
class Shape:
    SIDES = 4
    @staticmethod
    def area(a, b): return a * b
class Solution:
    def __init__(self): self.seen = []
    def add(self, x):
        self.seen.append(x)
        return self.seen
square = functools.partial(pow, exp=2)
"""
NUMBERS = """
from fractions import Fraction
from decimal import Decimal
from datetime import date, datetime, timedelta
def third(): return Fraction(1, 3)
def tenth(): return Decimal("0.1")
def later(day): return day + timedelta(1)
def upto(n): return range(n)
def big(): return 10**5000
"""
OBJECTS = """
from collections import namedtuple
from dataclasses import dataclass
from typing import NamedTuple
import enum
class Stack(list):
    def push(self, x): self.append(x)
Pair = namedtuple("Pair", "x y")
class Point(NamedTuple):
    x: int = 1
class Color(enum.IntEnum):
    RED = 1
@dataclass(frozen=True)
class A:
    x: int
class V:
    def __eq__(self, other): return True
class BadError(ValueError): pass
def fail(): raise BadError
def compose(f=None): return lambda x: x
async def later(): return 1
origin = Point()
point = (1, 2)
"""
GRID = """
def clear(grid, *, counts):
    grid[0][0] = 0
    counts["zeros"] = 1
    grid.sort()
    return grid
def merge(rows): rows[0].append(1)
"""
ERRORS = """
class EmptyError(IndexError):
    def __init__(self, name, code): self.code = code
    def __str__(self): return "empty"
class DeepError(EmptyError): pass
def pop(kind):
    if kind == "deep": raise DeepError("x", 2)
    if kind == "key": raise KeyError("a")
    b"\\xff".decode()
"""


@pytest.mark.parametrize(
    ("response", "tests"),
    [
        (DATA, "assert counts('aab') == {'a': 2, 'b': 1} and list(ordered('ba')) == ['b', 'a']"),
        (DATA, "assert matrix() == [[1, 0], [0, 1]] and square(3) == 9"),
        (DATA, "assert list(pairs([1], 'a')) == [(1, 'a')] and sorted(keys({2: 0})) == [2]"),
        (DATA, "x = numbers()\nassert [next(x), next(x)] == [0, 1]"),
        (DATA, "assert Shape.SIDES == 4 and Shape.area(2, b=3) == 6"),
        (DATA, "s = Solution()\nassert s.add(1) == [1] and s.add(2) == [1, 2]\n"
               "assert Solution().add(3) == [3]"),
        (DATA, "from solution import counts, matrix\nassert counts('') == {}"),
        (OBJECTS, "def check(origin):\n    assert origin.x == 1 and point[0] == 1\n"
                  "class P: x = 1\norigin = P()\ncheck(origin)\ncompose.__name__\n"
                  "try: fail()\nexcept ValueError: pass"),
        (NUMBERS, "from fractions import Fraction\nassert third() == Fraction(1, 3)"),
        (NUMBERS, "from decimal import Decimal\nassert tenth() == Decimal('0.1')"),
        (NUMBERS, "from datetime import date\nassert later(date(2024, 2, 28)).day == 29"),
        (NUMBERS, "from datetime import datetime as d\nassert later(d(2024, 1, 1, 2)).hour == 2"),
        (NUMBERS, "assert upto(3) == range(3) and later.__name__ == 'later'\nupto(1)"),
        (NUMBERS, "assert big() == 10**5000"),
        ("def sum(a, b): return a - b", "assert sum(3, 2) == 1\nassert sum(2, 3) == -1"),
        (RIGHT, LOOP),
        (RIGHT, "from __future__ import annotations\nassert math.isclose(add(1, 2), 3)"),
        (RIGHT, "assert math.isclose(add(1, 2), 3) and np.allclose(add([1], [2]), [1, 2])"),
        (GRID, "g = [[3], [1]]\nrow = g[0]\nc = {}\nassert clear(g, counts=c) is g\n"
               "assert g == [[0], [1]] and row == [0] and row is g[0] and c == {'zeros': 1}"),
        (GRID, "row = [0]\nrows = [row, row]\nmerge(rows)\nassert rows == [[0, 1], [0, 1]]"),
        (ERRORS, "try: pop('deep')\nexcept LookupError as e: assert str(e) == 'empty'"),
        (ERRORS, "try: pop('key')\nexcept KeyError as e: assert str(e) == \"'a'\""),
        (ERRORS, "try: pop('')\nexcept UnicodeDecodeError: pass\nelse: assert 0"),
        ("def double(x): return 2 * x", "def double(x):\n{response}\nassert double(2) == 4"),
        ("    return 2 * x", "def double(x):\n{response}\nassert double(2) == 4"),
        ("    return 2 * x", "def max(x):\n{response}\nassert max(2) == 4"),
        (
            "        return 2 * x",
            "class Solution:\n    def f(self, x):\n{response}\nassert Solution().f(2) == 4",
        ),
        (
            "class Solution:\n    def f(self, x): return 2 * x",
            'class Solution:\n    def f(self, x):\n        """D."""\n{response}\n'
            "assert Solution().f(2) == 4",
        ),
    ],
)  # fmt: skip
def test_right_code_passes(pool, response, tests):
    scores = score(pool, [response], [tests])
    assert scores.reasons == ("",)
    np.testing.assert_array_equal(scores.rewards, [1])


def test_code_around_a_response():
    """The response may be the rest of the last function; it does not replace what tests use."""
    answer = (
        'def half(x):\n    return x / 2\n\n\ndef add(a, b):\n    """Add."""\n{response}\n'
        "def check(f):\n    assert half(f(1, 2)) == 1.5\n\n\ncheck(add)\n"
    )
    responses = [
        "    return a + b",
        RIGHT,
        "    return a - b",
        "    return half(2 * a) + b",
        "    return 0\n\n\ndef half(x):\n    return 1.5\n",
        "    return 0\n\n\ndef check(f):\n    pass\n",
        "",
    ]
    scores = scores_of(responses, [answer] * len(responses))
    np.testing.assert_array_equal(scores.rewards, [1, 1, 0, 1, 0, 0, 0])
    assert not scores.failed.any()


# Right once it has seen the tests, in its own memory or another process's.
SEARCH = """
import gc, os, sys
words = "dda tressa"  # backwards, as it is in memory too
found = False
{search}
def add(a, b): return a + b if found else 0
"""
FRAMES = """
frame = sys._getframe()
while frame:
    found = found or words[::-1] in repr(list(frame.f_locals.values()))
    frame = frame.f_back
"""
SEEN = """
for x in gc.get_objects():
    values = x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()
    found = found or any(isinstance(y, str) and words[::-1] in y for y in values)
"""
MEMORY = """
for pid in [x for x in os.listdir("/proc") if x.isdecimal() and x != str(os.getpid())]:
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
            for line in maps:
                first, last = (int(x, 16) for x in line.split()[0].split("-"))
                if "rw-p" in line and last - first < 2**26:
                    memory.seek(first)
                    found = found or words[::-1].encode() in memory.read(last - first)
    except OSError: pass
"""
TRICKS = [
    "class math:\n    isclose = staticmethod(lambda *x: True)\ndef add(a, b): return 3",
    *(SEARCH.format(search=x) for x in (FRAMES, SEEN, MEMORY)),
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "exit()",
    "raise SystemExit(0)",
    "raise KeyboardInterrupt",
    "def add(a, b):\n    raise SystemExit(0)",
    "def add(a, b):\n    import os\n    os._exit(0)",
    "def add(a, b):\n    raise StopIteration",
    "import atexit, os\natexit.register(os._exit, 0)",
    "print('1.0')\nprint('passed')",
    REPORT,
    REPORT + "os._exit(0)",
    "def add(a, b):\n    import os\n" + re.sub("^", "    ", REPORT, flags=re.MULTILINE),
    ANY.format(base="object", value="Any()"),
    ANY.format(base="int", value="Any(7)"),
    ANY.format(base="list", value="Any([7])"),
    ANY.format(base="object", value="[Any()]"),
    "abs = lambda x: 0\nimport builtins\nbuiltins.abs = abs\ndef add(a, b): return 3",
    "import builtins\nbuiltins.AssertionError = builtins.KeyError = type('E', (), {})\nadd = int",
    "import builtins\nbuiltins.float = builtins.bool = lambda *x: 1.0\ndef add(a, b): return 3",
    'import json\njson.loads = json.dumps = lambda *a, **k: \'["", "", true, []]\'\nadd = max',
    "from specrl_jax.rewards import code\ncode.score_code = lambda *a: 1.0\n"
    "from specrl_jax.sandbox import worker_process as w\n"
    "w.Result.to_line = lambda self: b'[1.0, \"\"]\\n'\nadd = max",
    "import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\nadd = max",
    "def test_add(): pass\ndef check(f): pass\nadd = test_add",
    "__name__ = 'the tests'\nassert True",
]


def test_no_trick_fakes_a_pass():
    scores = scores_of([*TRICKS, RIGHT], [ADD] * (len(TRICKS) + 1))
    np.testing.assert_array_equal(scores.rewards, [0] * len(TRICKS) + [1])
    for reason in scores.reasons:  # wrong answers, or objects that tests cannot compare
        assert not reason or "store an object of the response, a Any; tests may" in reason


FAULT = "try:\n    add(1, 2)\n    assert False\nexcept BadError:\n    pass\n"


@pytest.mark.parametrize(
    ("response", "tests"),
    [
        ("def add(a, b): raise StopIteration", LOOP),  # which ends no loop of the tests
        # No name of the response stands for a failed assertion.
        ("class BadError(AssertionError): pass\ndef add(a, b): pass", FAULT),
        ("BadError = AssertionError\ndef add(a, b): pass", FAULT),
        ("BadError = BaseException\ndef add(a, b): pass", FAULT),
        ("BadError = (Exception,)\ndef add(a, b): pass", FAULT),
        ("def BadError(): pass\ndef add(a, b): pass", FAULT),
    ],
)
def test_wrong_code_fails(pool, response, tests):
    np.testing.assert_array_equal(score(pool, [response], [tests]).rewards, [0])


@pytest.mark.parametrize("catch", ["except Exception:", "except:", "except BaseException:"])
def test_an_end_that_a_test_catches_is_no_pass(pool, catch):
    tests = f"try:\n    add(1, 2)\n    ok = False\n{catch}\n    ok = True\nassert ok\n"
    codes = ["raise ValueError", "import os; os._exit(0)", "raise SystemExit"]
    scores = score(pool, [f"def add(a, b): {code}" for code in codes], [tests] * 3)
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0])


@pytest.mark.parametrize(
    ("tests", "what"),
    [
        ("x = Stack([1])", "a Stack"),
        ("assert Pair(1, 2).y == 2", "a Pair"),
        ("assert Point() == (1,)", "a Point"),
        ("assert Color(1) == 1", "a Color"),
        ("assert Color.RED == 1 or len('')", "a Color"),
        ("assert A(1) == A(1)", "a A"),
        ("assert V() == 1", "a V"),
        ("assert [V()] == [1]", "a V"),
        ("assert origin.x == 1 or len('')", "a Point"),
        ("try: fail()\nexcept BadError: pass", "a class of errors, BadError"),
        ("assert compose()(1) == 1", "a function"),
        ("assert hasattr(later(), 'send')", "a coroutine"),
        ("try: V()\nexcept BaseException: pass", "a V"),
    ],
)
def test_tests_that_hold_an_object_are_told_what_they_may_do(pool, tests, what):
    scores = score(pool, [OBJECTS], [tests])
    assert scores.rewards == 0
    (reason,) = scores.reasons
    assert f"store an object of the response, {what}; tests may call its functions" in reason
    assert reason.endswith("and catch built-in errors")


NEVER_RUN = [
    (
        "import unittest\nclass Add(unittest.TestCase):\n    def test(self): assert 0",
        "a class, Add",
    ),
    ("class TestAdd:\n    def test_add(self): assert add(1, 2)", "in a class, TestAdd"),
    ("@p\ndef test_add(a, b): assert 0", "never call test_add, which needs arguments"),
    ("def test_add(*, a): assert 0", "never call test_add, which needs arguments"),
    ("async def test_add(): assert 0", "never call test_add, which is async"),
    ("def test_add():\n    yield\n    assert 0", "test_add returns a value"),
    ("def test_add(): return add(1, 2) == 4", "test_add returns a value"),
    ("import no_such_module", "No module named 'no_such_module'"),
    ("from solution import add as plus\nassert plus(1, 2) == 3", "No module named 'solution'"),
]


def test_what_cannot_be_scored_is_told():
    rows = [
        ("def add(a, b):\n    while True: pass", ADD, "no result within 8 s"),
        ("import os, signal\nos.kill(os.getppid(), 9)", ADD, "the scorer's process died"),
        (RIGHT, "assert add(1,", "SyntaxError: "),
        (RIGHT, "def check(f):\n    assert f(1, 2) == 3", "the tests in the answer call nothing"),
        (RIGHT, "assert add(print, 2) == 3", "the tests in the answer give the response a builtin"),
        (RIGHT, "assert add(add, 2) == 3", "the tests in the answer give the response a Function"),
        (RIGHT, "1 / 0\n{response}\n" + ADD, "ZeroDivisionError: "),
        *((RIGHT, f"add(0, 0)\n{tests}", reason) for tests, reason in NEVER_RUN),
    ]
    responses, tests, reasons = zip(*rows)
    with RewardPool("code", **LIMITS | {"timeout": 8.0}) as pool:
        scores = score(pool, responses, tests)
    assert scores.failed.all()
    np.testing.assert_array_equal(scores.rewards, 0)
    for reason, words in zip(scores.reasons, reasons):
        assert words in reason
