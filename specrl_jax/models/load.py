"""The policy that a configuration names: its shape, and its weights where they exist already."""

import jax

from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.models import hf
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Params, check_mesh, init_params, place_params


def load_policy(config, tokenizer: Tokenizer) -> tuple[ModelConfig, Params]:
    """Shape and float32 weights in the stored layout of the mesh in use.

    From `config.model.source`, or random and keyed by `config.seed` where that is "". Raises
    ValueError in one line where a source is missing, of another kind, or the mesh does not fit.
    """
    if not config.model.source:
        shape = _from_nothing(config, tokenizer)
        check_mesh(shape, jax.sharding.get_mesh())
        return shape, init_params(shape, jax.random.key(config.seed))
    shape, weights = hf.load(config.model.source)
    shape = _for_run(shape, config)
    if tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(
            f"tokenizer.source must fit the model's {shape.vocab_size} tokens, "
            f"got a tokenizer of {tokenizer.vocab_size}"
        )
    check_mesh(shape, jax.sharding.get_mesh())
    return shape, place_params(shape, weights)


def _from_nothing(config, tokenizer: Tokenizer) -> ModelConfig:
    model = config.model
    shape = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        embed_dim=model.embed_dim,
        mlp_dim=model.mlp_dim,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        family=model.family,
        rope_theta=model.rope_theta,
        max_positions=config.data.prompt_len + config.rollout.response_len,
        tie_embeddings=model.tie_embeddings,
        qk_norm=model.family == "qwen3",
        attention_bias=model.family == "qwen2",
    )
    return _for_run(shape, config)


def _for_run(shape: ModelConfig, config) -> ModelConfig:
    """With the run's compute type; raises where prompts and responses outgrow the positions."""
    slots = config.data.prompt_len + config.rollout.response_len
    if slots > shape.max_positions:
        raise ValueError(
            f"data.prompt_len + rollout.response_len must be <= {shape.max_positions}, "
            f"the model's positions, got {slots}"
        )
    dtype = config.model.dtype
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return shape.replace(dtype=dtype, remat=config.model.remat)
