"""Which kernels a run takes, with stand-ins for the kernels and for the devices."""

import types

import jax
import pytest
import small_runs
from small_models import MODEL

from specrl_jax.models import attention, attention_choice
from specrl_jax.models.attention_choice import Shapes, choose, judge

SHAPES = Shapes(rows=3, slots=12, verify_width=4, packed_tokens=16)


@pytest.fixture
def kernels(monkeypatch):
    """Kernels that are the reference; they refuse what is in `refused`."""
    refused: dict[str, str] = {}
    module = types.SimpleNamespace(
        refused=refused,
        AHEAD_OF_TIME=("decode", "packed"),
        refusal=lambda use, model, slots: refused.get(use, ""),
        attend=attention.attend,
        attend_packed=attention.attend_packed,
    )
    monkeypatch.setattr(attention, "kernel_module", lambda platform: module)
    return module


def test_a_cpu_has_none(mesh):
    assert choose("auto", MODEL, SHAPES) == choose("reference", MODEL, SHAPES) == ()
    with pytest.raises(ValueError, match=r"auto or reference on cpu, which has no kernels, got"):
        choose("kernel", MODEL, SHAPES)


def test_kernel_takes_all_or_says_why_not(mesh, kernels):
    assert choose("kernel", MODEL, SHAPES) == attention.USES
    kernels.refused["verify"] = "too wide"
    with pytest.raises(ValueError, match=r"model.attention must be .*for verify, too wide$"):
        choose("kernel", MODEL, SHAPES)


def test_rules_alone_decide_where_the_device_is_absent(mesh, kernels, monkeypatch, capsys):
    monkeypatch.setattr(attention_choice, "_absent", lambda: True)
    with pytest.raises(ValueError, match=r"for verify, the kernel can only be compiled where"):
        choose("kernel", MODEL, SHAPES)
    capsys.readouterr()
    kernels.refused["packed"] = "heads of 4"
    assert choose("auto", MODEL, SHAPES) == ("decode",)
    assert capsys.readouterr().out.splitlines() == [
        "attention, decode: kernel (its rules hold, not measured)",
        "attention, verify: reference (the kernel can only be compiled where the device is)",
        "attention, packed: reference (heads of 4)",
    ]


def test_a_kernel_must_agree_and_be_faster(make_mesh, kernels, monkeypatch, capsys):
    """Measured on a mesh: the right one, one that is wrong, one that fails."""
    monkeypatch.setattr(attention_choice, "judge", lambda *x: judge(*x[:2], fast=1, slow=2))
    reference = attention.attend

    def wrong_or_failing(q, *others):
        if q.shape[1] == 1:
            return reference(q, *others) * 1.1
        raise NotImplementedError("no such\nshape")

    kernels.attend = wrong_or_failing
    with jax.set_mesh(make_mesh(2, 2, 2)):
        assert choose("auto", MODEL, SHAPES) == ("packed",)
    decode, verify, packed = capsys.readouterr().out.splitlines()
    assert "decode: reference (the kernel differs by 0.1 of" in decode
    assert verify.endswith("reference (the kernel fails: NotImplementedError: no such shape)")
    assert packed.startswith("attention, packed: kernel (1e+03 ms, the reference 2e+03 ms, differs")


def test_how_it_is_judged():
    assert judge(0.001, 0.01, fast=1.0, slow=1.5)[0]
    assert judge(0.001, 0.01, fast=1.5, slow=1.5) == (
        False,
        "the kernel takes 1.5e+03 ms, the reference 1.5e+03 ms",
    )
    assert not judge(float("nan"), 0.01, fast=1.0, slow=1.5)[0]


def test_shapes_of_a_run():
    config = small_runs.small_config({"rollout.max_rows": 5})
    prompt, response = config.data.prompt_len, config.rollout.response_len
    shapes = Shapes.of(config)
    assert (shapes.rows, shapes.packed_tokens) == (5, 2 * (prompt + response))
    assert shapes.verify_width <= response
    assert shapes.slots >= prompt + response
