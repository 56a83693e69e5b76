"""Hugging Face's config.json to `ModelConfig`, and back.

What a family's class in transformers does not know (windows, rotary types, activations, caps), and
other families, raise ValueError, in one line; so do fields of another type, and values that no
model has.
"""

import math
from collections.abc import Mapping
from typing import Any

from specrl_jax.models.config import MAX_INT, MAX_LAYERS, LinearScaling, ModelConfig, RopeScaling
from specrl_jax.models.families import FAMILIES, OWN_FIELDS

# Models that read images too, of whose text decoder the family is this name and "_text".
IMAGE_MODELS = ("gemma3",)
# Hugging Face's name → ours.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "embed_dim",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_positions",
}
# Bounds of numbers; a file that is beyond them is damaged.
_MOST = {"num_hidden_layers": MAX_LAYERS}  # of all others MAX_INT
_NORM_EPS = (1e-12, 0.1)
ROPE_THETA = (1.0, 1e12)
_ROPE_FACTOR = (1e-3, 1e6)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # 0: none
# Numbers among `OWN_FIELDS`, but for the sizes.
_OWN_NUMBERS = dict.fromkeys(_CAPS, (0.0, 1e6)) | {"rope_local_base_freq": ROPE_THETA}
_LOCAL = "sliding_attention"
_GLOBAL = "full_attention"


