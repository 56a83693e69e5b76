"""Encoding of texts in which spelled-out control tokens are ordinary text.

A control token, such as `<|im_end|>`, ends or starts a turn. Only a chat template may write it: if
a question or an environment spells it out, its letters are encoded as letters.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

# Private characters that replace a control token: these where the content spells it out,
_LETTERS = 0x100000
# and these where the template wrote it.
_WRITTEN = 0x108000
_PRIVATE = re.compile("[\U00100000-\U0010ffff]")


class ControlTokens:
    """Encoder of texts and chats with a transformers tokenizer.

    tokenizer: encodes all content that spells out no control token.
    tokens: the control tokens' texts.
    """

    def __init__(self, tokenizer: Any, tokens: list[str]):
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._pattern = re.compile(_one_of(tokens) if tokens else "(?!)")
        self._numbers = {token: i for i, token in enumerate(self._tokens)}

    def spelled_in(self, content: Any) -> str:
        """Return the first control token that a text spells out, at any depth of the content; ""
        if there is none."""
        if isinstance(content, str):
            match = self._pattern.search(content)
            return match[0] if match else ""
        if isinstance(content, dict):
            content = [*content.keys(), *content.values()]
        if not isinstance(content, list | tuple):
            return ""
        return next(filter(None, map(self.spelled_in, content)), "")

    def encode(self, content: Any, write: Callable[[Any], str] = str) -> list[int]:
        """Return the ids of `write(content)`. Its control tokens are those that `write` adds.

        Raises a one-line ValueError if content spells out a control token, and the tokenizer cannot
        tell it from the token.
        """
        token = self.spelled_in(content)
        if not token:
            return self._tokenizer.encode(write(content), add_special_tokens=False)
        if self._backend is None:
            raise ValueError(
                f"data.prompt_field must not spell out a control token, got {token!r} in "
                f"{str(content)[:60]!r}: this tokenizer cannot encode it as text; change the data "
                "or data.render"
            )
        text = self._marked(write(_each_text(content, self._hidden)))
        text = _PRIVATE.sub(self._shown, text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def _hidden(self, text: str) -> str:
        """Return the text with each spelled-out control token as a private character."""
        if private := _PRIVATE.search(text):
            raise ValueError(
                "data.prompt_field must not contain private characters next to a spelled-out "
                f"control token, got U+{ord(private[0]):X}; change the data or data.render"
            )
        return self._pattern.sub(lambda match: chr(_LETTERS + self._numbers[match[0]]), text)

    def _marked(self, text: str) -> str:
        """Return the text with a private character for each control token."""
        return self._pattern.sub(lambda match: chr(_WRITTEN + self._numbers[match[0]]), text)

    def _shown(self, match: re.Match) -> str:
        number = ord(match[0]) - _LETTERS
        return self._tokens[number] if number < len(self._tokens) else match[0]

    @functools.cached_property
    def _backend(self) -> Any:
        """Backend in which private characters are the control tokens; None if it has none, or one
        that encodes differently."""
        own = getattr(self._tokenizer, "backend_tokenizer", None)
        if own is None or len(self._tokens) > _WRITTEN - _LETTERS:
            return None
        try:
            backend = type(own).from_str(_renamed(own.to_str(), self._numbers))
        except Exception:  # some kinds of model need the tokens' names
            return None
        probe = "".join(f"{token} a\n" for token in self._tokens)
        ids = backend.encode(self._marked(probe), add_special_tokens=False).ids
        same = ids == self._tokenizer.encode(probe, add_special_tokens=False)
        return backend if same else None


def _one_of(texts: list[str]) -> str:
    """Return a regular expression for these texts that matches the longest.

    It reads every letter once: some tokenizers have thousands of tokens with a common prefix.
    """
    least = min(texts)
    differs = (i for i, (a, b) in enumerate(zip(least, max(texts))) if a != b)
    start = least[: next(differs, len(least))]
    longer: dict[str, list[str]] = {}
    for text in texts:
        if text != start:
            rest = text.removeprefix(start)
            longer.setdefault(rest[0], []).append(rest)
    if not longer:
        return re.escape(start)
    optional = "?" if start in texts else ""
    return f"{re.escape(start)}(?:{'|'.join(map(_one_of, longer.values()))}){optional}"


def _each_text(content: Any, change: Callable[[str], str]) -> Any:
    """Return content with every text in it changed, including keys."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, dict):
        return {_each_text(k, change): _each_text(v, change) for k, v in content.items()}
    if isinstance(content, list | tuple):
        return [_each_text(value, change) for value in content]
    return content


def _renamed(backend: str, numbers: Mapping[str, int]) -> str:
    """Return a tokenizer.json in which each control token is written as its private character."""
    values = json.loads(backend)
    names = {token: chr(_WRITTEN + number) for token, number in numbers.items()}
    for token in values["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "normalized": False}
    model = values["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:
        model["vocab"] = [[names.get(token, token), *rest] for token, *rest in vocab]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(values)
