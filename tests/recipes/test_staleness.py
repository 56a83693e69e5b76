"""Rollouts ahead of the update: by which weights, on which mesh, resumed, and after errors."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import pytest
from small_runs import assert_same_run, one_line, records, small_config

from specrl_jax import train as loop
from specrl_jax.process.stop import StopRequest
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.telemetry.records import read_rollouts, recorded_steps
from specrl_jax.training import collect
from specrl_jax.training.build import build, init_state
from specrl_jax.training.learn import update_policy

STEPS = 6
SMALL = {"train.steps": STEPS, "rollout.adaptive": False, "rollout.row_buckets": 1}
RECORDED = SMALL | {"log.rollouts": 1.0, "evaluate.every": 3}
# Rollouts leave groups and rows to the next one.
WAITING = {
    "rollout.draft": "none", "data.prompts": 80, "data.options.max_numbers": 2,
    "data.prompt_len": 6, "updates.learning_rate": 1e-3, "reward.extract": "",
    "reward.name": "small_runs:score_first_letter",
}  # fmt: skip


class StopAfter(StopRequest):
    """A stop request that comes after this many steps."""

    def __init__(self, steps: int):
        super().__init__()
        self._left = steps

    def agreed(self) -> bool:
        self.name = "" if self._left else "SIGTERM"
        self._left -= 1
        return bool(self.name)


def _train(workdir, mesh, changes, stop_after: int = -1, algorithm: str = "grpo"):
    with jax.set_mesh(mesh), StopAfter(stop_after) as stop:
        loop.train(small_config(changes, algorithm), workdir, stop=stop, hooks=StandardHooks())
    return workdir


@pytest.fixture(scope="module")
def run_ahead(tmp_path_factory, make_mesh):
    """run_ahead(N, devices=1) → a run of staleness N, in turn with updates; each is made once."""

    @functools.cache
    def do(staleness: int, devices: int = 1):
        workdir = tmp_path_factory.mktemp("ahead") / "run"
        changes = RECORDED | {"rollout.staleness": staleness}
        return _train(workdir, make_mesh(devices, 1, 1), changes)

    return do


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_batch_is_sampled_by_the_weights_of_so_many_updates_before(
    run_ahead, make_mesh, staleness
):
    """Against a loop without a queue, which keeps the weights after every update."""
    config = small_config(RECORDED | {"rollout.staleness": staleness})
    with jax.set_mesh(make_mesh(1, 1, 1)):
        run, params = build(config)
        state = init_state(run, params)
        weights = [jax.tree.map(jnp.copy, state.rollout_weights(run))]
        expected = []
        with run.responder.pool:
            for step in range(1, STEPS + 1):
                sampler = weights[max(0, step - 1 - staleness)]
                batch, _ = collect.collect(run, state.rollout, sampler)
                batch = dataclasses.replace(batch, stale=staleness > 0 and step > 1)
                state.step = step
                expected.append(update_policy(run, state, batch) | batch.metrics)
                weights.append(jax.tree.map(jnp.copy, state.rollout_weights(run)))
    lines = records(run_ahead(staleness))[1:]
    generated = 0
    for step, (line, values) in enumerate(zip(lines, expected, strict=True), start=1):
        known = {k: v for k, v in values.items() if not k.startswith(("time/", "compile/"))}
        line.pop("reward/eval", None)
        stale = line.pop("rollout/stale_fraction", 0)
        assert stale == (staleness > 0 and step > 1)
        generated += values["rollout/tokens_generated"]
        assert line.pop("data/tokens_generated") == generated
        assert line == {"step": step, "epoch": line["epoch"]} | known
    assert [line["epoch"] for line in lines] == [1, 1, 2, 2, 3, 3]


def test_a_run_that_is_made_longer_begins_with_batches_of_its_own_weights(tmp_path, make_mesh):
    """As a run at its start: its first batch is not stale, the next ones are."""
    workdir = tmp_path / "run"
    for steps in (2, 4):
        changes = SMALL | {"rollout.staleness": 1, "train.steps": steps}
        _train(workdir, make_mesh(1, 1, 1), changes)
    stale = [line.get("rollout/stale_fraction", 0) for line in records(workdir)[1:]]
    assert stale == [0, 1, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "algorithm"),
    [({"rollout.staleness": 2}, "dapo"), ({"rollout.staleness": 1, "rollout.partial": 2}, "grpo")],
    ids=["groups", "partial"],
)
def test_a_resumed_run_is_the_same_run(tmp_path, make_mesh, changes, algorithm):
    changes = SMALL | WAITING | changes
    mesh = make_mesh(1, 1, 1)
    whole = _train(tmp_path / "whole", mesh, changes, algorithm=algorithm)
    stopped = _train(tmp_path / "stopped", mesh, changes, stop_after=3, algorithm=algorithm)
    assert [line["step"] for line in records(stopped)] == [0, 1, 2, 3]
    _train(stopped, mesh, changes, algorithm=algorithm)
    assert_same_run(stopped, whole, STEPS)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rollouts_on_their_own_devices_are_the_same_run(run_ahead, tmp_path, make_mesh, devices):
    """Also over a stop and a resume; nothing is compiled after the first step of either."""
    changes = RECORDED | {"rollout.staleness": 2, "mesh.rollout_devices": devices}
    workdir = tmp_path / "run"
    _train(workdir, make_mesh(devices, 1, 1), changes, stop_after=3)
    assert recorded_steps(workdir) == [1, 2, 3, 4, 5]  # two batches wait
    _train(workdir, make_mesh(devices, 1, 1), changes)
    other = run_ahead(2, devices)
    assert_same_run(workdir, other, STEPS)
    for kind in ("step", "eval"):
        for step in recorded_steps(other, kind):
            assert read_rollouts(workdir, step, kind) == read_rollouts(other, step, kind)
    for line in records(workdir, times=True):
        if line["step"] not in (0, 1, 4):
            assert line["compile/built"] == line["compile/read"] == 0


def test_an_error_of_the_rollouts_thread_ends_the_run(tmp_path, make_mesh, monkeypatch):
    """In its own line, after the updates of the batches before it; and the thread ends."""
    collect_metrics = collect.collect_metrics
    names = []

    def fail(run, state, batch, rollouts):
        names.append(threading.current_thread().name)
        if state.step == 5:
            raise ValueError("no batch")
        return collect_metrics(run, state, batch, rollouts)

    monkeypatch.setattr(collect, "collect_metrics", fail)
    changes = SMALL | {"rollout.staleness": 1, "mesh.rollout_devices": 1}
    with pytest.raises(ValueError, match="no batch") as error:
        _train(tmp_path / "run", make_mesh(1, 1, 1), changes)
    assert one_line(error) == "no batch"
    assert [line["step"] for line in records(tmp_path / "run")] == [0, 1, 2, 3, 4]
    assert all(name.startswith("rollouts") for name in names)
    assert not [x for x in threading.enumerate() if x.name.startswith("rollouts")]
