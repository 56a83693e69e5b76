"""Sources: every format gives the same problems, and none uses the network unasked."""

import json

import pytest
from small_runs import line_of
from test_prompts import ROWS, config, write_jsonl

from specrl_jax.data import readers
from specrl_jax.data.prompts import load_examples, make_example
from specrl_jax.data.readers import read_any
from specrl_jax.inputs import read_json


@pytest.fixture(autouse=True)
def _no_tfds_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))


def as_jsonl(folder):
    write_jsonl(folder / "train.jsonl", ROWS)
    write_jsonl(folder / "train_other.jsonl", [{"question": "not this", "answer": "#### 0"}])
    return {"source": "jsonl", "path": str(folder)}


def as_parquet(folder):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist
    parquet.write_table(table(ROWS[:4]), folder / "train-00000-of-00002.parquet")
    parquet.write_table(table(ROWS[4:]), folder / "train-00001-of-00002.parquet")
    return {"source": "parquet", "path": str(folder)}


def as_hf(folder):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split}).save_to_disk(str(folder / "saved"))
    return {"source": "hf", "path": str(folder / "saved")}


def as_one_hf_split(folder):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "doubles"))
    return {"source": "hf", "name": str(folder / "doubles"), "eval_split": "none here"}


def as_tfds(folder):
    """Prepared, as TFDS's own command leaves it."""
    tfds = pytest.importorskip("tensorflow_datasets")
    texts = tfds.features.FeaturesDict(dict.fromkeys(ROWS[0], tfds.features.Text()))

    class Doubles(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=texts, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            return {"train": enumerate(ROWS)}

        def _generate_examples(self):
            raise NotImplementedError

    tfds.disable_progress_bar()
    Doubles(data_dir=str(folder), file_format="array_record").download_and_prepare()
    return {"source": "tfds", "path": str(folder)}


MADE = [as_jsonl, as_parquet, as_hf, as_one_hf_split, as_tfds]


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        *((make, {}) for make in MADE),
        (as_parquet, {"source": "hf"}),
        (as_jsonl, {"source": "hf", "name": "someone/doubles"}),
        (as_jsonl, {"source": "tfds"}),
    ],
)
def test_formats_agree(tmp_path, make, changes):
    data = load_examples(config(**make(tmp_path) | changes))
    assert [e.answer for e in data.train] == ["14", "1600", "18", "2468"]
    assert [e.answer for e in data.eval] == ["10", "12"]
    assert data.train[3].prompt == "How much is 1234 and 1234?"
    # The ids do not depend on format, directory or the other fields.
    expected = make_example("How much is 7 and 7?", "14", "doubles", {})
    assert data.train[0].prompt_id == expected.prompt_id
    assert data.train[0].metadata["answer"] == "Twice 7.\n#### 14"
    assert data.duplicates == 0


@pytest.mark.parametrize("source", ["jsonl", "tfds"])
def test_a_split_without_rows_is_one_line(tmp_path, source):
    settings = as_jsonl(tmp_path) | {"source": source}
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"^data\.eval_split must have at least one .*'test'$"):
        load_examples(config(**settings, eval_split="test"))
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"^data\.path must have at least one row, got '/"):
        load_examples(config(**settings))


def test_tfds_has_no_other_split_and_never_downloads(tmp_path):
    with pytest.raises(ValueError, match=r"^data\.split must exist, got 'foo': .*'train'"):
        load_examples(config(**as_tfds(tmp_path), split="foo"))
    for name in ("gsm8k", "ag_news_subset"):  # without and with a builder that TFDS knows
        with pytest.raises(ValueError, match=rf"^data\.name '{name}' must be prepared"):
            load_examples(config("tfds", name=name))


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_byte_order_mark_is_read(tmp_path, end):
    """As editors and shells of Windows write it, also where such files were joined."""
    lines = [json.dumps(row).encode() for row in ROWS]
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + end + lines[0] + end + mark + end.join(lines[1:]))
    (tmp_path / "empty.jsonl").write_bytes(mark)
    rows = read_any(str(tmp_path / "a.jsonl"), "", "data.path")
    assert [row.values for row in rows] == ROWS
    assert read_any(str(tmp_path / "empty.jsonl"), "", "data.path") == []
    (tmp_path / "config.json").write_bytes(mark + b'{"layers": 2}')
    assert read_json(tmp_path / "config.json") == {"layers": 2}


def test_hub_that_cannot_be_reached_is_one_line():
    pytest.importorskip("datasets")
    line = line_of(load_examples, config("hf", name="nobody/nothing"))
    assert line.startswith("data.name must be a directory or a dataset on the hub")
    line = line_of(load_examples, config("hf", name="nobody/nothing", path="/none"))
    assert line == "data.path must be an existing file or directory, got '/none'"


def test_an_evaluation_file_is_of_any_format(tmp_path):
    as_parquet(tmp_path)
    rows = read_any(str(tmp_path), "train", "data.eval_path")
    assert [row.values for row in rows] == ROWS
    second = tmp_path / "train-00001-of-00002.parquet"
    assert [row.where for row in rows[4:]] == [f"{second} row 1", f"{second} row 2"]
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    rows = read_any(path, "", "data.eval_path")
    assert rows == [(f"{path}:1", ROWS[0]), (f"{path}:3", ROWS[1])]  # with empty lines between
    with pytest.raises(ValueError, match=r"^data\.eval_path must be an existing .* got '/none'$"):
        read_any("/none", "", "data.eval_path")


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("a.json", b'[{"question": 1}]', "got an array; jq -c"),
        ("a.jsonl", b'\xef\xbb\xbf \r\n[\r\n{"question": 1}]', "got an array; jq -c"),
        ("a.csv", b"question,answer\n1,2\n", "got CSV; pandas.read_csv"),
        ("a.tsv", b"question\tanswer\n", "got TSV; pandas.read_csv"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "got a gzip file; gunzip"),
        ("a.parquet", b"PAR1", "got Parquet; set data.source=parquet"),
    ],
)
def test_a_file_of_another_kind_says_how_to_make_jsonl_of_it(tmp_path, name, content, rule):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"must be JSONL, one object per line, {rule}"):
        readers._read_jsonl([tmp_path / name])
