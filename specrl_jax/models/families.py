"""Differences between families of decoders: one row of `FAMILIES` for each.

A new family is a row here; new tensors are rows of `parameters.LAYER`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from specrl_jax.registry import Table

LOCAL = "sliding_attention"  # in `layer_types`: the layer sees only a window
GLOBAL = "full_attention"

# Fields of config.json that only some families have, and our names for them.
OWN_FIELDS = {
    "hidden_activation": "activation",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_logit_softcapping": "attn_softcap",
    "final_logit_softcapping": "final_softcap",
    "rope_local_base_freq": "rope_local_theta",
    "embedding_multiplier": "embed_multiplier",
    "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "attention_multiplier",
    "logits_scaling": "logits_divisor",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "norm_topk_prob": "norm_topk",
}


def every_layer(fields: Mapping[str, Any], layer: int) -> bool:
    """Return True: all layers are local."""
    return True


def later_layers(fields: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer is local, if the first ones are global."""
    return layer >= fields["max_window_layers"]


def but_every_nth(fields: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer is local, if every n-th is global."""
    return (layer + 1) % fields["sliding_window_pattern"] > 0


def has_no_rope(fields: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer's queries and keys are not rotated."""
    if "no_rope_layers" in fields:
        return not fields["no_rope_layers"][layer]
    return (layer + 1) % fields["no_rope_layer_interval"] == 0


@dataclasses.dataclass(frozen=True)
class Family:
    """Switches of a family; its name is the `model_type` of Hugging Face's config.json."""

    architecture: str  # the class in transformers
    max_positions: int  # max_position_embeddings if config.json has none
    head_dim: int | None = None  # if config.json has none; None: embed_dim / num_heads
    qk_norm: bool = False  # RMS norm of each head's queries and keys
    qkv_bias: bool = False  # q, k and v always have biases, the output never does
    bias_fields: tuple[str, ...] = ()  # of attention_bias (q, k, v, output), mlp_bias; in the file
    # Which layers are local if a file has a sliding_window; None: the class has no windows.
    local: Callable[[Mapping[str, Any], int], bool] | None = None
    window_switch: bool = False  # windows need use_sliding_window
    layer_types: bool = False  # a file's layer_types replace `local`
    heads_divide_embed: bool = False  # the class needs embed_dim % num_heads == 0
    rope_types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    rope_by_kind: bool = False  # separate rope_parameters for local and global layers
    expert_size: str = ""  # the field of an expert's width, if there are experts
    # Values of fields of `defaults` for random weights, which have no file.
    random: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Names of tensors that stack several of ours vertically: parameter → name in a layer.
    fused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Defaults of further fields of config.json, including every name in `OWN_FIELDS` that it has.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Other switches of `ModelConfig`.
    always: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    gguf: str | None = ""  # its name in llama.cpp, if it differs; None: it has none
    gguf_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # llama.cpp's own
    gguf_interleaved: bool = False  # llama.cpp stores q and k rows in its own rotary order
    # Layers of the size whose query_pre_attn_scalar is embed_dim / num_heads; files lack it.
    gguf_layers_of_27b: int = 0

    def config_defaults(self) -> dict[str, Any]:
        """Return values of the fields that a config.json may leave out (transformers' defaults)."""
        defaults = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
        defaults["max_position_embeddings"] = self.max_positions
        if self.head_dim is not None:
            defaults["head_dim"] = self.head_dim
        return defaults | self.defaults

    def local_layers(self, fields: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
        """Return which of this many layers see only a window; () if none does."""
        switch = fields.get("use_sliding_window") or not self.window_switch
        if not (self.local and switch and fields.get("sliding_window")):
            return ()
        kinds = fields.get("layer_types") if self.layer_types else None
        if kinds:
            local = tuple(kind == LOCAL for kind in kinds)
        else:
            local = tuple(self.local(fields, layer) for layer in range(layers))
        return local if any(local) else ()

    def switches(self, fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """Return the `ModelConfig` fields that only some families set, from config.json's fields.

        layers: their number.
        """
        fields = self.defaults | fields
        local = self.local_layers(fields, layers)
        rotary = "no_rope_layer_interval" not in self.defaults
        unrotated = () if rotary else tuple(has_no_rope(fields, i) for i in range(layers))
        own = {ours: fields[name] for name, ours in OWN_FIELDS.items() if name in self.defaults}
        biases = {name for name in self.bias_fields if fields.get(name)}
        return {
            "qk_norm": self.qk_norm,
            "attention_bias": self.qkv_bias or "attention_bias" in biases,
            "output_bias": "attention_bias" in biases,
            "mlp_bias": "mlp_bias" in biases,
            "sliding_window": fields["sliding_window"] if local else 0,
            "local_layers": local,
            "unrotated_layers": unrotated if any(unrotated) else (),
            **own,
            **self.always,
        }


# The window of a Qwen file without one.
_QWEN_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}
_FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_OLMO = {"pre_norms": False, "post_norms": True, "qk_norm_all": True}
_GEMMA = {"norm_adds_one": True, "post_norms": True, "embed_scale": True}
# The config.json of larger models contains little more than what differs from these.
_GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

OWN_FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        max_positions=2048,
        bias_fields=("attention_bias", "mlp_bias"),
        heads_divide_embed=True,
        gguf_interleaved=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        max_positions=131_072,
        local=every_layer,
        defaults={"sliding_window": 4096, "num_key_value_heads": 8},
        gguf=None,  # llama.cpp calls it llama, without windows
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        max_positions=32_768,
        bias_fields=("attention_bias", "mlp_bias"),
        local=has_no_rope,
        window_switch=True,
        layer_types=True,
        defaults={
            "rope_theta": 2_000_000.0,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        gguf_interleaved=True,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        max_positions=4096,
        local=every_layer,
        rope_types=("default",),
        fused={
            "q_proj": "self_attn.qkv_proj.weight",
            "k_proj": "self_attn.qkv_proj.weight",
            "v_proj": "self_attn.qkv_proj.weight",
            "gate_proj": "mlp.gate_up_proj.weight",
            "up_proj": "mlp.gate_up_proj.weight",
        },
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 0},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        max_positions=2048,
        bias_fields=("attention_bias", "mlp_bias"),
        defaults={
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        gguf_interleaved=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        max_positions=2048,
        bias_fields=("attention_bias",),
        defaults={"rms_norm_eps": 1e-5},
        always=_OLMO,
    ),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        max_positions=2048,
        bias_fields=("attention_bias",),
        local=but_every_nth,
        layer_types=True,
        rope_by_kind=True,
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_local_base_freq": 500_000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        always=_OLMO,
        gguf=None,  # llama.cpp calls it olmo2, with windows
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        max_positions=32_768,
        qkv_bias=True,
        local=later_layers,
        window_switch=True,
        layer_types=True,
        defaults=_QWEN_WINDOWS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        max_positions=32_768,
        head_dim=128,
        qk_norm=True,
        bias_fields=("attention_bias",),
        local=later_layers,
        window_switch=True,
        layer_types=True,
        defaults=_QWEN_WINDOWS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        max_positions=32_768,
        qk_norm=True,
        bias_fields=("attention_bias",),
        local=every_layer,
        window_switch=True,
        expert_size="moe_intermediate_size",
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        random=_FEW_EXPERTS | {"norm_topk_prob": True},
        gguf="qwen3moe",
        gguf_fields={"norm_topk_prob": True},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        max_positions=4096,
        bias_fields=("attention_bias",),
        heads_divide_embed=True,
        expert_size="intermediate_size",
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        always={"qk_norm_all": True},
        random=_FEW_EXPERTS,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        max_positions=8192,
        head_dim=256,
        bias_fields=("attention_bias",),
        local=but_every_nth,
        layer_types=True,
        heads_divide_embed=True,
        rope_types=("default",),
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 256_000,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        always=_GEMMA,
        gguf_layers_of_27b=46,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        max_positions=131_072,
        head_dim=256,
        qk_norm=True,
        bias_fields=("attention_bias",),
        local=but_every_nth,
        layer_types=True,
        heads_divide_embed=True,
        rope_types=("default", "linear"),
        defaults=_GEMMA_DEFAULTS
        | {
            "vocab_size": 262_208,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": 0.0,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        always=_GEMMA,
        gguf="gemma3",
        gguf_layers_of_27b=62,
    ),
}

FAMILIES: dict[str, Family] = Table("FAMILIES", OWN_FAMILIES)
