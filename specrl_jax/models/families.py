"""Differences between families of decoders: one row of `FAMILIES` for each.

A new family is a row here; new tensors are rows of `parameters.LAYER`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """The switches of a family; its name is the `model_type` of Hugging Face's config.json."""

    architecture: str  # the class in transformers
    max_positions: int  # max_position_embeddings where config.json has none
    head_dim: int | None = None  # where config.json has none; None: embed_dim / num_heads
    qk_norm: bool = False  # RMS norm of queries and keys
    qkv_bias: bool = False  # always biases on q, k and v, never on the output
    bias_fields: tuple[str, ...] = ()  # of attention_bias (q, k, v, output), mlp_bias; in the file
    sliding_window: bool = True  # the class knows windows; a file that uses them is refused
    heads_divide_embed: bool = False  # the class needs embed_dim % num_heads == 0
    gguf_interleaved: bool = False  # llama.cpp stores q and k rows in its own rotary order

    def config_defaults(self) -> dict[str, Any]:
        """Values of the fields that a config.json may leave out (transformers' own defaults)."""
        defaults = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
        defaults["max_position_embeddings"] = self.max_positions
        return defaults if self.head_dim is None else defaults | {"head_dim": self.head_dim}

    def switches(self, fields: Mapping[str, Any]) -> dict[str, bool]:
        """Return `ModelConfig`'s switches for the `bias_fields` of a config.json."""
        bias, mlp_bias = (
            name in self.bias_fields and bool(fields.get(name))
            for name in ("attention_bias", "mlp_bias")
        )
        return {
            "qk_norm": self.qk_norm,
            "attention_bias": bias or self.qkv_bias,
            "output_bias": bias,
            "mlp_bias": mlp_bias,
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
}
