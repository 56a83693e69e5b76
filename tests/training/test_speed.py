"""Speed and totals: by hand, on a chip that is known, and over a resume."""

import itertools
import types

import jax
import numpy as np
import pytest
from small_models import MODEL
from small_runs import records, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms.scoring import RowTokens, pack_rows
from specrl_jax.models.transformer import param_count
from specrl_jax.packing import PACKINGS
from specrl_jax.training import update_metrics
from specrl_jax.training.speed import model_flops, speed_metrics

VALUES = {
    "rollout/tokens_generated": 100, "rollout/tokens_reused": 300, "rollout/tokens_verified": 350,
    "update/tokens": 1000.0, "time/step": 2.0, "time/rollout": 0.5,
}  # fmt: skip


class Device:
    """A device of this process; peak: GiB that it reports."""

    process_index = 0

    def __init__(self, kind: str = "cpu", peak: int | None = None):
        self.device_kind = kind
        self._stats = None if peak is None else {"peak_bytes_in_use": peak * 2**30}

    def memory_stats(self):
        return self._stats


def measure(monkeypatch, devices, values=VALUES):
    mesh = types.SimpleNamespace(devices=types.SimpleNamespace(flat=devices))
    monkeypatch.setattr(jax.sharding, "get_mesh", lambda: mesh)
    run = types.SimpleNamespace(rollout_mesh=mesh, model=MODEL)
    state = types.SimpleNamespace(tokens_generated=140, seconds=3.5)
    return speed_metrics(run, state, values)


def test_by_hand(monkeypatch):
    assert measure(monkeypatch, (Device(),)) == {
        "data/tokens_generated": 140, "time/total": 3.5,
        "speed/tokens": 200.0, "speed/tokens_generated": 200.0,
    }  # fmt: skip


def test_two_known_chips(monkeypatch):
    """2 s of two chips of 989 TFLOP/s; the fuller one is told."""
    metrics = measure(monkeypatch, (Device("NVIDIA H200", 3), Device("NVIDIA H200", 5)))
    flops = param_count(MODEL) * (2 * 450 + 6 * 1000)
    assert metrics["speed/mfu"] == pytest.approx(flops / (2 * 2 * 989e12))
    assert metrics["memory/peak"] == 5


def test_what_multiplies(monkeypatch):
    """Embeddings that are looked up alone, and weights that are not trained."""
    count = param_count(MODEL)
    untied = MODEL.replace(tie_embeddings=False)
    assert param_count(untied) == count + MODEL.vocab_size * MODEL.embed_dim
    assert model_flops(untied, VALUES) == model_flops(MODEL, VALUES) == count * 6900
    frozen = types.SimpleNamespace(**vars(MODEL) | {"lora": object(), "untied": False})
    monkeypatch.setattr("specrl_jax.training.speed.used_param_count", lambda model: count)
    assert model_flops(frozen, VALUES) == count * 4900
    nothing = {"rollout/tokens_generated": 7}  # no rule verified, nothing was trained on
    assert model_flops(MODEL, nothing) == count * 14


def test_totals_go_on_over_a_resume(tmp_path, make_mesh):
    changes = {"checkpoint.every": 1, "evaluate.every": 0}
    with jax.set_mesh(make_mesh(1, 1, 1)):
        for steps in (2, 3):
            loop.train(small_config(changes | {"train.steps": steps}), tmp_path)
    lines = records(tmp_path, times=True)[1:]
    for total, part in (
        ("time/total", "time/step"), ("data/tokens_generated", "rollout/tokens_generated")
    ):  # fmt: skip
        sums = itertools.accumulate(line[part] for line in lines)
        assert [line[total] for line in lines] == list(sums)
    assert len(lines) == 3


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("devices", [1, 8])
def test_tokens_of_an_update_are_those_of_the_packed_rows(make_mesh, packing, devices):
    """In a trie each prefix once, in padded rows each token; a row that is left out, none."""
    rng = np.random.default_rng(0)
    prompt_lens, response_lens = np.array([3, 3, 3, 1] * 4), rng.integers(1, 6, 16)
    tokens = rng.integers(0, 2, (16, 9))
    included = np.arange(16) != 5
    rows = RowTokens(tokens, prompt_lens, response_lens, slots=6)
    spec = types.SimpleNamespace(packing=packing, micro_batch_size=2)
    with jax.set_mesh(make_mesh(devices, 1, 1)):
        packed = pack_rows(spec, rows, np.arange(16), included)
        num_rows, count = update_metrics.count_packed(packed)
    texts = [tuple(row[:n]) for row, n in zip(tokens, prompt_lens + response_lens)]
    texts = [text for text, there in zip(texts, included) if there]
    most = sum(map(len, texts))
    least = len({text[:n] for text in texts for n in range(1, len(text) + 1)})
    assert num_rows == 15
    slots = np.asarray(packed.nodes)
    responses = len(np.unique(slots[slots >= 0]))
    assert count > responses
    if PACKINGS[packing].share:
        assert least <= count < most
    else:
        assert count == most
