"""Prompts in data format: text, or chat messages {"role": ..., "content": ..., ...}."""

import json
from typing import Any

from specrl_jax.inputs import jsonable, one_line
from specrl_jax.text.chat_template import Messages

# What an assistant's message may have besides its content.
_SAID = ("tool_calls", "reasoning_content", "reasoning", "thinking")


def read_prompt(value: Any) -> str | Messages:
    """Return the prompt from a row or a user's function.

    Drops keys that are null, and a final assistant message without content, as the chat template
    starts its turn. Raises a one-line ValueError if it is not a prompt.
    """
    if isinstance(value, str):
        check_text("data.prompt_field", value)
        return value
    messages = _without_nulls(jsonable(list(value))) if isinstance(value, list | tuple) else []
    for message in messages:
        if isinstance(message, dict) and _calls_tools(message):
            message.setdefault("content", None)  # templates expect it next to calls
    if messages and isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant":
        messages[-1].setdefault("content", "")
    if not messages or not all(map(_is_message, messages)):
        raise ValueError(
            "data.prompt_field must be text or a list of messages with role and content, "
            f"got {str(value)[:60]!r}"
        )
    check_text("data.prompt_field", json.dumps(messages, ensure_ascii=False))
    while messages and messages[-1]["role"] == "assistant" and not _has_content(messages[-1]):
        last = messages.pop()
        if said := [key for key in _SAID if last.get(key)]:
            raise ValueError(
                "data.prompt_field must not end with an assistant's message without content, "
                f"got one with {said[0]}"
            )
    return tuple(messages)


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    return isinstance(value.get("content"), str) or (
        _calls_tools(value) and value["content"] is None
    )


def _calls_tools(message: dict) -> bool:
    return message.get("role") == "assistant" and bool(message.get("tool_calls"))


def _has_content(message: dict) -> bool:
    return bool(message["content"] and message["content"].strip())


def _without_nulls(value: Any) -> Any:
    """Return the value without null keys, at any depth: tables have nulls for keys that a row
    lacks."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list | tuple) else value


def check_text(field: str, value: str) -> None:
    """Raise a one-line ValueError if UTF-8 cannot encode the text."""
    with one_line(f"{field} must be text that UTF-8 can encode"):
        value.encode()  # JSON can contain half of a surrogate pair


def asks(prompt: str | Messages) -> bool:
    """Return whether there is a question. A tool's last reply may be empty."""
    if isinstance(prompt, str) or not prompt:
        return bool(prompt and prompt.strip())
    return prompt[-1]["role"] == "tool" or _has_content(prompt[-1])


def canonical(prompt: str | Messages) -> str:
    """Return a text that is equal for equivalent prompts.

    Text equals a user's message, and the order of keys is irrelevant.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return json.dumps(messages, sort_keys=True)


def with_instruction(prompt: str | tuple[dict, ...], text: str) -> str | tuple[dict, ...]:
    """Return the prompt, or a chat with its last non-assistant message, with `text` after it or
    around it at "{prompt}"."""
    if not text:
        return prompt
    if not isinstance(prompt, str):
        *before, last = prompt
        if before and last["role"] == "assistant":
            return (*with_instruction(tuple(before), text), last)
        return (*before, {**last, "content": with_instruction(last["content"], text)})
    return text.replace("{prompt}", prompt) if "{prompt}" in text else prompt + text
