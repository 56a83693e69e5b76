"""GRPO with a tool: multiply numbers of three digits by asking Python.

    python launch/train.py --config=configs/tool.py

All other fields are those of configs/grpo.py:micro. A policy of random weights sees some
demonstrations of `<tool_call>123*456</tool_call>56088\\n56088`, in which Python returns all but the
call and the last number. Then it calls the tool itself. In episodes the tool's tokens are never
trained on.

Expect a held-out reward near 0.7, in some six minutes on 2 CPU cores. Use it to see how a
tool is called. Without the tool the same policy answers nothing right.

Measured: training reward 0.61 ± 0.04 in steps 1 to 10, 0.74 ± 0.05 in steps 29 to 38 (3 seeds);
held out 0.54 → 0.71 in 60 steps (one seed). Most of a step starts the processes of 128 episodes.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(Path(__file__).with_name("grpo.py")))


def get_config(preset: str = "micro") -> ConfigDict:
    """Return the configuration of the preset micro; raises ValueError on another name."""
    if preset != "micro":
        raise ValueError(f"preset must be micro, got {preset!r}")
    config = _GRPO["get_config"](preset)
    config.environment.name = "python"
    config.environment.max_turns = 2
    config.rollout.stop = "</tool_call>"
    config.tokenizer.alphabet = "".join(map(chr, range(32, 127))) + "\n"  # what errors are said in
    config.data.source = "product"
    config.data.name = "product"
    config.data.options = ConfigDict({"min_value": 100, "max_value": 999})
    config.data.solution_field = "solution"
    config.data.prompts = 256
    config.data.prompt_len = 8
    config.sft.mistake_rate = 0.0
    config.sft.steps = 240
    config.rollout.response_len = 48
    config.rollout.prompts_per_step = 16
    config.rollout.group_size = 8
    config.updates.mini_batch_size = 128
    config.updates.learning_rate = 1e-3
    config.data.eval_prompts = 64
    config.evaluate.every = 30
    config.evaluate.samples = 4
    config.evaluate.batch_size = 64
    config.train.steps = 60
    return config
