"""The table of metrics, and `metrics.jsonl` over kills and resumes."""

import json
import logging
import math

import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax.telemetry.metrics import MetricsLog, read_metrics


def open_log(workdir):
    return MetricsLog(workdir, total_steps=96, tracker="none", config={"seed": 0})


def steps(workdir):
    return [record["step"] for record in read_metrics(workdir)]


# Names --------------------------------------------------------------------------------------


def test_unknown_names_and_arrays_are_refused(tmp_path):
    with open_log(tmp_path) as log:
        with pytest.raises(ValueError, match=r"got 'reward/meen': add it to METRICS of telemetry"):
            log.write(1, 1, {"reward/meen": 1.0})
        with pytest.raises(ValueError, match=r"'reward/mean' must be a scalar, got shape \(2,\)"):
            log.write(1, 1, {"reward/mean": np.zeros(2)})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


# JSONL --------------------------------------------------------------------------------------


def test_a_record_is_one_json_object_a_step(tmp_path):
    with open_log(tmp_path) as log:
        log.write(1, 1, {"time/step": np.float32(0.1), "reward/mean": jnp.float32(0.5)})
        log.write(2, 1, {"rollout/tokens_generated": np.int64(3_000_000_000)})
        # On disk before the next step starts, and so before a kill.
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
    record = json.loads(text, parse_constant=pytest.fail)
    assert record["policy/kl"] is None
    assert record["nonfinite"] == {"policy/kl": "nan", "policy/loss": "-inf"}
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back.pop("policy/kl"))
    assert back == {"step": 1, "epoch": 1, "reward/mean": 1.0, "policy/loss": -math.inf}


def test_metrics_of_an_older_version_have_their_present_names(tmp_path):
    old = {"step": 1, "epoch": 1, "time/extend": 0.5, "rollout/kept_noise": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(old) + "\n")
    assert read_metrics(tmp_path) == [
        {"step": 1, "epoch": 1, "time/prefill": 0.5, "rollout/reused_noise": 1.0}
    ]


def test_steps_must_grow(tmp_path):
    with open_log(tmp_path) as log:
        log.write(2, 1, {"reward/mean": 0.5})
        with pytest.raises(ValueError, match=r"step must be > 2, .* got 2; call restore"):
            log.write(2, 1, {"reward/mean": 0.5})
    with open_log(tmp_path) as log, pytest.raises(ValueError, match="step must be > 2"):
        log.write(1, 1, {"reward/mean": 0.5})


def test_restore_forgets_later_steps_and_a_torn_line(tmp_path):
    assert read_metrics(tmp_path) == []
    with open_log(tmp_path) as log:
        for step in range(1, 6):
            log.write(step, 1, {"reward/mean": step / 10})
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step": 6, "epo')
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    with open_log(tmp_path) as log:
        log.restore(3)
        assert path.read_bytes().endswith(b"}\n")
        log.write(4, 2, {"reward/mean": 0.9})
    back = [(r["step"], r["epoch"], r["reward/mean"]) for r in read_metrics(tmp_path)]
    assert back == [(1, 1, 0.1), (2, 1, 0.2), (3, 1, 0.3), (4, 2, 0.9)]


def test_restore_warns_of_missing_steps_only(tmp_path, caplog):
    with open_log(tmp_path) as log, caplog.at_level(logging.WARNING):
        for _ in range(2):
            log.restore(0)
            log.write(1, 1, {"reward/mean": 0.5})
        assert steps(tmp_path) == [1]
        assert not caplog.records
        log.restore(3)
        (tmp_path / "metrics.jsonl").write_text("")
        log.restore(3)
    assert "ends at step 1, the checkpoint is from step 3" in caplog.text
    assert "metrics.jsonl is empty, the checkpoint is from step 3" in caplog.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"st', "must be JSON: "),
        ('{"step": 2}', "must have the field 'epoch'"),
        ('{"step": "2", "epoch": 1}', "must have a whole number >= 0 as 'step', got '2'"),
        ('{"step": 2, "epoch": null}', "must have a whole number >= 0 as 'epoch', got None"),
        ('{"step": 2, "epoch": 1, "time/step": "1"}', "must have a number as 'time/step', got '1'"),
        ('{"step": 2, "epoch": 1, "policy/kl": null}', "must have a number as 'policy/kl'"),
        ('{"step": 2, "epoch": 1, "policy/kl": true}', "must have a number as 'policy/kl'"),
        ('{"step": 2, "epoch": 1, "policy/kl": 1' + "0" * 400 + "}", "must have a number as"),
        ('{"step": 2, "epoch": 1, "nonfinite": [1]}', "values in 'nonfinite': "),
        ('{"step": 2, "epoch": 1, "nonfinite": {"policy/kl": "x"}}', "values in 'nonfinite': "),
        ('{"step": 1, "epoch": 1}', "must be of a later step than the line before"),
    ],
)
def test_damage_before_the_last_line_is_named(tmp_path, line, message):
    """A run that reads it for its report, and one that resumes with it."""
    whole = ['{"step": 1, "epoch": 1}', line, '{"step": 3, "epoch": 1}', ""]
    (tmp_path / "metrics.jsonl").write_text("\n".join(whole))
    for read in (read_metrics, open_log):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path / 'metrics.jsonl'}: line 2 ")
        assert "\n" not in str(caught.value)
