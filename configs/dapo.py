"""DAPO with speculative rollouts (arXiv 2503.14476).

    python launch/train.py --config=configs/dapo.py[:PRESET]

Presets and all other fields are those of configs/grpo.py. Lenience and dual clip are SPEC-RL's for
DAPO (arXiv 2509.23232).
"""

import math
import runpy
from pathlib import Path

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(Path(__file__).with_name("grpo.py")))


def get_config(preset: str = "tiny") -> ConfigDict:
    """The configuration of a preset; raises ValueError on an unknown name."""
    config = _GRPO["get_config"](preset)
    config.algorithm.clip_low, config.algorithm.clip_high = 0.2, 0.28
    config.algorithm.dual_clip = 10.0
    config.algorithm.aggregation = "token"
    config.algorithm.kl_coef = 0.0
    config.algorithm.dynamic_sampling = True
    config.reward.overlong_tokens = config.rollout.response_len // 5  # paper: 4,096 of 20,480
    config.rollout.lenience = math.exp(0.15)
    return config
