"""DAPO with speculative rollouts (arXiv 2503.14476).

    python launch/train.py --config=configs/dapo.py[:PRESET]

Presets and all other fields are those of configs/grpo.py. Lenience and dual clip are SPEC-RL's for
DAPO (arXiv 2509.23232).

Expect from micro a held-out reward near 0.7 (standard error 0.04), within a minute on 2 cores of an
AMD EPYC without accelerator, most of it for compilation. Use it to see dynamic sampling: 18
steps take six passes over the prompts, as groups without signal are left out.

Measured, micro, one seed: held out 0.63 → 0.69 in 18 steps; 91 to 99 % of the
response tokens reused from epoch 2 on. The other presets were not measured with DAPO.
"""

import math
import runpy
from pathlib import Path

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(Path(__file__).with_name("grpo.py")))


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the configuration of a preset; raises ValueError on an unknown name."""
    config = _GRPO["get_config"](preset)
    config.algorithm.clip_high = 0.28
    config.algorithm.dual_clip = 10.0
    config.algorithm.kl_coef = 0.0
    config.algorithm.dynamic_sampling = True
    config.reward.overlong_tokens = config.rollout.response_len // 5  # paper: 4,096 of 20,480
    config.rollout.accept = "ratio"
    config.rollout.lenience = math.exp(0.15)
    return config
