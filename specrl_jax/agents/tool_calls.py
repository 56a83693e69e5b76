"""Tool calls in a response: the text between `<tool_call>` and `</tool_call>`.

Takes the text of a turn; returns its calls in order, and an error for each malformed one. A call is
JSON with "name" and "arguments", as Qwen and Hermes write it, or code if a tool runs code. An
unmatched tag is text, and so is one in quotes. No JAX.
"""

import ast
import json
import re
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

BEGIN, END = "<tool_call>", "</tool_call>"
_MAX_ENDS = 8  # end tags of which one may end a call; earlier ones are in its strings
_MAX_BROKEN = 64  # calls that are neither JSON nor code for which that many end tags are tried
_BEGIN = re.compile(rf"([`'\"]){BEGIN}\1|{BEGIN}")  # group 1: the tag is quoted
_BLANK_LINES = re.compile(r"\A(?:[ \t]*\r?\n)+")
_FENCE = re.compile(r"`{3,}|~{3,}")
_ONE_LINE = re.compile(r"(?:`+|~{3,})([^`~\n]+)(?:`+|~{3,})")
_LANGUAGE = re.compile(r"\A(?:python3?|py|json)\b[ \t]*")  # on a line with code
_ANY_LANGUAGE = re.compile(r"[\w+-]*")  # alone on its line
# The start of a call in JSON, valid or not: unlikely to be code.
_JSON_CALL = re.compile(
    r"\[?\s*\{\s*(?:\"(?:name|arguments|parameters)\"\s*:"
    r"|'name'\s*:.*'(?:arguments|parameters)'\s*:)",
    re.DOTALL,
)
_JSON = json.JSONDecoder(strict=False)  # strings may hold line ends
_BETWEEN_VALUES = re.compile(r"[\s,]*")
_FORM = '{"name": .., "arguments": {..}}'


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]


class CallError(NamedTuple):
    """A malformed call."""

    reason: str  # for the policy to read


def read_calls(response: str, code_tool: str = "") -> list[Call | CallError]:
    """Return the calls in a response; arguments: see `read_call`."""
    _, texts = find_calls(response)
    return [call for text in texts for call in read_call(text, code_tool)]


def find_calls(response: str) -> tuple[str, list[str]]:
    """Return the text around the calls, and what is between the tags of each.

    A string in code or JSON may contain the tags. An opening tag whose call contains another one
    elsewhere is text: the policy has only mentioned it.
    """
    around = []
    calls = []
    broken = 0
    rest = 0  # where the text after the last call starts
    position = 0
    while begin := _BEGIN.search(response, position):
        position = begin.end()
        first = response.find(END, position)
        if begin[1] or first < 0:
            continue
        end = _find_whole(response, position, _MAX_ENDS if broken < _MAX_BROKEN else 0)
        if end < 0:
            broken += 1
            if BEGIN in response[position:first]:
                continue
            end = first
        around.append(response[rest : begin.start()])
        calls.append(response[position:end])
        rest = position = end + len(END)
    return "".join([*around, response[rest:]]), calls


def _find_whole(response: str, start: int, num_ends: int) -> int:
    """Return the first end tag's position before which a call is complete; -1 if none."""
    end = start
    for _ in range(num_ends):
        end = response.find(END, end)
        if end < 0 or _is_whole(response[start:end]):
            return end
        end += len(END)
    return -1


def _is_whole(text: str) -> bool:
    """Return whether the text of a call is JSON or Python; `a<tool_call>b` is neither."""
    code = clean_code(text)
    if _read_json(code) is not None:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    tag = BEGIN.strip("<>")
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return BEGIN not in code or tag not in names


def clean_code(text: str) -> str:
    """Return code without surrounding fences and indentation."""
    text = _unindented(text)
    if one_line := _ONE_LINE.fullmatch(text):
        return _LANGUAGE.sub("", one_line[1].strip(), count=1)
    if fence := _FENCE.match(text):
        return _between_fences(text, fence[0])
    return text


def _between_fences(text: str, fence: str) -> str:
    """Return what is between fences, which are the text's first line and others like it."""
    blocks = []
    code: list[str] | None = None  # lines since the opening fence; None: no block is open
    if text.endswith(fence):  # maybe after code
        text = text.rstrip(fence[0])
    text = f"{text}\n{fence}"
    for line in text.split("\n"):
        is_fence = line.lstrip().startswith(fence)
        after = line.lstrip()[len(fence) :].strip()
        if code is None and is_fence:
            language = _ANY_LANGUAGE.fullmatch(after) or _LANGUAGE.match(after)
            code = [after[language.end() :] if language else after]
        elif code is not None and is_fence and not after.strip(fence[0]):
            blocks.append(_unindented("\n".join(code)))
            code = None
        elif code is not None:
            code.append(line)
    return "\n".join(blocks)


def _unindented(text: str) -> str:
    text = _BLANK_LINES.sub("", text)
    if text.startswith((" ", "\t")):  # otherwise `dedent` would only change blanks in strings
        text = textwrap.dedent(text)
    return text.strip()


def read_call(text: str, code_tool: str = "") -> list[Call | CallError]:
    """Return the calls between two tags: one, or those in a JSON list.

    code_tool: tool whose argument "code" may be given alone. All text is then code except for JSON
      objects, one or several, and what starts like a call in JSON: 42, null and [1] are Python. "":
      none.
    """
    text = clean_code(text)
    values = _read_json(text)
    if code_tool and not _is_json_call(text, values):
        return [Call(code_tool, {"code": text})]
    if not text:
        return [CallError(f"a call must be {_FORM}, got nothing")]
    if values is None:
        return [CallError(f"a call must be JSON, {_FORM}: {_json_fault(text)}")]
    return [_read_value(value) for value in values]


def _is_json_call(text: str, values: Sequence[Any] | None) -> bool:
    if values is None:
        return _JSON_CALL.match(text) is not None
    objects = [value for value in values if isinstance(value, dict)]
    return bool(objects) and (objects == values or any("name" in value for value in objects))


def _read_json(text: str) -> list[Any] | None:
    """Return the JSON values of a text, for a list its items; None if it is anything else."""
    values = []
    position = 0
    try:
        while position < len(text):
            value, position = _JSON.raw_decode(text, position)
            values.append(value)
            position = _BETWEEN_VALUES.match(text, position).end()
    except (ValueError, RecursionError):
        return None
    if len(values) == 1 and isinstance(values[0], list) and values[0]:
        return values[0]
    return values or None


def _json_fault(text: str) -> str:
    """Return in one line why a text is not JSON."""
    try:
        _JSON.decode(text)
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return str(error)
    return "it contains something else"


def _read_value(value: Any) -> Call | CallError:
    """Return the call that a JSON value is."""
    if not isinstance(value, dict):
        return CallError(f"a call must be a JSON object, {_FORM}, got {_shown(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return CallError(f'a call must have the "name" of a tool, {_FORM}, got {_shown(value)}')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return CallError(f'"arguments" must be a JSON object, {_FORM}, got {_shown(arguments)}')
    return Call(name, arguments)


def _read_arguments(text: str) -> Any:
    """Return the value of arguments that are JSON in a string; the string if they are not."""
    if not text.strip():
        return None
    try:
        return _JSON.decode(clean_code(text))
    except (ValueError, RecursionError):
        return text


def _shown(value: Any) -> str:
    """Return the start of a value as JSON."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "a value that is nested too deeply"
    return text if len(text) <= 60 else f"{text[:60]}..."
