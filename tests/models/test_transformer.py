"""The decoder against itself: with and without cache, stacked and not, on every family's shape.

That it computes what Hugging Face's models compute is in test_hf.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import MODEL, random_params

from specrl_jax.models import transformer
from specrl_jax.models.config import LinearScaling, ModelConfig, RopeScaling, YarnScaling
from specrl_jax.models.kv_cache import init_cache
from specrl_jax.models.transformer import Transformer, rollout_weights
from specrl_jax.sharding import axes, put

BASE = MODEL.replace(embed_dim=16, mlp_dim=24)
GEMMA = BASE.replace(
    activation="gelu_pytorch_tanh",
    norm_adds_one=True,
    post_norms=True,
    embed_scale=True,
    query_pre_attn_scalar=3,
    final_softcap=2.0,
    sliding_window=3,
)
FAMILIES = {
    "llama": BASE,
    "llama3": BASE.replace(rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8), tie_embeddings=False),
    "llama-biases": BASE.replace(attention_bias=True, output_bias=True, mlp_bias=True),
    "qwen2": BASE.replace(family="qwen2", attention_bias=True),
    "qwen3": BASE.replace(family="qwen3", qk_norm=True),
    "one-kv-head": BASE.replace(num_kv_heads=1),
    # Windows shorter than the sequences; layers 2 (gemma2) and 3 are global.
    "gemma2": GEMMA.replace(family="gemma2", attn_softcap=1.0, local_layers=(True, False)),
    "gemma3": GEMMA.replace(
        family="gemma3_text",
        num_layers=4,
        qk_norm=True,
        rope_theta=1000.0,
        rope_scaling=LinearScaling(2.0),
        rope_local_theta=50.0,
        local_layers=(True, True, False, True),
    ),
    "mistral": BASE.replace(family="mistral", sliding_window=3, local_layers=(True, True)),
    # Layer 2 is not rotated, and the last is neither rotated nor global.
    "smollm3": BASE.replace(
        family="smollm3",
        num_layers=3,
        sliding_window=3,
        local_layers=(False, False, True),
        unrotated_layers=(False, True, True),
    ),
    "olmo3": BASE.replace(
        family="olmo3",
        pre_norms=False,
        post_norms=True,
        qk_norm_all=True,
        rope_scaling=YarnScaling(4.0, 4, beta_fast=1.0, beta_slow=0.5),
        rope_local_theta=50.0,
        sliding_window=2,
        local_layers=(True, False),
    ),
    "granite": BASE.replace(
        family="granite",
        embed_multiplier=3.0,
        residual_multiplier=0.6,
        attention_multiplier=0.2,
        logits_divisor=0.5,
    ),
    "qwen3_moe": BASE.replace(
        family="qwen3_moe", qk_norm=True, num_experts=6, experts_per_token=2, norm_topk=True
    ),
}
EACH_FAMILY = pytest.mark.parametrize("name", FAMILIES)


@jax.jit(static_argnums=0)
def _hidden(config, params, tokens):
    return Transformer(config, params)(tokens)[0]


@jax.jit(static_argnums=0)
def _with_cache(config, weights, tokens, start, cache):
    return Transformer(config, weights)(tokens, start, cache)


def _params(config: ModelConfig):
    return transformer.place_params(config, random_params(config, 0.5, mean=0.2))


def _tokens(rows: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 16, (rows, width)).astype(np.int32)


@EACH_FAMILY
def test_shapes_and_specs(mesh, name):
    config = FAMILIES[name]
    shapes, params = transformer.param_shapes(config), transformer.abstract_params(config)
    described = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (shapes, params)]
    assert described[0] == described[1]
    assert transformer.param_count(config) == sum(x.size for x in jax.tree.leaves(params))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    ranks = jax.tree.map(len, transformer.param_specs(config))
    assert ranks == jax.tree.map(lambda x: x.ndim, shapes)


def test_initial_weights_and_that_no_mesh_changes_them(make_mesh):
    config, trees = FAMILIES["qwen2"].replace(num_layers=1), []
    for shape in ((1, 1, 1), (1, 4, 2)):
        with jax.set_mesh(make_mesh(*shape)):
            params = transformer.init_params(config, jax.random.key(3))
            if shape != (1, 1, 1):
                partition = params["layers"]["q_proj"].sharding.spec
                assert partition == axes(None, "embed", "heads", None, stored=True)
        trees.append(jax.device_get(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *trees)
    layers = trees[0]["layers"]
    assert np.all(layers["attn_norm"] == 1)
    assert not np.any(layers["q_bias"])
    np.testing.assert_allclose(np.std(layers["gate_proj"]), 16**-0.5, rtol=0.1)
    np.testing.assert_allclose(np.std(layers["down_proj"]), 24**-0.5 * 2**-0.5, rtol=0.1)
    assert not np.allclose(layers["k_proj"], layers["v_proj"])  # each keyed by its own name
    with jax.set_mesh(make_mesh(1, 1, 1)):
        params = transformer.init_params(GEMMA, jax.random.key(3))
    assert not np.any(params["final_norm"])  # they multiply by 1 + w
    assert not np.any(params["layers"]["post_mlp_norm"])


@EACH_FAMILY
def test_prefill_and_steps_of_any_width_equal_one_pass_without_cache(mesh, name):
    """Ragged rows: row b has lens[b] prompt tokens, the rest comes in steps of 1, 3 and 1.

    So the future is not seen, stacked layers equal unstacked ones, and junk is overwritten.
    """
    config, lens, total = FAMILIES[name], np.array([2, 5, 1, 4], np.int32), 10
    params, tokens = _params(config), _tokens(4, total)
    want = np.asarray(_hidden(config, params, put(tokens, "batch", None)))
    weights = rollout_weights(config, params)
    prompts = np.where(np.arange(5) < lens[:, None], tokens[:, :5], 9)  # junk behind each prompt
    cache, start = init_cache(config, 4, 12), np.zeros(4, np.int32)
    for width in (5, 1, 3, 1):
        fed = prompts if width == 5 else np.stack([t[s : s + width] for t, s in zip(tokens, start)])
        inputs = put(fed, "batch", None), put(start, "batch")
        got, cache = _with_cache(config, weights, *inputs, cache)
        for row, first in enumerate(start):
            count = lens[row] if width == 5 else width
            np.testing.assert_allclose(
                got[row, :count], want[row, first : first + count], rtol=1e-5, atol=1e-5
            )
        start = start + (lens if width == 5 else width)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_packed_trie_gives_what_its_rows_give(mesh, name):
    """A prefix of 5 tokens that continues in two ways, each longer than the window. The slots of
    the second start far from the prefix, its positions do not."""
    config = FAMILIES[name]
    params = _params(config)
    rows = np.tile(_tokens(1, 12), (2, 1))
    rows[1, 5:] = (rows[1, 5:] + 3) % 16
    want = np.asarray(_hidden(config, params, put(rows, "batch", None)))
    packed = np.concatenate([rows[0], rows[1, 5:], [0]])[None]
    depths = np.array([[*range(12), *range(5, 12), 0]], np.int32)
    ends = np.array([[19] * 5 + [12] * 7 + [19] * 7 + [20]], np.int32)

    @jax.jit
    def run(params, tokens, depths, ends):
        return Transformer(config, params)(tokens, positions_BT=depths, ends_BT=ends)[0]

    got = np.asarray(run(params, *(put(x, "batch", None) for x in (packed, depths, ends))))[0]
    np.testing.assert_allclose(got[:12], want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[12:19], want[1, 5:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rematerialisation_gives_the_same_gradients(mesh, name):
    base = FAMILIES[name]
    params, tokens = _params(base), put(_tokens(2, 5), "batch", None)

    def grads(config: ModelConfig):
        def loss(params):
            model = Transformer(config, params)
            return jnp.sum(jnp.square(model.logits(model(tokens)[0])))

        return jax.jit(jax.grad(loss))(params)

    kept, recomputed = grads(base), grads(base.replace(remat=True))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(np.abs(a).max()))
        assert np.any(a)


def test_bfloat16_computes_in_bfloat16_and_stores_float32(mesh):
    config = BASE.replace(dtype="bfloat16", qk_norm=True)
    params, tokens = _params(config), put(_tokens(2, 5), "batch", None)
    weights = rollout_weights(config, params)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    layer = weights["layers"][0]
    norms = {name for name in layer if name.endswith("norm")}
    # Scales of norms stay as the update has them.
    assert {layer[name].dtype for name in norms} == {jnp.dtype("float32")}
    assert {x.dtype for name, x in layer.items() if name not in norms} == {jnp.dtype("bfloat16")}
    hidden = _hidden(config, params, tokens)
    assert hidden.dtype == jnp.bfloat16
    logits = Transformer(config, params).logits(hidden)
    assert logits.dtype == jnp.float32
    exact = BASE.replace(qk_norm=True)
    want = Transformer(exact, params).logits(_hidden(exact, params, tokens))
    gap = np.linalg.norm(logits - want) / np.linalg.norm(want)
    assert 0 < gap < 0.1
    start = put(np.zeros(2, np.int32), "batch")
    cached, _ = _with_cache(config, weights, tokens, start, init_cache(config, 2, 5))
    np.testing.assert_allclose(
        cached.astype(jnp.float32), hidden.astype(jnp.float32), rtol=0.1, atol=0.15
    )


def test_the_weights_of_decode_steps_are_copies(mesh):
    """The update donates the master weights; these must outlive them."""
    params = _params(BASE)
    weights = rollout_weights(BASE, params)
    jax.tree.map(lambda x: x.delete(), params)
    copied = jax.tree.leaves({**weights, "stacked": ()})
    assert all(np.all(np.isfinite(x)) for x in copied)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 4, 2)])
def test_a_mesh_changes_the_layout_not_the_result(make_mesh, shape, name):
    config = FAMILIES[name].replace(tie_embeddings=False)
    results = []
    for sizes in ((1, 1, 1), shape):
        with jax.set_mesh(make_mesh(*sizes)):
            params, tokens = _params(config), put(_tokens(4, 5), "batch", None)
            hidden = _hidden(config, params, tokens)
            logits = jax.jit(lambda p, h: Transformer(config, p).logits(h))(params, hidden)
            assert jax.typeof(logits).sharding.spec == axes("batch", None, "vocab")
        results.append(np.asarray(logits))
    gap = np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[0])
    assert gap <= 1e-5


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_heads": 3, "num_kv_heads": 1}, "num_heads must be divisible by mesh.tensor = 2"),
        ({"num_kv_heads": 1}, "num_kv_heads must be divisible by mesh.tensor = 2"),
        ({"mlp_dim": 25}, "mlp_dim must be divisible by mesh.tensor = 2"),
        ({"embed_dim": 18}, "embed_dim must be divisible by mesh.fsdp = 4"),
        ({"vocab_size": 12}, "vocab_size must be divisible by mesh.tensor x mesh.fsdp = 8"),
    ],
)
def test_check_mesh_names_field_and_mesh_axes(make_mesh, changes, rule):
    got = changes[rule.split()[0]]
    with jax.set_mesh(make_mesh(1, 4, 2)):
        transformer.check_mesh(BASE)
        with pytest.raises(ValueError, match=f"^model.{rule}, got {got}; choose another mesh$"):
            transformer.check_mesh(BASE.replace(**changes))
