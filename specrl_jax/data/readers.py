"""Rows of a data source, as dicts: one entry of `READERS` for each `data.source`.

Takes `config.data`; gives the rows in the order of the source. Only data sets of the Hugging Face
hub are downloaded. Raises ValueError in one line where files or a split are missing.
"""

import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Rows = list[dict]


@dataclasses.dataclass(frozen=True)
class SplitReader:
    """Reads files and data sets, which have splits and an end."""

    read: Callable[[Any, str], Rows]  # (config.data, split) → rows
    endless = False

    def train_and_eval(self, data: Any, seed: int) -> tuple[Rows, Rows]:
        """Rows to train on, and rows to hold out: of data.eval_path, or of data.eval_split where
        the source has splits, or else the last data.eval_prompts rows."""
        rows = _not_empty(self.read(data, data.split), "data.path", data.path or data.name)
        if data.eval_path:
            held_out = read_any(data.eval_path, data.eval_split, "data.eval_path")
            return rows, _not_empty(held_out, "data.eval_path", data.eval_path)
        if data.eval_split and not _is_one_split(Path(data.path or data.name).expanduser()):
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
    indices, held-out ones follow, and then there are as many more as anybody wants."""

    read: Callable[[Any, int, int, int], Rows]  # (config.data, start, stop, seed) → rows
    endless = True

    def train_and_eval(self, data: Any, seed: int) -> tuple[Rows, Rows]:
        """Rows to train on, and rows to hold out."""
        if data.prompts <= 0:
            raise ValueError(f"data.prompts must be > 0 for {data.source}, got {data.prompts}")
        rows = self.read(data, 0, data.prompts + data.eval_prompts, seed)
        return rows[: data.prompts], rows[data.prompts :]

    def more(self, data: Any, seed: int, count: int) -> Rows:
        """The next `count` rows behind those of `train_and_eval`."""
        start = data.prompts + data.eval_prompts
        return self.read(data, start, start + count, seed)


def _not_empty(rows: Rows, field: str, value: str) -> Rows:
    if not rows:
        raise ValueError(f"{field} must hold at least one row, got {value!r}")
    return rows


def _files(path: str, split: str, suffix: str, field: str = "data.path") -> list[Path]:
    """The file itself, or the files of a directory that are named after the split ("": all).

    "train" takes train.jsonl and train-00000-of-00002.jsonl, but not train_socratic.jsonl.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not path or not root.is_dir():
        raise ValueError(f"{field} must be an existing file or directory, got {path!r}")
    have = sorted([*root.glob(f"*{suffix}"), *root.glob(f"data/*{suffix}")])
    name = re.compile(rf"{re.escape(split)}([-_.]\d.*)?")
    chosen = [file for file in have if not split or name.fullmatch(file.stem)]
    if not chosen:
        names = ", ".join(file.name for file in have[:8]) or "none"
        raise ValueError(f"{field} {path!r} must hold {split or '*'}{suffix}, its files: {names}")
    return chosen


def _read_jsonl(files: Iterable[Path]) -> Rows:
    rows = []
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{file}:{number} must be a line of JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{file}:{number} must be a JSON object, got {line[:40]!r}")
            rows.append(row)
    return rows


def _read_parquet(files: Iterable[Path]) -> Rows:
    import pyarrow.parquet

    # One file at a time: as a dataset, files of slightly different schema would not be read.
    return [row for file in files for row in pyarrow.parquet.ParquetFile(file).read().to_pylist()]


def read_any(path: str, split: str, field: str) -> Rows:
    """Rows of JSONL or Parquet files, by the names of the files."""
    root = Path(path).expanduser()
    if root.suffix == ".parquet" or (root.is_dir() and any(root.glob("**/*.parquet"))):
        return _read_parquet(_files(path, split, ".parquet", field))
    return _read_jsonl(_files(path, split, ".jsonl", field))


def _read_hf(data: Any, split: str) -> Rows:
    """A save_to_disk directory, a directory of Parquet files, or a dataset of the hub."""
    import datasets

    where = data.path or data.name
    if not Path(where).expanduser().is_dir():
        return _read_hub(where, split, data.options.to_dict())
    root = Path(where).expanduser()
    if not (root / "dataset_dict.json").is_file() and not _is_one_split(root):
        return _read_parquet(_files(where, split, ".parquet"))
    saved = datasets.load_from_disk(str(root))
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"data.split must be one of {sorted(saved)}, got {split!r}")
        saved = saved[split]
    return saved.to_list()


def _is_one_split(root: Path) -> bool:
    return root.is_file() or (root / "state.json").is_file()  # the latter by save_to_disk


def _read_hub(name: str, split: str, options: dict) -> Rows:
    import datasets

    try:
        return datasets.load_dataset(name, split=split, **options).to_list()
    except Exception as error:  # many kinds, from many libraries
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"data.name must be a directory or a dataset of the hub, got {name!r}: {reason} "
            "(a cached copy is read with HF_HUB_OFFLINE=1)"
        ) from error


def _read_tfds(data: Any, split: str) -> Rows:
    """TFDS without TensorFlow and without the network, through `tfds.data_source`.

    data.path is a prepared TFDS data directory; or a directory of JSONL files, which are read as
    they are; or "" for TFDS's own data directory.
    """
    import tensorflow_datasets as tfds

    root = Path(data.path).expanduser()
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
        raise ValueError(f"data.split must exist, got {split!r}: {error}") from error
    return [{key: _text(value) for key, value in row.items()} for row in rows]


def _text(value: Any) -> Any:
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _read_reasoning_gym(data: Any, start: int, stop: int, seed: int) -> Rows:
    import reasoning_gym

    # Item i is drawn with seed + i: a second dataset under a nearby seed would repeat the first.
    try:
        task = reasoning_gym.create_dataset(
            data.name, seed=seed, size=stop, **data.options.to_dict()
        )
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"data.name {data.name!r} with data.options: {reason}") from error
    return [task[i] for i in range(start, stop)]


def _read_guess(data: Any, split: str) -> Rows:
    """Problems of the game `guess`: "2-7?" with a number of that range, every pair once."""
    options = {"low": 0, "high": 9} | data.options.to_dict()
    low, high = options["low"], options["high"]
    if not 0 <= low < high:
        raise ValueError(f"data.options must have 0 <= low < high for guess, got {low} and {high}")
    rows = [
        {data.prompt_field: f"{first}-{last}?", data.answer_field: str(secret)}
        for first in range(low, high)
        for last in range(first + 1, high + 1)
        for secret in range(first, last + 1)
    ]
    random.Random(0).shuffle(rows)  # so that what is held out is like the rest
    return rows


READERS: dict[str, SplitReader | EndlessReader] = {
    "reasoning_gym": EndlessReader(_read_reasoning_gym),
    "guess": SplitReader(_read_guess),
    "jsonl": SplitReader(lambda data, split: _read_jsonl(_files(data.path, split, ".jsonl"))),
    "parquet": SplitReader(lambda data, split: _read_parquet(_files(data.path, split, ".parquet"))),
    "hf": SplitReader(_read_hf),
    "tfds": SplitReader(_read_tfds),
}
