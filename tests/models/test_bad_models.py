"""Damaged and wrong models: one line each, which names the file and the field or the tensor.

The bytes are changed here by hand: no library would write such files.
"""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_gguf import TINY_FILES, write_gguf

from specrl_jax.models import hf
from specrl_jax.models.hf_config import config_from_json

NAN = float("nan")
INF = float("inf")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FLIPS = 25  # bits of the header of each format, one at a time


def line_of(source) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - callers compare the text
        hf.load(str(source))
    assert type(caught.value) is ValueError
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(TINY_FILES / "qwen2", tmp_path / "qwen2"))


# --- config.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["[1]", '"text"', "null", "", "[" * 100_000, '{"a":' * 100_000, b"\xff\xfe{}".decode("latin1")],
    ids=["list", "text", "null", "empty", "deep lists", "deep objects", "latin1"],
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_is_no_object(folder, name, text):
    (folder / "model.safetensors").unlink()
    (folder / name).write_text(text, encoding="latin1")
    assert f"{folder / name} must be " in line_of(folder)


@pytest.mark.parametrize("value", [[], {}, "text", 3, True, NAN, INF, -1, 1e300, 10**400, 1e15])
@pytest.mark.parametrize(
    "name",
    ["rope_scaling", "layer_types", "quantization_config", "rms_norm_eps", "rope_theta",
     "tie_word_embeddings", "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
     "head_dim", "intermediate_size", "max_position_embeddings", "model_type", "max_window_layers"],
)  # fmt: skip
def test_every_field_of_another_kind(folder, name, value):
    """Each is refused by its name, or is a value that means what it should."""
    values = json.loads((folder / "config.json").read_text()) | {"rope_parameters": None}
    values |= {"use_sliding_window": name == "max_window_layers"}
    (folder / "config.json").write_text(json.dumps(values | {name: value}))
    allowed = {"rope_scaling": ([], {}), "rope_theta": (3,)}
    allowed["max_window_layers"] = (3,)  # behind the last layer
    allowed["max_position_embeddings"] = (3,)
    if any(type(value) is type(x) and value == x for x in allowed.get(name, ())):
        hf.load(str(folder))
        return
    # A size of 3 is one, but not that of the weights; so is a model of a head of three dims.
    # `True` says of this model's own head that it is the embedding.
    named = "lm_head.weight" if value is True and name.startswith("tie") else name
    rule = f"{folder / 'config.json'}: {named} must "
    assert line_of(folder).startswith("" if value == 3 and value is not True else rule)


@pytest.mark.parametrize("value", [[], {}, "text", 3, True, NAN, INF, -1, 1e300, 10**400, 1e15])
@pytest.mark.parametrize(
    "name",
    ["sliding_window", "sliding_window_pattern", "layer_types", "rope_local_base_freq",
     "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping",
     "hidden_activation", "use_bidirectional_attention", "rope_scaling"],
)  # fmt: skip
def test_every_field_of_gemma_of_another_kind(name, value):
    """Each is refused by its name, or is a value that means what it should."""
    values = json.loads((TINY_FILES / "gemma3" / "config.json").read_text())
    values = {k: x for k, x in values.items() if k not in ("rope_parameters", "layer_types")}
    empty = ("rope_scaling", "attn_logit_softcapping", "use_bidirectional_attention")
    is_number = name not in (*empty, "layer_types", "hidden_activation")
    if (value in ([], {}) and name in empty) or (type(value) is int and value == 3 and is_number):
        config_from_json(values | {name: value})
        return
    with pytest.raises(ValueError, match=rf"^config.json: {name} must [^\n]*$"):
        config_from_json(values | {name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0}, r"rope_parameters.factor must be a number in [0.001, 1e+06], got 0"),
        ({"factor": NAN}, r"rope_parameters.factor must be a number in [0.001, 1e+06], got nan"),
        ({"high_freq_factor": 1.0}, "rope_parameters.high_freq_factor must be a number in [1, "),
        ({"rope_theta": None}, "rope_theta must be a number in [1, 1e+12], got None"),
        ({"original_max_position_embeddings": "a"}, "original_max_position_embeddings must be a "),
        ({"rope_type": []}, "rope_parameters.rope_type must be 'default' or 'linear' or "),
    ],
)
def test_frequencies_without_sense(folder, changes, message):
    values = json.loads((folder / "config.json").read_text())
    values["rope_parameters"] = LLAMA3 | changes
    (folder / "config.json").write_text(json.dumps(values))
    assert line_of(folder).startswith(f"{folder / 'config.json'}: {message}")


