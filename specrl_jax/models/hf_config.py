"""Hugging Face's config.json to `ModelConfig`, and back.

Raises a one-line ValueError for other families and for what a family's class in transformers does
not support (windows, rotary types, activations, caps), for fields of another type, and for values
that no model has.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from specrl_jax.models.config import (
    MAX_INT,
    MAX_LAYERS,
    LinearScaling,
    ModelConfig,
    RopeScaling,
    Scaling,
    YarnScaling,
)
from specrl_jax.models.families import FAMILIES, GLOBAL, LOCAL, OWN_FIELDS, Family

# Models that also read images; their text decoder's family is this name plus "_text".
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
# Bounds of numbers; a file beyond them is damaged.
_MOST = {"num_hidden_layers": MAX_LAYERS}  # MAX_INT for all others
_NORM_EPS = (1e-12, 0.1)
ROPE_THETA = (1.0, 1e12)
_ROPE_FACTOR = (1e-3, 1e6)
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")  # 0: none
_MULTIPLIER = (1e-6, 1e6)
# Numbers among `OWN_FIELDS`, except for the sizes.
_OWN_NUMBERS = {
    **dict.fromkeys(_CAPS, (0.0, 1e6)),
    "rope_local_base_freq": ROPE_THETA,
    "embedding_multiplier": _MULTIPLIER,
    "residual_multiplier": _MULTIPLIER,
    "attention_multiplier": _MULTIPLIER,
    "logits_scaling": _MULTIPLIER,
}
# Fields that change what a model computes and that no family here has, unless in its defaults.
_UNKNOWN = ("attn_logit_softcapping", "use_bidirectional_attention", "clip_qkv")
# Here null is a separate value, not the family's default.
_NULLS = dict.fromkeys((*_CAPS, "sliding_window"), 0)
_SCALINGS: dict[str, type] = {
    "linear": LinearScaling,
    "llama3": RopeScaling,
    "yarn": YarnScaling,
}
_LENGTH = "original_max_position_embeddings"


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
    nulls = {k: zero for k, zero in _NULLS.items() if values.get(k, zero) is None}
    if values.get("num_key_value_heads", 0) is None:
        nulls["num_key_value_heads"] = values.get("num_attention_heads")
    values = {k: v for k, v in values.items() if v is not None} | nulls
    if family.expert_size and "num_local_experts" in values:  # as transformers 5 writes it
        values = {"num_experts": values["num_local_experts"]} | values
    values = family.config_defaults() | values
    known = family.defaults.get("hidden_activation", "silu")
    for field in ("hidden_act", "hidden_activation"):
        if (activation := values.get(field, known)) != known:
            raise ValueError(f"{file}: {field} must be {known!r}, got {activation!r}")
    for field in _UNKNOWN:
        if values.get(field) and field not in family.defaults:
            raise ValueError(f"{file}: {field} must be absent or null, got {values[field]!r}")
    if "quantization_config" in values:
        method = values["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        raise ValueError(f"{file}: quantization_config must be absent, got quant_method {method!r}")
    if family.local:
        _check_windows(values, family, file)
    if "query_pre_attn_scalar" in family.defaults:
        _size(values, "query_pre_attn_scalar", file)
    if "no_rope_layer_interval" in family.defaults:
        _check_no_rope(values, file)
    for field, bounds in _OWN_NUMBERS.items():
        if field in family.defaults:
            values[field] = _number(values, field, bounds, file)
    if family.expert_size:
        values |= _expert_fields(values, family, file)
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
        **family.switches(values, values["num_hidden_layers"]),
    )
    if config.num_heads % config.num_kv_heads:
        rule = f"must divide num_attention_heads {config.num_heads}"
        raise ValueError(f"{file}: num_key_value_heads {rule}, got {config.num_kv_heads}")
    if config.head_dim % 2:
        raise ValueError(f"{file}: head_dim must be even (rotary halves), got {config.head_dim}")
    return config


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a config; ValueError if the family's class rejects its sizes."""
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
    values |= {n: own[n] or None for n in own if n in family.defaults and own[n] is not False}
    if family.expert_size:
        values |= {family.expert_size: config.mlp_dim, "norm_topk_prob": config.norm_topk}
    if family.local:
        values |= _window_fields(config, family)
    if "no_rope_layer_interval" in family.defaults:
        unrotated = config.unrotated_layers or (False,) * config.num_layers
        values["no_rope_layers"] = [int(not x) for x in unrotated]
    # The older spelling: transformers 4 and 5 both read it.
    if config.rope_scaling:
        values["rope_scaling"] = _scaling_fields(config.rope_scaling)
    if family.rope_by_kind:
        plain = {"rope_type": "default", "rope_theta": config.rope_theta}
        values["rope_parameters"] = {
            GLOBAL: plain | values.get("rope_scaling", {}),
            LOCAL: plain | {"rope_theta": config.rope_local_theta},
        }
    return values


