"""Datasets to encoded prompts, and the resumable order in which training visits them.

Takes in `config.data` and a tokenizer; gives out `Prompts`. A prompt is known by the hash of its
content, so stored drafts and noise find it again after a restart, a reshuffle or a change of
format. Rooms: sources (rows of five kinds of data), examples (rows → `Example`, duplicates
removed), encoding, `PromptStream`, evaluation batches, and the tiny sorting task.
"""

import dataclasses
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.tokenizer import Tokenizer
from specrl_jax.types import Example, Prompts

_NUMBER_WITH_COMMAS = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Training and held-out problems: no prompt_id twice, none in both.

    duplicates: how many rows were left out for that. A training problem that is also held out is
    removed from training, so that the held-out set does not depend on the training set.
    """

    train: list[Example]
    eval: list[Example]
    duplicates: int


@dataclasses.dataclass(frozen=True)
class EncodedDataset:
    """N encoded problems (NumPy, on the host).

    tokens: int32 [N, P], right-padded. lens: int32 [N]. ids: uint32 [N, 2], high word first.
    dropped: how many problems were longer than P tokens and left out.
    """

    tokens: np.ndarray
    lens: np.ndarray
    ids: np.ndarray
    examples: tuple[Example, ...]
    dropped: int


# --- sources: each gives rows (dicts) of one split ------------------------------------------------


def _files(path: str, split: str, suffix: str, field: str = "data.path") -> list[Path]:
    """The file itself, or those of a directory that are named after the split ("" takes all).

    "train" stands for train.jsonl and train-00000-of-00002.jsonl, not for train_socratic.jsonl.
    """
    root = Path(path).expanduser()
    if root.is_file():
        return [root]
    if not path or not root.is_dir():
        raise ValueError(f"{field} must be an existing file or directory, got {path!r}")
    have = sorted([*root.glob(f"*{suffix}"), *root.glob(f"data/*{suffix}")])
    name = re.compile(rf"{re.escape(split)}([-_.]\d.*)?")
    found = [file for file in have if not split or name.fullmatch(file.stem)]
    if not found:
        names = ", ".join(file.name for file in have[:8]) or "none"
        raise ValueError(f"{field} {path!r} must hold {split or '*'}{suffix}, its files: {names}")
    return found


def _read_jsonl(files: Iterable[Path]) -> list[dict]:
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


def _read_parquet(files: Iterable[Path]) -> list[dict]:
    import pyarrow.parquet

    # One file at a time: as a dataset, files of slightly different schema would not be read.
    return [row for file in files for row in pyarrow.parquet.ParquetFile(file).read().to_pylist()]


def _read_any(path: str, split: str, field: str) -> list[dict]:
    """JSONL or Parquet, told apart by the names of the files."""
    root = Path(path).expanduser()
    if root.suffix == ".parquet" or (root.is_dir() and any(root.glob("**/*.parquet"))):
        return _read_parquet(_files(path, split, ".parquet", field))
    return _read_jsonl(_files(path, split, ".jsonl", field))


def _read_hf(data: Any, split: str) -> list[dict]:
    """A save_to_disk directory, a directory of Parquet files, or a dataset of the hub."""
    import datasets

    where = data.path or data.name
    if not Path(where).expanduser().is_dir():
        return _read_hub(where, split, _options(data))
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


def _read_hub(name: str, split: str, options: dict) -> list[dict]:
    import datasets
    from huggingface_hub import HfApi

    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    try:
        if not offline:  # this fails at once, where datasets tries again for half a minute
            HfApi().dataset_info(name, timeout=10)
        loaded = datasets.load_dataset(name, split=split, **options)
    except Exception as error:  # dozens of kinds, from as many libraries
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"data.name must be a directory or a dataset of the hub, got {name!r}: {reason} "
            "(a cached copy is read with HF_HUB_OFFLINE=1)"
        ) from error
    return loaded.to_list()


def _read_tfds(data: Any, split: str) -> list[dict]:
    """TFDS without TensorFlow, always through `tfds.data_source`; the network is never touched.

    data.path: JSONL files (built once into a cache, named by their content), a TFDS data
    directory that is already prepared, or "" for TFDS's own data directory.
    """
    import tensorflow_datasets as tfds

    name = data.name.split(":")[0].split("/")[0]
    root = Path(data.path).expanduser()
    if not data.path:
        full_name, data_dir = data.name, None
    elif any((root / name).rglob("dataset_info.json")):
        full_name, data_dir = data.name, str(root)
    else:
        full_name = name
        data_dir, split = _build_tfds(name, _files(data.path, split, ".jsonl"), split)
    try:
        rows = tfds.data_source(full_name, split=split, data_dir=data_dir, download=False)
    except (tfds.core.DatasetNotFoundError, AssertionError, KeyError, NotImplementedError):
        raise ValueError(
            f"data.name {data.name!r} must be prepared as array_record in data.path or in "
            f"TFDS_DATA_DIR; else set data.path to a directory of its {split}.jsonl files"
        ) from None
    except ValueError as error:
        raise ValueError(f"data.split must exist, got {split!r}: {error}") from error
    return [{key: _text(value) for key, value in row.items()} for row in rows]


def _build_tfds(name: str, files: list[Path], split: str) -> tuple[str, str]:
    """Writes JSONL as a TFDS dataset in the cache, if it is not there; its data_dir and split."""
    import tensorflow_datasets as tfds

    rows = _read_jsonl(files)
    split = split or "train"
    digest = hashlib.blake2b(json.dumps([split, rows]).encode(), digest_size=8).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    data_dir = home / "specrl_jax" / "tfds" / digest
    text = tfds.features.Text()
    keys = sorted({key for row in rows for key in row})

    class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.FeaturesDict(dict.fromkeys(keys, text))
            # The order of the file: the held-out problems are the last ones in every format.
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _split_generators(self, dl_manager):
            del dl_manager
            return {split: self._generate_examples()}

        def _generate_examples(self):
            for i, row in enumerate(rows):
                yield i, {key: _plain(row.get(key)) for key in keys}

    _Builder.name = name
    tfds.disable_progress_bar()
    _Builder(data_dir=str(data_dir), file_format="array_record").download_and_prepare()
    return str(data_dir), split


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def _text(value: Any) -> Any:
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _options(data: Any) -> dict:
    return data.options.to_dict() if hasattr(data.options, "to_dict") else dict(data.options)


def _read_reasoning_gym(data: Any, start: int, stop: int, seed: int) -> list[dict]:
    import reasoning_gym

    # Item i is drawn with seed + i, so a second dataset with a nearby seed would repeat the first:
    # every part of the data is a range of indices of one dataset.
    try:
        task = reasoning_gym.create_dataset(data.name, seed=seed, size=stop, **_options(data))
    except (ValueError, TypeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"data.name {data.name!r} with data.options: {reason}") from error
    return [task[i] for i in range(start, stop)]


# --- examples -------------------------------------------------------------------------------------


def load_examples(config: Any) -> Dataset:
    """Training and held-out problems of `config.data`.

    Held out are: the rows of data.eval_path; or else of data.eval_split, where the source has
    splits; or else the last data.eval_prompts rows of the source. data.prompts and
    data.eval_prompts bound the two (0: all, and for the last rows none). reasoning_gym: training
    takes the indices below data.prompts, held-out problems follow.

    Raises ValueError, in one line, where data, a field or an answer is missing.
    """
    data = config.data
    if data.source == "reasoning_gym":
        if data.prompts <= 0:
            raise ValueError(f"data.prompts must be > 0 for reasoning_gym, got {data.prompts}")
        rows = _read_reasoning_gym(data, 0, data.prompts + data.eval_prompts, config.seed)
        train, held_out = rows[: data.prompts], rows[data.prompts :]
    else:
        train, held_out = _split_rows(data)
    to_example = _row_reader(data)
    held_out, repeated = _unique([to_example(row) for row in held_out], set())
    if data.eval_prompts and data.source != "reasoning_gym":
        held_out = held_out[: data.eval_prompts]
    seen = {example.prompt_id for example in held_out}
    train, repeated_in_train = _unique([to_example(row) for row in train], seen)
    return Dataset(train[: data.prompts or None], held_out, repeated + repeated_in_train)


def load_warmup_examples(config: Any, count: int, dataset: Dataset) -> list[Example]:
    """Up to `count` problems to show to the policy before training, none of them held out.

    reasoning_gym: new ones, from the indices after the held-out problems. Other sources have no
    more to give: the training problems.
    """
    data = config.data
    if data.source != "reasoning_gym":
        return dataset.train[:count]
    start = data.prompts + data.eval_prompts
    rows = _read_reasoning_gym(data, start, start + count, config.seed)
    held_out = {example.prompt_id for example in dataset.eval}
    return _unique(list(map(_row_reader(data), rows)), held_out)[0]


def _split_rows(data: Any) -> tuple[list[dict], list[dict]]:
    readers: dict[str, Callable[[str], list[dict]]] = {
        "jsonl": lambda split: _read_jsonl(_files(data.path, split, ".jsonl")),
        "parquet": lambda split: _read_parquet(_files(data.path, split, ".parquet")),
        "hf": lambda split: _read_hf(data, split),
        "tfds": lambda split: _read_tfds(data, split),
    }
    if data.source not in readers:
        known = ", ".join(["reasoning_gym", *readers])
        raise ValueError(f"data.source must be one of {known}, got {data.source!r}")
    rows = readers[data.source](data.split)
    if not rows:
        raise ValueError(f"data.path must hold at least one row, got {data.path or data.name!r}")
    if data.eval_path:
        return rows, _read_any(data.eval_path, data.eval_split, "data.eval_path")
    if data.eval_split and not _is_one_split(Path(data.path or data.name).expanduser()):
        return rows, readers[data.source](data.eval_split)
    if data.eval_prompts >= len(rows):
        raise ValueError(
            f"data.eval_prompts must be < the {len(rows)} rows it is taken from, "
            f"got {data.eval_prompts}; lower it or set data.eval_path"
        )
    cut = len(rows) - data.eval_prompts
    return rows[:cut], rows[cut:]


def _row_reader(data: Any) -> Callable[[dict], Example]:
    """The function from a row to its `Example`."""
    # Only the last part of a path: an id must not depend on where the data lies.
    task = Path(data.name or data.path).name.split(":")[0]
    task = task.removesuffix(".jsonl").removesuffix(".parquet")
    is_gym = data.source == "reasoning_gym"
    render = _load_function(data.render) if data.render else None

    def read(row: dict) -> Example:
        if render is not None:
            prompt, answer = render(row)
        elif is_gym:
            prompt, answer = row["question"], row["answer"]
        else:
            prompt, answer = _field(row, data.prompt_field, "data.prompt_field"), _answer(row, data)
        prompt = _with_instruction(_prompt(prompt), data.instruction)
        return make_example(prompt, str(answer), task, _jsonable(row))

    return read


def _load_function(name: str) -> Callable:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"data.render must be 'module:function', got {name!r}: {error}") from error


def _field(row: dict, path: str, field: str) -> Any:
    """The value under a name, or under names joined by dots ("reward_model.ground_truth")."""
    value: Any = row
    for part in [path] if path in row else path.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"{field} must be one of {', '.join(row)}, got {path!r}")
        value = value[part]
    return value


def _answer(row: dict, data: Any) -> str:
    value = _field(row, data.answer_field, "data.answer_field")
    text = value if isinstance(value, str) else json.dumps(value)
    if not data.answer_pattern:
        return text
    found = list(re.finditer(data.answer_pattern, text))
    if not found:
        raise ValueError(
            f"data.answer_pattern must match every answer, {data.answer_pattern!r} "
            f"is not in {text[-60:]!r}"
        )
    answer = found[-1].group(1).strip()
    return answer.replace(",", "") if _NUMBER_WITH_COMMAS.fullmatch(answer) else answer


def _prompt(value: Any) -> str | tuple[dict, ...]:
    if isinstance(value, str):
        return value
    messages = tuple(value) if isinstance(value, list | tuple) else ()
    if not messages or not all(
        isinstance(m, dict) and "role" in m and isinstance(m.get("content"), str) for m in messages
    ):
        raise ValueError(
            "data.prompt_field must hold text or a list of messages with role and content, "
            f"got {str(value)[:60]!r}"
        )
    return messages


def _with_instruction(prompt: str | tuple[dict, ...], text: str) -> str | tuple[dict, ...]:
    """Adds `text` to the prompt, or puts the prompt at "{prompt}" in it; last message of a chat."""
    if not text:
        return prompt
    if not isinstance(prompt, str):
        last = {**prompt[-1], "content": _with_instruction(prompt[-1]["content"], text)}
        return (*prompt[:-1], last)
    return text.replace("{prompt}", prompt) if "{prompt}" in text else prompt + text


def make_example(
    prompt: str | tuple[dict, ...], answer: str, task: str, metadata: dict[str, Any]
) -> Example:
    """An `Example` under the id of its content: blake2b-64 of (prompt, answer, task) as JSON."""
    content = [prompt, answer, task]
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    # Broken surrogates, which JSON allows, have no UTF-8; they still get an id.
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return Example(digest.hexdigest(), prompt, answer, task, metadata)


def _jsonable(row: dict) -> dict:
    """The row itself if it can be written as JSON, else a copy that can."""
    try:
        json.dumps(row)
        return row
    except TypeError:
        return json.loads(json.dumps(row, default=_json_value))


def _json_value(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _unique(examples: Sequence[Example], seen: set[str]) -> tuple[list[Example], int]:
    """Those with an id not seen before, in order; and how many were left out."""
    seen, kept = set(seen), []
    for example in examples:
        if example.prompt_id not in seen:
            seen.add(example.prompt_id)
            kept.append(example)
    return kept, len(examples) - len(kept)


# --- encoding, batches ----------------------------------------------------------------------------


def encode_prompts(
    examples: Sequence[Example], tokenizer: Tokenizer, prompt_len: int
) -> EncodedDataset:
    """Encodes problems into [N, prompt_len]; longer prompts are left out, never cut.

    Raises ValueError if none is left.
    """
    if not examples:
        raise ValueError("data must hold at least one prompt, got none")
    encoded = [tokenizer.encode_prompt(example.prompt) for example in examples]
    kept = [i for i, tokens in enumerate(encoded) if 0 < len(tokens) <= prompt_len]
    if not kept:
        shortest = min(map(len, encoded))
        raise ValueError(
            f"data.prompt_len must let a prompt through, got {prompt_len} with {len(encoded)} "
            f"prompts, the shortest of {shortest} tokens"
        )
    tokens = np.full((len(kept), prompt_len), tokenizer.pad_id, np.int32)
    for row, i in enumerate(kept):
        tokens[row, : len(encoded[i])] = encoded[i]
    lens = np.array([len(encoded[i]) for i in kept], np.int32)
    chosen = tuple(examples[i] for i in kept)
    return EncodedDataset(tokens, lens, _words(chosen), chosen, len(encoded) - len(kept))


def _words(examples: Sequence[Example]) -> np.ndarray:
    """uint32 [N, 2]: "0000000100000002" → [1, 2]."""
    words = [(int(e.prompt_id[:8], 16), int(e.prompt_id[8:], 16)) for e in examples]
    return np.array(words, np.uint32).reshape(len(words), 2)


def batch_of(encoded: EncodedDataset, rows: Sequence[int] | np.ndarray) -> Prompts:
    """The problems at these row indices, in this order."""
    rows = np.asarray(rows, np.int64)
    examples = tuple(encoded.examples[i] for i in rows)
    return Prompts(encoded.tokens[rows], encoded.lens[rows], encoded.ids[rows], examples)


def eval_batches(encoded: EncodedDataset, size: int) -> list[tuple[Prompts, int]]:
    """All problems in order, in batches of exactly `size`, each with its number of real rows.

    The last batch is filled with prompts of one token under ids of their own: a repeated prompt
    would share its noise with the first one. They come last; drop them by the count.
    """
    total = len(encoded.examples)
    missing = -total % size
    filler = [make_example("", str(i), "padding", {}) for i in range(missing)]
    tokens = np.full((missing, encoded.tokens.shape[1]), encoded.tokens[0, 0], np.int32)
    padded = EncodedDataset(
        tokens=np.concatenate([encoded.tokens, tokens]),
        lens=np.concatenate([encoded.lens, np.ones(missing, np.int32)]),
        ids=np.concatenate([encoded.ids, _words(filler)]),
        examples=(*encoded.examples, *filler),
        dropped=0,
    )
    starts = range(0, total, size)
    return [(batch_of(padded, range(s, s + size)), min(size, total - s)) for s in starts]


class PromptStream:
    """Endless batches of Q distinct prompts; its place is three numbers.

    The order of an epoch is a pure function of (seed, epoch). An epoch is floor(N / Q) batches;
    the `leftover` prompts after them are not visited in that epoch, and each epoch leaves out
    others. `epoch` and `step` (within it) are those of the next batch.
    """

    def __init__(self, encoded: EncodedDataset, prompts_per_step: int, seed: int):
        total = len(encoded.examples)
        if not 1 <= prompts_per_step <= total:
            raise ValueError(
                f"prompts per step must be in [1, {total}], the number of training prompts, "
                f"got {prompts_per_step}"
            )
        self.steps_per_epoch, self.leftover = divmod(total, prompts_per_step)
        self.epoch, self.step = 0, 0
        self._encoded, self._size, self._seed = encoded, prompts_per_step, seed
        self._digest = hashlib.blake2b(encoded.ids.tobytes(), digest_size=8).hexdigest()
        self._order = self._shuffle()

    def _shuffle(self) -> np.ndarray:
        rng = np.random.default_rng([self._seed, self.epoch])
        return rng.permutation(len(self._encoded.examples))

    def next(self) -> Prompts:
        """The next batch, [Q, P]."""
        start = self.step * self._size
        batch = batch_of(self._encoded, self._order[start : start + self._size])
        self.step += 1
        if self.step == self.steps_per_epoch:
            self.epoch, self.step = self.epoch + 1, 0
            self._order = self._shuffle()
        return batch

    def state(self) -> dict[str, int | str]:
        """What `restore` needs, for JSON."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seed": self._seed,
            "prompts_per_step": self._size,
            "prompts": self._digest,
        }

    def restore(self, state: dict[str, int | str]) -> None:
        """Goes on where `state` was taken. Raises ValueError if the order is another by now."""
        for name, now in self.state().items():
            if name not in ("epoch", "step") and state[name] != now:
                raise ValueError(
                    f"data must be as in the checkpoint: {name} was {state[name]!r}, is {now!r}"
                )
        self.epoch, self.step = int(state["epoch"]), int(state["step"])
        self._order = self._shuffle()


