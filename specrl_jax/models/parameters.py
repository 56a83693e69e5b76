"""Every parameter of a decoder, listed once: its axes, layout and name in Hugging Face's files.

Axes are letters: V vocabulary, D embed (d: never split over devices), F feed-forward, N query
heads, K key/value heads, H head dim, E experts, r rank of adapters.
"""

import math
from typing import NamedTuple

import numpy as np
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.families import FAMILIES

Params = dict[str, Array | dict[str, Array]]  # of a whole decoder, or adapters; layers stacked

_LOGICAL_AXES = {"V": "vocab", "D": "embed", "F": "mlp", "N": "heads", "K": "kv_heads"}
_SIZES = {
    "V": "vocab_size",
    "D": "embed_dim",
    "d": "embed_dim",
    "F": "mlp_dim",
    "N": "num_heads",
    "K": "num_kv_heads",
    "H": "head_dim",
    "E": "num_experts",
    "r": "lora_rank",
}


class Parameter(NamedTuple):
    """One array of the parameter tree."""

    axes: str  # one letter each
    file_axes: str  # of the file's tensor; "NH,D" is a matrix of N·H rows and D columns
    file_name: str  # "{}" is the layer, and the expert if each has a tensor
    switch: str = ""  # the property of `ModelConfig` that it requires, if any

    @property
    def layout(self) -> tuple[str | None, ...]:
        """Return the logical axes, as in `sharding`."""
        return tuple(_LOGICAL_AXES.get(axis) for axis in self.axes)

    def size(self, config: ModelConfig, axes: str) -> int:
        """Return the product of the sizes of some axes."""
        return math.prod(getattr(config, _SIZES[axis]) for axis in axes)

    def shape(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(self.size(config, axis) for axis in self.axes)

    def file_shape(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(self.size(config, group) for group in self.file_axes.split(","))

    def in_file_order(self, array: np.ndarray) -> np.ndarray:
        """Return a view of our array with its axes in the file's order."""
        order = self.file_axes.replace(",", "")
        own = self.axes.removeprefix("E") if self.per_expert else self.axes
        return array.transpose([own.index(axis) for axis in order])

    @property
    def per_expert(self) -> bool:
        """Return whether files store each expert's part as a separate tensor."""
        return "E" in self.axes and "E" not in self.file_axes

    def fan_in(self, config: ModelConfig) -> int:
        """Return the inputs of a matrix: the file's tensors are [outputs, inputs]."""
        return self.size(config, self.file_axes.split(",")[-1])


_IN_LAYER = "model.layers.{}."


def _layer(axes: str, file_axes: str, name: str, switch: str = "") -> Parameter:
    return Parameter(axes, file_axes, f"{_IN_LAYER}{name}", switch)


TOP = {
    "embed": Parameter("Vd", "V,d", "model.embed_tokens.weight"),
    "final_norm": Parameter("d", "d", "model.norm.weight"),
    "lm_head": Parameter("Vd", "V,d", "lm_head.weight", "untied"),
}
# Of one layer. The tree has them stacked, with a leading axis L.
LAYER = {
    "attn_norm": _layer("d", "d", "input_layernorm.weight", "pre_norms"),
    "mlp_norm": _layer("d", "d", "post_attention_layernorm.weight", "no_post_norms"),
    # With norms before and after attention and MLP, files use that name for the former.
    "post_attn_norm": _layer("d", "d", "post_attention_layernorm.weight", "post_norms"),
    "pre_mlp_norm": _layer("d", "d", "pre_feedforward_layernorm.weight", "both_norms"),
    "post_mlp_norm": _layer("d", "d", "post_feedforward_layernorm.weight", "post_norms"),
    "q_proj": _layer("DNH", "NH,D", "self_attn.q_proj.weight"),
    "k_proj": _layer("DKH", "KH,D", "self_attn.k_proj.weight"),
    "v_proj": _layer("DKH", "KH,D", "self_attn.v_proj.weight"),
    "o_proj": _layer("NHD", "D,NH", "self_attn.o_proj.weight"),
    "q_bias": _layer("NH", "NH", "self_attn.q_proj.bias", "attention_bias"),
    "k_bias": _layer("KH", "KH", "self_attn.k_proj.bias", "attention_bias"),
    "v_bias": _layer("KH", "KH", "self_attn.v_proj.bias", "attention_bias"),
    "o_bias": _layer("d", "d", "self_attn.o_proj.bias", "output_bias"),
    "q_norm": _layer("H", "H", "self_attn.q_norm.weight", "qk_norm"),
    "k_norm": _layer("H", "H", "self_attn.k_norm.weight", "qk_norm"),
    "q_all_norm": _layer("NH", "NH", "self_attn.q_norm.weight", "qk_norm_all"),
    "k_all_norm": _layer("KH", "KH", "self_attn.k_norm.weight", "qk_norm_all"),
    "gate_proj": _layer("DF", "F,D", "mlp.gate_proj.weight", "dense"),
    "up_proj": _layer("DF", "F,D", "mlp.up_proj.weight", "dense"),
    "down_proj": _layer("FD", "D,F", "mlp.down_proj.weight", "dense"),
    "gate_bias": _layer("F", "F", "mlp.gate_proj.bias", "mlp_bias"),
    "up_bias": _layer("F", "F", "mlp.up_proj.bias", "mlp_bias"),
    "down_bias": _layer("d", "d", "mlp.down_proj.bias", "mlp_bias"),
    "router": _layer("DE", "E,D", "mlp.gate.weight", "num_experts"),
    "expert_gate": _layer("EDF", "F,D", "mlp.experts.{}.gate_proj.weight", "num_experts"),
    "expert_up": _layer("EDF", "F,D", "mlp.experts.{}.up_proj.weight", "num_experts"),
    "expert_down": _layer("EFD", "D,F", "mlp.experts.{}.down_proj.weight", "num_experts"),
}


def file_name_of(family: str, name: str) -> str:
    """Return the name, in a family's files, of the tensor that contains a layer's parameter."""
    fused = FAMILIES[family].fused.get(name)
    return f"{_IN_LAYER}{fused}" if fused else LAYER[name].file_name


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of A and B of a weight."""
    return f"{weight}_a", f"{weight}_b"


def _adapters(name: str, weight: Parameter) -> dict[str, Parameter]:
    """Return A and B of a weight; A·B has the weight's axes."""
    outputs, inputs = weight.file_axes.split(",")
    file = weight.file_name.removesuffix(".weight")
    a, b = adapter_names(name)
    return {
        a: Parameter(f"{inputs}r", f"r,{inputs}", f"{file}.lora_A.weight"),
        b: Parameter(f"r{outputs}", f"{outputs},r", f"{file}.lora_B.weight"),
    }


# Weights of a layer that can have adapters, and the adapters of each (LoRA, arXiv 2106.09685).
ADAPTED = tuple(n for n, p in LAYER.items() if "," in p.file_axes and "E" not in p.axes)
ADAPTERS = {n: p for name in ADAPTED for n, p in _adapters(name, LAYER[name]).items()}


def is_float32(name: str) -> bool:
    """Return whether a parameter is used in float32 regardless of the compute type."""
    return name.endswith(("norm", "router"))


def select(table: dict[str, Parameter], config: ModelConfig) -> dict[str, Parameter]:
    """Return the parameters of `TOP` or `LAYER` that a decoder with this config has."""
    return {n: p for n, p in table.items() if not p.switch or getattr(config, p.switch)}
