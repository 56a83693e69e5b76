"""Rows of a data source: one entry of `READERS` for each `data.source`.

Takes `config.data`; returns the rows in source order. Only data sets on the Hugging Face hub are
downloaded. Raises a one-line ValueError if files or a split are missing, or if a file or a row is
damaged, naming both.
"""

import codecs
import dataclasses
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from specrl_jax.data.item_process import read_items
from specrl_jax.inputs import json_object, one_line, reason, require_package, user_path

MAX_GUESS_RANGE = 100  # numbers; the game's problems grow with the cube
MAX_NUMBERS = 1000  # to sort


class Row(NamedTuple):
    """One problem as in its source."""

    where: str  # file and row, for errors
    values: dict[str, Any]  # by column


Rows = list[Row]


@dataclasses.dataclass(frozen=True)
class SplitReader:
    """Reads files and data sets, which have splits and an end."""

    read: Callable[[Any, str], Rows]  # (config.data, split) → rows
    reads_files: bool = True  # selected by data.path and data.split
    takes_options: bool = False  # data.options
    endless = False
    plays = False

    def train_and_eval(self, data: Any, seed: int) -> tuple[Rows, Rows]:
        """Return training rows and held-out rows: of data.eval_path, or of data.eval_split if the
        source has splits, otherwise the last data.eval_prompts rows."""
        rows = _not_empty(self.read(data, data.split), "data.path", data.path or data.name)
        if data.eval_path:
            held_out = read_any(data.eval_path, data.eval_split, "data.eval_path")
            return rows, _not_empty(held_out, "data.eval_path", data.eval_path)
        if data.eval_split and not _is_one_split(_root(data)):
            held_out = self.read(data, data.eval_split)
            return rows, _not_empty(held_out, "data.eval_split", data.eval_split)
        if data.eval_prompts >= len(rows):
            raise ValueError(
                f"data.eval_prompts must be < the {len(rows)} rows it is taken from, "
                f"got {data.eval_prompts}; lower it or set data.eval_path"
            )
        cut = len(rows) - data.eval_prompts
        return rows[:cut], rows[cut:]


@dataclasses.dataclass(frozen=True)
class EndlessReader:
    """Reads generators, which make problem i from a seed: training problems have the first
    indices, then come held-out ones, then more for demonstrations."""

    read: Callable[[Any, int, int, int], Rows]  # (config.data, start, stop, seed) → rows
    plays: bool = False  # its problems are episodes of the environment SOURCE:NAME
    reads_files = False
    takes_options = True
    endless = True

    def train_and_eval(self, data: Any, seed: int) -> tuple[Rows, Rows]:
        """Return training rows and held-out rows."""
        if data.prompts <= 0:
            raise ValueError(f"data.prompts must be > 0 for {data.source}, got {data.prompts}")
        wanted = data.prompts + data.eval_prompts
        rows = self.read(data, 0, wanted, seed)
        if len(rows) < wanted:
            raise ValueError(
                f"data.prompts + data.eval_prompts must be <= the {len(rows)} problems that "
                f"data.options allow, got {wanted}"
            )
        return rows[: data.prompts], rows[data.prompts :]

    def more(self, data: Any, seed: int, count: int) -> Rows:
        """Return the next `count` rows after those of `train_and_eval`, else the training rows."""
        start = data.prompts + data.eval_prompts
        rows = self.read(data, start, start + count, seed)
        return rows or self.read(data, 0, min(count, data.prompts), seed)


def _not_empty(rows: Rows, field: str, value: str) -> Rows:
    if not rows:
        raise ValueError(f"{field} must have at least one row, got {value!r}")
    return rows


def _root(data: Any) -> Path:
    field = "path" if data.path else "name"
    return user_path(data[field], f"data.{field}")


def _numbered(name: str, rows: Iterable[dict], start: int = 1) -> Rows:
    """Name rows without their own line by their number."""
    return [Row(f"{name} row {number}", row) for number, row in enumerate(rows, start)]


def _files(path: str, split: str, suffix: str, field: str = "data.path") -> list[Path]:
    """Return the file itself, or the files of a directory that are named after the split ("": all).

    "train" takes train.jsonl and train-00000-of-00002.jsonl, but not train_socratic.jsonl.
    """
    root = user_path(path, field)
    if root.is_file():
        return [root]
    if not path or not root.is_dir():
        raise ValueError(f"{field} must be an existing file or directory, got {path!r}")
    have = sorted([*root.glob(f"*{suffix}"), *root.glob(f"data/*{suffix}")])
    name = re.compile(rf"{re.escape(split)}([-_.]\d.*)?")
    chosen = [file for file in have if not split or name.fullmatch(file.stem)]
    if not chosen:
        names = ", ".join(file.name for file in have[:8]) or "none"
        raise ValueError(f"{field} {path!r} must have {split or '*'}{suffix}, its files: {names}")
    return chosen


