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
class LinearScaling:
    """Rotary frequencies divided by a factor (arXiv 2306.15595; `rope_type: linear`)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters that are trained in the place of weights (LoRA, arXiv 2106.09685)."""

    rank: int  # r, columns of A and rows of B
    alpha: float
    names: tuple[str, ...]  # of the weights of a layer that have adapters

    @property
    def scale(self) -> float:
        """Factor of A·B, which is added to a weight."""
        return self.alpha / self.rank


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
    rope_scaling: RopeScaling | LinearScaling | None = None
    norm_eps: float = 1e-6
    max_positions: int = 32_768
    tie_embeddings: bool = True
    qk_norm: bool = False  # RMS norm of queries and keys
    attention_bias: bool = False  # on q, k and v
    output_bias: bool = False  # on the attention output
    mlp_bias: bool = False  # on all three MLP projections
    activation: str = "silu"  # of the MLP's gate, a key of `layers.ACTIVATIONS`
    norm_adds_one: bool = False  # RMS norms multiply by 1 + w instead of w
    post_norms: bool = False  # RMS norms of the outputs of attention and MLP too
    embed_scale: bool = False  # embeddings times embed_dim^1/2
    query_pre_attn_scalar: int = 0  # queries are divided by its root; 0: head_dim
    attn_softcap: float = 0.0  # scores of attention are cap * tanh(score / cap); 0: as they are
    final_softcap: float = 0.0  # logits likewise
    sliding_window: int = 0  # a local layer sees so many tokens, its own included; 0: none is local
    sliding_window_pattern: int = 1  # of so many layers each the last is global, the others local
    rope_local_theta: float = 0.0  # rope_theta of local layers, without rope_scaling; 0: the same
    dtype: str = "float32"  # the compute type; parameters are stored in float32
    remat: bool = False  # the update recomputes each layer in its backward pass
    unused_ids: IdRanges = ()  # that no token of the tokenizer has: their logits are -inf
    # Of `kernels.USES` and `head.KERNEL`, those for which a kernel is taken.
    kernels: tuple[str, ...] = ()
    lora: Lora | None = None  # None: all weights are trained

    @property
    def untied(self) -> bool:
        return not self.tie_embeddings

    @property
    def no_post_norms(self) -> bool:
        return not self.post_norms

    @property
    def lora_rank(self) -> int:
        return self.lora.rank if self.lora else 0

    @property
    def query_scale(self) -> float:
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def local_layers(self) -> tuple[bool, ...]:
        """Return which layers see a window alone; () where none does."""
        if not self.sliding_window:
            return ()
        return tuple((i + 1) % self.sliding_window_pattern > 0 for i in range(self.num_layers))

    def replace(self, **changes) -> "ModelConfig":
        return dataclasses.replace(self, **changes)
