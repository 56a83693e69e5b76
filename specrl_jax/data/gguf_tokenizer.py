"""The tokenizer of a GGUF file, rebuilt from its metadata for transformers.

Splits texts by llama.cpp's pre-tokenizer of the name in `tokenizer.ggml.pre`.
"""

from pathlib import Path
from typing import Any

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizers by the name in tokenizer.ggml.pre (llama.cpp, src/llama-vocab.cpp):
# (whether every digit is split off first, the words' regular expression; "": GPT-2's).
_PRE_TOKENIZERS = {
    "default": (False, ""),
    "gpt-2": (False, ""),
    "smollm": (True, ""),
    "qwen2": (False, _WORDS % r"\p{N}"),
    "deepseek-r1-qwen": (False, _WORDS % r"\p{N}"),
    "llama-bpe": (False, _WORDS % r"\p{N}{1,3}"),
    "llama3": (False, _WORDS % r"\p{N}{1,3}"),
}
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # tokenizer.ggml.token_type


def read(path: Path) -> tuple[Any, list[int]]:
    """A tokenizer of transformers and the ids that end a response beside its own end.

    Raises whatever a damaged file makes the libraries raise, and ValueError where its kind is not
    known.
    """
    from gguf import GGUFReader
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(str(path)).fields

    def field(name: str, default: Any = None) -> Any:
        value = fields.get(f"tokenizer.{name}")
        return default if value is None else value.contents()

    if field("ggml.model") != "gpt2":
        raise ValueError(
            f"its tokenizer is {field('ggml.model')!r}, only 'gpt2' (byte-level BPE) is supported; "
            "set tokenizer.source to the model's directory or hub id"
        )
    tokens = field("ggml.tokens")
    bos = field("ggml.bos_token_id")
    types = field("ggml.token_type", [1] * len(tokens))
    pre = field("ggml.pre", "default")
    backend = _byte_level_bpe(tokens, types, field("ggml.merges"), pre)
    if field("ggml.add_bos_token", pre in ("llama-bpe", "llama3")):
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


def _byte_level_bpe(tokens: list[str], types: list[int], merges: list[str], pre: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    whole_words_first = pre in ("llama-bpe", "llama3")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=whole_words_first))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [t for t, k in zip(tokens, types) if k == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in added]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)
    return backend


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
