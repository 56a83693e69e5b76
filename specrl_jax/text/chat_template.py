"""Chat template of a tokenizer: messages to the text that is encoded."""

import datetime
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from specrl_jax.inputs import one_line

Messages = tuple[dict, ...]

# The date passed to every chat template.
_TODAY = datetime.date(2025, 1, 1)
_ASKS_DATE = re.compile(r"""\bstrftime_now\((["'])(.*?)\1\)""")
_MARK = "\u241e"  # placeholder for a response, and for the end of a prompt
_RESPONSE = ({"role": "user", "content": ""}, {"role": "assistant", "content": _MARK})


class ChatTemplate:
    """Writer of chats.

    tokenizer: a transformers tokenizer with a chat template.
    options: variables of the template.
    source: field and value that name the tokenizer, for errors.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], source: str):
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._source = source
        with one_line(f"{source} must have a default chat template"):
            template = tokenizer.get_chat_template()
        # With the current date, a run would change at midnight.
        self.text = _ASKS_DATE.sub(lambda call: json.dumps(_TODAY.strftime(call[2])), template)
        for name in self._options:
            if not re.search(rf"\b{re.escape(name)}\b", self.text):
                raise ValueError(
                    f"tokenizer.template_options.{name} must be a variable of the chat template, "
                    f"that of {source} has no {name}"
                )

    def write(self, messages: Iterable[dict], generation_prompt: bool = True) -> str:
        """Return messages as text, up to the start of the assistant's turn or without it.

        Raises a one-line ValueError if the template rejects them.
        """
        with one_line(f"tokenizer.chat must be False, or the template of {self._source} fixed"):
            return self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.text,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._options,
            )

    def write_begun(self, messages: Iterable[dict]) -> str:
        """Return messages as text up to the end of the last one's content.

        The content is kept as given, with leading and trailing blanks, which many templates trim.
        Raises a one-line ValueError if the template changes more of it.
        """
        *before, last = messages
        content = last["content"]

        def up_to_mark(content: str) -> str:
            chat = [*before, {**last, "content": content + _MARK}]
            return self.write(chat, generation_prompt=False).rpartition(_MARK)[0]

        text = up_to_mark(content)
        begin = up_to_mark("")  # a template may treat content with a thought differently
        if text.startswith(begin) and text[len(begin) :].strip() == content.strip():
            return begin + content
        if not text.endswith(content):
            raise ValueError(
                "data.prompt_field must end with a message that the chat template writes as it is, "
                f"got {content[-60:]!r}, which that of {self._source} changes"
            )
        return text

    def write_next(self, messages: Iterable[dict]) -> str:
        """Return what follows a response: the end of its turn and these messages, up to the start
        of the assistant's turn.

        Raises a one-line ValueError if the template does not write the response.
        """
        _, mark, rest = self.write([*_RESPONSE, *messages]).partition(_MARK)
        if not mark:
            raise ValueError(f"{self._source} must have a chat template that writes every turn")
        return rest

    def takes(self, role: str) -> bool:
        """Return whether a message of this role may follow a response and is written."""
        try:
            return _MARK in self.write_next([{"role": role, "content": _MARK}])
        except ValueError:
            return False

    def write_end(self) -> str:
        """Return what follows a response that is the last message; "" if it is not written."""
        return self.write(_RESPONSE).partition(_MARK)[2]

    def around_messages(self) -> str:
        """Return a chat of empty messages; "" if the template rejects it."""
        try:
            return self.write([*_RESPONSE, _RESPONSE[0]], generation_prompt=False)
        except ValueError:
            return ""


# Turns that many templates change, by what is changed.
_TURNS = {"a plain turn": "a", "blanks at the ends of a turn": "\n a \n"}


def changed_turns(tokenizer: Any, source: str, thought_tags: Iterable[tuple[str, str]]) -> str:
    """Report in one line which turns a chat template changes once others follow; "" if none.

    Compares the ids of a whole chat with those of a row: the prompt, and each turn as it was said
    and with its end, followed by `encode_turn`. source: whose template it is. thought_tags: pairs
    of an opening and a closing tag.
    """
    changed = []
    thoughts = {f"a thought in {x}": f"{x}\na\n{y}\n\na" for x, y in thought_tags}
    for name, turn in (_TURNS | thoughts).items():
        for role in tokenizer.turn_roles:
            if change := _change(tokenizer, turn, role):
                changed.append(f"{name}, before the role {role}, {change}")
    if not changed:
        return ""
    return (
        f"the chat template of {source} changes turns once others follow, but rows keep them: "
        f"{'; '.join(changed)}"
    )


def _change(tokenizer: Any, turn: str, role: str) -> str:
    """Report what the template makes of two such turns of a row; "" if it changes neither."""
    chat: Messages = ({"role": "user", "content": "a"},)
    row = tokenizer.encode_prompt(chat)
    for _ in range(2):
        chat += ({"role": "assistant", "content": turn}, {"role": role, "content": "b"})
        row += [*tokenizer.encode(turn), tokenizer.end_id, *tokenizer.encode_turn("b", role=role)]
    whole = tokenizer.encode_prompt(chat)
    if row == whole:
        return ""
    if tokenizer.decode(row, keep_special=True) == tokenizer.decode(whole, keep_special=True):
        return "is the same text in other tokens"
    pairs = itertools.zip_longest(row, whole)
    first = next(i for i, (own, others) in enumerate(pairs) if own != others)
    begin = max(first - 2, 0)
    texts = [tokenizer.decode(ids[begin : first + 6], keep_special=True) for ids in (row, whole)]
    return f"{texts[0]!r} becomes {texts[1]!r}"