# --- the tiny sorting task ------------------------------------------------------------------------


def render_number_sorting(item: dict) -> tuple[str, str]:
    """A `number_sorting` item of reasoning_gym in the alphabet "0123456789 <>".

    "3 8 1 9>" asks for "1 3 8 9", "3 8 1 9<" for "9 8 3 1". Raises ValueError on numbers that are
    negative or not whole.
    """
    task = item["metadata"]
    sign = {"ascending": ">", "descending": "<"}[task["direction"]]
    return _digits(task["original_numbers"]) + sign, _digits(task["sorted_numbers"])


def _digits(numbers: Sequence[str]) -> str:
    for number in numbers:
        if float(number) < 0 or float(number) % 1:
            raise ValueError(
                f"data.options must give whole numbers >= 0 to render, got {number}; "
                "set min_value 0 and max_decimals 0"
            )
    return " ".join(str(int(float(number))) for number in numbers)


def demonstrations(
    examples: Sequence[Example], mistake_rate: float, seed: int
) -> list[tuple[str, str]]:
    """(prompt, answer) pairs in which each digit of the answer is wrong at `mistake_rate`.

    Mistakes keep a policy warmed up on them from being certain, so that there is something left
    to learn from rewards. They depend on seed and prompt_id alone, not on order.
    """
    pairs = []
    for example in examples:
        rng = np.random.default_rng([seed, int(example.prompt_id, 16)])
        wrong = rng.random(len(example.answer)) < mistake_rate
        shift = rng.integers(1, 10, len(example.answer))
        answer = "".join(
            str((int(c) + s) % 10) if w and c in "0123456789" else c
            for c, w, s in zip(example.answer, wrong, shift.tolist())
        )
        pairs.append((example.prompt, answer))
    return pairs
