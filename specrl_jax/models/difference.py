"""Comparison of two models' weights, apart from what adapters change."""

import dataclasses
import math
from typing import Any

import numpy as np

from specrl_jax.models import hf
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.parameters import Params, adapter_names

# Specific to a machine, a tokenizer or a training run, or irrelevant to what a model computes.
_NOT_COMPARED = ("dtype", "remat", "unused_ids", "kernels", "lora", "max_positions")


@dataclasses.dataclass(frozen=True)
class Difference:
    """Norms of differences between two models' weights, relative to the first one's norm."""

    relative: float
    largest: float  # of one weight
    tensor: str  # which has it; "" if all weights are equal
    learned: float  # what adapters add, relative to the same norm


def compare(source: str, base: str, lora: ModelConfig, adapters: Params) -> Difference:
    """Compare the weights of `base` with those of `source`, which `adapters` were trained on.

    lora: the shape with the adapters. Raises a one-line ValueError about `model.source` or `--base`
    if one of them cannot be read, or if `base` has other shapes or computes something else.
    """
    shape, tensors = hf.open_tensors(source, "model.source")
    base_shape, base_tensors = hf.open_tensors(base, "--base")
    computed = dataclasses.asdict(base_shape)
    for name, value in dataclasses.asdict(shape).items():
        if name not in _NOT_COMPARED and not _is_close(value, computed[name]):
            raise ValueError(
                f"--base must be a model with the sizes of model.source: {source} has "
                f"{name} = {value}, {base} has {computed[name]}"
            )
    norms = []
    gap_norms = []
    largest = 0.0
    tensor = ""
    for (name, x), (_, y) in zip(tensors, base_tensors, strict=True):
        x = x.astype(np.float32)
        gap = y.astype(np.float32)
        gap -= x
        norms.append(np.linalg.norm(x))
        gap_norms.append(np.linalg.norm(gap))
        if (in_tensor := float(np.max(np.abs(gap)))) > largest:
            largest = in_tensor
            tensor = name
    norm = math.hypot(*norms) or 1.0
    return Difference(
        relative=math.hypot(*gap_norms) / norm,
        largest=largest,
        tensor=tensor,
        learned=_learned(lora, adapters) / norm,
    )


def _learned(model: ModelConfig, adapters: Params) -> float:
    """Return the norm of scale·A·B over all adapters, by ‖A·B‖² = Σ AᵀA ∘ BBᵀ."""
    squares = 0.0
    rank = model.lora.rank
    for weight in model.lora.names:
        for a, b in zip(*(np.asarray(adapters["layers"][x]) for x in adapter_names(weight))):
            a = a.reshape(-1, rank).astype(np.float64)
            b = b.reshape(rank, -1).astype(np.float64)
            squares += float(np.sum((a.T @ a) * (b @ b.T)))
    return model.lora.scale * math.sqrt(squares)


def _is_close(one: Any, other: Any) -> bool:
    """Return whether two fields are equal; formats round numbers that are not integers."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_close(one[k], other[k]) for k in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4)
    return one == other
