import json
import logging
import math
import os
import re
import subprocess
import sys
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.telemetry import console, tracking
from specrl_jax.telemetry.metrics import METRICS, RENAMED_METRICS, MetricsLog, read_metrics

VALUES = {
    "reward/mean": 0.6123,
    "reward/eval": 0.7,
    "rollout/reuse_fraction": 0.8312,
    "rollout/prefix_len_mean": 41.24,
    "time/rollout": 1.234,
    "time/verify": 0.2,
    "time/decode": 0.98,
    "time/update": 0.4,
    "time/step": 2.0,
}


def open_log(workdir, **overrides):
    options = {
        "total_steps": 96,
        "wandb_mode": "off",
        "run_name": "test",
        "config_dict": {"seed": 0},
        "console": False,
    }
    return MetricsLog(workdir, **options | overrides)


def steps(workdir):
    return [record["step"] for record in read_metrics(workdir)]


# The table ----------------------------------------------------------------------------------


def test_every_metric_has_one_meaning_and_a_known_unit():
    meanings = [metric.meaning for metric in METRICS.values()]
    assert len(set(meanings)) == len(meanings)
    units = {"reward", "count", "1", "tokens", "nats", "epochs", "seconds", "steps", "row steps"}
    units |= {"GiB"}
    assert {metric.unit for metric in METRICS.values()} == units
    assert all(metric.unit == "seconds" for name, metric in METRICS.items() if "time/" in name)


def test_unknown_names_and_arrays_are_refused(tmp_path):
    with open_log(tmp_path) as log:
        with pytest.raises(
            ValueError, match=r"got 'reward/meen': define it in telemetry.metrics.METRICS"
        ):
            log.write(1, 1, {"reward/meen": 1.0})
        with pytest.raises(ValueError, match=r"'reward/mean' must be a scalar, got shape \(2,\)"):
            log.write(1, 1, {"reward/mean": np.zeros(2)})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


@pytest.mark.parametrize(("old", "new"), RENAMED_METRICS.items())
def test_an_old_name_leads_to_the_new_one(tmp_path, old, new):
    assert old not in METRICS
    assert new in METRICS
    with open_log(tmp_path) as log, pytest.raises(ValueError, match=f"it is called '{new}' now"):
        log.write(1, 1, {old: 1.0})
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, old: 2.0}) + "\n")
    assert read_metrics(tmp_path) == [{"step": 1, new: 2.0}]


# JSONL --------------------------------------------------------------------------------------


def test_a_record_is_one_json_object_a_step(tmp_path):
    with open_log(tmp_path) as log:
        log.write(1, 1, {"time/step": np.float32(0.1), "reward/mean": jnp.float32(0.5)})
        log.write(2, 1, {"rollout/tokens_generated": np.int64(3_000_000_000)})
        # On disk before the next step begins, and so before a kill.
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "epoch": 1, "reward/mean": 0.5, "time/step": float(np.float32(0.1))},
        {"step": 2, "epoch": 1, "rollout/tokens_generated": 3_000_000_000},
    ]


def test_nan_and_inf_stay_valid_json(tmp_path):
    values = {"policy/kl": math.nan, "policy/loss": -math.inf, "reward/mean": 1.0}
    with open_log(tmp_path) as log:
        log.write(1, 1, values)
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant):
        raise AssertionError(constant)

    record = json.loads(text, parse_constant=refuse)
    assert record["policy/kl"] is None
    assert record["nonfinite"] == {"policy/kl": "nan", "policy/loss": "-inf"}
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back.pop("policy/kl"))
    assert back == {"step": 1, "epoch": 1, "reward/mean": 1.0, "policy/loss": -math.inf}


def test_steps_must_grow(tmp_path):
    with open_log(tmp_path) as log:
        log.write(2, 1, VALUES)
        with pytest.raises(ValueError, match=r"step must be > 2, .* got 2; call restore"):
            log.write(2, 1, VALUES)
    with open_log(tmp_path) as log, pytest.raises(ValueError, match="step must be > 2"):
        log.write(1, 1, VALUES)


def test_restore_forgets_later_steps_and_a_torn_line(tmp_path):
    with open_log(tmp_path) as log:
        for step in range(1, 6):
            log.write(step, 1, {"reward/mean": step / 10})
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step": 6, "epo')
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    with open_log(tmp_path) as log:
        assert log.restore(3) == 2
        assert path.read_bytes().endswith(b"}\n")
        log.write(4, 2, {"reward/mean": 0.9})
    assert [(r["step"], r["epoch"], r["reward/mean"]) for r in read_metrics(tmp_path)] == [
        (1, 1, 0.1),
        (2, 1, 0.2),
        (3, 1, 0.3),
        (4, 2, 0.9),
    ]


def test_restore_to_nothing_empties_the_file(tmp_path, caplog):
    with open_log(tmp_path) as log:
        assert log.restore(0) == 0
        log.write(1, 1, VALUES)
        assert log.restore(0) == 1
        log.write(1, 1, VALUES)
    assert steps(tmp_path) == [1]
    assert not caplog.records


def test_missing_steps_are_warned_of(tmp_path, caplog):
    with open_log(tmp_path) as log, caplog.at_level(logging.WARNING):
        log.write(1, 1, VALUES)
        log.restore(3)
    assert "ends at step 1, the checkpoint is of step 3" in caplog.text


