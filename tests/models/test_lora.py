"""Adapters against merged weights, against the chain rule, and against peft."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import random_params
from test_transformer import FAMILIES

from specrl_jax.models import hf, lora
from specrl_jax.models.config import Lora, ModelConfig
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.layers import MLP, Attention
from specrl_jax.models.parameters import ADAPTED, LAYER, adapter_names
from specrl_jax.models.transformer import (
    Transformer,
    copy_weights,
    place_params,
    rollout_weights,
)
from specrl_jax.sharding import put

TARGETS = {"all": ADAPTED, "two": ("k_proj", "down_proj")}
TOKENS = np.random.default_rng(0).integers(0, 16, (4, 9)).astype(np.int32)
ATTENDED = pytest.mark.parametrize("name", ["llama-biases", "qwen3", "gemma3"])


def make(name: str, names=ADAPTED, rank: int = 3) -> tuple[ModelConfig, dict, dict]:
    """A model, its frozen weights and adapters that change much: B random too."""
    model = FAMILIES[name].replace(lora=Lora(rank, 2.0, names))
    frozen = place_params(model, random_params(model, std=0.3))
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: jax.device_put(rng.normal(0, 0.3, x.shape).astype(np.float32), x.sharding),
        lora.init_adapters(model, jax.random.key(0)),
    )
    return model, frozen, adapters


def merged_by_hand(model: ModelConfig, frozen: dict, adapters: dict) -> dict:
    """W + alpha / rank * A·B of every weight that has adapters, by NumPy."""
    layers = dict(jax.device_get(frozen["layers"]))
    for name in model.lora.names:
        a, b = (np.asarray(adapters["layers"][x]) for x in adapter_names(name))
        change = [np.tensordot(a_l, b_l, axes=1) for a_l, b_l in zip(a, b)]
        layers[name] = layers[name] + 2.0 / model.lora.rank * np.stack(change)
    return jax.device_get(frozen) | {"layers": layers}


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model: ModelConfig, params: dict, tokens) -> jax.Array:
    policy = Transformer(model, params)
    return policy.logits(policy(tokens)[0])


# Other families have nothing else.
@pytest.mark.parametrize(
    ("name", "targets"),
    [("qwen3", "two"), ("qwen3", "all"), ("llama-biases", "all"), ("gemma3", "all")],
)
def test_the_update_computes_with_the_merged_weights(mesh, name, targets):
    model, frozen, adapters = make(name, TARGETS[targets])
    merged = place_params(model, merged_by_hand(model, frozen, adapters))
    expected = logits_of(model.replace(lora=None), merged, TOKENS)
    actual = logits_of(model, lora.adapted(model, adapters, frozen), TOKENS)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert np.max(np.abs(expected - logits_of(model, frozen, TOKENS))) > 0.01


@functools.partial(jax.jit, static_argnums=0)
def step(model: ModelConfig, weights: dict, tokens, start, cache):
    transformer = Transformer(model, weights)
    hidden, cache = transformer(tokens, start, cache)
    return transformer.logits(hidden), cache


def decoded_logits(model: ModelConfig, params: dict, width: int = 1) -> np.ndarray:
    """Logits of steps of `width` tokens over a cache, as a rollout makes them."""
    rows, count = TOKENS.shape
    weights = copy_weights(model, params)
    cache = init_cache(model, rows, count)
    parts = []
    for first in range(0, count, width):
        tokens = put(TOKENS[:, first : first + width], "batch", None)
        start = put(np.full(rows, first, np.int32), "batch")
        logits, cache = step(model, weights, tokens, start, cache)
        parts.append(logits)
    return np.concatenate(jax.device_get(parts), axis=1)


@pytest.mark.parametrize(
    ("name", "targets"), [("qwen3", "all"), ("llama-biases", "two"), ("gemma3", "all")]
)
def test_rollouts_compute_with_the_adapters(mesh, name, targets):
    """As merged weights would, in float32: over the cache, and as rows start."""
    model, frozen, adapters = make(name, TARGETS[targets])
    by_hand = place_params(model, merged_by_hand(model, frozen, adapters))
    plain = model.replace(lora=None)
    policy = lora.adapted(model, adapters, frozen)
    expected = logits_of(plain, by_hand, TOKENS)
    for width in (1, 4, TOKENS.shape[1]):
        np.testing.assert_allclose(decoded_logits(model, policy, width), expected, atol=3e-5)
    close = functools.partial(np.testing.assert_allclose, atol=1e-6)
    jax.tree.map(close, lora.merge(model, policy), by_hand)

    @functools.partial(jax.jit, static_argnums=0)
    def prefilled(model, weights):  # as rows start
        weights = weights | {"layers": weights["stacked"]}
        return Transformer(model, weights)(jnp.array(TOKENS), gives_cache=True)

    weights = rollout_weights(model, policy)
    expected = prefilled(plain, rollout_weights(plain, by_hand))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5),
                 prefilled(model, weights), expected)  # fmt: skip


def typical(difference) -> float:
    return float(np.sqrt(np.mean(np.square(np.float32(difference)))))


def test_in_bfloat16_rollouts_see_what_adapters_have_learned(mesh):
    """Adapters that are below the last bit of most weights: steps over the cache differ from the
    update by no more than without adapters."""
    model, frozen, adapters = make("qwen3")
    adapters = jax.tree.map(lambda x: 0.03 * x, adapters)
    policy = lora.adapted(model, adapters, frozen)
    model = model.replace(dtype="bfloat16")
    plain = model.replace(lora=None)
    merged = lora.merge(model, policy)["layers"]["q_proj"]
    moved = merged.astype(jnp.bfloat16) != frozen["layers"]["q_proj"].astype(jnp.bfloat16)
    assert np.mean(moved) < 0.2
    rounding = typical(decoded_logits(plain, frozen) - logits_of(plain, frozen, TOKENS))
    gap = typical(decoded_logits(model, policy) - logits_of(model, policy, TOKENS))
    assert rounding > 0
    assert gap < 1.5 * rounding


def layer_with_small_change(rank: int, std: float, dtype: str) -> tuple[MLP, MLP, np.ndarray]:
    """Return an MLP in bfloat16 with W of std .12, the same with adapters, and s·A·B of `std`."""
    width = 64
    model = ModelConfig(16, width, width, 1, 4, 2, 16, dtype=dtype)
    rng = np.random.default_rng(0)
    names = ("gate_proj", "up_proj", "down_proj")
    weights = {x: jnp.asarray(rng.normal(0, 0.12, (width, width)), dtype) for x in names}
    a = rng.normal(0, width**-0.5, (width, rank))
    b = rng.normal(0, 1, (rank, width))
    b *= std / (2 * a @ b).std()
    a = jnp.asarray(a, dtype)
    b = jnp.asarray(b, dtype)
    a_name, b_name = adapter_names("up_proj")
    adapted_model = model.replace(lora=Lora(rank, 2.0 * rank, ("up_proj",)))
    change = 2 * np.float64(a) @ np.float64(b)
    adapted = MLP(adapted_model, weights | {a_name: a, b_name: b})
    return MLP(model, weights), adapted, change


@pytest.mark.parametrize("rank", [8, 32])
@pytest.mark.parametrize("std", [2e-4, 1e-4])
def test_a_change_below_the_last_bit_of_a_product_arrives(mesh, rank, std):
    plain, adapted, change = layer_with_small_change(rank, std, "bfloat16")
    x = jnp.asarray(np.random.default_rng(1).normal(0, 1, (512, 64)), "bfloat16")
    project = jax.jit(lambda mlp, x: mlp.project("MD,DF->MF", x, "up", "batch", "mlp"))
    moved = np.float64(project(adapted, x)) - np.float64(project(plain, x))
    wanted = np.float64(x) @ change
    assert np.sum(moved * wanted) / np.sum(wanted**2) >= 0.9


def test_a_small_change_of_the_attention_output_arrives(mesh):
    """In a step over the cache as in the update: both go through `_output`."""
    model = ModelConfig(16, 64, 64, 1, 4, 2, 16, dtype="bfloat16")
    rng = np.random.default_rng(0)
    weight = {"o_proj": jnp.asarray(rng.normal(0, 0.12, (4, 16, 64)), "bfloat16")}
    a = jnp.asarray(rng.normal(0, 1 / 8, (4, 16, 8)), "bfloat16")
    b = rng.normal(0, 1, (8, 64))
    b = jnp.asarray(b * 2e-4 / (2 * np.tensordot(a, b, 1)).std(), "bfloat16")
    a_name, b_name = adapter_names("o_proj")
    lora_model = model.replace(lora=Lora(8, 16.0, ("o_proj",)))
    x = jnp.asarray(rng.normal(0, 1, (8, 64, 4, 16)), "bfloat16")
    output = jax.jit(lambda attention, x: attention._output(x))
    adapted = output(Attention(lora_model, weight | {a_name: a, b_name: b}), x)
    moved = np.float64(adapted) - np.float64(output(Attention(model, weight), x))
    change = 2 * np.tensordot(np.float64(a), np.float64(b), 1)
    wanted = np.einsum("BTNH,NHD->BTD", np.float64(x), change)
    assert np.sum(moved * wanted) / np.sum(wanted**2) >= 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3", "llama-biases"])
def test_new_adapters_change_no_bit(mesh, name, dtype):
    model, frozen, _ = make(name)
    model = model.replace(dtype=dtype)
    adapters = lora.init_adapters(model, jax.random.key(5))
    policy = lora.adapted(model, adapters, frozen)
    np.testing.assert_array_equal(
        logits_of(model, policy, TOKENS), logits_of(model, frozen, TOKENS)
    )
    jax.tree.map(np.testing.assert_array_equal, lora.merge(model, policy), frozen)
    assert all(np.std(adapters["layers"][adapter_names(n)[0]]) > 0.1 for n in ADAPTED)
    assert lora.adapter_count(model) == sum(x.size for x in jax.tree.leaves(adapters))


def loss(model: ModelConfig, params: dict, tokens) -> jax.Array:
    return jnp.mean(jnp.square(logits_of(model, params, tokens)))


@ATTENDED
def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(mesh, name):
    model, frozen, adapters = make(name)
    grads = jax.grad(lambda x: loss(model, lora.adapted(model, x, frozen), TOKENS))(adapters)
    merged = place_params(model, merged_by_hand(model, frozen, adapters))
    whole = jax.grad(lambda x: loss(model.replace(lora=None), x, TOKENS))(merged)
    scale = 2.0 / model.lora.rank
    for weight in ADAPTED:
        a, b = adapter_names(weight)
        outputs, inputs = LAYER[weight].file_axes.split(",")
        w_axes = f"l{inputs}{outputs}"
        a_axes = f"l{inputs}r"
        b_axes = f"lr{outputs}"
        dw = whole["layers"][weight]
        da = np.einsum(f"{w_axes},{b_axes}->{a_axes}", dw, adapters["layers"][b]) * scale
        db = np.einsum(f"{w_axes},{a_axes}->{b_axes}", dw, adapters["layers"][a]) * scale
        np.testing.assert_allclose(grads["layers"][a], da, rtol=1e-3, atol=2e-6)
        np.testing.assert_allclose(grads["layers"][b], db, rtol=1e-3, atol=2e-6)
        assert np.max(np.abs(db)) > 3e-4


def test_eight_devices_compute_what_one_does(mesh, make_mesh):
    model, frozen, adapters = make("qwen3", rank=4)

    def values(frozen, adapters):
        grads = jax.grad(lambda x: loss(model, lora.adapted(model, x, frozen), TOKENS))(adapters)
        policy = lora.adapted(model, adapters, frozen)
        decoded = [decoded_logits(model, policy, width) for width in (1, 4)]
        computed = (grads, logits_of(model, policy, TOKENS), decoded, lora.merge(model, policy))
        return jax.device_get(computed)

    expected = values(frozen, adapters)
    host = jax.device_get((frozen, adapters))
    with jax.set_mesh(make_mesh(2, 2, 2)):
        layouts = jax.tree.map(lambda x: x.sharding, lora.init_adapters(model, jax.random.key(0)))
        q_a, q_b = (layouts["layers"][n].spec for n in adapter_names("q_proj"))
        assert tuple(q_a) == (None, "fsdp", None)  # as the weight [L, D, N, H] is: over D,
        assert tuple(q_b)[:3] == (None, None, "tensor")  # and over N
        placed = place_params(model, host[0]), jax.device_put(host[1], layouts)
        actual = values(*placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), actual, expected)


@ATTENDED
def test_frozen_weights_lie_in_the_compute_type(mesh, name):
    model, frozen, _ = make(name)
    for path, x in jax.tree_util.tree_leaves_with_path(
        lora.freeze(model.replace(dtype="bfloat16"), frozen)
    ):
        is_norm = path[-1].key.endswith("norm")
        assert x.dtype == (jnp.float32 if is_norm else jnp.bfloat16), path


# peft's warnings are about its own dependencies.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "targets"), [("qwen2", "all"), ("gemma3", "two")])
def test_peft_loads_what_is_written(mesh, tmp_path, name, targets):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model, frozen, adapters = make(name, TARGETS[targets])
    base = tmp_path / "base"
    hf.save(base, model, frozen)
    hf.save_adapters(tmp_path / "adapters", model, adapters, str(base))
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters"
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    policy = lora.adapted(model, adapters, frozen)
    np.testing.assert_allclose(logits_of(model, policy, TOKENS), expected, atol=1e-4)
    with torch.no_grad(), theirs.disable_adapter():
        without = theirs(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    assert np.max(np.abs(expected - without)) > 0.01
