"""Calls of tools in a response: tags, fences, indentation, JSON right and wrong, mentions."""

import json
import time

import pytest

from specrl_jax.agents.tool_calls import (
    BEGIN,
    END,
    Call,
    CallError,
    clean_code,
    find_calls,
    read_call,
    read_calls,
)

FORM = '{"name": .., "arguments": {..}}'
CALL = '{"name": "run", "arguments": {"code": "1+1"}}'
READ = Call("run", {"code": "1+1"})


def between_tags(*texts):
    return "".join(f"{BEGIN}{text}{END}" for text in texts)


# Responses, and what is between the tags of their calls.
FOUND = [
    ("", []),
    ("1+1", []),
    (between_tags("1+1"), ["1+1"]),
    (f"so {between_tags('1+1')} then", ["1+1"]),
    (f"{between_tags('1', '2')} and {between_tags('3')}", ["1", "2", "3"]),
    (between_tags(""), [""]),
    (between_tags("\nx = 1\nx\n"), ["\nx = 1\nx\n"]),
    # Tags in strings of code and of JSON, and in comments.
    (between_tags(f"print('{BEGIN}')"), [f"print('{BEGIN}')"]),
    (between_tags(f"print('{END}')"), [f"print('{END}')"]),
    (between_tags(f"print('{BEGIN}x{END}')"), [f"print('{BEGIN}x{END}')"]),
    (between_tags(f"a = '{END}'", f"b = '{BEGIN}'"), [f"a = '{END}'", f"b = '{BEGIN}'"]),
    (between_tags(f"# {BEGIN}\n1"), [f"# {BEGIN}\n1"]),
    (between_tags(f'{{"name": "{END}"}}'), [f'{{"name": "{END}"}}']),
    (between_tags(f"```\nprint('{END}')\n```"), [f"```\nprint('{END}')\n```"]),
    # A mention is text: without an end, in quotes, before a call, after one.
    (f"I may use {BEGIN}.", []),
    (f"{BEGIN}1+1", []),
    (BEGIN, []),
    (f"1+1{END}", []),
    (f"{END}1+1{BEGIN}", []),
    (f"A call is between `{BEGIN}` and `{END}`.", []),
    (f"A call is between \"{BEGIN}\" and '{END}'.", []),
    (f"I may use {BEGIN} here. {between_tags('1+1')}", ["1+1"]),
    (f"I use {BEGIN} now {between_tags('1+1')}", ["1+1"]),
    (f"`{BEGIN}` it is. {between_tags('1+1')}", ["1+1"]),
    (f"{between_tags('1+1')} by {BEGIN}.", ["1+1"]),
    (f"{between_tags('1+1')} or {BEGIN}2", ["1+1"]),
    # What is broken is a call, and none beside it is lost.
    (between_tags("1 +", "2"), ["1 +", "2"]),
    (between_tags('{"name": "run"', CALL), ['{"name": "run"', CALL]),
    (between_tags(CALL, "{"), [CALL, "{"]),
    (between_tags("print('", "2"), ["print('", "2"]),
    (f"{BEGIN}1+1{BEGIN}2{END}", ["2"]),
    (between_tags("no words of a language"), ["no words of a language"]),
    # Other tags.
    ("<TOOL_CALL>1</TOOL_CALL>", []),
    ("<tool_calls>1</tool_calls>", []),
    (f"```\n{between_tags(CALL)}\n```", [CALL]),
]


@pytest.mark.parametrize(("response", "texts"), FOUND)
def test_where_calls_are(response, texts):
    around, found = find_calls(response)
    assert found == texts
    left = response
    for text in texts:
        left = left.replace(f"{BEGIN}{text}{END}", "", 1)
    assert around == left


