"""Adapters as a change of the parameter tree (LoRA, arXiv 2106.09685).

The trained tree consists of A [L, in, r] and B [L, r, out]; `adapted` joins it with the base
weights. Updates, rollouts and evaluations compute x·W + scale·(x·A)·B (`layers.LayerModule.adapt`).
W + scale·A·B (`merge`) is for exports and for a critic that starts as a copy of the policy: rounded
to bfloat16 it would not change until A·B is as large as the last bit of W.
"""

import functools
import zlib

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.parameters import ADAPTERS, LAYER, Params, adapter_names, is_float32
from specrl_jax.sharding import axes


def adapted(model: ModelConfig, trained: Params, base_params: Params | None) -> Params:
    """Return the policy's weights: `trained`, or `base_params` with `trained` as adapters."""
    if model.lora is None:
        return trained
    return base_params | {"layers": base_params["layers"] | trained["layers"]}


def init_adapters(model: ModelConfig, key: Array) -> Params:
    """Return adapters that change nothing, float32: A normal with std in^-1/2, B 0."""

    def init(name: str, std: float) -> Array:
        parameter = ADAPTERS[name]
        noise_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
        noise = jax.random.normal(noise_key, (model.num_layers, *parameter.shape(model)))
        return jax.sharding.reshard(std * noise, axes(None, *parameter.layout, stored=True))

    @jax.jit
    def build() -> Params:
        adapters = {}
        for name in model.lora.names:
            a, b = adapter_names(name)
            adapters[a] = init(a, ADAPTERS[a].fan_in(model) ** -0.5)
            adapters[b] = init(b, 0.0)
        return {"layers": adapters}

    return build()


def abstract_adapters(model: ModelConfig) -> Params:
    """Return shape, type and stored layout of all adapters on the mesh in use."""
    return jax.eval_shape(lambda: init_adapters(model, jax.random.key(0)))


def adapter_count(model: ModelConfig) -> int:
    """Return the number of parameters of all adapters."""
    adapters = [ADAPTERS[x] for name in model.lora.names for x in adapter_names(name)]
    return model.num_layers * sum(x.size(model, x.axes) for x in adapters)


def freeze(model: ModelConfig, params: Params) -> Params:
    """Return weights as stored next to adapters: in the compute type, except for `is_float32`."""

    def cast(path: tuple, x: Array) -> Array:
        return x if is_float32(path[-1].key) else x.astype(model.dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


@functools.partial(jax.jit, static_argnums=0)
def merge(model: ModelConfig, params: Params) -> Params:
    """Return `adapted`'s weights with the adapters added, float32."""

    def merge_layer(layer: dict[str, Array]) -> dict[str, Array]:
        merged = {name: x for name, x in layer.items() if name not in ADAPTERS}
        for name in model.lora.names:
            a, b = adapter_names(name)
            layout = axes(*LAYER[name].layout, stored=True)
            highest = jax.lax.Precision.HIGHEST
            product = jnp.tensordot(layer[a], layer[b], 1, precision=highest, out_sharding=layout)
            merged[name] = merged[name].astype(jnp.float32) + model.lora.scale * product
        return merged

    # In a loop: unrolled over all weights, the products would take long to compile.
    layers = jax.lax.map(merge_layer, params["layers"])
    return jax.tree.map(lambda x: x.astype(jnp.float32), params | {"layers": layers})


def adapters_of(params: Params) -> Params:
    """Return the adapters in `adapted`'s weights, as the tree of `init_adapters`."""
    return {"layers": {name: x for name, x in params["layers"].items() if name in ADAPTERS}}
