"""wandb and TensorBoard: what they are given, and failures that do not stop a run."""

import json
import shutil
import subprocess
import sys
from unittest import mock

import pytest
from recorded_runs import two_epochs, write_run
from small_runs import assert_same_run, interrupt, run_until_killed, small_config

from specrl_jax import train as loop
from specrl_jax.telemetry import tracking
from specrl_jax.telemetry.metrics import MetricsLog, read_metrics
from specrl_jax.telemetry.tracking import SafeTracker


@pytest.fixture(autouse=True)
def logged_out(monkeypatch, tmp_path):
    for name in ("MODE", "API_KEY", "BASE_URL", "NAME", "RUN_GROUP", "TAGS", "PROJECT"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return tmp_path / "netrc"


def fake_wandb(monkeypatch, *, init_fails=(), broken=False):
    """The runs that are started."""
    runs = []

    def init(**options):
        if options["mode"] in init_fails:
            raise TimeoutError("no network")
        run = mock.Mock(options=options, id=options["id"], dir="wandb/run-1/files", url="u.r/l")
        run.settings.mode = options["mode"]
        if broken:
            run.log.side_effect = RuntimeError("lost the service\nsecond line")
        runs.append(run)
        return run

    module = mock.Mock(init=init, Table=lambda columns, data: (columns, data))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_wandb_is_offline_unless_logged_in(logged_out, tmp_path, monkeypatch):
    runs = fake_wandb(monkeypatch)

    def mode():
        SafeTracker("wandb", tmp_path, {})
        return runs[-1].options["mode"]

    assert mode() == "offline"
    logged_out.write_text("machine other.example login user password secret\n")
    assert mode() == "offline"
    logged_out.write_text("machine api.wandb.ai login user password secret\n")
    assert mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert mode() == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    logged_out.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert mode() == "online"


CONFIG = {"seed": 0, "data": {"name": "sums"}, "rollout": {"draft": "tree", "accept": "ratio"}}


def test_what_wandb_is_given(tmp_path, monkeypatch):
    """Values over their own step, their own name, the responses and the report."""
    runs = fake_wandb(monkeypatch)
    folder = write_run(tmp_path / "sweep" / "a", lines=two_epochs())
    (folder / "report.html").write_text("page")
    for step in (4, 2):  # a resume goes back
        tracker = SafeTracker("wandb", folder, CONFIG)
        tracker.log(step, 1, {"reward/mean": 0.5})
        line = tracker.close()
    first, second = runs
    assert line == "wandb: to send this run: wandb sync wandb/run-1"
    second.log.assert_any_call({"step": 2, "epoch": 1, "reward/mean": 0.5})
    second.define_metric.assert_any_call("*", step_metric="step")
    _, rows = second.log.call_args.args[0]["rollouts"]
    assert [(row[0], row[5], row[6]) for row in rows] == [
        (2, "1 3", 0.0), (2, "1 2", 1.0), (5, "1 2", 0.0), (5, "1 2", 1.0)
    ]  # fmt: skip
    assert [row[-1] for row in rows] == [0, 0, 0.5, 1]
    (artifact,) = second.log_artifact.call_args.args
    artifact.add_file.assert_called_with(str(folder / "report.html"))
    assert sys.modules["wandb"].Artifact.call_args.kwargs == {"type": "report"}
    assert second.method_calls[-1] == mock.call.finish()
    options = second.options
    assert options["id"] == first.options["id"] == (folder / "wandb_id").read_text()
    assert options["name"] == f"a-{options['id'][:4]}"
    assert (options["group"], options["tags"]) == ("sweep", ["sums", "tree", "ratio"])
    assert (options["dir"], options["config"]["seed"]) == (str(folder), 0)


def test_wandb_is_given_responses_during_the_run(tmp_path, monkeypatch):
    (run,) = [fake_wandb(monkeypatch)]
    folder = write_run(tmp_path / "a", lines=two_epochs())
    tracker = SafeTracker("wandb", folder, CONFIG)
    for step in (1, 2):  # nothing was recorded of the first
        tracker.log_rollouts(step)
    ((given,), _) = run[0].log.call_args
    assert given["step"] == 2
    columns, rows = given["rollouts"]
    assert [(row[0], row[5]) for row in rows] == [(2, "1 3"), (2, "1 2")]
    assert len(columns) == len(rows[0])
    assert run[0].log.call_count == 1


def test_all_folders_of_a_resumed_offline_run_are_named(tmp_path, monkeypatch):
    """Oldest first, quoted, without those of other runs and those that were sent."""
    runs = fake_wandb(monkeypatch)
    tracker = SafeTracker("wandb", tmp_path, {})
    name = runs[0].id
    folders = [tmp_path / "my run" / f"offline-run-2026010{day}_000000-{name}" for day in range(4)]
    for folder in (*folders, folders[0].with_name("offline-run-20260101_000000-other")):
        folder.mkdir(parents=True)
    (folders[1] / f"run-{name}.wandb.synced").touch()
    runs[0].dir = str(folders[3] / "files")
    kept = " ".join(f"'{folder}'" for folder in (folders[0], folders[2], folders[3]))
    assert tracker.close() == f"wandb: to send this run: wandb sync {kept}"


def test_without_a_network_an_online_run_becomes_offline(tmp_path, monkeypatch, caplog):
    runs = fake_wandb(monkeypatch, init_fails={"online"})
    monkeypatch.setenv("WANDB_MODE", "online")
    SafeTracker("wandb", tmp_path, {}).log(1, 1, {})
    assert [run.options["mode"] for run in runs] == ["offline"]
    runs[0].log.assert_called_once_with({"step": 1, "epoch": 1})
    assert "no network" in caplog.text


def test_a_failed_table_is_one_warning(tmp_path, monkeypatch, caplog):
    fake_wandb(monkeypatch, broken=True)
    folder = write_run(tmp_path / "a", lines=two_epochs())
    with MetricsLog(folder, total_steps=96, tracker="wandb", config={}) as log:
        log.send_rollouts(2)
        log.send_rollouts(5)
    (record,) = caplog.records
    assert "logging responses failed, training continues: 'lost the service'" in record.getMessage()


@pytest.mark.parametrize("failure", ["missing", "init", "log"])
def test_failures_are_one_line_and_the_step_is_written(tmp_path, monkeypatch, caplog, failure):
    fake_wandb(monkeypatch, init_fails={"offline"} if failure == "init" else (), broken=True)
    if failure == "missing":
        monkeypatch.setitem(sys.modules, "wandb", None)
    with MetricsLog(tmp_path, total_steps=96, tracker="wandb", config={}) as log:
        log.write(1, 1, {"reward/mean": 0.5})
        log.write(2, 1, {"reward/mean": 0.5})
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]


