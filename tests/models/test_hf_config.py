"""config.json against the fields of real files, and what is refused."""

import json
from dataclasses import replace

import pytest
from references.make_references import TINY
from test_gguf import TINY_FILES

from specrl_jax.models.config import LinearScaling, ModelConfig, RopeScaling, YarnScaling
from specrl_jax.models.hf_config import config_from_json, config_to_json


def test_config_of_each_family():
    files = {name: json.loads((TINY_FILES / name / "config.json").read_text()) for name in TINY}
    configs = {name: config_from_json(values) for name, values in files.items()}
    assert {name: config_from_json(config_to_json(c)) for name, c in configs.items()} == configs
    common = {"vocab_size": 48, "embed_dim": 16, "mlp_dim": 24, "num_layers": 2}
    common |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 64}
    bias = {"attention_bias": True, "output_bias": True}
    scaling = RopeScaling(8.0, 1.0, 4.0, 32)
    gemma = dict.fromkeys(("norm_adds_one", "post_norms", "embed_scale"), True)
    gemma |= {"activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 12, "final_softcap": 8.0}
    both = (True, True)
    yarn = YarnScaling(4.0, 16, attention_factor=1.3, beta_fast=4.0, beta_slow=0.5)
    olmo = {"pre_norms": False, "post_norms": True, "qk_norm_all": True, "norm_eps": 1e-5}
    olmo |= {"tie_embeddings": False}
    assert configs == {
        "llama3_rope": ModelConfig(
            **common, rope_theta=100.0, rope_scaling=scaling, tie_embeddings=False
        ),
        "llama_biases": ModelConfig(**common, **bias, mlp_bias=True, tie_embeddings=True),
        "qwen2": ModelConfig(**common, family="qwen2", attention_bias=True, tie_embeddings=False),
        "qwen3_tied": ModelConfig(**common, family="qwen3", qk_norm=True, tie_embeddings=True),
        "qwen3_untied": ModelConfig(
            **common, **bias, family="qwen3", qk_norm=True, tie_embeddings=False
        ),
        "gemma3": ModelConfig(
            **common | {"num_layers": 7},
            **gemma,
            family="gemma3_text",
            qk_norm=True,
            rope_theta=1000.0,
            rope_scaling=LinearScaling(4.0),
            rope_local_theta=50.0,
            sliding_window=5,
            local_layers=(True,) * 5 + (False, True),
        ),
        "gemma2": ModelConfig(
            **common | {"num_layers": 3},
            **gemma,
            family="gemma2",
            attn_softcap=2.0,
            sliding_window=4,
            local_layers=(True, False, True),
        ),
        "mistral_window": ModelConfig(
            **common, family="mistral", tie_embeddings=False, sliding_window=5, local_layers=both
        ),
        "mistral": ModelConfig(
            **common, family="mistral", tie_embeddings=False, rope_theta=100.0, rope_scaling=yarn
        ),
        "qwen2_windows": ModelConfig(
            **common | {"num_layers": 3},
            family="qwen2",
            attention_bias=True,
            tie_embeddings=False,
            rope_theta=100.0,
            rope_scaling=LinearScaling(2.0),
            sliding_window=4,
            local_layers=(False, True, True),
        ),
        "qwen3_yarn": ModelConfig(
            **common,
            family="qwen3",
            qk_norm=True,
            tie_embeddings=False,
            rope_theta=100.0,
            rope_scaling=yarn,
        ),
        "smollm3": ModelConfig(
            **common | {"num_layers": 4},
            family="smollm3",
            rope_theta=2e6,
            unrotated_layers=(False, False, False, True),
        ),
        "olmo2": ModelConfig(**common | {"num_kv_heads": 1}, **olmo, family="olmo2"),
        "olmo3": ModelConfig(
            **common | {"num_layers": 5},
            **olmo,
            family="olmo3",
            rope_theta=100.0,
            rope_scaling=yarn,
            rope_local_theta=50.0,
            sliding_window=3,
            local_layers=(True, True, True, False, True),
        ),
        "phi3": ModelConfig(
            **common | {"num_heads": 6},
            family="phi3",
            norm_eps=1e-5,
            tie_embeddings=False,
            sliding_window=6,
            local_layers=both,
        ),
        "granite": ModelConfig(
            **common,
            **bias,
            family="granite",
            tie_embeddings=False,
            embed_multiplier=3.0,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            logits_divisor=0.5,
        ),
        "qwen3_moe": ModelConfig(
            **common | {"mlp_dim": 12},
            family="qwen3_moe",
            qk_norm=True,
            tie_embeddings=False,
            num_experts=6,
            experts_per_token=2,
            norm_topk=True,
        ),
        "olmoe": ModelConfig(
            **common | {"head_dim": 4},
            family="olmoe",
            norm_eps=1e-5,
            qk_norm_all=True,
            tie_embeddings=False,
            num_experts=4,
            experts_per_token=3,
        ),
    }
    assert configs["gemma3"].local_layers == (True,) * 5 + (False, True)
    assert configs["gemma2"].local_layers == (True, False, True)
    assert configs["qwen2"].local_layers == ()


def test_config_of_hub_models_in_the_older_spelling():
    # Fields as Llama-3.2-1B's and Qwen2.5-0.5B's own config.json have them.
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    rope = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_type": "llama3"}
    llama = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": rope}
    llama |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "hidden_act": "silu"}
    config = config_from_json(sizes | llama | {"head_dim": None, "tie_word_embeddings": True})
    assert (config.head_dim, config.rope_theta, config.norm_eps) == (64, 500000.0, 1e-5)
    assert config.rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)
    assert config_from_json(config_to_json(config)) == config

    qwen = {"model_type": "qwen2", "rope_theta": 1000000.0, "sliding_window": 32768}
    qwen |= {"use_sliding_window": False, "max_window_layers": 21, "num_key_value_heads": None}
    config = config_from_json(sizes | qwen)
    assert (config.num_kv_heads, config.attention_bias, config.output_bias) == (32, True, False)
    assert config.tie_embeddings is False
    # A window that starts behind the last layer is not in use.
    config_from_json(sizes | qwen | {"use_sliding_window": True, "max_window_layers": 16})
    # Qwen3's head dim is its own, not D / N.
    assert config_from_json(sizes | {"model_type": "qwen3"}).head_dim == 128