def config_from_json(values: Mapping[str, Any], file: str = "config.json") -> ModelConfig:
    """Return the `ModelConfig` of a config.json (transformers 4 or 5); errors name `file`."""
    values = _text_part(values)
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{file}: model_type must be one of {known}, got {name!r}")
    family = FAMILIES[name]
    if "rope_local_base_freq" in family.defaults:
        values = _split_rope(values, file)
    no_caps = {k: 0.0 for k in _CAPS if values.get(k, 0.0) is None}  # null is no default
    values = {k: v for k, v in values.items() if v is not None} | no_caps
    values = family.config_defaults() | values
    known = family.defaults.get("hidden_activation", "silu")
    for field in ("hidden_act", "hidden_activation"):
        if (activation := values.get(field, known)) != known:
            raise ValueError(f"{file}: {field} must be {known!r}, got {activation!r}")
    for field in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if values.get(field) and field not in family.defaults:
            raise ValueError(f"{file}: {field} must be absent or null, got {values[field]!r}")
    if "quantization_config" in values:
        method = values["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        raise ValueError(f"{file}: quantization_config must be absent, got quant_method {method!r}")
    if "sliding_window_pattern" in family.defaults:
        values |= _windows(values, file)
        _size(values, "query_pre_attn_scalar", file)
    elif family.sliding_window:
        _refuse_windows(values, file)
    for field, bounds in _OWN_NUMBERS.items():
        if field in family.defaults:
            values[field] = _number(values, field, bounds, file)
    embed_dim = _size(values, "hidden_size", file)
    num_heads = _size(values, "num_attention_heads", file)
    values.setdefault("num_key_value_heads", num_heads)
    values.setdefault("head_dim", embed_dim // num_heads)
    for switch in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        _switch(values, switch, file)
    theta, scaling = _rope(values, file, family.rope_types)
    config = ModelConfig(
        **{ours: _size(values, theirs, file) for theirs, ours in _SIZES.items()},
        family=name,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(values, "rms_norm_eps", _NORM_EPS, file),
        tie_embeddings=values["tie_word_embeddings"],
        **family.switches(values),
    )
    if config.num_heads % config.num_kv_heads:
        rule = f"must divide num_attention_heads {config.num_heads}"
        raise ValueError(f"{file}: num_key_value_heads {rule}, got {config.num_kv_heads}")
    if config.head_dim % 2:
        raise ValueError(f"{file}: head_dim must be even (rotary halves), got {config.head_dim}")
    return config


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a config; ValueError where the family's class refuses its sizes."""
    family = FAMILIES[config.family]
    if family.heads_divide_embed and config.embed_dim % config.num_heads:
        rule = f"must be a multiple of model.num_heads {config.num_heads}"
        raise ValueError(
            f"model.embed_dim {rule} to save family {config.family}, got {config.embed_dim}"
        )
    values = {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "torch_dtype": "float32",
    }
    values |= {name: getattr(config, name) for name in family.bias_fields}
    own = {name: getattr(config, ours) for name, ours in OWN_FIELDS.items()}
    values |= {name: own[name] or None for name in own if name in family.defaults}
    if "sliding_window_pattern" in family.defaults:
        local = config.local_layers or (False,) * config.num_layers
        values["layer_types"] = [_LOCAL if x else _GLOBAL for x in local]
    # The older spelling: transformers 4 and 5 both read it.
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling):
        values["rope_scaling"] = {"rope_type": "linear", "factor": scaling.factor}
    elif scaling:
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
    most = _MOST.get(name, MAX_INT)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{file}: {name} must be a positive integer, got {value!r}")
    if value > most:
        raise ValueError(f"{file}: {name} must be <= {most}, got {value}")
    return value


def _number(
    values: Mapping[str, Any], name: str, bounds: tuple[float, float], file: str, path: str = ""
) -> float:
    """Return the number under `name`; `path` is what its name begins with in the file."""
    value = values.get(name)
    low, high = bounds
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        rule = f"must be a number in [{low:g}, {high:g}]"
        raise ValueError(f"{file}: {path}{name} {rule}, got {value!r:.40}")
    return float(value)


def _switch(values: Mapping[str, Any], name: str, file: str) -> None:
    if not isinstance(value := values.get(name, False), bool):
        raise ValueError(f"{file}: {name} must be true or false, got {value!r}")


def _refuse_windows(values: Mapping[str, Any], file: str) -> None:
    window = values.get("sliding_window", 4096)
    first = values.get("max_window_layers", 28)
    layers = _size(values, "num_hidden_layers", file)
    _switch(values, "use_sliding_window", file)
    if values.get("use_sliding_window") and not (isinstance(first, int) and first >= layers):
        raise ValueError(
            f"{file}: use_sliding_window must be false (attention here sees every position), "
            f"got true with sliding_window {window} from layer {first}"
        )
    kinds = values.get("layer_types", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention" or not isinstance(kinds, list):
            raise ValueError(f"{file}: layer_types must be ['full_attention', ..], got {kind!r}")


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text decoder of a model that reads images too."""
    text = values.get("text_config")
    if values.get("model_type") not in IMAGE_MODELS or not isinstance(text, Mapping):
        return values
    outer = ("quantization_config", "tie_word_embeddings")
    kept = {name: values[name] for name in outer if name in values}
    return kept | {"model_type": f"{values['model_type']}_text"} | text


def _windows(values: Mapping[str, Any], file: str) -> dict[str, int]:
    """Return window and pattern of the local layers; a window of 0 where none is local."""
    layers = _size(values, "num_hidden_layers", file)
    window = _size(values, "sliding_window", file)
    pattern = _size(values, "sliding_window_pattern", file)
    kinds = values.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and _GLOBAL in kinds
        pattern = kinds.index(_GLOBAL) + 1 if known else max(pattern, layers + 1)
    expected = [_LOCAL if (i + 1) % pattern else _GLOBAL for i in range(layers)]
    if kinds is not None and kinds != expected:
        raise ValueError(
            f"{file}: layer_types must be {layers}, each {_LOCAL!r} but every n-th {_GLOBAL!r}, "
            f"got {kinds!r:.60}"
        )
    return {"sliding_window": window if pattern > 1 else 0, "sliding_window_pattern": pattern}


def _split_rope(values: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """Return fields whose `rope_parameters`, as transformers 5 writes them, are global layers'."""
    both = values.get("rope_parameters") or values.get("rope_scaling")
    if not isinstance(both, Mapping) or not both.keys() & {_LOCAL, _GLOBAL}:
        return values
    local = both.get(_LOCAL) or {}
    rest = both.get(_GLOBAL) or {}
    for name, rope in ((_LOCAL, local), (_GLOBAL, rest)):
        if not isinstance(rope, Mapping):
            raise ValueError(f"{file}: rope_parameters.{name} must be an object, got {rope!r:.40}")
    if (kind := local.get("rope_type", "default")) != "default":
        rule = f"rope_parameters.{_LOCAL}.rope_type must be 'default'"
        raise ValueError(f"{file}: {rule}, got {kind!r:.40}")
    theta = local.get("rope_theta", values.get("rope_local_base_freq"))
    return {**values, "rope_parameters": rest, "rope_local_base_freq": theta}


def _rope(
    values: Mapping[str, Any], file: str, known: tuple[str, ...]
) -> tuple[float, RopeScaling | LinearScaling | None]:
    """Return theta and scaling of the frequencies."""
    # Transformers 5 writes `rope_parameters` with the theta inside, older ones `rope_scaling`.
    field = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    rope = values.get(field) or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{file}: {field} must be an object or null, got {rope!r:.40}")
    theta = _number({"rope_theta": values["rope_theta"]} | rope, "rope_theta", ROPE_THETA, file)
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"{file}: partial_rotary_factor must be 1, got {partial}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in known:
        rule = f"must be {' or '.join(map(repr, known))}"
        raise ValueError(f"{file}: {field}.rope_type {rule}, got {kind!r}")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(_number(rope, "factor", _ROPE_FACTOR, file, f"{field}."))
    # Left out, the original length is the model's own (as in transformers).
    rope = {"original_max_position_embeddings": values["max_position_embeddings"]} | rope
    factor = _number(rope, "factor", _ROPE_FACTOR, file, f"{field}.")
    low = _number(rope, "low_freq_factor", _ROPE_FACTOR, file, f"{field}.")
    above = (math.nextafter(low, math.inf), _ROPE_FACTOR[1])
    return theta, RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=_number(rope, "high_freq_factor", above, file, f"{field}."),
        original_max_positions=_size(rope, "original_max_position_embeddings", file),
    )
