"""SPEC-RL's table of leniences (arXiv 2509.23232, Table 3): seven values, random and delayed reuse.

    python launch/sweep.py --config=configs/lenience_sweep.py[:PRESET] --seeds=3

Presets and all fields are those of configs/grpo.py. The first case, without drafts, is what the
others are compared with. Ten cases and three seeds of `tiny` take 25 to 45 minutes on 2 CPU cores.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(Path(__file__).with_name("grpo.py")))


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the configuration of a preset; raises ValueError on an unknown name."""
    config = _GRPO["get_config"](preset)
    config.rollout.accept = "ratio"
    return config


def get_hyper(hyper):
    """Return the cases, see specrl_jax/config/hyper.py."""
    return hyper.chainit(
        [
            hyper.fixed("rollout.draft", "none"),
            hyper.sweep("rollout.lenience", ["1", "e^0.2", "e^0.5", "e^0.8", "e^1", "e^2", "inf"]),
            hyper.fixed("rollout.accept", "random"),
            hyper.fixed("rollout.draft_age", 2),
        ]
    )
