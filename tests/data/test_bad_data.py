"""Damaged and wrong data: one line each, which names the field or the file, and the row.

What is wrong is written here by hand, byte by byte where a library would refuse to write it.
"""

import json
import re
import shutil
import sys

import pytest
from small_runs import line_of, set_field
from test_gguf_tokenizer import write_gguf
from test_prompts import ROWS, config, write_jsonl

from specrl_jax.data.prompts import load_examples
from specrl_jax.text.tokenizer import HuggingFaceTokenizer

GOOD = json.dumps({"question": "1 + 1?", "answer": "2"}).encode() + b"\n"
DEEP = b"[" * 100_000


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b'{"question": "\xff", "answer": "2"}', "must be JSON: .*utf-8.* 0xff in position 14"),
        ('{"question": "é"}'.encode("utf-16"), "must be JSON: .*utf-8"),
        (DEEP, "must be JSON: RecursionError"),
        (b'{"x": ' + b"[" * 101 + b"]" * 101 + b"}", "must be JSON: it is nested more than 100"),
        (b'{"question": "a", "answer": ' + b"9" * 5000 + b"}", "must be JSON: .*5000 digits"),
        (b"[1, 2]", r"must be a JSON object, got \[1, 2\]$"),
    ],
)
def test_a_line_that_is_no_row(tmp_path, second, message):
    file = tmp_path / "train.jsonl"
    file.write_bytes(GOOD + second + b"\n" + GOOD)
    line = line_of(load_examples, config(path=str(file)))
    assert re.match(rf"{re.escape(str(file))}:2 {message}", line)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": None}, "data.answer_field answer must have an answer .*, got None"),
        ({"answer": float("nan")}, "data.answer_field answer must have an answer .*, got nan"),
        ({"question": None}, "data.prompt_field must be text or a list of messages .* 'None'"),
        ({"question": "\ud800"}, "data.prompt_field must be text that UTF-8 can encode: .*"),
        ({"question": [{"role": None, "content": "a"}]}, "data.prompt_field must be text or .*"),
        ({"answer": "no mark"}, "data.answer_pattern must match every answer, .* 'no mark'"),
    ],
)
def test_a_row_that_is_no_problem(tmp_path, row, message):
    file = tmp_path / "train.jsonl"
    write_jsonl(file, [ROWS[0], ROWS[1] | row, *ROWS[2:]])
    pattern = r"####\s*(.+)" if row.get("answer") == "no mark" else ""
    line = line_of(load_examples, config(path=str(file), answer_pattern=pattern))
    assert re.fullmatch(rf"{message} \({re.escape(str(file))}:3\)", line)


BLANKS = ["", " ", "\n", "\u3000\u00a0", "\u200b\ufeff"]


@pytest.mark.parametrize("reward", ["exact", "math*0.8+format*0.2", "code"])
@pytest.mark.parametrize("answer", BLANKS)
def test_a_blank_answer_is_refused_where_a_named_reward_compares_with_it(tmp_path, answer, reward):
    file = tmp_path / "train.jsonl"
    write_jsonl(file, [ROWS[0] | {"answer": "assert f() == 1"}, ROWS[1] | {"answer": answer}])
    settings = config(path=str(file), answer_pattern="", eval_prompts=0)
    settings.reward.name = reward
    line = line_of(load_examples, settings)
    rule = "data.answer_field answer must have an answer for every prompt"
    assert line == f"{rule}, got {answer!r} ({file}:3)"


def blank_answer(row):
    return row["question"], " "


def test_a_blank_answer_of_a_pattern_or_a_function(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", [{"question": "a", "answer": "4 #### \n"}, *ROWS])
    line = line_of(load_examples, config(path=path, answer_pattern="####(.*)"))
    rule = "must have an answer for every prompt"
    assert line == f"data.answer_pattern ####(.*) {rule}, got '' ({path}:1)"
    line = line_of(load_examples, config(path=path, render="test_bad_data:blank_answer"))
    assert line == f"test_bad_data:blank_answer {rule}, got ' ' ({path}:1)"


@pytest.mark.parametrize(
    "changes", [{"reward.name": "format"}, {"reward.name": "a:f"}, {"environment.name": "a:E"}]
)
def test_a_blank_answer_is_taken_where_no_named_reward_reads_it(tmp_path, changes):
    path = write_jsonl(tmp_path / "train.jsonl", [ROWS[0] | {"answer": ""}, *ROWS[1:]])
    settings = config(path=path, answer_pattern="")
    for field, value in changes.items():
        set_field(settings, field, value)
    assert [e.answer for e in load_examples(settings).train[:2]] == ["", ROWS[1]["answer"]]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("((", r"must be a regular expression, got '\(\(': .*unterminated"),
        ("####", r"must have a group, \(..\), for the answer, got '####'$"),
        ("####|(y)", r"must match every answer, .* is not in .*train.jsonl:1\)$"),
    ],
)
def test_a_pattern_that_finds_no_answer(tmp_path, pattern, message):
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    line = line_of(load_examples, config(path=path, answer_pattern=pattern, eval_prompts=0))
    assert re.match(rf"data\.answer_pattern {message}", line)


# --- data.render ----------------------------------------------------------------------------------


def raises(row):
    raise RuntimeError("two\nlines")


def exits(row):
    sys.exit(3)


def calls_itself(row):
    return calls_itself(row)


def no_answer(row):
    return "a", None


MODULES = {
    "wrong_syntax": ("def f(:\n", "SyntaxError: invalid syntax"),
    "exits_at_import": ("import sys; sys.exit(1)\n", "SystemExit: 1"),
    "raises_at_import": ("raise RuntimeError('no')\n", "RuntimeError: no"),
}