CODE = "if 1:\n    print('x')"
CLEAN = [
    ("1+1", "1+1"),
    ("", ""),
    (" \n 1+1 \n\n", "1+1"),
    (f"\n{CODE}\n", CODE),
    ("    x = 1\n    x", "x = 1\nx"),
    ("\n\tif 1:\n\t\tx\n", "if 1:\n\tx"),
    ("if 1:\n  '''\n a'''", "if 1:\n  '''\n a'''"),
    ("'''a\n  \nb'''", "'''a\n  \nb'''"),
    ("```\n'''a\n  \n\x0bb\u2028c'''\n```", "'''a\n  \n\x0bb\u2028c'''"),
    (f"```python\n{CODE}\n```", CODE),
    (f"```py\n{CODE}\n```\n", CODE),
    (f"```\n{CODE}\n```", CODE),
    (f"```js\n{CODE}\n```", CODE),
    (f"~~~\n{CODE}\n~~~", CODE),
    (f"~~~python3\n{CODE}\n~~~~", CODE),
    (f"````\n{CODE}\n````", CODE),
    (f"```python\n{CODE}", CODE),
    (f"```python\n{CODE}```", CODE),
    (f"```python\r\n{CODE}\r\n```", CODE),
    ("  ```python\n  x = 1\n  x\n  ```", "x = 1\nx"),
    ("```python\n    x = 1\n    x\n```", "x = 1\nx"),
    ("```\nx = 1\n```\nthen\n```\nx\n```", "x = 1\nx"),
    ("```python x = 1\nx\n```", "x = 1\nx"),
    ("```python 1+1```", "1+1"),
    ("```1+1```", "1+1"),
    ("~~~1+1~~~", "1+1"),
    ("`1+1`", "1+1"),
    ("```json\n{}\n```", "{}"),
    ("```python\nprint('```')\n```", "print('```')"),
    ("x = '```'", "x = '```'"),
    ("~x", "~x"),
    ("`", "`"),
    ("```", ""),
    ("```\n```", ""),
    ("pythonic = 1", "pythonic = 1"),
    ("```pythonic(1)```", "pythonic(1)"),
]


@pytest.mark.parametrize(("text", "code"), CLEAN)
def test_fences_and_indentation_go(text, code):
    assert clean_code(text) == code


ARGUMENTS = '{"code": "1+1"}'
# Calls in JSON that a tool of code and others read alike.
RIGHT = [
    CALL,
    f"\n{CALL}\n",
    f"    {CALL}",
    f"```json\n{CALL}\n```",
    f"~~~\n{CALL}\n~~~",
    f"`{CALL}`",
    json.dumps({"name": "run", "arguments": ARGUMENTS}),
    json.dumps({"name": "run", "arguments": f"```json\n{ARGUMENTS}\n```"}),
    json.dumps({"name": "run", "arguments": f" {ARGUMENTS} "}),
    json.dumps({"name": "run", "parameters": {"code": "1+1"}}),
    json.dumps({"arguments": {"code": "1+1"}, "id": 7, "name": "run"}, indent=2),
    f"[{CALL}]",
]


@pytest.mark.parametrize("text", RIGHT)
def test_json_in_all_its_forms(text):
    assert read_call(text) == read_call(text, "run") == [READ]


def test_what_json_leaves_out_and_how_many_calls_it_has():
    none = [Call("run", {})]
    for arguments in ("", ', "arguments": null', ', "arguments": ""', ', "arguments": {}'):
        assert read_call(f'{{"name": "run"{arguments}}}') == none
    for text in (f"[{CALL}, {CALL}]", f"{CALL}\n{CALL}", f"{CALL}, {CALL}", f"{CALL}{CALL}"):
        assert read_call(text) == read_call(text, "run") == [READ, READ]
    lines = '{"name": "run", "arguments": {"code": "x = 1\n\tx"}}'
    assert read_call(lines) == [Call("run", {"code": "x = 1\n\tx"})]


# Calls in JSON that neither can read, and what the policy is told.
WRONG = [
    ('{"name": "run", "arguments": {"code": "1+1"}', f"a call must be JSON, {FORM}: Expecting ','"),
    ('{"name": "run", "arguments": {"code": "1+1}}', f"a call must be JSON, {FORM}: Unterminated"),
    (f"{CALL} please", f"a call must be JSON, {FORM}: Extra data: line 1 column 47"),
    ("{'name': 'run', 'arguments': {'code': '1'}}", f"a call must be JSON, {FORM}: Expecting prop"),
    ('{"name": run}', f"a call must be JSON, {FORM}: Expecting value: line 1 column 10"),
    ("{}", f'a call must have the "name" of a tool, {FORM}, got {{}}'),
    ('{"a": 1}', f'a call must have the "name" of a tool, {FORM}, got {{"a": 1}}'),
    ('{"name": 3}', f'a call must have the "name" of a tool, {FORM}, got {{"name": 3}}'),
    ('{"name": ""}', f'a call must have the "name" of a tool, {FORM}, got {{"name": ""}}'),
    ('{"name": "run", "arguments": 3}', f'"arguments" must be a JSON object, {FORM}, got 3'),
    ('{"name": "run", "arguments": [1]}', f'"arguments" must be a JSON object, {FORM}, got [1]'),
    ('{"name": "run", "arguments": "1+1"}', f'"arguments" must be a JSON object, {FORM}, got "1+1'),
    ('{"name": "run", "arguments": "[1]"}', f'"arguments" must be a JSON object, {FORM}, got [1]'),
    ('[{"a": 1}]', f'a call must have the "name" of a tool, {FORM}, got {{"a": 1}}'),
]


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_a_wrong_call_says_why(text, reason):
    for tool in ("", "run"):
        (error,) = read_call(text, tool)
        assert isinstance(error, CallError)
        assert error.reason.startswith(reason)
        assert "\n" not in error.reason


