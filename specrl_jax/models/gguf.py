"""GGUF files (llama.cpp's format), read like Hugging Face directories: float32, same names.

GGUF differs in three ways: llama's query and key rows are in llama.cpp's rotary order, Llama 3's
scaled frequencies are a tensor of divisors, and Gemma's norms include the 1 that they add.
"""

import functools
import itertools
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specrl_jax.inputs import one_line
from specrl_jax.models.config import MAX_LAYERS
from specrl_jax.models.families import FAMILIES, Family
from specrl_jax.models.parameters import LAYER, TOP, file_name_of

_MAX_SIZE = 2**20  # a file with a larger value is damaged
_ROPE_DIVISORS = "rope_freqs.weight"
# Fields of `rope.scaling`, and their names in config.json, by its type.
_ROPE_FIELDS = {
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
# The file has only the divisors. Llama 3.1 to 3.3 all use these values.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(
    file: Path,
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Return config.json's fields, the tensors' shapes by name, and a function that reads one."""
    metadata, stored = _open(file)
    config = _config(file, metadata, stored)
    experts = config.get("num_experts", 0)
    renamed = _file_names(config["model_type"], config["num_hidden_layers"], experts)
    # A tensor unknown to all families keeps its name, and is rejected as unknown.
    names = {
        ours: (name, expert)
        for name in stored
        if name != _ROPE_DIVISORS
        for ours, expert in renamed.get(name, [(name, ())])
    }
    # The file's axes are reversed.
    shapes = {
        ours: tuple(map(int, stored[name].shape[::-1]))[len(expert) :]
        for ours, (name, expert) in names.items()
    }

    family = FAMILIES[config["model_type"]]
    # Experts are read one by one from one tensor.
    dequantize = functools.lru_cache(1)(lambda name: _dequantize(file, stored[name]))

    def read_tensor(name: str) -> np.ndarray:
        theirs, expert = names[name]
        values = dequantize(theirs)[expert]
        if family.always.get("norm_adds_one") and name.endswith("norm.weight"):
            return values - 1
        if not family.gguf_interleaved:
            return values
        if "self_attn.q_proj" in name:
            return _half_split(values, config["num_attention_heads"])
        if "self_attn.k_proj" in name:
            return _half_split(values, config["num_key_value_heads"])
        return values

    return config, shapes, read_tensor


def _open(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (metadata without the vocabulary, tensors), both by name."""
    metadata = {}
    tensors = {}
    files = parts_of(file)
    for number, part in enumerate(files):
        with one_line(f"{part} must be a whole GGUF file"):
            reader = open_gguf(part)
            slow = ("tokenizer.", "GGUF.")  # a vocabulary is not the decoder's metadata
            fields = {name: x for name, x in reader.fields.items() if not name.startswith(slow)}
            _check_offsets(reader)
            own = {name: field.contents() for name, field in fields.items()}
        place = own.get("split.no", 0), own.get("split.count", 1)
        if place != (number, len(files)):
            rule = f"must be part {number + 1} of {len(files)}, according to its name"
            raise ValueError(f"{part} {rule}, got part {place[0] + 1} of {place[1]}")
        metadata = own | metadata
        tensors |= {tensor.name: tensor for tensor in reader.tensors}
    return metadata, tensors


def parts_of(file: Path) -> list[Path]:
    """Return all files of the model that `file` is or is a part of; the first has its metadata.

    Raises a one-line ValueError if one is missing.
    """
    named = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})", file.stem)
    if not named:
        return [file]
    name, count = named.groups()
    parts = [f"{name}-{n + 1:05}-of-{count}{file.suffix}" for n in range(int(count))]
    files = [file.with_name(part) for part in parts]
    if missing := [path.name for path in files if not path.is_file()]:
        rule = f"must be next to the other parts of its model, {len(files)} in all"
        raise ValueError(f"{file} {rule}; {missing[0]} is missing")
    return files