@pytest.mark.parametrize(
    ("render", "message"),
    [
        (raises, "RuntimeError: two lines"),
        (exits, "SystemExit: 3"),
        (calls_itself, "RecursionError: maximum recursion depth exceeded"),
        (no_answer, "test_bad_data:no_answer must have an answer for every prompt, got None"),
    ],
)
def test_a_render_that_fails(tmp_path, render, message):
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    name = f"test_bad_data:{render.__name__}"
    line = line_of(load_examples, config(path=path, render=name, eval_prompts=0))
    row = re.escape(f"({path}:1)")
    assert re.fullmatch(f"data.render must fit the data, '{name}' fails: {message}.* {row}", line)


@pytest.mark.parametrize("module", MODULES)
def test_a_render_that_cannot_be_loaded(tmp_path, monkeypatch, module):
    source, message = MODULES[module]
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    path = write_jsonl(tmp_path / "train.jsonl", ROWS)
    line = line_of(load_examples, config(render=f"{module}:f", path=path))
    assert line.startswith(f"data.render must be 'module:function', got '{module}:f': {message}")


# --- files ----------------------------------------------------------------------------------------


def _flip(whole: bytes) -> bytes:
    return whole[:30] + bytes(255 - byte for byte in whole[30:60]) + whole[60:]


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-20], lambda x: b"", lambda x: b"text " * 9, _flip],
    ids=["cut", "empty", "text", "flipped"],
)  # fmt: skip
def test_a_damaged_parquet_file(tmp_path, damage):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "train.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), file)
    file.write_bytes(damage(file.read_bytes()))
    line = line_of(load_examples, config("parquet", path=str(file)))
    assert line.startswith(f"{file} must be a whole Parquet file: ")


@pytest.mark.parametrize("source", ["parquet", "hf"])
def test_text_that_is_no_utf8_names_its_row(tmp_path, source):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pa.Array.from_buffers(pa.utf8(), 3, pa.array([b"a", b"b", b"\xff\xfe"]).buffers())
    table = pa.table({"question": texts, "answer": ["1", "2", "3"]})
    path = tmp_path / "train.parquet"
    parquet.write_table(table, path)
    if source == "hf":
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        path = tmp_path / "saved"
        datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(str(path))
    line = line_of(load_examples, config(source, path=str(path)))
    assert re.match(rf"{re.escape(str(path))} row 3 must be UTF-8: ", line)


@pytest.mark.parametrize(
    ("file", "text"),
    [("state.json", b"{}"), ("state.json", b"no"), ("*.arrow", b"ARROW1"), ("*.arrow", None)],
)
def test_a_damaged_data_set_of_hugging_face(tmp_path, file, text):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (damaged,) = (tmp_path / "saved").glob(file)
    damaged.unlink() if text is None else damaged.write_bytes(text)
    line = line_of(load_examples, config("hf", path=str(tmp_path / "saved")))
    assert line.startswith(f"{tmp_path / 'saved'} must be a whole data set of save_to_disk: ")


@pytest.mark.parametrize("path", ["~no_such_user/x", "a" * 5_000])
def test_a_path_that_cannot_be_one(path):
    line = line_of(load_examples, config(path=path))
    assert line.startswith(f"data.path must be a path, got '{path[:60]}': ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": "a"}, r"\.low must be an integer, got 'a'"),
        ({"low": 0.5}, r"\.low must be an integer, got 0\.5"),
        ({"high": 10**6}, r" must have 0 <= low < high <= low \+ 100 for guess, got 0 and 1000000"),
        ({"low": 9}, r" must have 0 <= low < high <= low \+ 100 for guess, got 9 and 9"),
        ({"middle": 5}, r"\.middle must be one of low, high"),
    ],
)
def test_a_game_without_sense(options, message):
    line = line_of(load_examples, config("guess", options=options))
    assert re.fullmatch(f"data\\.options{message}", line)


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_gguf(folder / "t.gguf", "qwen2")
    HuggingFaceTokenizer(folder / "t.gguf", chat=True).save(folder / "saved")
    return folder / "saved"


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ raise_exception('two\nlines') }}", "TemplateError: two lines"),
        ("{{ messages[9].content }}", "UndefinedError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
    ],
)
def test_a_chat_template_that_fails(copy, template, kind):
    (copy / "chat_template.jinja").write_text(template)
    line = line_of(HuggingFaceTokenizer(copy, chat=True).encode_prompt, "it")
    rule = f"tokenizer.chat must be False, or the template of tokenizer.source '{copy}' fixed"
    assert line.startswith(f"{rule}: {kind}")


def test_a_chat_template_that_forgets_turns(copy):
    (copy / "chat_template.jinja").write_text("hello")
    line = line_of(HuggingFaceTokenizer(copy, chat=True).encode_turn, "it")
    assert line == f"tokenizer.source '{copy}' must have a chat template that writes every turn"


@pytest.mark.parametrize("end", [270, -1, 10**9, "abc", [[2]], {"a": 1}])
def test_an_end_token_beyond_the_vocabulary(copy, end):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    line = line_of(HuggingFaceTokenizer, copy, chat=False)
    rule = f"tokenizer.source '{copy}' must have its end and padding tokens among its 270 tokens"
    got = end[0] if isinstance(end, list) else end
    assert line == f"{rule}, got {got!r}"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", b"[]"),
        ("generation_config.json", DEEP),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", DEEP),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_damaged_files_of_a_tokenizer(copy, file, text):
    (copy / file).write_bytes(text)
    line = line_of(HuggingFaceTokenizer, copy, chat=False)
    assert line.startswith(f"tokenizer.source '{copy}' gives no tokenizer: ")
