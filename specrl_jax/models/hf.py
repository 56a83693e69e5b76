"""Hugging Face directories, hub ids and GGUF files to parameters, and back.

`load` returns `ModelConfig` and a nested dict of float32 NumPy arrays, layers stacked on a leading
L. `save` writes a directory that `transformers` reads. The map between both sets of names is
strict: an unknown, missing or mis-shaped tensor is an error.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from specrl_jax.inputs import one_line, read_json, resolve_source
from specrl_jax.models import gguf
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.families import FAMILIES
from specrl_jax.models.hf_config import IMAGE_MODELS, config_from_json, config_to_json
from specrl_jax.models.parameters import ADAPTERS, LAYER, TOP, Parameter, file_name_of, select
from specrl_jax.models.transformer import param_shapes


class Checkpoint(NamedTuple):
    """An opened source."""

    file: str  # for errors
    config: dict[str, Any]  # the fields of config.json
    shapes: dict[str, tuple[int, ...]]  # of the tensors, by name
    read: Callable[[str], np.ndarray]  # name → tensor


# Buffers that old versions of transformers stored with the weights.
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
# For a model that also reads images: its decoder's tensors, old and new names; others are dropped.
_TEXT_PART = re.compile(r"(?:model\.language_model|language_model\.model)\.(.*)")
_DTYPES = ("float32", "float16", "bfloat16")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_INDEX = "model.safetensors.index.json"


def load(source: str, field: str = "model.source") -> tuple[ModelConfig, dict[str, Any]]:
    """Read a policy from the result of `inputs.resolve_source`: a directory or a `.gguf` file.

    Returns the config (compute type float32, no rematerialisation) and float32 arrays under the
    names of `models/transformer.py`. At most one tensor is in memory twice. field: names the source
    in errors. Raises a one-line ValueError for what the source lacks or the package cannot
    represent.
    """
    config, checkpoint = _open(source, field)
    # Filled in place, tensor by tensor: stacking lists would need memory for two models.
    shapes = flatten_dict(param_shapes(config), sep="/")
    leaves = {name: np.empty(x.shape, x.dtype) for name, x in shapes.items()}
    for name, parts in _in_file(config).items():
        ends = np.cumsum([part.parameter.file_shape(config)[0] for part in parts])
        for part, rows in zip(parts, np.split(_read(checkpoint, name), ends[:-1]), strict=True):
            view = part.of(leaves)
            view[...] = rows.reshape(view.shape)
    return config, unflatten_dict(leaves, sep="/")


def load_config(source: str, field: str = "model.source") -> ModelConfig:
    """Read only the config, as `load` does; a directory needs no weights.

    field: names the source in errors.
    """
    path = resolve_source(source, field, ("*.json",))
    if path.suffix == ".gguf":
        return config_from_json(gguf.read(path)[0], str(path))
    file = path / "config.json"
    return config_from_json(read_json(file), str(file))


def open_tensors(source: str, field: str) -> tuple[ModelConfig, Iterator[tuple[str, np.ndarray]]]:
    """Open a policy as `load` does, to read it tensor by tensor.

    Returns the config, and Hugging Face's name and the array of each tensor, in an order determined
    by the config. field: names the source in errors.
    """
    config, checkpoint = _open(source, field)
    return config, ((name, _read(checkpoint, name)) for name in _file_shapes(config))


def reads_images(source: str, field: str) -> bool:
    """Return whether a model also reads images. field: names it in errors of `resolve_source`."""
    path = resolve_source(source, field, ("*.json",))
    if path.suffix == ".gguf":
        return False
    return read_json(path / "config.json").get("model_type") in IMAGE_MODELS


def save(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    token_ids: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 4 * 2**30,
) -> None:
    """Write a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads.

    path: The directory; created if missing. A model in it is replaced.
    config: Its `family` becomes the `model_type`; `dtype` and `remat` are not stored.
    params: The tree of `load`: NumPy or fully addressable JAX arrays, written as float32.
    token_ids: A tokenizer's, for generation.
    generation: Other fields of generation_config.json.
    max_shard_bytes: A larger model is split into shards.

    Raises ValueError if the family cannot express the config.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    # Unknown ids are written too: otherwise transformers would use the family's own.
    values = config_to_json(config) | dict.fromkeys(_TOKEN_IDS)
    _write_json(path / "config.json", values | (token_ids or {}))
    _write_json(path / "generation_config.json", {**(token_ids or {}), **(generation or {})})
    leaves = {k: np.asarray(x, np.float32) for k, x in flatten_dict(params, sep="/").items()}
    views = {n: [part.of(leaves) for part in parts] for n, parts in _in_file(config).items()}
    _save_weights(path, views, _file_shapes(config), max_shard_bytes)


