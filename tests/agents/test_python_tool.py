"""Tool `python`: calls by hand, and episodes in their processes."""

import json

import pytest
from small_runs import play

from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.agents.python_tool import MAX_OUTPUT, PythonTool

USAGE = (
    'a call is <tool_call>CODE</tool_call>, or has "name": "python", "arguments": {"code": CODE}\n'
)
FORM = '{"name": .., "arguments": {..}}'


def call(code):
    return f"<tool_call>{code}</tool_call>"


def json_call(arguments, name="python"):
    return call(json.dumps({"name": name, "arguments": arguments}))


# Turns of an episode in their order, and what each is answered.
TURNS = [
    (call("x = 6\nx") + call("x + 1") + " and " + call("_ * 2"), "6\n7\n14\n"),
    (call("print('<tool_call>')"), "<tool_call>\n"),
    (call("print('</tool_call>')"), "</tool_call>\n"),
    (call("```python\nprint(1)\n```") + call("~~~\n2\n~~~") + call("`3`"), "1\n2\n3\n"),
    (call("\n    y = 2\n    y\n"), "2\n"),
    (json_call({"code": "1 +\\\n1"}) + json_call('{"code": "3"}'), "2\n3\n"),
    (json_call('```json\n{"code": "4"}\n```') + json_call({"code": "```\n5\n```"}), "4\n5\n"),
    (call(f"[{json_call({'code': '6'})[11:-12]}, {json_call({'code': '7'})[11:-12]}]"), "6\n7\n"),
    (call("1 +") + call("8"), "SyntaxError: invalid syntax (the call, line 1)\n8\n"),
    (call("null"), "NameError: name 'null' is not defined\n"),
    (call("42") + call("[1]") + call("{'name': 1}"), "42\n[1]\n{'name': 1}\n"),
    (
        call('{"name": "python"') + call("9"),
        f"error: a call must be JSON, {FORM}: Expecting ',' delimiter: line 1 column 18 (char 17); "
        f"{USAGE}9\n",
    ),
    (call("{}"), f'error: a call must have the "name" of a tool, {FORM}, got {{}}; {USAGE}'),
    (json_call({"code": "1"}, "search") + call("10"), f"error: {USAGE}10\n"),
    (json_call({"code": 1}), f"error: {USAGE}"),
    (json_call({}), f"error: {USAGE}"),
    (json_call("1"), f'error: "arguments" must be a JSON object, {FORM}, got 1; {USAGE}'),
    (call(""), ""),
    (call("11") + " is eleven, by <tool_call>", "11\n"),
    ("I use <tool_call> as " + call("12"), "12\n"),
]


def test_all_calls_of_a_turn_are_answered_in_order():
    end = "The tags `<tool_call>` and <tool_call> are no call. It is 7."
    with EnvironmentPool("python", timeout=20.0, memory_mib=256, workers=1) as pool:
        episodes = pool.start([("7", "", {})])
        for response, output in [*TURNS, (end, "")]:
            pool.submit(episodes, [response])
            (answer,) = pool.collect(episodes).values()
            assert (answer.observation, answer.failure) == (output, ""), response
            assert answer.done == (response == end)
    assert (answer.reward, answer.role) == (1.0, "tool")


@pytest.mark.parametrize("response", ["<tool_call> 7", "7 <tool_call>", "7", "7 </tool_call>"])
def test_a_turn_without_a_call_is_the_final_answer(response):
    (observation, reward, done) = play(PythonTool, [response], "7")
    assert (observation, reward, done) == ("", 1.0, True)


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
        episodes = pool.start([(ANSWER, "", {})] * 2)
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
        episodes = pool.start([("7", "", {})])
        for text in (*(f"<tool_call>{call}</tool_call>" for call in calls), "7"):
            pool.submit(episodes, [text])
            (answer,) = pool.collect(episodes).values()
            assert (answer.failure, answer.role) == ("", "tool")
            said.append(answer.observation)
    late = "TimeoutError: no answer within 1 s of CPU time; "
    late += "Python was restarted: names and files are gone\n"
    assert said == ["", "1\n", late, "NameError: name 'x' is not defined\n", "[]\n", ""]
    assert (answer.reward, answer.done) == (1.0, True)
