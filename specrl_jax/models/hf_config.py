"""Hugging Face's config.json to `ModelConfig`, and back.

What this package cannot represent is refused in one line: sliding windows, other rotary types,
other activations, other families.
"""

from collections.abc import Mapping
from typing import Any

from specrl_jax.models.config import ModelConfig, RopeScaling

# What a field that config.json leaves out means, per model_type (transformers' own defaults).
_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
_DEFAULTS = {
    "llama": _COMMON | {"max_position_embeddings": 2048, "mlp_bias": False},
    "qwen2": _COMMON | {"max_position_embeddings": 32_768},
    "qwen3": _COMMON | {"max_position_embeddings": 32_768, "head_dim": 128},
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_from_json(values: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """Translates the fields of a config.json (transformers 4 or 5); `file` goes into errors."""
    family = values.get("model_type")
    if family not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        raise ValueError(f"{file}: model_type must be one of {known}, got {family!r}")
    values = _DEFAULTS[family] | {k: v for k, v in values.items() if v is not None}
    _refuse_unsupported(values, file)
    embed_dim, num_heads = (_size(values, k, file) for k in ("hidden_size", "num_attention_heads"))
    values.setdefault("num_key_value_heads", num_heads)
    values.setdefault("head_dim", embed_dim // num_heads)
    theta, scaling = _rope(values, file)
    bias = family == "qwen2" or bool(values.get("attention_bias", False))
    config = ModelConfig(
        vocab_size=_size(values, "vocab_size", file),
        embed_dim=embed_dim,
        mlp_dim=_size(values, "intermediate_size", file),
        num_layers=_size(values, "num_hidden_layers", file),
        num_heads=num_heads,
        num_kv_heads=_size(values, "num_key_value_heads", file),
        head_dim=_size(values, "head_dim", file),
        family=family,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(values["rms_norm_eps"]),
        max_positions=_size(values, "max_position_embeddings", file),
        tie_embeddings=bool(values["tie_word_embeddings"]),
        qk_norm=family == "qwen3",
        attention_bias=bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=bool(values.get("mlp_bias", False)) and family == "llama",
    )
    if config.num_heads % config.num_kv_heads:
        rule = f"must divide num_attention_heads {config.num_heads}"
        raise ValueError(f"{file}: num_key_value_heads {rule}, got {config.num_kv_heads}")
    return config


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a config; ValueError where the family's class lacks a switch."""
    if config.family not in _DEFAULTS:
        known = ", ".join(_DEFAULTS)
        raise ValueError(f"model.family must be one of {known}, got {config.family!r}")
    qwen2 = config.family == "qwen2"
    expressible = {
        "qk_norm": config.family == "qwen3",
        "attention_bias": qwen2 or config.attention_bias,
        "output_bias": config.attention_bias and not qwen2,
        "mlp_bias": config.mlp_bias and config.family == "llama",
    }
    for name, value in expressible.items():
        if getattr(config, name) != value:
            got = getattr(config, name)
            raise ValueError(
                f"model.{name} must be {value} to save family {config.family}, got {got}"
            )
    if config.family == "llama" and config.embed_dim % config.num_heads:
        rule = f"must be a multiple of model.num_heads {config.num_heads} to save family llama"
        raise ValueError(f"model.embed_dim {rule}, got {config.embed_dim}")
    values = {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "torch_dtype": "float32",
    }
    if not qwen2:
        values["attention_bias"] = config.attention_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if scaling := config.rope_scaling:
        # The older spelling: transformers 4 and 5 both read it.
        values["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    return values


def _size(values: Mapping[str, Any], name: str, file: str) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{file}: {name} must be a positive integer, got {value!r}")
    return value


def _refuse_unsupported(values: Mapping[str, Any], file: str) -> None:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"{file}: hidden_act must be 'silu', got {activation!r}")
    if "quantization_config" in values:
        method = values["quantization_config"].get("quant_method")
        raise ValueError(f"{file}: quantization_config must be absent, got quant_method {method!r}")
    if values["model_type"] == "llama":
        return  # its class knows no windows, whatever the file says
    window, first = values.get("sliding_window", 4096), values.get("max_window_layers", 28)
    if values.get("use_sliding_window") and first < _size(values, "num_hidden_layers", file):
        raise ValueError(
            f"{file}: use_sliding_window must be false (attention here sees every position), "
            f"got true with sliding_window {window} from layer {first}"
        )
    if kinds := set(values.get("layer_types", ())) - {"full_attention"}:
        raise ValueError(f"{file}: layer_types must be 'full_attention', got {min(kinds)!r}")


def _rope(values: Mapping[str, Any], file: str) -> tuple[float, RopeScaling | None]:
    """Transformers 5 writes `rope_parameters` with the theta inside, older ones `rope_scaling`."""
    field = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rope = values.get(field) or {}
    theta = float(rope.get("rope_theta", values["rope_theta"]))
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"{file}: partial_rotary_factor must be 1, got {partial}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"{file}: {field}.rope_type must be 'default' or 'llama3', got {kind!r}")
    if kind == "default":
        return theta, None
    # Left out, the original length is the model's own (as in transformers).
    rope = {"original_max_position_embeddings": values["max_position_embeddings"]} | rope
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if not isinstance(rope.get(name), int | float):
            raise ValueError(f"{file}: {field}.{name} must be a number, got {rope.get(name)!r}")
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=_size(rope, "original_max_position_embeddings", file),
    )
