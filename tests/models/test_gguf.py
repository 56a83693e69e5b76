"""GGUF files, written as llama.cpp's converter does, against the same model's own directory.

The real file, with quantised weights, is in test_hf.py.
"""

import functools
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from references.make_references import TINY
from safetensors.numpy import load_file

from specrl_jax.models import hf
from specrl_jax.models.config import LinearScaling, RopeScaling, YarnScaling
from specrl_jax.models.families import FAMILIES
from specrl_jax.models.gguf import open_gguf

TINY_FILES = Path(__file__).parents[1] / "references" / "tiny"


def llama_cpp_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def llama_cpp_divisors(theta: float, head_dim: int, factor: float) -> np.ndarray:
    """`LlamaModel.generate_extra_tensors` of the same file, with Llama 3.1's numbers."""
    low, high, length = 1.0, 4.0, 8192
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def join_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack each layer's experts, as `Qwen2MoeModel.modify_tensors` of the same file does."""
    joined = {}
    for key, array in tensors.items():
        name = re.sub(r"experts\.\d+\.", "experts.", key)
        count = sum(re.sub(r"experts\.\d+\.", "experts.", x) == name for x in tensors)
        numbered = (
            [key.replace(re.search(r"experts\.\d+", key)[0], f"experts.{i}") for i in range(count)]
            if name != key
            else []
        )
        joined[name] = np.stack([tensors[x] for x in numbered]) if numbered else array
    return joined


def write_gguf(
    name: str, folder: Path, fields=None, tensors=None, architecture=None, **options
) -> Path:
    """A tiny reference as llama.cpp's converter writes it: weights float16, norms float32."""
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map

    config = hf.load(str(TINY_FILES / name))[0]
    own = FAMILIES[config.family].gguf or config.family
    family = architecture or own
    path = folder / f"{name}.gguf"
    writer = GGUFWriter(path, family, **options)
    metadata = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.embed_dim,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    if config.sliding_window:
        metadata["attention.sliding_window"] = config.sliding_window
    if config.num_experts:
        metadata |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.mlp_dim,
        }
    if config.family == "granite":
        metadata |= {
            "embedding_scale": config.embed_multiplier,
            "residual_scale": config.residual_multiplier,
            "attention.scale": config.attention_multiplier,
            "logit_scale": config.logits_divisor,
        }
    if isinstance(config.rope_scaling, YarnScaling):
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": config.rope_scaling.factor,
            "rope.scaling.original_context_length": config.rope_scaling.original_max_positions,
            "rope.scaling.yarn_beta_fast": config.rope_scaling.beta_fast,
            "rope.scaling.yarn_beta_slow": config.rope_scaling.beta_slow,
        }
    if config.attn_softcap:
        metadata["attn_logit_softcapping"] = config.attn_softcap
    if config.final_softcap:
        metadata["final_logit_softcapping"] = config.final_softcap
    if isinstance(config.rope_scaling, LinearScaling):
        metadata["rope.scaling.type"] = "linear"
        metadata["rope.scaling.factor"] = config.rope_scaling.factor
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata | (fields or {})).items():
        if value is not None:  # left out
            add[type(value)](f"{family}.{key}", value)
    name_map = get_tensor_name_map(MODEL_ARCH[own.upper()], config.num_layers)
    for key, array in join_experts(load_file(TINY_FILES / name / "model.safetensors")).items():
        values = array.astype(np.float32)
        if FAMILIES[config.family].gguf_interleaved and (".q_proj" in key or ".k_proj" in key):
            values = llama_cpp_rows(values, 4 if ".q_proj" in key else 2)
        if config.norm_adds_one and key.endswith("norm.weight"):
            values = values + 1
        stored = values if values.ndim == 1 else values.astype(np.float16)
        name = name_map.get_name(key, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(name, np.ascontiguousarray(stored))
    for key, array in (tensors or {}).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# llama.cpp has no such family, or none with such windows.
NOT_IN_LLAMA_CPP = ("mistral", "mistral_window", "qwen2_windows", "olmo3")


@pytest.mark.parametrize("name", [name for name in TINY if name not in NOT_IN_LLAMA_CPP])
def test_gguf_of_each_family(name, tmp_path):
    config, params = hf.load(str(write_gguf(name, tmp_path)))
    expected_config, expected = hf.load(str(TINY_FILES / name))
    if isinstance(expected_config.rope_scaling, RopeScaling):
        # without a tensor of divisors the file knows nothing of stretched frequencies
        expected_config = replace(expected_config, rope_scaling=None)
    if isinstance(expected_config.rope_scaling, YarnScaling):
        # llama.cpp multiplies by 0.1 ln factor + 1
        scaling = replace(expected_config.rope_scaling, attention_factor=0.0)
        expected_config = replace(expected_config, rope_scaling=scaling)
    if name.startswith("gemma"):
        # The file has neither; llama.cpp takes the head dim and Gemma's own base.
        expected_config = replace(expected_config, query_pre_attn_scalar=8)
    if name == "gemma3":
        expected_config = replace(expected_config, rope_local_theta=10_000.0)
    assert config == expected_config
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-7), params, expected)