def _window_fields(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the fields of a family's windows."""
    local = config.local_layers or (False,) * config.num_layers
    fields: dict[str, Any] = {"sliding_window": config.sliding_window or None}
    if family.window_switch:
        fields["use_sliding_window"] = any(local)
    if family.layer_types:
        fields["layer_types"] = [LOCAL if x else GLOBAL for x in local]
    # Read by versions that have no layer_types.
    if "max_window_layers" in family.defaults:
        fields["max_window_layers"] = (*local, True).index(True)
    if "sliding_window_pattern" in family.defaults:
        fields["sliding_window_pattern"] = (*local, False).index(False) + 1
    return fields


def _scaling_fields(scaling: Scaling) -> dict[str, Any]:
    """Return a scaling in the file format, without its type's default values."""
    (kind,) = (name for name, of in _SCALINGS.items() if isinstance(scaling, of))
    fields = {"rope_type": kind}
    for field in dataclasses.fields(scaling):
        value = getattr(scaling, field.name)
        name = _LENGTH if field.name == "original_max_positions" else field.name
        fields |= {} if value == field.default else {name: value}
    return fields


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
    """Return the number under `name`; `path` is the prefix of its name in the file."""
    value = values.get(name)
    low, high = bounds
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        rule = f"must be a number in [{low:g}, {high:g}]"
        raise ValueError(f"{file}: {path}{name} {rule}, got {value!r:.40}")
    return float(value)


def _switch(values: Mapping[str, Any], name: str, file: str) -> None:
    if not isinstance(value := values.get(name, False), bool):
        raise ValueError(f"{file}: {name} must be true or false, got {value!r}")


def _check_windows(values: Mapping[str, Any], family: Family, file: str) -> None:
    """Raise ValueError for window fields that the family's class reads differently."""
    layers = _size(values, "num_hidden_layers", file)
    _switch(values, "use_sliding_window", file)
    kinds = values.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in (LOCAL, GLOBAL) for kind in kinds)
        if not known or len(kinds) != layers:
            rule = f"must be {layers}, each {LOCAL!r} or {GLOBAL!r}"
            raise ValueError(f"{file}: layer_types {rule}, got {kinds!r:.60}")
    if values.get("use_sliding_window") or not family.window_switch:
        for name in ("sliding_window", "sliding_window_pattern", "max_window_layers"):
            if name in family.defaults and not _is_none(values, name, kinds):
                _size(values, name, file)
    local = family.local_layers(values, layers) or (False,) * layers
    for kind, expected in zip(kinds or (), local, strict=False):
        if kind != (own := LOCAL if expected else GLOBAL):
            rule = f"must be {own!r} there, as {family.architecture} computes it"
            raise ValueError(f"{file}: layer_types {rule}, got {kind!r}")


def _is_none(values: Mapping[str, Any], name: str, kinds: list | None) -> bool:
    """Return whether a file has null there, or layers that need no such field."""
    zero = type(values[name]) is int and values[name] == 0
    return zero and (name != "sliding_window" or LOCAL not in (kinds or ()))


def _expert_fields(values: Mapping[str, Any], family: Family, file: str) -> dict[str, int]:
    """Return the sizes of a mixture; ValueError if some layers have no experts."""
    most = _size(values, "num_experts", file)
    if _size(values, "num_experts_per_tok", file) > most:
        got = values["num_experts_per_tok"]
        raise ValueError(f"{file}: num_experts_per_tok must be <= num_experts {most}, got {got}")
    _switch(values, "norm_topk_prob", file)
    for name, known in {"decoder_sparse_step": 1, "mlp_only_layers": []}.items():
        if (got := values.get(name, known)) != known:
            raise ValueError(f"{file}: {name} must be {known!r}, got {got!r:.40}")
    return {"intermediate_size": _size(values, family.expert_size, file)}


