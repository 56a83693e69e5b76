"""Programs with standard input, and functions that are called, in the response's process."""

import json

import numpy as np
import pytest
from code_answers import ANY, LIMITS, REPORT, RIGHT
from worker_pools import score

from specrl_jax.rewards.pool import RewardPool


@pytest.fixture(scope="module")
def pool():
    with RewardPool("code", **LIMITS) as pool:
        yield pool


SUMS = json.dumps({"inputs": ["1 2\n", "30\n4"], "outputs": ["3\n", ["34", ""]]})
READ = "import sys\na, b = map(int, sys.stdin.read().split())\n"


@pytest.mark.parametrize(
    ("program", "reward"),
    [
        ("print(sum(map(int, open(0).read().split())))", 1),
        (READ + "def main():\n    print(a + b)\nif __name__ == '__main__':\n    main()", 1),
        (READ + "print(f' {a + b}  \\n\\n')", 1),
        (READ + "import os\nos.write(1, b'%d' % (a + b))\nos._exit(0)", 1),
        (READ + "print(a + b)\nexit()", 1),
        (READ + "from threading import Thread\nThread(target=lambda: print(a + b)).start()", 1),
        (READ + "import atexit\natexit.register(lambda: print(a + b))", 1),
        (READ + "import io\nsys.stdout = io.StringIO()\nprint(a + b)\n"
                "sys.__stdout__.write(sys.stdout.getvalue())", 1),
        (READ + "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int\n"
                "print(A(a + b).x)", 1),
        ("Try:\n```python\nprint(sum(map(int, open(0).read().split())))\n```\nIt gives\n"
         "```\n3\n```\nIn short:\n```python\ndef add(a, b):\n    return a + b\n```", 1),
        (READ + "print(a + b)\nsys.exit(1)", 0),
        (READ + "print(a + b)\n1 / 0", 0),
        (READ + "print(a, b)", 0),
        (READ + "print(3)", 0),  # of the first input
        (READ + "print('', a + b, sep='\\n', end='\\n.')", 0),
        (READ + "def main():\n    print(a + b)", 0),
        ("def add(a, b):\n    return a + b", 0),
        ("import sys\nsys.exit(0)", 0),
        ("import os\nos._exit(0)", 0),
        ("import os\nos.kill(os.getppid(), 9)", 0),
        ("print(", 0),
        ("", 0),
        (REPORT, 0),
        # A run leaves nothing to the next one.
        ("import builtins\nbuiltins.n = getattr(builtins, 'n', 0) + 1\nprint([0, 3, 34][n])", 0),
    ],
)  # fmt: skip
def test_programs(pool, program, reward):
    scores = score(pool, [program], [SUMS])
    assert scores.reasons == ("",)
    np.testing.assert_array_equal(scores.rewards, [reward])


def test_a_program_has_the_limits_of_an_answer():
    programs = [READ + f"x = bytearray({n} << 20)\nprint(a + b)" for n in (300, 520)]
    with RewardPool("code", **LIMITS | {"timeout": 8.0}) as pool:
        hangs = READ + "while b == 4: pass\nprint(a + b)"
        scores = score(pool, [*programs, hangs], [SUMS] * 3)
    np.testing.assert_array_equal(scores.rewards, [1, 0, 0])
    assert scores.reasons == ("", "", "no result within 8 s of CPU time")


LEETCODE = """
class Solution:
    def __init__(self): self.calls = 0
    def pairs(self, xs: List[int]) -> List[Tuple[int, int]]:
        self.calls += 1
        return [(x, n) for x, n in sorted(Counter(xs).items()) if pow(x, 1, 100) == x]
"""
APPS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]})
TWICE = {"input": "[2, 1, 2]", "output": "[[1, 1], [2, 2]]", "testtype": "functional"}


@pytest.mark.parametrize(
    ("response", "answer", "metadata", "reward"),
    [
        (RIGHT, APPS, {}, 1),
        ("class Solution:\n    def add(self, a, b): return a + b", APPS, {}, 1),
        ("class Solution: pass\n" + RIGHT, APPS, {}, 1),
        (RIGHT.replace("+", "-"), APPS, {}, 0),
        ("def add(a, b): raise SystemExit", APPS, {}, 0),
        ("def add(a, b):\n    import os\n    os._exit(0)", APPS, {}, 0),
        ("def add(a, b): return {a}", APPS, {}, 0),
        (ANY.format(base="object", value="Any()"), APPS, {}, 0),
        (ANY.format(base="int", value="Any(3)"), APPS, {}, 0),
        (LEETCODE, json.dumps([TWICE, TWICE]), {"metadata": '{"func_name": "pairs"}'}, 1),
        (LEETCODE, json.dumps([TWICE | {"metadata": {"func_name": "pairs"}}]), {}, 1),
        (LEETCODE, json.dumps([TWICE | {"fn_name": "pairs", "output": "[]"}]), {}, 0),
        ("", json.dumps({"fn_name": "gcd", "inputs": ["4\n6"], "outputs": ["2"]}), {}, 0),
        (RIGHT, json.dumps(["assert add(1, 2) == 3", "assert add(0, 1) == 1"]), {}, 1),
        (RIGHT, json.dumps(["assert add(1, 2) == 3", "assert add(0, 1) == 2"]), {}, 0),
        (
            RIGHT,
            '["assert math.isclose(add(1, 2), three)"]',
            {"test_imports": ["import math"], "test_setup_code": "three = 3"},
            1,
        ),
    ],
)
def test_functions(pool, response, answer, metadata, reward):
    scores = score(pool, [response], [answer], metadatas=[metadata])
    assert scores.reasons == ("",)
    np.testing.assert_array_equal(scores.rewards, [reward])