def test_gguf_with_llama3_frequencies(tmp_path):
    divisors = llama_cpp_divisors(500_000.0, head_dim=8, factor=32.0)
    assert len(set(divisors.tolist())) == 3  # kept, mixed, divided
    fields = {"rope.freq_base": 500_000.0}
    tensors = {"rope_freqs.weight": divisors}
    config, _ = hf.load(str(write_gguf("llama_biases", tmp_path, fields, tensors)))
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    fields["rope.freq_base"] = 10_000.0
    file = write_gguf("llama_biases", tmp_path, fields, tensors)
    with pytest.raises(ValueError, match=r"rope_freqs.weight must contain Llama 3's frequencies"):
        hf.load(str(file))


def test_the_fast_reader_reads_what_ggufs_own_does(tmp_path):
    from gguf import GGUFReader, GGUFWriter

    arrays = {"texts": ["a", "", "日本"], "floats": [0.5, -1.0], "ints": [1, -2], "bools": [True]}
    writer = GGUFWriter(tmp_path / "t.gguf", "llama")
    for name, values in arrays.items():
        writer.add_array(name, values)
    writer.add_string("after", "x")
    writer.add_tensor("t", np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = open_gguf(tmp_path / "t.gguf")
    theirs = GGUFReader(tmp_path / "t.gguf")
    for reader in (ours, theirs):
        assert {name: reader.fields[name].contents() for name in arrays} == arrays
        assert reader.fields["after"].contents() == "x"
        np.testing.assert_array_equal(reader.tensors[0].data, np.arange(4))
    assert ours.fields["texts"].contents(2) == theirs.fields["texts"].contents(2) == "日本"
    assert ours.data_offset == theirs.data_offset


def test_gguf_of_gemma_refuses_other_patterns_and_knows_the_largest_model(tmp_path):
    file = write_gguf("gemma3", tmp_path, {"attention.sliding_window_pattern": 4})
    with pytest.raises(ValueError, match=r"gemma3\.attention\.sliding_window_pattern must be 6 or"):
        hf.load_config(str(file))
    file = write_gguf("gemma3", tmp_path, {"block_count": 62, "rope.freq_base_swa": 70.0})
    config = hf.load_config(str(file))
    assert (config.query_pre_attn_scalar, config.rope_local_theta) == (16 // 4, 70.0)


def test_gguf_of_gemma2_without_caps_has_those_of_llama_cpp(tmp_path):
    left_out = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = hf.load_config(str(write_gguf("gemma2", tmp_path, left_out)))
    assert (config.attn_softcap, config.final_softcap) == (50.0, 30.0)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("rope.scaling.type", "longrope", "'none' or absent"),
        ("attention.sliding_window", 128, "0 or absent"),
        ("attention.sliding_window_pattern", 2, "0 or absent"),
        ("rope.dimension_count", 4, "the head dim 8"),
    ],
)
def test_refused_fields(field, value, rule, tmp_path):
    file = write_gguf("qwen3_tied", tmp_path, fields={field: value})
    with pytest.raises(ValueError, match=rf"^{file}: qwen3.{field} must be {rule}, got {value!r}$"):
        hf.load(str(file))


def test_refused_families_and_tensors(tmp_path):
    file = write_gguf("qwen3_tied", tmp_path, architecture="gemma3n")
    with pytest.raises(ValueError, match=rf"^{file}: general.architecture must be .* 'gemma3n'$"):
        hf.load(str(file))
    tensors = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    file = write_gguf("qwen3_tied", tmp_path, tensors=tensors)
    with pytest.raises(ValueError, match=r": unknown tensor blk.0.attn_sinks.weight \(1 in all\)$"):
        hf.load(str(file))


@pytest.mark.parametrize("name", ["qwen3_moe", "llama_biases"])
def test_a_split_file_is_read_whole_whichever_part_is_named(name, tmp_path):
    _, expected = hf.load(str(write_gguf(name, tmp_path)))
    write_gguf(name, tmp_path, split_max_tensors=9)
    parts = sorted(tmp_path.glob(f"{name}-*.gguf"))
    assert len(parts) > 2
    for part in (parts[0], parts[-1]):
        config, params = hf.load(str(part))
        assert config == hf.load_config(str(part))
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_parts_that_are_missing_or_of_another_model(tmp_path):
    write_gguf("llama_biases", tmp_path, split_max_tensors=9)
    first, second, *others = sorted(tmp_path.glob("*.gguf"))
    content = second.read_bytes()
    second.unlink()
    total = len(others) + 2
    rule = rf"^{first} must be next to the other parts of its model, {total} in all; {second.name}"
    with pytest.raises(ValueError, match=rule + " is missing$"):
        hf.load(str(first))
    second.write_bytes(others[0].read_bytes())
    rule = rf"^{second} must be part 2 of {total}, according to its name, got part 3 of {total}$"
    with pytest.raises(ValueError, match=rule):
        hf.load(str(others[0]))
    second.write_bytes(content[:100])
    with pytest.raises(ValueError, match=rf"^{second} must be a whole GGUF file"):
        hf.load(str(first))
    whole = write_gguf("qwen3_tied", tmp_path)
    renamed = whole.rename(tmp_path / "other-00001-of-00001.gguf")
    hf.load(str(renamed))
