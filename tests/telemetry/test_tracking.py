"""wandb: the mode, the values, and failures that do not stop a run."""

import subprocess
import sys
import time
import types

import pytest

from specrl_jax.telemetry.metrics import MetricsLog, read_metrics
from specrl_jax.telemetry.tracking import WandbRun, resolve_wandb_mode


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_auto_is_offline_unless_logged_in(logged_out, monkeypatch):
    assert resolve_wandb_mode("auto") == "offline"
    logged_out.write_text("machine other.example login user password secret\n")
    assert resolve_wandb_mode("auto") == "offline"
    logged_out.write_text("machine api.wandb.ai login user password secret\n")
    assert resolve_wandb_mode("auto") == "online"
    assert resolve_wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_wandb_mode("auto") == "off"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve_wandb_mode("auto") == "offline"
    monkeypatch.delenv("WANDB_MODE")
    logged_out.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert resolve_wandb_mode("auto") == "online"


class FakeRun:
    def __init__(self, logged, broken):
        self.logged, self.broken = logged, broken

    def log(self, values, step):
        if self.broken:
            raise RuntimeError("lost the service\nsecond line")
        self.logged.append((step, values))

    def finish(self):
        self.logged.append("finished")


def fake_wandb(monkeypatch, *, init_fails=(), broken=False):
    calls, logged = [], []

    def init(**options):
        calls.append(options)
        if options["mode"] in init_fails:
            raise TimeoutError("no network")
        return FakeRun(logged, broken)

    module = types.SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls, logged


def test_wandb_gets_the_same_values_and_a_stable_id(tmp_path, monkeypatch):
    calls, logged = fake_wandb(monkeypatch)
    for step in (1, 2):
        run = WandbRun(tmp_path, "online", "test", {"seed": 0})
        run.log(step, 1, {"reward/mean": 0.5})
        run.close()
    assert logged == [
        (1, {"epoch": 1, "reward/mean": 0.5}),
        "finished",
        (2, {"epoch": 1, "reward/mean": 0.5}),
        "finished",
    ]
    assert calls[0]["id"] == calls[1]["id"] == (tmp_path / "wandb_id").read_text()
    assert calls[0]["resume"] == "allow"
    assert calls[0]["dir"] == str(tmp_path)
    assert calls[0]["config"] == {"seed": 0}


def test_without_a_network_an_online_run_becomes_offline(tmp_path, monkeypatch, caplog):
    calls, logged = fake_wandb(monkeypatch, init_fails={"online"})
    WandbRun(tmp_path, "online", "test", {}).log(1, 1, {})
    assert [call["mode"] for call in calls] == ["online", "offline"]
    assert logged[0] == (1, {"epoch": 1})
    assert "no network" in caplog.text


@pytest.mark.parametrize("failure", ["missing", "init", "log"])
def test_wandb_failures_are_one_line_and_the_step_is_written(
    tmp_path, monkeypatch, caplog, failure
):
    fake_wandb(monkeypatch, init_fails={"offline"} if failure == "init" else (), broken=True)
    if failure == "missing":
        monkeypatch.setitem(sys.modules, "wandb", None)
    options = {"total_steps": 96, "run_name": "test", "config_dict": {}}
    with MetricsLog(tmp_path, wandb_mode="offline", **options) as log:
        log.write(1, 1, {"reward/mean": 0.5})
        log.write(2, 1, {"reward/mean": 0.5})
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_real_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    start = time.monotonic()
    script = (
        "import pathlib, sys; from specrl_jax.telemetry.tracking import WandbRun\n"
        "run = WandbRun(pathlib.Path(sys.argv[1]), 'offline', 'a', {'seed': 0})\n"
        "run.log(1, 1, {'reward/mean': 0.5}); run.close()\n"
    )
    command = [sys.executable, "-c", script, tmp_path]
    # In a process of its own: wandb's hooks stay out of the other tests.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    run_id = (tmp_path / "wandb_id").read_text()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))) == 1
    assert time.monotonic() - start < 90  # an attempt to reach the network blocks for longer
