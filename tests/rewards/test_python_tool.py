"""Tool `python`: calls by hand, and episodes in their processes."""

import pytest
from small_runs import line_of, play

from specrl_jax.rewards.environment_pool import EnvironmentPool
from specrl_jax.rewards.python_tool import MAX_OUTPUT, PythonTool, find_call, read_call

JSON_CALL = '{"name": "python", "arguments": {"code": "1 +\\n1"}}'


@pytest.mark.parametrize(
    ("response", "call"),
    [
        ("so <tool_call>\n1+1\n</tool_call>\n", "1+1"),
        ("<tool_call>1</tool_call> and <tool_call>2</tool_call>", "2"),
        ("<tool_call>1+1", "1+1"),
        ("<tool_call></tool_call>", ""),
        ("<tool_call>1</tool_call> is 1", None),
        ("1</tool_call>", None),
        ("", None),
    ],
)
def test_a_call_ends_the_response(response, call):
    assert find_call(response) == call


def test_a_call_is_code_or_names_the_tool():
    assert read_call(JSON_CALL) == "1 +\n1"
    for code in ("1+1", '{"a": 1}', "12", "[" * 100_000, "{'name': 1}"):
        assert read_call(code) == code
    for call in (JSON_CALL.replace("python", "search"), '{"name": "python", "arguments": "1"}'):
        assert line_of(read_call, call).startswith("a call is <tool_call>CODE</tool_call>, or has")


@pytest.mark.parametrize(
    ("response", "problem", "reward"),
    [
        (" Paris\n", {"answer": "Paris"}, 1.0),
        ("Rome", {"answer": "Paris"}, 0.0),
        ("It is 1/2.", {"answer": "0.5"}, 1.0),
        ("It is 2.", {"answer": "0.5"}, 0.0),
    ],
)
def test_a_final_answer(response, problem, reward):
    assert play(PythonTool, [response], **problem) == ("", reward, True)


def test_a_final_answer_has_part_of_the_credit_that_reasoning_gyms_own_scorer_gives():
    pytest.importorskip("reasoning_gym", reason="needs pip install -e '.[tasks]'")
    item = {"answer": "7", "metadata": {"source_dataset": "chain_sum"}}
    played = play(PythonTool, ["it is 7"], "7", task="chain_sum", metadata=item)
    assert played == ("", 1 / 7, True)


ANSWER = "lapis lazuli"  # no number: the search below would find it in addresses of objects
SEARCH = f"any({ANSWER!r} in str(o) for o in gc.get_objects() if type(o) is dict)"
CUT = "a" * MAX_OUTPUT + "...\n"
# Calls of an episode in their order, and what each is answered.
CALLS = {
    "print('x')\nx = 6 * 7\nx": "x\n42\n",
    "_ + 1": "43\n",
    "x = 5": "",
    "def f(n):\n    return n * x\nf(2)": "10\n",
    "None": "",
    "": "",
    "1 / 0": "ZeroDivisionError: division by zero\n",
    "print(1); y": "1\nNameError: name 'y' is not defined\n",
    "1 +": "SyntaxError: invalid syntax (the call, line 1)\n",
    "raise ValueError('two\\nlines')": "lines\n",
    "assert False": "AssertionError\n",
    "exit(3)": "NameError: name 'exit' is not defined\n",
    "import sys; sys.exit(3)": "SystemExit: 3\n",
    "print('a' * 5_000)": CUT,
    "len('a' * 10**9)": "MemoryError\n",
    "_, len(str(7**9999))": "(10, 8451)\n",
    "'é\\ud800'": "'é\\ud800'\n",
    "import socket; socket.socket()": "PermissionError: [Errno 1] Operation not permitted\n",
    f"import gc; {SEARCH}": "False\n",
    f"held = {{'x': {ANSWER!r}}}; {SEARCH}": "True\n",
    "import os; open(f'/proc/{os.getppid()}/mem', 'rb')": "PermissionError: [Errno 13] ",
    "open('kept', 'w').write('1'); os.listdir()": "['kept']\n",
    "open(os.path.expanduser('~/../x'), 'w')": "PermissionError: [Errno 13] ",
    "float(open('kept').read())": "1.0\n",
}


def test_an_episode_of_calls_in_its_own_process():
    """Each call sees what the calls before it have left, and nothing of the answer."""
    with EnvironmentPool("python", timeout=8.0, memory_mib=256, workers=1) as pool:
        episodes = pool.begin([(ANSWER, "", {})] * 2)
        for code, output in CALLS.items():
            pool.submit(episodes[:1], [f"<tool_call>{code}</tool_call>"])
            (answer,) = pool.collect(episodes[:1]).values()
            assert answer.observation.startswith(output), (code, answer)
            assert output.endswith(" ") or answer.observation == output
            assert (answer.role, answer.done, answer.failure) == ("tool", False, "")
        last = [ANSWER, "<tool_call>x</tool_call>"]
        pool.submit(episodes, last)
        done, other = pool.collect(episodes).values()
        assert (done.reward, done.done) == (1.0, True)
        assert other.observation == "NameError: name 'x' is not defined\n"
        pool.submit(episodes[1:], ["<tool_call>import os; os._exit(0)</tool_call>"])
        (ended,) = pool.collect(episodes[1:]).values()
    assert (ended.reward, ended.done) == (0.0, True)
    assert "the process of the response has ended" in ended.failure


def test_a_policy_reads_that_python_was_restarted_and_may_go_on():
    limits = {"timeout": 1.0, "memory_mib": 256, "workers": 1}
    calls = (
        "x = 5",
        "open('kept', 'w').write('1')",
        "while True: pass",
        "x",
        "import os; os.listdir()",
    )
    said = []
    with EnvironmentPool("python", on_timeout="tell", **limits) as pool:
        episodes = pool.begin([("7", "", {})])
        for text in (*(f"<tool_call>{call}</tool_call>" for call in calls), "7"):
            pool.submit(episodes, [text])
            (answer,) = pool.collect(episodes).values()
            assert (answer.failure, answer.role) == ("", "tool")
            said.append(answer.observation)
    late = "TimeoutError: no answer within 1 s of CPU time; "
    late += "Python was restarted: names and files are gone\n"
    assert said == ["", "1\n", late, "NameError: name 'x' is not defined\n", "[]\n", ""]
    assert (answer.reward, answer.done) == (1.0, True)
