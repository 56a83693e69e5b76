"""Differences between families of decoders: one row of `FAMILIES` for each.

A new family is a row here; new tensors are rows of `parameters.LAYER`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

# Fields of config.json that only some families have, and ours.
OWN_FIELDS = {
    "hidden_activation": "activation",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "attn_logit_softcapping": "attn_softcap",
    "final_logit_softcapping": "final_softcap",
    "sliding_window": "sliding_window",
    "sliding_window_pattern": "sliding_window_pattern",
    "rope_local_base_freq": "rope_local_theta",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Switches of a family; its name is the `model_type` of Hugging Face's config.json."""

    architecture: str  # the class in transformers
    max_positions: int  # max_position_embeddings where config.json has none
    head_dim: int | None = None  # where config.json has none; None: embed_dim / num_heads
    qk_norm: bool = False  # RMS norm of queries and keys
    qkv_bias: bool = False  # always biases on q, k and v, never on the output
    bias_fields: tuple[str, ...] = ()  # of attention_bias (q, k, v, output), mlp_bias; in the file
    # The class knows windows. A file that uses them is refused, unless `defaults` have a pattern.
    sliding_window: bool = True
    heads_divide_embed: bool = False  # the class needs embed_dim % num_heads == 0
    rope_types: tuple[str, ...] = ("default", "llama3")
    # Defaults of further fields of config.json, with every name of `OWN_FIELDS` that it has.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Other switches of `ModelConfig`.
    always: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    gguf: str = ""  # its name in llama.cpp, where that is another
    gguf_interleaved: bool = False  # llama.cpp stores q and k rows in its own rotary order
    # Layers of the size whose query_pre_attn_scalar is embed_dim / num_heads; no file says it.
    gguf_layers_of_27b: int = 0

    def config_defaults(self) -> dict[str, Any]:
        """Return values of the fields that a config.json may leave out (transformers' defaults)."""
        defaults = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
        defaults["max_position_embeddings"] = self.max_positions
        if self.head_dim is not None:
            defaults["head_dim"] = self.head_dim
        return defaults | self.defaults

    def switches(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what only some families set of `ModelConfig`, from a config.json's fields."""
        fields = self.defaults | fields
        own = {ours: fields[name] for name, ours in OWN_FIELDS.items() if name in self.defaults}
        biases = {name for name in self.bias_fields if fields.get(name)}
        return {
            "qk_norm": self.qk_norm,
            "attention_bias": self.qkv_bias or "attention_bias" in biases,
            "output_bias": "attention_bias" in biases,
            "mlp_bias": "mlp_bias" in biases,
            **own,
            **self.always,
        }


_GEMMA = {"norm_adds_one": True, "post_norms": True, "embed_scale": True}
# The config.json of larger models holds little more than what differs from these.
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

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        max_positions=2048,
        bias_fields=("attention_bias", "mlp_bias"),
        sliding_window=False,
        heads_divide_embed=True,
        gguf_interleaved=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", max_positions=32_768, qkv_bias=True),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        max_positions=32_768,
        head_dim=128,
        qk_norm=True,
        bias_fields=("attention_bias",),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        max_positions=8192,
        head_dim=256,
        bias_fields=("attention_bias",),
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
