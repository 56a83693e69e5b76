"""Mixtures of experts against plain loops and against transformers' gradients."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
from references.make_references import SIZES, tiny_model
from test_transformer import FAMILIES

from specrl_jax.models import experts, hf, lora
from specrl_jax.models.config import Lora
from specrl_jax.models.draft_head import copy_draft_head, init_draft_head
from specrl_jax.models.transformer import (
    Transformer,
    copy_weights,
    init_params,
    place_params,
    rollout_weights,
)
from specrl_jax.sharding import put

MIXTURE = FAMILIES["qwen3_moe"]


@pytest.mark.parametrize("product", ["_through_all", "_through_runs", "_through_blocks"])
def test_experts_equal_a_loop_over_tokens(make_mesh, monkeypatch, product):
    """Also where one expert gets all tokens, and where shards have other tokens."""
    monkeypatch.setattr(experts, "_BLOCKS", (2, 4))
    few = {"cpu": 8 if product == "_through_all" else 0}
    monkeypatch.setattr(experts, "_FEW_TOKENS", few)
    monkeypatch.setattr(experts, "_PRODUCTS", {"cpu": getattr(experts, product)})
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 6)).astype(np.float32)
    gate, up = rng.normal(size=(2, 5, 6, 4)).astype(np.float32)
    down = rng.normal(size=(5, 4, 6)).astype(np.float32)
    weights = rng.uniform(size=(8, 2)).astype(np.float32)
    uneven = np.stack([rng.permutation(5)[:2] for _ in range(8)]).astype(np.int32)
    for ids in (uneven, np.full((8, 2), 3, np.int32)):
        expected = np.zeros_like(x)
        for m, k in np.ndindex(ids.shape):
            e = ids[m, k]
            hidden = jax.nn.silu(x[m] @ gate[e]) * (x[m] @ up[e])
            expected[m] += weights[m, k] * np.asarray(hidden) @ down[e]
        for shape in ((1, 1, 1), (2, 2, 2)):
            with jax.set_mesh(make_mesh(*shape)):
                rows = [put(a, "batch", None) for a in (x, weights, ids)]
                parts = [put(gate, None, None, "mlp"), put(up, None, None, "mlp")]
                mix = jax.jit(functools.partial(experts.mix, jax.nn.silu))
                mixed = mix(*rows, *parts, put(down, None, "mlp", None))
            np.testing.assert_allclose(np.asarray(mixed), expected, atol=1e-5)


@pytest.mark.parametrize("product", ["_through_runs", "_through_blocks"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_gradients_of_each_product_equal_those_of_all_experts(
    make_mesh, monkeypatch, product, shape
):
    """Of tokens, their weights and the experts; one expert gets no token, one gets half of all."""
    monkeypatch.setattr(experts, "_BLOCKS", (2, 4))
    rng = np.random.default_rng(1)
    x, direction = rng.normal(size=(2, 8, 6)).astype(np.float32)
    gate, up = rng.normal(size=(2, 5, 6, 4)).astype(np.float32)
    down = rng.normal(size=(5, 4, 6)).astype(np.float32)
    weights = rng.uniform(size=(8, 2)).astype(np.float32)
    ids = np.stack([rng.permutation([0, n % 3 + 1]) for n in range(8)]).astype(np.int32)

    def gradients(name: str) -> tuple:
        few = {"cpu": 8 if name == "_through_all" else 0}
        monkeypatch.setattr(experts, "_FEW_TOKENS", few)
        monkeypatch.setattr(experts, "_PRODUCTS", {"cpu": getattr(experts, name)})

        with jax.set_mesh(make_mesh(*shape)):
            rows = [put(a, "batch", None) for a in (x, weights)]
            chosen, toward = (put(a, "batch", None) for a in (ids, direction))

            def total(x, weights, *parts):
                mixed = experts.mix(jax.nn.silu, x, weights, chosen, *parts)
                return jnp.sum(mixed * toward)

            parts = [put(gate, None, None, "mlp"), put(up, None, None, "mlp")]
            parts.append(put(down, None, "mlp", None))
            return jax.device_get(jax.jit(jax.grad(total, range(5)))(*rows, *parts))

    for got, expected in zip(gradients(product), gradients("_through_all"), strict=True):
        assert np.any(expected)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_gradients_for_tpus_add_nothing_up_by_a_scatter(mesh, monkeypatch):
    """XLA for TPUs would sort the places of each, in every layer."""
    monkeypatch.setattr(experts, "_FEW_TOKENS", {"cpu": 0})
    monkeypatch.setattr(experts, "_PRODUCTS", {"cpu": experts._through_runs})

    def total(x, router, *parts):
        _, weights, ids = experts.route(x, router, 2, norm=True)
        return jnp.sum(experts.mix(jax.nn.silu, x, weights, ids, *parts))

    shapes = [(8, 6), (6, 5), (5, 6, 4), (5, 6, 4), (5, 4, 6)]
    arrays = [jnp.ones(shape) for shape in shapes]
    jaxpr = str(jax.make_jaxpr(jax.grad(total, range(5)))(*arrays))
    assert "ragged_dot" in jaxpr
    assert re.search(r"i32\[\d+\] = scatter-add", jaxpr)  # how many tokens each expert has
    assert not re.search(r"f32\[[\d,]*\] = scatter-add", jaxpr)


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_gradients_and_balance_loss_equal_those_of_transformers(make_mesh, name, shape, tmp_path):
    torch = pytest.importorskip("torch")
    theirs = tiny_model(name, seed=3).double()
    theirs.float().save_pretrained(tmp_path)
    theirs = theirs.double()
    config, params = hf.load(str(tmp_path))
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (8, 10), np.int32)
    counted = np.arange(10)[None] < np.arange(3, 11)[:, None]
    direction = np.random.default_rng(2).normal(size=(8, 10, SIZES["vocab_size"]))

    out = theirs(
        torch.tensor(tokens).long(),
        attention_mask=torch.tensor(counted).long(),
        output_router_logits=True,
        position_ids=torch.arange(10)[None].expand(8, 10),
    )
    direction *= counted[..., None]
    (torch.sum(out.logits * torch.tensor(direction)) + 7 * out.aux_loss).backward()

    def total(params, tokens, counted, direction):
        model = Transformer(config, params)
        hidden, load = model(tokens, counted_BT=counted)
        weighted = jnp.sum(model.logits(hidden) * direction)
        balance = experts.balance_loss(load)
        return weighted + 7 * balance, (load, balance)

    with jax.set_mesh(make_mesh(*shape)):
        arrays = [put(x, "batch", None) for x in (tokens, counted)]
        arrays.append(put(direction.astype(np.float32), "batch", None, "vocab"))
        placed = place_params(config, params)
        grads, (load, balance) = jax.jit(jax.grad(total, has_aux=True))(placed, *arrays)
        grads = jax.device_get(grads)
    assert float(balance) == pytest.approx(out.aux_loss.item(), rel=1e-5)
    assert np.sum(load.tokens) == np.sum(counted) * config.num_layers * config.experts_per_token
    router = np.stack([x.mlp.gate.weight.grad.numpy().T for x in theirs.model.layers])
    down = np.stack(
        [x.mlp.experts.down_proj.grad.numpy().swapaxes(1, 2) for x in theirs.model.layers]
    )
    for got, expected in (("router", router), ("expert_down", down)):
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(grads["layers"][got] / scale, expected / scale, atol=3e-5)
    embed = theirs.model.embed_tokens.weight.grad.numpy()
    np.testing.assert_allclose(grads["embed"], embed, atol=3e-5 * np.max(np.abs(embed)))


def test_a_rollout_of_a_mixture_with_drafts_equals_the_naive_loop(mesh):
    spec = ref.make_spec(MIXTURE, slots=10, prompt_slots=6)
    prompts = ref.random_prompts(4)
    drafts = ref.old_drafts(spec, prompts, 0.1)
    params, weights = ref.policy(0.0, MIXTURE)
    rollout, _ = ref.run(spec, weights, prompts, step=1, drafts=drafts, log_lenience=0.2)
    reference = ref.Reference(spec, params, prompts, step=1, drafts=drafts, log_lenience=0.2)
    ref.check_same(rollout, reference)
    assert np.max(rollout.prefix_lens) > 0


@pytest.mark.parametrize(
    "drafts",
    [*(pytest.param(x, marks=pytest.mark.slow) for x in ("tree", "head")), "tree and head"],
)
def test_wide_decode_steps_of_a_mixture_change_no_token(mesh, drafts):
    """An untrained head, whose own layer is a mixture too, and a tree of responses of before."""
    plain = ref.make_spec(MIXTURE, sampling=ref.SAMPLING, slots=10, accept="match")
    prompts = ref.random_prompts()
    params, weights = ref.policy(0.0, MIXTURE)
    head = init_draft_head(MIXTURE, params)
    weights |= {"draft_head": copy_draft_head(MIXTURE, head, params, None, vocab=0)}
    expected, _ = ref.run(plain, weights, prompts, 1)
    old, _ = ref.run(plain, ref.policy(0.1, MIXTURE)[1], prompts)
    inputs = {}
    spec = replace(plain, max_width=4)
    if "tree" in drafts:
        spec = replace(spec, draft_source=ref.TREE)
        inputs["history"] = ref.history_of(spec, old.tokens.ids, old.lens)
    if "head" in drafts:
        spec = replace(spec, draft_head=spec.sampling)
    got, stats = ref.run(spec, weights, prompts, 1, **inputs)
    ref.check_equal(got, ref.host(expected), but=("sources",))
    assert stats.drafted_tokens > 0


def test_router_and_norms_stay_float32_in_bfloat16_rollouts(mesh):
    config = MIXTURE.replace(dtype="bfloat16")
    params = init_params(config, jax.random.key(0))
    weights = copy_weights(config, params)
    kinds = {name: x.dtype.name for name, x in weights["layers"][0].items()}
    assert {name for name, kind in kinds.items() if kind == "float32"} == {
        "attn_norm", "mlp_norm", "q_norm", "k_norm", "router",
    }  # fmt: skip
    frozen = lora.freeze(config, params)["layers"]
    assert (frozen["router"].dtype, frozen["expert_up"].dtype) == (jnp.float32, jnp.bfloat16)


def test_adapters_on_attention_of_a_mixture(mesh):
    config = MIXTURE.replace(lora=Lora(2, 4.0, ("q_proj", "o_proj")))
    params = init_params(config.replace(lora=None), jax.random.key(0))
    adapters = jax.tree.map(lambda x: x + 0.1, lora.init_adapters(config, jax.random.key(1)))
    adapted = lora.adapted(config, adapters, params)
    tokens = put(np.arange(8, dtype=np.int32)[None].repeat(8, 0), "batch", None)

    def logits(config, params):
        model = Transformer(config, params)
        return model.logits(model(tokens)[0])

    run = jax.jit(logits, static_argnums=0)
    merged = run(config.replace(lora=None), lora.merge(config, adapted))
    np.testing.assert_allclose(run(config, adapted), merged, atol=1e-4)
    weights = rollout_weights(config, adapted)["layers"][0]
    assert weights.keys() >= {"q_proj", "q_proj_a", "router", "expert_up"}
