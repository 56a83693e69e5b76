"""Speed and totals: by hand, on a chip that is known, and over a resume."""

import itertools
import types

import jax
import pytest
from small_models import MODEL
from small_runs import records, small_config

from specrl_jax import train as loop
from specrl_jax.models.transformer import param_count
from specrl_jax.training.speed import model_flops, speed_metrics

VALUES = {
    "rollout/tokens_generated": 100, "rollout/tokens_reused": 300, "rollout/tokens_verified": 350,
    "update/tokens": 1000.0, "time/step": 2.0, "time/rollout": 0.5,
}  # fmt: skip


class Device:
    """A device of this process; peak: GiB that it says."""

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
    state = types.SimpleNamespace(tokens_generated=40, seconds=1.5)
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
    monkeypatch.setattr("specrl_jax.training.speed.param_count", lambda model: count)
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
