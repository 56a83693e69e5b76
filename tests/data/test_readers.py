"""Sources: every format gives the same problems, and none reaches for the network unasked."""

import pytest
from test_prompts import ROWS, config, write_jsonl

from specrl_jax.data.prompts import load_examples, make_example
from specrl_jax.data.readers import read_any


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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


def as_hf_parquet(folder):
    return {**as_parquet(folder), "source": "hf"}


def as_tfds(folder):
    pytest.importorskip("tensorflow_datasets")
    return {**as_jsonl(folder), "source": "tfds"}


@pytest.mark.parametrize(
    "make", [as_jsonl, as_parquet, as_hf, as_one_hf_split, as_hf_parquet, as_tfds]
)
def test_formats_agree(tmp_path, make):
    settings = make(tmp_path)
    for _ in range(2):  # the second time TFDS reads what the first one built
        data = load_examples(config(**settings))
        assert [e.answer for e in data.train] == ["14", "1600", "18", "2468"]
        assert [e.answer for e in data.eval] == ["10", "12"]
        assert data.train[3].prompt == "How much is 1234 and 1234?"
        # The ids do not depend on format, directory or the other fields.
        expected = make_example("How much is 7 and 7?", "14", "doubles", {})
        assert data.train[0].prompt_id == expected.prompt_id
        assert data.train[0].metadata["answer"] == "Twice 7.\n#### 14"
        assert data.duplicates == 0


@pytest.mark.parametrize("make", [as_jsonl, as_tfds])
def test_a_split_without_rows_is_one_line(tmp_path, make):
    settings = make(tmp_path)
    (tmp_path / "test.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"^data\.eval_split must hold at least one .*'test'$"):
        load_examples(config(**settings, eval_split="test"))
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"^data\.path must hold at least one row, got '/"):
        load_examples(config(**settings))


def test_tfds_reads_a_prepared_directory(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    load_examples(config(**as_tfds(tmp_path)))
    (prepared,) = (tmp_path / "cache" / "specrl_jax" / "tfds").iterdir()
    data = load_examples(config("tfds", path=str(prepared)))
    assert [e.answer for e in data.eval] == ["10", "12"]
    with pytest.raises(ValueError, match=r"^data\.split must exist, got 'foo': .*'train'"):
        load_examples(config("tfds", path=str(prepared), split="foo"))


def test_tfds_never_downloads():
    pytest.importorskip("tensorflow_datasets")
    for name in ("gsm8k", "ag_news_subset"):  # without and with a builder that TFDS knows
        with pytest.raises(ValueError, match=rf"^data\.name '{name}' must be prepared"):
            load_examples(config("tfds", name=name))


def test_hub_that_cannot_be_reached_is_one_line():
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"^data\.name must be a directory or a dataset") as caught:
        load_examples(config("hf", name="nobody/nothing"))
    assert "\n" not in str(caught.value)


def test_an_evaluation_file_is_of_any_format(tmp_path):
    as_parquet(tmp_path)
    assert read_any(str(tmp_path), "train", "data.eval_path") == ROWS
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    assert read_any(path, "", "data.eval_path") == ROWS[:2]
    with pytest.raises(ValueError, match=r"^data\.eval_path must be an existing .* got '/none'$"):
        read_any("/none", "", "data.eval_path")