def test_config_of_gemma_models_on_the_hub():
    # Fields as gemma-3-4b-it's own config.json has them, and those of gemma-3-1b-it.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    text |= {"num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    text |= {"sliding_window": 1024}
    config = config_from_json({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.rope_theta, config.rope_scaling) == (1e6, LinearScaling(8.0))
    assert (config.rope_local_theta, config.query_scale) == (10_000.0, 1 / 16)
    assert (config.sliding_window, sum(config.local_layers)) == (1024, 34 - 5)
    assert config.max_positions == 131_072

    one = {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912}
    one |= {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 26}
    one |= {"sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": None}
    one |= {"rope_local_base_freq": 10000, "rope_theta": 1000000, "vocab_size": 262144}
    config = config_from_json(one)
    assert (config.sliding_window, config.attn_softcap, config.final_softcap) == (512, 0, 0)
    assert config_from_json(config_to_json(config)) == config
    # A cap of null is none, whatever the default.
    two = one | {"model_type": "gemma2", "final_logit_softcapping": None, "rope_theta": 500.0}
    config = config_from_json(two)
    assert (config.attn_softcap, config.final_softcap, config.rope_local_theta) == (0, 0, 0)
    assert config_from_json(config_to_json(config)) == config
    # A model whose layers are all global has no window.
    every = config_from_json(one | {"layer_types": ["full_attention"] * 26})
    assert (every.sliding_window, every.local_layers) == (0, ())
    assert config_from_json(config_to_json(every)) == every
    local = config_from_json(one | {"layer_types": ["sliding_attention"] * 26})
    assert all(local.local_layers)
    assert config_from_json(config_to_json(local)) == local


WINDOW = {"sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("qwen2", "model_type", "gemma3", " must be one of .*, got 'gemma3'"),
        ("qwen2", "hidden_act", "gelu", " must be 'silu', got 'gelu'"),
        ("qwen2", "num_key_value_heads", 3, " must divide .* 4, got 3"),
        ("qwen2", "clip_qkv", 8.0, " must be absent or null, got 8.0"),
        ("qwen2", "quantization_config", {"quant_method": "gptq"}, ".* got quant_method 'gptq'"),
        (
            "qwen3_tied", "layer_types", ["full_attention", "sliding_attention"],
            " must be 'full_attention' there, as Qwen3ForCausalLM computes it, got 'sl.*",
        ),
        (
            "llama3_rope", "rope_parameters", {"type": "dynamic", "factor": 4.0},
            ".rope_type must be 'default' or 'linear' or 'llama3' or 'yarn', got 'dynamic'",
        ),
        (
            "phi3", "rope_parameters", {"rope_type": "longrope", "short_factor": [1.0] * 4},
            ".rope_type must be 'default', got 'longrope'",
        ),
        (
            "qwen3_yarn", "rope_parameters", {"rope_type": "yarn", "factor": 4, "beta_fast": "a"},
            r".beta_fast must be a number in \[0.001, 1e\+06\], got 'a'",
        ),
        ("mistral", "sliding_window", 0.5, " must be a positive integer, got 0.5"),
        (
            "mistral_window", "layer_types", ["full_attention"] * 2,
            " must be 'sliding_attention' there, as MistralForCausalLM computes it, got 'full.*",
        ),
        ("qwen3_moe", "mlp_only_layers", [1], r" must be \[\], got \[1\]"),
        ("qwen3_moe", "decoder_sparse_step", 2, " must be 1, got 2"),
        ("olmoe", "num_experts_per_tok", 5, " must be <= num_experts 4, got 5"),
        ("olmoe", "norm_topk_prob", 1, " must be true or false, got 1"),
        ("smollm3", "no_rope_layers", [1, 0], r" must be 4, each 0 or 1, got \[1, 0\]"),
        (
            "granite", "logits_scaling", 0,
            r" must be a number in \[1e-06, 1e\+06\], got 0",
        ),
        (
            "llama3_rope", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1, got 0.5",
        ),
        ("gemma3", "attn_logit_softcapping", 50.0, " must be absent or null, got 50.0"),
        ("gemma3", "use_bidirectional_attention", True, " must be absent or null, got True"),
        ("gemma3", "hidden_activation", "silu", " must be 'gelu_pytorch_tanh', got 'silu'"),
        (
            "gemma3", "layer_types", ["full_attention"] + ["sliding_attention"] * 5,
            " must be 7, each 'sliding_attention' or 'full_attention', got .*",
        ),
        (
            "gemma3", "rope_parameters",
            {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            ".sliding_attention.rope_type must be 'default', got 'linear'",
        ),
        (
            "gemma3", "rope_parameters", {"full_attention": 3},
            ".full_attention must be an object, got 3",
        ),
        (
            "gemma2", "rope_parameters", {"rope_type": "linear", "factor": 2.0},
            ".rope_type must be 'default', got 'linear'",
        ),
        ("gemma2", "sliding_window", -1, " must be a positive integer, got -1"),
        (
            "gemma2", "final_logit_softcapping", -1.0,
            r" must be a number in \[0, 1e\+06\], got -1.0",
        ),
    ],
)  # fmt: skip
def test_refused_configs(name, field, value, message):
    values = json.loads((TINY_FILES / name / "config.json").read_text())
    values |= WINDOW if name == "qwen2" else {}
    with pytest.raises(ValueError, match=rf"^some/file: ({field})?{message}$"):
        config_from_json(values | {field: value}, "some/file")


def test_sizes_that_the_familys_class_refuses():
    config = config_from_json(json.loads((TINY_FILES / "qwen2" / "config.json").read_text()))
    message = "model.embed_dim must be a multiple of model.num_heads 4 to save family llama, got 18"
    with pytest.raises(ValueError, match=f"^{message}$"):
        config_to_json(replace(config, family="llama", embed_dim=18))
