"""Shape of a decoder of one of the `families.FAMILIES`."""

import dataclasses
import math

import jax
import numpy as np

MAX_INT = 2**31 - 1  # sizes and positions are int32
MAX_LAYERS = 4096  # the layers are a loop

IdRanges = tuple[tuple[int, int], ...]  # [first, stop) of token ids


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaled rotary frequencies (arXiv 2407.21783; `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's rotary frequencies and sharper attention (arXiv 2309.00071; `rope_type: yarn`)."""

    factor: float
    original_max_positions: int
    attention_factor: float = 0.0  # of queries and of keys; 0: 0.1 ln factor + 1
    beta_fast: float = 32.0  # turns within the original positions above which frequencies stay
    beta_slow: float = 1.0  # turns below which a frequency is divided by the factor
    truncate: bool = True  # round the bounds of the ramp in between to integers

    @property
    def magnitude(self) -> float:
        """Return the factor of queries and keys."""
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Rotary frequencies divided by a factor (arXiv 2306.15595; `rope_type: linear`)."""

    factor: float


Scaling = RopeScaling | LinearScaling | YarnScaling


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters that are trained instead of weights (LoRA, arXiv 2106.09685)."""

    rank: int  # r, columns of A and rows of B
    alpha: float
    names: tuple[str, ...]  # of a layer's weights that have adapters

    @property
    def scale(self) -> float:
        """Factor of A·B, which is added to a weight."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one decoder; hashable, so it can key a program."""

    vocab_size: int
    embed_dim: int
    mlp_dim: int  # of each expert, if there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    family: str = "llama"  # a key of `FAMILIES`
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    norm_eps: float = 1e-6
    max_positions: int = 32_768
    tie_embeddings: bool = True
    qk_norm: bool = False  # RMS norm of each head's queries and keys
    qk_norm_all: bool = False  # RMS norm over the queries of all heads, and over the keys
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on the attention output
    mlp_bias: bool = False  # on all three MLP projections
    activation: str = "silu"  # of the MLP's gate, a key of `layers.ACTIVATIONS`
    norm_adds_one: bool = False  # RMS norms multiply by 1 + w instead of w
    pre_norms: bool = True  # RMS norms of the inputs of attention and MLP
    post_norms: bool = False  # RMS norms of the outputs of attention and MLP
    embed_scale: bool = False  # embeddings times embed_dim^1/2
    embed_multiplier: float = 1.0  # embeddings times this
    residual_multiplier: float = 1.0  # outputs of attention and MLP times this
    query_pre_attn_scalar: int = 0  # queries are divided by its root; 0: head_dim
    attention_multiplier: float = 0.0  # queries times this; 0: use query_pre_attn_scalar
    logits_divisor: float = 1.0
    attn_softcap: float = 0.0  # attention scores become cap * tanh(score / cap); 0: unchanged
    final_softcap: float = 0.0  # likewise for logits
    sliding_window: int = 0  # tokens that a local layer sees, including its own; 0: none is local
    local_layers: tuple[bool, ...] = ()  # which layers see only a window; (): none
    unrotated_layers: tuple[bool, ...] = ()  # which have no rotary positions; (): none
    # rope_theta of local layers, without rope_scaling; 0: as in other layers, with rope_scaling
    rope_local_theta: float = 0.0
    num_experts: int = 0  # of each layer, instead of one MLP; 0: the MLP
    experts_per_token: int = 0
    norm_topk: bool = False  # the weights of a token's experts add up to 1
    dtype: str = "float32"  # the compute type; parameters are stored in float32
    remat: bool = False  # the update recomputes each layer in its backward pass
    unused_ids: IdRanges = ()  # ids without a token in the tokenizer: their logits are -inf
    # Those of `kernels.USES` and `head.KERNEL` for which a kernel is used.
    kernels: tuple[str, ...] = ()
    lora: Lora | None = None  # None: all weights are trained

    @property
    def untied(self) -> bool:
        return not self.tie_embeddings

    @property
    def no_post_norms(self) -> bool:
        return not self.post_norms

    @property
    def dense(self) -> bool:
        return not self.num_experts

    @property
    def routing(self) -> jax.ShapeDtypeStruct:
        """Return the shape of a token's `types.Tokens.routing`."""
        return jax.ShapeDtypeStruct(
            (self.num_layers, self.experts_per_token), np.min_scalar_type(self.num_experts)
        )

    @property
    def mlp_width(self) -> int:
        """Return the feed-forward width that is computed per token."""
        return self.mlp_dim * (self.experts_per_token or 1)

    @property
    def both_norms(self) -> bool:
        return self.pre_norms and self.post_norms

    @property
    def lora_rank(self) -> int:
        return self.lora.rank if self.lora else 0

    @property
    def query_scale(self) -> float:
        return self.attention_multiplier or (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def embed_factor(self) -> float:
        return self.embed_dim**0.5 if self.embed_scale else self.embed_multiplier

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
