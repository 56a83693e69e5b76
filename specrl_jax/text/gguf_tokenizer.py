"""Tokenizer of a GGUF file, rebuilt from its metadata for transformers.

Byte-level BPE splits texts with llama.cpp's pre-tokenizer named in `tokenizer.ggml.pre`.
SentencePiece's BPE, used by Gemma, does not split.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizers by the name in tokenizer.ggml.pre (llama.cpp, src/llama-vocab.cpp):
# (whether to split off every digit first, the regular expression of words; "": GPT-2's).
_PRE_TOKENIZERS = {
    "default": (False, ""),
    "gpt-2": (False, ""),
    "smollm": (True, ""),
    "qwen2": (False, _WORDS % r"\p{N}"),
    "deepseek-r1-qwen": (False, _WORDS % r"\p{N}"),
    "llama-bpe": (False, _WORDS % r"\p{N}{1,3}"),
    "llama3": (False, _WORDS % r"\p{N}{1,3}"),
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
_SPACE = "\u2581"  # SentencePiece's letter for a space


def read(path: Path) -> tuple[Any, list[int]]:
    """Return a transformers tokenizer and ids that end a response besides its own end.

    Raises whatever the libraries raise on a damaged file, and ValueError if the kind is unknown.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    from specrl_jax.models.gguf import open_gguf, parts_of

    fields = open_gguf(parts_of(path)[0]).fields

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"tokenizer.{name}")
        return default if value is None else value.contents()

    kind = field("ggml.model")
    if kind not in _BACKENDS or (kind == "llama" and field("ggml.add_space_prefix", True)):
        raise ValueError(
            f"its tokenizer is {kind!r}, only 'gpt2' (byte-level BPE) is supported, and 'llama' "
            "(SentencePiece) without add_space_prefix; set tokenizer.source to the model's "
            "directory or hub id"
        )
    tokens = field("ggml.tokens")
    bos = field("ggml.bos_token_id")
    types = field("ggml.token_type", [_NORMAL] * len(tokens))
    backend = _BACKENDS[kind](tokens, types, field)
    _add_tokens(backend, tokens, types)
    adds_bos = kind == "llama" or field("ggml.pre") in ("llama-bpe", "llama3")
    if field("ggml.add_bos_token", adds_bos):
        pair = f"{tokens[bos]}:0 $A:0", f"{tokens[bos]}:0 $A:0 $B:1"
        backend.post_processor = TemplateProcessing(*pair, special_tokens=[(tokens[bos], bos)])
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    ids = {role: field(f"ggml.{key}_token_id") for role, key in roles.items()}
    named = {role: tokens[index] for role, index in ids.items() if index is not None}
    turn_end = field("ggml.eot_token_id")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=field("chat_template"), **named
    )
    return tokenizer, [] if turn_end is None else [turn_end]


def _byte_level_bpe(tokens: list[str], types: list[int], field: Callable) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    pre = field("ggml.pre", "default")
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    pairs = [tuple(merge.split(" ", 1)) for merge in field("ggml.merges")]
    whole_words_first = pre in ("llama-bpe", "llama3")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words_first))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: list[str], types: list[int], field: Callable) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = np.array(field("ggml.scores", []))
    if len(scores) == len(tokens):
        scores = scores[np.array(types) == _NORMAL]
        if np.any(np.diff(scores) > 0):
            raise ValueError(
                "the scores of its tokens must decrease, as they give the order of merges; set "
                "tokenizer.source to the model's directory or hub id"
            )
    vocab = {}
    merges = []
    # Tokens are in merge order. The file has runs of spaces as they are.
    for index, token in enumerate(tokens):
        spelled = token if token.strip(" ") else _SPACE * len(token)
        if types[index] != _UNUSED:
            vocab[spelled] = index
    for token, index in vocab.items():
        if types[index] == _NORMAL or set(token) == {_SPACE}:
            cuts = ((token[:at], token[at:]) for at in range(len(token) - 1, 0, -1))
            merges += [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
    unknown = tokens[field("ggml.unknown_token_id", 0)]
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


_BACKENDS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece}  # by tokenizer.ggml.model


def _add_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    """Add control and user-defined tokens, except runs of spaces, which merges produce."""
    from tokenizers import AddedToken

    vocab = backend.get_vocab()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [t for t, k in zip(tokens, types) if k == kind and t in vocab]
        added = [AddedToken(token, special=special, normalized=False) for token in added]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {pre!r}, known are {', '.join(_PRE_TOKENIZERS)}; "
            "set tokenizer.source to the model's directory or hub id"
        )
    digits_first, words = _PRE_TOKENIZERS[pre]
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits_first else []
    if words:
        steps.append(pre_tokenizers.Split(Regex(words), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words))
    return pre_tokenizers.Sequence(steps)
