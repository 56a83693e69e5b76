"""GSM8K on one accelerator: small pretrained models, the larger ones by adapters (LoRA).

    python launch/train.py --config=configs/one_device.py                     SmolLM2-135M, 16 GB
    python launch/train.py --config=configs/one_device.py:gemma3_270m         Gemma 3, 16 GB
    python launch/train.py --config=configs/one_device.py:qwen3_0p6b          adapters, 24 GB
    python launch/train.py --config=configs/one_device.py:gemma3_1b           adapters, 24 GB
    python launch/train.py --config=configs/one_device.py:smollm3_3b          adapters, 80 GB

16 GB: one TPU v5e, as Colab's; 24 GB: L4, RTX 4090; 80 GB: H100. Models and GSM8K come from the
Hugging Face hub; with --config.data.path=FOLDER from train.jsonl and test.jsonl there. All other
fields are those of the preset gsm8k in configs/grpo.py. On eight v5e add --config.mesh.data=1
--config.mesh.fsdp=8.

Expect what the compiler says to fit: docs/scaling.md has the figures, and a run prints its own
at its start. What reward to expect is not known. Use it to see
which fields make a model fit.

Measured: compiled ahead of time, as each preset says; none has run on an accelerator.
"""

import runpy
from pathlib import Path

from ml_collections import ConfigDict

_GRPO = runpy.run_path(str(Path(__file__).with_name("grpo.py")))


def get_config(preset: str = "smollm2") -> ConfigDict:
    """Return the configuration of a preset; raises ValueError on an unknown name."""
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    config = _GRPO["get_config"]("gsm8k")
    PRESETS[preset](config)
    return config


def smollm2(config: ConfigDict) -> None:
    """SmolLM2-135M-Instruct, all weights, responses of up to 512 tokens.

    Compiled for v5e:1x1, and for t4:1 with model.dtype=float32 and model.remat=True. Three steps of
    2 prompts and 64 tokens ran on 2 CPU cores, with adapters.
    """
    config.rollout.response_len = 512


def gemma3_270m(config: ConfigDict) -> None:
    """Gemma 3 270M, instruction-tuned, all weights, responses of up to 512 tokens.

    Compiled for v5e:1x1; not run.
    """
    config.model.source = "google/gemma-3-270m-it"
    config.model.remat = True
    config.rollout.response_len = 512
    config.updates.logits_chunk = 16  # 128 rows x 16 tokens x 262,144 scores are 2.1 GB


def qwen3_0p6b(config: ConfigDict) -> None:
    """Qwen3-0.6B without thinking, adapters of rank 32, responses of up to 1,024 tokens.

    Compiled for l4:1, v5e:2x4 and h100:1; not run.
    """
    config.model.source = "Qwen/Qwen3-0.6B"
    config.tokenizer.template_options.enable_thinking = False
    _adapters(config)


def gemma3_1b(config: ConfigDict) -> None:
    """Gemma 3 1B, instruction-tuned, adapters of rank 32, responses of up to 1,024 tokens.

    Compiled for l4:1 and v5e:2x4; not run.
    """
    config.model.source = "google/gemma-3-1b-it"
    _adapters(config)
    config.updates.logits_chunk = 16


def smollm3_3b(config: ConfigDict) -> None:
    """SmolLM3-3B without thinking, adapters of rank 32, responses of up to 1,024 tokens.

    Compiled for h100:1 (`prefill` and `update`); not run.
    """
    config.model.source = "HuggingFaceTB/SmolLM3-3B"
    config.tokenizer.template_options.enable_thinking = False
    _adapters(config)


def _adapters(config: ConfigDict) -> None:
    config.lora.rank = 32
    config.model.remat = True
    config.rollout.response_len = 1_024
    config.updates.learning_rate = 1e-5  # ten times what all weights would get
    config.sft.learning_rate = 1e-4


_ALL = (smollm2, gemma3_270m, qwen3_0p6b, gemma3_1b, smollm3_3b)
PRESETS = {preset.__name__: preset for preset in _ALL}
