"""The files that start runs on rented machines and in Kubernetes, as their own tools read them."""

import shlex

import pytest
import yaml
from small_runs import ROOT

LAUNCH = ROOT / "launch"


def test_a_jobset_is_what_jax_looks_for():
    """One indexed job, whose pods may be listed: so JAX finds process 0 and each one's number."""
    role, account, binding, jobset = yaml.safe_load_all((LAUNCH / "jobset.yaml").read_text())
    reads = {name for rule in role["rules"] for name in rule["resources"]}
    assert {"pods", "services", "jobs"} <= reads
    names = {x["metadata"]["name"] for x in (role, account, binding)}
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["completionMode"]) == (1, "Indexed")
    assert spec["parallelism"] == spec["completions"]
    assert names == {spec["template"]["spec"]["serviceAccountName"]}
    (container,) = spec["template"]["spec"]["containers"]
    _check_command([*container["command"], *container["args"]])
    assert "--coordinator=auto" in container["command"]
    volumes = {x["name"] for x in spec["template"]["spec"]["volumes"]}
    assert volumes == {x["name"] for x in container["volumeMounts"]}


def test_a_sky_task_is_read_by_sky(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCH / "sky.yaml"))
    (resources,) = task.resources
    assert (resources.use_spot, resources.accelerators) == (True, {"H100": 1})
    assert list(task.storage_mounts) == ["/runs"]


def test_a_sky_task_runs_the_trainer():
    task = yaml.safe_load((LAUNCH / "sky.yaml").read_text())
    line = task["run"].splitlines()[-1]
    for name, value in task["envs"].items():
        line = line.replace(f"${name}", value)
    _check_command(shlex.split(line)[1:])


def _check_command(words: list[str]) -> None:
    """Check that a command trains, on a preset that exists, into the volume."""
    assert words[:2] == ["python", "launch/train.py"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in words[2:])
    path, preset = flags["config"].split(":")
    assert f"def {preset}(" in (ROOT / path).read_text()
    assert flags["workdir"].startswith("/runs/")