def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch):
    tracking.check_installed("none")
    monkeypatch.setattr(tracking.TensorBoard, "module", "no_such_module")
    rule = r"^log.tracker = tensorboard needs no_such_module: .* -e '\.\[tensorboard\]' in "
    with pytest.raises(ValueError, match=rule):
        tracking.check_installed("tensorboard")


def test_wandb_offline_writes_all(tmp_path):
    """The metrics, the table and the report are in the run's file."""
    pytest.importorskip("wandb")
    folder = write_run(tmp_path / "sweep" / "a", lines=two_epochs())
    (folder / "report.html").write_text("page")
    script = """
import pathlib, sys
from specrl_jax.telemetry.tracking import SafeTracker
tracker = SafeTracker('wandb', pathlib.Path(sys.argv[1]), {'seed': 7})
tracker.log(1, 1, {'reward/mean': 0.5})
tracker.log_rollouts(2)
print(tracker.close())

import wandb
wandb.teardown()  # until all is on the disk
"""
    # In a process of its own: wandb's hooks stay out of the other tests.
    command = [sys.executable, "-c", script, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr
    assert done.stdout.startswith(
        f"wandb: to send this run: wandb sync {folder}/wandb/offline-run-"
    )
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert len([*file.parent.glob("files/media/table/rollouts_*.table.json")]) == 2
    for written in (b"reward/mean", b"run_table", b"report"):
        assert written in file.read_bytes()


def test_tensorboard_is_read_back(tmp_path):
    """By TensorBoard's own reader; a resumed run writes over the steps that it computes again."""
    pytest.importorskip("tensorboardX")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = write_run(tmp_path / "a", lines=two_epochs())
    for first, values in ((1, (0.1, 0.2, 0.3)), (3, (0.5, 0.75))):
        tracker = SafeTracker("tensorboard", folder, CONFIG)
        for step, value in enumerate(values, start=first):
            tracker.log(step, 1, {"reward/mean": value})
            tracker.log_rollouts(step)
        line = tracker.close()
    assert line == f"tensorboard: to see this run: tensorboard --logdir={folder}/tensorboard"
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    points = [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.5), (4, 0.75)]
    assert events.Scalars("data/epoch")[0].value == 1
    texts = {tag: [x.tensor_proto.string_val[0].decode() for x in events.Tensors(tag)]
             for tag in events.Tags()["tensors"]}  # fmt: skip
    config = json.loads(texts["config/text_summary"][-1])
    assert config | CONFIG == config
    assert set(config["git"]) <= {"commit", "dirty"}
    rollouts = [x for tag, values in texts.items() if tag.startswith("rollouts/") for x in values]
    assert any("100% of the tokens reused\n\n    2 1>\n    1 2" in text for text in rollouts)


MOVED = {"train.steps": 4, "checkpoint.every": 1, "log.tracker": "wandb"}


def _killed(workdir):
    interrupt(MetricsLog, "write", 3)
    loop.train(small_config(MOVED), workdir)


@pytest.mark.slow
def test_a_run_that_comes_back_on_another_machine_is_one_run(mesh, tmp_path, capsys, monkeypatch):
    """It was killed; its work directory is found in another place, as from a bucket."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_until_killed(_killed, tmp_path / "first" / "run")
    moved = tmp_path / "second" / "run"
    shutil.copytree(tmp_path / "first" / "run", moved)
    shutil.rmtree(tmp_path / "first")
    loop.train(small_config(MOVED), moved)
    plain = tmp_path / "plain"
    loop.train(small_config(MOVED | {"log.tracker": "none"}), plain)
    assert_same_run(moved, plain, 4)
    files = list(moved.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # the name has the run's id
    assert capsys.readouterr().out.count(str(moved / "wandb" / "offline-run-")) == 2
