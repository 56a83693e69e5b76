"""Chats of several turns: a row's ids are those of the whole chat as transformers writes it.

Templates are those of Qwen 3, Llama 3.1 and Gemma 3, without their parts for calls, system messages
and images.
"""

import pytest
from test_control_tokens import FAMILIES, write_tokenizer

from specrl_jax.text.chat_template import changed_turns
from specrl_jax.text.tokenizer import CharacterTokenizer, HuggingFaceTokenizer

QWEN3 = """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501
GEMMA3 = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == "assistant" else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""
IM = ["<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
# Templates, special tokens and others, the start and the end.
FORMATS = {
    "chatml": FAMILIES["chatml"],
    "qwen3": (QWEN3, [*IM, "<|endoftext|>"], TAGS, None, IM[1]),
    "llama3.1": FAMILIES["llama3"],
    "gemma3": (GEMMA3, ["<bos>", "<start_of_turn>", "<end_of_turn>"], [], "<bos>", "<end_of_turn>"),
}
BLANKS = "blanks at the ends of a turn"
THOUGHT = "a thought in <think>"
TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# What each format changes, and before which roles.
CHANGED = {
    "chatml": [],
    "qwen3": [(THOUGHT, "user")],
    "llama3.1": [(BLANKS, "tool"), (BLANKS, "user")],
    "gemma3": [(BLANKS, "user")],
}


@pytest.fixture(scope="module", params=FORMATS)
def chat(request, tmp_path_factory):
    """(name of a format, its tokenizer)."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tokenizer(folder, *FORMATS[request.param])
    return request.param, HuggingFaceTokenizer(folder, chat=True)


@pytest.mark.parametrize("has_end", [True, False])
def test_rows_of_turns_are_the_whole_chat_of_transformers(chat, has_end):
    """Turns that end with their token, or with a string and no token."""
    name, tokenizer = chat
    call = "<tool_call>1+1</tool_call>"
    said = [(call, "tool", "2\n"), ("It is 2.", "user", " Sure?\n"), (call, "tool", '"é"\n\n')]
    said.append(("Yes.", "user", "<think>No.</think> Why?"))
    messages = [{"role": "user", "content": "What is 1+1?"}]
    row = tokenizer.encode_prompt(tuple(messages))
    for turn, role, answer in said:
        row += tokenizer.encode(turn)
        if has_end:
            row.append(tokenizer.end_id)
        row += tokenizer.encode_turn(answer, has_end, role)
        role = "user" if name == "gemma3" else role
        messages += [{"role": "assistant", "content": turn}, {"role": role, "content": answer}]
        theirs = tokenizer._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert row == theirs["input_ids"]
    written = tokenizer.decode(row, keep_special=True)
    roles = {"qwen3": "<|im_start|>user\n<tool_response>\n2", "gemma3": "<start_of_turn>user\n2"}
    roles |= {"llama3.1": '<|start_header_id|>ipython<|end_header_id|>\n\n"2\\n"'}
    assert roles.get(name, "<|im_start|>tool\n2") in written


def test_turns_that_a_template_changes_are_named_in_one_line(chat):
    name, tokenizer = chat
    line = changed_turns(tokenizer, "it", TAGS)
    assert "\n" not in line
    for kind in ("a plain turn", BLANKS, THOUGHT):
        for role in ("tool", "user"):
            named = f"{kind}, before the role {role}, " in line
            assert named == ((kind, role) in CHANGED[name]), (line, kind, role)
    assert bool(line) == bool(CHANGED[name])


def test_thoughts_in_other_tags_that_a_template_drops_are_named(tmp_path):
    template, *rest = FORMATS["qwen3"]
    for tag, other in (("<think>", "[THINK]"), ("</think>", "[/THINK]")):
        template = template.replace(tag, other)
    write_tokenizer(tmp_path, template, *rest)
    tokenizer = HuggingFaceTokenizer(tmp_path, chat=True)
    line = changed_turns(tokenizer, "it", TAGS)
    assert "a thought in [THINK], before the role user, " in line
    assert THOUGHT not in line
    assert "[THINK]" not in changed_turns(tokenizer, "it", TAGS[:1])


def test_where_they_are_changed(tmp_path):
    """Qwen 3 without thoughts starts each turn with an empty one, and forgets it."""
    write_tokenizer(tmp_path, *FORMATS["qwen3"])
    options = {"template_options": {"enable_thinking": False}}
    line = changed_turns(HuggingFaceTokenizer(tmp_path, chat=True, **options), "it", TAGS)
    change = "'t\\n<think>\\n\\n</think>\\n\\n' becomes 't\\na<|im_end|>"
    assert f"a plain turn, before the role tool, {change}" in line
    assert changed_turns(HuggingFaceTokenizer(tmp_path, chat=False), "it", TAGS) == ""
    assert changed_turns(CharacterTokenizer("ab"), "it", TAGS) == ""


def test_an_end_that_is_no_token(tmp_path):
    """A row has the policy's own end, and the chat has none."""
    template = FORMATS["chatml"][0].replace("<|im_end|>", "")
    write_tokenizer(tmp_path, template, *FORMATS["chatml"][1:])
    line = changed_turns(HuggingFaceTokenizer(tmp_path, chat=True), "it", TAGS)
    assert "a plain turn, before the role user" in line
