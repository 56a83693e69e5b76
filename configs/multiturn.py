"""GRPO on episodes of several turns: guess a number with the help of "<" and ">".

    python launch/train.py --config=configs/multiturn.py          the preset tiny
    python launch/train.py --config=configs/multiturn.py:micro    the same from 0 to 4, 24 steps

All other fields are those of configs/grpo.py. A policy of random weights learns that "2-7?" asks
for a number from 2 to 7, and to follow the answers: "4" ">" "6" "<" "5". The environment's tokens
are never trained on.

Expect a held-out reward near 0.8 from tiny, on 2 CPU cores without accelerator. Use it to
see how turns work, and what drafts keep of them.

Measured: tiny with rollout.accept=ratio, one seed, held out 0 → 0.78 in 96 steps. From step 60 on
it learns its 146 problems by heart, and drafts are kept whole. micro takes a minute of CPU time,
nearly all of it for compilation: training reward 0.00 → 0.90 on 16 problems, held out 0.07 → 0.43
on 14.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(Path(__file__).with_name("grpo.py")))


def get_config(preset: str = "tiny") -> ConfigDict:
    """Return the configuration of a preset, tiny or micro; raises ValueError on another name."""
    if preset not in ("tiny", "micro"):
        raise ValueError(f"preset must be tiny or micro, got {preset!r}")
    config = _GRPO["get_config"](preset)
    config.environment.name = "guess"
    config.tokenizer.alphabet = "0123456789-?<>"
    config.data.source = "guess"
    config.data.name = "guess"
    config.data.options = ConfigDict({"low": 0, "high": 9})
    config.data.prompts = 0
    config.data.eval_prompts = 64
    config.data.prompt_len = 4
    config.rollout.group_size = 16
    config.rollout.response_len = 12
    config.updates.mini_batch_size = 512
    config.updates.learning_rate = 1e-3
    config.sft.steps = 0
    config.train.steps = 96
    if preset == "micro":
        config.tokenizer.alphabet = "01234-?<>"
        config.data.options.high = 4
        config.data.eval_prompts = 14
        config.rollout.prompts_per_step = 16
        config.rollout.response_len = 8
        config.rollout.row_buckets = 1
        config.updates.mini_batch_size = 128
        config.evaluate.every = 8
        config.evaluate.batch_size = 16
        config.train.steps = 24
    return config