def test_damage_before_the_last_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "epoch": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2 must be a JSON object"):
        read_metrics(tmp_path)


def test_every_written_step_survives_kill_9(tmp_path):
    script = (
        "import sys; from specrl_jax.telemetry.metrics import MetricsLog\n"
        "log = MetricsLog(sys.argv[1], total_steps=9, wandb_mode='off', run_name='',"
        " config_dict={}, console=False)\n"
        "for step in range(1, 10**9):\n"
        "    log.write(step, 1, {'reward/mean': step / 7}); print(step, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE)
    said = 0
    while said < 20:
        said = int(child.stdout.readline())
    child.kill()
    rest = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    said = int(rest[-1]) if rest else said
    found = steps(tmp_path)
    assert found == list(range(1, len(found) + 1))
    assert said <= len(found) <= said + 1


def test_no_file_is_no_records(tmp_path):
    assert read_metrics(tmp_path) == []


# Console ------------------------------------------------------------------------------------


def test_console_line_is_aligned_under_its_heading(tmp_path, capsys, monkeypatch):
    clock = iter([100.0, 101.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with open_log(tmp_path, console=True) as log:
        log.write(1, 1, VALUES)
        log.write(12, 1, {"reward/mean": 1.0})
    header, first, second = lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "step epoch reward eval reuse prefix rollout verify decode update left",
        "1/96 1 0.612 0.700 83.1% 41.2 1.23s 0.20s 0.98s 0.40s 3:10",
        "12/96 1 1.000 - - - - - - - 1:24",
    ]
    assert len(header) == len(first) == len(second) <= 100
    assert header.index("prefix") + len("prefix") == first.index("41.2") + len("41.2")


def test_time_left_counts_this_process_only(tmp_path, capsys, monkeypatch):
    clock = iter([100.0, 103.0, 106.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with open_log(tmp_path, console=True) as log:
        for step in (50, 51, 52):  # resumed at 50; 44 steps of 3 s are left after step 52
            log.write(step, 1, {})
    assert capsys.readouterr().out.split()[-1] == "2:12"


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (59.7, "1:00"), (3723, "1:02:03")]
)
def test_durations(seconds, text):
    assert console.format_duration(seconds) == text


def test_a_terminal_gets_a_progress_bar_and_a_pipe_does_not(tmp_path):
    pty = pytest.importorskip("pty")
    script = (
        "import sys; from specrl_jax.telemetry.metrics import MetricsLog\n"
        "with MetricsLog(sys.argv[1], total_steps=4, wandb_mode='off', run_name='', config_dict={})"
        " as log:\n"
        "    log.write(1, 1, {'reward/mean': 0.25, 'time/step': 2.0}); log.write(2, 1, {})\n"
    )
    command = [sys.executable, "-c", script]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    piped = subprocess.check_output([*command, tmp_path / "a"], env=environment).decode()
    assert "0.250" in piped
    assert "\x1b" not in piped

    ours, theirs = pty.openpty()
    child = subprocess.Popen([*command, tmp_path / "b"], stdout=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the terminal was closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    assert child.wait() == 0
    text = shown.decode()
    assert "0.250" in text
    assert "2/4" in text
    assert re.search(r"\d:\d\d left", text)


# wandb --------------------------------------------------------------------------------------


@pytest.fixture
def logged_out(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def test_auto_is_offline_unless_logged_in(logged_out, monkeypatch):
    assert tracking.resolve_wandb_mode("auto") == "offline"
    logged_out.write_text("machine other.example login user password secret\n")
    assert tracking.resolve_wandb_mode("auto") == "offline"
    logged_out.write_text("machine api.wandb.ai login user password secret\n")
    assert tracking.resolve_wandb_mode("auto") == "online"
    assert tracking.resolve_wandb_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.resolve_wandb_mode("auto") == "off"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tracking.resolve_wandb_mode("auto") == "offline"


def test_a_key_in_the_environment_is_a_login(logged_out, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert tracking.resolve_wandb_mode("auto") == "online"


def test_unknown_wandb_mode(tmp_path):
    with pytest.raises(ValueError, match=r"log.wandb must be one of off, offline, .*, got 'on'"):
        open_log(tmp_path, wandb_mode="on")


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
        with open_log(tmp_path, wandb_mode="online") as log:
            log.write(step, 1, {"reward/mean": 0.5})
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
    with open_log(tmp_path, wandb_mode="online") as log:
        log.write(1, 1, {})
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
    with open_log(tmp_path, wandb_mode="offline") as log:
        log.write(1, 1, VALUES)
        log.write(2, 1, VALUES)
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert steps(tmp_path) == [1, 2]


def test_real_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    start = time.monotonic()
    script = (
        "import sys; from specrl_jax.telemetry.metrics import MetricsLog\n"
        "with MetricsLog(sys.argv[1], total_steps=2, wandb_mode='offline', run_name='a',"
        " config_dict={'seed': 0}, console=False) as log:\n"
        "    log.write(1, 1, {'reward/mean': 0.5})\n"
    )
    command = [sys.executable, "-c", script, tmp_path]
    # In a process of its own: wandb's hooks stay out of the other tests.
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    run_id = (tmp_path / "wandb_id").read_text()
    assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"))) == 1
    assert time.monotonic() - start < 90  # an attempt to reach the network blocks for longer
