"""A decoder as small as can be, and random weights."""

import jax
import numpy as np

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import param_shapes

MODEL = ModelConfig(
    vocab_size=16, embed_dim=8, mlp_dim=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)


def random_params(model: ModelConfig, std: float, mean: float = 0.0, seed: int = 0) -> dict:
    """Host weights, all of them normal: biases and norms too, which `init_params` leaves."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: rng.normal(mean, std, x.shape).astype(np.float32), param_shapes(model)
    )