def _check_jsonl(file: Path) -> None:
    """Raise ValueError if a file is of another kind that a user may mistake for JSONL."""
    with open(file, "rb") as opened:
        begin = opened.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
    if file.suffix in (".csv", ".tsv"):
        rule = f"got {file.suffix[1:].upper()}; pandas.read_csv and to_json(orient='records', "
        rule += "lines=True) make it JSONL"
    elif begin.startswith(b"["):
        rule = "got an array; jq -c '.[]' makes it JSONL"
    elif begin.startswith(b"\x1f\x8b"):
        rule = "got a gzip file; gunzip it first"
    elif begin.startswith(b"PAR1"):
        rule = "got Parquet; set data.source=parquet"
    else:
        return
    raise ValueError(f"{file} must be JSONL, one object per line, {rule}")


def _read_jsonl(files: Iterable[Path]) -> Rows:
    files = [*files]
    for file in files:
        _check_jsonl(file)
    return [
        Row(where := f"{file}:{number}", json_object(line, where))
        for file in files
        for number, line in enumerate(
            file.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1
        )
        if line.strip()
    ]


def _read_parquet(files: Iterable[Path]) -> Rows:
    import pyarrow.parquet

    rows = []
    for file in files:
        # One file at a time: as one dataset, files with slightly different schemas are unreadable.
        with one_line(f"{file} must be a whole Parquet file"):
            table = pyarrow.parquet.ParquetFile(file).read()
        rows += _arrow_rows(str(file), table)
    return rows


def _arrow_rows(name: str, table: Any) -> Rows:
    """Return the rows of an Arrow table; ValueError names the first that is not UTF-8."""
    try:
        return _numbered(name, table.to_pylist())
    except UnicodeDecodeError:
        for number in range(table.num_rows):
            with one_line(f"{name} row {number + 1} must be UTF-8"):
                table.slice(number, 1).to_pylist()
        raise


def read_any(path: str, split: str, field: str) -> Rows:
    """Return rows of JSONL or Parquet files, depending on their names."""
    root = user_path(path, field)
    if root.suffix == ".parquet" or (root.is_dir() and any(root.glob("**/*.parquet"))):
        return _read_parquet(_files(path, split, ".parquet", field))
    return _read_jsonl(_files(path, split, ".jsonl", field))


def _read_hf(data: Any, split: str) -> Rows:
    """Read a save_to_disk directory, JSONL or Parquet files, or data.name's data set on the hub."""
    import datasets

    root = _root(data)
    if not data.path and not root.is_dir():
        return _read_hub(data.name, split, data.options.to_dict())
    if not (root / "dataset_dict.json").is_file() and not (root / "state.json").is_file():
        field = "path" if data.path else "name"
        return read_any(data[field], split, f"data.{field}")
    with one_line(f"{root} must be a whole data set of save_to_disk"):
        saved = datasets.load_from_disk(str(root))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"data.split must be one of {sorted(saved)}, got {split!r}")
        saved = saved[split]
    with one_line(f"{root} must contain whole Arrow files"):
        table = saved.with_format("arrow")[:]
    return _arrow_rows(str(root), table)


def _is_one_split(root: Path) -> bool:
    return root.is_file() or (root / "state.json").is_file()  # the latter by save_to_disk


def _read_hub(name: str, split: str, options: dict) -> Rows:
    import datasets

    with one_line(
        "data.name must be a directory or a dataset on the hub (a cached copy is read with "
        "HF_HUB_OFFLINE=1; without network set data.path to a directory of its files), "
        f"got {name!r}"
    ):  # many kinds of errors from many libraries
        return _numbered(name, datasets.load_dataset(name, split=split, **options).to_list())


def _read_tfds(data: Any, split: str) -> Rows:
    """Read TFDS without TensorFlow and without the network.

    data.path: a prepared data directory, or one of JSONL files; "": TFDS's own directory.
    """
    import tensorflow_datasets as tfds

    root = user_path(data.path, "data.path")
    name = data.name.partition(":")[0].partition("/")[0]  # without configuration and version
    if data.path and not any((root / name).rglob("dataset_info.json")):
        return _read_jsonl(_files(data.path, split, ".jsonl"))
    data_dir = str(root) if data.path else None
    try:
        rows = tfds.data_source(data.name, split=split, data_dir=data_dir, download=False)
    except (tfds.core.DatasetNotFoundError, AssertionError, KeyError, NotImplementedError):
        raise ValueError(
            f"data.name {data.name!r} must be prepared as array_record in data.path or in "
            f"TFDS_DATA_DIR; else set data.path to a directory of its {split}.jsonl files"
        ) from None
    except ValueError as error:
        raise ValueError(f"data.split must exist, got {split!r}: {reason(error)}") from error
    read = []
    for index in range(len(rows)):
        where = f"data.name {data.name} row {index + 1}"
        with one_line(f"{where} must be whole"):
            row = rows[index].items()
            values = {k: v.decode("utf-8") if isinstance(v, bytes) else v for k, v in row}
        read.append(Row(where, values))
    return read


def _read_reasoning_gym(data: Any, start: int, stop: int, seed: int) -> Rows:
    require_package("reasoning_gym", "tasks", "data.source=reasoning_gym")
    return _numbered(data.name, _items(data, start, stop, seed), start)


