"""Names of topologies, missing compilers, and the command."""

import importlib.util
import json
import os

import pytest
from small_runs import launch

from specrl_jax.process import chips

LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: pip install -e '.[compile-tpu]'",
)


def test_parse():
    assert chips.parse("v5e:4x4") == ("v5e", (4, 4))
    assert chips.parse("h100:8") == ("h100", (8,))


# Of XLA's own descriptions of these chips (xla/backends/gpu/target_config/specs).
@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("a100-40gb", "core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41"),
        ("a100-40gb", "shared_memory_per_block: 49152 shared_memory_per_block_optin: 166912"),
        ("a100-80gb", "shared_memory_per_core: 167936 l2_cache_size: 41943040"),
        ("h100", "core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98"),
        ("h100", "shared_memory_per_core: 233472 l2_cache_size: 52428800"),
    ],
)
def test_a_gpu_is_described_as_xla_describes_it(name, facts):
    assert facts in chips.CHIPS[name].target


def test_chips_that_people_own():
    """Memory and bandwidth in GB: at most those of the data sheets."""
    sheets = {"a100-40gb": (40, 1_555), "a100-80gb": (80, 2_039), "l4": (24, 300),
              "t4": (16, 320), "rtx4090": (24, 1_008)}  # fmt: skip
    for name, (memory, bandwidth) in sheets.items():
        chip = chips.CHIPS[name]
        assert 0.9 * memory <= chip.memory / 1e9 <= memory
        assert f"memory_bandwidth: {bandwidth * 10**9} " in chip.target
        assert chips.parse(f"{name}:1") == (name, (1,))


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121), ("TPU v5 lite", 197), ("TPU v5p", 459), ("TPU v6 lite", 918),
        ("cpu", 0), ("NVIDIA L40S", 0), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 0), ("", 0),
    ],
)  # fmt: skip
def test_peak_flops_by_the_name_of_a_device(kind, teraflops):
    assert chips.peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v5e:0x4", "v9:1", "h100:2x4", "v5e:1x1x1x1"])
def test_a_wrong_topology_is_one_line(name):
    with pytest.raises(ValueError, match=r"^--topology .*, got '.*'$"):
        chips.parse(name)


def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs libtpu, .* install -e '\.\[compile-tpu\]' in "):
        chips.set_environment("v5e:2x2")
    with pytest.raises(ValueError, match=r"needs jax_plugins\.xla_cuda12, .*\[compile-cuda\]"):
        chips.set_environment("h100:8")


def _compiled(path, topology: str, *flags: str) -> None:
    """Have launch/compile.py write the figures of `micro`, and check them."""
    done = launch(
        "launch/compile.py", "--config=configs/grpo.py:micro", f"--topology={topology}",
        f"--json={path}", "--programs=prefill,decode 1,update", "--config.rollout.row_buckets=1",
        *flags, XLA_FLAGS="", ALLOW_MULTIPLE_LIBTPU_LOAD="true",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["program"]: row for row in json.loads(path.read_text())["programs"]}
    assert list(rows) == ["prefill", "prefill short", "decode 128 x 1", "update"]
    assert all(name in done.stdout for name in rows)
    memory = chips.CHIPS[chips.parse(topology)[0]].memory
    for row in rows.values():
        assert 0 < row["arguments"] < row["peak"] <= row["needed"] < memory
        assert row["flops"] > 0
        assert row["seconds_to_compile"] > 0


@LIBTPU
@pytest.mark.parametrize(
    ("topology", "flags"),
    [
        pytest.param(
            "v5e:1x1", ["--config.lora.rank=4", "--config.model.remat=True"], marks=pytest.mark.slow
        ),
        ("v5e:2x2", []),
    ],
)
def test_compile_for_tpus(tmp_path, topology, flags):
    _compiled(tmp_path / "figures.json", topology, *flags)


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("CUDA_PLUGIN_DIR"), reason="see docs/scaling.md")
def test_compile_for_gpus(tmp_path):
    _compiled(tmp_path / "figures.json", "h100:2")
