"""Prompts as data has them: what is left out, what is refused, what counts as the same."""

import datetime
import re

import pytest
from small_runs import line_of

from specrl_jax.data.messages import asks, canonical, read_prompt, with_instruction

USER = {"role": "user", "content": "2 + 2?"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}


def test_keys_of_nulls_are_left_out_at_any_depth():
    """As Arrow returns rows: every message has the keys of all, every call those of all."""
    function = {"name": "add", "arguments": {"a": 2, "b": 2, "c": None}}
    calls = [{"type": "function", "id": None, "function": function}]
    given = [
        USER | {"tool_calls": None, "extra": {"x": None, "y": [None, {"z": None}]}},
        {"role": "assistant", "content": "I add.", "tool_calls": calls, "name": None},
        {"role": "tool", "content": "4", "tool_calls": None},
    ]
    assert read_prompt(given) == (
        USER | {"extra": {"y": [None, {}]}},
        {"role": "assistant", "content": "I add.", "tool_calls": [CALL]},
        {"role": "tool", "content": "4"},
    )
    assert given[0]["tool_calls"] is None  # the row stays what it is


def test_a_call_of_a_tool_needs_no_content():
    """Templates ask whether it is None."""
    call = {"role": "assistant", "tool_calls": [CALL]}
    tool = {"role": "tool", "content": ""}
    for given in (call, call | {"content": None}):
        prompt = read_prompt([USER, given, tool])
        assert prompt == (USER, call | {"content": None}, tool)
        assert asks(prompt)  # though the tool said nothing


@pytest.mark.parametrize("blank", ["", " \n\t"])
def test_an_empty_last_message_of_the_assistant_is_a_generation_prompt(blank):
    empty = {"role": "assistant", "content": blank}
    assert read_prompt([USER, empty]) == (USER,)
    assert read_prompt([USER, empty, empty | {"name": "bot"}]) == (USER,)
    begun = {"role": "assistant", "content": "It is"}
    assert read_prompt([USER, empty, begun]) == (USER, empty, begun)
    assert read_prompt([USER, {"role": "assistant", "content": None}]) == (USER,)
    assert read_prompt([USER, {"role": "assistant"}]) == (USER,)
    assert not asks(read_prompt([empty]))
    assert not asks(read_prompt([USER | {"content": blank}, empty]))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], r"must be text or a list of messages with role and content, got '\[\]'"),
        ([{"role": "assistant", "content": None}, USER], "must be text or a list of messages"),
        ([{"role": "user", "tool_calls": [CALL]}], "must be text or a list of messages"),
        ([{"content": "2 + 2?"}], "must be text or a list of messages"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "with tool_calls$"),
        ([USER, {"role": "assistant", "content": "", "thinking": "So"}], "with thinking$"),
        ([USER | {"extra": ["\ud800"]}], "must be text that UTF-8 can encode"),
    ],
)
def test_what_is_no_prompt(prompt, message):
    assert re.search(f"^data.prompt_field .*{message}", line_of(read_prompt, prompt))


def test_what_json_cannot_write_becomes_text():
    given = [USER | {"asked": datetime.date(2025, 1, 2)}]
    assert read_prompt(given) == (USER | {"asked": "2025-01-02"},)


def test_prompts_that_ask_the_same():
    assert canonical("2 + 2?") == canonical((USER,)) == canonical(({**reversed_keys(USER)},))
    other = ("2 + 3?", (USER, USER), (USER | {"role": "system"},), (USER | {"name": "a"},))
    assert canonical("2 + 2?") not in map(canonical, other)


def reversed_keys(message):
    return dict(reversed(message.items()))


def test_an_instruction_goes_into_the_last_message_that_is_not_the_assistants():
    begun = {"role": "assistant", "content": "It is"}
    asked = USER | {"content": "2 + 2? Be brief."}
    assert with_instruction((USER, begun), " Be brief.") == (asked, begun)
    assert with_instruction("2 + 2?", "Q: {prompt}\nA:") == "Q: 2 + 2?\nA:"