def _read_episodes(data: Any, start: int, stop: int, seed: int) -> Rows:
    """Read problems for a package's environment: prompt, answer, and whatever else it needs."""
    require_package(data.source, "agents", f"data.source={data.source}")
    rows = []
    for item in _items(data, start, stop, seed):
        columns = {data.prompt_field: item.pop("prompt"), data.answer_field: item.pop("answer")}
        rows.append(item | columns)
    return _numbered(data.name, rows, start)


def _items(data: Any, start: int, stop: int, seed: int) -> list[dict]:
    with one_line(f"data.name {data.name!r} with data.options"):
        return read_items(data.source, data.name, data.options.to_dict(), seed, start, stop)


def _read_sort(data: Any, start: int, stop: int, seed: int) -> Rows:
    """Make lists to sort, none twice: "3 8 1>" asks for "1 3 8", "3 8 1<" for "8 3 1"."""
    defaults = {"min_numbers": 6, "max_numbers": 12, "min_value": 0, "max_value": 9}
    few, many, least, most = _whole_numbers(data, defaults).values()
    if not (1 <= few <= many <= MAX_NUMBERS and least <= most):
        rule = f"1 <= min_numbers <= max_numbers <= {MAX_NUMBERS} and min_value <= max_value"
        raise ValueError(f"data.options must have {rule}, got {data.options.to_dict()}")
    total = 2 * sum((most - least + 1) ** count for count in range(few, many + 1))
    rng = random.Random(f"sort {seed}")
    answers = {}  # by question: no two rows have the same
    while len(answers) < min(stop, total):
        numbers = [rng.randint(least, most) for _ in range(rng.randint(few, many))]
        sign = rng.choice("<>")
        question = " ".join(map(str, numbers)) + sign
        answers[question] = " ".join(map(str, sorted(numbers, reverse=sign == "<")))
    rows = [{data.prompt_field: q, data.answer_field: a} for q, a in answers.items()]
    return _numbered("sort", rows[start:], start)


def _read_product(data: Any, start: int, stop: int, seed: int) -> Rows:
    """Make products, none twice: "12*34=" asks for "408".

    In the column `solution` the policy calls the tool `python` and repeats the answer.
    """
    least, most = _whole_numbers(data, {"min_value": 100, "max_value": 999}).values()
    if not 0 <= least <= most:
        rule = "0 <= min_value <= max_value for product"
        raise ValueError(f"data.options must have {rule}, got {least} and {most}")
    rng = random.Random(f"product {seed}")
    pairs: dict[tuple[int, int], int] = {}
    while len(pairs) < min(stop, (most - least + 1) ** 2):
        first = rng.randint(least, most)
        second = rng.randint(least, most)
        pairs[first, second] = first * second
    rows = [
        {
            data.prompt_field: f"{a}*{b}=",
            data.answer_field: str(answer),
            "solution": f"<tool_call>{a}*{b}</tool_call>{answer}\n{answer}",
        }
        for (a, b), answer in pairs.items()
    ]
    return _numbered("product", rows[start:], start)


def _read_guess(data: Any, split: str) -> Rows:
    """Make problems of the game `guess`: "2-7?" with a number in that range, every pair once."""
    low, high = _whole_numbers(data, {"low": 0, "high": 9}).values()
    if not 0 <= low < high <= low + MAX_GUESS_RANGE:
        rule = f"0 <= low < high <= low + {MAX_GUESS_RANGE} for guess"
        raise ValueError(f"data.options must have {rule}, got {low} and {high}")
    rows = [
        {data.prompt_field: f"{first}-{last}?", data.answer_field: str(secret)}
        for first in range(low, high)
        for last in range(first + 1, high + 1)
        for secret in range(first, last + 1)
    ]
    random.Random(0).shuffle(rows)  # so that held-out problems are like the rest
    return _numbered("guess", rows)


def _whole_numbers(data: Any, defaults: dict[str, int]) -> dict[str, int]:
    """Return the options of our own generator, which are all integers."""
    options = defaults | data.options.to_dict()
    for name, value in options.items():
        if name not in defaults:
            raise ValueError(f"data.options.{name} must be one of {', '.join(defaults)}")
        if type(value) is not int:
            raise ValueError(f"data.options.{name} must be an integer, got {value!r}")
    return options


READERS: dict[str, SplitReader | EndlessReader] = {
    "sort": EndlessReader(_read_sort),
    "product": EndlessReader(_read_product),
    "reasoning_gym": EndlessReader(_read_reasoning_gym),
    "textarena": EndlessReader(_read_episodes, plays=True),
    "verifiers": EndlessReader(_read_episodes, plays=True),
    "guess": SplitReader(_read_guess, reads_files=False, takes_options=True),
    "jsonl": SplitReader(lambda data, split: _read_jsonl(_files(data.path, split, ".jsonl"))),
    "parquet": SplitReader(lambda data, split: _read_parquet(_files(data.path, split, ".parquet"))),
    "hf": SplitReader(_read_hf, takes_options=True),
    "tfds": SplitReader(_read_tfds),
}