def _check_offsets(reader: Any) -> None:
    """Raise ValueError unless each tensor starts where the previous one ends, as in llama.cpp."""
    begin = reader.data_offset
    for tensor in reader.tensors:
        if (got := tensor.data_offset) != begin:
            raise ValueError(f"{tensor.name} must start at byte {start}, got {got}")
        begin += -(-tensor.n_bytes // reader.alignment) * reader.alignment


def _config(file: Path, metadata: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    known = {name: family for name, family in FAMILIES.items() if family.gguf is not None}
    names = {family.gguf or name: name for name, family in known.items()}
    if architecture not in names:
        rule = f"must be one of {', '.join(names)}"
        raise ValueError(f"{file}: general.architecture {rule}, got {architecture!r}")
    family = FAMILIES[names[architecture]]

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{name}", default)

    plain = {"rope.scaling.type": "none", "rope.scale_linear": 1.0, "expert_count": 0}
    plain |= {"attention.sliding_window": 0, "attention.sliding_window_pattern": 0}
    if family.expert_size:
        del plain["expert_count"]
    scaling = get("rope.scaling.type")
    if scaling in _ROPE_FIELDS and scaling in family.rope_types:
        del plain["rope.scaling.type"]
        plain["rope.scaling.attn_factor"] = 1.0
    if family.local and not family.window_switch:
        del plain["attention.sliding_window"]
        pattern = family.defaults.get("sliding_window_pattern", 0)
        plain["attention.sliding_window_pattern"] = pattern
    for name, value in plain.items():
        if (got := get(name, value)) != value:
            rule = f"must be {value!r} or absent"
            raise ValueError(f"{file}: {architecture}.{name} {rule}, got {got!r}")
    _check_counts(file, metadata, architecture)
    heads = get("attention.head_count")
    config = {
        "model_type": names[architecture],
        "vocab_size": _rows(stored, "token_embd.weight"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        # If absent: this, not the family's default.
        "head_dim": get("attention.key_length", _rows(stored, "blk.0.attn_q.weight") // heads),
        "rms_norm_eps": _float32(get("attention.layer_norm_rms_epsilon", 1e-6)),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_gate.bias" in stored,
        "rope_theta": _float32(get("rope.freq_base", 10_000.0)),
    }
    if (size := get("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        rule = f"must be the head dim {config['head_dim']}"
        raise ValueError(f"{file}: {architecture}.rope.dimension_count {rule}, got {size}")
    config |= _own_fields(family, config, get)
    if "rope.scaling.type" not in plain:
        rope = {name: get(f"rope.scaling.{own}") for own, name in _ROPE_FIELDS[scaling].items()}
        given = {name: value for name, value in rope.items() if value is not None}
        config["rope_scaling"] = {"rope_type": scaling} | given
    if _ROPE_DIVISORS in stored:
        divisors = _dequantize(file, stored[_ROPE_DIVISORS])
        config["rope_parameters"] = _llama3(file, config, divisors)
    return config


def _own_fields(family: Family, config: dict[str, Any], get: Callable) -> dict[str, Any]:
    """Return the fields that only some families have; llama.cpp's values for those missing."""
    fields = {
        "sliding_window": get("attention.sliding_window"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "rope_local_base_freq": _float32(get("rope.freq_base_swa")),
        "query_pre_attn_scalar": config["head_dim"],
        "embedding_multiplier": _float32(get("embedding_scale")),
        "residual_multiplier": _float32(get("residual_scale")),
        "attention_multiplier": _float32(get("attention.scale")),
        "logits_scaling": _float32(get("logit_scale")),
        "num_experts": get("expert_count"),
        "num_experts_per_tok": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
        **family.gguf_fields,
    }
    if config["num_hidden_layers"] == family.gguf_layers_of_27b:
        fields["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    known = (name for name in fields if name in family.defaults and fields[name] is not None)
    return {name: fields[name] for name in known}


def _check_counts(file: Path, metadata: dict[str, Any], architecture: str) -> None:
    """Check the numbers used in this file; `hf_config` checks all others."""
    counts = {"embedding_length": _MAX_SIZE, "block_count": MAX_LAYERS}
    counts |= {"attention.head_count": _MAX_SIZE, "attention.key_length": _MAX_SIZE}
    given = {f"{architecture}.attention.key_length": 1} | metadata  # only this may be absent
    for name, most in counts.items():
        value = given.get(f"{architecture}.{name}")
        if not isinstance(value, int) or not 0 < value <= most:
            rule = f"must be an integer in [1, {most}]"
            raise ValueError(f"{file}: {architecture}.{name} {rule}, got {value!r}")


def _float32(value: Any) -> Any:
    """Return a number without float32 rounding noise: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value))) if isinstance(value, int | float) else value


def _rows(stored: dict[str, Any], name: str) -> int:
    return int(stored[name].shape[-1]) if name in stored else 0


def _llama3(file: Path, config: dict[str, Any], divisors: np.ndarray) -> dict[str, Any]:
    """Return the `rope_parameters` whose scaled frequencies have these divisors [H/2]."""
    rope = _LLAMA3 | {"rope_theta": config["rope_theta"], "factor": float(divisors.max())}
    length = rope["original_max_position_embeddings"]
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    head_dim = config["head_dim"]
    freqs = rope["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((length * freqs / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1 / (smooth + (1 - smooth) / rope["factor"])
    if expected.shape != divisors.shape or not np.allclose(divisors, expected, rtol=1e-4):
        rule = "must contain Llama 3's frequencies (low 1, high 4, original length 8192)"
        raise ValueError(f"{file}: {_ROPE_DIVISORS} {rule}, got others")
    return rope


def _file_names(
    family: str, layers: int, experts: int
) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Return Hugging Face's tensor names by llama.cpp's, and where each is within that tensor."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    architecture = FAMILIES[family].gguf or family
    name_map = get_tensor_name_map(MODEL_ARCH[architecture.upper()], layers)
    names = {}

    def add(name: str, parts: list[tuple[str, tuple[int, ...]]]) -> None:
        names[name_map.get_name(name, try_suffixes=(".weight", ".bias"))] = parts

    for parameter in TOP.values():
        add(parameter.file_name, [(parameter.file_name, ())])
    for name, layer in itertools.product(LAYER, range(layers)):
        file_name = file_name_of(family, name)
        if LAYER[name].per_expert:
            parts = [(file_name.format(layer, expert), (expert,)) for expert in range(experts)]
            add(file_name.replace("experts.{}", "experts").format(layer), parts)
        else:
            add(file_name.format(layer), [(file_name.format(layer), ())])
    return names


def _dequantize(file: Path, tensor: Any) -> np.ndarray:
    from gguf import dequantize

    kind = tensor.tensor_type.name
    with one_line(f"{file}: {tensor.name} must have a type that gguf dequantises, got {kind}"):
        return dequantize(tensor.data, tensor.tensor_type)


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from llama.cpp's order 0, H/2, 1, H/2 + 1, ... to 0, 1, 2, ...

    A head of four rows is stored as [r0, r2, r1, r3]; the result is [r0, r1, r2, r3].
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def open_gguf(file: Path) -> Any:
    """Return a reader that opens a large vocabulary in a moment: gguf's own takes a minute."""
    from gguf import GGUFReader, GGUFValueType

    class FastReader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            raw_kind = self._get(orig_offs, np.uint32)
            raw_count = self._get(orig_offs + 4, np.uint64)
            kind = GGUFValueType(int(raw_kind[0]))
            count = int(raw_count[0])
            begin = orig_offs + 12
            head = [raw_kind, raw_count]
            if kind in self.gguf_scalar_to_np:
                values = self._get(begin, self.gguf_scalar_to_np[kind], count)
                return 12 + values.nbytes, [*head, values], [2], [GGUFValueType.ARRAY, kind]
            if kind != GGUFValueType.STRING:
                return super()._get_field_parts(orig_offs, raw_type)
            texts, end = _texts(self.data, begin, count)
            parts = [*head, np.array([x.nbytes for x in texts], np.uint64), *texts]
            return end - orig_offs, parts, list(range(3, 3 + count)), [GGUFValueType.ARRAY, kind]

    return FastReader(str(file))


def _texts(data: Any, begin: int, count: int) -> tuple[list[memoryview], int]:
    """Return the bytes of `count` texts, and the offset after the last one."""
    whole = memoryview(data)
    texts = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", whole, begin)
        begin += 8
        texts.append(whole[begin : begin + length])
        begin += length
    return texts, begin