def _check_no_rope(values: Mapping[str, Any], file: str) -> None:
    """Raise ValueError unless every layer is listed with or without rotary positions."""
    layers = _size(values, "num_hidden_layers", file)
    _size(values, "no_rope_layer_interval", file)
    given = values.get("no_rope_layers", [1] * layers)
    known = isinstance(given, list) and all(type(x) is int and x in (0, 1) for x in given)
    if not known or len(given) < layers:
        raise ValueError(f"{file}: no_rope_layers must be {layers}, each 0 or 1, got {given!r:.60}")


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text decoder's fields of a model that also reads images."""
    text = values.get("text_config")
    if values.get("model_type") not in IMAGE_MODELS or not isinstance(text, Mapping):
        return values
    outer = ("quantization_config", "tie_word_embeddings")
    kept = {name: values[name] for name in outer if name in values}
    return kept | {"model_type": f"{values['model_type']}_text"} | text


def _split_rope(values: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """Return the fields with the global layers' part of transformers 5's `rope_parameters`."""
    both = values.get("rope_parameters") or values.get("rope_scaling")
    if not isinstance(both, Mapping) or not both.keys() & {LOCAL, GLOBAL}:
        return values
    local = both.get(LOCAL) or {}
    rest = both.get(GLOBAL) or {}
    for name, rope in ((LOCAL, local), (GLOBAL, rest)):
        if not isinstance(rope, Mapping):
            raise ValueError(f"{file}: rope_parameters.{name} must be an object, got {rope!r:.40}")
    if (kind := local.get("rope_type", "default")) != "default":
        rule = f"rope_parameters.{LOCAL}.rope_type must be 'default'"
        raise ValueError(f"{file}: {rule}, got {kind!r:.40}")
    theta = local.get("rope_theta", values.get("rope_local_base_freq"))
    return {**values, "rope_parameters": rest, "rope_local_base_freq": theta}


def _rope(
    values: Mapping[str, Any], file: str, known: tuple[str, ...]
) -> tuple[float, Scaling | None]:
    """Return theta and scaling of the frequencies."""
    # Transformers 5 writes `rope_parameters` including theta, older versions `rope_scaling`.
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
    factor = _number(rope, "factor", _ROPE_FACTOR, file, f"{field}.")
    if kind == "linear":
        return theta, LinearScaling(factor)
    # If left out, the original length is the model's own (as in transformers).
    rope = {_LENGTH: values["max_position_embeddings"]} | rope
    length = _size(rope, _LENGTH, file)
    scaling = _yarn if kind == "yarn" else _llama3
    return theta, scaling(rope, factor, length, file, f"{field}.")


def _llama3(
    rope: Mapping[str, Any], factor: float, length: int, file: str, path: str
) -> RopeScaling:
    low = _number(rope, "low_freq_factor", _ROPE_FACTOR, file, path)
    above = (math.nextafter(low, math.inf), _ROPE_FACTOR[1])
    high = _number(rope, "high_freq_factor", above, file, path)
    return RopeScaling(factor, low, high, length)


def _yarn(rope: Mapping[str, Any], factor: float, length: int, file: str, path: str) -> YarnScaling:
    """Return YaRN's scaling, with mscale and mscale_all_dim combined as in transformers."""
    given = {name: x for name, x in rope.items() if x is not None}
    fields = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    numbers = {x: _number(given, x, _ROPE_FACTOR, file, path) for x in fields if x in given}
    scales = [numbers.pop(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if all(scales) and "attention_factor" not in numbers:
        log_factor = math.log(max(factor, 1.0))
        own = 0.1 * scales[0] * log_factor + 1.0
        numbers["attention_factor"] = own / (0.1 * scales[1] * log_factor + 1.0)
    _switch(given, "truncate", file)
    return YarnScaling(factor, length, truncate=given.get("truncate", True), **numbers)