def save_adapters(
    path: str | Path, config: ModelConfig, adapters: Mapping[str, Any], base: str
) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` loads.

    path: created if missing. config: with `lora`. adapters: the tree of `lora.init_adapters`. base:
    the model that they were trained on, for peft to load. Raises a one-line ValueError if the
    family's files store an adapted weight in one tensor with others.
    """
    from safetensors.numpy import save_file

    if fused := [name for name in config.lora.names if name in FAMILIES[config.family].fused]:
        raise ValueError(
            f"--adapters cannot be used with family {config.family} and adapters on {fused[0]}: "
            "its files have one tensor of several weights, which peft adapts as one; leave the "
            "flag out"
        )
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, stacked in adapters["layers"].items():
        parameter = ADAPTERS[name]
        for layer, array in enumerate(np.asarray(stacked, np.float32)):
            file_name = f"base_model.model.{parameter.file_name.format(layer)}"
            view = parameter.in_file_order(array)
            tensors[file_name] = np.ascontiguousarray(view).reshape(parameter.file_shape(config))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "target_modules": list(config.lora.names),
        "bias": "none",
        "inference_mode": True,
    }
    _write_json(path / "adapter_config.json", settings)
    (path / "adapter_model.safetensors").chmod((path / "adapter_config.json").stat().st_mode)


def _open(source: str, field: str) -> tuple[ModelConfig, Checkpoint]:
    """Open a source and check that its tensors have the names and shapes of its config."""
    path = resolve_source(source, field, ("*.json", "*.safetensors"))
    if path.suffix == ".gguf":
        checkpoint = Checkpoint(str(path), *gguf.read(path))
    else:
        checkpoint = _open_directory(path)
    config = config_from_json(checkpoint.config, checkpoint.file)
    tied = config.tie_embeddings and "lm_head.weight" in checkpoint.shapes
    # Before anything of these sizes is allocated: the file may be wrong.
    _check_shapes(checkpoint, _file_shapes(config), {"lm_head.weight"} if tied else set())
    if tied:
        embed = _read(checkpoint, "model.embed_tokens.weight")
        if not np.array_equal(embed, _read(checkpoint, "lm_head.weight")):
            rule = "must equal model.embed_tokens.weight where tie_word_embeddings is true"
            raise ValueError(f"{checkpoint.file}: lm_head.weight {rule}, but it differs")
    return config, checkpoint


def _open_directory(path: Path) -> Checkpoint:
    from safetensors import safe_open

    single = path / "model.safetensors"
    index = path / _INDEX
    config = read_json(path / "config.json")
    if single.is_file():
        shards = [single]
    elif index.is_file():
        with one_line(f"{index} must name the file of every tensor in weight_map"):
            shards = sorted({path / name for name in read_json(index)["weight_map"].values()})
    else:
        rule = f"must have model.safetensors or {_INDEX}; convert other formats with transformers"
        raise ValueError(f"{path} {rule}")
    files = {}
    for shard in shards:
        with one_line(f"{shard} must be a whole safetensors file"):
            handle = safe_open(shard, framework="np")  # bfloat16 as in ml_dtypes, without torch
        files |= dict.fromkeys(handle.keys(), handle)
    stored = {name: name for name in files}
    if config.get("model_type") in IMAGE_MODELS:
        parts = {name: _TEXT_PART.fullmatch(name) for name in files}
        stored = {f"model.{part[1]}": name for name, part in parts.items() if part}
    shapes = {
        name: tuple(files[theirs].get_slice(theirs).get_shape()) for name, theirs in stored.items()
    }

    def read(name: str) -> np.ndarray:
        return files[stored[name]].get_tensor(stored[name])

    return Checkpoint(str(path / "config.json"), config, shapes, read)


# --- weights -------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Rows of a file's tensor that are a part of one of our arrays."""

    parameter: Parameter
    leaf: str  # our array's name
    at: tuple[int, ...]  # position of the part in it

    def of(self, leaves: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return a view of our array with axes in the file's order; the file may join axes."""
        return self.parameter.in_file_order(leaves[self.leaf][self.at])


def _file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a file with this config, by name."""
    shapes = {}
    for name, parts in _in_file(config).items():
        rows, *others = zip(*(part.parameter.file_shape(config) for part in parts), strict=True)
        shapes[name] = (sum(rows), *(sizes[0] for sizes in others))
    return shapes


def _in_file(config: ModelConfig) -> dict[str, list[Part]]:
    """Return the tensors of a file by name, each as vertically stacked parts."""
    parts: dict[str, list[Part]] = {}
    for name, parameter in select(TOP, config).items():
        parts[parameter.file_name] = [Part(parameter, name, ())]
    for layer in range(config.num_layers):
        for name, parameter in select(LAYER, config).items():
            file_name = file_name_of(config.family, name)
            for at in _places(config, parameter, layer):
                part = Part(parameter, f"layers/{name}", at)
                parts.setdefault(file_name.format(*at), []).append(part)
    return parts


def _places(config: ModelConfig, parameter: Parameter, layer: int) -> list[tuple[int, ...]]:
    """Return where a layer parameter's tensors are in our array: one per expert, or one in all."""
    if not parameter.per_expert:
        return [(layer,)]
    return [(layer, expert) for expert in range(config.num_experts)]


def _check_shapes(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], left_out: set[str]
) -> None:
    names = {name for name in checkpoint.shapes if not _HARMLESS.search(name)} - left_out
    if missing := sorted(expected.keys() - names):
        raise ValueError(f"{checkpoint.file}: missing tensor {missing[0]} ({len(missing)} in all)")
    if unknown := sorted(names - expected.keys()):
        raise ValueError(f"{checkpoint.file}: unknown tensor {unknown[0]} ({len(unknown)} in all)")
    for name, shape in expected.items():
        if (got := checkpoint.shapes[name]) != shape:
            raise ValueError(f"{checkpoint.file}: {name} must have shape {shape}, got {got}")


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    with one_line(f"{checkpoint.file}: {name} must be readable"):
        tensor = checkpoint.read(name)
    if tensor.dtype.name not in _DTYPES:
        rule = f"must be one of {', '.join(_DTYPES)}"
        raise ValueError(f"{checkpoint.file}: {name} {rule}, got {tensor.dtype.name}")
    # The sum is NaN or infinite if a value is, and often if values are absurd.
    if not math.isfinite(tensor.sum(dtype=np.float32)) and not np.isfinite(tensor).all():
        raise ValueError(
            f"{checkpoint.file}: {name} must contain only finite numbers, "
            f"got {tensor[~np.isfinite(tensor)][0]}; the weights are damaged or have diverged"
        )
    return tensor


def _save_weights(
    path: Path,
    views: dict[str, list[np.ndarray]],
    shapes: dict[str, tuple[int, ...]],
    max_shard_bytes: int,
) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    split = split_state_dict_into_shards_factory(
        views,
        get_storage_size=lambda parts: sum(part.nbytes for part in parts),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        stored = {n: _join(views[n], shapes[n]) for n in names}
        save_file(stored, path / file, metadata={"format": "pt"})
        (path / file).chmod((path / "config.json").stat().st_mode)  # not only the owner's
    written = {path / file for file in split.filename_to_tensors}
    for stale in {*path.glob("model*.safetensors"), path / _INDEX} - written:
        stale.unlink(missing_ok=True)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(path / _INDEX, index)


def _join(views: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return the file's tensor with the rows of these views."""
    rows = [np.ascontiguousarray(view).reshape(-1, *shape[1:]) for view in views]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
