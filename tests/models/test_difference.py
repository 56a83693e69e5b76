"""Two models' weights compared, against NumPy."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from small_runs import line_of
from test_gguf import TINY_FILES, write_gguf
from test_lora import make, merged_by_hand

from specrl_jax.models import hf
from specrl_jax.models.difference import compare


def norm(tree) -> float:
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return float(np.linalg.norm(np.concatenate(leaves)))


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_weights_with_their_adapters_added(mesh, tmp_path, name):
    """Two models differ by what was learned."""
    model, frozen, adapters = make(name)
    frozen = jax.device_get(frozen)
    merged = merged_by_hand(model, frozen, adapters)
    hf.save(tmp_path / "base", model, frozen)
    hf.save(tmp_path / "merged", model, merged)
    difference = compare(str(tmp_path / "base"), str(tmp_path / "merged"), model, adapters)
    change = jax.tree.map(lambda x, y: np.asarray(x, np.float64) - y, merged, frozen)
    share = norm(change) / norm(frozen)
    assert difference.relative == pytest.approx(share, rel=1e-5)
    assert difference.learned == pytest.approx(share, rel=1e-5)
    largest = {key: np.max(np.abs(x)) for key, x in flatten_dict(change, sep="/").items()}
    weight = max(largest, key=largest.get)
    assert difference.largest == pytest.approx(largest[weight], rel=1e-5)
    assert weight.removeprefix("layers/") in difference.tensor


def test_a_gguf_file_of_the_same_model(mesh, tmp_path):
    """It rounds weights to float16, and the numbers of the config to float32."""
    model, _, adapters = make("qwen3", ("q_proj",))
    file = write_gguf("qwen3_tied", tmp_path)
    difference = compare(str(file), str(TINY_FILES / "qwen3_tied"), model, adapters)
    assert 0 <= difference.relative < 2**-11
    assert difference.largest < 2**-11


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 5e5}, "{a} has rope_theta = 10000.0, {b} has 500000.0"),
        ({"norm_eps": 1e-5}, "{a} has norm_eps = 1e-06, {b} has 1e-05"),
        ({"max_positions": 64}, ""),
    ],
)
def test_models_that_compute_otherwise(mesh, tmp_path, changes, words):
    model, frozen, adapters = make("qwen3")
    hf.save(tmp_path / "a", model, frozen)
    hf.save(tmp_path / "b", model.replace(**changes), frozen)
    sources = (str(tmp_path / "a"), str(tmp_path / "b"))
    if not words:
        assert compare(*sources, model, adapters).relative == 0
        return
    words = words.format(a=sources[0], b=sources[1])
    line = line_of(compare, *sources, model, adapters)
    assert line == f"--base must be a model with the sizes of model.source: {words}"
