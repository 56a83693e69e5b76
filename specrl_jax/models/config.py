"""Shape of a decoder of the Llama family: Llama, Qwen2, Qwen3, SmolLM2."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretched rotary frequencies (arXiv 2407.21783; `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder; hashable, so that programs can be cached by it.

    `family` is the Hugging Face `model_type` it is saved as: llama, qwen2 or qwen3.
    `attention_bias` is on q, k and v; `output_bias` on the attention output; `mlp_bias` on all
    three MLP projections. `dtype` is the compute type; parameters are stored in float32.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    family: str = "llama"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    max_positions: int = 32_768
    tie_embeddings: bool = True
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    remat: bool = False

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