@pytest.mark.parametrize("weight_map", [[1], "text", None, {"a": 3}, {"a": {}}, {"a": "no\0file"}])
def test_a_weight_map_that_maps_nothing(folder, weight_map):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    line = line_of(folder)
    rule = f"{index} must name the file of every tensor in weight_map: "
    assert line.startswith(rule) or " must be a whole safetensors file" in line


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_weights_that_are_no_numbers(folder, name, value):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].astype(np.float32)
    tensors[name].flat[3] = value
    save_file(tensors, folder / "model.safetensors")
    rule = f"{folder / 'config.json'}: {name} must contain only finite numbers, got {value}"
    assert line_of(folder).startswith(rule)


@pytest.mark.parametrize(
    "change",
    [{"data_offsets": [0, 32]}, {"data_offsets": [-4, 28]}, {"data_offsets": [10**9, 10**9 + 32]},
     {"shape": [17]}, {"shape": [2**62, 2**62]}, {"dtype": "F8_E4M3"}, {"dtype": "ZZ"}],
)  # fmt: skip
def test_safetensors_headers_that_lie(folder, change):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])
    assert line_of(folder).startswith(f"{file} must be a whole safetensors file: ")


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """(a whole file, where the offset of its second tensor stands, offsets of the first three)."""
    from gguf import GGUFReader

    file = write_gguf("qwen3_tied", tmp_path_factory.mktemp("gguf"))
    tensors = GGUFReader(file).tensors
    field = tensors[1].field
    position = field.offset + sum(part.nbytes for part in field.parts[:-1])
    return file, int(position), [int(tensor.field.parts[-1][0]) for tensor in tensors[:3]]


@pytest.mark.parametrize("change", ["overlap", "swap", 32, 8, 1, -32, -(2**20), 2**40, 2**62])
def test_gguf_offsets_that_overlap_or_shift_or_go_negative(gguf_file, tmp_path, change):
    file, position, (first, second, third) = gguf_file
    offset = {"overlap": first, "swap": third}.get(change)
    offset = second + change if offset is None else offset
    whole = bytearray(file.read_bytes())
    whole[position : position + 8] = struct.pack("<Q", offset % 2**64)
    (tmp_path / "t.gguf").write_bytes(whole)
    assert line_of(tmp_path / "t.gguf").startswith(f"{tmp_path / 't.gguf'} must be a whole GGUF")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention.head_count", 0, "qwen3.attention.head_count must be an integer in [1, "),
        ("block_count", 10**6, "qwen3.block_count must be an integer in [1, 4096], got 1000000"),
        ("attention.key_length", "x", "qwen3.attention.key_length must be an integer in [1, "),
        ("attention.layer_norm_rms_epsilon", NAN, "rms_norm_eps must be a number in [1e-12, 0.1]"),
        ("rope.freq_base", -1.0, "rope_theta must be a number in [1, 1e+12], got -1.0"),
        ("feed_forward_length", "x", "intermediate_size must be a positive integer, got 'x'"),
    ],
)  # fmt: skip
def test_gguf_fields_without_sense(tmp_path, name, value, message):
    file = write_gguf("qwen3_tied", tmp_path, fields={name: value})
    assert line_of(file).startswith(f"{file}: {message}")


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_a_flipped_bit_of_a_header_is_one_line_or_no_damage(gguf_file, folder, tmp_path):
    rng = np.random.default_rng(0)
    weights = folder / "model.safetensors"
    for source, damaged, header in (
        (gguf_file[0], tmp_path / "t.gguf", 1856),
        (TINY_FILES / "qwen2/model.safetensors", weights, 3000),
    ):
        whole, refused = source.read_bytes(), 0
        for _ in range(FLIPS):
            bytes_now = bytearray(whole)
            bytes_now[int(rng.integers(header))] ^= 1 << int(rng.integers(8))
            damaged.write_bytes(bytes_now)
            try:
                hf.load(str(folder if damaged is weights else damaged))
            except ValueError as error:
                assert "\n" not in str(error)  # noqa: PT017 - one of two good ends
                refused += 1
        assert refused > FLIPS // 2
