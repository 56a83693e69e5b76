"""Runs that train adapters: what is kept, saved, resumed, exported and refused."""

import jax
import numpy as np
import pytest
from small_runs import line_of, preset, records, saved, small_config

from specrl_jax import train as loop
from specrl_jax.evaluation import export, saved_policy
from specrl_jax.models import hf
from specrl_jax.models.transformer import init_params, place_params
from specrl_jax.sharding import make_mesh

ADAPTERS = {"lora.rank": 4, "checkpoint.every": 2, "train.steps": 4}
WARM = {"warmup.steps": 2}
PENALTY = {"algorithm.kl_coef": 0.1}


def train(workdir, changes):
    with jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1])):  # another one may be set
        loop.train(small_config(ADAPTERS | changes), workdir)
    return workdir


def parts(arrays: dict, prefix: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in arrays.items() if name.startswith(prefix)}


@pytest.mark.parametrize("warm", [True, False])
def test_a_checkpoint_holds_adapters_and_the_base_only_after_a_warm_up(mesh, tmp_path, warm):
    one_update = {"updates.mini_batch_size": 32, "updates.micro_batch_size": 8}
    train(tmp_path, PENALTY | one_update | (WARM if warm else {}))
    first, last = saved(tmp_path, 2), saved(tmp_path, 4)
    trained = parts(last, "train.params.")
    assert len(trained) == 14
    assert all(name[-2:] in ("_a", "_b") for name in trained)
    assert any(not np.array_equal(x, first[name]) for name, x in trained.items())
    moments = sum(x.size for name, x in parts(last, "train.opt_state.").items() if x.ndim)
    assert moments == 2 * sum(x.size for x in trained.values())
    base = parts(last, "reference.")
    assert (len(base) > 0) == warm
    for name, x in base.items():
        np.testing.assert_array_equal(x, first[name])
    steps = records(tmp_path)[1:]
    assert steps[0]["policy/kl"] == pytest.approx(0, abs=1e-6)  # from the base itself
    assert steps[-1]["policy/kl"] > 0
    assert steps[0]["policy/rollout_train_logprob_gap"] < 1e-5


@pytest.mark.parametrize("warm", [True, False])
def test_a_resumed_run_ends_as_one_that_was_not_stopped(mesh, tmp_path, warm):
    changes = PENALTY | (WARM if warm else {})
    whole = saved(train(tmp_path / "whole", changes), 4)
    train(tmp_path / "parts", changes | {"train.steps": 2})
    resumed = saved(train(tmp_path / "parts", changes), 4)
    assert whole.keys() == resumed.keys()
    for name, x in whole.items():
        np.testing.assert_array_equal(resumed[name], x, err_msg=name)


def test_an_adapted_policy_is_read_as_one_tree_of_weights(mesh, tmp_path):
    train(tmp_path, WARM)
    arrays = saved(tmp_path, 4)
    policy = saved_policy.open_policy(tmp_path, "", "last", preset("micro"))
    for name in ("q_proj", "o_proj", "down_proj"):
        a, b = (arrays[f"train.params.layers.{name}_{x}"] for x in "ab")
        change = np.stack([np.tensordot(a_l, b_l, axes=1) for a_l, b_l in zip(a, b)])
        expected = arrays[f"reference.layers.{name}"] + 32.0 / 4 * change
        np.testing.assert_allclose(policy.params["layers"][name], expected, atol=1e-6)
        assert np.max(np.abs(change)) > 1e-4
    line = line_of(export.export_adapters, policy, tmp_path / "adapters")
    assert line.endswith(
        "began with a warm-up; leave the flag out: the weights are written with them"
    )
    export.export(policy, tmp_path, tmp_path / "whole", {"configs/grpo.py:micro": preset("micro")})
    _, params = hf.load(str(tmp_path / "whole"))
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(policy.params))


def test_a_pretrained_policy_is_warmed_up_by_adapters(mesh, tmp_path):
    """The warm-up's adapters are merged: reinforcement learning begins with new ones."""
    train(tmp_path / "first", {"train.steps": 1})
    policy = saved_policy.open_policy(tmp_path / "first", "", "last", preset("micro"))
    presets = {"configs/grpo.py:micro": preset("micro")}
    export.export(policy, tmp_path / "first", tmp_path / "model", presets)
    source = {"model.source": str(tmp_path / "model"), "tokenizer.source": ""}
    plain = train(tmp_path / "plain", source)
    adapted = saved_policy.open_policy(plain, "", "last", preset("micro"))
    export.export_adapters(adapted, tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()
    base = parts(saved(train(tmp_path / "warm", source | WARM), 4), "reference.layers.")
    changed = {n.split(".")[-1] for n, x in base.items()
               if not np.array_equal(x, policy.params["layers"][n.split(".")[-1]])}  # fmt: skip
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    # The files of the model change: neither a resume nor an export takes them silently.
    model = policy.model
    other = place_params(model, jax.device_get(init_params(model, jax.random.key(9))))
    hf.save(tmp_path / "model", model, other, token_ids=policy.tokenizer.token_ids)
    line = line_of(saved_policy.open_policy, plain, "", "last", preset("micro"))
    assert line.startswith("model.source must be the model that the run's adapters were trained on")
    line = line_of(train, plain, source | {"train.steps": 6})
    assert line.startswith("model.source must be the model that the run began with")


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
    from specrl_jax.config import validate

    assert line_of(validate, small_config(ADAPTERS | changes)).startswith(line)


def test_export_of_adapters_needs_a_run_that_trained_some(mesh, tmp_path):
    train(tmp_path, {"lora.rank": 0, "train.steps": 1})
    policy = saved_policy.open_policy(tmp_path, "", "last", preset("micro"))
    line = line_of(export.export_adapters, policy, tmp_path / "adapters")
    assert line.startswith("--adapters needs a run with lora.rank > 0")
