"""Names of topologies, missing compilers, and the command."""

import importlib.util
import json

import pytest
from small_runs import launch

from specrl_jax.accelerators import chips

CONFIG = "--config=configs/grpo.py:micro"
LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[compile-tpu]'"
)


def test_parse():
    assert chips.parse("v5e:4x4") == ("v5e", (4, 4))
    assert chips.parse("h100:8") == ("h100", (8,))


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v5e:0x4", "v9:1", "h100:2x4", "v5e:1x1x1x1"])
def test_a_wrong_topology_is_one_line(name):
    with pytest.raises(ValueError, match=r"^--topology .*, got '.*'$"):
        chips.parse(name)


def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs libtpu, .* pip install 'specrl_jax\[compile-tpu"):
        chips.set_environment("v5e:2x2")
    with pytest.raises(ValueError, match=r"needs jax_plugins\.xla_cuda12, .*\[compile-cuda\]"):
        chips.set_environment("h100:8")


@LIBTPU
@pytest.mark.slow
@pytest.mark.parametrize(("preset", "topology"), [("tiny", "1x1"), ("micro", "2x2")])
def test_compile_for_tpus(tmp_path, preset, topology):
    path = tmp_path / "figures.json"
    flags = f"--config=configs/grpo.py:{preset}", f"--topology=v5e:{topology}", f"--json={path}"
    done = launch("launch/compile.py", *flags, XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    rows = {row["program"]: row for row in json.loads(path.read_text())["programs"]}
    assert {"prefill", "verify_tries", "decode", "fewer_rows", "update"} <= rows.keys()
    assert not any("error" in row for row in rows.values())
    assert all(row["total"] < chips.CHIPS["v5e"].memory for row in rows.values())
    assert 0 < rows["decode"]["each"]["seconds"] < 1e-3