# What is no call in JSON: the policy is told so, unless a tool of code runs it.
NO_OBJECTS = [
    ("null", f"a call must be a JSON object, {FORM}, got null"),
    ("42", f"a call must be a JSON object, {FORM}, got 42"),
    ("true", f"a call must be a JSON object, {FORM}, got true"),
    ('"x"', f'a call must be a JSON object, {FORM}, got "x"'),
    ("[]", f"a call must be a JSON object, {FORM}, got []"),
    ("[1]", f"a call must be a JSON object, {FORM}, got 1"),
    ("", f"a call must be {FORM}, got nothing"),
    ("print(1)", f"a call must be JSON, {FORM}: Expecting value: line 1 column 1 (char 0)"),
    ("{'name': 1}", f"a call must be JSON, {FORM}: Expecting property name"),
    ("{1, 2}", f"a call must be JSON, {FORM}: Expecting property name"),
    ("[" * 100_000, f"a call must be JSON, {FORM}: "),
]


@pytest.mark.parametrize(("text", "reason"), NO_OBJECTS, ids=[text[:9] for text, _ in NO_OBJECTS])
def test_what_is_no_object_is_code_or_an_error(text, reason):
    (error,) = read_call(text)
    assert isinstance(error, CallError)
    assert error.reason.startswith(reason)
    assert read_call(text, "run") == [Call("run", {"code": text})]


def test_errors_have_the_place_of_their_calls():
    response = between_tags(CALL, "{", f"[{CALL}, 3]", CALL)
    for tool in ("", "run"):
        calls = read_calls(response, tool)
        assert [calls[i] for i in (0, 2, 4)] == [READ] * 3
        assert calls[3] == CallError(f"a call must be a JSON object, {FORM}, got 3")
    assert isinstance(read_calls(response)[1], CallError)
    assert read_calls(response, "run")[1] == Call("run", {"code": "{"})
    assert read_calls(f"I may use {BEGIN}.") == []


def test_a_long_value_is_shown_by_its_beginning():
    (error,) = read_call(json.dumps({"text": "a" * 10_000}))
    assert error.reason.endswith("a" * 50 + "...")
    assert len(error.reason) < 150


LONG = [
    BEGIN * 2_000 + END * 8,
    f"{BEGIN}x=1\n" * 2_000 + END * 8,
    f"{BEGIN}(" * 2_000 + END * 20,
    between_tags(*"1" * 2_000),
    between_tags(*["1 +"] * 500),
    between_tags("```" * 7_000),
    between_tags("`" * 20_000),
    between_tags("~~~\n" * 5_000),
    between_tags(" " * 20_000 + "x"),
    between_tags("{" * 20_000),
    between_tags("[{" * 10_000),
    between_tags("-" * 20_000 + "1"),
    between_tags("1+" * 10_000 + "1"),
    between_tags("not " * 5_000 + "1"),
    between_tags("lambda:" * 3_000 + "1"),
    between_tags("x" + ".y" * 10_000),
    between_tags("1,\ud800\0"),
]


@pytest.mark.parametrize("response", LONG, ids=range(len(LONG)))
def test_no_response_takes_long_to_read(response):
    """In CPU seconds: a response of 20,000 characters, where nothing is quadratic."""
    before = time.process_time()
    assert len(read_calls(response, "run")) > 0
    assert len(read_calls(response)) > 0
    assert time.process_time() - before < 4
