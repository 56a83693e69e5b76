"""Shape of a decoder of one of the `families.FAMILIES`."""

import dataclasses

MAX_INT = 2**31 - 1  # sizes and positions are int32
MAX_LAYERS = 4096  # there is a loop over them

IdRanges = tuple[tuple[int, int], ...]  # [first, stop) of token ids


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaled rotary frequencies (arXiv 2407.21783; `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder; hashable, so that it can key a program."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    family: str = "llama"  # a key of `FAMILIES`
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    max_positions: int = 32_768
    tie_embeddings: bool = True
    qk_norm: bool = False  # RMS norm of queries and keys
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on the attention output
    mlp_bias: bool = False  # on all three MLP projections
    dtype: str = "float32"  # the compute type; parameters are stored in float32
    remat: bool = False  # the update recomputes each layer in its backward pass
    unused_ids: IdRanges = ()  # that no token of the tokenizer has: their logits are -inf
    kernels: tuple[str, ...] = ()  # of `attention.USES`, those for which a kernel is taken

    @property
    def untied(self) -> bool:
        return not self.tie_embeddings

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
